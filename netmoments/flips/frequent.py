"""Common flips: frequencies, of samples that a surrogate chooses and with it as control variate, or of plain ones."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from netmoments.flips.guide import POOL, PlainNoise
from netmoments.flips.importance import NOT_SHOWN, Estimating
from netmoments.flips.margins import NoisyMargins, OutOfTime
from netmoments.flips.result import QUANTILE, FlipEstimate, Found, Target, agree, wilson
from netmoments.flips.search import Search

PLAIN_SHARE = (0.25, 0.75)
"""Of the runs: plain samples, at least and at most, so that no weight is above 4; the others are by the surrogate."""
SAVED = 0.4
"""Of the runs of plain sampling: what an estimate with surrogates takes, about."""
FIRST = 64
"""Runs of the first round."""
WORTH = 0.08
"""Of the runs that plain sampling would take: what gradients may take."""
POOR = 0.6
"""Of the runs that plain sampling would take: an estimate that would take more asks for better surrogates first."""
ATTEMPTS = 2
"""Estimates that are begun, at most."""
ROUND_SHARE = 0.25
"""Of the runs that an estimate would still take: what a round of gradients may."""
PLAIN_BLOCK = 256


@dataclass(frozen=True, eq=False)
class Pilot:
    """Plain samples ε (N, n) with margins (N, d) that say how common flips are; they count in an estimate, too."""

    white: Tensor
    margins: Tensor

    @classmethod
    def of(cls, margins: NoisyMargins, count: int) -> Pilot:
        white = margins.normal(count)
        return cls(white, margins.of(white))

    @property
    def wins(self) -> Tensor:
        """How often each other class won, (d,)."""
        flipped = self.margins.amin(1) < 0
        return self.margins.argmin(1)[flipped].bincount(minlength=self.margins.shape[1]).double()

    def wanted(self, target: Target) -> float:
        """Runs that plain sampling would take, by what these say."""
        share = (float(self.wins.sum()) + 1) / (len(self.white) + 2)
        return target.needed(share, math.sqrt(share * (1 - share)))


def by_guided_frequencies(
    margins: NoisyMargins,
    search: Search,
    plain: FlipEstimate,
    target: Target,
    limit: int,
    generator: torch.Generator,
    pilot: Pilot | None = None,
) -> Found:
    """p = E h + mean of (1{flip} − h)/ρ over plain and guided samples.

    It must agree with the frequency in plain samples alone, those here and others before, `plain`.
    """
    with_enough_gradients(margins, search, target)
    for attempt in range(ATTEMPTS):
        work = guided(margins, search, target, generator, pilot)
        most = math.inf if attempt + 1 == ATTEMPTS else POOR * plain_wanted(search, target)
        met = work.until(target, most, limit, FIRST)
        missing = (work.more(target) - 1) * work.samples
        if met or 3 * search.next_round > ROUND_SHARE * missing or margins.runs >= limit or margins.clock.over:
            break
        search.advance()
        if search.guide is None:
            break
    if not met:
        met = work.until(target, math.inf, limit, FIRST)
    estimate, flips = work.estimate(), work.plain_flips
    second = plain_estimate(round(plain.probability * plain.samples) + flips[0], plain.samples + flips[1])
    agreed = agree(estimate, second)
    return Found(estimate, second, agreed, "frequencies", work.wins(margins.rivals), met and agreed)


def with_enough_gradients(margins: NoisyMargins, search: Search, target: Target) -> None:
    """Rounds of a search, as many as pay beforehand."""
    start = margins.runs - 3 * search.gradients
    wanted = plain_wanted(search, target)
    while margins.runs - start < WORTH * wanted and search.guide is not None:
        search.advance()


def guided(
    margins: NoisyMargins, search: Search, target: Target, generator: torch.Generator, pilot: Pilot | None = None
) -> Estimating:
    """What samples are drawn from: the noise, so far that it shows what surrogates do not expect, and the guide."""
    search.refit(POOL)
    assert search.guide is not None
    wanted = plain_wanted(search, target)
    each = NOT_SHOWN * math.sqrt(wanted / max(search.guide.expected * (1 - search.guide.expected), 1e-6))
    share = min(max(each / (SAVED * wanted), PLAIN_SHARE[0]), PLAIN_SHARE[1])
    work = Estimating(margins, (PlainNoise(), search.guide), (share, 1 - share), generator)
    if pilot is not None:
        work.add(pilot.white, pilot.margins, 0)
    return work


def plain_wanted(search: Search, target: Target) -> float:
    """Runs that plain sampling would take, by what surrogates and the first samples say of the probability."""
    assert search.guide is not None
    seen = 0.0 if search.plain is None else float((search.plain < 0).double().mean())
    share = min(max(search.guide.expected, seen), 0.9)
    return target.needed(share, math.sqrt(share * (1 - share)))


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
            more = int(min(max(FIRST, (min(needed, 3.0) - 1) * samples), limit - margins.runs))
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
