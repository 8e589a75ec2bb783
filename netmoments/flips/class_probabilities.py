"""`class_probabilities`: how often each class wins, from samples with surrogates as controls."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from netmoments.checks import require_positive
from netmoments.flips.flip_probability import DEFAULT_RUNS, FlipGoal, entries_margins
from netmoments.flips.frequent import FIRST, PILOT, Pilot, guided, tells, with_enough_gradients
from netmoments.flips.importance import Estimating, regressed
from netmoments.flips.margins import (
    Clock,
    NoisyMargins,
    OutOfTime,
    inputs_together,
    labels_of,
    read_classifier,
    together,
)
from netmoments.flips.result import QUANTILE, ClassProbabilities, wilson
from netmoments.flips.search import Search
from netmoments.gaussian import Gaussian
from netmoments.moments.request import Request
from netmoments.precision import full_precision
from netmoments.progress import progress_bar

CALLER = "class_probabilities"


def class_probabilities(
    network: Any,
    noise: Gaussian | Mapping[str, Any] | Sequence[Any],
    absolute_error: float = 0.01,
    *,
    runs: int = DEFAULT_RUNS,
    seconds: float | None = None,
    seed: int = 0,
    key: str | int | None = None,
    memory_budget: int | None = None,
) -> ClassProbabilities:
    """How often each class wins under Gaussian noise, each to within ±`absolute_error` (95 %).

    Arguments are those of `flip_probability`, which is for probabilities that are small. Where the network has
    gradients, a surrogate of the margin chooses most samples and is a control variate for every class; plain samples
    among them show what it does not expect.

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
    found = request.model.answer(partial(_all, request, goal))
    batch = request.noise.batch_shape
    values, bounds, errors = (torch.stack(each) for each in zip(*(one[:3] for one in found), strict=True))
    counts = torch.tensor([one[3] for one in found], device=values.device)
    met = errors.amax(1) * QUANTILE <= absolute_error
    return ClassProbabilities(
        probability=values.reshape(*batch, -1),
        interval=bounds.reshape(*batch, -1, 2),
        standard_error=errors.reshape(*batch, -1),
        runs=counts.reshape(batch),
        met=met.reshape(batch),
        seconds=time.perf_counter() - start,
    )


def _all(request: Request, goal: FlipGoal) -> list[tuple[Tensor, Tensor, Tensor, int]]:
    """For each entry: probabilities (d,), intervals (d, 2), standard errors (d,) and runs."""
    clock, found = Clock(goal.seconds), dict[int, tuple[Tensor, Tensor, Tensor, int]]()
    with torch.inference_mode(False), torch.no_grad(), full_precision():
        labels = labels_of(CALLER, request, None)
        with progress_bar("class probabilities", len(labels)) as show:
            every = entries_margins(CALLER, request.model, request.flat, labels.tolist(), goal, clock)
            works = (one_entry(margins, goal) for margins in every)
            for entry, one in together(works, inputs_together(request.model, request.flat)):
                found[entry] = one
                show(len(found))
    return [found[entry] for entry in range(len(labels))]


async def one_entry(margins: NoisyMargins, goal: FlipGoal) -> tuple[Tensor, Tensor, Tensor, int]:
    """What was found of one input; where the time was over before anything was: all classes alike, from 0 to 1."""
    try:
        return await _estimated(margins, goal)
    except OutOfTime:
        nothing = torch.zeros(margins.rivals, dtype=torch.float64, device=margins.mean.device)
        return nothing + 1 / margins.rivals, torch.stack([nothing, nothing + 1], 1), nothing + 0.5, margins.runs


async def _estimated(margins: NoisyMargins, goal: FlipGoal) -> tuple[Tensor, Tensor, Tensor, int]:
    """By surrogates where there are gradients; by plain frequencies else."""
    work = None
    noisy = bool((margins.covariance.variances() > 0).any())
    if margins.has_gradient and noisy:
        search = await Search.from_noise(margins, margins.generator)
        search.refit()
        if search.guide is not None:
            await with_enough_gradients(margins, search, goal.target)
            if tells(search):
                pilot = await Pilot.of(margins, PILOT)
                work = guided(margins, search, goal.target, margins.generator, pilot)
                work.add(pilot.white, pilot.margins, 0)
    if work is None:
        return *await plain(margins, goal, 1 if not noisy else goal.runs), margins.runs
    return *await controlled_classes(work, margins, goal), margins.runs


async def controlled_classes(work: Estimating, margins: NoisyMargins, goal: FlipGoal) -> tuple[Tensor, Tensor, Tensor]:
    """Runs until every class is known as well as asked."""
    count = FIRST
    while True:
        try:
            await work.run(count)
        except OutOfTime:
            if work.samples == 0:
                raise
            break
        values, errors = shares(work, margins)
        largest = float(errors.max())
        needed = (largest * QUANTILE / (goal.target.absolute or 1.0)) ** (1 if largest <= work.unseen else 2)
        count = int(min(work.samples * min(max(1.1 * needed - 1, 0.05), 2.0), goal.runs - margins.runs))
        if needed <= 1 or count < 4:
            break
    values, errors = shares(work, margins)
    width = QUANTILE * errors
    least = torch.where(values > 0, 0.0, 3.0 / work.samples)  # of a class that never won
    bounds = torch.stack([(values - width).clamp(0, 1), torch.maximum(values + width, least).clamp(0, 1)], 1)
    return values, bounds, errors


def shares(work: Estimating, margins: NoisyMargins) -> tuple[Tensor, Tensor]:
    """P(k wins) (d,) and standard errors: means of 1{k wins}/ρ, regressed on what has a known mean.

    As all classes are regressed on the same, and their sum is 1/ρ, which is regressed on itself, they sum to 1.
    """
    weight = 1 / work.mixed()
    winners = torch.where(torch.cat(work.flips) > 0, torch.cat(work.winners), margins.label)
    wins = torch.nn.functional.one_hot(winners, margins.rivals).double() * weight.unsqueeze(1)
    values, errors, _ = regressed(wins, weight, work.controls())
    values = values.clamp(min=0)
    return values / values.sum(), errors.clamp(min=work.unseen)


async def plain(margins: NoisyMargins, goal: FlipGoal, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Frequencies of plain samples, with Wilson's intervals."""
    wins = torch.zeros(margins.rivals, dtype=torch.float64, device=margins.mean.device)
    samples, absolute = 0, goal.target.absolute or 1.0
    while samples < most:
        count = min(max(256, samples), most - samples)
        try:
            found = await margins.of(margins.normal(count))
        except OutOfTime:
            if samples == 0:
                raise
            break
        winners = torch.where(found.amin(1) < 0, found.argmin(1), margins.label)
        wins, samples = wins + winners.bincount(minlength=margins.rivals), samples + count
        middle = (wins + 2) / (samples + 4)
        if float((middle * (1 - middle)).max()) * (QUANTILE / absolute) ** 2 <= samples:
            break
    if most == 1:
        return wins, torch.stack([wins, wins], 1), torch.zeros_like(wins)
    bounds = torch.tensor([wilson(int(won), samples) for won in wins.tolist()], dtype=torch.float64)
    middle = (wins + 2) / (samples + 4)
    errors = (middle * (1 - middle) / samples).sqrt()
    return wins / samples, bounds.to(wins.device), errors
