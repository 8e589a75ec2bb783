"""The report on noise in a terminal."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from netmoments.data.images import Skipped
from netmoments.report.noise_words import draw, probability_in_words, verdict_in_words


def test_the_terminal_shows_every_part(found):
    console = Console(width=110, record=True, file=io.StringIO())
    skipped = dataclasses.replace(found.images, skipped=(Skipped("bad.png", "not an image"),))
    console.print(draw(dataclasses.replace(found, images=skipped)))
    text = console.export_text()
    for part in ("Answers that are right, 40 images", "most fragile", "beside 4,000 samples", "bad.png: not an image"):
        assert part in text


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
