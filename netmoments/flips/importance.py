"""Rare flips by importance sampling: two searches that share only which rivals matter, then runs that only estimate.

The searches have guides A and B, and all that they found together has a guide C. Samples of the mixture of all three
give

    p = E_ρ[1{flip}/ρ],   ρ = 0.2 ρ_A + 0.2 ρ_B + 0.6 ρ_C,

where no run of the estimate was used in a fit (that sampling stops by its own error leaves a small bias). Where
surrogates expect flips to be common, h_C is a control variate (`controlled`); its mean E h needs no runs and is known
to the size of a pool. The samples of A alone and of B alone give two more estimates, and all three must agree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from netmoments.flips.guide import COMMON, POOL, Guide, PlainNoise
from netmoments.flips.margins import BACKWARD, NoisyMargins, OutOfTime
from netmoments.flips.result import EntryResult, FlipEstimate, Target, agree, half_width
from netmoments.flips.search import Search

MIXTURE = (0.2, 0.2, 0.6)
"""The shares of an estimate's runs: by the guide of each search, and by that of both together."""
SEARCH_ROUNDS = 3
"""Each search has at least so many rounds."""
BELIEVED = 0.8
"""The error of an estimate is at least this share of the error that the surrogates expect."""
MOST_PREDICTED = 1e4
"""The variance that surrogates expect is believed up to this, over the square of the probability."""
FIRST_RUNS = 300
"""Runs of the first round of an estimate."""
POOL_SAMPLES = POOL // 4
"""At most so many samples are drawn from one pool. Its points have their density only on average over pools: with more
samples of the same points, the error of the samples would not show that of the points.
"""
LARGEST_ROUND = 0.5
"""A further round has at most this share of the runs so far: errors from few runs ask for too many."""
PATIENCE = 1.0
"""The searches go on while the estimate would take more than so many times the runs so far."""
ATTEMPTS = 3
"""An estimate is begun at most so many times."""
SEARCH_GROWTH = 2.2
"""Two more rounds of both searches take about so many times the runs so far."""
LIKELY_LEFT = 0.5
"""The share of the variance that further rounds are taken to leave, before anything is known of it."""
LEAST_LEFT = 0.3
"""The share that they are taken to leave at best."""
SEARCH_SHARE = 0.4
"""The searches take at most this share of the runs that are allowed."""
LEAST_KNOWN = 0.3
"""A guide whose E h has a larger relative error is not trusted."""
LEVEL_PRECISION, MOST_POOLS = 3.0, 32
"""Guides have levels with errors so many times smaller than the error that is wanted, from at most so many pools."""
NEGLIGIBLE, NEGLIGIBLE_RUNS = 1e-20, 3000
"""Flips that are expected to be rarer than the first get at most the second number of runs."""
MARGIN = 1.1
"""A round has so many times the runs that the error so far asks for."""


async def by_importance(
    margins: NoisyMargins, search: Search, target: Target, limit: int, generator: torch.Generator
) -> EntryResult | None:
    """Estimate with the guides of this search and of another, which starts from pulled samples.

    Where an estimate turns out to need many more runs, the searches go on and it begins anew. None where there is
    nothing to follow.
    """
    before = margins.runs - 3 * search.gradients
    searches = (search, await Search.from_pulled(margins, generator))
    for _ in range(SEARCH_ROUNDS):
        for search in searches:
            await search.advance()
    await _share_rivals(searches)
    last_variance = math.nan
    for attempt in range(ATTEMPTS):
        both = await _searched_while_it_pays(searches, target, margins.runs - before, SEARCH_SHARE * limit)
        if both.guide is not None and both.guide.expected < NEGLIGIBLE:
            limit = min(limit, margins.runs + NEGLIGIBLE_RUNS)
        guides = []
        for search in (*searches, both):
            search.refit(POOL)
            if search.guide is None:
                return None
            guides.append(with_exact_levels(search.guide, target, generator))
        taken, left = margins.runs - before, guides[-1].predicted_variance / last_variance
        last_variance = guides[-1].predicted_variance
        most = limit - margins.runs if attempt + 1 == ATTEMPTS else worth_estimating(taken, left)
        estimation = Estimation(margins, tuple(guides), MIXTURE, generator)
        met = await estimation.run_until(target, most, limit)
        if (
            (met and estimation.result(met).agreed)
            or margins.runs >= limit
            or margins.clock.over
            or margins.runs - before > SEARCH_SHARE * limit
        ):
            break
        for search in searches:
            await search.advance()
            await search.advance()
    return estimation.result(met)


async def _share_rivals(searches: tuple[Search, Search]) -> None:
    """Have each search look at the rivals that matter to the other and are unknown to it."""
    for informed, uninformed in (searches, searches[::-1]):
        if informed.guide is None or uninformed.guide is None:
            continue
        known = {surrogate.rival for surrogate in uninformed.guide.surrogates}
        pairs = zip(informed.guide.surrogates, informed.guide.shares, strict=True)
        missing = [surrogate.rival for surrogate, share in pairs if share > 0.01 and surrogate.rival not in known]
        for rival in missing:
            await uninformed.look_at_rival(rival)
        if missing:
            uninformed.refit()
            for _ in range(2):
                await uninformed.advance()


async def _searched_while_it_pays(searches: tuple[Search, Search], target: Target, taken: int, limit: float) -> Search:
    """What both searches know after further rounds, each of which makes the estimate cheaper by more than it costs.

    A round is expected to leave as much of the variance as the one before did. Where surrogates leave more unexplained
    than can be afforded, their variance says nothing, and the searches go on. Negligible flips are left alone.
    """
    both = Search.joined(*searches)
    both.refit()
    margins, start, left = both.margins, both.margins.runs - taken, LIKELY_LEFT
    while both.guide is not None and both.guide.expected >= NEGLIGIBLE:
        needed = both.guide.predicted_variance * target.times_needed(both.guide.expected, both.guide.expected)
        taken = margins.runs - start
        saved = needed if both.guide.unaffordable else (1 - left) * needed
        round_runs = (1 + BACKWARD) * sum(search.next_round for search in searches)
        if needed <= PATIENCE * taken or saved < round_runs or taken > limit or margins.clock.over:
            break
        for search in searches:
            await search.advance()
        better = Search.joined(*searches)
        better.refit()
        left = 1.0 if better.guide is None else better.guide.predicted_variance / both.guide.predicted_variance
        both = better
    return both


def with_exact_levels(guide: Guide, target: Target, generator: torch.Generator) -> Guide:
    """The guide with levels that are known better than the estimate is to be, from as many pools as that takes."""
    pools = target.times_needed(guide.expected, LEVEL_PRECISION * guide.expected_error)
    return guide.averaged_over_pools(min(MOST_POOLS, math.ceil(pools)), generator) if pools > 1 else guide


def worth_estimating(taken: int, left: float) -> float:
    """The runs up to which it is cheaper to go on with an estimate than to search on, after so many runs in all.

    Two more rounds would take `SEARCH_GROWTH` times as many, and leave the share `left` of the variance if they are
    like the last ones (NaN where there were none).
    """
    left = LIKELY_LEFT if math.isnan(left) else max(LEAST_LEFT, left)
    return math.inf if left >= 1 else SEARCH_GROWTH * taken / (1 - left)


class Estimation:
    """Runs that only estimate: whether they flipped, which class won, and h and ρ of every guide at them."""

    def __init__(
        self,
        margins: NoisyMargins,
        guides: tuple[Guide | PlainNoise, ...],
        shares: tuple[float, ...],
        generator: torch.Generator,
    ) -> None:
        """`shares` are the shares of the runs that samples of each guide get."""
        self.margins, self.guides, self.shares, self.generator = margins, guides, shares, generator
        self.sources, self.drawn = list(guides), [0] * len(guides)
        """The guides with the pools that samples come from, and how many were drawn from each pool."""
        self.flips: list[Tensor] = []
        self.winners: list[Tensor] = []
        self.flip_chances: list[Tensor] = []
        self.ratios: list[Tensor] = []
        self.origins: list[Tensor] = []
        """Which guide each run was drawn from."""

    async def run_until(
        self, target: Target, most: float, limit: int, first: int = FIRST_RUNS, margin: float = MARGIN
    ) -> bool:
        """Run until the target is met (True), or more than `most` would be needed or the limit is reached (False)."""
        try:
            await self.run(first)
            while True:
                times = self.times_needed(target)
                left = limit - self.margins.runs
                if times <= 1 or left < 2 or (self.samples > first and times * self.samples > most):
                    return times <= 1
                await self.run(max(2, int(min(self.samples * min(margin * times - 1, LARGEST_ROUND), left))))
        except OutOfTime:
            if self.samples == 0:
                raise
            return False

    async def run(self, count: int) -> None:
        """Make so many runs more, divided among the guides."""
        for number, runs in enumerate(self.divided(count)):
            for start in range(0, runs, POOL_SAMPLES):
                part = min(POOL_SAMPLES, runs - start)
                white = self.source(number, part).draw(self.margins.normal(part), self.generator)
                self.add(white, await self.margins.at(white), number)

    def divided(self, count: int) -> list[int]:
        """How many of so many runs each guide gets."""
        return [max(2, round(share * count)) for share in self.shares]

    def source(self, number: int, count: int) -> Guide | PlainNoise:
        """The guide with that number, its pool filled anew if so many samples would be too many for the old one."""
        source = self.sources[number]
        if isinstance(source, Guide) and self.drawn[number] + count > POOL_SAMPLES:
            source = self.sources[number] = source.refilled(self.generator)
            self.drawn[number] = 0
        self.drawn[number] += count
        return source

    def add(self, white: Tensor, margins: Tensor, number: int) -> None:
        """Add runs at ε (N, n), with margins (N, d), drawn from the guide with that number."""
        self.flips.append((margins.amin(1) < 0).double())
        self.winners.append(margins.argmin(1))
        self.flip_chances.append(torch.stack([guide.flip_chance(white) for guide in self.guides], 1))
        self.ratios.append(torch.stack([guide.ratio(white) for guide in self.guides], 1))
        self.origins.append(torch.full((len(white),), number, device=white.device))

    @property
    def samples(self) -> int:
        return sum(map(len, self.flips))

    def result(self, met: bool) -> EntryResult:
        """The estimate of all runs, and whether those of the two searches agree with it."""
        every, wins = self.estimate(), self.wins(self.margins.classes)
        if min(int((torch.cat(self.origins) == number).sum()) for number in (0, 1)) < 2:  # the time was over before
            return EntryResult(every, None, False, "importance", wins, False)
        one, two = self.estimate_of_guide(0), self.estimate_of_guide(1)
        agreed = agree(one, two) and agree(every, one) and agree(every, two) and self.guides_known()
        return EntryResult(every, farther(every, one, two), agreed, "importance", wins, met and agreed)

    def guides_known(self) -> bool:
        """Whether E h of every guide is known: a pool of which few points matter does not have the density it says."""
        return all(guide.expected_error <= LEAST_KNOWN * guide.expected for guide in self.guides)

    def estimate(self) -> FlipEstimate:
        """The estimate from all runs, which have the density of the mixture in the shares that were drawn."""
        estimate = controlled(torch.cat(self.flips), self.mixture_ratios(), self.controls())
        return replace(_with_prediction(estimate, self.guides[-1]), unseen_error=self.unseen_error)

    def estimate_of_guide(self, number: int) -> FlipEstimate:
        """The estimate from the runs of one guide, as if there were no other."""
        of_guide = torch.cat(self.origins) == number
        flips, chances, ratios = (torch.cat(x)[of_guide] for x in (self.flips, self.flip_chances, self.ratios))
        guide = self.guides[number]
        estimate = controlled(flips, ratios[:, number], Controls.of_guide(chances[:, number], guide))
        return _with_prediction(estimate, guide)

    def controls(self) -> Controls:
        """The control variates of all runs: h of the last guide."""
        return Controls.of_guide(torch.cat(self.flip_chances)[:, -1], self.guides[-1])

    def mixture_ratios(self) -> Tensor:
        """ρ (N,) of the mixture of guides, in the shares that were drawn."""
        origins = torch.cat(self.origins)
        shares = origins.bincount(minlength=len(self.guides)).double() / len(origins)
        return torch.cat(self.ratios) @ shares

    def times_needed(self, target: Target) -> float:
        """How many times the runs so far are needed for a target; it is met if that is at most 1."""
        now = self.estimate()
        seen = replace(now, unseen_error=0.0)
        unseen = replace(now, error=0.0, predicted_error=0.0, largest_share=0.0)
        times = [target.times_needed(x.probability, x.careful_error, half_width(x)) for x in (seen, unseen)]
        return max(with_shrinking_share(times[0], seen), math.sqrt(times[1]))

    @property
    def unseen_error(self) -> float:
        """The standard error due to flips that no surrogate expects, where plain samples are to show them; else 0."""
        return 0.0

    def wins(self, classes: int) -> Tensor:
        """By how much weight each class won, (d,)."""
        weight = torch.cat(self.flips) / self.mixture_ratios()
        total = torch.zeros(classes, dtype=torch.float64, device=weight.device)
        return total.index_add(0, torch.cat(self.winners), weight) / self.samples


def with_shrinking_share(times: float, estimate: FlipEstimate) -> float:
    """How many times the runs are needed, where the square of the careful error is `times` what is wanted.

    s² falls with the runs as 1/n, the square of what the largest sample adds as 1/n². So it is the x with
    (1 − a)/x + a/x² = 1/t, a being the share of the latter in the whole. It is at most 1 where t is.
    """
    square = estimate.careful_error**2
    part = min((estimate.largest_share * estimate.probability) ** 2 / square, 1.0) if square > 0 else 0.0
    first = (1 - part) * times
    return 0.5 * (first + math.sqrt(first**2 + 4 * part * times))


def _with_prediction(estimate: FlipEstimate, guide: Guide | PlainNoise) -> FlipEstimate:
    """The estimate with the error that the surrogates expect of so many samples, if they are right."""
    relative = BELIEVED * math.sqrt(min(guide.predicted_variance, MOST_PREDICTED) / max(estimate.samples, 1))
    return replace(estimate, predicted_error=relative * max(estimate.probability, 0.0))


def farther(origin: FlipEstimate, one: FlipEstimate, two: FlipEstimate) -> FlipEstimate:
    """Of two estimates, the one that is farther from a third, by the logarithm of the probability."""
    base = max(origin.probability, 1e-300)
    return max(one, two, key=lambda each: abs(math.log(max(each.probability, 1e-300) / base)))


@dataclass(frozen=True, eq=False)
class Controls:
    """Control variates: values (N, c) at runs, means under the noise, and the standard errors of these means."""

    values: Tensor
    means: tuple[float, ...]
    errors: tuple[float, ...]

    @classmethod
    def of_guide(cls, flip_chances: Tensor, guide: Guide | PlainNoise) -> Controls:
        """h (N,) of a guide as the only control."""
        return cls(flip_chances.unsqueeze(1), (guide.expected,), (guide.expected_error,))


def controlled(flips: Tensor, ratios: Tensor, controls: Controls) -> FlipEstimate:
    """The mean of 1{flip}/ρ; where flips are common by the first control h, regressed on controls/ρ and 1/ρ.

    Where flips are rare a control hardly helps, and a variance that is too small because no sample was wrong must not
    be believed. ρ is known to the size of the pool that its level is from, as E h is; its relative error is added.
    """
    count = len(flips)
    terms = flips / ratios
    largest = float(terms.max() / terms.sum().clamp(min=1e-300))
    if controls.means[0] < COMMON:
        mean, error = float(terms.mean()), float(terms.std()) / math.sqrt(count)
        freedom = (mean / error) ** 2 if error > 0 else 1.0
        level_error = mean * controls.errors[0] / max(controls.means[0], 1e-300)
        return FlipEstimate(mean, math.hypot(error, level_error), count, largest, freedom=freedom)
    value, error_of_value, left = regressed(terms.unsqueeze(1), 1 / ratios, controls)
    largest = float(left.abs().max()) / count / max(abs(float(value)), 1e-300)
    freedom = count - 2 - len(controls.means)
    return FlipEstimate(float(value), float(error_of_value), count, largest, freedom=freedom)


def regressed(terms: Tensor, weight: Tensor, controls: Controls) -> tuple[Tensor, Tensor, Tensor]:
    """Means (d,) of terms (N, d) regressed on what has a known mean; their standard errors (d,); residuals (N, d).

    What has a known mean are the weights 1/ρ (N,), with mean 1, and controls/ρ (generalized regression estimator,
    Cassel, Särndal & Wretman 1976; its bias is of the order 1/N).
    """
    means, errors = weight.new_tensor(controls.means), weight.new_tensor(controls.errors)
    known = torch.cat([weight.unsqueeze(1) - 1, controls.values * weight.unsqueeze(1) - means], 1)
    centred, middle = known - known.mean(0), terms.mean(0)
    gram, count = centred.mT @ centred, known.shape[1]
    ridge = (1e-12 * gram.diagonal().sum()).clamp(min=1e-200)
    gram = gram + ridge * torch.eye(count, dtype=gram.dtype, device=gram.device)
    slopes = torch.linalg.solve(gram, centred.mT @ (terms - middle))
    left = terms - middle - centred @ slopes
    square = left.square().sum(0) / max(len(terms) - 1 - count, 1) / len(terms)
    square = square + (slopes[1:] * errors.unsqueeze(1)).square().sum(0)
    return middle - known.mean(0) @ slopes, square.sqrt(), left
