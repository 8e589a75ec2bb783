"""Rare flips by importance sampling: two searches that share only which rivals matter, then runs that only estimate.

With guides A, B of the searches and C of all they found, samples of the mixture of all three give

    p = E h + E_ρ[(1{flip} − h)/ρ],   h = h_C,   ρ = 0.2 ρ_A + 0.2 ρ_B + 0.6 ρ_C,

where no run of the estimate was used in a fit (stopping by its own error leaves a small bias); E h is known to the
size of a pool, without runs. The samples of A alone and of B alone give two estimates, which must agree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from netmoments.flips.guide import COMMON, POOL, Guide, PlainNoise
from netmoments.flips.margins import BACKWARD, NoisyMargins, OutOfTime
from netmoments.flips.result import FlipEstimate, Found, Target, agree, half_width
from netmoments.flips.search import Search

MIXTURE = (0.2, 0.2, 0.6)
"""Of the runs of an estimate: by the guide of each search, and by that of both together."""
ROUNDS = 3
"""Of each search, at least."""
BELIEVED = 0.8
"""Of the error that surrogates expect: what an estimate's own may not be below."""
MOST_PREDICTED = 1e4
"""A variance that surrogates expect is believed up to this, over the square of the probability."""
FIRST = 300
"""Runs of the first round of an estimate."""
USED_UP = POOL // 4
"""Samples of one pool, at most. Its points have their density only on average over pools: more samples of the same
points would show an error that says nothing of that.
"""
LARGEST_ROUND = 0.5
"""Of the runs of an estimate so far: what a further round has, at most; errors of few runs ask for too many."""
PATIENCE = 1.0
"""Searches go on while the estimate would take more than so many times their runs."""
ATTEMPTS = 3
"""Estimates that are begun, at most."""
SEARCH_GROWTH = 2.2
"""Times all runs so far: what the next two rounds of both searches take, about."""
LIKELY_GAIN = 0.5
"""Of the variance: what they leave, before anything is known of that."""
LEAST_GAIN = 0.3
"""The same, at best."""
SEARCH_SHARE = 0.4
"""Of the runs that are allowed: what searches may take."""
LEAST_KNOWN = 0.3
"""Relative error of what a pool says of its surrogates, beyond which its samples are not trusted."""
POOLS_PART, MOST_POOLS = 3.0, 32
"""So many times the error of the levels of guides is not to be more than what is wanted; and pools that they are from.
"""
NEGLIGIBLE, FOR_NEGLIGIBLE = 1e-20, 3000
"""Flips that are rarer than the first get the second number of runs, and no more."""
MARGIN = 1.1
"""More runs than the error so far asks for."""


@dataclass(frozen=True, eq=False)
class Controls:
    """Control variates: their values (N, c) at runs, their means under the noise, and standard errors of these."""

    values: Tensor
    known: tuple[float, ...]
    errors: tuple[float, ...]

    @classmethod
    def of_guide(cls, failing: Tensor, guide: Guide | PlainNoise) -> Controls:
        """h (N,) of a guide."""
        return cls(failing.unsqueeze(1), (guide.expected,), (guide.expected_error,))


class Estimating:
    """Runs that only estimate: whether they flipped, who won, and what every guide says of them."""

    def __init__(
        self,
        margins: NoisyMargins,
        guides: tuple[Guide | PlainNoise, ...],
        shares: tuple[float, ...],
        generator: torch.Generator,
    ) -> None:
        self.margins, self.guides, self.shares, self.generator = margins, guides, shares, generator
        self.sources, self.used = list(guides), [0] * len(guides)
        self.flips: list[Tensor] = []
        self.winners: list[Tensor] = []
        self.failing: list[Tensor] = []
        self.ratios: list[Tensor] = []
        self.origin: list[Tensor] = []

    async def run(self, count: int) -> None:
        """So many runs more, of each guide by its share."""
        for number, each in enumerate(self.divided(count)):
            for start in range(0, each, USED_UP):
                part = min(USED_UP, each - start)
                white = self.source(number, part).draw(self.margins.normal(part), self.generator)
                self.add(white, await self.margins.of(white), number)

    def source(self, number: int, count: int) -> Guide | PlainNoise:
        """The guide with that number, its pool filled anew where it would be used up by so many samples more."""
        own = self.sources[number]
        if isinstance(own, Guide) and self.used[number] + count > USED_UP:
            own = self.sources[number] = own.refilled(self.generator)
            self.used[number] = 0
        self.used[number] += count
        return own

    def divided(self, count: int) -> list[int]:
        """Of so many runs, those of each guide."""
        return [max(2, round(share * count)) for share in self.shares]

    def add(self, white: Tensor, found: Tensor, number: int) -> None:
        """Runs at ε (N, n) that have margins (N, d), drawn from the guide with that number."""
        self.flips.append((found.amin(1) < 0).double())
        self.winners.append(found.argmin(1))
        self.failing.append(torch.stack([each.failing(white) for each in self.guides], 1))
        self.ratios.append(torch.stack([each.ratio(white) for each in self.guides], 1))
        self.origin.append(torch.full((len(white),), number, device=white.device))

    async def until(self, target: Target, most: float, limit: int, first: int = FIRST, margin: float = MARGIN) -> bool:
        """Runs until the target is met (True), or more than `most` would be needed, or a limit is reached.

        A round has `margin` times the runs that the error so far asks for.
        """
        try:
            await self.run(first)
            while True:
                factor = self.more(target)
                left = limit - self.margins.runs
                if factor <= 1 or left < 2 or (self.samples > first and factor * self.samples > most):
                    return factor <= 1
                await self.run(max(2, int(min(self.samples * min(margin * factor - 1, LARGEST_ROUND), left))))
        except OutOfTime:
            if self.samples == 0:
                raise
            return False

    @property
    def samples(self) -> int:
        return sum(map(len, self.flips))

    def found(self, met: bool) -> Found:
        """The estimate of all runs, and whether those of the two searches agree with it."""
        if min(int((torch.cat(self.origin) == number).sum()) for number in (0, 1)) < 2:  # the time was over before
            return Found(self.estimate(), None, False, "importance", self.wins(self.margins.rivals), False)
        one, two, every = self.alone(0), self.alone(1), self.estimate()
        agreed = agree(one, two) and agree(every, one) and agree(every, two) and self.pools_known()
        second = farther(every, one, two)
        return Found(every, second, agreed, "importance", self.wins(self.margins.rivals), met and agreed)

    def pools_known(self) -> bool:
        """Whether every pool knows what it is of: one of few points that matter has another density than it says."""
        return all(each.expected_error <= LEAST_KNOWN * each.expected for each in self.guides)

    def estimate(self) -> FlipEstimate:
        """From all runs, whose density is that of the mixture of guides as they were drawn."""
        found = controlled(torch.cat(self.flips), self.mixed(), self.controls())
        return replace(_with_prediction(found, self.guides[-1]), unseen=self.unseen)

    def controls(self) -> Controls:
        """What is known of the last guide, at all runs."""
        return Controls.of_guide(torch.cat(self.failing)[:, -1], self.guides[-1])

    def more(self, target: Target) -> float:
        """How many times the runs so far are needed for a target; at most 1 is met."""
        now = self.estimate()
        seen, unseen = replace(now, unseen=0.0), replace(now, error=0.0, predicted=0.0, largest=0.0)
        times = [target.needed(one.probability, one.careful_error, half_width(one)) for one in (seen, unseen)]
        return max(with_shrinking_share(times[0], seen), math.sqrt(times[1]))

    @property
    def unseen(self) -> float:
        """The standard error of flips that no surrogate expects, where plain samples are to show them; else 0."""
        return 0.0

    def mixed(self) -> Tensor:
        origin = torch.cat(self.origin)
        shares = origin.bincount(minlength=len(self.guides)).double() / len(origin)
        return torch.cat(self.ratios) @ shares

    def alone(self, number: int) -> FlipEstimate:
        """From the runs of one guide, as if there were no other."""
        own = torch.cat(self.origin) == number
        flips, failing, ratios = (torch.cat(x)[own] for x in (self.flips, self.failing, self.ratios))
        each = self.guides[number]
        found = controlled(flips, ratios[:, number], Controls.of_guide(failing[:, number], each))
        return _with_prediction(found, each)

    def wins(self, classes: int) -> Tensor:
        """How much each class won, by weight, (d,)."""
        weight = torch.cat(self.flips) / self.mixed()
        total = torch.zeros(classes, dtype=torch.float64, device=weight.device)
        return total.index_add(0, torch.cat(self.winners), weight) / self.samples


def with_shrinking_share(times: float, estimate: FlipEstimate) -> float:
    """How many times the runs are needed, where the careful error is `times` too large in its square.

    s² falls with the runs as 1/n, the square of what the largest sample adds as 1/n²: x with (1 − a)/x + a/x² = 1/t,
    a being the part of that in the whole. At most 1 where t is.
    """
    square = estimate.careful_error**2
    part = min((estimate.largest * estimate.probability) ** 2 / square, 1.0) if square > 0 else 0.0
    first = (1 - part) * times
    return 0.5 * (first + math.sqrt(first**2 + 4 * part * times))


def _with_prediction(found: FlipEstimate, guide: Guide | PlainNoise) -> FlipEstimate:
    """With the error that the surrogates expect of so many samples, if they are right."""
    relative = BELIEVED * math.sqrt(min(guide.predicted, MOST_PREDICTED) / max(found.samples, 1))
    return replace(found, predicted=relative * max(found.probability, 0.0))


def farther(from_: FlipEstimate, one: FlipEstimate, two: FlipEstimate) -> FlipEstimate:
    """Of two estimates the one that is farther from a third."""
    return max(one, two, key=lambda each: abs(math.log(max(each.probability, 1e-300) / max(from_.probability, 1e-300))))


def controlled(flips: Tensor, ratios: Tensor, controls: Controls) -> FlipEstimate:
    """The mean of 1{flip}/ρ; where flips are common by the first control h, regressed on controls/ρ and 1/ρ.

    Where they are rare a control hardly helps, and a variance that is too small because no sample was wrong must not be
    believed; ρ is known to the size of the pool that its level is from, as E h is, whose relative error is added.
    """
    count = len(flips)
    plain = flips / ratios
    share = float(plain.max() / plain.sum().clamp(min=1e-300))
    if controls.known[0] < COMMON:
        mean, error = float(plain.mean()), float(plain.std()) / math.sqrt(count)
        freedom = (mean / error) ** 2 if error > 0 else 1.0
        level = mean * controls.errors[0] / max(controls.known[0], 1e-300)
        return FlipEstimate(mean, math.hypot(error, level), count, share, freedom=freedom)
    value, spread, left = regressed(plain.unsqueeze(1), 1 / ratios, controls)
    share = float(left.abs().max()) / count / max(abs(float(value)), 1e-300)
    return FlipEstimate(float(value), float(spread), count, share, freedom=count - 2 - len(controls.known))


def regressed(terms: Tensor, weight: Tensor, controls: Controls) -> tuple[Tensor, Tensor, Tensor]:
    """Means (d,) of terms (N, d), regressed on what has a known mean; their standard errors (d,); what is left (N, d).

    That are the weights 1/ρ (N,) with mean 1, and controls/ρ with theirs (generalized regression estimator, Cassel,
    Särndal & Wretman 1976; its bias is of the order 1/N).
    """
    known, errors = weight.new_tensor(controls.known), weight.new_tensor(controls.errors)
    every = torch.cat([weight.unsqueeze(1) - 1, controls.values * weight.unsqueeze(1) - known], 1)
    centred, middle = every - every.mean(0), terms.mean(0)
    gram, count = centred.mT @ centred, every.shape[1]
    ridge = (1e-12 * gram.diagonal().sum()).clamp(min=1e-200)
    gram = gram + ridge * torch.eye(count, dtype=gram.dtype, device=gram.device)
    slopes = torch.linalg.solve(gram, centred.mT @ (terms - middle))
    left = terms - middle - centred @ slopes
    square = left.square().sum(0) / max(len(terms) - 1 - count, 1) / len(terms)
    square = square + (slopes[1:] * errors.unsqueeze(1)).square().sum(0)
    return middle - every.mean(0) @ slopes, square.sqrt(), left


async def by_importance(
    margins: NoisyMargins, search: Search, target: Target, limit: int, generator: torch.Generator
) -> Found | None:
    """An estimate by this search and another, and the runs that their guides ask for; None where there is nothing to
    follow.

    Where the runs show that many more would be needed, the searches go on, and the estimate begins anew.
    """
    before = margins.runs - 3 * search.gradients
    searches = (search, await Search.from_pulled(margins, generator))
    for _ in range(ROUNDS):
        for search in searches:
            await search.advance()
    await _share_rivals(searches)
    last = math.nan
    for attempt in range(ATTEMPTS):
        both = await _improved(searches, target, margins.runs - before, SEARCH_SHARE * limit)
        if both.guide is not None and both.guide.expected < NEGLIGIBLE:
            limit = min(limit, margins.runs + FOR_NEGLIGIBLE)
        guides = []
        for search in (*searches, both):
            search.refit(POOL)
            if search.guide is None:
                return None
            guides.append(known_well(search.guide, target, generator))
        taken, gain = margins.runs - before, guides[-1].predicted / last
        last = guides[-1].predicted
        most = limit - margins.runs if attempt + 1 == ATTEMPTS else worth_estimating(taken, gain)
        work = Estimating(margins, tuple(guides), MIXTURE, generator)
        met = await work.until(target, most, limit)
        if (
            (met and work.found(met).agreed)
            or margins.runs >= limit
            or margins.clock.over
            or margins.runs - before > SEARCH_SHARE * limit
        ):
            break
        for search in searches:
            await search.advance()
            await search.advance()
    return work.found(met)


def known_well(own: Guide, target: Target, generator: torch.Generator) -> Guide:
    """A guide whose level is known better than the estimate is to be, by as many pools as that takes."""
    pools = target.needed(own.expected, POOLS_PART * own.expected_error)
    return own.averaged(min(MOST_POOLS, math.ceil(pools)), generator) if pools > 1 else own


def worth_estimating(taken: int, gain: float) -> float:
    """Runs of an estimate up to which it is cheaper to go on with it than to search on, after so many runs.

    The next rounds would take `SEARCH_GROWTH` times as many and leave the share `gain` of the variance, if it is what
    the last ones left (NaN where there were none).
    """
    left = LIKELY_GAIN if math.isnan(gain) else max(LEAST_GAIN, gain)
    return math.inf if left >= 1 else SEARCH_GROWTH * taken / (1 - left)


async def _improved(searches: tuple[Search, Search], target: Target, taken: int, limit: float) -> Search:
    """What both searches know, after rounds that each make the estimate cheaper by more than they cost.

    A round is expected to leave as much of the variance as the one before did; where surrogates leave more unexplained
    than can be afforded, what they say of the variance is no guide, and it is gone on. What is negligible is left so.
    """
    both = Search.joined(*searches)
    both.refit()
    margins, start, left = both.margins, both.margins.runs - taken, LIKELY_GAIN
    while both.guide is not None and both.guide.expected >= NEGLIGIBLE:
        wanted = both.guide.predicted * target.needed(both.guide.expected, both.guide.expected)
        taken = margins.runs - start
        saved = wanted if both.guide.beyond else (1 - left) * wanted
        round_runs = (1 + BACKWARD) * sum(search.next_round for search in searches)
        if wanted <= PATIENCE * taken or saved < round_runs or taken > limit or margins.clock.over:
            break
        for search in searches:
            await search.advance()
        better = Search.joined(*searches)
        better.refit()
        left = 1.0 if better.guide is None else better.guide.predicted / both.guide.predicted
        both = better
    return both


async def _share_rivals(searches: tuple[Search, Search]) -> None:
    """A rival that matters to one search and is unknown to the other is looked at by the other too."""
    for mine, other in (searches, searches[::-1]):
        if mine.guide is None or other.guide is None:
            continue
        known = {surrogate.rival for surrogate in other.guide.surrogates}
        pairs = zip(mine.guide.surrogates, mine.guide.shares, strict=True)
        missing = [surrogate.rival for surrogate, share in pairs if share > 0.01 and surrogate.rival not in known]
        for rival in missing:
            await other.seed(rival)
        if missing:
            other.refit()
            for _ in range(2):
                await other.advance()
