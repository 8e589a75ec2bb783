"""Events that few samples show: what wider noise says of them, and errors that are true all the same."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import Tensor, nn

import netmoments as nm
from netmoments.sampling.estimate import (
    SQUARES,
    WIDE_PAIRS,
    WIDENING,
    residual_variance,
    unseen_variances,
    wide_residuals,
)
from tests.closeness import assert_close

# formulas


def moment_beyond(h: float, power: int) -> float:
    """E relu(z − h)^power by quadrature."""
    return integrate.quad(lambda z: (z - h) ** power * stats.norm.pdf(z), h, h + 12)[0]


@pytest.mark.parametrize("samples", [96, 256, 1152, 10_000])
def test_what_is_left_of_a_relu_that_was_seldom_seen(samples):
    """The power is 1.3 to 1.5 times what is left of its spread, and for squares 2.1 to 3.7 times."""
    h, s = stats.norm.isf(5 / samples), WIDENING
    values, squares = (
        moment_beyond(h, power) / (s**power * moment_beyond(h / s, power)) for power in (2, 4)
    )  # fmt: skip
    share = unseen_variances(torch.ones(2, 1, 1, dtype=torch.float64), torch.tensor([samples], dtype=torch.float64))
    assert 1.25 < float(share[0]) / values < 1.55
    assert 2.1 < float(share[1]) / squares < 3.7
    assert float(share[1]) == pytest.approx(float(share[0]) / SQUARES)


def test_wide_pairs_see_what_opens_at_three_deviations():
    assert 1 - stats.norm.cdf(3 / WIDENING) ** (2 * WIDE_PAIRS) > 0.975


def test_what_a_line_leaves():
    generator = torch.Generator().manual_seed(1)
    target, control = torch.randn(2, 20, 3, dtype=torch.float64, generator=generator)
    found = residual_variance(target, control)
    for k in range(3):
        fitted = np.polyval(np.polyfit(control[:, k], target[:, k], 1), control[:, k])
        assert float(found[k]) == pytest.approx(np.square(target[:, k].numpy() - fitted).mean(), rel=1e-10)
    assert_close(residual_variance(target, torch.zeros_like(target)), target.var(0, correction=0), rtol=1e-12)


def test_the_spread_at_wider_noise():
    """Of e and t about their own means, less what goes with the square of the control."""
    generator = torch.Generator().manual_seed(2)
    first, second, linear = torch.randn(3, 16, 2, 3, dtype=torch.float64, generator=generator)
    even, odd = (first + second) / 2, (first - second) / 2
    even = even - even.mean(0)
    found = wide_residuals(first, second, linear)
    assert found.shape == (2, 2, 3)
    for one, target in zip(found, (even, odd**2 + even**2), strict=True):
        assert_close(one, residual_variance(target, linear**2) * 16 / 14, rtol=1e-12)
    assert_close(wide_residuals(3 * linear + 7, -3 * linear + 7, linear), torch.zeros(2, 2, 3), atol=1e-24)
    first[3, 1, 2] = math.inf
    assert wide_residuals(first, second, None)[:, 1, 2].tolist() == [0.0, 0.0]


# whole answers, where the truth is known


class Kink(nn.Module):
    """x + w relu(y − h), as two layers with something smooth behind them that is the identity here."""

    def __init__(self, height: float, weight: float) -> None:
        super().__init__()
        self.height, self.weight = height, weight

    def forward(self, x: Tensor) -> Tensor:
        kinked = x[:, 0] + self.weight * torch.relu(x[:, 1] - self.height)
        return nn.functional.softplus(kinked + 30).unsqueeze(1)

    def moments(self) -> tuple[float, float]:
        h = -torch.tensor(self.height, dtype=torch.float64)
        one = torch.ones_like(h)
        return 30 + self.weight * float(nm.relu_mean(h, one)), 1 + self.weight**2 * float(nm.relu_variance(h, one))


class Jump(nn.Module):
    """The sum of four numbers by its deviation, and w more where one is beyond h; a smooth output beside it."""

    def __init__(self, height: float, weight: float) -> None:
        super().__init__()
        self.height, self.weight = height, weight

    def forward(self, x: Tensor) -> Tensor:
        beyond = (x[:, 1] > self.height).to(x.dtype)
        return torch.stack([x.sum(1) / 2 + self.weight * beyond, x[:, 2] + 0.1 * torch.tanh(x[:, 3])], 1)

    def moments(self) -> tuple[float, float]:
        share = float(stats.norm.sf(self.height))
        variance = 1 + self.weight**2 * share * (1 - share) + self.weight * float(stats.norm.pdf(self.height))
        return self.weight * share, variance


SEEDS = 40
RARE = [Kink(2.5, 10.0), Jump(2.5, 3.0)]


def answers(network: Kink | Jump, seeds: int, **options: float) -> list[nm.OutputMoments]:
    noise = nm.Gaussian(torch.zeros(4, dtype=torch.float64), std=1.0)
    model = nm.NetworkModel(network.eval(), noise.mean)
    return [nm.output_moments(model, noise, nm.Auto(seed=seed, **options)) for seed in range(seeds)]


@pytest.mark.parametrize("network", RARE, ids=lambda network: f"{type(network).__name__} {network.height}")
def test_errors_of_rare_events_are_as_large_as_they_say(network):
    """Of 40 seeds at least 85 % within twice the stated errors, of means and variances together; without what wider
    noise says, and without allowing for errors that are badly known, 45 and 80 % are.
    """
    mean, variance = network.moments()
    found = answers(network, SEEDS)
    of_mean = [abs(float(one.mean[0]) - mean) <= 2 * float(one.error.mean[0]) for one in found]
    of_variance = [abs(float(one.variance[0]) - variance) <= 2 * float(one.error.variance[0]) for one in found]
    assert sum(of_mean + of_variance) >= 0.85 * 2 * SEEDS


def test_a_first_round_that_saw_nothing_does_not_weigh_too_much():
    """So many samples are unbiased: the average of 120 seeds is within 4.5 of its standard errors."""
    network = Jump(2.5, 3.0)
    mean, variance = network.moments()
    found = answers(network, 120, tolerance=1e-9, samples=1200)
    for name, truth in (("mean", mean), ("variance", variance)):
        values = torch.stack([getattr(one, name)[0] for one in found])
        assert float((values.mean() - truth).abs() / (values.std() / len(values) ** 0.5)) < 4.5, name


class Within(nn.Module):
    """Numbers only up to a bound; beyond it an error, or no numbers."""

    def __init__(self, bound: float, refuses: bool) -> None:
        super().__init__()
        self.bound, self.refuses = bound, refuses

    def forward(self, x: Tensor) -> Tensor:
        beyond = x.abs() > self.bound
        if self.refuses and bool(beyond.any()):
            raise ValueError("out of range")
        return torch.tanh(torch.where(beyond, math.nan, x))[:, :2]


@pytest.mark.parametrize("refuses", [True, False])
def test_inputs_that_the_noise_itself_does_not_give_may_be_refused(refuses):
    """At seven deviations, which wider noise reaches in some of its numbers."""
    noise = nm.Gaussian(torch.zeros(200), std=0.2)
    found = nm.output_moments(Within(1.4, refuses).eval(), noise, tolerance=0.05)
    assert found.met
    assert bool(torch.isfinite(found.error.variance).all())


def test_wide_samples_are_counted_and_within_the_limit():
    few = answers(Kink(2.0, 3.0), 1, tolerance=1e-9, samples=128)[0]
    assert 128 <= few.samples <= 128 + 16  # and points where it is differentiated
