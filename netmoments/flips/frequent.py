"""Common flips: frequencies, of samples that a surrogate chooses and with it as control variate, or of plain ones."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from netmoments.flips.guide import POOL, PlainNoise
from netmoments.flips.importance import Estimating
from netmoments.flips.margins import NoisyMargins, OutOfTime
from netmoments.flips.result import QUANTILE, FlipEstimate, Found, Target, agree, wilson
from netmoments.flips.search import Search

GUIDED = 0.75
"""Of the runs: by the surrogate; the others are plain samples, so that no weight is above 1/(1 − this)."""
FIRST = 64
"""Runs of the first round."""
WORTH = 0.08
"""Of the runs that plain sampling would take: what gradients may take."""
PLAIN_BLOCK = 256


def by_guided_frequencies(
    margins: NoisyMargins, search: Search, plain: FlipEstimate, target: Target, limit: int, generator: torch.Generator
) -> Found:
    """p = E h + mean of (1{flip} − h)/ρ over plain and guided samples; `plain` is what other samples say of it."""
    work = guided(margins, search, target, generator)
    met = work.until(target, math.inf, limit, FIRST)
    estimate = work.estimate()
    agreed = agree(estimate, plain)
    return Found(estimate, plain, agreed, "frequencies", work.wins(margins.rivals), met and agreed)


def guided(margins: NoisyMargins, search: Search, target: Target, generator: torch.Generator) -> Estimating:
    """What samples are drawn from, after as many gradients as pay."""
    start = margins.runs - 3 * search.gradients
    assert search.guide is not None
    seen = 0.0 if search.plain is None else float((search.plain < 0).double().mean())
    share = min(max(search.guide.expected, seen), 0.9)
    wanted = target.needed(share, math.sqrt(share * (1 - share)))
    while margins.runs - start < WORTH * wanted and search.guide is not None:
        search.advance()
    search.refit(POOL)
    assert search.guide is not None
    return Estimating(margins, (PlainNoise(), search.guide), (1 - GUIDED, GUIDED), generator)


def by_frequencies(margins: NoisyMargins, target: Target, limit: int, before: tuple[int, Tensor]) -> Found:
    """Plain samples until the target is met or a limit is reached, after those before: how many, and who won (d,)."""
    samples, wins = before
    met = False
    try:
        while True:
            flips = int(wins.sum())
            low, high = wilson(flips, max(samples, 1))
            error = (high - low) / (2 * QUANTILE)
            needed = target.needed(flips / max(samples, 1), error) if samples else 2.0
            met = needed <= 1
            more = int(min(max(PLAIN_BLOCK, (min(needed, 3.0) - 1) * samples), limit - margins.runs))
            if met or more <= 0:
                break
            wins = wins + plain_wins(margins, more)
            samples += more
    except OutOfTime:
        if samples == 0:
            raise
    flips = int(wins.sum())
    estimate = plain_estimate(flips, samples)
    return Found(estimate, None, True, "frequencies", wins / samples, met, wilson(flips, samples))


def plain_estimate(flips: int, samples: int) -> FlipEstimate:
    """The frequency of flips; the error is that of the frequency with two flips and two others more (Agresti 1998)."""
    p = (flips + 2) / (samples + 4)
    return FlipEstimate(flips / samples, math.sqrt(p * (1 - p) / (samples + 4)), samples)


def plain_wins(margins: NoisyMargins, count: int) -> Tensor:
    """How often each other class won among so many samples, (d,)."""
    total = torch.zeros(margins.rivals, dtype=torch.float64, device=margins.mean.device)
    for start in range(0, count, PLAIN_BLOCK):
        found = margins.of(margins.normal(min(PLAIN_BLOCK, count - start)))
        flipped = found.amin(1) < 0
        total = total + found.argmin(1)[flipped].bincount(minlength=margins.rivals)
    return total


def nothing_found(margins: NoisyMargins, target: Target, limit: int, before: tuple[int, Tensor]) -> Found:
    """What plain samples say where nothing else found a flip: a bound, after as many as are allowed."""
    found = by_frequencies(margins, replace(target, relative=1e-9), limit, before)
    return replace(found, route="frequencies")
