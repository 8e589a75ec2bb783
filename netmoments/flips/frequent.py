"""Common flips: frequencies, of samples that a surrogate chooses and with it as control variate, or of plain ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from netmoments.flips.guide import POOL, Guide, PlainNoise
from netmoments.flips.importance import NEGLIGIBLE, Controls, Estimating
from netmoments.flips.margins import NoisyMargins, OutOfTime
from netmoments.flips.result import NEVER_SEEN, QUANTILE, FlipEstimate, Found, Target, agree, wilson
from netmoments.flips.search import Search

PLAIN_SHARES = (0.2, 0.35, 0.5, 0.7, 1.0)
"""Of the runs: what plain samples may be, so that no weight is above 5; the others are by the surrogate."""
MOST_PLAIN = 0.75
"""The same before there are enough runs to choose, and while some are missing that show what is not expected."""
ENOUGH = 100
"""Runs that are."""
SAVED = 0.4
"""Of the runs of plain sampling: what an estimate with surrogates takes, about."""
NOT_SHOWN = NEVER_SEEN / 2 / QUANTILE
"""Over the number of plain samples: the standard error of what none of them has shown, half a width of [0, 3/n]."""
PILOT = 64
"""Plain samples that say how common flips are, and how right surrogates."""
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
MARGIN = 1.03
"""More runs than the error so far asks for."""


@dataclass(frozen=True, eq=False)
class Pilot:
    """Plain samples ε (N, n) with margins (N, d) that say how common flips are, and how right surrogates: two numbers
    (`Guide.as_seen`). Among many others they count in an estimate, too.
    """

    white: Tensor
    margins: Tensor

    @classmethod
    async def of(cls, margins: NoisyMargins, count: int) -> Pilot:
        white = margins.normal(count)
        return cls(white, await margins.of(white))

    @property
    def wins(self) -> Tensor:
        """How often each other class won, (d,)."""
        flipped = self.margins.amin(1) < 0
        return self.margins.argmin(1)[flipped].bincount(minlength=self.margins.shape[1]).double()

    def wanted(self, target: Target) -> float:
        """Runs that plain sampling would take, by what these say."""
        share = (float(self.wins.sum()) + 1) / (len(self.white) + 2)
        return target.needed(share, math.sqrt(share * (1 - share)))


class Counting(Estimating):
    """Plain samples, and those of a guide: as many of each as make the error least."""

    def __init__(
        self, margins: NoisyMargins, guide: Guide, share: float, shown: int, generator: torch.Generator
    ) -> None:
        """A share of plain samples to begin with, and how many of them there must be in the end."""
        super().__init__(margins, (PlainNoise(), guide), (share, 1 - share), generator)
        self.shown, self.guide = shown, guide
        self.failing_as_seen: list[Tensor] = []

    def add(self, white: Tensor, found: Tensor, number: int) -> None:
        super().add(white, found, number)
        if self.guide.seen is not None:
            self.failing_as_seen.append(self.guide.failing_as_seen(white))

    def controls(self) -> Controls:
        """h as surrogates seem, and as they were seen to be."""
        own = super().controls()
        if not self.failing_as_seen:
            return own
        known, error = self.guide.expected_seen
        values = torch.cat([own.values, torch.cat(self.failing_as_seen).unsqueeze(1)], 1)
        return Controls(values, (*own.known, known), (*own.errors, error))

    @property
    def plain_flips(self) -> tuple[int, int]:
        """How many of how many plain samples flipped."""
        own = torch.cat(self.origin) == 0
        return int(torch.cat(self.flips)[own].sum()), int(own.sum())

    @property
    def unseen(self) -> float:
        return NOT_SHOWN / max(1, sum(int((origin == 0).sum()) for origin in self.origin))

    def divided(self, count: int) -> list[int]:
        share = self.best_share() if self.samples >= ENOUGH else self.shares[0]
        missing = self.shown - sum(int((origin == 0).sum()) for origin in self.origin)
        plain = max(2, round(max(share * count, min(missing, MOST_PLAIN * count))))
        return [plain, max(0, count - plain)]

    def best_share(self) -> float:
        """The share α of plain samples that makes the variance of an estimate least, by the runs so far.

        It is E[(1{flip} − β·(h − E h) − p)²/ρ_α] with ρ_α = α + (1 − α)ρ and all controls h; a guide that knows little
        does harm.
        """
        flips, controls, weight = torch.cat(self.flips), self.controls().values, 1 / self.mixed()
        weight = weight / weight.sum()
        rest, centred = flips - weight @ flips, controls - weight @ controls
        gram = centred.mT @ (weight.unsqueeze(1) * centred)
        gram = gram + (1e-9 * gram.diagonal().sum()).clamp(min=1e-200) * torch.eye(len(gram)).to(gram)
        slopes = torch.linalg.solve(gram, centred.mT @ (weight * rest))
        terms = weight * (rest - centred @ slopes).square()
        ratio = torch.cat(self.ratios)[:, 1]
        return min(PLAIN_SHARES, key=lambda share: float((terms / (share + (1 - share) * ratio)).sum()))


async def by_guided_frequencies(
    margins: NoisyMargins,
    search: Search,
    plain: FlipEstimate,
    target: Target,
    limit: int,
    generator: torch.Generator,
    pilot: Pilot | None = None,
) -> Found:
    """p = E h + mean of (1{flip} − h)/ρ over plain and guided samples.

    It must agree with the frequency in plain samples alone, those here and others before, `plain`. A pilot that is
    given counts; one that is only taken to look at surrogates would be too much of a small estimate.
    """
    looked_at = await Pilot.of(margins, PILOT) if pilot is None else pilot
    await with_enough_gradients(margins, search, target)
    if not tells(search):
        return await by_frequencies(margins, target, limit, (len(looked_at.white), looked_at.wins))
    for attempt in range(ATTEMPTS):
        work = guided(margins, search, target, generator, looked_at)
        if pilot is not None:
            work.add(pilot.white, pilot.margins, 0)
        wanted = plain_wanted(search, target)
        most = math.inf if attempt + 1 == ATTEMPTS else POOR * wanted
        met = await work.until(target, most, limit, FIRST, MARGIN)
        missing = min((work.more(target) - 1) * work.samples, wanted)
        if met or 3 * search.next_round > ROUND_SHARE * missing or margins.runs >= limit or margins.clock.over:
            break
        await search.advance()
        if not tells(search):
            break
    if not met:
        met = await work.until(target, math.inf, limit, FIRST, MARGIN)
    estimate, flips = work.estimate(), work.plain_flips
    second = plain_estimate(round(plain.probability * plain.samples) + flips[0], plain.samples + flips[1])
    agreed = agree(estimate, second)
    return Found(estimate, second, agreed, "frequencies", work.wins(margins.rivals), met and agreed)


async def with_enough_gradients(margins: NoisyMargins, search: Search, target: Target) -> None:
    """Rounds of a search, as many as pay beforehand."""
    start = margins.runs - 3 * search.gradients
    wanted = plain_wanted(search, target)
    while margins.runs - start < WORTH * wanted and search.guide is not None:
        await search.advance()


def tells(search: Search) -> bool:
    """Whether there is a guide, and flips that it expects: of rarer ones its densities are no numbers in float64."""
    return search.guide is not None and search.guide.expected >= NEGLIGIBLE


def guided(margins: NoisyMargins, search: Search, target: Target, generator: torch.Generator, pilot: Pilot) -> Counting:
    """What samples are drawn from: the noise, so far that it shows what surrogates do not expect, and the guide."""
    search.refit(POOL)
    assert search.guide is not None
    guide = search.guide
    if guide.common:
        guide = guide.as_seen(pilot.white, pilot.margins.amin(1)).sharpened(generator)
    shown = math.ceil(NOT_SHOWN * math.sqrt(target.needed(likely_share(search), 1.0)))
    share = min(max(shown / (SAVED * plain_wanted(search, target)), PLAIN_SHARES[0]), MOST_PLAIN)
    return Counting(margins, guide, share, shown, generator)


def plain_wanted(search: Search, target: Target) -> float:
    """Runs that plain sampling would take."""
    share = likely_share(search)
    return target.needed(share, math.sqrt(share * (1 - share)))


def likely_share(search: Search) -> float:
    """What surrogates and the first samples say of the probability, not too near to 0 or 1 to plan with."""
    assert search.guide is not None
    seen = 0.0 if search.plain is None else float((search.plain < 0).double().mean())
    return min(max(search.guide.expected, seen, 1e-6), 0.9)


async def by_frequencies(margins: NoisyMargins, target: Target, limit: int, before: tuple[int, Tensor]) -> Found:
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
            wins = wins + await plain_wins(margins, more)
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


async def plain_wins(margins: NoisyMargins, count: int) -> Tensor:
    """How often each other class won among so many samples, (d,)."""
    total = torch.zeros(margins.rivals, dtype=torch.float64, device=margins.mean.device)
    for start in range(0, count, PLAIN_BLOCK):
        found = await margins.of(margins.normal(min(PLAIN_BLOCK, count - start)))
        flipped = found.amin(1) < 0
        total = total + found.argmin(1)[flipped].bincount(minlength=margins.rivals)
    return total


async def nothing_found(margins: NoisyMargins, target: Target, limit: int, before: tuple[int, Tensor]) -> Found:
    """What plain samples say where nothing else found a flip: a bound, after as many as are allowed."""
    return await by_frequencies(margins, target, limit, before)
