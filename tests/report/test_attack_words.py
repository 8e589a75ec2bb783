"""An attack in a terminal: what was asked, what was missed."""

from __future__ import annotations

import pytest

from netmoments.attacks.box import PixelSupport
from netmoments.attacks.sparse_smooth import SparseSmooth
from netmoments.report.attack_page import render_attack_page
from netmoments.report.attack_study import Choice, conduct_attack
from netmoments.report.attack_words import draw_attack
from tests.report.shown import in_a_terminal


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
