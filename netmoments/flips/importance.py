"""Rare flips by importance sampling: two searches that share only which rivals matter, then runs that only estimate.

The searches have guides A and B, and all that they found together has a guide C. Samples of the mixture of all three
give

    p = E_ρ[1{flip}/ρ],   ρ = 0.2 ρ_A + 0.2 ρ_B + 0.6 ρ_C,

where no run of the estimate was used in a fit (that sampling stops by its own error leaves a small bias). Where it
would need many more runs, the searches go on, and so does the estimate with their new guides: ρ is then the mixture of
old and new ones, and all runs count (adaptive multiple importance sampling, Cornuet et al. 2012). Where surrogates
expect flips to be common, h_C is a control variate (`controlled`). Its mean E h needs no runs of the network; its error
is that of a mean over a pool. The samples of A alone and of B alone give two more estimates, and all three must agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from netmoments.flips.guide import CONTROL_FROM, POOL, Guide, PlainNoise
from netmoments.flips.lines import RUNS_EACH, WORTH, Faces, Lines, line_variance, numbers_of_line, runs_for_unit_error
from netmoments.flips.noisy_network import NoisyNetwork, OutOfTime
from netmoments.flips.result import EntryResult, FlipEstimate, Tolerance, agree, half_width
from netmoments.flips.search import Search
from netmoments.memory import elements_together

MIXTURE = (0.2, 0.2, 0.6)
"""The shares of an estimate's runs that are drawn from the guides A, B and C."""
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
ATTEMPTS = 4
"""An estimate is begun or gets new guides at most so many times."""
LIKELY_LEFT = 0.65
"""The share of an estimate's variance that another round of both searches is taken to leave, before rounds have shown
it.
"""
MOST_LEFT = 0.9
"""A round is never taken to leave more than this share, even if the variance grew: it then found flips of another kind,
which the next rounds learn.
"""
SEARCH_SHARE = 0.4
"""The searches take at most this share of the runs that are allowed."""
LEAST_KNOWN = 0.3
"""A guide is not trusted if the error of its E h is a larger share of E h than this."""
NORMALIZER_PRECISION, MOST_POOLS = 3.0, 32
"""The normalizers of guides have errors so many times smaller than the error that is wanted, from at most so many
pools.
"""
NEGLIGIBLE, NEGLIGIBLE_RUNS = 1e-20, 3000
"""Flips that are expected to be rarer than the first get at most the second number of runs."""
RESERVE = 1.1
"""A round has so many times the runs that the error so far asks for."""


async def by_importance(network: NoisyNetwork, search: Search, tolerance: Tolerance, limit: int) -> EntryResult | None:
    """Estimate with the guides of this search and of another, which starts from pulled samples.

    Where an estimate turns out to need many more runs, the searches go on, and then the estimate with their new guides.
    Where the searches disagree it begins anew, and so where flips are common: h of a new guide is not known at all runs
    of the old ones. `limit` is the most runs of the network. None where nothing moves the margins, so that a search has
    no guide.
    """
    before = network.runs - search.gradient_runs
    searches = (search, await Search.from_pulled(network))
    for _ in range(SEARCH_ROUNDS):
        for each in searches:
            await each.advance()
    await _share_rivals(searches)
    estimation: RareEstimation | None = None
    variances, met = list[float](), False
    for attempt in range(ATTEMPTS):
        missing = 1.0 if estimation is None else 1 - 1 / max(estimation.times_needed(tolerance), 1.0)
        taken, most_taken = network.runs - before, SEARCH_SHARE * limit
        both = await _searched_while_it_pays(searches, tolerance, missing, taken, most_taken, variances)
        if both.guide is not None and both.guide.expected < NEGLIGIBLE:
            limit = min(limit, network.runs + NEGLIGIBLE_RUNS)
        guides = []
        for each in (*searches, both):
            each.refit(POOL)
            if each.guide is None:
                return None
            guides.append(with_exact_normalizers(each.guide, tolerance))
        if estimation is not None and estimation.result(met).agreed and estimation.can_go_on_with(guides):
            estimation.go_on_with(guides)
        else:
            estimation = (LineEstimation if lines_pay(guides) else RareEstimation)(network, guides)
        last, runs_each = attempt + 1 == ATTEMPTS, estimation.runs_each
        most = math.inf if last else round_runs(searches) / max(1 - likely_left(variances), 1e-9) / runs_each
        most = min(estimation.samples + most, samples_of_plain(tolerance, guides[-1].expected))
        met = await estimation.run_until(tolerance, most, limit, FIRST_RUNS // runs_each)
        if (
            (met and estimation.result(met).agreed)
            or network.runs >= limit
            or network.clock.over
            or network.runs - before > SEARCH_SHARE * limit
        ):
            break
        for each in searches:
            await each.advance()
    assert estimation is not None
    return estimation.result(met)


def samples_of_plain(tolerance: Tolerance, probability: float) -> float:
    """The plain samples that tell so small a probability: an estimate that takes more is better left to these."""
    p = max(probability, NEGLIGIBLE)
    return tolerance.times_needed(p, math.sqrt(p))


async def _share_rivals(searches: tuple[Search, Search]) -> None:
    """Have each search look at the rivals that matter to the other and are unknown to it."""
    for informed, uninformed in (searches, searches[::-1]):
        if informed.guide is None or uninformed.guide is None:
            continue
        known = {surrogate.rival for surrogate in uninformed.guide.surrogates}
        with_shares = zip(informed.guide.surrogates, informed.guide.shares, strict=True)
        missing = [surrogate.rival for surrogate, share in with_shares if share > 0.01 and surrogate.rival not in known]
        for rival in missing:
            await uninformed.look_at_rival(rival)
        if missing:
            uninformed.refit()
            for _ in range(2):
                await uninformed.advance()


async def _searched_while_it_pays(
    searches: tuple[Search, Search],
    tolerance: Tolerance,
    missing: float,
    taken: int,
    limit: float,
    variances: list[float],
) -> Search:
    """What both searches know after further rounds, each of which makes the estimate cheaper by more than it costs.

    `missing` is the share of the estimate that is still to be made; `taken` are the runs so far, of which the searches
    may take up to `limit`. The variance of a run that is expected after each round is added to `variances`.
    Negligible flips are left alone.
    """
    both = Search.joined(*searches)
    both.refit()
    network, start = both.network, both.network.runs - taken
    while both.guide is not None and both.guide.expected >= NEGLIGIBLE:
        variances.append(runs_for_unit_error(both.guide.predicted_variance))
        needed = missing * variances[-1] * tolerance.times_needed(both.guide.expected, both.guide.expected)
        taken = network.runs - start
        saved = (1 - likely_left(variances)) * needed
        if needed <= PATIENCE * taken or saved < round_runs(searches) or taken > limit or network.clock.over:
            break
        for search in searches:
            await search.advance()
        both = Search.joined(*searches)
        both.refit()
    return both


def round_runs(searches: tuple[Search, Search]) -> int:
    """The runs of the network that another round of both searches takes."""
    return sum(search.next_round_runs for search in searches)


def likely_left(variances: Sequence[float]) -> float:
    """The share of the variance that another round is likely to leave, after rounds that left these variances.

    It is what a round left on average. One round with `LIKELY_LEFT` is counted in, as a single variance is uncertain:
    it grows where a round finds flips of another kind, and where it does, the next rounds learn these (`MOST_LEFT`).
    """
    rounds = max(1, len(variances))
    return min(MOST_LEFT, (LIKELY_LEFT * variances[-1] / variances[0]) ** (1 / rounds)) if variances else LIKELY_LEFT


def with_exact_normalizers(guide: Guide, tolerance: Tolerance) -> Guide:
    """The guide with normalizers that are known better than the estimate is to be, from as many pools as that takes.

    Negligible flips get no further pool: each takes as long as a thousand runs, and says nothing of them.
    """
    if guide.expected < NEGLIGIBLE:
        return guide
    pools = tolerance.times_needed(guide.expected, NORMALIZER_PRECISION * guide.expected_error)
    return guide.averaged_over_pools(min(MOST_POOLS, math.ceil(pools))) if pools > 1 else guide


def common(guides: Iterable[Guide | PlainNoise]) -> bool:
    """Whether one of these guides expects flips to be so common that its h is a control variate."""
    return any(guide.expected >= CONTROL_FROM for guide in guides)


def within_reach(guides: Iterable[Guide | PlainNoise]) -> bool:
    """Whether flips are no rarer than lines can show, by all of these guides."""
    return all(guide.expected >= NEGLIGIBLE for guide in guides)


def lines_pay(guides: Sequence[Guide]) -> bool:
    """Whether to follow lines: flips are neither common nor beyond reach, and points vary much."""
    return within_reach(guides) and not common(guides) and guides[-1].predicted_variance > WORTH


class Estimation:
    """Runs that only estimate: whether they flipped, which class won, and h and ρ of all G guides at them.

    What is known of the runs is kept in lists, one tensor for each call of `add`.
    """

    def __init__(
        self,
        network: NoisyNetwork,
        guides: tuple[Guide | PlainNoise, ...],
        shares: tuple[float, ...],
    ) -> None:
        """`shares` are the shares of the runs that samples of each guide get."""
        self.network, self.guides, self.shares = network, guides, shares
        self.sources, self.drawn = list(guides), [0] * len(guides)
        """The guides with the pools that samples come from, and how many were drawn from each pool."""
        self.flips: list[Tensor] = []
        """1 for runs that flipped, else 0, (N,); of lines, weights (see `LineEstimation`)."""
        self.winners: list[Tensor] = []
        """The class other than the label that has the largest score, (N,)."""
        self.flip_chances: list[Tensor] = []
        """h of each guide, (N, G)."""
        self.ratios: list[Tensor] = []
        """ρ of each guide, (N, G)."""
        self.origins: list[Tensor] = []
        """The number of the guide that each run was drawn from, (N,)."""

    @property
    def runs_each(self) -> int:
        """Runs of the network for each sample."""
        return 1

    async def run_until(
        self, tolerance: Tolerance, most: float, limit: int, first: int = FIRST_RUNS, reserve: float = RESERVE
    ) -> bool:
        """Run until the tolerance is met (True), or until more than `most` samples would be needed, the limit on the
        network's runs is reached, or the time is over (False).

        `first` are the samples of the first round. A later one has `reserve` times as many as seem to be missing.
        """
        try:
            await self.run(first)
            while True:
                times = self.times_needed(tolerance)
                left = (limit - self.network.runs) // self.runs_each
                if times <= 1 or left < 2 or (self.samples > first and times * self.samples > most):
                    return times <= 1
                await self.run(max(2, int(min(self.samples * min(reserve * times - 1, LARGEST_ROUND), left))))
        except OutOfTime:
            if self.samples == 0:
                raise
            return False

    async def run(self, count: int) -> None:
        """Run the network at so many samples more, divided among the guides."""
        for number, runs in enumerate(self.divided(count)):
            for start in range(0, runs, POOL_SAMPLES):
                part = min(POOL_SAMPLES, runs - start)
                white = self.source(number, part).draw(self.network.normal(part))
                self.add(white, await self.network.margins_at(white), number)

    def divided(self, count: int) -> list[int]:
        """How many of so many samples are to be drawn from each guide."""
        return [max(2, round(share * count)) if share > 0 else 0 for share in self.shares]

    def source(self, number: int, count: int) -> Guide | PlainNoise:
        """The guide with that number, to draw so many samples from: with a fresh pool where the old one is used up."""
        source = self.sources[number]
        if isinstance(source, Guide) and self.drawn[number] + count > POOL_SAMPLES:
            source = self.sources[number] = source.refilled()
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

    def estimate(self) -> FlipEstimate:
        """The estimate from all runs, which have the density of the mixture in the shares that were drawn."""
        estimate = controlled(torch.cat(self.flips), self.mixture_ratios(), self.controls())
        return replace(self._with_prediction(estimate, self.guides[-1]), unseen_error=self.unseen_error)

    def expected_variance(self, guide: Guide | PlainNoise) -> float:
        """The variance of one sample over the square of the probability, if the surrogates are right."""
        return min(guide.predicted_variance, MOST_PREDICTED)

    def _with_prediction(self, estimate: FlipEstimate, guide: Guide | PlainNoise) -> FlipEstimate:
        """The estimate with the error that the surrogates expect of so many samples."""
        relative = BELIEVED * math.sqrt(self.expected_variance(guide) / max(estimate.samples, 1))
        return replace(estimate, predicted_error=relative * max(estimate.probability, 0.0))

    def controls(self) -> Controls:
        """The control variates of all runs: h of the last guide."""
        return Controls.of_guide(torch.cat(self.flip_chances)[:, -1], self.guides[-1])

    def mixture_ratios(self) -> Tensor:
        """ρ (N,) of the mixture of guides, in the shares that were drawn."""
        origins = torch.cat(self.origins)
        shares = origins.bincount(minlength=len(self.guides)).double() / len(origins)
        return torch.cat(self.ratios) @ shares

    def times_needed(self, tolerance: Tolerance) -> float:
        """How many times as many runs as so far a tolerance takes; at most 1 if it is met."""
        now = self.estimate()
        seen = replace(now, unseen_error=0.0)
        unseen = replace(now, error=0.0, predicted_error=0.0, largest_share=0.0)
        times = [tolerance.times_needed(x.probability, x.careful_error, half_width(x)) for x in (seen, unseen)]
        return max(with_shrinking_share(times[0], seen), math.sqrt(times[1]))

    @property
    def unseen_error(self) -> float:
        """The standard error due to flips that no surrogate expects, where plain samples are to show them; else 0."""
        return 0.0

    def wins(self, classes: int) -> Tensor:
        """The probability that each other class wins, estimated by the mean of 1{it wins}/ρ, (d,)."""
        weight = torch.cat(self.flips) / self.mixture_ratios()
        total = torch.zeros(classes, dtype=torch.float64, device=weight.device)
        return total.index_add(0, torch.cat(self.winners), weight) / self.samples


class RareEstimation(Estimation):
    """Runs drawn from the guides A, B and C, and where these were not enough from later A, B and C.

    `guides` are first A, B, C, then the later ones in the same order. Where flips are rare, 1{flip}/ρ is 0 at all runs
    but those that flipped, so later guides are evaluated at these alone.
    """

    def __init__(self, network: NoisyNetwork, guides: Sequence[Guide]) -> None:
        super().__init__(network, tuple(guides), MIXTURE)
        self.flipped: list[Tensor] = []
        """ε (F, n) of the runs that flipped."""

    def add(self, white: Tensor, margins: Tensor, number: int) -> None:
        super().add(white, margins, number)
        self.flipped.append(white[self.flips[-1] > 0])

    def can_go_on_with(self, guides: Sequence[Guide]) -> bool:
        """Whether the densities of these guides can be mixed with those so far."""
        return not common((*self.guides, *guides))

    def go_on_with(self, guides: Sequence[Guide]) -> None:
        """Draw further runs from these guides. The runs so far keep counting, in the mixture of old and new guides."""
        flips, white = torch.cat(self.flips), torch.cat(self.flipped)
        for rows, values in (
            (self.ratios, self.ratios_at_flips(guides)),
            (self.flip_chances, [guide.flip_chance(white) for guide in guides]),
        ):
            added = flips.new_zeros(len(flips), len(guides))
            added[flips > 0] = torch.stack(values, 1)
            rows[:] = [torch.cat([torch.cat(rows), added], 1)]
        self.flips, self.flipped = [flips], [white]
        self.shares = (*(0.0 for _ in self.guides), *MIXTURE)
        self.guides = (*(guide.without_pool() for guide in self.guides), *guides)
        self.sources, self.drawn = list(self.guides), [0] * len(self.guides)

    def ratios_at_flips(self, guides: Sequence[Guide]) -> list[Tensor]:
        """ρ (F,) of each of these guides at the runs that flipped."""
        white = torch.cat(self.flipped)
        return [guide.ratio(white) for guide in guides]

    def of_search(self, number: int) -> Tensor:
        """Which runs (N,) were drawn from a guide of the search with that number."""
        return torch.cat(self.origins) % len(MIXTURE) == number

    def estimate_of_search(self, number: int) -> FlipEstimate:
        """The estimate from the runs of one search, as if there were no others."""
        own, every = self.of_search(number), len(MIXTURE)
        flips, chances, ratios = (torch.cat(x)[own] for x in (self.flips, self.flip_chances, self.ratios))
        drawn = torch.cat(self.origins)[own].bincount(minlength=len(self.guides))[number::every].double()
        guide = self.guides[number - every]
        controls = Controls.of_guide(chances[:, number - every], guide)
        return self._with_prediction(controlled(flips, ratios[:, number::every] @ drawn / drawn.sum(), controls), guide)

    def result(self, met: bool) -> EntryResult:
        """The estimate of all runs, and whether those of the two searches agree with it."""
        every, wins = self.estimate(), self.wins(self.network.classes)
        if min(int(self.of_search(number).sum()) for number in (0, 1)) < 2:  # the time was over before
            return EntryResult(every, None, False, "importance", wins, False)
        one, two = self.estimate_of_search(0), self.estimate_of_search(1)
        agreed = agree(one, two) and agree(every, one) and agree(every, two) and self.guides_known()
        return EntryResult(every, farther(every, one, two), agreed, "importance", wins, met and agreed)

    def guides_known(self) -> bool:
        """Whether E h of every guide is known well: where few points of a pool matter, its samples are not of φ ρ."""
        return all(guide.expected_error <= LEAST_KNOWN * guide.expected for guide in self.guides)


class LineEstimation(RareEstimation):
    """Lines in the place of single runs (see `lines`), each with two runs of the network.

    `flips` are φ(t) ω_j/π(t) of the lines whose second run flipped, else 0, and `ratios` are ρ_j: p = E[flips/ratios].
    """

    def __init__(self, network: NoisyNetwork, guides: Sequence[Guide]) -> None:
        super().__init__(network, guides)
        self.faces = Faces.of(guides[-1])
        """Those of the first guides, for later ones too: the density of lines is known only among lines of the same
        directions.
        """
        self.faces_of_flips: list[Tensor] = []
        """The face (N,) of each line that flipped."""

    @property
    def runs_each(self) -> int:
        return RUNS_EACH

    def can_go_on_with(self, guides: Sequence[Guide]) -> bool:
        return super().can_go_on_with(guides) and within_reach(guides)

    async def run(self, count: int) -> None:
        """Follow so many lines more, divided among the guides."""
        budget, guides = self.network.model.memory_budget, [each for each in self.guides if isinstance(each, Guide)]
        together = min(POOL_SAMPLES, elements_together("pass", guides[-1].basis, numbers_of_line(guides), budget))
        for number, lines in enumerate(self.divided(count)):
            for start in range(0, lines, together):
                part = min(together, lines - start)
                white = self.source(number, part).draw(self.network.normal(part))
                face = self.faces.chosen(white, self.network.generator)
                await self.follow(self.faces.lines(guides, self.shares, white, face), number)

    async def follow(self, lines: Lines, number: int) -> None:
        """Make both runs on each line and add what they show; the lines are from the guide with that number."""
        cell = lines.first_places()
        seen = await self.network.margins_at(lines.at(self.faces.places[cell]))
        t, weight = lines.drawn(lines.second_chances(cell, seen), self.network.generator)
        white = lines.at(t)
        margins = await self.network.margins_at(white)
        flipped = margins.amin(1) < 0
        self.flips.append(torch.where(flipped, weight, 0.0))
        self.winners.append(margins.argmin(1))
        self.ratios.append(lines.ratios)
        self.flip_chances.append(torch.zeros_like(lines.ratios))
        self.origins.append(torch.full((len(t),), number, device=t.device))
        self.flipped.append(white[flipped])
        self.faces_of_flips.append(lines.face[flipped])

    def ratios_at_flips(self, guides: Sequence[Guide]) -> list[Tensor]:
        white, face = torch.cat(self.flipped), torch.cat(self.faces_of_flips)
        return [self.faces.line_ratio(guide, white, face) for guide in guides]

    def expected_variance(self, guide: Guide | PlainNoise) -> float:
        return line_variance(super().expected_variance(guide))


def with_shrinking_share(times: float, estimate: FlipEstimate) -> float:
    """How many times the runs are needed, where the square of the careful error is `times` what is wanted.

    s² falls with the runs as 1/n, the square of what the largest sample adds as 1/n². So it is the x with
    (1 − a)/x + a/x² = 1/t, a being the share of the latter in the whole. It is at most 1 where t is.
    """
    square = estimate.careful_error**2
    part = min((estimate.largest_share * estimate.probability) ** 2 / square, 1.0) if square > 0 else 0.0
    first = (1 - part) * times
    return 0.5 * (first + math.sqrt(first**2 + 4 * part * times))


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
    be believed. The normalizer of ρ is known as well as E h, from the same pools; its relative error is added.
    """
    count = len(flips)
    terms = flips / ratios
    largest = float(terms.max() / terms.sum().clamp(min=1e-300))
    if controls.means[0] < CONTROL_FROM:
        mean, error = float(terms.mean()), float(terms.std()) / math.sqrt(count)
        freedom = (mean / error) ** 2 if error > 0 else 1.0
        normalizer_error = mean * controls.errors[0] / max(controls.means[0], 1e-300)
        return FlipEstimate(mean, math.hypot(error, normalizer_error), count, largest, freedom=freedom)
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
