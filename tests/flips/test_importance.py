import math

import pytest
import torch
from torch import nn

import netmoments as nm
from netmoments.flips.importance import (
    LIKELY_LEFT,
    MIXTURE,
    MOST_LEFT,
    POOL_SAMPLES,
    Controls,
    Estimation,
    RareEstimation,
    by_importance,
    controlled,
    likely_left,
    with_exact_normalizers,
    with_shrinking_share,
)
from netmoments.flips.result import FlipEstimate, Tolerance
from netmoments.flips.search import Search
from tests.flips.classifiers import Ball, Corner, at_distance, linear, noisy_network, run_alone, tail


def estimate(network, noise, seed=0, tolerance=None):
    noisy = noisy_network(network, noise, seed=seed)
    search = run_alone(Search.from_noise(noisy))
    return run_alone(by_importance(noisy, search, tolerance or Tolerance(0.1), 200_000)), noisy


@pytest.mark.parametrize("distance", [3.0, 5.0, 7.9])
def test_a_linear_classifier(distance):
    network = linear()
    found, _ = estimate(network, nm.Gaussian(at_distance(network, distance), std=1.0))
    assert found is not None
    truth = tail(distance)
    assert abs(found.estimate.probability - truth) < 5 * found.estimate.error
    assert found.estimate.error < 0.1 * truth
    assert found.agreed
    assert found.met


def test_a_network_with_two_ways_to_flip():
    """Two layers with ReLUs: 1 − (1 − Φ(−4))(1 − Φ(−4.1))."""
    found, _ = estimate(Corner(4.0, 4.1).eval(), nm.Gaussian(torch.zeros(6), std=1.0))
    assert found is not None
    assert abs(found.estimate.probability - Corner.probability(4.0, 4.1)) < 5 * found.estimate.careful_error


def test_flips_on_all_sides():
    """Outside of a ball: P(χ²₃ > r²) = 2Φ(−r) + √(2/π) r exp(−r²/2)."""
    found, _ = estimate(Ball(5.0).eval(), nm.Gaussian(torch.full((3,), 1e-3), std=1.0))
    truth = 2 * tail(5) + math.sqrt(2 / math.pi) * 5 * math.exp(-12.5)
    assert found is not None
    low, high = found.interval
    assert low < truth < high


def test_wins_are_those_of_the_rivals():
    """The weights of one run's wins vary by about 1.1 of their mean: five standard errors of 1,000 runs are 0.17."""
    network = linear(classes=3, seed=2)
    mean = at_distance(network, 3.5)
    found, noisy = estimate(network, nm.Gaussian(mean, std=1.0), seed=1, tolerance=Tolerance(0.0025))
    assert found is not None
    assert found.estimate.samples >= 1000
    assert float(found.wins.sum()) == pytest.approx(found.estimate.probability, rel=0.17)
    assert float(found.wins[noisy.label]) == 0


def test_a_control_with_a_known_mean_changes_nothing_but_the_variance():
    generator = torch.Generator().manual_seed(0)
    chance = torch.rand(20_000, generator=generator, dtype=torch.float64)
    flips = (torch.rand(20_000, generator=generator) < chance).double()
    both = torch.stack([chance, chance.square()], 1)
    one, two, none = (
        Controls(both[:, :1], (0.5,), (0.0,)),
        Controls(both, (0.5, 1 / 3), (0.0, 0.0)),
        Controls(both, (0.0,), (0.0,)),
    )
    plain = controlled(flips, torch.ones_like(flips), none)
    for controls in (one, two):
        found = controlled(flips, torch.ones_like(flips), controls)
        assert abs(found.probability - 0.5) < 5 * found.error
        assert found.error < 0.85 * plain.error


def test_the_error_of_the_mean_of_a_control_counts():
    """A slope of about 1 on a control whose mean is known to ±0.1."""
    generator = torch.Generator().manual_seed(0)
    chance = torch.rand(20_000, generator=generator, dtype=torch.float64)
    flips = (torch.rand(20_000, generator=generator) < chance).double()
    found = controlled(flips, torch.ones_like(flips), Controls(chance.unsqueeze(1), (0.5,), (0.1,)))
    assert found.error == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("known", [0.01, 0.05, 0.2])
def test_the_largest_sample_is_measured_by_the_estimate_whatever_was_expected(known):
    """The largest residual over the number of runs, whether surrogates expect more flips than there are, or fewer."""
    generator = torch.Generator().manual_seed(0)
    flips = (torch.rand(2000, generator=generator) < 0.05).double()
    found = controlled(
        flips, torch.ones_like(flips), Controls(torch.full_like(flips, known).unsqueeze(1), (known,), (0.0,))
    )
    assert found.largest_share * found.probability == pytest.approx((1 - float(flips.mean())) / 2000)


def test_the_error_of_a_pool_is_part_of_the_error_where_flips_are_rare():
    """The normalizer of ρ is that of its pool: its error is in every sample alike, and samples do not show it."""
    generator = torch.Generator().manual_seed(0)
    flips = (torch.rand(20_000, generator=generator) < 0.5).double()
    ratios = torch.full_like(flips, 1e4)
    sure, unsure = (
        controlled(flips, ratios, Controls(flips.unsqueeze(1), (5e-5,), (error,))).error for error in (0.0, 1.5e-6)
    )
    assert unsure == pytest.approx(math.hypot(sure, 0.03 * 5e-5), rel=0.01)


def test_more_pools_where_more_is_asked():
    """Pools of 8,000 points have normalizers to about 3 %: enough for 10 %, not for 1 %."""
    network = linear()
    noisy = noisy_network(network, nm.Gaussian(at_distance(network, 4.0), std=1.0))
    search = run_alone(Search.from_noise(noisy))
    search.refit()
    assert search.guide is not None
    assert with_exact_normalizers(search.guide, Tolerance(0.1)) is search.guide
    found = with_exact_normalizers(search.guide, Tolerance(0.01))
    assert found.expected_error < search.guide.expected_error / 5
    assert abs(found.expected / tail(4) - 1) < 0.01 + 5 * found.expected_error / found.expected


def test_what_the_largest_sample_adds_falls_faster_than_the_rest():
    """The careful error squared is s² + (share·p)²: with x times the runs, s²/x + (share·p)²/x² is what was wanted."""
    now = FlipEstimate(1e-6, 2e-7, 1000, largest_share=0.3)
    times = (now.careful_error / 1e-7) ** 2
    x = with_shrinking_share(times, now)
    assert x < times
    assert now.error**2 / x + (now.largest_share * now.probability / x) ** 2 == pytest.approx(1e-14)
    assert with_shrinking_share(4.0, FlipEstimate(1e-6, 2e-7, 1000)) == pytest.approx(4.0)
    assert with_shrinking_share(1.0, now) == pytest.approx(1.0)
    assert with_shrinking_share(0.5, now) < 1


def test_no_pool_has_more_samples_than_it_has_points_for():
    """The error of a pool is in all samples of its points, and however many they are, they do not show it."""
    network = linear()
    noisy = noisy_network(network, nm.Gaussian(at_distance(network, 4.0), std=1.0))
    search = run_alone(Search.from_noise(noisy))
    search.refit()
    assert search.guide is not None
    estimation = Estimation(noisy, (search.guide,) * 3, MIXTURE)
    first = estimation.source(0, POOL_SAMPLES)
    assert first is search.guide
    second = estimation.source(0, 1)
    assert not torch.equal(second.pool, first.pool)
    assert estimation.source(0, 1) is second
    assert estimation.source(1, 1) is search.guide
    run_alone(estimation.run(POOL_SAMPLES))
    assert abs(estimation.estimate().probability - tail(4)) < 5 * estimation.estimate().careful_error


def rare_estimation(network, noise, runs):
    """An estimate of rare flips with the same guide for both searches and for all they know, after so many runs."""
    noisy = noisy_network(network, noise)
    search = run_alone(Search.from_noise(noisy))
    run_alone(search.advance())
    estimation = RareEstimation(noisy, (search.guide,) * 3)
    run_alone(estimation.run(runs))
    return estimation, search


def test_runs_keep_counting_with_new_guides():
    """The estimate is that of the mixture of old and new guides, as if all of their densities were known everywhere."""
    estimation, search = rare_estimation(Corner(4.0, 4.1).eval(), nm.Gaussian(torch.zeros(6), std=1.0), 400)
    run_alone(search.advance())
    before = torch.cat(estimation.flips)
    estimation.go_on_with((search.guide,) * 3)
    assert torch.equal(torch.cat(estimation.flips), before)
    assert estimation.divided(100) == [0, 0, 0, 20, 20, 60]
    run_alone(estimation.run(600))
    assert estimation.samples == 1000
    flipped = torch.cat(estimation.flips) > 0
    white, shares = torch.cat(estimation.flipped), torch.tensor([0.08, 0.08, 0.24, 0.12, 0.12, 0.36])
    expected = torch.stack([guide.ratio(white) for guide in estimation.guides], 1) @ shares.double()
    torch.testing.assert_close(estimation.mixture_ratios()[flipped], expected)
    found = estimation.estimate()
    assert abs(found.probability - Corner.probability(4.0, 4.1)) < 5 * found.careful_error
    for number, runs in ((0, 200), (1, 200)):
        alone = estimation.estimate_of_search(number)
        assert alone.samples == runs
        assert abs(alone.probability - Corner.probability(4.0, 4.1)) < 5 * alone.careful_error


def test_what_a_round_leaves_is_an_average_of_what_rounds_left():
    assert likely_left([]) == LIKELY_LEFT
    assert likely_left([50.0]) == LIKELY_LEFT
    assert likely_left([50.0, 20.0]) == pytest.approx(math.sqrt(LIKELY_LEFT * 0.4))
    assert likely_left([50.0, 20.0, 50.0]) == pytest.approx(LIKELY_LEFT ** (1 / 3))
    assert likely_left([50.0, 5e6]) == MOST_LEFT


class SmallerOfTwo(nn.Module):
    """Scores c and min(x₀, x₁): the second is larger where both numbers are above c."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(self, x):
        smaller = x[:, 0] - torch.relu(x[:, 0] - x[:, 1])
        return torch.stack([torch.full_like(smaller, self.threshold), smaller], 1)


def test_a_flip_that_takes_two_things_at_once():
    """Φ(−4)², which two surrogates of the two gradients, as if each alone were a flip, hardly find in 10⁶ runs."""
    noise = nm.Gaussian(torch.zeros(20, dtype=torch.float64), std=1.0)
    found = nm.flip_probability(SmallerOfTwo(4.0).eval(), noise, 0, runs=50_000)
    low, high = found.interval.tolist()
    assert low <= tail(4.0) ** 2 <= high
    assert bool(found.met)
