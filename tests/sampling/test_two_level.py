"""Most samples in low precision: which share is run exactly as well, that nothing is biased, when it is not done."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import netmoments as nm
from netmoments.network.model import NetworkModel
from netmoments.sampling import adaptive, fast_network
from netmoments.sampling.adaptive import Goal, sampled_to_tolerance
from netmoments.sampling.estimate import PairEstimate
from netmoments.sampling.fast_network import FastNetwork, low_network
from netmoments.sampling.two_level import (
    ADDED,
    MOST_SHARE,
    ExactPairs,
    even_and_target,
    exact_pairs_worth,
    exact_share,
)
from tests.networks import seeded

TWO = torch.zeros(2, 1, dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64)
"""Centre and variance of one output of two inputs."""
PAIRS = adaptive.PILOT - adaptive.WIDE_PAIRS
"""Of the first round, run exactly and in low precision."""
MOST = 10**9
"""More pairs than any goal here."""


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


NET = seeded(perceptron, torch.float32)
NOISE = nm.Gaussian(torch.linspace(-1, 1, 6).unsqueeze(0), std=2.0)
EXACT_COST, LOW_COST = 1e-3, 4e-4


@pytest.fixture
def low_precision(monkeypatch) -> Callable[[Callable[[Tensor], Tensor]], list[int]]:
    """Have the sampler find that values that a function makes of the exact ones are faster, as of bfloat16."""

    def use(change: Callable[[Tensor], Tensor]) -> list[int]:
        counted: list[int] = []

        def exact(model: NetworkModel) -> FastNetwork:
            return dataclasses.replace(fast_network.fast_network(model), cost=EXACT_COST)

        def low(model: NetworkModel) -> FastNetwork:
            own = exact(model)

            def run(x: Tensor) -> Tensor:
                counted.append(len(x))
                return change(own.run(x))

            return dataclasses.replace(own, run=run, cost=LOW_COST)

        monkeypatch.setattr(adaptive, "fast_network", exact)
        monkeypatch.setattr(adaptive, "low_network", low)
        return counted

    return use


def rough(y: Tensor) -> Tensor:
    """Off by a percent, by a smooth function, and by rounding to 1/256."""
    return torch.round((1.01 * y + 0.003 * torch.sin(5 * y)) * 256) / 256


@pytest.mark.parametrize("ratio", [3.3e-3, 4e-3, 4.9e-3])
def test_the_share_is_the_cheapest(ratio):
    """(a + b/ρ)(c' + ρc) for c' = c/2, at so small a tolerance that the least number of exact pairs does not bind."""
    share = exact_share(1.0, ratio, 1e-4, MOST)
    costs = {rho: (1 + ratio / rho) * (0.5 + rho) for rho in (0.97 * share, share, 1.03 * share)}
    assert min(costs, key=costs.get) == share
    assert ratio / share <= ADDED * (1 + 1e-9)


def test_differences_are_a_tenth_of_the_squared_error_at_most():
    assert exact_share(1.0, 0.02, 1e-4, MOST) == pytest.approx(0.2)
    assert exact_share(1.0, 0.5, 1e-4, MOST) > 1


def test_there_are_enough_exact_pairs_for_what_they_cannot_show():
    """Four runs by 1/tolerance, of the pairs that it takes, or of the most there may be."""
    assert exact_share(0.5, 0.0, 0.01, MOST) * 5000 == pytest.approx(200)
    assert exact_share(0.5, 0.0, 0.01, 1000) * 1000 == pytest.approx(200)
    assert exact_share(1e6, 1e-3, 0.01, 5000) > 0.01  # beside the tolerance, not beside what cannot be reached


def test_low_precision_is_chosen_where_it_is_cheaper():
    few, many = (48, MOST), (4000, MOST)
    assert exact_pairs_worth(0.5, 1e-4, 0.01, few, (1.0, 0.5)) == (pytest.approx(0.04), 201)
    assert exact_pairs_worth(0.5, 1e-4, 0.01, few, (1.0, 0.83)) == (0.0, 0)
    assert exact_pairs_worth(0.5, 0.2, 0.01, few, (1.0, 0.5)) == (0.0, 0)
    assert exact_pairs_worth(0.5, 1e-4, 0.01, many, (1.0, 0.5)) == (0.0, 0)
    for bad in (math.nan, math.inf):
        assert exact_pairs_worth(bad, 1e-4, 0.01, few, (1.0, 0.5)) == (0.0, 0)
        assert exact_pairs_worth(0.5, bad, 0.01, few, (1.0, 0.5)) == (0.0, 0)


@pytest.mark.parametrize("products", [False, True])
def test_differences_in_parts_are_those_of_all(products):
    """Of two inputs together, then of the second alone, against the means and variances of all."""
    generator = torch.Generator().manual_seed(0)
    exact, low = ([torch.randn(40, 2, 3, generator=generator) for _ in range(2)] for _ in range(2))
    centre = torch.ones(2, 3, dtype=torch.float64)
    second = torch.eye(3, dtype=torch.float64).expand(2, 3, 3) if products else torch.ones(2, 3, dtype=torch.float64)
    found = ExactPairs(centre, second)
    found.add(None, [x[:25] for x in exact], [x[:25] for x in low])
    found.add(torch.tensor([1]), [x[25:, 1:] for x in exact], [x[25:, 1:] for x in low])
    whole = even_and_target(centre, exact, products), even_and_target(centre, low, products)
    means = [a - b for a, b in zip(*whole, strict=True)]
    even, even_error, target, target_error = found.mean_differences()
    for mean, error, all_of_it in ((even, even_error, means[0]), (target, target_error, means[1])):
        for entry, count in ((0, 25), (1, 40)):
            own = all_of_it[:count, entry]
            torch.testing.assert_close(mean[entry], own.mean(0))
            torch.testing.assert_close(error[entry], own.var(0) / count)
    assert found.pairs.tolist() == [25, 40]
    allowed = found.correction()
    each = 1 / (2 * found.pairs)
    torch.testing.assert_close(allowed[1] - even_error, (each**2).unsqueeze(1).expand(2, 3))


def test_as_many_are_run_exactly_as_the_share_says():
    found = ExactPairs(*TWO)
    assert found.take(None, 48) == 48
    ones = [torch.zeros(48, 2, 1)] * 2
    found.add(None, ones, ones)
    found.share, found.least = 0.1, 100
    assert found.take(None, 400) == 52
    ones = [torch.zeros(52, 2, 1)] * 2
    found.add(None, ones, ones)
    assert found.take(None, 400) == 0
    assert found.take(torch.tensor([1]), 500) == 35  # of 1348 one in ten, and 100 are there


def test_larger_differences_than_at_first_raise_the_share():
    found = ExactPairs(TWO[0][:1], TWO[1][:1])
    low = [torch.randn(400, 1, 1, generator=torch.Generator().manual_seed(k)) for k in range(2)]
    found.add(None, [1.2 * x for x in low], low)
    found.share = 0.05
    one = torch.ones(1, 1, dtype=torch.float64)
    estimate = PairEstimate(0 * one, one, 1e-4 * one, 2e-4 * one)
    found.raise_share(5000 * 0.01**2, estimate, torch.float32, 0.01, MOST)
    assert found.share == MOST_SHARE


SEEDS = 50


@pytest.mark.parametrize("outputs", [None, [[2, 0]]], ids=["all", "chosen"])
def test_values_of_low_precision_are_corrected(low_precision, outputs):
    """Means and variances over seeds are those of many exact samples, and vary as they say."""
    counted = low_precision(rough)
    model = NetworkModel.of_any(NET, NOISE.mean, "test")
    chosen = None if outputs is None else torch.tensor(outputs)
    truth = nm.monte_carlo(NET, nm.Gaussian(NOISE.mean[0], std=2.0), 400_000, seed=99)
    goal = Goal(0.02, 10**6)
    runs = [sampled_to_tolerance(model, NOISE, chosen, goal, seed=seed, products=True) for seed in range(SEEDS)]
    assert sum("bfloat16, corrected" in run.description for run in runs) > 0.8 * SEEDS
    assert sum(counted) > 0.5 * sum(int(run.samples) for run in runs)
    low, high = (stats.chi2(SEEDS - 1).ppf(q) for q in (1e-5, 1 - 1e-5))
    for name in ("mean", "variance"):
        values, squares = (
            torch.cat([getattr(run.estimate, which) for run in runs]) for which in (name, f"{name}_error_squared")
        )
        true, floor = getattr(truth, name), getattr(truth, f"{name}_standard_error")
        if chosen is not None:
            true, floor = true[chosen[0]], floor[chosen[0]]
        error = (squares.mean(0) / SEEDS + floor**2).sqrt()
        assert float(((values.mean(0) - true) / error).abs().max()) < 4.5, name
        spread = ((values - values.mean(0)).square() / squares).sum(0)
        assert low / 1.5 < float(spread.min()) <= float(spread.max()) < high, name


def test_shares_of_wins_are_corrected():
    """In low precision the first output never wins."""
    found = ExactPairs(TWO[0].mT, TWO[1].mT)
    exact = [torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])] * 2
    low = [torch.tensor([[[0.0, 0.5]], [[0.0, 1.0]]])] * 2
    found.add(None, exact, low)
    wins = torch.tensor([[0.0, 100.0]], dtype=torch.float64)
    torch.testing.assert_close(found.shares_of_wins(wins), torch.tensor([[0.5, 0.5]], dtype=torch.float64))


class Deciding(nn.Module):
    """One if the first number is beyond 2.2 deviations, one sample in 72; and the sum."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(x[:, 0] > 4.4).to(x.dtype), x.sum(1)], 1)


def test_a_decision_that_low_precision_gets_wrong_is_in_the_error(low_precision):
    """One in twenty of the events, one sample of 1,440: 0.006 of a deviation, about one stated error of the mean."""
    low_precision(lambda y: torch.stack([y[:, 0] * (y[:, 1].remainder(1) > 0.05).to(y.dtype), y[:, 1]], 1))
    model = NetworkModel.of_any(Deciding().eval(), 0 * NOISE.mean, "test")
    noise = nm.Gaussian(0 * NOISE.mean, std=2.0)
    runs = [sampled_to_tolerance(model, noise, None, Goal(0.02, 10**5), seed=k, products=False) for k in range(30)]
    assert sum("corrected" in run.description for run in runs) > 10
    mean, squared = (
        torch.stack([getattr(run.estimate, name)[0, 0] for run in runs]) for name in ("mean", "mean_error_squared")
    )
    z = (mean - stats.norm.sf(2.2)) / squared.sqrt()
    assert float(z.square().mean().sqrt()) < 1.5


def test_low_precision_that_is_too_rough_is_not_used(low_precision):
    expected = nm.output_moments(NET, NOISE, tolerance=0.03)
    counted = low_precision(lambda y: torch.round(2 * y))
    found = nm.output_moments(NET, NOISE, tolerance=0.03)
    assert 0 < sum(counted) <= 128
    assert torch.equal(found.mean, expected.mean)
    assert found.reason == expected.reason


@pytest.mark.parametrize("seldom", [False, True], ids=["at once", "later"])
def test_what_low_precision_cannot_hold_is_done_anew(low_precision, seldom):
    """Too large for the first samples, where it is not used; or for later ones only. The answer is as without."""
    expected = nm.output_moments(NET, NOISE, tolerance=0.03)
    seen: list[Tensor] = []
    low_precision(lambda y: (seen.append(y.amax(1)), y)[1])
    nm.output_moments(NET, NOISE, tolerance=0.03)
    first, largest = float(torch.cat(seen)[: 2 * PAIRS].max()), float(torch.cat(seen).max())
    assert first < largest
    limit = (first + largest) / 2 if seldom else first - 1e-3
    low_precision(lambda y: torch.where(y.amax(1, keepdim=True) > limit, math.inf, y))
    found = nm.output_moments(NET, NOISE, tolerance=0.03)
    assert found.reason == expected.reason + (", in float32 as bfloat16 overflowed" if seldom else "")
    assert torch.equal(found.mean, expected.mean)


def test_nothing_is_tried_where_there_is_little_to_gain(low_precision):
    """So few samples, or none beyond a number that is asked for."""
    counted = low_precision(rough)
    quiet = nm.Gaussian(NOISE.mean, std=1e-3)
    nm.output_moments(NET, quiet, tolerance=0.03)
    nm.output_moments(NET, NOISE, "layerwise")
    assert counted == []


def test_only_float32_has_a_low_precision(monkeypatch):
    monkeypatch.setattr(fast_network, "FASTER", math.inf)
    single = NetworkModel.of_any(NET, NOISE.mean, "test")
    double = NetworkModel.of_any(seeded(perceptron, torch.float64), NOISE.mean.double(), "test")
    with torch.no_grad():
        assert low_network(double) is None
        monkeypatch.setattr(fast_network, "has_bfloat16", lambda: False)
        assert low_network(single) is None
        monkeypatch.setattr(fast_network, "has_bfloat16", lambda: True)
        low = low_network(single)
        assert low is not None
        assert low.dtype == torch.bfloat16
        torch.testing.assert_close(low.values(NOISE.mean).float(), NET(NOISE.mean), rtol=0.05, atol=0.05)
    assert {x.dtype for x in NET.parameters()} == {torch.float32}


class Single(nn.Module):
    """Makes tensors of its own, which bfloat16 does not go with."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(torch.zeros(2), x, torch.eye(6)[:, :2]) + self.last(x)


class Told(nn.Module):
    """Fails in another dtype than float32, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.last = how, nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "numpy":
            return torch.from_numpy(x.detach().numpy()[:, :2].copy())
        if x.dtype != torch.float32:
            raise {"value": ValueError, "type": TypeError, "assertion": AssertionError}[self.how]("float32 only")
        return self.last(x)


@pytest.mark.parametrize("how", ["numpy", "value", "type", "assertion"])
def test_whatever_a_network_says_of_bfloat16_it_has_none(monkeypatch, how):
    monkeypatch.setattr(fast_network, "FASTER", math.inf)
    monkeypatch.setattr(fast_network, "has_bfloat16", lambda: True)
    with torch.no_grad():
        assert low_network(NetworkModel.of_any(Told(how).eval(), NOISE.mean, "test")) is None


@pytest.mark.parametrize("runs", [0, 1])
def test_a_network_that_fails_in_low_precision_is_run_exactly(low_precision, runs):
    """At once, or after some runs: the answer is as without."""
    expected = nm.output_moments(NET, NOISE, tolerance=0.03)
    left = [runs]

    def fails(y: Tensor) -> Tensor:
        left[0] -= 1
        if left[0] < 0:
            raise KeyError("not in bfloat16")
        return y

    low_precision(fails)
    found = nm.output_moments(NET, NOISE, tolerance=0.03)
    assert left[0] < 0
    assert found.reason.removesuffix(", in float32 as bfloat16 failed") == expected.reason
    assert torch.equal(found.mean, expected.mean)


def test_a_network_that_bfloat16_does_not_suit_has_none(monkeypatch):
    monkeypatch.setattr(fast_network, "FASTER", math.inf)
    monkeypatch.setattr(fast_network, "has_bfloat16", lambda: True)
    with torch.no_grad():
        assert low_network(NetworkModel.of_any(Single().eval(), NOISE.mean, "test")) is None
