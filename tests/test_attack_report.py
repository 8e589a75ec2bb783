"""The command `attack` and the report's section on noise made to fool: what is written, shown and said."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import re
import subprocess
import sys
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from torch import nn

import netmoments as nm
from netmoments import cli
from netmoments.attacks.box import PixelSupport, Targeted
from netmoments.attacks.sparse_smooth import SparseSmooth
from netmoments.cli import app
from netmoments.data.images import LabelledImages, Skipped
from netmoments.report import attack_study as attack_conduct
from netmoments.report.attack_page import attack_record, render_attack_page, write_attack
from netmoments.report.attack_study import AttackOptions, AttackStudy, Choice, NotAttacked, conduct_attack
from netmoments.report.attack_words import draw_attack
from netmoments.report.noise_page import render_page, write_report
from netmoments.report.noise_study import StudyConfig, study
from netmoments.report.noise_words import draw
from netmoments.report.words import Provenance

FILES = {"attack.html", "attack.json", "images.csv", "pictures.png", "noise.npz"}
QUICK = ["--images", "3", "--iterations", "60", "--polish", "20", "--samples", "40"]
FAST = SparseSmooth(iterations=60, polish=20, samples=40)
PLAIN = StudyConfig(0.1, check=0)


@pytest.fixture(scope="module")
def network():
    return nm.zoo.pretrained("digits")


@pytest.fixture(scope="module")
def digits():
    return nm.data.load("digits")


@pytest.fixture(scope="module")
def found(network, digits):
    return conduct_attack(network, digits, FAST, Choice(3))


@pytest.fixture(scope="module")
def provenance():
    return Provenance.of_this_run(torch.device("cpu"), 0)


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """The command line in this process, in an empty folder: exit status, and what was said."""

    def call(*arguments: object) -> tuple[int, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("COLUMNS", "100")
        monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
        monkeypatch.setattr(cli, "app", partial(app, [str(argument) for argument in arguments]))
        status: object = 0
        try:
            cli.main()
        except SystemExit as stopped:
            status = stopped.code
        said = capsys.readouterr()
        return int(status or 0), " ".join((said.out + said.err).split())

    return call


def in_a_terminal(drawn) -> str:
    console = Console(width=110, record=True, file=io.StringIO())
    console.print(drawn)
    return " ".join(console.export_text().split())


def strict_json(text: str) -> dict:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_the_command_of_a_user(tmp_path):
    command = [sys.executable, "-m", "netmoments", "attack", "digits", "digits", "--kind", "sparse-smooth", *QUICK]
    environment = {**os.environ, "COLUMNS": "100", "PYTHONPATH": os.getcwd()}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "images are fooled as asked (95% of the samples)" in result.stdout
    assert {path.name for path in (tmp_path / "attack-report").iterdir()} == FILES
    record = strict_json((tmp_path / "attack-report" / "attack.json").read_text())
    assert record["provenance"]["command"].startswith("netmoments attack digits digits --kind sparse-smooth")
    assert record["settings"]["sigma"] == 1 / 255


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (["sparse-smooth", "--gamma", "0.1", "--sigma", "0.01"], {"gamma": 0.1, "sigma": 0.01, "confidence": None}),
        (["targeted", "--target", "3", "--beta", "0.2", "--unbounded"], {"beta": 0.2, "bounds": None, "wanted": 0.9}),
        (["pixels", "--percent", "20", "--rivals", "2", "--confidence", "0.8"], {"wanted": 0.8, "rivals": 2}),
    ],
)
def test_each_kind_writes_what_it_found(run, tmp_path, kind, settings):
    status, said = run("attack", "digits", "digits", "--kind", *kind, *QUICK, "--out", "made")
    assert status == 0, said
    made = tmp_path / "made"
    assert {path.name for path in made.iterdir()} == FILES
    record = strict_json((made / "attack.json").read_text())
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
        assert image["name"] in said


def test_the_noise_that_is_written_is_the_one_that_was_found(found, provenance, tmp_path):
    write_attack(found, provenance, tmp_path, "digits", "digits")
    with np.load(tmp_path / "noise.npz") as noise:
        assert torch.equal(torch.from_numpy(noise["mu"]), found.result.mu)
        assert noise["names"].tolist() == [found.name(number) for number in range(len(found))]
        assert noise["places"].tolist() == found.result.places.tolist()


def test_the_sample_that_is_shown_is_one_of_the_noise(network, found):
    assert torch.equal(found.noisy, found.result.samples(1, FAST.seed)[0])
    assert torch.equal(found.noisy_classes, network(found.noisy).argmax(1))


def test_the_page_is_self_contained_and_escapes_what_users_bring(found, provenance):
    evil = "<script>alert(1)</script>"
    images = dataclasses.replace(
        found.images, names=(evil,) * len(found.images), skipped=(Skipped(evil, "r"),), classes=()
    )
    classes = tuple(f"<b>{k}</b>" for k in range(10))
    bad = dataclasses.replace(found, images=images, classes=classes, of_the_target=(evil,))
    page = render_attack_page(bad, provenance, evil, evil)
    assert "<script" not in page
    assert "<b>3</b>" not in page
    assert "&lt;b&gt;" in page
    assert not re.search(r"""(src|href)=["'](?!data:)""", page)
    assert "http" not in page
    assert page.count("data:image/png") == 5 * len(found)
    text = in_a_terminal(draw_attack(dataclasses.replace(bad, classes=tuple(f"[red]{k}" for k in range(10)))))
    assert "[red]" in text


def test_what_is_not_a_number_is_null(found, provenance, tmp_path):
    nothing = dataclasses.replace(found.result, gap=torch.full_like(found.result.gap, torch.inf))
    strange = dataclasses.replace(found, result=nothing)
    write_attack(strange, provenance, tmp_path, "m", "d")
    record = strict_json((tmp_path / "attack.json").read_text())
    assert [image["gap"] for image in record["images"]] == [None] * len(found)
    assert "> 100%" in in_a_terminal(draw_attack(strange))


def test_files_are_whole_or_not_there(found, provenance, tmp_path, monkeypatch):
    (tmp_path / "images.csv").write_text("older")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match=r"attack\.html could not be written: No space left"):
        write_attack(found, provenance, tmp_path, "m", "d")
    assert [path.name for path in tmp_path.iterdir()] == ["images.csv"]
    assert (tmp_path / "images.csv").read_text() == "older"


def test_images_of_the_target_are_left_out_and_named(network, digits):
    some = digits.take([0, 1, int((digits.labels == 3).nonzero()[0])])
    result = conduct_attack(network, some, Targeted(iterations=10, polish=0, samples=20), Choice(3, target="3"))
    assert len(result) == 2
    assert result.of_the_target == (some.names[2],)
    text = in_a_terminal(draw_attack(result))
    assert f"left out: {some.names[2]}: its label is the target" in text
    assert "1 of 3 chosen images were left out" in text


def test_images_that_are_wrong_are_left_out_and_named(network, digits):
    few = digits.take([0, 1])
    wrong = dataclasses.replace(few, labels=torch.stack([few.labels[0], (few.labels[1] + 1) % 10]))
    result = conduct_attack(network, wrong, FAST, Choice(2))
    (left,) = result.left_out
    assert left.name == few.names[1]
    assert f"the network takes it for {int(few.labels[1])}" in left.reason
    assert attack_record(result)["skipped"][0]["predicted"] == int(few.labels[1])
    assert len(result) == 1


def test_without_labels_the_answers_of_the_network_stand_for_them(network, digits, provenance):
    bare = LabelledImages(digits.images[:6], None, digits.names[:6], ())
    answers = network(bare.images).argmax(1)
    result = conduct_attack(network, bare, FAST, Choice(2, label=str(int(answers[4]))))
    assert result.labels_are_answers
    assert bool((result.result.labels == answers[4]).all())
    assert "own answers stand for them" in in_a_terminal(draw_attack(result))
    assert "own answers stand for them" in render_attack_page(result, provenance, "m", "d")


def test_classes_by_name(network, digits):
    names = tuple(f"digit {k}" for k in range(10))
    own = dataclasses.replace(digits, classes=names)
    quick = Targeted(iterations=5, polish=0, samples=20)
    result = conduct_attack(network, own, quick, Choice(2, label="digit 7", target="9"), names)
    assert result.result.labels.tolist() == [7, 7]
    assert result.result.targets.tolist() == [9, 9]
    assert "digit 7" in in_a_terminal(draw_attack(result))


@pytest.mark.parametrize(
    ("attack", "words"),
    [
        (SparseSmooth(iterations=5, polish=0, samples=20, gamma=50.0), "no: no such noise found"),
        (SparseSmooth(iterations=40, polish=0, samples=20, gamma=0.5, bounds=None), "a mean margin of at most -0.5"),
        (PixelSupport(percent=5, beta=1e-3, iterations=5, samples=20), "on 5% of the pixels"),
    ],
)
def test_what_was_missed_is_said(network, digits, provenance, attack, words):
    result = conduct_attack(network, digits, attack, Choice(2))
    assert words in in_a_terminal(draw_attack(result))
    assert f"{result.fooled} of {len(result)}" in render_attack_page(result, provenance, "m", "d")


BAD = {
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


@pytest.mark.parametrize("name", BAD)
def test_bad_options_are_explained(run, tmp_path, name):
    options, message = BAD[name]
    (tmp_path / "taken").write_text("mine")
    status, said = run("attack", "digits", "digits", "--images", "3", "--kind", *options)
    assert status in (1, 2), said  # 2 from the parser of the command line
    assert message in said
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_nothing_to_attack_is_said(run, tmp_path, digits):
    few = digits.first(3)
    wrong = tmp_path / "wrong.npz"
    np.savez(wrong, images=few.images.numpy(), labels=(few.labels.numpy() + 1) % 10)
    status, said = run("attack", "digits", wrong, "--kind", "sparse-smooth")
    assert status == 1
    assert "none of the 3 chosen images can be attacked" in said
    assert "the network takes it for" in said
    assert not (tmp_path / "attack-report").exists()


def test_all_images_are_of_the_target(network, digits):
    threes = digits.take((digits.labels == 3).nonzero()[:2, 0])
    with pytest.raises(ValueError, match="the label of all 2 chosen images is the target: give another --target"):
        conduct_attack(network, threes, FAST, Choice(2, target="3"))
    with pytest.raises(ValueError, match=r"none of the 2 images is of the class 5 \(--label\)"):
        conduct_attack(network, threes, FAST, Choice(2, label="5"))


def test_options_become_attacks():
    assert AttackOptions(kind="sparse-smooth").attack() == SparseSmooth()
    assert AttackOptions(kind="targeted", target="3").attack() == Targeted()
    assert AttackOptions(kind="pixels", percent=5.0, sigma=0.1).attack() == PixelSupport(percent=5.0, largest_sigma=0.1)


@pytest.fixture(scope="module")
def reported(network, digits):
    return study(network, digits.take([0, 60, 120, 180, 240]), dataclasses.replace(PLAIN, attacks=2))


def test_a_report_has_noise_made_to_fool(reported, provenance, tmp_path):
    attacks = reported.attacks
    assert isinstance(attacks, AttackStudy)
    assert attacks.attack == SparseSmooth()
    assert [attacks.name(number) for number in range(2)] == ["test/0", "test/120"]
    write_report(reported, provenance, tmp_path, "digits", "digits")
    record = strict_json((tmp_path / "report.json").read_text())["attacks"]
    assert [image["name"] for image in record["images"]] == ["test/0", "test/120"]
    page = (tmp_path / "report.html").read_text()
    assert "Noise made to fool it" in page
    assert page.count('class="five"') == 2
    assert not re.search(r"""(src|href)=["'](?!data:)""", page)
    assert "Noise made to fool it" in in_a_terminal(draw(reported))


def test_a_report_without_attacks(network, digits, provenance, tmp_path):
    quiet = study(network, digits.first(3), dataclasses.replace(PLAIN, attacks=0))
    assert quiet.attacks is None
    write_report(quiet, provenance, tmp_path, "m", "d")
    assert strict_json((tmp_path / "report.json").read_text())["attacks"] is None
    assert "fool" not in render_page(quiet, provenance, "m", "d")
    assert "fool" not in in_a_terminal(draw(quiet))
    with pytest.raises(ValueError, match="check and attacks must be ≥ 0"):
        StudyConfig(0.1, attacks=-1)


@pytest.mark.parametrize(
    "error", [MemoryError("too large for here"), ValueError("no ReLU"), RuntimeError("CUDA\nlong")]
)
def test_a_report_survives_an_attack_that_fails(network, digits, provenance, tmp_path, monkeypatch, error):
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(SparseSmooth, "_solved", fails)
    failed = study(network, digits.first(3), PLAIN)
    assert failed.attacks == NotAttacked(f"No noise could be made: {str(error).splitlines()[0]}")
    write_report(failed, provenance, tmp_path, "m", "d")
    record = strict_json((tmp_path / "report.json").read_text())["attacks"]
    assert record == {"not_attacked": failed.attacks.reason}
    assert failed.attacks.reason in render_page(failed, provenance, "m", "d")
    assert failed.attacks.reason in in_a_terminal(draw(failed))


def test_a_report_attacks_nothing_that_takes_long(network, digits, monkeypatch):
    monkeypatch.setattr(attack_conduct, "QUICK", {"cpu": 1e3})
    slow = study(network, digits.first(3), PLAIN)
    assert isinstance(slow.attacks, NotAttacked)
    assert "3 images takes 64 × 64 numbers each" in slow.attacks.reason


def test_a_report_of_wrong_answers_only(network, digits):
    few = digits.first(3)
    wrong = dataclasses.replace(few, labels=(few.labels + 1) % 10)
    nothing = study(network, wrong, PLAIN)
    assert isinstance(nothing.attacks, NotAttacked)
    assert "none of these images right" in nothing.attacks.reason


def test_a_report_on_coloured_images_without_labels(provenance):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(48, 12), nn.ReLU(), nn.Linear(12, 30)).eval()
    generator = torch.Generator().manual_seed(0)
    images = LabelledImages(torch.rand(3, 3, 4, 4, generator=generator), None, tuple("abc"), ())
    coloured = study(network, images, PLAIN)
    assert isinstance(coloured.attacks, AttackStudy)
    assert coloured.attacks.labels_are_answers
    assert render_page(coloured, provenance, "m", "d").count('class="five"') == 3
