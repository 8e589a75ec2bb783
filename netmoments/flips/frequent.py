"""Common flips by counting, among plain samples (`by_frequencies`) or with the help of surrogates.

The latter (`by_guided_frequencies`) draws a part of the samples from a guide, so that more of them are near the
boundary, and uses h, the probability of a flip by the surrogates, as a control variate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from netmoments.flips.guide import POOL, Guide, PlainNoise
from netmoments.flips.importance import NEGLIGIBLE, Controls, Estimation
from netmoments.flips.noisy_network import NoisyNetwork, OutOfTime
from netmoments.flips.result import NEVER_SEEN, EntryResult, FlipEstimate, Tolerance, agree, wilson
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
"""Before counting begins, gradients take at most about this share of the runs that plain sampling would take."""
POOR = 0.6
"""Counting that would take more than this share of the runs of plain sampling stops, and the search goes on first."""
ATTEMPTS = 2
"""Counting begins at most so many times, then with a better guide. Plain samples count in the next attempt, too."""
KEPT = 1000
"""So many plain samples are kept for the next attempt."""
ROUND_SHARE = 0.25
"""The search goes on only if its next round takes at most this share of the runs that counting would still take."""
PLAIN_BLOCK = 256
"""Plain samples that are run at a time."""
RESERVE = 1.03
"""A round has so many times the runs that the error so far asks for."""


async def by_frequencies(
    network: NoisyNetwork, tolerance: Tolerance, limit: int, before: tuple[int, Tensor]
) -> EntryResult:
    """Count flips among plain samples until the tolerance is met or the limit is reached.

    `limit` is the most runs of the network, those before included. `before` are the number of plain samples that were
    taken already, and how often each other class won among them (d,).
    """
    samples, wins = before
    met = False
    try:
        while True:
            flips = int(wins.sum())
            low, high = wilson(flips, max(samples, 1))
            error = (high - low) / (2 * QUANTILE)
            times = tolerance.times_needed(flips / max(samples, 1), error) if samples else 2.0
            met = times <= 1
            more = int(min(max(FIRST_RUNS, (min(times, 3.0) - 1) * samples), limit - network.runs))
            if met or more <= 0:
                break
            wins = wins + await plain_wins(network, more)
            samples += more
    except OutOfTime:
        if samples == 0:
            raise
    flips = int(wins.sum())
    estimate = plain_estimate(flips, samples)
    return EntryResult(estimate, None, True, "frequencies", wins / samples, met, wilson(flips, samples))


async def plain_wins(network: NoisyNetwork, count: int) -> Tensor:
    """How often each other class won among so many samples, (d,)."""
    wins = torch.zeros(network.classes, dtype=torch.float64, device=network.mean.device)
    for start in range(0, count, PLAIN_BLOCK):
        values = await network.margins_at(network.normal(min(PLAIN_BLOCK, count - start)))
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
    """A few plain samples ε (N, n) with margins (N, d): they show how common flips are, and how right surrogates are.

    A guide takes two numbers from them (`Guide.calibrated`), so few that they may still count in the estimate.
    """

    white: Tensor
    margins: Tensor

    @classmethod
    async def of(cls, network: NoisyNetwork, count: int) -> Pilot:
        white = network.normal(count)
        return cls(white, await network.margins_at(white))

    @property
    def wins(self) -> Tensor:
        """How often each other class won, (d,)."""
        return wins_among(self.margins)

    def plain_runs(self, tolerance: Tolerance) -> float:
        """The runs that plain sampling would take, by these samples."""
        share = (float(self.wins.sum()) + 1) / (len(self.white) + 2)
        return tolerance.times_needed(share, math.sqrt(share * (1 - share)))


async def by_guided_frequencies(
    network: NoisyNetwork,
    search: Search,
    plain: FlipEstimate,
    tolerance: Tolerance,
    limit: int,
    pilot: Pilot | None = None,
) -> EntryResult:
    """The mean of 1{flip}/ρ over plain and guided samples, with h as control variate where flips are common.

    `search` is one that has begun; `plain` is the frequency among the plain samples that it began with. The estimate
    must agree with the frequency among all plain samples, these and those drawn here. A `pilot` that is given counts in
    the estimate. Without one a pilot is taken here, which does not count: it would be too large a part of the few
    samples.
    """
    shown = await Pilot.of(network, PILOT) if pilot is None else pilot
    await search_while_it_pays(network, search, tolerance)
    if not expects_flips(search):
        return await by_frequencies(network, tolerance, limit, (len(shown.white), shown.wins))
    kept = [] if pilot is None else [pilot]
    for attempt in range(ATTEMPTS):
        counting = guided_counting(network, search, tolerance, shown)
        for samples in kept:
            counting.add(samples.white, samples.margins, 0)
        plain_runs = likely_plain_runs(search, tolerance)
        most = math.inf if attempt + 1 == ATTEMPTS else POOR * plain_runs
        met = await counting.run_until(tolerance, most, limit, FIRST_RUNS, RESERVE)
        missing = min((counting.times_needed(tolerance) - 1) * counting.samples, plain_runs)
        if met or search.next_round_runs > ROUND_SHARE * missing or network.runs >= limit or network.clock.over:
            break
        await search.advance()
        if not expects_flips(search):
            break
        kept = counting.plain
    if not met:
        met = await counting.run_until(tolerance, math.inf, limit, FIRST_RUNS, RESERVE)
    estimate, (flips, seen) = counting.estimate(), counting.plain_flips
    second = plain_estimate(round(plain.probability * plain.samples) + flips, plain.samples + seen)
    agreed = agree(estimate, second)
    if not agreed and network.runs < limit and not network.clock.over:  # the surrogates mislead: do without them
        return await by_frequencies(network, tolerance, limit, (len(shown.white), shown.wins))
    wins = counting.wins(network.classes)
    return EntryResult(estimate, second, agreed, "frequencies", wins, met and agreed)


async def search_while_it_pays(network: NoisyNetwork, search: Search, tolerance: Tolerance) -> None:
    """Go on with a search until its gradients have taken their share of the runs of plain sampling."""
    start = network.runs - search.gradient_runs
    plain_runs = likely_plain_runs(search, tolerance)
    while network.runs - start < WORTH * plain_runs and search.guide is not None:
        await search.advance()


def expects_flips(search: Search) -> bool:
    """Whether there is a guide, and it expects flips that are not `NEGLIGIBLE`."""
    return search.guide is not None and search.guide.expected >= NEGLIGIBLE


def likely_probability(search: Search) -> float:
    """The probability by the surrogates or the first samples, whichever is larger, for plans: between 1e-6 and 0.9."""
    assert search.guide is not None
    seen = 0.0 if search.plain_margins is None else float((search.plain_margins < 0).double().mean())
    return min(max(search.guide.expected, seen, 1e-6), 0.9)


def likely_plain_runs(search: Search, tolerance: Tolerance) -> float:
    """The runs that plain sampling would take."""
    p = likely_probability(search)
    return tolerance.times_needed(p, math.sqrt(p * (1 - p)))


def guided_counting(network: NoisyNetwork, search: Search, tolerance: Tolerance, pilot: Pilot) -> GuidedCounting:
    """Counting with the guide of a search, begun without samples.

    So many plain samples are asked for that the error of what they have not shown, UNSEEN_ERROR/n, is small enough. The
    pilot calibrates the guide.
    """
    search.refit(POOL)
    assert search.guide is not None
    guide = search.guide
    if guide.common:
        guide = guide.calibrated(pilot.white, pilot.margins.amin(1)).averaged_over_nets()
    least_plain = math.ceil(UNSEEN_ERROR * math.sqrt(tolerance.times_needed(likely_probability(search), 1.0)))
    share = min(max(least_plain / (SAVED * likely_plain_runs(search, tolerance)), PLAIN_SHARES[0]), MOST_PLAIN)
    return GuidedCounting(network, guide, share, least_plain)


class GuidedCounting(Estimation):
    """Plain samples and samples of a guide, in the proportion that makes the error least."""

    def __init__(self, network: NoisyNetwork, guide: Guide, share: float, least_plain: int) -> None:
        """`share` is the share of plain samples to begin with, `least_plain` how many there must be in the end."""
        super().__init__(network, (PlainNoise(), guide), (share, 1 - share))
        self.least_plain, self.guide = least_plain, guide
        self.calibrated_flip_chances: list[Tensor] = []
        """The calibrated h, (N,), if the guide is calibrated."""
        self.plain: list[Pilot] = []
        """The first plain samples, at most `KEPT` of them: they count with any other guide as well."""

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
