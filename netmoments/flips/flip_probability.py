"""`flip_probability`: how often noise changes a network's answer. `class_probabilities`: how often each class wins.

For every input, `entry_result` chooses how its flips are estimated: common ones are counted (`frequent`), rare ones are
found by importance sampling (`importance`), or without gradients by splitting (`splitting`). `entry_shares` counts how
often each class wins; where the network has gradients, a surrogate of the margin is the control variate (`frequent`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from netmoments.checks import require_count, require_positive, require_seed
from netmoments.flips.frequent import (
    FIRST_RUNS,
    PILOT,
    Pilot,
    by_frequencies,
    by_guided_frequencies,
    expects_flips,
    guided_counting,
    plain_estimate,
    plain_wins,
    search_while_it_pays,
)
from netmoments.flips.importance import NEGLIGIBLE, Estimation, by_importance, regressed, samples_of_plain
from netmoments.flips.noisy_network import (
    Clock,
    NoisyNetwork,
    OutOfTime,
    in_order,
    labels_of,
    read_classifier,
    results_of_inputs,
)
from netmoments.flips.result import (
    NEVER_SEEN,
    ClassProbabilities,
    EntryResult,
    FlipEstimate,
    FlipProbability,
    Tolerance,
    agree,
    stacked,
    wilson,
)
from netmoments.flips.search import Search
from netmoments.flips.splitting import by_splitting
from netmoments.gaussian import Gaussian
from netmoments.moments.request import Request
from netmoments.network.model import NetworkModel
from netmoments.normal import QUANTILE
from netmoments.precision import full_precision

CALLER, SHARES_CALLER = "flip_probability", "class_probabilities"
FEW = 800
"""If fewer plain samples than this meet the tolerance, no gradients are taken: they would cost more than they save."""
COMMON = 0.01
"""Flips that are expected to be more probable than this are counted."""
BELIEVED, DOUBTED = 4, 128
"""Flips that surrogates expect to be common are counted if at least `BELIEVED` flips are among the first samples, or
among these and `DOUBTED` further ones: one or two may be chance.
"""
LEAST_SEARCH = 2500
"""Searches take up to so many runs before an estimate begins. With fewer allowed, flips are counted among these."""
SPLITTING_ERROR, SPLITTING_RUNS = 0.3, 300_000
"""Where importance sampling could not settle a probability, splitting is run beside it: to this relative error, with at
most so many runs.
"""
BOUND_RUNS = 10_000
"""Flips that no search can follow are bounded by so many plain samples, or as many as an `absolute_error` asks for."""
DEFAULT_RUNS = 1_000_000
RELATIVE_ERROR, NOT_ASKED = 0.1, 1e-9
"""The relative error that is enough if no error is asked for; and the one, never reached, that stands in its place if
only an absolute error is asked for.
"""


@dataclass(frozen=True)
class FlipGoal:
    """What a call asks for, checked."""

    tolerance: Tolerance
    runs: int
    """The most runs of the network for each input."""
    seconds: float | None
    """The most seconds for all inputs together."""
    seed: int

    @classmethod
    def read(
        cls, caller: str, relative_error: Any, absolute_error: Any, runs: Any, seconds: Any, seed: Any
    ) -> FlipGoal:
        if relative_error is not None:
            require_positive(caller, "relative_error", relative_error, "0.1 for ten per cent")
        if absolute_error is not None:
            require_positive(caller, "absolute_error", absolute_error, "0.01 for one point, or None")
            if absolute_error >= 0.5:
                raise ValueError(
                    f"{caller}: absolute_error must be below 0.5, such as 0.01 for one point, got {absolute_error}"
                )
        if seconds is not None:
            require_positive(caller, "seconds", seconds, "None for no limit")
        require_count(caller, "runs", runs, least=100)
        require_seed(caller, seed)
        absolute = None if absolute_error is None else float(absolute_error)
        if relative_error is None:
            relative_error = RELATIVE_ERROR if absolute is None else NOT_ASKED
        return cls(Tolerance(float(relative_error), absolute), runs, seconds, seed)


def flip_probability(
    network: Any,
    noise: Gaussian | Mapping[str, Any] | Sequence[Any],
    label: int | Tensor | None = None,
    relative_error: float | None = None,
    *,
    absolute_error: float | None = None,
    runs: int = DEFAULT_RUNS,
    seconds: float | None = None,
    seed: int = 0,
    key: str | int | None = None,
    memory_budget: int | None = None,
) -> FlipProbability:
    """How often Gaussian noise has another class than `label` win, however rare that is.

    Args:
        network: any module in eval mode that runs, an exported program, or a `NetworkModel`; of several outputs, the
            largest is its answer. Gradients are used where it has them.
        noise: the input, with any batch dimensions, and any covariance.
        label: the class that should win, an int or an int tensor of the batch's shape; by default the network's answer
            at the mean of the noise.
        relative_error: the standard error that is enough, relative to the probability; 0.1 if no error is asked for.
        absolute_error: the half-width of the 95 % interval that is enough: 0.01 for one point. Of both errors, the one
            that is reached first is enough.
        runs: at most so many runs of the network for each input; a backward pass counts two. Flips that the searches
            expect below 1e-20 are only bounded, by 10,000 samples, or as many as an `absolute_error` asks for.
        seconds: at most so many seconds for all inputs together.
        seed: same seed, same network, same device: same answer. Every input has random numbers of its own, by the seed
            and its mean: alone or in a batch its answer is the same but for rounding, which may move a sample or a
            stop, within the stated error.
        key: which output, for a network that returns several.
        memory_budget: bytes that a batch of the network may take, by default as many as is fastest.

    Inputs of a batch go through the network together. Common flips are counted, on samples that a quadratic surrogate
    of the margin chooses and with it as control. Rare flips are found by importance sampling: two searches, one from
    the noise and one from samples pulled across the boundary, fit surrogates to gradients; their densities are mixed,
    and the estimate of one must agree with that of the other. Without gradients, rare flips are found by splitting. No
    run of an estimate was used in a fit, except the first plain samples of common flips, for two numbers. That sampling
    stops when the error looks small enough, and goes on with better surrogates when it does not, leaves a small bias.

    An interval speaks of what was found: flips of a kind that neither search meets, nor any sample, are in no interval.
    An upper bound that holds for any network never comes cheaper than plain sampling.

    >>> from torch import nn
    >>> network = nn.Linear(2, 2, bias=False)
    >>> network.weight.data = torch.eye(2)
    >>> found = flip_probability(network.eval(), Gaussian(torch.tensor([6.0, 0.0]), std=1.0))
    >>> bool(found.interval[0] < 1.1e-5 < found.interval[1])  # Φ(−6/√2)
    True
    """
    start = time.perf_counter()
    goal = FlipGoal.read(CALLER, relative_error, absolute_error, runs, seconds, seed)
    request = read_classifier(CALLER, network, noise, memory_budget, key)
    estimates = request.model.answer(partial(_estimates, request, label, goal))
    return estimates.shaped(request.noise.batch_shape, time.perf_counter() - start)


@dataclass(frozen=True, eq=False)
class _Estimates:
    """The labels (N,), results and numbers of runs of all entries of a flat batch."""

    labels: Tensor
    results: list[EntryResult]
    runs: list[int]

    def shaped(self, batch: torch.Size, seconds: float) -> FlipProbability:
        """The result for the user, with the noise's batch shape."""
        device, results = self.labels.device, self.results
        second = [math.nan if each.second is None else each.second.probability for each in results]
        bounds = torch.tensor([each.interval for each in results], dtype=torch.float64, device=device)
        return FlipProbability(
            probability=stacked([each.probability for each in results], batch, device),
            interval=bounds.reshape(*batch, 2),
            standard_error=stacked([each.estimate.careful_error for each in results], batch, device),
            label=self.labels.reshape(batch),
            rival=torch.tensor([each.rival for each in results], device=device).reshape(batch),
            runs=torch.tensor(self.runs, device=device).reshape(batch),
            route=[each.route for each in results],
            met=torch.tensor([each.met for each in results], device=device).reshape(batch),
            agreement=stacked(second, batch, device),
            agreed=torch.tensor([each.agreed for each in results], device=device).reshape(batch),
            seconds=seconds,
        )


def _estimates(request: Request, label: int | Tensor | None, goal: FlipGoal) -> _Estimates:
    with torch.inference_mode(False), torch.no_grad(), full_precision():
        labels = labels_of(CALLER, request, label)
    found = in_order(entries_found(request.model, request.flat, labels.tolist(), goal))
    return _Estimates(labels, [result for result, _ in found], [runs for _, runs in found])


def entries_found(
    model: NetworkModel,
    noise: Gaussian,
    labels: Sequence[int],
    goal: FlipGoal,
    description: str = "flips",
) -> Iterator[tuple[int, tuple[EntryResult, int]]]:
    """Estimate for inputs (noise with one batch dimension), and yield the place of each as it ends, with its result and
    the runs that it took.
    """
    return results_of_inputs(
        partial(_result_and_runs, goal=goal), description, model, noise, labels,
        seed=goal.seed, purpose="flips", clock=Clock(goal.seconds),
    )  # fmt: skip


async def _result_and_runs(network: NoisyNetwork, goal: FlipGoal) -> tuple[EntryResult, int]:
    result = await entry_result(network, goal)
    return result, network.runs


async def entry_result(network: NoisyNetwork, goal: FlipGoal) -> EntryResult:
    """The flip probability of one input, by the route that fits; if the time is over before any result, 0 with the
    interval from 0 to 1.
    """
    if not bool((network.covariance.variances() > 0).any()):
        return await _exact(network)
    try:
        if goal.runs < LEAST_SEARCH:
            return await by_frequencies(network, goal.tolerance, goal.runs, (PILOT, await plain_wins(network, PILOT)))
        if network.has_gradient:
            result = await _with_gradients(network, goal)
            if result is not None:
                return result
        return await _without_gradients(network, goal)
    except OutOfTime:
        nothing = FlipEstimate(0.0, 0.0, 0)
        wins = torch.zeros(network.classes, dtype=torch.float64, device=network.mean.device)
        return EntryResult(nothing, None, True, "out of time", wins, False, (0.0, 1.0))


async def _exact(network: NoisyNetwork) -> EntryResult:
    """The answer where there is no noise: 0 or 1."""
    values = (await network.margins_at(network.normal(1)))[0]
    p = float(values.min() < 0)
    wins = torch.zeros_like(values)
    wins[values.argmin()] = p
    return EntryResult(FlipEstimate(p, 0.0, 1), None, True, "exact", wins, True, (p, p))


async def _with_gradients(network: NoisyNetwork, goal: FlipGoal) -> EntryResult | None:
    """Count flips if they are common, by the first samples and the surrogates fitted there; else sample by importance.

    None where gradients lead to no flips: nothing moves the margins, or importance sampling found none.
    """
    absolute, pilot = goal.tolerance.absolute, None
    if absolute is not None:
        pilot = await Pilot.of(network, PILOT)
        if pilot.plain_runs(goal.tolerance) < FEW:
            return await by_frequencies(network, goal.tolerance, goal.runs, (PILOT, pilot.wins))
    search = await Search.from_noise(network)
    plain = search.plain_margins
    search.refit()
    if search.guide is None or plain is None:
        return None
    flips, samples = int((plain < 0).sum()), len(plain)
    if flips == samples:  # the label hardly ever wins: nothing to search for
        return await by_frequencies(network, goal.tolerance, goal.runs, (PILOT, await plain_wins(network, PILOT)))
    expected = max(search.guide.expected, flips / samples)
    if absolute is None and expected > COMMON and flips < BELIEVED:
        pilot = await Pilot.of(network, DOUBTED)
        expected = expected if flips + float(pilot.wins.sum()) >= BELIEVED else 0.0
    if expected > COMMON or (absolute is not None and expected < absolute):
        return await by_guided_frequencies(
            network, search, plain_estimate(flips, samples), goal.tolerance, goal.runs, pilot
        )
    result = await by_importance(network, search, goal.tolerance, goal.runs)
    if result is not None and result.estimate.probability > 0:
        if result.estimate.probability >= NEGLIGIBLE and not result.met:
            return await _by_another_route(network, result, goal)
        if result.met:
            return result
        return replace(result, bounds=(0.0, max(result.interval[1], NEGLIGIBLE)))  # too few runs to say how rare
    if search.guide is not None and search.guide.expected < NEGLIGIBLE:  # too rare for splitting as well
        limit = goal.runs if absolute is not None else min(goal.runs, network.runs + BOUND_RUNS)
        found = await by_frequencies(network, goal.tolerance, limit, (PILOT, await plain_wins(network, PILOT)))
        if found.met or found.probability == 0:
            return found
        samples = found.estimate.samples  # they flip after all: the surrogates know nothing
        return await by_frequencies(network, goal.tolerance, goal.runs, (samples, found.wins * samples))
    return None


async def _by_another_route(network: NoisyNetwork, found: EntryResult, goal: FlipGoal) -> EntryResult:
    """What importance sampling left open within the runs allowed: counted if that takes no more runs than are left,
    else with an interval that splitting agrees with.
    """
    left = goal.runs - network.runs
    if network.clock.over or left < FEW:
        return found
    try:
        if samples_of_plain(goal.tolerance, found.probability) <= left:
            before = (PILOT, await plain_wins(network, PILOT))
            counted = await by_frequencies(network, goal.tolerance, goal.runs, before)
            return counted if counted.met else replace(found, second=counted.estimate, agreed=False)
        limit = min(goal.runs, network.runs + SPLITTING_RUNS)
        other = await by_splitting(network, Tolerance(SPLITTING_ERROR), limit)
    except OutOfTime:
        return found
    if other.probability == 0 or agree(found.estimate, other.estimate):
        return replace(found, second=other.estimate, agreed=found.agreed and other.probability > 0)
    larger, smaller = sorted((found, other), key=lambda each: each.probability, reverse=True)
    return replace(larger, second=smaller.estimate, agreed=False, met=False)


async def _without_gradients(network: NoisyNetwork, goal: FlipGoal) -> EntryResult:
    """Count flips if plain samples show some or an absolute error is asked for, else find rare ones by splitting.

    Where splitting finds none, plain samples bound how rare flips are.
    """
    before = (PILOT, await plain_wins(network, PILOT))
    if float(before[1].sum()) >= max(2.0, COMMON * PILOT) or goal.tolerance.absolute is not None:
        return await by_frequencies(network, goal.tolerance, goal.runs, before)
    result = await by_splitting(network, goal.tolerance, goal.runs)
    if result.estimate.probability > 0:
        return result
    return await by_frequencies(network, goal.tolerance, goal.runs, before)


def class_probabilities(
    network: Any,
    noise: Gaussian | Mapping[str, Any] | Sequence[Any],
    *,
    absolute_error: float = 0.01,
    runs: int = DEFAULT_RUNS,
    seconds: float | None = None,
    seed: int = 0,
    key: str | int | None = None,
    memory_budget: int | None = None,
) -> ClassProbabilities:
    """How often each class wins under Gaussian noise, each to within ±`absolute_error` (95 %).

    The other arguments are those of `flip_probability`, which is for probabilities that are small. Where the network
    has gradients, a surrogate of the margin chooses most samples and is a control variate for every class; plain
    samples among them show what it does not expect.

    >>> from torch import nn
    >>> network = nn.Linear(2, 2, bias=False)
    >>> network.weight.data = torch.eye(2)
    >>> found = class_probabilities(network.eval(), Gaussian(torch.tensor([1.0, 0.0]), std=1.0))
    >>> bool(found.interval[0, 0] < 0.7602 < found.interval[0, 1])  # Φ(1/√2)
    True
    """
    start = time.perf_counter()
    require_positive(SHARES_CALLER, "absolute_error", absolute_error, "0.01 for one point")
    goal = FlipGoal.read(SHARES_CALLER, None, absolute_error, runs, seconds, seed)
    request = read_classifier(SHARES_CALLER, network, noise, memory_budget, key)
    entries = request.model.answer(partial(_shares_of_entries, request, goal))
    batch = request.noise.batch_shape
    values, bounds, errors = (torch.stack(each) for each in zip(*(entry[:3] for entry in entries), strict=True))
    counts = torch.tensor([entry.runs for entry in entries], device=values.device)
    met = errors.amax(1) * QUANTILE <= absolute_error
    return ClassProbabilities(
        probability=values.reshape(*batch, -1),
        interval=bounds.reshape(*batch, -1, 2),
        standard_error=errors.reshape(*batch, -1),
        runs=counts.reshape(batch),
        met=met.reshape(batch),
        seconds=time.perf_counter() - start,
    )


class ClassShares(NamedTuple):
    """How often each of d classes wins for one input."""

    values: Tensor
    """Estimated probabilities, (d,); they sum to 1."""
    bounds: Tensor
    """The ends of 95 % intervals, (d, 2)."""
    errors: Tensor
    """Standard errors, (d,)."""
    runs: int
    """Runs of the network that it took."""


def _shares_of_entries(request: Request, goal: FlipGoal) -> list[ClassShares]:
    clock = Clock(goal.seconds)
    with torch.inference_mode(False), torch.no_grad(), full_precision():
        labels = labels_of(SHARES_CALLER, request, None)
    found = results_of_inputs(
        partial(entry_shares, goal=goal), "class probabilities", request.model, request.flat, labels.tolist(),
        seed=goal.seed, purpose="flips", clock=clock,
    )  # fmt: skip
    return in_order(found)


async def entry_shares(network: NoisyNetwork, goal: FlipGoal) -> ClassShares:
    """The shares of one input's classes; if the time is over before anything was found, equal ones from 0 to 1."""
    try:
        has_noise = bool((network.covariance.variances() > 0).any())
        counting = await _guided(network, goal) if network.has_gradient and has_noise else None
        if counting is not None:
            return await _controlled_shares(counting, network, goal)
        return await _plain_shares(network, goal, goal.runs if has_noise else 1)
    except OutOfTime:
        nothing = torch.zeros(network.classes, dtype=torch.float64, device=network.mean.device)
        bounds = torch.stack([nothing, nothing + 1], 1)
        return ClassShares(nothing + 1 / network.classes, bounds, nothing + 0.5, network.runs)


async def _guided(network: NoisyNetwork, goal: FlipGoal) -> Estimation | None:
    """Counting with a guide, begun with the plain samples of a pilot; None where surrogates expect no flips."""
    search = await Search.from_noise(network)
    search.refit()
    if search.guide is None:
        return None
    await search_while_it_pays(network, search, goal.tolerance)
    if not expects_flips(search):
        return None
    pilot = await Pilot.of(network, PILOT)
    counting = guided_counting(network, search, goal.tolerance, pilot)
    counting.add(pilot.white, pilot.margins, 0)
    return counting


async def _controlled_shares(estimation: Estimation, network: NoisyNetwork, goal: FlipGoal) -> ClassShares:
    """Shares from guided samples, which are drawn until every class is known as well as asked."""
    count = FIRST_RUNS
    while True:
        try:
            await estimation.run(count)
        except OutOfTime:
            if estimation.samples == 0:
                raise
            break
        values, errors = regressed_shares(estimation, network)
        largest = float(errors.max())
        power = 1 if largest <= estimation.unseen_error else 2  # the error of the unseen falls as 1/n
        times = (largest * QUANTILE / (goal.tolerance.absolute or 1.0)) ** power
        count = int(min(estimation.samples * min(max(1.1 * times - 1, 0.05), 2.0), goal.runs - network.runs))
        if times <= 1 or count < 4:
            break
    values, errors = regressed_shares(estimation, network)
    width = QUANTILE * errors
    least = torch.where(values > 0, 0.0, NEVER_SEEN / estimation.samples)
    bounds = torch.stack([(values - width).clamp(0, 1), torch.maximum(values + width, least).clamp(0, 1)], 1)
    return ClassShares(values, bounds, errors, network.runs)


def regressed_shares(estimation: Estimation, network: NoisyNetwork) -> tuple[Tensor, Tensor]:
    """P(k wins) (d,) and standard errors (d,): means of 1{k wins}/ρ, regressed on what has a known mean.

    All classes are regressed on the same controls, of which 1/ρ is one, and Σ_k 1{k wins}/ρ = 1/ρ. So the estimates sum
    to 1, but for those that are below 0: they are set to 0, and all are divided by their sum.
    """
    weight = 1 / estimation.mixture_ratios()
    winners = torch.where(torch.cat(estimation.flips) > 0, torch.cat(estimation.winners), network.label)
    wins = torch.nn.functional.one_hot(winners, network.classes).double() * weight.unsqueeze(1)
    values, errors, _ = regressed(wins, weight, estimation.controls())
    values = values.clamp(min=0)
    return values / values.sum(), errors.clamp(min=estimation.unseen_error)


async def _plain_shares(network: NoisyNetwork, goal: FlipGoal, most: int) -> ClassShares:
    """Frequencies of at most so many plain samples, with Wilson's intervals; of a single one, exact."""
    wins = torch.zeros(network.classes, dtype=torch.float64, device=network.mean.device)
    samples, absolute = 0, goal.tolerance.absolute or 1.0
    while samples < most:
        count = min(max(256, samples), most - samples)
        try:
            values = await network.margins_at(network.normal(count))
        except OutOfTime:
            if samples == 0:
                raise
            break
        winners = torch.where(values.amin(1) < 0, values.argmin(1), network.label)
        wins, samples = wins + winners.bincount(minlength=network.classes), samples + count
        middle = (wins + 2) / (samples + 4)
        if float((middle * (1 - middle)).max()) * (QUANTILE / absolute) ** 2 <= samples:
            break
    if most == 1:
        return ClassShares(wins, torch.stack([wins, wins], 1), torch.zeros_like(wins), network.runs)
    bounds = torch.tensor([wilson(int(won), samples) for won in wins.tolist()], dtype=torch.float64)
    middle = (wins + 2) / (samples + 4)
    errors = (middle * (1 - middle) / samples).sqrt()
    return ClassShares(wins / samples, bounds.to(wins.device), errors, network.runs)
