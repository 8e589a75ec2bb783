"""Samples until a tolerance is met: unbiased and honest for any network, within its limits, said as it is."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable

import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional

import netmoments as nm
from benchmarks.measure import class_frequencies
from netmoments import memory
from netmoments.network.model import NetworkModel
from netmoments.sampling import adaptive
from netmoments.sampling.adaptive import (
    Goal,
    described,
    even_blocks,
    missing_pairs,
    powers_of_two,
    rounded_up,
    sampled_to_tolerance,
)
from netmoments.sampling.estimate import PILOT, WIDE_PAIRS, PairEstimate, tolerance_met
from netmoments.sampling.fast_network import FastNetwork, fast_network
from netmoments.sampling.pair_sums import FOLDS
from tests.closeness import assert_close
from tests.gaussians import KINDS, SIZE, structures
from tests.networks import inputs, network, seeded
from tests.sampling.kinds import KIND, WITHOUT_SLOPES, Called, model_of, perceptron

SEEDS = 40
BOUNDS = stats.chi2.ppf([1e-4, 1 - 1e-4], SEEDS - 1)
"""Of a sum of squared standard normals: of some 60 of these sums, one in a hundred suites of tests has one outside."""


def unseen_part(run: adaptive.SampledToGoal, name: str) -> Tensor:
    """Of the squared errors of means or variances: see `allowing_for_the_unseen`."""
    share = run.estimate.variance / run.samples.unsqueeze(-1)
    return share.square() / run.estimate.variance if name == "mean" else 2 * share.square()


@pytest.mark.parametrize("kind", KIND)
def test_estimates_are_as_far_from_the_truth_as_their_errors_say(kind):
    """Means and variances over seeds: their average against 300 000 plain samples, with the errors of both; and their
    squared deviations from it, in units of their errors, as of standard normals, these without what no sample may have
    shown.
    """
    (model, noise), tolerance = model_of(kind), KIND[kind][3]
    truth = nm.monte_carlo(model.network, noise, 300_000, seed=99)
    goal = Goal(tolerance, 10**6)
    runs = [sampled_to_tolerance(model, noise, None, goal, seed=seed, products=True) for seed in range(SEEDS)]
    assert all(("slopes" in found.description) == (kind not in WITHOUT_SLOPES) for found in runs)
    assert all(float(found.reached.max()) <= tolerance for found in runs)
    for name in ("mean", "variance"):
        values, squares = (
            torch.cat([getattr(run.estimate, which) for run in runs]) for which in (name, f"{name}_error_squared")
        )
        average = values.mean(0)
        error = (squares.mean(0) / SEEDS + getattr(truth, f"{name}_standard_error") ** 2).sqrt()
        z = (average - getattr(truth, name)) / error
        assert float(z.abs().max()) < 4.5, (name, z)
        unseen = torch.cat([unseen_part(run, name) for run in runs])
        spread = ((values - average).square() / squares).sum(0)
        assert float(spread.max()) < BOUNDS[1], (name, spread)
        spread = ((values - average).square() / (squares - unseen)).sum(0)
        assert float(spread.min()) > BOUNDS[0], (name, spread)


@pytest.mark.parametrize("kind", KINDS)
def test_every_structure_of_covariance(kind):
    """One ReLU, where the truth is known: within 5 standard errors, and 0 where there is no noise."""
    given = structures((3,))[kind]
    net = seeded(lambda: nn.Sequential(nn.Linear(SIZE, 9), nn.ReLU(), nn.Linear(9, 2)))
    exact = nm.output_moments(net, given, "two-stage", check=0)
    model = NetworkModel.of_any(net, given.mean, "test")
    for products in (True, False):
        found = sampled_to_tolerance(model, given, None, Goal(0.02, 10**6), seed=1, products=products).estimate
        second = exact.covariance if products else exact.variance
        pairs = ((found.mean, found.mean_error_squared, exact.mean), (found.second, found.second_error_squared, second))
        for value, squared, truth in pairs:
            if kind == "certain":
                assert_close(value, truth, atol=1e-12)
                assert_close(squared, torch.zeros(squared.shape), atol=1e-24)
            else:
                assert float(((value - truth) / squared.sqrt()).abs().max()) < 5


def moments(net: nn.Module, *, std: float = 1.0, batch: tuple[int, ...] = (), **options) -> nm.OutputMoments:
    mean = torch.randn(*batch, 6, generator=torch.Generator().manual_seed(2))
    return nm.output_moments(net, nm.Gaussian(mean, std=std, event_ndim=1), **options)


NET = seeded(perceptron, torch.float32)


def test_a_batch_is_as_each_by_itself():
    """Other samples of the same: within 5 standard errors of both; each input as many as it needs."""
    mean = torch.randn(6, 6, generator=torch.Generator().manual_seed(3))
    std = torch.tensor([0.01, 0.1, 0.5, 1.0, 2.0, 4.0])
    together = nm.output_moments(NET, nm.Gaussian(mean, nm.Isotropic(std**2, 6)), nm.Auto(0.02, seed=1))
    assert together.reached.shape == (6,)
    assert bool((together.reached <= 0.02).all())
    for i in range(6):
        alone = nm.output_moments(NET, nm.Gaussian(mean[i], std=float(std[i])), tolerance=0.02)
        for name in ("mean", "variance", "covariance"):
            off = getattr(together, name)[i] - getattr(alone, name)
            error = (getattr(together.error, name)[i] ** 2 + getattr(alone.error, name) ** 2).sqrt()
            assert float((off / error).abs().max()) < 5, (i, name)


def test_seeds():
    same, again, other = (moments(NET, method=nm.Auto(0.05, seed=seed)) for seed in (3, 3, 4))
    assert torch.equal(same.mean, again.mean)
    assert torch.equal(same.covariance, again.covariance)
    assert torch.equal(same.wins, again.wins)
    assert not torch.equal(same.mean, other.mean)


def test_only_squares_are_the_diagonal_of_all_products():
    plain, full = (moments(NET, tolerance=0.02, covariance=wanted) for wanted in (False, True))
    assert plain.covariance is None
    assert plain.samples == full.samples
    for name in ("mean", "variance"):
        assert_close(getattr(plain, name), getattr(full, name).double(), rtol=1e-4, atol=1e-5)
        assert_close(getattr(plain.error, name), getattr(full.error, name).double(), rtol=1e-2)


# tolerance and limits


@pytest.mark.parametrize("tolerance", [0.3, 0.03, 0.01])
def test_a_tolerance_is_met(tolerance):
    found = moments(NET, batch=(3,), tolerance=tolerance, samples=100_000)
    assert found.met
    assert found.stopped is None
    assert found.tolerance == tolerance
    assert bool((found.reached <= tolerance).all())
    spread = found.variance.sqrt()
    means, variances = (found.error.mean / spread).mean(-1), (found.error.variance / found.variance).mean(-1)
    assert bool((means <= tolerance * 1.001).all())
    # variances to √2 times it; what is said of them allows for their skewness (see `allowing_for_skewness`)
    assert bool((variances <= math.expm1(2 * math.sqrt(2) * tolerance * 1.5) / 2).all())


def test_smaller_tolerances_take_more_samples():
    counts = [moments(NET, tolerance=tolerance).samples for tolerance in (0.1, 0.02, 0.005)]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


def test_the_limit_of_samples_binds_and_is_named():
    for limit in (20, 200, 5000):
        found = moments(NET, tolerance=1e-4, samples=limit)
        assert not found.met
        assert found.stopped == f"the limit of {limit:,} samples"
        assert found.samples <= limit + 16  # and points where it is differentiated
        assert bool((found.reached > 1e-4).all())
        assert f"not met within the limit of {limit:,} samples" in str(found)
    enough = moments(NET, tolerance=0.1, samples=5000)
    assert enough.met
    assert enough.samples < 1000


def test_the_default_limit_is_what_plain_samples_would_take():
    """An output whose square has a heavy tail, which no linear function explains."""
    net = seeded(lambda: Called(lambda z: torch.exp(2 * z)), torch.float32)
    found = moments(net, std=1.5, tolerance=0.05)
    assert found.stopped == "the limit of 400 samples"
    assert found.samples <= 400 + 16


def test_the_limit_of_seconds_binds_and_is_named():
    """After the first round at the latest, whatever the machine."""
    found = moments(NET, tolerance=1e-4, seconds=1e-9)
    assert not found.met
    assert found.stopped == "the limit of 1e-09 seconds"
    assert 0 < found.samples < 200


def test_pairs_that_are_missing():
    """(error/tolerance)² times as many, with a margin; not too many more at once, in multiples of the folds."""
    done = torch.tensor([64, 64, 64, 64])
    reached = torch.tensor([0.005, 0.01, 0.02, 5.0])
    missing = missing_pairs(reached, done, 0.01, 10_000)
    assert missing[:2].tolist() == [0, 0]
    assert 3 * 64 < int(missing[2]) < 1.1 * 4 * 64
    assert 64 < int(missing[3]) <= 64 * 10
    assert bool((missing % FOLDS == 0).all())
    assert missing_pairs(reached, done, 0.01, 64).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(("pairs", "most"), [(4488, 2**20), (124, 4), (3584, 1024), (8, 4), (4, 4), (5000, 512)])
def test_blocks_on_a_gpu_are_powers_of_two_within_the_limit_and_one_rest(pairs, most):
    blocks = powers_of_two(pairs, most)
    assert sum(blocks) == pairs
    assert max(blocks) <= most
    assert all(block.bit_count() == 1 for block in blocks[:-1])
    assert pairs <= rounded_up(pairs) <= 1.25 * pairs + 4
    assert sum(even_blocks(pairs, most)) == pairs


def test_outputs_that_do_not_vary_need_no_samples():
    net = seeded(lambda: Called(lambda z: torch.tanh(z) * 0.0 + 1.0), torch.float32)
    found = moments(net, tolerance=0.01)
    assert found.met
    assert_close(found.variance, torch.zeros(3), atol=1e-12)
    assert_close(found.mean, net(torch.zeros(1, 6))[0].double(), atol=1e-6)


def test_some_outputs_that_do_not_vary():
    """They count as met among those that do."""
    net = seeded(lambda: nn.Sequential(perceptron(), Masked()), torch.float32)
    found = moments(net, tolerance=0.02)
    assert found.met
    assert float(found.variance[1]) == 0
    assert bool((found.variance[[0, 2]] > 0).all())
    assert bool(torch.isfinite(found.class_probabilities()).all())


class Masked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * torch.tensor([1.0, 0.0, 1.0])


# what there is to say


def test_what_was_done_is_said():
    found = moments(NET, tolerance=0.1)
    assert (found.method, found.outputs, found.tolerance) == ("sampling", None, 0.1)
    assert re.search(r"samples.*, controlled by expected slopes", found.reason)
    assert found.samples >= 64
    assert found.seconds > 0
    assert_close(found.wins.sum(-1), torch.ones(()), atol=1e-12)
    cases = {
        (0, 0.0): "independent samples",
        (1, 1.0): "mirrored pairs of samples, controlled by expected slopes at the mean",
        (4, 0.25): "samples, 25% in mirrored pairs, controlled by expected slopes from gradients at 4 points",
    }
    for (points, share), words in cases.items():
        assert described(share, points, "") == words
        assert described(share, points, ", slowly") == words + ", slowly"


def test_winners_are_how_often_each_was_the_largest():
    """Of n independent samples a frequency is known to √(p(1−p)/n); of mirrored ones at least about so."""
    found = moments(NET, std=2.0, method=nm.Auto(0.01))
    mean = torch.randn(6, generator=torch.Generator().manual_seed(2))
    frequency = class_frequencies(NET, nm.Gaussian(mean, std=2.0), 200_000, seed=5)
    error = (frequency * (1 - frequency) / found.samples).sqrt() + 1e-3
    assert float(((found.wins - frequency) / error).abs().max()) < 5


def test_slopes_make_errors_smaller():
    """Little noise, where the network is nearly linear: a hundredth of plain samples' errors, from as many."""
    found = moments(NET, std=0.01, tolerance=1e-6, samples=400)
    spread = found.variance.sqrt()
    assert bool((found.error.mean < 0.1 * spread / math.sqrt(400)).all())
    assert bool((found.error.variance < 0.1 * found.variance * math.sqrt(2 / 400)).all())


def test_a_network_that_writes_into_its_input_has_slopes_too():
    net, x = network("mutating"), inputs("mutating", 2)
    kept, found = x.clone(), nm.output_moments(net, nm.Gaussian(x, std=0.1), tolerance=0.02)
    assert "slopes" in found.reason
    assert torch.equal(x, kept)
    truth = nm.monte_carlo(lambda x: net(x.clone()), nm.Gaussian(x, std=0.1), 50_000)
    error = (found.error.mean**2 + truth.mean_standard_error**2).sqrt()
    assert float(((found.mean - truth.mean) / error).abs().max()) < 5


# the sizes of work


def test_many_inputs_go_in_groups(monkeypatch):
    """Those of the first group as they would go alone."""
    noise = nm.Gaussian(torch.randn(5, 6, generator=torch.Generator().manual_seed(1)), std=0.3)
    monkeypatch.setattr(adaptive, "inputs_together", lambda *sizes: 2)
    found = nm.output_moments(NET, noise, tolerance=0.05)
    first = nm.output_moments(NET, nm.Gaussian(noise.mean[:2], std=0.3), tolerance=0.05)
    assert torch.equal(found.mean[:2], first.mean)
    assert found.mean.shape == (5, 3)
    assert found.wins.shape == (5, 3)
    truth = nm.monte_carlo(NET, noise, 50_000)
    error = (found.error.mean**2 + truth.mean_standard_error**2).sqrt()
    assert float(((found.mean - truth.mean) / error).abs().max()) < 5


def test_covariances_that_do_not_fit_are_refused_beforehand(monkeypatch):
    network, noise = (
        nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1000)).eval(),
        nm.Gaussian(torch.zeros(2), std=0.3),
    )
    monkeypatch.setattr(memory, "memory_limit", lambda device, budget: 2**30)
    expected = r"all covariances of 1,000 outputs takes 1.2 GB of the 1.1 GB .* choose some with outputs="
    with pytest.raises(MemoryError, match=expected):
        nm.output_moments(network, noise, tolerance=0.05, covariance=True)
    assert nm.output_moments(network, noise, tolerance=0.05).covariance is None


# recorded work


def test_recorded_work_depends_on_nothing_but_its_inputs(monkeypatch):
    """As on a GPU: whatever was done first for inputs of some shapes is done again for others, with their numbers."""

    def recorded(known, work, *given):
        return known.setdefault(tuple((x.shape, x.dtype) for x in given), work)(*given)

    def moments_of_many() -> list[nm.OutputMoments]:
        generator, found = torch.Generator().manual_seed(4), []
        for outputs in (None, [0, 1]):
            for std, tolerance in ((0.5, 0.05), (2.0, 0.03)):
                given = nm.Gaussian(torch.randn(2, 6, generator=generator), std=std)
                found.append(nm.output_moments(NET, given, outputs=outputs, tolerance=tolerance))
                found.append(nm.output_moments(NET, given, nm.Sampling(200), outputs, covariance=False))
        return found

    expected, recordings = moments_of_many(), {}
    monkeypatch.setattr("netmoments.sampling.fast_network.recorded", recorded)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)

    def recording(model: NetworkModel) -> FastNetwork:
        return dataclasses.replace(fast_network(model), recordings=recordings)

    monkeypatch.setattr(adaptive, "fast_network", recording)
    for one, other in zip(moments_of_many(), expected, strict=True):
        assert (one.samples, one.reason) == (other.samples, other.reason)
        assert_close(one.mean, other.mean.double(), rtol=1e-5, atol=1e-5)
        assert_close(one.error.variance, other.error.variance.double(), rtol=1e-3)


# low precision


@pytest.fixture
def low_precision(monkeypatch) -> Callable[[Callable[[Tensor], Tensor]], list[int]]:
    """Have the sampler find that values that a function makes of the exact ones are faster, as of float16 on a GPU."""

    def use(change: Callable[[Tensor], Tensor]) -> list[int]:
        counted: list[int] = []

        def made(model: NetworkModel) -> FastNetwork:
            exact = fast_network(model)

            def run(x: Tensor) -> Tensor:
                counted.append(len(x))
                return change(exact.run(x))

            return dataclasses.replace(exact, run=run)

        monkeypatch.setattr(adaptive, "half_network", made)
        return counted

    return use


def test_values_of_low_precision_are_corrected(low_precision):
    """Off by one percent, by a smooth function and by rounding to 1/256: as far from the truth as without."""
    counted = low_precision(lambda y: torch.round((1.01 * y + 0.003 * torch.sin(5 * y)) * 256) / 256)
    model, noise = model_of("perceptron")
    truth = nm.monte_carlo(model.network, noise, 300_000, seed=99)
    goal = Goal(0.03, 10**6)
    runs = [sampled_to_tolerance(model, noise, None, goal, seed=seed, products=True) for seed in range(SEEDS)]
    assert sum(counted) > 0.8 * sum(int(run.samples) for run in runs)
    for name in ("mean", "variance"):
        values, squares = (
            torch.cat([getattr(run.estimate, which) for run in runs]) for which in (name, f"{name}_error_squared")
        )
        error = (squares.mean(0) / SEEDS + getattr(truth, f"{name}_standard_error") ** 2).sqrt()
        assert float(((values.mean(0) - getattr(truth, name)) / error).abs().max()) < 4.5, name
        spread = ((values - values.mean(0)).square() / squares).sum(0)
        assert BOUNDS[0] < float(spread.min()) <= float(spread.max()) < BOUNDS[1], name


FIRST = 2 * (PILOT - WIDE_PAIRS)
"""Samples of the first round that are in low precision as well."""


def test_low_precision_that_is_too_rough_is_not_used(low_precision):
    expected = moments(NET, tolerance=0.02)
    counted = low_precision(lambda y: torch.round(y))
    found = moments(NET, tolerance=0.02)
    assert sum(counted) == FIRST
    assert torch.equal(found.mean, expected.mean)
    assert found.reason == expected.reason


class Even(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square()[:, :3] * torch.tensor([1.0, 2.0, 3.0])


@pytest.mark.parametrize("net", [NET, Even().eval()], ids=["perceptron", "even"])
@pytest.mark.parametrize("seldom", [False, True], ids=["at once", "later"])
def test_what_low_precision_cannot_hold_is_done_anew_and_said(net, seldom, low_precision):
    """Too large for the first samples, or for some later ones only: the answer is as without."""
    mean = torch.randn(6, generator=torch.Generator().manual_seed(2)) if net is NET else torch.zeros(6)
    given = nm.Gaussian(mean, std=1.0)
    expected = nm.output_moments(net, given, tolerance=0.01)
    limit = -math.inf
    if seldom:  # between the largest value of the first round and the largest of all
        seen: list[Tensor] = []
        low_precision(lambda y: (seen.append(y[:, 0].detach()), y)[1])
        nm.output_moments(net, given, tolerance=0.01)
        values = torch.cat(seen)
        first, largest = float(values[:FIRST].max()), float(values.max())
        assert first < largest
        limit = (first + largest) / 2
    counted = low_precision(lambda y: torch.where(y[:, :1] > limit, math.inf, y))
    found = nm.output_moments(net, given, tolerance=0.01)
    assert (sum(counted) > FIRST) == seldom
    assert found.reason == expected.reason + ", in float32 as float16 overflowed"
    assert torch.equal(found.mean, expected.mean)
    assert torch.equal(found.covariance, expected.covariance)


# what is refused


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_samples_that_are_not_numbers_are_counted(bad):
    """The mean itself is fine, as are most samples: one in 40 has an input beyond 2."""
    net = seeded(lambda: Called(torch.tanh), torch.float32)
    broken = nn.Sequential(Breaking(bad), net).eval()
    with pytest.raises(
        ValueError, match=r"(\d+) of (\d+) samples gave NaN or infinite outputs \(output 0, 1, 2\)"
    ) as caught:
        nm.output_moments(broken, nm.Gaussian(torch.zeros(6), std=1.0))
    words = str(caught.value).split()
    count, total = (int(words[words.index("of") + step]) for step in (-1, 1))
    share = 1 - stats.norm.cdf(2) ** 6
    assert abs(count - share * total) < 5 * math.sqrt(share * total)


class Breaking(nn.Module):
    def __init__(self, bad: float) -> None:
        super().__init__()
        self.bad = bad

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 2, self.bad, x)


class Dropping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, 0.5, training=True)[:, :3]


class Centring(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)).tanh()


def test_random_networks_and_those_that_mix_inputs_are_refused():
    with pytest.raises(ValueError, match="not deterministic"):
        moments(Dropping().eval())
    with pytest.raises(ValueError, match="depends on the other images of the batch"):
        moments(Centring().eval())


def test_a_budget_of_memory_bounds_the_batches():
    """Each of the network's six copies of its largest activation counts, half of the budget is for them."""
    seen: list[int] = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            seen.append(len(x))
            return torch.tanh(self.layer(x))

    torch.manual_seed(0)
    network = Watched().double().eval()
    noise = nm.Gaussian(torch.zeros(3, 4, dtype=torch.float64), std=1.0)
    free = nm.output_moments(network, noise)
    seen.clear()
    bounded = nm.output_moments(network, noise, memory_budget=2 * 6 * 4 * 8 * 10)
    assert max(seen) <= 16  # of at least four numbers each; 16 gradients' points
    error = torch.hypot(free.error.mean, bounded.error.mean)
    assert bool(((bounded.mean - free.mean).abs() <= 5 * error).all())


def test_errors_do_not_depend_on_the_size_of_outputs():
    """More than 100 outputs, whose sums are in float32, where fourth powers of 1e-12 are 0 and of 1e10 infinite."""
    net = seeded(lambda: nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 101)), torch.float32)
    found = {}
    for scale in (1.0, 1e-12, 1e12):
        scaled = nn.Sequential(net, nn.Linear(101, 101, bias=False)).eval()
        scaled[1].weight.data = scale * torch.eye(101)
        found[scale] = nm.output_moments(scaled, nm.Gaussian(torch.zeros(6), std=1.0), tolerance=0.01)
    for scale, other in found.items():
        assert_close(other.error.mean / scale, found[1.0].error.mean, rtol=0.02)
        assert_close(other.error.variance / scale**2, found[1.0].error.variance, rtol=0.02)
        assert other.samples == found[1.0].samples


def test_errors_that_are_not_known_meet_no_tolerance():
    one = torch.ones(1, 2, dtype=torch.float64)
    for unknown in (torch.nan, torch.inf):
        estimate = PairEstimate(one, one, one * torch.tensor([0.0, unknown]), 0 * one)
        assert tolerance_met(estimate, torch.float64).tolist() == [math.inf]
    assert tolerance_met(PairEstimate(one, one, 0 * one, 0 * one), torch.float64).tolist() == [0.0]
