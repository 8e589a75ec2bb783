"""Common flips by counting: on plain samples alone, or on samples that a surrogate chooses and with it as control."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from netmoments.flips.guide import POOL, Guide, PlainNoise
from netmoments.flips.importance import NEGLIGIBLE, Controls, Estimation
from netmoments.flips.margins import NoisyMargins, OutOfTime
from netmoments.flips.result import NEVER_SEEN, EntryResult, FlipEstimate, Target, agree, wilson
from netmoments.flips.search import Search
from netmoments.normal import QUANTILE

PLAIN_SHARES = (0.2, 0.35, 0.5, 0.7, 1.0)
"""The shares of plain samples to choose from; the other samples are of the guide. With a fifth no weight is above 5."""
MOST_PLAIN = 0.75
"""The largest share of plain samples before there are enough runs to choose, and while plain samples are missing."""
ENOUGH = 100
"""The share of plain samples is chosen once there are so many runs."""
SAVED = 0.4
"""An estimate with surrogates takes about this share of the runs of plain sampling."""
UNSEEN_ERROR = NEVER_SEEN / 2 / QUANTILE
"""The standard error of what none of n plain samples has shown is UNSEEN_ERROR/n: half the width of [0, 3/n] as that of
a 95 % interval.
"""
PILOT = 64
"""Plain samples that show how common flips are, and how right surrogates."""
FIRST_RUNS = 64
"""Runs of the first round; plain counting makes at least so many in every round."""
WORTH = 0.08
"""Gradients take at most about this share of the runs that plain sampling would take."""
POOR = 0.6
"""An estimate that would take more than this share of the runs of plain sampling asks for better surrogates first."""
ATTEMPTS = 2
"""An estimate is begun at most so many times. Plain samples count in the next attempt, too."""
KEPT = 1000
"""So many plain samples are kept for the next attempt."""
ROUND_SHARE = 0.25
"""A further round of gradients takes at most this share of the runs that the estimate would still take."""
PLAIN_BLOCK = 256
"""Plain samples that are run at a time."""
MARGIN = 1.03
"""A round has so many times the runs that the error so far asks for."""


async def by_frequencies(margins: NoisyMargins, target: Target, limit: int, before: tuple[int, Tensor]) -> EntryResult:
    """Count flips among plain samples until the target is met or the limit is reached.

    `before` are the number of samples that were taken already, and how often each other class won them (d,).
    """
    samples, wins = before
    met = False
    try:
        while True:
            flips = int(wins.sum())
            low, high = wilson(flips, max(samples, 1))
            error = (high - low) / (2 * QUANTILE)
            times = target.times_needed(flips / max(samples, 1), error) if samples else 2.0
            met = times <= 1
            more = int(min(max(FIRST_RUNS, (min(times, 3.0) - 1) * samples), limit - margins.runs))
            if met or more <= 0:
                break
            wins = wins + await plain_wins(margins, more)
            samples += more
    except OutOfTime:
        if samples == 0:
            raise
    flips = int(wins.sum())
    estimate = plain_estimate(flips, samples)
    return EntryResult(estimate, None, True, "frequencies", wins / samples, met, wilson(flips, samples))


async def plain_wins(margins: NoisyMargins, count: int) -> Tensor:
    """How often each other class won among so many samples, (d,)."""
    wins = torch.zeros(margins.classes, dtype=torch.float64, device=margins.mean.device)
    for start in range(0, count, PLAIN_BLOCK):
        values = await margins.at(margins.normal(min(PLAIN_BLOCK, count - start)))
        wins = wins + wins_among(values)
    return wins


def wins_among(margins: Tensor) -> Tensor:
    """How often each other class won, (d,), at samples with these margins (N, d)."""
    flipped = margins.amin(1) < 0
    return margins.argmin(1)[flipped].bincount(minlength=margins.shape[1]).double()


def plain_estimate(flips: int, samples: int) -> FlipEstimate:
    """The frequency of flips; the error is that of the frequency with two flips and two others more (Agresti 1998)."""
    p = (flips + 2) / (samples + 4)
    return FlipEstimate(flips / samples, math.sqrt(p * (1 - p) / (samples + 4)), samples)


@dataclass(frozen=True, eq=False)
class Pilot:
    """Plain samples ε (N, n) with margins (N, d) that show how common flips are, and how right surrogates.

    All that a guide takes from them are two numbers (`Guide.calibrated`). Among many others they count in an estimate.
    """

    white: Tensor
    margins: Tensor

    @classmethod
    async def of(cls, margins: NoisyMargins, count: int) -> Pilot:
        white = margins.normal(count)
        return cls(white, await margins.at(white))

    @property
    def wins(self) -> Tensor:
        """How often each other class won, (d,)."""
        return wins_among(self.margins)

    def plain_runs(self, target: Target) -> float:
        """The runs that plain sampling would take, by these samples."""
        share = (float(self.wins.sum()) + 1) / (len(self.white) + 2)
        return target.times_needed(share, math.sqrt(share * (1 - share)))


async def by_guided_frequencies(
    margins: NoisyMargins,
    search: Search,
    plain: FlipEstimate,
    target: Target,
    limit: int,
    generator: torch.Generator,
    pilot: Pilot | None = None,
) -> EntryResult:
    """The mean of 1{flip}/ρ over plain and guided samples, with h as control variate where flips are common.

    It must agree with the frequency in plain samples alone: those drawn here and those of `plain`, which were drawn
    before. A pilot that is given counts in the estimate. Without one, a pilot is taken that only shows how right the
    surrogates are: it would be too large a part of a small estimate.
    """
    shown = await Pilot.of(margins, PILOT) if pilot is None else pilot
    await search_while_it_pays(margins, search, target)
    if not expects_flips(search):
        return await by_frequencies(margins, target, limit, (len(shown.white), shown.wins))
    kept = [] if pilot is None else [pilot]
    for attempt in range(ATTEMPTS):
        counting = guided_counting(margins, search, target, generator, shown)
        for samples in kept:
            counting.add(samples.white, samples.margins, 0)
        plain_runs = likely_plain_runs(search, target)
        most = math.inf if attempt + 1 == ATTEMPTS else POOR * plain_runs
        met = await counting.run_until(target, most, limit, FIRST_RUNS, MARGIN)
        missing = min((counting.times_needed(target) - 1) * counting.samples, plain_runs)
        if met or search.next_round_runs > ROUND_SHARE * missing or margins.runs >= limit or margins.clock.over:
            break
        await search.advance()
        if not expects_flips(search):
            break
        kept = counting.plain
    if not met:
        met = await counting.run_until(target, math.inf, limit, FIRST_RUNS, MARGIN)
    estimate, (flips, seen) = counting.estimate(), counting.plain_flips
    second = plain_estimate(round(plain.probability * plain.samples) + flips, plain.samples + seen)
    agreed = agree(estimate, second)
    if not agreed and margins.runs < limit and not margins.clock.over:  # the surrogates mislead: do without them
        return await by_frequencies(margins, target, limit, (len(shown.white), shown.wins))
    wins = counting.wins(margins.classes)
    return EntryResult(estimate, second, agreed, "frequencies", wins, met and agreed)


async def search_while_it_pays(margins: NoisyMargins, search: Search, target: Target) -> None:
    """Go on with a search until its gradients have taken their share of the runs of plain sampling."""
    start = margins.runs - search.gradient_runs
    plain_runs = likely_plain_runs(search, target)
    while margins.runs - start < WORTH * plain_runs and search.guide is not None:
        await search.advance()


def expects_flips(search: Search) -> bool:
    """Whether there is a guide, and flips that are not so rare that its densities cannot be represented in float64."""
    return search.guide is not None and search.guide.expected >= NEGLIGIBLE


def likely_probability(search: Search) -> float:
    """The probability by the surrogates or the first samples, whichever is larger; not too near to 0 or 1 for plans."""
    assert search.guide is not None
    seen = 0.0 if search.plain_margins is None else float((search.plain_margins < 0).double().mean())
    return min(max(search.guide.expected, seen, 1e-6), 0.9)


def likely_plain_runs(search: Search, target: Target) -> float:
    """The runs that plain sampling would take."""
    p = likely_probability(search)
    return target.times_needed(p, math.sqrt(p * (1 - p)))


def guided_counting(
    margins: NoisyMargins, search: Search, target: Target, generator: torch.Generator, pilot: Pilot
) -> GuidedCounting:
    """Counting with the guide of a search, and so many plain samples that they show what surrogates do not expect."""
    search.refit(POOL)
    assert search.guide is not None
    guide = search.guide
    if guide.common:
        guide = guide.calibrated(pilot.white, pilot.margins.amin(1)).averaged_over_nets(generator)
    least_plain = math.ceil(UNSEEN_ERROR * math.sqrt(target.times_needed(likely_probability(search), 1.0)))
    share = min(max(least_plain / (SAVED * likely_plain_runs(search, target)), PLAIN_SHARES[0]), MOST_PLAIN)
    return GuidedCounting(margins, guide, share, least_plain, generator)


class GuidedCounting(Estimation):
    """Plain samples and samples of a guide, in the proportion that makes the error least."""

    def __init__(
        self, margins: NoisyMargins, guide: Guide, share: float, least_plain: int, generator: torch.Generator
    ) -> None:
        """`share` is the share of plain samples to begin with, `least_plain` how many there must be in the end."""
        super().__init__(margins, (PlainNoise(), guide), (share, 1 - share), generator)
        self.least_plain, self.guide = least_plain, guide
        self.calibrated_flip_chances: list[Tensor] = []
        self.plain: list[Pilot] = []
        """The first plain samples, which count whatever the guide is."""

    def add(self, white: Tensor, margins: Tensor, number: int) -> None:
        super().add(white, margins, number)
        if number == 0 and self.plain_samples <= KEPT:
            self.plain.append(Pilot(white, margins))
        if self.guide.calibration is not None:
            self.calibrated_flip_chances.append(self.guide.calibrated_flip_chance(white))

    def controls(self) -> Controls:
        """h as the surrogates were fitted, and the calibrated h if there is one."""
        controls = super().controls()
        if not self.calibrated_flip_chances:
            return controls
        mean, error = self.guide.calibrated_expected
        values = torch.cat([controls.values, torch.cat(self.calibrated_flip_chances).unsqueeze(1)], 1)
        return Controls(values, (*controls.means, mean), (*controls.errors, error))

    @property
    def plain_flips(self) -> tuple[int, int]:
        """How many plain samples flipped, and how many plain samples there are."""
        plain = torch.cat(self.origins) == 0
        return int(torch.cat(self.flips)[plain].sum()), int(plain.sum())

    @property
    def plain_samples(self) -> int:
        return sum(int((origin == 0).sum()) for origin in self.origins)

    @property
    def unseen_error(self) -> float:
        return UNSEEN_ERROR / max(1, self.plain_samples)

    def divided(self, count: int) -> list[int]:
        """How many of so many runs are plain, and how many of the guide."""
        share = self.best_share() if self.samples >= ENOUGH else self.shares[0]
        missing = self.least_plain - self.plain_samples
        plain = max(2, round(max(share * count, min(missing, MOST_PLAIN * count))))
        return [plain, max(0, count - plain)]

    def best_share(self) -> float:
        """The share α of plain samples that makes the variance of an estimate least, by the runs so far.

        This variance is E[(1{flip} − β·(h − E h) − p)²/ρ_α] with ρ_α = α + (1 − α)ρ and all controls h. A guide that
        knows little does harm.
        """
        flips, controls, weight = torch.cat(self.flips), self.controls().values, 1 / self.mixture_ratios()
        weight = weight / weight.sum()
        rest, centred = flips - weight @ flips, controls - weight @ controls
        gram = centred.mT @ (weight.unsqueeze(1) * centred)
        gram = gram + (1e-9 * gram.diagonal().sum()).clamp(min=1e-200) * torch.eye(len(gram)).to(gram)
        slopes = torch.linalg.solve(gram, centred.mT @ (weight * rest))
        terms = weight * (rest - centred @ slopes).square()
        ratio = torch.cat(self.ratios)[:, 1]
        return min(PLAIN_SHARES, key=lambda share: float((terms / (share + (1 - share) * ratio)).sum()))
