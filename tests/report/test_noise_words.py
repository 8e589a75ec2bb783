"""The report on noise in words, and in a terminal."""

from __future__ import annotations

import dataclasses
import io

import pytest
import torch
from rich.console import Console

from netmoments.data.images import Skipped
from netmoments.report.noise_study import CurvePoint, FlippedImage, study
from netmoments.report.noise_words import (
    Ranking,
    band_in_words,
    bounded_in_words,
    chosen_point,
    draw,
    flip_in_words,
    fragile_in_words,
    level_in_words,
    method_in_words,
    more_in_words,
    nearest_in_words,
    noise_in_words,
    share_in_words,
    stopped_in_words,
)
from netmoments.report.words import at_most_in_words, interval_in_words
from tests.report.shown import PLAIN, STUDIED, in_a_terminal


def with_flip(found, number, flip, low, high, samples=192, route="frequencies"):
    """A study where one image flips so often."""
    flips, interval, counts = found.flip.clone(), found.interval.clone(), found.samples.clone()
    flips[number], interval[number], counts[number] = flip, torch.tensor([low, high], dtype=torch.float64), samples
    routes = (*found.route[:number], route, *found.route[number + 1 :])
    return dataclasses.replace(found, flip=flips, interval=interval, samples=counts, route=routes)


def test_the_terminal_shows_every_part(found):
    skipped = dataclasses.replace(found.images, skipped=(Skipped("bad.png", "not an image"),))
    text = in_a_terminal(draw(dataclasses.replace(found, images=skipped)))
    chosen = chosen_point(found)
    bounded = int(found.bounded.sum())
    for part in (
        "Answers that are right, 40 images", f"{chosen.share:.1%}", "95 % from", "most fragile images at σ = 0.1",
        flip_in_words(found, int(found.order[0]))[1].removeprefix("between ").replace(" and ", " to "),
        f"{bounded} of 40 images were never seen to flip",
        "--rare all", "Noise made to fool it", "bad.png: not an image",
        f"{int(found.runs.sum()):,} runs of the network",
    ):  # fmt: skip
        assert part in text
    for word in ("rough", "gap", "network followed", "ended the work early"):
        assert word not in text


def test_names_are_not_markup(found):
    classes = tuple(f"[red]{k}[/x]" for k in range(10))
    images = dataclasses.replace(found.images, names=("[bold]a.png",) * 40)
    text = in_a_terminal(draw(dataclasses.replace(found, images=images, classes=classes)))
    assert "[bold]" in text
    assert "[red]" in text


@pytest.mark.parametrize(
    ("flip", "low", "high", "samples", "route", "words"),
    [
        (0.4027, 0.39297, 0.41245, 9730, "frequencies", ("0.40", "between 0.39 and 0.41")),
        (1.29e-4, 1.116e-4, 1.49e-4, 192, "importance", ("1.3e-4", "between 1.1e-4 and 1.5e-4")),
        (0.0, 0.0, 3 / 192, 192, "frequencies", ("below 1.6%", "nothing seen in 192 samples")),
        (0.0, 0.0, 3e-6, 192, "frequencies", ("below 3e-6", "nothing found in 1,000,192 runs")),
        (1.0, 1 - 3 / 400, 1.0, 400, "frequencies", ("above 99.2%", "flipped in all 400 samples")),
        (1.0, 0.93, 1.0, 400, "splitting", ("1.00", "between 0.93 and 1.00")),
    ],
)
def test_a_flip_and_how_well_it_is_known(found, flip, low, high, samples, route, words):
    runs = found.runs.clone()
    runs[3] = samples if route != "frequencies" or high > 1e-5 else 1_000_192
    one = dataclasses.replace(with_flip(found, 3, flip, low, high, samples, route), runs=runs)
    assert flip_in_words(one, 3) == words


@pytest.mark.parametrize(
    ("value", "low", "high"),
    [(0.5, 0.49, 0.51), (0.98, 0.97, 0.99), (0.9996, 0.999, 1.0), (3e-12, 2.4e-12, 3.7e-12), (1e-300, 9e-301, 2e-300)],
)
def test_intervals_are_shown_about_as_they_are(value, low, high):
    """To a third of their width, in order."""
    shown = [float(text) for text in interval_in_words(value, low, high)]
    assert shown[1] <= shown[0] <= shown[2]
    assert all(abs(a - b) <= (high - low) / 3 + 1e-12 * b for a, b in zip(shown, (value, low, high), strict=True))
    assert interval_in_words(0.25, 0.25, 0.25)[0] == "0.2500"


def test_bounds_are_never_rounded_down():
    for bound in (0.0151, 3 / 192, 2.01e-9, 0.000999, 0.99):
        text = at_most_in_words(bound)
        assert float(text.removesuffix("%")) * (0.01 if "%" in text else 1) >= bound * (1 - 1e-6)
    assert at_most_in_words(0.0) == "0"


def test_counts_that_intervals_leave_open():
    interval = torch.tensor([[0.2, 0.3], [0.0, 0.01], [0.09, 0.12]])
    assert fragile_in_words(interval) == "1–2"
    assert fragile_in_words(interval[:2]) == "1"


def test_bands_are_rounded_outwards():
    assert band_in_words(CurvePoint(0.1, 0.9, 0.8777, 0.9222)) == "between 87.7% and 92.3%"
    assert band_in_words(CurvePoint(0.1, 0.9939, 0.99341, 0.99438)) == "between 99.34% and 99.44%"
    assert share_in_words(CurvePoint(0.1, 0.9939, 0.99341, 0.99438)) == "99.39%"
    assert share_in_words(CurvePoint(0.0, 1.0, 1.0, 1.0)) == "100%"


def test_what_is_known_of_the_robust(found):
    count = int(found.bounded.sum())
    assert bounded_in_words(found) == f"{count} of 40 images were never seen to flip: each flips less often than 1.6%."
    finer = with_flip(found, int(found.order[-1]), 0.0, 0.0, 3e-6)
    assert "bounds from 3e-6 to 1.6%" in bounded_in_words(finer)
    known = dataclasses.replace(found, flip=found.flip.clamp(min=1e-9))
    assert bounded_in_words(known) == more_in_words(known) == ""
    alone = dataclasses.replace(found, config=dataclasses.replace(STUDIED, rare=None))
    every = dataclasses.replace(found, config=dataclasses.replace(STUDIED, rare=40))
    assert more_in_words(alone) == more_in_words(every) == ""
    assert "for the 4 images nearest" in more_in_words(found)
    none = dataclasses.replace(found, config=dataclasses.replace(STUDIED, rare=0))
    assert more_in_words(none).startswith("How rare flips are was investigated for no image; --rare all does it")


def test_the_method_in_words(found):
    said = " ".join(method_in_words(found))
    for part in ("importance sampling", "by a second estimate", "not certificates", "not clipped", "--rare all"):
        assert part in said
    assert "wider than" not in said
    counted = dataclasses.replace(found, route=("frequencies",) * 40)
    assert "importance" not in " ".join(method_in_words(counted))
    split = dataclasses.replace(found, route=("splitting",) + ("frequencies",) * 39)
    assert "those of 1 image, too rare for that" in " ".join(method_in_words(split))
    strict = dataclasses.replace(found, config=dataclasses.replace(STUDIED, tolerance=1e-4))
    assert "images are wider than the ±0.0001 that was asked for" in " ".join(method_in_words(strict))
    many = dataclasses.replace(found, count=1000)
    assert "of 1,000 classes, the 10 with the largest scores are shown" in " ".join(method_in_words(many))


def test_what_ended_the_work_is_said(found):
    late = dataclasses.replace(found, stopped="the time allowed")
    assert stopped_in_words(late).startswith("The time allowed ended the work early")
    assert "--seconds" in stopped_in_words(late)
    broken = dataclasses.replace(found, stopped="an interruption")
    assert stopped_in_words(broken).startswith("An interruption ended the work early")
    assert "--seconds" not in stopped_in_words(broken)
    for one in (late, broken):
        assert stopped_in_words(one) in " ".join(method_in_words(one))
        assert stopped_in_words(one) in in_a_terminal(draw(one))


def test_noise_of_a_covariance(network, digits):
    config = dataclasses.replace(PLAIN, covariance=torch.full((1, 8, 8), 0.01), attacks=0)
    found = study(network, digits.first(3), config)
    assert noise_in_words(found) == "the given covariance"
    assert level_in_words(found, found.curve[1]) == "0.25 × the noise"
    text = in_a_terminal(draw(found))
    assert "× the noise" in text
    assert "σ" not in text


def test_scores_that_are_not_followed_are_left_out(found):
    outputs = torch.zeros_like(found.scores.outputs)
    alone = dataclasses.replace(found, scores=dataclasses.replace(found.scores, outputs=outputs))
    assert "most fragile" in in_a_terminal(draw(alone))


def test_a_nearest_flip_is_so_many_deviations_away_and_so_many_grey_levels(found):
    change = torch.zeros(1, 8, 8)
    change[0, 2, 2] = -0.1
    near = FlippedImage(0, change, 3.14, 7)
    assert nearest_in_words(found, near) == (
        "The smallest change found that makes it 7 is 3.1 standard deviations of the noise away, at most 26 of 255 "
        "grey levels on a pixel."
    )


def test_the_curve_fits_80_columns(found):
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(draw(found))
    (line,) = [line for line in console.export_text().splitlines() if line.startswith(" right ")]
    assert line.split() == ["right", *(f"{point.share:.1%}" for point in found.curve)]


@pytest.mark.parametrize(("width", "scores"), [(80, False), (120, True)])
def test_the_ranking_fits_the_terminal(found, width, scores):
    """Nothing is cut or broken at 80 columns; scores are there where there is room."""
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(Ranking(found))
    text = console.export_text()
    assert ("score of the answer" in text) is scores
    assert "…" not in text
    first = found.images.names[int(found.order[0])]
    (line,) = [line for line in text.splitlines() if line.startswith(f" {first} ")]
    assert flip_in_words(found, int(found.order[0]))[0] in line
    assert len(text.strip().splitlines()) == 4 + 10
