"""`class_probabilities`: how often each class wins under noise.

Where the network has gradients, samples have surrogates as control variates (`frequent`); else they are counted.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from netmoments.checks import require_positive
from netmoments.flips.flip_probability import DEFAULT_RUNS, FlipGoal
from netmoments.flips.frequent import FIRST_RUNS, PILOT, Pilot, expects_flips, guided_counting, search_while_it_pays
from netmoments.flips.importance import Estimation, regressed
from netmoments.flips.margins import (
    Clock,
    NoisyMargins,
    OutOfTime,
    inputs_together,
    labels_of,
    margins_of_entries,
    read_classifier,
    run_together,
)
from netmoments.flips.result import NEVER_SEEN, ClassProbabilities, wilson
from netmoments.flips.search import Search
from netmoments.gaussian import Gaussian
from netmoments.moments.request import Request
from netmoments.normal import QUANTILE
from netmoments.precision import full_precision
from netmoments.progress import progress_bar

CALLER = "class_probabilities"


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
    require_positive(CALLER, "absolute_error", absolute_error, "0.01 for one point")
    goal = FlipGoal.read(CALLER, 1e-9, absolute_error, runs, seconds, seed)
    request = read_classifier(CALLER, network, noise, memory_budget, key)
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
    """(d,)."""
    bounds: Tensor
    """The ends of 95 % intervals, (d, 2)."""
    errors: Tensor
    """Standard errors, (d,)."""
    runs: int


def _shares_of_entries(request: Request, goal: FlipGoal) -> list[ClassShares]:
    clock, done = Clock(goal.seconds), dict[int, ClassShares]()
    with torch.inference_mode(False), torch.no_grad(), full_precision():
        labels = labels_of(CALLER, request, None)
        with progress_bar("class probabilities", len(labels)) as show:
            margins = margins_of_entries(
                CALLER, request.model, request.flat, labels.tolist(), goal.seed, "flips", clock, request.memory_budget
            )
            works = (entry_shares(each, goal) for each in margins)
            together = inputs_together(request.model, request.flat, request.memory_budget)
            for place, shares in run_together(works, together):
                done[place] = shares
                show(len(done))
    return [done[place] for place in range(len(labels))]


async def entry_shares(margins: NoisyMargins, goal: FlipGoal) -> ClassShares:
    """The shares of one input's classes; if the time is over before anything was found, equal ones from 0 to 1."""
    try:
        noisy = bool((margins.covariance.variances() > 0).any())
        counting = await _guided(margins, goal) if margins.has_gradient and noisy else None
        if counting is not None:
            return await _controlled_shares(counting, margins, goal)
        return await _plain_shares(margins, goal, goal.runs if noisy else 1)
    except OutOfTime:
        nothing = torch.zeros(margins.classes, dtype=torch.float64, device=margins.mean.device)
        bounds = torch.stack([nothing, nothing + 1], 1)
        return ClassShares(nothing + 1 / margins.classes, bounds, nothing + 0.5, margins.runs)


async def _guided(margins: NoisyMargins, goal: FlipGoal) -> Estimation | None:
    """Counting with guided samples, so far only the pilot's plain ones; None where no surrogate expects flips."""
    search = await Search.from_noise(margins, margins.generator)
    search.refit()
    if search.guide is None:
        return None
    await search_while_it_pays(margins, search, goal.target)
    if not expects_flips(search):
        return None
    pilot = await Pilot.of(margins, PILOT)
    counting = guided_counting(margins, search, goal.target, margins.generator, pilot)
    counting.add(pilot.white, pilot.margins, 0)
    return counting


async def _controlled_shares(estimation: Estimation, margins: NoisyMargins, goal: FlipGoal) -> ClassShares:
    """Run until every class is known as well as asked."""
    count = FIRST_RUNS
    while True:
        try:
            await estimation.run(count)
        except OutOfTime:
            if estimation.samples == 0:
                raise
            break
        values, errors = regressed_shares(estimation, margins)
        largest = float(errors.max())
        power = 1 if largest <= estimation.unseen_error else 2  # the error of the unseen falls as 1/n
        times = (largest * QUANTILE / (goal.target.absolute or 1.0)) ** power
        count = int(min(estimation.samples * min(max(1.1 * times - 1, 0.05), 2.0), goal.runs - margins.runs))
        if times <= 1 or count < 4:
            break
    values, errors = regressed_shares(estimation, margins)
    width = QUANTILE * errors
    least = torch.where(values > 0, 0.0, NEVER_SEEN / estimation.samples)
    bounds = torch.stack([(values - width).clamp(0, 1), torch.maximum(values + width, least).clamp(0, 1)], 1)
    return ClassShares(values, bounds, errors, margins.runs)


def regressed_shares(estimation: Estimation, margins: NoisyMargins) -> tuple[Tensor, Tensor]:
    """P(k wins) (d,) and standard errors (d,): means of 1{k wins}/ρ, regressed on what has a known mean.

    They sum to 1, as all classes are regressed on the same: their sum is 1/ρ, which is regressed on itself.
    """
    weight = 1 / estimation.mixture_ratios()
    winners = torch.where(torch.cat(estimation.flips) > 0, torch.cat(estimation.winners), margins.label)
    wins = torch.nn.functional.one_hot(winners, margins.classes).double() * weight.unsqueeze(1)
    values, errors, _ = regressed(wins, weight, estimation.controls())
    values = values.clamp(min=0)
    return values / values.sum(), errors.clamp(min=estimation.unseen_error)


async def _plain_shares(margins: NoisyMargins, goal: FlipGoal, most: int) -> ClassShares:
    """Frequencies of at most so many plain samples, with Wilson's intervals; of a single one, exact."""
    wins = torch.zeros(margins.classes, dtype=torch.float64, device=margins.mean.device)
    samples, absolute = 0, goal.target.absolute or 1.0
    while samples < most:
        count = min(max(256, samples), most - samples)
        try:
            values = await margins.at(margins.normal(count))
        except OutOfTime:
            if samples == 0:
                raise
            break
        winners = torch.where(values.amin(1) < 0, values.argmin(1), margins.label)
        wins, samples = wins + winners.bincount(minlength=margins.classes), samples + count
        middle = (wins + 2) / (samples + 4)
        if float((middle * (1 - middle)).max()) * (QUANTILE / absolute) ** 2 <= samples:
            break
    if most == 1:
        return ClassShares(wins, torch.stack([wins, wins], 1), torch.zeros_like(wins), margins.runs)
    bounds = torch.tensor([wilson(int(won), samples) for won in wins.tolist()], dtype=torch.float64)
    middle = (wins + 2) / (samples + 4)
    errors = (middle * (1 - middle) / samples).sqrt()
    return ClassShares(wins / samples, bounds.to(wins.device), errors, margins.runs)
