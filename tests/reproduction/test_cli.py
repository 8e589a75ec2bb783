"""`python -m reproduction` as a user meets it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import netmoments as nm
from reproduction import cli, figure_2, table_1, training, writing
from reproduction.experiment import MODULES, NAMES

ROOT = Path(__file__).parents[2]
PAPER = "0.0241"
"""The first number of the paper's Table 1."""


class Said(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def everything(self) -> str:
        return " ".join((self.out + self.err).split())


@pytest.fixture
def run(monkeypatch, capsys, tmp_path) -> Callable[..., Said]:
    """The command in this process, in an empty folder, with a terminal of 100 columns and no data anywhere."""
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("NETMOMENTS_DATA", raising=False)
    monkeypatch.chdir(tmp_path)

    def command(*arguments: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["reproduction", *map(str, arguments)])
        status = 0
        try:
            cli.main()
        except SystemExit as end:
            status = end.code or 0
        return Said(status, *capsys.readouterr())

    return command


def test_help_needs_no_torch_and_names_every_experiment():
    """In a process of its own, from the root of a checkout."""
    program = "import sys; sys.argv[1:] = ['--help']\n" + (
        "import runpy\ntry: runpy.run_module('reproduction', run_name='__main__')\n"
        "except SystemExit: assert 'torch' not in sys.modules; raise"
    )
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env={"COLUMNS": "100"})
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("Usage: python -m reproduction")
    for word in (*NAMES, "all", "train", "engine", "--images", "--minutes", "--engine"):
        assert word in result.stdout


def test_without_arguments_it_shows_its_help(run):
    said = run()
    assert said.status == 0
    assert "Usage: python -m reproduction" in said.out


def test_every_experiment_is_a_module_with_a_function():
    for module in MODULES.values():
        text = (ROOT / "reproduction" / f"{module}.py").read_text()
        assert "\ndef reproduce(settings: Settings) -> Outcome:\n" in text


def test_engine_shows_exact_beside_sampled_and_the_series(run, monkeypatch):
    monkeypatch.setattr(figure_2, "PAPER_CORRELATIONS", (-0.7, 0.5))
    said = run("engine", "--samples", "2000", "--seed", "3")
    assert said.status == 0, said.err
    for text in ("exact mean", "sampled ± s.e.", "times as long", "series, 50 terms", "netmoments, against 160 nodes"):
        assert text in said.everything


def test_train_writes_weights_that_can_be_used(run, monkeypatch):
    short = dataclasses.replace(training.RECIPES["digits"], epochs=5)
    monkeypatch.setitem(training.RECIPES, "digits", short)
    said = run("train", "digits", "--out", "d.safetensors", "--device", "cpu")
    assert said.status == 0, said.err
    assert "epoch   5 of 5" in said.out
    told = float(said.out.split("test accuracy ")[-1].split("%")[0])
    right = training.accuracy(nm.zoo.pretrained("digits", Path("d.safetensors")), nm.data.load("digits"))
    assert told == pytest.approx(100 * right, abs=0.006)
    assert right > 0.7


def test_train_against_noise(run, monkeypatch):
    short = dataclasses.replace(training.RECIPES["digits"], epochs=1)
    monkeypatch.setitem(training.RECIPES, "digits", short)
    for number, options in enumerate((("--moments", "1"), ("--folds", "2"))):
        said = run("train", "digits", "--out", f"{number}.safetensors", "--sigma", "0.2", *options)
        assert said.status == 0, said.err
        assert Path(f"{number}.safetensors").exists()
    said = run("train", "digits", "--moments", "1")
    assert said.status == 1
    assert "noise to train against has a level, sigma" in said.everything


def test_verdicts_are_written_from_summaries(run, tmp_path):
    assert run("figure-1", "--out", "results").status == 0
    said = run("verdicts", "--out", "page.md")
    assert said.status == 0, said.err
    assert "| [Figure 1](../results/figure-1/table.md) |" in (tmp_path / "page.md").read_text()
    assert "no */summary.json" in run("verdicts", "--results", "nowhere").err


def test_figure_1_needs_no_data(run, tmp_path):
    said = run("figure-1", "--out", "made")
    assert said.status == 0, said.err
    assert "relu3" in said.out
    made = {path.name for path in (tmp_path / "made" / "figure-1").iterdir()}
    assert made == {"figure-1.png", "figure-1.pdf", "summary.json", "table.md"}
    assert "<html" in (tmp_path / "made" / "report.html").read_text()
    record = json.loads((tmp_path / "made" / "figure-1" / "summary.json").read_text())
    assert record["provenance"]["command"] == "python -m reproduction figure-1 --out made"


def test_results_go_beside_the_package_by_default(run, tmp_path):
    assert run("figure-1").status == 0
    assert [path.name for path in tmp_path.iterdir()] == ["reproduced"]


def test_table_1_stopped_and_gone_on_with(run, few, little_lenet, tmp_path, monkeypatch):
    monkeypatch.setattr(table_1, "BLOCK", 2)
    command = ("table-1", "--images", "3", "--data-dir", few, "--out", "made", "--device", "cpu")
    stopped = run(*command, "--minutes", "0.00001")
    assert stopped.status == 3
    assert "2 of 3 images done" in stopped.err
    assert "run the same command again" in stopped.err
    assert not (tmp_path / "made" / "table-1").exists()
    said = run(*command)
    assert said.status == 0, said.err
    assert PAPER in said.out
    record = json.loads((tmp_path / "made" / "table-1" / "summary.json").read_text())
    assert record["provenance"]["command"].startswith("python -m reproduction table-1 --images 3")
    assert record["comparisons"][0]["paper"] == float(PAPER)
    other = run(*(argument if argument != "3" else "4" for argument in command))
    assert other.status == 1
    assert "_configuration.json is of another configuration" in other.err
    assert "images: wanted 4, there 3" in other.err


def test_interrupted_it_says_that_it_goes_on(run, tmp_path, monkeypatch):
    row = figure_2.GridErrorSweep._row

    def interrupted(sweep: figure_2.GridErrorSweep, item: int, device: str) -> dict[str, float]:
        if item == 2:
            raise KeyboardInterrupt
        return row(sweep, item, device)

    monkeypatch.setattr(figure_2.GridErrorSweep, "_row", interrupted)
    said = run("figure-2", "--samples", "100", "--out", "made")
    assert said.status == 130
    assert "what is finished is kept, the same command goes on" in said.err
    assert list((tmp_path / "made" / "series").glob("part-*.parquet"))


WRONG = {
    "experiment": (["figure-10"], "no experiment 'figure-10'; there are figure-1, figure-2"),
    "no data": (["table-2"], "netmoments download mnist"),
    "no folder": (["table-2", "--data-dir", "nowhere"], "there is no folder nowhere to look for mnist in"),
    "one image": (["table-2", "--images", "1"], "Must be >= 2"),
    "a gallery for another": (["table-2", "--gallery", "here"], "--gallery is for frontier; table-2 does not use it"),
    "one sample": (["table-2", "--samples", "1"], "Must be >= 2"),
    "engine": (["table-2", "--engine", "dask"], "no engine 'dask'; there are local and ray"),
    "address": (["table-2", "--address", "10.0.0.1:6379"], "give --engine ray too"),
    "device": (["figure-2", "--device", "tpu"], "no device 'tpu'"),
    "network": (["figure-1", "--model", "nothing.pt2"], "nothing.pt2"),
    "layer": (["figure-1", "--layer", "7"], "7"),
    "another's model": (["table-2", "--model", "squeezenet"], "--model and --layer are for figure-1"),
    "several networks": (["seeds", "--weights", "w.safetensors"], "seeds trains or uses several"),
    "networks of 2019": (["readings-2019", "--weights", "w.safetensors"], "readings-2019 trains or uses several"),
    "one of Ray's GPUs": (["table-2", "--engine", "ray", "--device", "cuda:1"], "give "),
    "into a file": (["figure-1", "--out", "taken"], "is a file; give a folder"),
    "recipe": (["train", "alexnet"], "no recipe for 'alexnet'; there are digits, lenet, faces"),
    "weights": (["train", "digits", "--out", "w.pt"], "written to a .safetensors file"),
    "engine's samples": (["engine", "--samples", "1"], "samples"),
    "engine's seed": (["engine", "--seed", "-1"], "seed"),
}


@pytest.mark.parametrize("name", WRONG)
def test_it_says_what_is_wrong(run, tmp_path, name):
    arguments, message = WRONG[name]
    (tmp_path / "taken").write_text("mine")
    said = run(*arguments, *(() if "--out" in arguments or arguments[0] in ("engine", "train") else ("--out", "made")))
    assert said.status in (1, 2)  # 2 from the parser of the command line
    assert message in said.everything
    assert "Traceback" not in said.everything
    assert (tmp_path / "taken").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("taken", "made")] == []
    assert not (tmp_path / "made" / "report.html").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_gpu_that_is_not_there(run):
    said = run("figure-2", "--device", "cuda", "--out", "made")
    assert said.status == 1
    assert "no CUDA device is available here" in said.err


def test_few_images_have_fewer_samples_unless_told(run, monkeypatch):
    told = []
    monkeypatch.setattr(writing, "reproduce_and_write", lambda _, settings, **__: told.append(settings) or Path("x"))
    for options in (["--images", "2"], ["--images", "25"], ["--images", "2", "--samples", "50"]):
        assert run("table-2", "--device", "cpu", *options).status == 0
    assert [(settings.samples, settings.few) for settings in told] == [(1000, True), (10_000, False), (50, True)]


def test_more_images_than_there_are(run, few):
    said = run("table-2", "--images", "31", "--data-dir", few, "--out", "made")
    assert said.status == 1
    assert "from 2 to 30" in said.err
