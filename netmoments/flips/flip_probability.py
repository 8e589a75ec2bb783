"""`flip_probability`: how often noise changes the answer, by the route that fits how rare that is."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from netmoments.checks import require_count, require_positive, require_seed
from netmoments.flips.frequent import (
    PILOT,
    Pilot,
    by_frequencies,
    by_guided_frequencies,
    nothing_found,
    plain_estimate,
    plain_wins,
)
from netmoments.flips.importance import NEGLIGIBLE, by_importance
from netmoments.flips.margins import (
    Clock,
    NoisyMargins,
    OutOfTime,
    inputs_together,
    labels_of,
    own_seed,
    read_classifier,
    together,
)
from netmoments.flips.result import FlipEstimate, FlipProbability, Found, Target, stacked
from netmoments.flips.search import Search
from netmoments.flips.splitting import by_splitting
from netmoments.gaussian import Gaussian
from netmoments.moments.request import Request
from netmoments.network.model import NetworkModel
from netmoments.precision import full_precision
from netmoments.progress import progress_bar

CALLER = "flip_probability"
FEW = 800
"""Plain samples that are fewer than gradients would pay for."""
COMMON = 0.01
"""Flips that are expected more often than this are counted."""
BELIEVED, DOUBTED = 4, 128
"""Flips that show that they are common, among the first samples or so many more: one or two may be chance."""
DEFAULT_RUNS = 1_000_000


@dataclass(frozen=True)
class FlipGoal:
    """What is asked for, checked."""

    target: Target
    runs: int
    seconds: float | None
    seed: int

    @classmethod
    def read(
        cls, caller: str, relative_error: Any, absolute_error: Any, runs: Any, seconds: Any, seed: Any
    ) -> FlipGoal:
        require_positive(caller, "relative_error", relative_error, "0.1 for ten per cent")
        if absolute_error is not None:
            require_positive(caller, "absolute_error", absolute_error, "0.01 for one point, or None")
        if seconds is not None:
            require_positive(caller, "seconds", seconds, "None for no limit")
        require_count(caller, "runs", runs, least=100)
        require_seed(caller, seed)
        absolute = None if absolute_error is None else float(absolute_error)
        return cls(Target(float(relative_error), absolute), runs, seconds, seed)


def flip_probability(
    network: Any,
    noise: Gaussian | Mapping[str, Any] | Sequence[Any],
    label: int | Tensor | None = None,
    relative_error: float = 0.1,
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
        relative_error: the standard error that is enough, relative to the probability.
        absolute_error: a half-width of the 95 % interval that is enough, too: 0.01 for one point.
        runs: of the network for each input, at most; a backward pass counts two.
        seconds: for all inputs together, at most.
        seed: same seed, same network, same device: same answer. Every input has random numbers of its own, by the seed
            and its mean: alone or in a batch its answer is the same but for rounding, which may move a sample or a
            stop, within the stated error.
        key: which output, for a network that returns several.
        memory_budget: bytes, as elsewhere.

    Inputs of a batch go through the network together. Common flips are counted, on samples that a quadratic surrogate
    of the margin chooses and with it as control. Rare ones are found by importance sampling: two searches, from the
    noise and from samples pulled across the boundary, fit surrogates to gradients; their densities are mixed, and the
    estimate of one must agree with that of the other. Without gradients, splitting. No run of an estimate was used in a
    fit, but the first plain samples of common flips, for two numbers; that sampling stops when the error looks small
    enough, and begins anew when it does not, leaves a small bias.
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
    found = request.model.answer(partial(_all, request, label, goal))
    return found.shaped(request.noise.batch_shape, time.perf_counter() - start)


@dataclass(frozen=True, eq=False)
class _Entries:
    """What was found for every entry of a flat batch."""

    labels: Tensor
    found: list[Found]
    runs: list[int]

    def shaped(self, batch: torch.Size, seconds: float) -> FlipProbability:
        device = self.labels.device
        bounds, rivals = [one.interval for one in self.found], [one.rival for one in self.found]
        second = [math.nan if one.second is None else one.second.probability for one in self.found]
        return FlipProbability(
            probability=stacked([one.probability for one in self.found], batch, device),
            interval=torch.tensor(bounds, dtype=torch.float64, device=device).reshape(*batch, 2),
            standard_error=stacked([one.estimate.careful_error for one in self.found], batch, device),
            label=self.labels.reshape(batch),
            rival=torch.tensor(rivals, device=device).reshape(batch),
            runs=torch.tensor(self.runs, device=device).reshape(batch),
            route=[one.route for one in self.found],
            met=torch.tensor([one.met for one in self.found], device=device).reshape(batch),
            agreement=stacked(second, batch, device),
            agreed=torch.tensor([one.agreed for one in self.found], device=device).reshape(batch),
            seconds=seconds,
        )


def _all(request: Request, label: int | Tensor | None, goal: FlipGoal) -> _Entries:
    with torch.inference_mode(False), torch.no_grad(), full_precision():
        labels = labels_of(CALLER, request, label)
    every = sorted(entries_found(request.model, request.flat, labels.tolist(), goal), key=lambda one: one[0])
    return _Entries(labels, [found for _, found, _ in every], [runs for _, _, runs in every])


def entries_found(
    model: NetworkModel, noise: Gaussian, labels: Sequence[int], goal: FlipGoal, description: str = "flips"
) -> Iterator[tuple[int, Found, int]]:
    """For inputs (noise with one batch dimension), as they come: which, what was found, and runs.

    The network is run for many of them together; what is found of one does not depend on the others, to rounding.
    """
    every = entries_margins(CALLER, model, noise, labels, goal, Clock(goal.seconds))
    coming = together((_with_runs(margins, goal) for margins in every), inputs_together(model, noise))
    with progress_bar(description, len(labels)) as show:
        for done in itertools.count():
            show(done)
            with torch.inference_mode(False), torch.no_grad(), full_precision():
                one = next(coming, None)
            if one is None:
                break
            yield one[0], *one[1]


async def _with_runs(margins: NoisyMargins, goal: FlipGoal) -> tuple[Found, int]:
    found = await one_entry(margins, goal)
    return found, margins.runs


def entries_margins(
    caller: str, model: NetworkModel, noise: Gaussian, labels: Sequence[int], goal: FlipGoal, clock: Clock
) -> Iterator[NoisyMargins]:
    """Each entry with random numbers of its own."""
    for entry, label in enumerate(labels):
        own = noise.entries(torch.tensor([entry], device=noise.device))
        generator = torch.Generator(noise.device).manual_seed(own_seed(goal.seed, "flips", own.flat_mean[0]))
        yield NoisyMargins(model, own, label, generator, clock, caller)


async def one_entry(margins: NoisyMargins, goal: FlipGoal) -> Found:
    """One input's estimate, by the route that fits."""
    if not bool((margins.covariance.variances() > 0).any()):
        return await exact(margins)
    try:
        if margins.has_gradient:
            found = await _with_gradients(margins, goal)
            if found is not None:
                return found
        return await _without_gradients(margins, goal)
    except OutOfTime:
        nothing = FlipEstimate(0.0, 0.0, 0)
        empty = torch.zeros(margins.rivals, dtype=torch.float64, device=margins.mean.device)
        return Found(nothing, None, True, "out of time", empty, False, (0.0, 1.0))


async def exact(margins: NoisyMargins) -> Found:
    """Without noise: 0 or 1."""
    found = (await margins.of(margins.normal(1)))[0]
    flipped = bool(found.min() < 0)
    wins = torch.zeros_like(found)
    wins[found.argmin()] = float(flipped)
    p = float(flipped)
    return Found(FlipEstimate(p, 0.0, 1), None, True, "exact", wins, True, (p, p))


async def _with_gradients(margins: NoisyMargins, goal: FlipGoal) -> Found | None:
    """Counted where the first gradients show that flips are common, else by importance sampling."""
    absolute, pilot = goal.target.absolute, None
    if absolute is not None:
        pilot = await Pilot.of(margins, PILOT)
        if pilot.wanted(goal.target) < FEW:
            return await by_frequencies(margins, goal.target, goal.runs, (PILOT, pilot.wins))
    search = await Search.from_noise(margins, margins.generator)
    plain = search.plain
    search.refit()
    if search.guide is None or plain is None:
        return None
    flips, samples = int((plain < 0).sum()), len(plain)
    if flips == samples:  # the label hardly ever wins: nothing to search for
        return await by_frequencies(margins, goal.target, goal.runs, (PILOT, await plain_wins(margins, PILOT)))
    expected = max(search.guide.expected, flips / samples)
    if absolute is None and expected > COMMON and flips < BELIEVED:
        pilot = await Pilot.of(margins, DOUBTED)
        expected = expected if flips + float(pilot.wins.sum()) >= BELIEVED else 0.0
    if expected > COMMON or (absolute is not None and expected < absolute):
        return await by_guided_frequencies(
            margins, search, plain_estimate(flips, samples), goal.target, goal.runs, margins.generator, pilot
        )
    found = await by_importance(margins, search, goal.target, goal.runs, margins.generator)
    if found is not None and found.estimate.probability > 0:
        return found
    if search.guide is not None and search.guide.expected < NEGLIGIBLE:  # too rare for splitting, too
        return await nothing_found(margins, goal.target, goal.runs, (PILOT, await plain_wins(margins, PILOT)))
    return None


async def _without_gradients(margins: NoisyMargins, goal: FlipGoal) -> Found:
    """Counted where plain samples show flips, else by splitting; where that finds none, a bound from plain samples."""
    wins = await plain_wins(margins, PILOT)
    before = (PILOT, wins)
    if float(wins.sum()) >= max(2.0, COMMON * PILOT) or goal.target.absolute is not None:
        return await by_frequencies(margins, goal.target, goal.runs, before)
    found = await by_splitting(margins, goal.target, goal.runs)
    if found.estimate.probability > 0:
        return found
    return await nothing_found(margins, goal.target, goal.runs, before)
