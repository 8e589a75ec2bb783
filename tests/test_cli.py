"""The command line as a user meets it."""

from __future__ import annotations

import csv
import errno
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import warnings
import zipfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import netmoments as nm
from netmoments import cli

ROOT = Path(__file__).parent.parent
COMMANDS = ("report", "attack", "relus", "accuracy", "download", "doctor")
QUICK = ["--images", "12", "--rare", "1", "--samples", "300", "--attacks", "0"]
QUICK_ATTACK = ["--images", "3", "--iterations", "60", "--polish", "20", "--samples", "40"]
ATTACK_FILES = {"attack.html", "attack.json", "images.csv", "pictures.png", "noise.npz"}
FACTORY = """
from torch import nn
def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 3))
"""


class Said(NamedTuple):
    """What a command ended with and wrote, white space made single; `everything` is out and err."""

    status: int
    out: str
    err: str

    @property
    def everything(self) -> str:
        return f"{self.out} {self.err}"


Run = Callable[..., Said]


@pytest.fixture
def run(monkeypatch, tmp_path, capsys) -> Iterator[Run]:
    """A command in this process, in an empty folder, with a terminal of 100 columns and no data anywhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NETMOMENTS_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    modules = set(sys.modules)

    def call(*arguments: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["netmoments", *map(str, arguments)])
        status: object = 0
        with warnings.catch_warnings():
            warnings.simplefilter("default")  # as Python has it; pytest makes them errors
            try:
                cli.main()
            except SystemExit as stopped:
                status = stopped.code
        said = capsys.readouterr()
        return Said(int(status or 0), " ".join(said.out.split()), " ".join(said.err.split()))

    yield call
    for name in set(sys.modules) - modules:  # what factories imported lies in a folder that is gone
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def in_a_process(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """A real one, with nothing in its environment but where to find the package."""
    environment = {"COLUMNS": "100", "PATH": "", "HOME": "/nonexistent", "PYTHONPATH": str(ROOT)}
    environment |= {name: value for name, value in os.environ.items() if name.endswith("_NUM_THREADS")}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, env=environment, cwd=cwd
    )


def test_help_imports_nothing_heavy():
    """Which is what makes it instant: torch alone takes seconds."""
    result = in_a_process("-X", "importtime", "-m", "netmoments", "--help")
    assert result.returncode == 0
    for command in COMMANDS:
        assert re.search(rf"│ {command} ", result.stdout)
    for command in ("train", "engine", "reproduce"):  # python -m reproduction
        assert not re.search(rf"│\s{command}\s", result.stdout)
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in result.stderr.splitlines()}
    assert {"cyclopts", "netmoments"} <= imported
    assert not imported & {"torch", "numpy", "matplotlib", "PIL", "sklearn", "jinja2", "safetensors", "pyarrow", "ray"}
    assert "markdown_it" not in imported  # a quarter of the time


def test_help_is_one_screen_by_what_people_want(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    cli.app(["--help"], result_action="return_value")
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert len(lines) <= 23, "one screen of 24 rows, with the next prompt"
    assert max(map(len, lines)) <= 80
    places = [
        text.index(f"│ {command} ") for command in ("report", "attack", "accuracy", "relus", "doctor", "download")
    ]
    assert places == sorted(places)
    questions = [text.index(group.name) for group in (cli.NOISE, cli.NETWORK, cli.MACHINE)]
    assert questions == sorted(questions)
    examples = re.findall(r"^  netmoments (.*)$", text, re.M)
    assert len(examples) == 3
    for line in examples:
        example_parses(line)


def example_parses(line: str) -> None:
    arguments = shlex.split(line)
    if "--help" not in arguments:
        cli.app.parse_args(arguments, exit_on_error=False, print_error=False)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example(run, command):
    said = run(command, "--help").out.replace("│", " ")
    (line,) = re.findall(rf"Example: netmoments ({command}.*?) (?:╭|$)", f"{said} ")
    example_parses(line)


def test_the_doctor_says_what_is_here(run):
    said = run("doctor")
    assert said.status == 0, said.err
    assert f"netmoments {nm.__version__}, torch {torch.__version__}" in said.out
    for part in ("data, for", "report, for", "sweeps, for", "CPU: ", "GPU: ", "channels last: "):
        assert part in said.out


def test_the_extras_are_those_of_the_package():
    given = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, (packages, _) in cli.EXTRAS.items():
        assert sorted(packages) == sorted(re.split(r"[<>=~]", wanted)[0] for wanted in given[extra])


PAGES = 'for pages and pictures: pip install "netmoments[report]"'
PARTS = 'for reports of many images in parts, Ray clusters: pip install "netmoments[sweeps]"'
NEEDED = {
    "jinja2": (["report"], f"netmoments report needs jinja2 {PAGES}"),
    "PIL": (["report"], f"netmoments report needs PIL {PAGES}"),
    "matplotlib": (["attack"], f"netmoments attack needs matplotlib {PAGES}"),
    "pyarrow": (["report", "--engine", "local"], f"netmoments report --engine local needs pyarrow {PARTS}"),
    "ray": (["report", "--engine", "ray"], f"netmoments report --engine ray needs ray {PARTS}"),
    "sklearn": (["report"], 'the digits come with scikit-learn: pip install "netmoments[data]"'),
}


@pytest.mark.parametrize("package", NEEDED)
def test_what_a_command_needs_is_said_before_the_work(run, tmp_path, monkeypatch, package):
    (command, *options), message = NEEDED[package]
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == package else find_spec(name))
    if package == "sklearn":
        monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    said = run(command, "digits", "digits", *options)
    assert said.status == 1
    assert message in said.err
    assert list(tmp_path.iterdir()) == []


def test_version(run):
    assert run("--version").out == nm.__version__


def test_report_on_the_embedded_default(tmp_path):
    """The command of a user, in a process of its own."""
    result = in_a_process("-m", "netmoments", "report", "digits", "digits", "--sigma", "0.1", *QUICK, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "The most fragile images at σ = 0.1" in result.stdout
    record = json.loads((tmp_path / "noise-report" / "report.json").read_text())
    assert record["sigma"] == 0.1
    assert len(record["images"]) == 12
    assert record["provenance"]["command"].startswith("netmoments report digits digits --sigma 0.1")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A factory, its weights, the same network exported, and a folder of coloured images with a broken one."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "mine.py").write_text(FACTORY)
    names: dict = {}
    exec(FACTORY, names)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = names["network"]().eval()
    save_file(network.state_dict(), folder / "mine.safetensors")
    torch.export.save(torch.export.export(network, (torch.zeros(1, 3, 8, 8),)), folder / "mine.pt2")
    torch.save(network.state_dict(), folder / "mine.pt")
    rng = np.random.default_rng(0)
    for name in ("cat", "dog", "emu"):
        (folder / "images" / name).mkdir(parents=True)
        for number in range(3):
            pixels = rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "images" / name / f"{number}.png")
    (folder / "images" / "dog" / "broken.png").write_bytes(b"not a picture")
    return folder


@pytest.fixture
def own_network(made, tmp_path) -> Path:
    """The folder that commands run in, with all that."""
    for path in made.iterdir():
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


def test_report_on_a_network_and_images_of_ones_own(run, own_network):
    flips = []
    for model in (["mine.py:network", "--weights", "mine.safetensors"], ["mine.pt2"]):
        said = run("report", model[0], "images", *model[1:], *QUICK, "--out", "out")
        assert said.status == 0, said.err
        assert "broken.png" in said.out
        record = json.loads((own_network / "out" / "report.json").read_text())
        assert len(record["images"]) == 9
        assert len(record["skipped"]) == 1
        flips.append([image["flip_probability"] for image in record["images"]])
    assert flips[0] == pytest.approx(flips[1], rel=1e-4)


def test_a_factory_may_import_its_neighbours(run, own_network):
    (own_network / "neighbour.py").write_text("from mine import network as made\ndef network(): return made()")
    said = run("relus", "neighbour.py:network", "images")
    assert said.status == 0, said.err


def test_relus_are_listed(run, own_network):
    said = run("relus", "mine.pt2", "images")
    assert said.status == 0, said.err
    assert re.search(r"0 \S+ 16 16", said.out)


def test_a_network_without_relus_is_said_to_have_none(run, own_network):
    (own_network / "smooth.py").write_text(
        "from torch import nn\ndef network(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.Tanh())"
    )
    said = run("relus", "smooth.py:network", "digits")
    assert said.status == 0, said.err
    assert said.out == "smooth.py:network has no ReLU (nn.ReLU, relu() and clamp(min=0) were looked for)"


def test_accuracy_with_a_preprocessing_of_its_own(run):
    """Dark images: the shipped network was not trained on these."""
    found = run("accuracy", "digits", "digits", "--mean", "0.5", "--std", "2").out
    assert float(found.removeprefix("test accuracy ").partition("%")[0]) < 90


def test_accuracy_of_the_shipped_weights(run):
    said = run("accuracy", "digits", "digits")
    assert said.status == 0, said.err
    assert said.out == "test accuracy 99.55% of 445 images"


BAD = {
    "command": (["nonsense"], "nonsense"),
    "model": (["report", "resnet", "digits"], "'resnet' is not a network: wanted a .pt2 file, file.py:factory, or one"),
    "pickle": (["report", "mine.pt", "images"], "is a pickle, which runs code when it is loaded, and is refused"),
    "pickled weights": (["report", "mine.py:network", "images", "--weights", "mine.pt"], "is a pickle"),
    "factory": (["report", "mine.py:net", "images"], "has no function or class 'net'; it has network"),
    "which factory": (["report", "mine.py", "images"], "name the function or class"),
    "no file": (["report", "nothing.pt2", "images"], "no exported network at nothing.pt2"),
    "no data": (["report", "digits", "nothing"], "'nothing' is neither a dataset"),
    "not found": (["report", "lenet", "mnist"], "netmoments download mnist"),
    "empty folder": (["report", "mine.pt2", "empty"], "empty has no images"),
    "rare": (["report", "digits", "digits", "--rare", "some"], "--rare 'some': give a number, or all"),
    "mean": (["report", "digits", "digits", "--mean", "a,b"], "--mean 'a,b': give a number, or one for each channel"),
    "covariance": (["report", "digits", "digits", "--covariance", "none.npy"], "no file with a covariance at none.npy"),
    "address": (["report", "digits", "digits", "--engine", "local", "--address", "a:1"], "a:1 is for --engine ray"),
    "out is a file": (["report", "digits", "digits", "--out", "mine.py"], "mine.py is a file; give a folder"),
    "arguments": (["report", "needs.py:network", "images"], "needs.py:network() failed: TypeError"),
    "sigma": (["report", "digits", "digits", "--sigma", "0"], "Must be > 0"),
    "sigma of no number": (["report", "digits", "digits", "--sigma", "nan"], "Must be a number"),
    "large sigma": (["report", "digits", "digits", "--sigma", "1" + "0" * 400], "Must be < 2147483648"),
    "large std": (["report", "digits", "digits", "--std", "1e400"], "--std '1e400': give numbers below 1e+09"),
    "seed": (["report", "digits", "digits", "--seed", str(2**80)], "Must be < 9223372036854775808"),
    "seed of an attack": (["attack", "digits", "digits", "--seed", str(2**80)], "Must be < 9223372036854775808"),
    "samples": (["report", "digits", "digits", "--samples", str(2**80)], "Must be < 2147483648"),
    "size": (["report", "digits", "digits", "--size", "2000000000"], "size must be at most 10,000 pixels a side"),
    "FIFO": (["report", "digits", "fifo.png"], "fifo.png is a FIFO, and not a regular file"),
    "archive": (["report", "odd.pt2", "images"], "odd.pt2 is not a plain archive of torch.export.save, and is refused"),
    "device": (["report", "digits", "digits", "--device", "tpu9"], "no device 'tpu9'; give cpu, cuda or auto"),
    "mis-sized": (["report", "lenet", "digits"], "cannot take an input of shape (1, 8, 8)"),
    "no splits": (["accuracy", "digits", "images"], "not divided into splits, so it has no 'train'; take mnist, fer"),
    "download": (["download", "fer2013"], "only mnist can be downloaded"),
    "gone": (["reproduce", "table-2"], "reproduce"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_explained(run, own_network, name):
    arguments, message = BAD[name]
    (own_network / "empty").mkdir()
    (own_network / "needs.py").write_text("def network(size): ...")
    os.mkfifo(own_network / "fifo.png")
    with zipfile.ZipFile(own_network / "odd.pt2", "w") as archive:
        archive.writestr("../../odd", "")
    said = run(*arguments)
    assert said.status != 0
    assert "Traceback" not in said.everything
    assert message in said.everything
    assert not (own_network / "noise-report").exists()


def test_names_of_files_do_not_steer_the_terminal(run, own_network):
    name = "\x1b[2J\x1b]0;mine\x07[bold]"
    folder = own_network / name
    folder.mkdir()
    for kind in ("L", "RGB"):
        Image.new(kind, (8, 8)).save(folder / f"{kind}{name}.png")
    (folder / f"bad{name}.png").write_bytes(b"")
    said = run("report", "mine.pt2", name, *QUICK, "--out", f"out{name}")
    assert said.status == 0, said.err
    assert "images are in colour" in said.err
    assert said.everything.isprintable()
    assert r"\x1b[2J\x1b]0;mine\x07[bold]" in said.out
    said = run("report", name, "digits")
    assert r"'\x1b[2J" in said.err
    said = run("report", "digits", f"no{name}")
    assert said.everything.isprintable()


def test_help_says_what_is_run(run):
    for command in ("report", "attack"):
        assert "which is code and is run" in " ".join(run(command, "--help").out.replace("│", " ").split())


def no_room(path: Path, content: bytes) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_loses_neither_the_last_report_nor_what_was_found(run, tmp_path, monkeypatch):
    quick = ["--images", "4", "--rare", "0", "--samples", "50", "--attacks", "0", "--out", "out"]
    first = run("report", "digits", "digits", *quick)
    assert first.status == 0, first.err
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    monkeypatch.setattr(Path, "write_bytes", no_room)
    said = run("report", "digits", "digits", "--sigma", "0.2", *quick)
    assert said.status == 1
    assert said.err.endswith("error: out/report.html could not be written: No space left on device")
    assert "The most fragile images at σ = 0.2" in said.out
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    said = run("attack", "digits", "digits", *QUICK_ATTACK, "--out", "new")
    assert said.err.endswith("attack.html could not be written: No space left on device")
    assert "images are fooled as asked" in said.out
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_written_to_is_named_before_the_work(run, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # for whoever may write everywhere
    monkeypatch.setattr("netmoments.report.arguments.load_network", lambda *_: pytest.fail("work was done"))
    for command in ("report", "attack"):
        said = run(command, "digits", "digits", "--out", "out")
        assert said.status == 1
        assert "cannot be written to; give another folder" in said.err


def test_a_smooth_activation_is_warned_about_once(run, own_network):
    (own_network / "smooth.py").write_text(FACTORY.replace("nn.ReLU()", "nn.ReLU(), nn.Linear(16, 16), nn.GELU()"))
    said = run("report", "smooth.py:network", "images", *QUICK[:-1], "1")
    assert said.status == 0, said.err
    assert said.err.count("gelu") == 1


def test_an_interruption_is_told_in_a_word(run, monkeypatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("netmoments.report.arguments.load_network", interrupted)
    assert run("relus", "digits", "digits") == (130, "", "interrupted")


def test_a_bug_shows_where_it_happened(run, monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr("netmoments.report.arguments.load_network", broken)
    with pytest.raises(KeyError, match="a bug"):
        run("relus", "digits", "digits")


def strict_json(path: Path) -> dict:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def test_an_attack_with_its_defaults(run, tmp_path):
    said = run("attack", "digits", "digits", *QUICK_ATTACK)
    assert said.status == 0, said.err
    assert "images are fooled as asked (95% of the samples)" in said.out
    assert {path.name for path in (tmp_path / "attack-report").iterdir()} == ATTACK_FILES
    record = strict_json(tmp_path / "attack-report" / "attack.json")
    assert record["provenance"]["command"].startswith("netmoments attack digits digits --images 3")
    assert record["settings"]["sigma"] == 1 / 255


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (["sparse-smooth", "--gamma", "0.1", "--sigma", "0.01"], {"gamma": 0.1, "sigma": 0.01, "confidence": None}),
        (["targeted", "--target", "3", "--beta", "0.2", "--unbounded"], {"beta": 0.2, "bounds": None, "wanted": 0.9}),
        (["pixels", "--percent", "20", "--rivals", "2", "--confidence", "0.8"], {"wanted": 0.8, "rivals": 2}),
    ],
)
def test_each_kind_of_attack_writes_what_it_found(run, tmp_path, kind, settings):
    said = run("attack", "digits", "digits", "--kind", *kind, *QUICK_ATTACK, "--out", "made")
    assert said.status == 0, said.err
    made = tmp_path / "made"
    assert {path.name for path in made.iterdir()} == ATTACK_FILES
    record = strict_json(made / "attack.json")
    assert record["settings"] | settings == record["settings"]
    assert record["settings"]["iterations"] == 60
    count = len(record["images"])
    assert count + len(record["skipped"]) + len(record["of_the_target"]) == 3
    rows = list(csv.DictReader((made / "images.csv").read_text().splitlines()))
    assert [row["name"] for row in rows] == [image["name"] for image in record["images"]]
    assert [float(row["success"]) for row in rows] == [image["success"] for image in record["images"]]
    with np.load(made / "noise.npz") as noise:
        assert noise["mu"].shape == (count, 1, 8, 8)
        assert np.abs(noise["mu"]).max(axis=(1, 2, 3)) == pytest.approx([image["linf"] for image in record["images"]])
        assert noise["sigma"] == pytest.approx([image["sigma"] for image in record["images"]])
        assert noise["labels"].tolist() == [image["label"] for image in record["images"]]
    with Image.open(made / "pictures.png") as picture:
        assert picture.width > 800
    for image in record["images"]:
        assert image["name"] in said.out


BAD_ATTACKS = {
    "no target": (["targeted"], "--kind targeted needs --target, the class that the images are to be taken for"),
    "no percent": (["pixels"], "--kind pixels needs --percent"),
    "percent": (["targeted", "--target", "3", "--percent", "10"], "--percent is for --kind pixels, not for targeted"),
    "gamma": (["pixels", "--percent", "9", "--gamma", "1"], "--gamma is for --kind sparse-smooth, not for pixels"),
    "beta": (["sparse-smooth", "--beta", "0.1"], "--beta is for --kind targeted and pixels, not for sparse-smooth"),
    "rivals": (["targeted", "--target", "3", "--rivals", "2"], "--rivals is for --kind sparse-smooth and pixels"),
    "rivals and target": (["sparse-smooth", "--target", "3", "--rivals", "2"], "--rivals is for attacks without"),
    "both": (["sparse-smooth", "--gamma", "1", "--confidence", "0.9"], "give --confidence (a share of the samples) or"),
    "kind": (["loud"], 'Choose from: "sparse-smooth", "targeted", "pixels"'),
    "target": (["targeted", "--target", "ten"], "--target 'ten' is no class of the network; give a number from 0 to 9"),
    "label": (["sparse-smooth", "--label", "10"], "--label '10' is no class of the network"),
    "same": (["targeted", "--target", "3", "--label", "3"], "--label and --target are both 3"),
    "confidence": (["sparse-smooth", "--confidence", "1"], "Must be < 1"),
    "sigma": (["sparse-smooth", "--sigma", "0"], "Must be > 0"),
    "layer": (["sparse-smooth", "--layer", "relu9"], "no ReLU is named 'relu9'"),
    "out": (["sparse-smooth", "--out", "taken"], "is a file; give a folder"),
    "device": (["sparse-smooth", "--device", "tpu9"], "no device 'tpu9'"),
}


@pytest.mark.parametrize("name", BAD_ATTACKS)
def test_bad_options_of_an_attack_are_explained(run, tmp_path, name):
    options, message = BAD_ATTACKS[name]
    (tmp_path / "taken").write_text("mine")
    said = run("attack", "digits", "digits", "--images", "3", "--kind", *options)
    assert said.status in (1, 2), said  # 2 from the parser of the command line
    assert message in said.everything
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_nothing_to_attack_is_said(run, tmp_path):
    few = nm.data.load("digits").first(3)
    np.savez(tmp_path / "wrong.npz", images=few.images.numpy(), labels=(few.labels.numpy() + 1) % 10)
    said = run("attack", "digits", "wrong.npz")
    assert said.status == 1
    assert "none of the 3 chosen images can be attacked" in said.err
    assert "the network takes it for" in said.err
    assert not (tmp_path / "attack-report").exists()
