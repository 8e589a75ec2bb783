"""Monte Carlo: sums, standard errors, merging, shapes, reproducibility; and the paper's relative difference."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import netmoments as nm
from benchmarks.measure import class_frequencies
from netmoments.checks import random_seed
from netmoments.sampling.monte_carlo import MomentSums
from tests.closeness import assert_close, assert_within_standard_errors

NOISE = nm.Gaussian(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64), nm.LowRank(torch.ones(3, 1).double(), 0.5))


def skewed(x: Tensor) -> Tensor:
    """Two correlated, skewed outputs."""
    return torch.stack([torch.relu(x[:, 0] + x[:, 1]), torch.exp(0.3 * x[:, 2])], -1)


def test_moments_are_those_of_the_samples():
    own = random_seed(3, "samples", 0)  # 3 itself may be what weights were drawn with
    y = skewed(NOISE.sample(5000, generator=torch.Generator().manual_seed(own)))
    result = nm.monte_carlo(skewed, NOISE, samples=5000, seed=3, batch=5000)
    assert_close(result.mean, y.mean(0), rtol=1e-13)
    assert_close(result.covariance, torch.cov(y.T), rtol=1e-12)
    assert_close(result.variance, y.var(0), rtol=1e-12)
    assert (result.samples, result.method) == (5000, "sampling")


def test_sums_about_any_point():
    generator = torch.Generator().manual_seed(4)
    values = 1e3 + torch.randn(200, 2, 3, dtype=torch.float64, generator=generator)
    whole = MomentSums(values[:5].mean(0))
    whole.add(values)
    point = values.mean(0) + 0.1
    direct = MomentSums(point)
    direct.add(values)
    for found, expected in zip(whole.about(point), (direct.second, direct.fourth), strict=True):
        assert_close(found, expected, atol=1e-8)


def test_the_mean_may_be_far_from_zero():
    """Sums about a shift: a mean of 1e6 with a deviation of 1e-3 keeps its variance."""
    noise = nm.Gaussian(torch.tensor([1e6], dtype=torch.float64), std=1e-3)
    result = nm.monte_carlo(lambda x: x, noise, samples=20_000, seed=1, batch=500)
    assert result.variance.item() == pytest.approx(1e-6, rel=0.05)


def test_standard_errors_are_the_spread_over_runs():
    """400 runs of 200 samples: the mean of the squared standard errors is the variance of the estimates."""
    runs = [nm.monte_carlo(skewed, NOISE, samples=200, seed=seed) for seed in range(400)]
    for name in ("mean", "variance", "covariance"):
        estimates = torch.stack([getattr(run, name) for run in runs])
        claimed = torch.stack([getattr(run, f"{name}_standard_error") for run in runs]).square().mean(0).sqrt()
        ratio = claimed / estimates.std(0)
        # the spread of 400 is known to 1/√800 = 3.5 %, more for the heavy-tailed ones; 20 % is five times that
        assert (ratio - 1).abs().max() < 0.2, (name, ratio)


def test_shapes():
    noise = nm.Gaussian(torch.zeros(4, 1, 5, 5), std=0.1)
    result = nm.monte_carlo(lambda x: x.reshape(len(x), 5, 5)[:, :2], noise, samples=50)
    assert result.mean.shape == (4, 2, 5)
    assert result.covariance.shape == (4, 10, 10)
    assert result.mean.dtype == torch.float64
    scalar = nm.monte_carlo(lambda x: x.sum((1, 2, 3)), noise, samples=50)
    assert scalar.mean.shape == (4,)
    assert scalar.covariance.shape == (4, 1, 1)


def test_seeds_and_batches():
    first, again = (nm.monte_carlo(skewed, NOISE, samples=300, seed=9) for _ in range(2))
    assert torch.equal(first.mean, again.mean)
    assert not torch.equal(first.mean, nm.monte_carlo(skewed, NOISE, samples=300, seed=10).mean)
    uneven = nm.monte_carlo(skewed, NOISE, samples=301, seed=9, batch=100)
    assert uneven.samples == 301


def test_a_network_of_the_library_gets_images_and_batches_of_its_own():
    image = nm.Gaussian(torch.zeros(1, 2, 2), std=0.5)
    weights = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(0))
    network = nm.AffineReluAffine(weights, torch.zeros(6), torch.ones(2, 6), torch.zeros(2))
    sampled = nm.monte_carlo(network, image, samples=50_000, seed=2)
    assert sampled.mean.shape == (3, 2)
    assert_within_standard_errors(sampled.mean, network.mean(image), sampled.mean_standard_error)
    assert_within_standard_errors(sampled.variance, network.variance(image), sampled.variance_standard_error)
    batch = nm.Gaussian(torch.arange(3.0).reshape(3, 1).expand(3, 4), std=0.5)
    sampled = nm.monte_carlo(network, batch, samples=20_000, seed=3, batch=1000)
    assert_within_standard_errors(sampled.mean, network.mean(batch), sampled.mean_standard_error)


def test_no_gradient_is_kept():
    weight = torch.ones(3, 2, dtype=torch.float64, requires_grad=True)
    assert not nm.monte_carlo(lambda x: x @ weight, NOISE, samples=10).mean.requires_grad


def test_relative_difference():
    x = torch.tensor([1.0, 0.0, -1.0, 0.0, 3.0])
    y = torch.tensor([1.0, 0.0, 1.0, 2.0, 1.0])
    assert nm.relative_difference(x, y).tolist() == pytest.approx([0.0, 0.0, 2.0, 2.0, 1.0], abs=1e-15)
    huge = torch.tensor([1e308], dtype=torch.float64)
    assert nm.relative_difference(huge, -huge).tolist() == [2.0]
    assert nm.relative_difference(torch.full((1,), 5e-324, dtype=torch.float64), 0 * huge).tolist() == [2.0]


def test_relative_difference_is_symmetric_and_bounded(generator):
    """Numbers of all sizes and signs, zeros among them."""
    x, y = torch.randn(2, 10_000, dtype=torch.float64, generator=generator)
    x, y = (v * 10.0 ** torch.randint(-300, 300, v.shape, generator=generator).double() for v in (x, y))
    x[::100], y[::150] = 0.0, 0.0
    value = nm.relative_difference(x, y)
    assert bool(((value >= 0) & (value <= 2)).all())
    assert torch.equal(value, nm.relative_difference(y, x))
    assert not bool(nm.relative_difference(x, x).any())


NETWORK = nm.AffineReluAffine(torch.ones(4, 3), torch.zeros(4), torch.ones(2, 4), torch.zeros(2))
SINGLE = nm.Gaussian(torch.zeros(3), std=1.0)
X = torch.zeros(3)
BAD: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "seed": (lambda: nm.monte_carlo(NETWORK, SINGLE, 10, seed=-1), ValueError, "seed must be an integer of at least 0"),
    "one sample": (
        lambda: nm.monte_carlo(NETWORK, SINGLE, 1),
        ValueError,
        "samples must be an integer of at least 2, got 1",
    ),
    "batch of none": (
        lambda: nm.monte_carlo(NETWORK, SINGLE, 10, batch=0),
        ValueError,
        "batch must be an integer of at least 1",
    ),
    "a tensor": (lambda: nm.monte_carlo(NETWORK, X, 10), TypeError, r"noise must be a netmoments\.Gaussian"),
    "not a function": (lambda: nm.monte_carlo(3.0, SINGLE, 10), TypeError, "function must be callable, got 3.0"),
    "function of another shape": (
        lambda: nm.monte_carlo(lambda x: x.sum(), SINGLE, 10),
        ValueError,
        "one row for each of the 10 inputs",
    ),
    "function of integers": (lambda: nm.monte_carlo(lambda x: x.argmax(-1), SINGLE, 10), TypeError, "floating-point"),
    "function that overflows": (lambda: nm.monte_carlo(lambda x: x / 0, SINGLE, 10), ValueError, "NaN or infinite"),
    "difference of nan": (lambda: nm.relative_difference(X, X * math.nan), ValueError, "y must be finite"),
    "difference of shapes": (lambda: nm.relative_difference(X, torch.ones(2)), ValueError, "shapes must broadcast"),
    "difference of lists": (lambda: nm.relative_difference([1.0], X), TypeError, "x must be a torch tensor"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    call, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        call()


def test_class_frequencies():
    """Of two scores x and −x the first wins with probability Φ(m/s), within five standard errors of each frequency."""
    mean = torch.tensor([[0.0], [0.5], [-1.0]], dtype=torch.float64)
    found = class_frequencies(lambda x: torch.cat([x, -x], 1), nm.Gaussian(mean, std=1.0), 20_000, seed=4)
    wins = torch.special.ndtr(mean.squeeze(1))
    assert found.shape == (3, 2)
    assert_close(found.sum(1), torch.ones(3), atol=1e-15)
    assert_within_standard_errors(found[:, 0], wins, (wins * (1 - wins) / 20_000).sqrt())
