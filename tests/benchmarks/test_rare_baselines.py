"""Other methods for rare flips, on linear classifiers whose flips are known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from benchmarks.rare_baselines import (
    RareEstimate,
    WhiteMargin,
    adapted,
    drawn_again,
    last_particle,
    log_normal_interval,
    moved,
    plain,
    plain_runs,
    splitting,
)

QUANTILES = {1e-3: 3.0902323062, 1e-4: 3.7190164855, 1e-6: 4.7534243088}
"""Φ⁻¹(1 − p)."""


def linear_margin(distance: float, sigma: float = 0.5, size: int = 20) -> WhiteMargin:
    """Two classes whose boundary is so many standard deviations of the noise away from the image."""
    network = nn.Linear(size, 2, bias=False).double()
    network.weight.data = torch.randn(2, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    normal = (network.weight[0] - network.weight[1]).detach()
    return WhiteMargin(network.eval(), sigma * distance * normal / normal.norm(), sigma, 0)


def averaged_ratio(found: list[RareEstimate], truth: float) -> tuple[float, float]:
    """The mean of estimates over the truth, and its standard error by the errors that they state."""
    error = math.sqrt(sum(one.relative_error**2 for one in found)) / len(found)
    return sum(one.probability for one in found) / len(found) / truth, error


@pytest.mark.parametrize("truth", QUANTILES)
def test_splitting_is_right_on_average(truth):
    found = [splitting(linear_margin(QUANTILES[truth]), seed, particles=500) for seed in range(8)]
    ratio, error = averaged_ratio(found, truth)
    assert abs(ratio - 1) < 5 * error
    assert all(one.interval[0] < one.probability < one.interval[1] for one in found)


@pytest.mark.parametrize(("truth", "particles", "together"), [(1e-3, 320, 20), (1e-6, 320, 20), (1e-3, 40, 1)])
def test_the_last_particle_is_right_on_average(truth, particles, together):
    """A few at a time, and one at a time as printed."""
    margins = [linear_margin(QUANTILES[truth]) for _ in range(3)]
    found = [last_particle(margin, seed, particles, 10, together) for seed, margin in enumerate(margins)]
    ratio, error = averaged_ratio(found, truth)
    assert abs(ratio - 1) < 5 * error
    for one in found:
        assert one.relative_error == pytest.approx(math.sqrt(-math.log(one.probability) / particles))


def test_plain_samples():
    found = plain(linear_margin(QUANTILES[1e-3]), 100_001)
    assert abs(found.probability - 1e-3) < 5 * math.sqrt(1e-3 / 1e5)
    assert found.interval[0] < 1e-3 < found.interval[1]
    assert found.runs == 100_001
    assert found.relative_error == pytest.approx(0.1, rel=0.2)
    assert plain_runs(1e-3, 0.1) == pytest.approx(99_900)


def test_every_run_is_counted():
    seen = []
    margin = linear_margin(3.0)
    network = margin.network
    margin.network = lambda x: (seen.append(len(x)), network(x))[1]
    found = splitting(margin, particles=100, moves=3)
    assert sum(seen) == found.runs == margin.runs
    assert (found.runs - 100) % 300 == 0
    assert found.runs_for(found.relative_error / 2) == pytest.approx(4 * found.runs)


def test_a_margin_is_against_the_best_other_class():
    margin = WhiteMargin(nn.Identity(), torch.tensor([[1.0], [0.0], [0.5]]).squeeze(1), 2.0, 0)
    white = torch.tensor([[0.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    assert margin(white).tolist() == [0.5, -1.0]


@pytest.mark.parametrize("method", [splitting, last_particle])
def test_common_flips_and_none(method):
    common = method(linear_margin(0.0), particles=400)
    assert abs(common.probability - 0.5) < 5 * common.relative_error
    never = WhiteMargin(lambda x: torch.stack([torch.ones(len(x)), x[:, 0] * 0], 1), torch.zeros(3), 1.0, 0)
    found = method(never, particles=20, moves=1)
    assert found.probability == 0
    assert found.interval[0] == 0


def test_moves_keep_the_noise_below_the_level():
    """ε₁ of N(0, I) given ε₁ > 1 has mean φ(1)/Φ(−1) = 1.5251 and variance 1 + 1.5251 − 1.5251²."""
    margin = WhiteMargin(lambda x: torch.cat([2 - x[:, :1], x[:, :1] * 0], 1), torch.zeros(3), 1.0, 0)
    generator = torch.Generator().manual_seed(0)
    white = margin.normal(40_000, generator)
    white = white[white[:, 0] >= 1]
    white, values, _ = moved(margin, white, margin(white), 1.0, 0.7, 10, generator)
    assert float(values.max()) <= 1
    error = math.sqrt((1 + 1.5251 - 1.5251**2) / len(white))
    assert abs(float(white[:, 0].mean()) - 1.5251) < 5 * error
    assert abs(float(white[:, 1].mean())) < 5 / math.sqrt(len(white))


def test_particles_are_drawn_again_from_those_below():
    chosen = drawn_again(torch.tensor([False, True, False, True]), 50, torch.Generator().manual_seed(0))
    assert len(chosen) == 50
    assert set(chosen.tolist()) == {1, 3}


def test_steps_adapt_and_intervals_are_symmetric_in_logarithms():
    assert adapted(0.5, 0.9) > 0.5 > adapted(0.5, 0.1)
    low, high = log_normal_interval(1e-6, 0.2)
    assert low * high == pytest.approx(1e-12)
    assert math.log(high / low) == pytest.approx(2 * 1.959964 * 0.2)
