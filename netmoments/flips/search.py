"""What gradients find: surrogates of the margins, and the nearest noise that flips the answer.

Surrogates take a few hundred gradients: from a start, rounds of runs where the surrogates so far are unsure. There are
two starts, which share nothing but the network: from the noise itself, whose expected gradients point to where the
expected margin becomes 0, and from samples that are pulled across the boundary one by one, each by its own gradient.
Agreement of what the two find is part of an answer.

The nearest flip is the ε of least norm with a negative margin, x = mean + L ε: where the density of the noise that
flips is largest. Steps go to where the margin, made linear at the last point, is 0 nearest to the mean (Hasofer & Lind
1974, Rackwitz & Fiessler 1978), then along the boundary as long as that shortens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from netmoments.checks import require_positive, require_seed
from netmoments.flips.guide import FEWER, Guide, guide
from netmoments.flips.margins import (
    BACKWARD,
    Asked,
    NoisyMargins,
    Slopes,
    comparable,
    inputs_together,
    labels_of,
    own_seed,
    read_classifier,
    together,
)
from netmoments.flips.result import NearestFlip
from netmoments.flips.surrogate import Evidence, Quadratic, fitted, ways
from netmoments.gaussian import Gaussian
from netmoments.moments.request import Request
from netmoments.precision import full_precision
from netmoments.progress import progress_bar

START = 32
"""Gradients of a start."""
ROUND = 48
"""Gradients of a round, at least."""
GROWTH = 0.35
"""A round has so many gradients of those before."""
CANDIDATES = 4
"""Rivals that are looked at from a start, at most."""
SEEDS = 12
"""Gradients of each of them, at least."""
FEWEST = 8
"""Gradients of a rival's margin that make a surrogate."""
WITHIN = 3.0
"""How many more standard deviations than the nearest a rival may be away to be looked at."""
PULLS = 3
"""Newton steps of a sample across the boundary."""
LONGEST_PULL = 12.0
"""Standard deviations of the noise."""
MOST_DIRECTIONS = 384
"""Of a surrogate."""
GRADIENTS_EACH = 3
"""Gradients for each direction of a surrogate."""
ATTENTION = 0.12
"""Of a round: what each of several surrogates gets for itself."""
CURIOUS = 2
"""Rounds in which it does, however little it matters."""
RELEVANT = 1e-3
"""Of the probability: what makes it matter afterwards."""

FARTHEST = 1e12
"""Standard deviations, that squares of lengths are numbers in float32, too."""
LOOKED_INTO = 8
"""Rivals with the smallest margins at the mean, whose gradients there are looked at."""
NEARBY = 4
"""Of them, those with the nearest boundaries are gone to; and so many samples of the noise are started from."""
STEPS = 6
"""To the boundary, from each start."""
RAYS, BLIND = 16, 64
"""Random directions that are tried, too; and where there are no gradients."""
FARTHER = (1.05, 1.2, 1.5, 2.0, 3.0, 5.0)
"""Times the length of a step that does not flip: where its ray is looked at."""
NARROWED = 8
"""Rounds that close in on where a ray crosses the boundary, at most."""
FINEST = {torch.float32: 1e-6, torch.float64: 1e-7}
"""Of a length: how well the crossing is known."""
CLEAR = 8
"""Rounding errors of the largest score by which a flip must show, so that it shows in any batch."""
SLIDES = 8
"""Steps along the boundary, at most."""
SLIDING = (1.0, 0.5, 0.2, 0.05)
"""Of the way to the nearest point of the boundary made linear."""
BACK_OUT = (0.0, 0.35, 0.7)
"""Of the way from such a point to the length before, along its ray: where the boundary may have bent to."""
LEAST_GAIN = 1e-4
"""Of the length, by which one goes on."""
GROWN = 12
"""Times that noise is made larger, from `FINEST` on by a factor of 2, until the network itself flips."""


@dataclass(eq=False)
class Search:
    """One search: what was run, and the surrogates and guide that follow from it."""

    margins: NoisyMargins
    generator: torch.Generator
    evidence: Evidence
    start: Evidence | None = None
    """Runs of the start where they are not samples of the noise: used until there are others."""
    guide: Guide | None = None
    rounds: int = 0
    plain: Tensor | None = None
    """The strongest margins at the samples of the noise that it started with, (N,)."""

    @classmethod
    async def from_noise(cls, margins: NoisyMargins, generator: torch.Generator) -> Search:
        """Started with samples of the noise: gradients of the strongest margins, and some of each likely rival's."""
        white = margins.normal(START)
        evidence = await _evidence(margins, white, torch.full((START,), -1, device=white.device))
        found = cls(margins, generator, evidence, plain=evidence.margins.amin(1))
        for rival in likely_rivals(evidence.margins):
            await found.seed(rival)
        return found

    @classmethod
    async def from_pulled(cls, margins: NoisyMargins, generator: torch.Generator) -> Search:
        """Started with samples that are pulled across the boundary, each by Newton steps along its own gradient."""
        white = margins.normal(START)
        parts = []
        for _ in range(PULLS):
            part = await _evidence(margins, white, torch.full((len(white),), -1, device=white.device))
            parts.append(part)
            margin = part.margins.gather(1, part.rivals.unsqueeze(1)).to(white.dtype)
            square = part.gradients.square().sum(1, keepdim=True)
            step = torch.where(square > 0, margin * part.gradients / square.clamp(min=1e-30), 0.0)
            length = step.norm(dim=1, keepdim=True)
            white = white - step * (LONGEST_PULL / length.clamp(min=LONGEST_PULL))
        pulled = parts[0].joined(parts[1]).joined(parts[2])
        found = cls(margins, generator, parts[0], start=pulled)
        for rival in likely_rivals(parts[0].margins):
            await found.seed(rival)
        return found

    @classmethod
    def joined(cls, first: Search, second: Search) -> Search:
        """One that knows what both have found."""
        return cls(first.margins, first.generator, first.evidence.joined(second.evidence), rounds=CURIOUS)

    async def seed(self, rival: int) -> None:
        """Gradients of a rival's margin at some samples of the noise, where there are too few."""
        missing = SEEDS - int((self.evidence.rivals == rival).sum())
        if missing <= 0:
            return
        white = self.margins.normal(missing)
        which = torch.full((missing,), rival, device=white.device)
        self.evidence = self.evidence.joined(await _evidence(self.margins, white, which))

    @property
    def gradients(self) -> int:
        return len(self.evidence) + (0 if self.start is None else len(self.start))

    @property
    def next_round(self) -> int:
        """Gradients of the next round."""
        return max(ROUND, int(GROWTH * self.gradients))

    def surrogates(self) -> tuple[Quadratic, ...]:
        """A surrogate for every rival with enough gradients, or two where there are two ways to it."""
        evidence = self.evidence
        if self.start is not None and self.rounds < 2:
            evidence = evidence.joined(self.start)
        found = []
        for rival, count in enumerate(evidence.rivals.bincount(minlength=1).tolist()):
            if count < FEWEST:
                continue
            parts = ways(evidence.of_rival(rival), FEWEST)
            beside = evidence.without_rival(rival) if len(parts) == 1 else None  # else whose values are these?
            for part in parts:
                surrogate = fitted(part, rival, max(2, min(MOST_DIRECTIONS, len(part) // GRADIENTS_EACH)), beside)
                if surrogate.size > 0:
                    found.append(surrogate)
        return tuple(found)

    def refit(self, points: int = FEWER) -> None:
        """A new guide from all evidence; none where nothing moves the margins."""
        self.margins.clock.require_time()
        surrogates = self.surrogates()
        self.guide = guide(surrogates, self.generator, points) if surrogates else None

    async def advance(self) -> None:
        """A round, and what follows from it."""
        if self.guide is None:
            self.refit()
        if self.guide is not None:
            await self.round()
            self.refit()

    async def round(self) -> None:
        """Gradients at samples of the guide, and of each surrogate's own."""
        assert self.guide is not None
        white, which = self._samples(self.next_round)
        self.evidence = self.evidence.joined(await _evidence(self.margins, white, which))
        self.rounds += 1

    def _samples(self, count: int) -> tuple[Tensor, Tensor]:
        """ε (count, n), and whose margin is differentiated at each: of some the surrogate's, else the strongest."""
        assert self.guide is not None
        pairs = zip(self.guide.surrogates, self.guide.shares, strict=True)
        apart = [one for one, share in pairs if self.rounds < CURIOUS or RELEVANT < share < 1 - ATTENTION]
        apart = apart if len(self.guide.surrogates) > 1 else []
        each = max(2, min(int(ATTENTION * count), count // (2 * max(1, len(apart)))))
        drawn = [self.guide.draw(self.margins.normal(max(2, count - each * len(apart))), self.generator)]
        which = [torch.full((len(drawn[0]),), -1, device=drawn[0].device)]
        for surrogate in apart:
            own = guide((surrogate,), self.generator, FEWER).draw(self.margins.normal(each), self.generator)
            whose = torch.full((each,), -1, device=own.device)
            whose[::2] = surrogate.rival
            drawn.append(own)
            which.append(whose)
        return torch.cat(drawn), torch.cat(which)


async def _evidence(margins: NoisyMargins, white: Tensor, which: Tensor) -> Evidence:
    found, gradients = await margins.with_gradients(white, which)
    return Evidence(white, found, gradients, torch.where(which < 0, found.argmin(1), which))


def likely_rivals(margins: Tensor) -> list[int]:
    """Rivals whose margins (N, d) are fewest standard deviations above 0."""
    finite = torch.isfinite(margins).all(0)
    mean, spread = margins.mean(0), margins.std(0)
    away = torch.where(finite, mean / spread.clamp(min=1e-300), torch.inf)
    nearest = away.argsort()[:CANDIDATES].tolist()
    least = float(away[nearest[0]])
    return [rival for rival in nearest if float(away[rival]) < max(least + WITHIN, 1.5 * least)]


def nearest_flip(
    network: Any,
    noise: Gaussian | Mapping[str, Any] | Sequence[Any],
    label: int | Tensor | None = None,
    *,
    limit: float = 1e4,
    seed: int = 0,
    key: str | int | None = None,
    memory_budget: int | None = None,
) -> NearestFlip:
    """The smallest change of each input that was found to change the network's answer, measured by the noise.

    Args:
        network: any module in eval mode that runs, an exported program, or a `NetworkModel`.
        noise: the input, with any batch dimensions, and any covariance. A change δ that the noise can make has the
            length √(δᵀΣ⁻¹δ), in standard deviations: |δ|/σ where the noise is isotropic.
        label: the class that should win, an int or an int tensor of the batch's shape; by default the network's answer
            at the mean of the noise.
        limit: standard deviations beyond which nothing is looked for.
        seed: of the samples of the noise that some of the starts are from.
        key: which output, for a network that returns several.
        memory_budget: bytes, as elsewhere.

    Newton-like steps from the mean towards the nearest rivals, and from a few samples; then along the boundary while
    that is shorter: a few hundred runs for each input. Every answer was seen to flip, by the network itself. It is a
    search, no certificate: the nearest flip is at most so far away. Without gradients random directions are tried,
    whose flips are much farther than the nearest.

    >>> network = torch.nn.Linear(2, 2, bias=False)
    >>> network.weight.data = torch.eye(2)
    >>> found = nearest_flip(network.eval(), Gaussian(torch.tensor([3.0, 0.0]), std=0.5))
    >>> round(float(found.distance), 4), int(found.rival)  # 3/√2 away, over 0.5
    (4.2426, 1)
    """
    require_positive("nearest_flip", "limit", limit, "10_000 standard deviations")
    require_seed("nearest_flip", seed)
    request = read_classifier("nearest_flip", network, noise, memory_budget, key)
    return request.model.answer(partial(_nearest, request, label, min(float(limit), FARTHEST), seed))


def _nearest(request: Request, label: int | Tensor | None, limit: float, seed: int) -> NearestFlip:
    flat, batch = request.flat, request.noise.batch_shape
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        full_precision(),
        progress_bar("nearest flips", len(flat.mean)) as show,
    ):
        labels = labels_of("nearest_flip", request, label)
        every = dict[int, Nearby]()
        coming = (_closest(margins, limit) for margins in _each_entry(request, labels.tolist(), seed))
        for place, found in together(coming, inputs_together(request.model, flat)):
            every[place] = found
            show(len(every))
        noises = torch.stack([every[place].noise for place in range(len(every))])
        distance = noises.new_tensor([every[place].distance for place in range(len(every))], dtype=torch.float64)
        noises, distance, rival = shown_to_flip(request, noises.reshape(flat.mean.shape), distance, labels)
    return NearestFlip(
        noise=noises.reshape(*batch, *flat.event_shape),
        distance=distance.reshape(batch),
        label=labels.reshape(batch),
        rival=rival.reshape(batch),
        runs=torch.tensor([every[place].margins.runs for place in range(len(every))], device=rival.device).reshape(
            batch
        ),
    )


def _each_entry(request: Request, labels: list[int], seed: int) -> Iterator[NoisyMargins]:
    for entry, label in enumerate(labels):
        own = request.flat.entries(torch.tensor([entry], device=request.flat.device))
        generator = torch.Generator(own.device).manual_seed(own_seed(seed, "nearest flip", own.flat_mean[0]))
        yield NoisyMargins(request.model, own, label, generator, caller="nearest_flip")


def shown_to_flip(request: Request, noises: Tensor, distance: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Noise (N, *event) for which the network itself gives another answer than labels (N,), a little larger where
    rounding says so; NaN, at distance ∞ and of class −1, where it never does.
    """
    mean, network = request.flat.mean, request.model.network
    rival, every = torch.full_like(labels, -1), torch.arange(len(labels), device=labels.device)
    more = FINEST.get(mean.dtype, FINEST[torch.float32])
    left = every[torch.isfinite(distance)]
    for _ in range(GROWN):
        for some in left.split(64) if len(left) else ():
            scores = network(mean[some] + noises[some])
            own = scores.gather(1, labels[some].unsqueeze(1)).squeeze(1)
            flipped = scores.amax(1) > own
            rival[some[flipped]] = scores.argmax(1)[flipped]
        left = left[rival[left] < 0]
        noises[left], distance[left] = (1 + more) * noises[left], (1 + more) * distance[left]
        more *= 2
    missing = rival < 0
    noises[missing], distance[missing] = torch.nan, torch.inf
    return noises, distance, rival


@dataclass(eq=False)
class Nearby:
    """Runs of one input at points ε, with the nearest so far that flips."""

    margins: NoisyMargins
    limit: float
    probabilities: bool
    white: Tensor | None = field(default=None, init=False)
    """(n,), where one was found."""
    distance: float = field(default=math.inf, init=False)

    @property
    def noise(self) -> Tensor:
        """L ε, of the input's size; NaN where nothing was found."""
        if self.white is None:
            return torch.full_like(self.margins.mean, torch.nan)
        return self.margins.covariance.coloured(self.white.unsqueeze(0))[0]

    @property
    def reach(self) -> float:
        """How far it is worth to look."""
        return min(self.limit, self.distance)

    async def of(self, white: Tensor) -> Tensor:
        """The margins (N, d) at ε (N, n), greater by what rounding may be; +∞ where outputs are no numbers."""
        scores = (await Asked(self.margins, white)).scores
        return self._seen(white, comparable(scores, self.probabilities))

    async def with_gradients(self, white: Tensor, rivals: Tensor) -> tuple[Tensor, Tensor]:
        """The margins (N,) of one rival (N,) each, −1 for the strongest, and their gradients (N, n)."""
        answer = await Asked(self.margins, white, Slopes(rivals, self.probabilities), 1 + BACKWARD)
        assert answer.gradients is not None
        margins = self._seen(white, answer.scores)
        chosen = torch.where(rivals < 0, margins.argmin(1), rivals)
        return margins.gather(1, chosen.unsqueeze(1)).squeeze(1), answer.gradients

    def _seen(self, white: Tensor, scores: Tensor) -> Tensor:
        scores, own = scores.double(), self.margins.label
        rounding = CLEAR * torch.finfo(white.dtype).eps * scores.abs().amax(1, keepdim=True)
        margins = scores[:, own : own + 1] - scores + rounding
        margins[:, own] = torch.inf
        margins[~torch.isfinite(scores).all(1)] = torch.inf
        lengths = white.double().norm(dim=1)
        lengths = torch.where(margins.amin(1) < 0, lengths, torch.inf)
        nearest = int(lengths.argmin())
        if float(lengths[nearest]) < self.distance and float(lengths[nearest]) <= self.limit:
            self.white, self.distance = white[nearest], float(lengths[nearest])
        return margins


async def _closest(margins: NoisyMargins, limit: float) -> Nearby:
    """The nearest flip of one input."""
    nearby = Nearby(margins, limit, await margins.probabilities())
    origin = margins.normal(1).zero_()
    first = (await nearby.of(origin))[0]
    if nearby.distance == 0 or not bool((margins.covariance.variances() > 0).any()):
        return nearby
    points = margins.normal(RAYS if margins.has_gradient else BLIND)
    if margins.has_gradient:
        points = torch.cat([await _stepped(nearby, first), points])
    crossings = await Crossings.on_rays(nearby, points, float(first.min()))
    await crossings.narrowed(nearby)
    if margins.has_gradient and nearby.white is not None:
        await _slid(nearby, float(first.min()))
    return nearby


async def _stepped(nearby: Nearby, first: Tensor) -> Tensor:
    """Where steps to the boundary lead, (N, n): from the mean to rivals near by, from samples to the strongest."""
    rivals = first.argsort()[: min(LOOKED_INTO, len(first) - 1)]
    white = nearby.margins.normal(len(rivals)).zero_()
    margin, gradients = await nearby.with_gradients(white, rivals)
    near = (margin / gradients.double().norm(dim=1)).argsort()[:NEARBY]
    white = torch.cat([nearest_on_plane(white, margin, gradients)[near], nearby.margins.normal(NEARBY)])
    which = torch.cat([rivals[near], rivals.new_full((NEARBY,), -1)])
    for step in range(STEPS):
        white = shortened(white, nearby.reach)
        margin, gradients = await nearby.with_gradients(white, which)
        target = shortened(nearest_on_plane(white, margin, gradients), nearby.reach)
        target = torch.where(gradients.any(1, keepdim=True), target, nearby.margins.normal(len(white)))
        target = target if 2 * step < STEPS else 0.5 * (white + target)  # steps may go to and fro
        white = torch.where(torch.isfinite(margin).unsqueeze(1), target, 0.5 * white)
    return white


def nearest_on_plane(white: Tensor, margin: Tensor, gradients: Tensor) -> Tensor:
    """g (g·ε − f)/|g|², (N, n): where f (N,), made linear at ε (N, n) with gradients g (N, n), is 0 nearest to 0.

    ε itself where g is 0 or no number.
    """
    slope = gradients.double()
    square = slope.square().sum(1, keepdim=True)
    ahead = (slope * white.double()).sum(1, keepdim=True) - margin.unsqueeze(1)
    usable = (square > 0) & torch.isfinite(square) & torch.isfinite(ahead)
    found = slope * (ahead / torch.where(usable, square, 1.0))
    return torch.where(usable, found, white.double()).to(white.dtype)


def shortened(white: Tensor, most: float) -> Tensor:
    """Points (N, n), those farther from 0 than that taken back."""
    return white * (most / white.norm(dim=1, keepdim=True).clamp(min=most))


@dataclass(eq=False)
class Crossings:
    """Rays from the mean through points (N, n) that cross the boundary between `low` and `high` times their length."""

    points: Tensor
    low: Tensor
    high: Tensor
    above: Tensor
    """The smallest margins (N,) at `low`, and at `high`."""
    below: Tensor

    @classmethod
    async def on_rays(cls, nearby: Nearby, points: Tensor, start: float) -> Crossings:
        """Rays through points, where they flip at these or somewhat farther; the margin at the mean is `start`."""
        points = points[points.any(1)]
        most = (nearby.reach / points.double().norm(dim=1, keepdim=True)).clamp(min=1.0)
        scales = torch.tensor((0.0, 1.0, *FARTHER), dtype=torch.float64, device=points.device)
        scales = torch.minimum(scales.expand(len(points), -1), most)
        values = torch.full_like(scales, start)
        if len(points) > 0:
            values[:, 1] = (await nearby.of(points)).amin(1)
        ahead = ((values[:, 1] >= 0) & (most.squeeze(1) > 1)).nonzero().squeeze(1)
        if len(ahead) > 0:
            farther = points[ahead].unsqueeze(1) * scales[ahead, 2:, None].to(points.dtype)
            values[ahead, 2:] = (await nearby.of(farther.flatten(0, 1))).amin(1).reshape(len(ahead), -1)
        some = (values < 0).any(1)
        after = (values[some] < 0).int().argmax(1, keepdim=True)
        ends = (x[some].gather(1, place).squeeze(1) for x in (scales, values) for place in (after - 1, after))
        return cls(points[some], *ends)

    async def narrowed(self, nearby: Nearby) -> None:
        """By runs on both sides of where the margin, as if it were linear, is 0; every third time, of the middle."""
        finest = FINEST.get(self.points.dtype, FINEST[torch.float32])
        lengths = self.points.double().norm(dim=1)
        for attempt in range(NARROWED):
            wide = (self.high - self.low > 3 * finest * self.high) & (self.low * lengths < nearby.distance)
            if not bool(wide.any()):
                return
            low, high, above, below = (x[wide] for x in (self.low, self.high, self.above, self.below))
            linear = torch.isfinite(above) & (attempt % 3 < 2)
            middle = low + torch.where(linear, above / (above - below), 0.5) * (high - low)
            for side in (-1, 1):
                at = torch.minimum(torch.maximum(middle + side * finest * high, low), high)
                ray = self.points[wide] * at.unsqueeze(1).to(self.points.dtype)
                self._cut(wide, at, (await nearby.of(ray)).amin(1))

    def _cut(self, which: Tensor, at: Tensor, value: Tensor) -> None:
        """To the side of `at` times the length at which the sign changes, of some of the rays."""
        low, high, above, below = (x[which] for x in (self.low, self.high, self.above, self.below))
        inside, flips = (at > low) & (at < high), value < 0
        self.low[which] = torch.where(inside & ~flips, at, low)
        self.above[which] = torch.where(inside & ~flips, value, above)
        self.high[which] = torch.where(inside & flips, at, high)
        self.below[which] = torch.where(inside & flips, value, below)


async def _slid(nearby: Nearby, start: float) -> None:
    """From the nearest flip along the boundary, to where it is nearest to the mean, as long as that shortens."""
    for _ in range(SLIDES):
        assert nearby.white is not None
        white, before = nearby.white.unsqueeze(0), nearby.distance
        margin, gradients = await nearby.with_gradients(white, torch.full((1,), -1, device=white.device))
        target = nearest_on_plane(white, margin, gradients)
        points = torch.cat([white + share * (target - white) for share in SLIDING])
        longer = before / points.double().norm(dim=1, keepdim=True).clamp(min=1e-300) - 1
        await nearby.of(torch.cat([points * (1 + share * longer).to(points.dtype) for share in BACK_OUT]))
        if nearby.distance < before:
            crossings = await Crossings.on_rays(nearby, nearby.white.unsqueeze(0), start)
            await crossings.narrowed(nearby)
        if nearby.distance > (1 - LEAST_GAIN) * before:
            return
