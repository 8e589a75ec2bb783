"""Seeds of random numbers: the same for ever, and another for every purpose and item."""

from __future__ import annotations

from netmoments.sampling.evaluation import random_seed


def test_seeds_are_what_they_always_were():
    assert random_seed(0, "monte-carlo", 0) == 4862794602643682422
    assert random_seed(20261115, "monte-carlo", 7) == 6242148033895693001
    assert random_seed(1, "1", 1) == 6734197056050198910


def test_seeds_depend_on_all_three():
    seeds = {random_seed(seed, name, item) for seed in range(5) for name in ("a", "b", "1") for item in range(200)}
    assert len(seeds) == 5 * 3 * 200
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62
