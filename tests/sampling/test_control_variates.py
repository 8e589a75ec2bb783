"""Sampling with control variates: unbiased, honest about its error, never much worse than without."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import netmoments as nm
from netmoments.sampling import control_variates as control
from netmoments.sampling.control_variates import (
    LinearSurrogate,
    TwoStageSurrogate,
    controlled_monte_carlo,
    controlled_variances,
)
from netmoments.sampling.monte_carlo import SampledMoments
from tests.closeness import assert_close
from tests.networks import random_network, seeded

STD = 0.7
NETWORK = random_network(inputs=12, units=30, outputs=2, seed=0)
POINT = torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
NOISE = nm.Gaussian(POINT, std=STD)
MEAN, COVARIANCE = NETWORK.mean(NOISE), NETWORK.covariance(NOISE)
SLOPES = (
    NETWORK.B * torch.special.ndtr((NETWORK.A @ POINT + NETWORK.c1) / (STD * NETWORK.A.norm(dim=1)))
) @ NETWORK.A  # B diag(Φ) A, what the network does on average

RANDOM = torch.randn(2, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
BASIS = torch.linalg.qr(SLOPES.T).Q
CONTROLS = {
    "expected slopes": SLOPES,
    "random slopes": RANDOM,
    "slopes that say nothing": RANDOM - (RANDOM @ BASIS) @ BASIS.T,  # uncorrelated with the network's outputs
    "no slopes": torch.zeros_like(SLOPES),
    "outputs in another order": SLOPES.flip(0),
}


def repeated(runs: int) -> nm.Gaussian:
    """The noise as a batch of equal entries: as many independent runs in one."""
    return nm.Gaussian(POINT.expand(runs, 12), std=STD)


def assert_unbiased(runs: SampledMoments, mean: Tensor, covariance: Tensor) -> None:
    """The means over runs within 5 of their own standard errors: of 7 numbers, one in 200 000 is further off."""
    for name, truth in (("mean", mean), ("variance", covariance.diagonal()), ("covariance", covariance)):
        values = getattr(runs, name)
        score = (values.mean(0) - truth) / (values.std(0) / len(values) ** 0.5)
        assert score.abs().max() < 5, (name, score)


def assert_honest(runs: SampledMoments, mean: Tensor, covariance: Tensor) -> None:
    """The share of 95 % intervals that cover the truth, within 4 standard deviations √(0.95·0.05/runs) of 95 %; and
    0.015 for estimates that at 1000 samples are not quite normal: plain sampling has 94 % on the same network.
    """
    for name, truth in (("mean", mean), ("variance", covariance.diagonal()), ("covariance", covariance)):
        values, error = getattr(runs, name), getattr(runs, f"{name}_standard_error")
        covered = ((values - truth).abs() <= 1.96 * error).double().mean(0)
        allowed = 4 * (0.95 * 0.05 / len(values)) ** 0.5 + 0.015
        assert (covered - 0.95).abs().max() < allowed, (name, covered)


@pytest.mark.parametrize("name", CONTROLS)
def test_unbiased_and_honest_with_any_control(name):
    noise = repeated(500)
    runs = controlled_monte_carlo(NETWORK, noise, LinearSurrogate(CONTROLS[name], noise), 1000, seed=1)
    assert_unbiased(runs, MEAN, COVARIANCE)
    assert_honest(runs, MEAN, COVARIANCE)


@pytest.mark.parametrize("samples", [20, 23, 100])
@pytest.mark.parametrize("name", ["expected slopes", "random slopes"])
def test_unbiased_from_few_samples(name, samples):
    noise = repeated(4000)
    runs = controlled_monte_carlo(NETWORK, noise, LinearSurrogate(CONTROLS[name], noise), samples, seed=2)
    assert_unbiased(runs, MEAN, COVARIANCE)


def test_a_good_control_helps_and_a_bad_one_costs_little():
    noise = repeated(300)
    plain = nm.monte_carlo(NETWORK, noise, 1000, seed=3)
    good, bad = (
        controlled_monte_carlo(NETWORK, noise, LinearSurrogate(CONTROLS[name], noise), 1000, seed=3)
        for name in ("expected slopes", "slopes that say nothing")
    )
    # a linear control explains the linear part of the variance; of that of squares, what its square is correlated with
    linear = (SLOPES @ SLOPES.T).diagonal() * STD**2 / COVARIANCE.diagonal()
    x = NOISE.sample(400_000, generator=torch.Generator().manual_seed(77))
    squares, lines = (NETWORK(x) - MEAN) ** 2, ((x - POINT) @ SLOPES.T) ** 2
    pairs = zip(squares.T, lines.T, strict=True)
    of_squares = torch.stack([torch.corrcoef(torch.stack(pair))[0, 1] ** 2 for pair in pairs])
    for name, share in (("mean", linear), ("variance", of_squares)):
        spread = [getattr(runs, name).std(0) for runs in (good, plain)]
        assert (spread[0] / spread[1] < 1.2 * (1 - share).sqrt()).all(), name  # two spreads known to 4 % each
    for name in ("mean", "variance", "covariance"):
        ratio = getattr(bad, name).std(0) / getattr(plain, name).std(0)
        assert (ratio < 1.05).all(), (name, ratio)  # same samples: the ratio is known better than either


def curved(x: Tensor) -> Tensor:
    """Three outputs of two inputs that no linear function is like, the last one least."""
    return torch.stack([torch.sin(x[:, 0]) + 0.5 * x[:, 1], x[:, 0].abs(), torch.cos(2 * x[:, 0])], -1)


def curved_moments() -> tuple[Tensor, Tensor]:
    """By the trapezoidal rule with the kink on the grid, to about 1e-6; x₂ adds 1/4 to the first variance."""
    x = torch.linspace(-10, 10, 20_001, dtype=torch.float64)
    density = torch.exp(-(x**2) / 2)
    density /= density.sum()
    y = curved(torch.stack([x, 0 * x], -1))
    mean = density @ y
    covariance = (y - mean).T * density @ (y - mean)
    covariance[0, 0] += 0.25
    return mean, covariance


def test_strongly_nonlinear_function():
    noise = nm.Gaussian(torch.zeros(500, 2, dtype=torch.float64), std=1.0)
    # an expected slope, an arbitrary one (whose square is worth more), and none at all
    slopes = torch.tensor([[0.6, 0.5], [1.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    runs = controlled_monte_carlo(curved, noise, LinearSurrogate(slopes, noise), 1000, seed=4)
    assert_unbiased(runs, *curved_moments())
    assert_honest(runs, *curved_moments())
    plain = nm.monte_carlo(curved, noise, 1000, seed=4)
    assert (runs.mean_standard_error[:, :2].mean(0) < 0.6 * plain.mean_standard_error[:, :2].mean(0)).all()


@dataclass(frozen=True, eq=False)
class Changed:
    """a·ℓ + b of a surrogate, with its moments."""

    of: TwoStageSurrogate
    factor: float
    offset: float

    @property
    def mean(self) -> Tensor:
        return self.factor * self.of.mean + self.offset

    @property
    def covariance(self) -> Tensor:
        return self.factor**2 * self.of.covariance

    def __call__(self, x: Tensor) -> Tensor:
        return self.factor * self.of(x) + self.offset


@pytest.mark.parametrize(("factor", "offset"), [(1.0, 0.0), (-3.0, 5.0)])
def test_a_surrogate_that_is_the_function_leaves_no_error(factor, offset):
    """Slopes are as exact as the 1e-10 on the diagonal of the normal equations lets them be."""
    exact = Changed(TwoStageSurrogate(NETWORK, NOISE), factor, offset)
    found = controlled_monte_carlo(NETWORK, NOISE, exact, 200)
    assert_close(found.mean, MEAN, rtol=1e-8)
    assert_close(found.covariance, COVARIANCE, atol=1e-7)
    for name in ("mean", "variance", "covariance"):
        assert getattr(found, f"{name}_standard_error").max() < 1e-8, name


def test_the_samples_are_those_of_plain_sampling():
    """Without any control the mean is the plain one, whatever the folds."""
    none = LinearSurrogate(torch.zeros_like(SLOPES), NOISE)
    found = controlled_monte_carlo(NETWORK, NOISE, none, 203, seed=9, batch=50)
    plain = nm.monte_carlo(NETWORK, NOISE, 203, seed=9, batch=50)
    assert_close(found.mean, plain.mean, rtol=1e-13)
    # means over folds of 40 instead of all: standard errors differ by the 1/√400 to which a spread of 203 is known
    assert_close(found.mean_standard_error, plain.mean_standard_error, rtol=0.05)
    assert found.samples == 203
    again = controlled_monte_carlo(NETWORK, NOISE, none, 203, seed=9, batch=50)
    assert torch.equal(found.covariance, again.covariance)


def test_variances_alone_are_those_of_the_whole():
    noise = repeated(3)
    surrogate = LinearSurrogate(SLOPES + 0.1 * RANDOM, noise)
    alone, whole = (
        run(NETWORK, noise, surrogate, 101, seed=6) for run in (controlled_variances, controlled_monte_carlo)
    )
    for name in alone._fields:
        assert_close(getattr(alone, name), getattr(whole, name), rtol=1e-9, what=name)


def test_constant_outputs_and_equal_ones():
    """A constant has variance 0 and no error; equal outputs with equal controls make every regression singular."""
    slopes = torch.stack([SLOPES[0], SLOPES[0], SLOPES[1]])
    both = controlled_monte_carlo(
        lambda x: torch.stack([NETWORK(x)[:, 0], NETWORK(x)[:, 0], 0 * x[:, 0] + 3], -1),
        NOISE, LinearSurrogate(slopes, NOISE), 500,
    )  # fmt: skip
    assert_close(both.covariance[0, 1], both.covariance[0, 0], rtol=1e-9)
    assert_close(both.mean[2], torch.tensor(3.0), rtol=1e-15)
    assert both.covariance[2].abs().max() < 1e-12
    assert both.covariance_standard_error[2].max() < 1e-12
    still = nm.Gaussian(POINT, std=0.0)
    found = controlled_monte_carlo(NETWORK, still, LinearSurrogate(SLOPES, still), 50)
    assert_close(found.mean, NETWORK(POINT), rtol=1e-14)
    assert found.covariance.abs().max() < 1e-25
    assert found.variance_standard_error.abs().max() < 1e-25


def test_a_control_that_is_rounding_is_not_used():
    """In float32 the sum of 3000 has an error of its own, which is no part of the surrogate's known moments."""
    noise = NOISE.to(torch.float32)
    network = nm.AffineReluAffine(torch.full((1, 12), 1e-9), torch.full((1,), 3000.1), torch.ones(1, 1), torch.zeros(1))
    target = lambda x: x[:, :1]  # noqa: E731
    found = controlled_monte_carlo(target, noise, TwoStageSurrogate(network, noise), 400)
    plain = nm.monte_carlo(target, noise, 400)
    assert_close(found.mean, plain.mean, rtol=1e-6)


def test_a_control_that_hardly_ever_varies():
    """One sample in 2000 opens the surrogate's unit: on the other folds it is a constant, often enough."""
    row = torch.zeros(1, 12, dtype=torch.float64)
    row[0, 0] = 1.0
    rare = nm.AffineReluAffine(row, -POINT[:1] - 3.3 * STD, torch.ones(1, 1).double(), torch.zeros(1).double())
    noise = repeated(2000)
    runs = controlled_monte_carlo(lambda x: x[:, :1], noise, TwoStageSurrogate(rare, noise), 100, seed=10)
    assert_unbiased(runs, POINT[:1], torch.full((1, 1), STD**2, dtype=torch.float64))
    assert (runs.mean - POINT[0]).abs().max() < 1.0  # plain: 0.07 a run


def test_shapes_and_blocks(monkeypatch):
    noise = nm.Gaussian(torch.zeros(4, 1, 5, 5), std=0.1)
    slopes = torch.eye(25)[:10] + 0.1

    def function(x: Tensor) -> Tensor:
        return x.reshape(len(x), 5, 5)[:, :2].relu()

    found = controlled_monte_carlo(function, noise, LinearSurrogate(slopes, noise), 60)
    assert found.mean.shape == found.variance.shape == found.variance_standard_error.shape == (4, 2, 5)
    assert found.covariance.shape == found.covariance_standard_error.shape == (4, 10, 10)
    assert found.mean.dtype == torch.float64
    assert torch.equal(found.covariance, found.covariance.mT)
    assert torch.equal(found.variance.flatten(1), found.covariance.diagonal(dim1=1, dim2=2))
    monkeypatch.setattr(control, "BLOCK", 1)
    blocks = controlled_monte_carlo(function, noise, LinearSurrogate(slopes.expand(4, 10, 25), noise), 60)
    assert_close(blocks.covariance, found.covariance, rtol=1e-9, atol=1e-15)
    scalar = controlled_monte_carlo(lambda x: x.sum((1, 2, 3)), noise, LinearSurrogate(torch.ones(1, 25), noise), 20)
    assert scalar.mean.shape == (4,)
    assert scalar.covariance.shape == (4, 1, 1)


def test_networks_with_a_batch_of_their_own():
    generator = torch.Generator().manual_seed(0)
    network = nm.AffineReluAffine(
        torch.randn(3, 6, 4, generator=generator), torch.zeros(6), torch.ones(2, 6), torch.zeros(2)
    )
    image = nm.Gaussian(torch.zeros(1, 2, 2), std=0.5)
    for noise in (image, nm.Gaussian(torch.zeros(3, 4), std=0.5)):
        found = controlled_monte_carlo(network, noise, TwoStageSurrogate(network, noise), 50)
        assert_close(found.mean, network.mean(noise), rtol=1e-5)
        assert_close(found.covariance, network.covariance(noise), rtol=1e-4)
        linear = LinearSurrogate(network.B @ network.A / 2, noise)
        assert controlled_monte_carlo(network, noise, linear, 50).mean.shape == (3, 2)


def test_moments_of_the_surrogates():
    factor = torch.randn(12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(11))
    noise = nm.Gaussian(POINT.float(), nm.LowRank(factor.float(), 0.5))
    for surrogate in (LinearSurrogate(SLOPES.float(), noise), TwoStageSurrogate(NETWORK.to(torch.float32), noise)):
        assert surrogate.mean.dtype == surrogate.covariance.dtype == torch.float64
        sampled = nm.monte_carlo(surrogate, noise, 50_000, seed=12)
        assert ((sampled.mean - surrogate.mean) / sampled.mean_standard_error).abs().max() < 5
        assert ((sampled.covariance - surrogate.covariance) / sampled.covariance_standard_error).abs().max() < 5


def test_no_gradient_is_kept():
    slopes = SLOPES.clone().requires_grad_()
    found = controlled_monte_carlo(NETWORK, NOISE, LinearSurrogate(slopes, NOISE), 20)
    assert not found.mean.requires_grad
    assert not found.covariance.requires_grad


class Odd:
    """A surrogate whose parts are given."""

    def __init__(self, mean: Tensor, covariance: Tensor, values: object = None) -> None:
        self.mean, self.covariance, self.values = mean, covariance, values

    def __call__(self, x: Tensor) -> object:
        return self.values


ZEROS, EYE = torch.zeros(2), torch.eye(2)
WRONG = {
    "too few samples": ({"samples": 19}, ValueError, "at least 20 samples are needed.*got 19; use monte_carlo"),
    "samples": ({"samples": 2.5}, ValueError, "samples must be an integer"),
    "other outputs": (
        {"surrogate": LinearSurrogate(SLOPES.repeat(2, 1), NOISE)}, ValueError,
        r"mean must have shape \(2,\) or broadcast to it, for the 2 outputs.*got a float64 tensor of shape \(4,\)",
    ),
    "a batch of its own": (
        {"surrogate": LinearSurrogate(SLOPES.expand(4, 2, 12), NOISE)}, ValueError, r"got .* shape \(4, 2\)"
    ),
    "covariance": ({"surrogate": Odd(ZEROS, ZEROS)}, ValueError, r"covariance must have shape \(2, 2\)"),
    "not finite": ({"surrogate": Odd(ZEROS / 0, EYE)}, ValueError, "mean must be finite"),
    "negative variance": ({"surrogate": Odd(ZEROS, -EYE)}, ValueError, "variances must be at least 0"),
    "values": ({"surrogate": Odd(ZEROS, EYE, ZEROS)}, ValueError, "must return a floating-point tensor of shape"),
    "values not finite": (
        {"surrogate": Odd(ZEROS, EYE, torch.full((20, 2), float("nan")))}, ValueError,
        "what the surrogate returned must be finite",
    ),
    "function": ({"function": 3}, TypeError, "function must be callable"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_bad_input(name):
    changed, error, message = WRONG[name]
    arguments = {
        "function": NETWORK, "noise": NOISE, "surrogate": LinearSurrogate(SLOPES, NOISE), "samples": 20, **changed,
    }  # fmt: skip
    with pytest.raises(error, match=message):
        controlled_monte_carlo(**arguments)


class Overwriting(nn.Module):
    """A network that normalizes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Sequential(nn.Linear(4, 8), nn.SiLU(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x.sub_(0.3).div_(0.2))


@pytest.mark.filterwarnings("ignore:.* which is smooth")
@pytest.mark.parametrize("control_method", ["sketch", "linear"])
def test_a_network_may_write_into_its_samples(control_method):
    net, given = seeded(Overwriting, torch.float32), nm.Gaussian(torch.ones(4), std=0.1)
    found = nm.output_moments(net, given, nm.Sampling(1000, control=control_method))
    truth = nm.monte_carlo(lambda x: net(x.clone()), given, 50_000)
    error = (found.error.mean**2 + truth.mean_standard_error**2).sqrt()
    assert float(((found.mean - truth.mean).abs() / error).max()) < 5
