"""The report: what it computes, what it writes, and that a browser shows it."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import re
import shutil
import subprocess

import pytest
import torch
from PIL import Image
from rich.console import Console
from torch import nn

import netmoments as nm
from netmoments.data.images import LabelledImages, Skipped
from netmoments.report.noise_page import render_page, write_report
from netmoments.report.noise_study import RELATIVE_LEVELS, StudyConfig, checked_images, study
from netmoments.report.noise_words import draw, probability_in_words, verdict_in_words
from netmoments.report.pictures import Axis
from netmoments.report.words import Provenance
from netmoments.sampling.monte_carlo import class_frequencies

CHECKED = StudyConfig(0.1, samples=4000, check=4)


@pytest.fixture(scope="module")
def network():
    return nm.zoo.pretrained("digits")


@pytest.fixture(scope="module")
def found(network):
    return study(network, nm.data.load("digits").first(40), CHECKED)


@pytest.fixture(scope="module")
def provenance():
    return Provenance.of_this_run(torch.device("cpu"), 0)


def test_flip_probabilities_are_those_of_the_front_door(network, found):
    for level, sigma in enumerate(CHECKED.levels):
        moments = nm.output_moments(network, nm.Gaussian(found.images.images, std=sigma), "two-stage")
        flips = moments.flip_probability(found.predicted)
        torch.testing.assert_close(found.flips[:, level], flips, rtol=1e-3, atol=1e-12)
        assert found.right is not None
        right = moments.class_probabilities().gather(1, found.images.labels.unsqueeze(1))[:, 0]
        torch.testing.assert_close(found.right[:, level], right, rtol=1e-3, atol=1e-12)
    assert found.moments.cut == "relu3"


def test_the_curve_begins_at_the_accuracy_and_falls(found):
    sigmas, shares = zip(*found.curve, strict=True)
    assert sigmas == (0.0, *CHECKED.levels)
    assert shares[0] == found.clean_accuracy == 1.0
    assert all(a >= b - 1e-3 for a, b in itertools.pairwise(shares))


def test_checks_are_sampled_from_the_network(network, found):
    assert [check.image for check in found.checks] == checked_images(found)
    for check in found.checks:
        noise = nm.Gaussian(found.images.images[check.image], std=0.1)
        won = class_frequencies(network, noise, CHECKED.samples, seed=found.chosen_level)
        assert float(check.flips[found.chosen_level]) == 1 - float(won[found.predicted[check.image]])
    assert found.checks[0].image == int(found.ranking[0])
    assert 0 <= found.largest_check_error <= 1


def test_small_noise_agrees_with_samples(network):
    """At σ = 0.02 the linearization is good: computed flips are within 5 standard errors plus a hundredth."""
    fragile = nm.data.load("digits").take([275, 220, 256])
    found = study(network, fragile, StudyConfig(0.02, samples=10_000, check=3))
    for check in found.checks:
        sampled = float(check.flips[found.chosen_level])
        error = (sampled * (1 - sampled) / 10_000) ** 0.5
        assert abs(sampled - float(found.flip[check.image])) < 5 * error + 0.01


def test_more_classes_than_are_followed_keep_the_label(generator):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 30)).eval()
    images = LabelledImages(torch.rand(5, 1, 4, 4, generator=generator), torch.arange(5), tuple("abcde"), ())
    found = study(network, images, StudyConfig(0.1, samples=50, check=1))
    assert found.moments.outputs.shape == (5, 10)
    assert bool((found.moments.outputs == images.labels.unsqueeze(1)).any(1).all())
    assert found.right.shape == (5, len(RELATIVE_LEVELS))


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


def test_the_terminal_shows_every_part(found):
    console = Console(width=110, record=True, file=io.StringIO())
    skipped = dataclasses.replace(found.images, skipped=(Skipped("bad.png", "not an image"),))
    console.print(draw(dataclasses.replace(found, images=skipped)))
    text = console.export_text()
    for part in ("Answers that are right, 40 images", "most fragile", "beside 4,000 samples", "bad.png: not an image"):
        assert part in text


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


def test_folders_of_some_classes_are_matched_by_name(network, found):
    names = tuple(f"digit {k}" for k in range(10))
    images = found.images.take(((found.images.labels == 3) | (found.images.labels == 7)).nonzero()[:6, 0])
    labels = (images.labels == 3).long()
    some = dataclasses.replace(images, labels=labels, classes=("digit 7", "digit 3"))
    result = study(network, some, dataclasses.replace(CHECKED, check=0), names)
    assert torch.equal(result.images.labels, images.labels)
    assert result.clean_accuracy == 1.0


def test_a_large_gap_is_called_one(found):
    assert f"{found.largest_check_error:.2f}"[:3] in verdict_in_words(found)
    worse = tuple(dataclasses.replace(check, flips=1 - check.flips) for check in found.checks)
    assert "too large for the linearization" in verdict_in_words(dataclasses.replace(found, checks=worse))
    better = tuple(dataclasses.replace(check, flips=found.flips[check.image]) for check in found.checks)
    assert "within 0.001" in verdict_in_words(dataclasses.replace(found, checks=better))


def test_names_are_not_markup(found):
    console = Console(width=160, record=True, file=io.StringIO())
    classes = tuple(f"[red]{k}[/x]" for k in range(10))
    images = dataclasses.replace(found.images, names=("[bold]a.png",) * 40)
    console.print(draw(dataclasses.replace(found, images=images, classes=classes)))
    text = console.export_text()
    assert "[bold]a.png" in text
    assert "[red]" in text


@pytest.mark.parametrize(
    ("value", "words"),
    [(0, "< 1e-6"), (3e-9, "< 1e-6"), (0.0003, "3e-04"), (0.123, "12.3%"), (1, "> 99.9%")],
)
def test_probabilities_are_never_rounded_away(value, words):
    assert probability_in_words(value) == words


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 0.3), (-7.3, 12.1), (1e-4, 3e-4), (-1e5, 1e6)])
def test_ticks_are_inside_and_about_as_many(low, high):
    ticks = Axis(low, high, 0, 100).ticks(6)
    assert 3 <= len(ticks) <= 8
    assert all(low - 1e-9 * abs(low) <= tick <= high * (1 + 1e-9) for tick in ticks)


BAD = {
    "labels out of range": (
        lambda net, images: study(net, dataclasses.replace(images, labels=images.labels + 7, classes=()), CHECKED),
        r"the label of test/\d+ is 16, but the network has 10 scores, 0 to 9",
    ),
    "sigma": (lambda net, images: StudyConfig(-0.1), "sigma must be a positive number"),
    "samples": (lambda net, images: StudyConfig(0.1, samples=1), "samples ≥ 2"),
    "one score": (
        lambda net, images: study(nn.Sequential(net, nn.Linear(10, 1)).eval(), images, CHECKED),
        r"has only 1 score; make it two",
    ),
    "other classes": (
        lambda net, images: study(
            net, dataclasses.replace(images, labels=images.labels % 2, classes=("a", "b")), CHECKED
        ),
        r"the images have 2 classes \(a, b\) and the network 10 scores: which is which",
    ),
    "class names": (lambda net, images: study(net, images, CHECKED, ("a", "b")), "2 class names for a network with 10"),
    "training": (lambda net, images: study(nm.zoo.build("digits").train(), images, CHECKED), r"network\.eval\(\)"),
    "size": (
        lambda net, images: study(net, dataclasses.replace(images, images=torch.rand(40, 1, 12, 12)), CHECKED),
        r"cannot take an input of shape \(1, 12, 12\)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_explained(network, found, name):
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call(network, found.images)
