"""Sizes of pieces of work, and budgets."""

from __future__ import annotations

import pytest
import torch

from netmoments.memory import PIECE, elements_together, gigabytes, matrices_together, memory_limit, scratch_budget

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", PIECE["cpu"])
def test_a_piece_has_as_many_entries_as_fit_and_at_least_one(kind):
    allowed, like = PIECE["cpu"][kind], torch.zeros(())
    count = elements_together(kind, like, 250)
    assert count * 1000 <= allowed < (count + 1) * 1000
    assert elements_together(kind, like.double(), 250) == count // 2
    assert elements_together(kind, like, 2**60) == 1
    assert elements_together(kind, like.to("meta"), 250) == count  # any other device is a CPU
    assert PIECE["cuda"][kind] > allowed


def test_budgets():
    assert scratch_budget(CPU, 2**20) == 2**20
    assert scratch_budget(CPU, None) == PIECE["cpu"]["scratch"]
    assert memory_limit(CPU, 12345) == 12345
    assert 0 < memory_limit(CPU, None) < 2**45
    for budget in (0, 10, 2.5e6, True):
        with pytest.raises(ValueError, match=f"memory_budget must be a number of bytes, at least 65536, got {budget}"):
            scratch_budget(CPU, budget)
    for budget in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match=f"memory_budget must be a positive number of bytes, got {budget}"):
            memory_limit(CPU, budget)


def test_half_of_a_budget_is_for_the_work():
    like = torch.zeros(())
    most = elements_together("backward", like, 6000)
    assert elements_together("backward", like, 6000, 2**50) == most > 100
    assert elements_together("backward", like, 6000, 2**20) == 2**19 // 24_000 < most
    assert elements_together("backward", like, 10**12, 1) == 1


def test_matrices_fill_a_budget():
    like = torch.zeros(())
    assert matrices_together(like, 1000, 12_000) == 3
    assert matrices_together(like, 10**6, 1) == 1
    assert 1 <= matrices_together(like, 1000, None) <= PIECE["cpu"]["matrices"] // 4000


@pytest.mark.parametrize(("count", "words"), [(2.5e10, "25 GB"), (1.25e9, "1.2 GB"), (2e7, "20 MB"), (3e5, "0.3 MB")])
def test_bytes_are_told_in_words(count, words):
    assert gigabytes(count) == words
