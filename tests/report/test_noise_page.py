"""The page and the files of a report on noise: self-contained, whole, and shown by a browser."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
import shutil
import subprocess

import pytest
import torch
from PIL import Image
from torch import nn

from netmoments.attacks.sparse_smooth import SparseSmooth
from netmoments.data.images import LabelledImages, Skipped
from netmoments.report.attack_study import AttackStudy, NotAttacked
from netmoments.report.noise_page import render_page, write_report
from netmoments.report.noise_study import StudyConfig, study
from netmoments.report.noise_words import draw
from tests.report.shown import CHECKED, PLAIN, in_a_terminal, strict_json


def test_images_without_labels(network, found, provenance, tmp_path):
    bare = LabelledImages(found.images.images[:6], None, found.images.names[:6], ())
    result = study(network, bare, dataclasses.replace(CHECKED, check=0))
    assert result.right is None
    assert result.curve[0] == (0.0, 1.0)
    page = render_page(result, provenance, "m", "d")
    assert "Answers that stay the same" in page
    assert "label" not in re.sub(r"aria-label|<style>.*?</style>", "", page, flags=re.S)
    write_report(result, provenance, tmp_path, "m", "d")
    assert json.loads((tmp_path / "report.json").read_text())["clean_accuracy"] is None


def test_files_hold_the_numbers(found, provenance, tmp_path):
    folder = tmp_path / "new" / "folder"
    written = write_report(found, provenance, folder, "digits", "digits")
    assert sorted(path.name for path in folder.iterdir()) == sorted(written)
    record = json.loads((folder / "report.json").read_text())
    assert record["provenance"]["seed"] == 0
    assert record["layer"] == "relu3"
    assert len(record["images"]) == 40
    first = record["images"][0]
    assert first["flip_probability"] == float(found.flip[0])
    assert sum(first["class_probabilities"]) == pytest.approx(1, abs=1e-6)
    rows = list(csv.DictReader((folder / "images.csv").read_text().splitlines()))
    assert [float(row["flip_probability"]) for row in rows] == [float(x) for x in found.flip]
    with pytest.raises(NotADirectoryError, match="is a file"):
        write_report(found, provenance, folder / "images.csv", "digits", "digits")


def test_the_page_is_self_contained_and_escapes_what_users_bring(found, provenance):
    evil = "<script>alert(1)</script>"
    images = dataclasses.replace(found.images, names=(evil,) * 40, skipped=(Skipped(evil, "r"),))
    classes = tuple(f"<b>{k}</b>" for k in range(10))
    attacked = dataclasses.replace(found.attacks.images, names=(evil,) * len(found.attacks.images))
    attacks = dataclasses.replace(found.attacks, images=attacked, classes=classes)
    page = render_page(
        dataclasses.replace(found, images=images, classes=classes, attacks=attacks), provenance, evil, "d"
    )
    assert "<script" not in page
    assert "<b>3</b>" not in page
    assert not re.search(r"""(src|href)=["'](?!data:)""", page)
    assert "http" not in page.replace("http://www.w3.org", "")


def test_a_browser_shows_the_page(found, provenance, tmp_path):
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium to look at the page with")
    write_report(found, provenance, tmp_path, "digits", "digits")
    command = [
        chromium, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}", "--hide-scrollbars",
        "--window-size=1100,2400", f"--screenshot={tmp_path / 'page.png'}", (tmp_path / "report.html").as_uri(),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    with Image.open(tmp_path / "page.png") as picture:
        assert picture.size == (1100, 2400)
        colours = {colour for _, colour in picture.convert("RGB").getcolors(2**24)}
    assert (36, 88, 211) in colours  # the computed curve
    assert (209, 80, 12) in colours  # the sampled dots


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


def test_a_report_on_coloured_images_without_labels(provenance):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(48, 12), nn.ReLU(), nn.Linear(12, 30)).eval()
    generator = torch.Generator().manual_seed(0)
    images = LabelledImages(torch.rand(3, 3, 4, 4, generator=generator), None, tuple("abc"), ())
    coloured = study(network, images, PLAIN)
    assert isinstance(coloured.attacks, AttackStudy)
    assert coloured.attacks.labels_are_answers
    assert render_page(coloured, provenance, "m", "d").count('class="five"') == 3
