"""Searches that follow gradients: for surrogates of the margins (`Search`), and for the nearest flip (`nearest_flip`).

Surrogates take a few hundred gradients. After a start come rounds of runs where the surrogates so far are unsure. There
are two starts, which share nothing but the network: one from the noise itself, whose expected gradients point to where
the expected margin becomes 0, and one from samples that are pulled across the boundary one by one, each by its own
gradient. Estimates from both are compared (`importance`).

The nearest flip is the ε of least norm with a negative margin, x = mean + L ε: there the density of the noise that
flips is largest. Steps go to where the margin, made linear at the last point, is 0 nearest to the mean (Hasofer & Lind
1974, Rackwitz & Fiessler 1978), then along the boundary as long as that shortens ε.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from netmoments.checks import require_positive, require_seed
from netmoments.flips.guide import SMALL_POOL, Guide, guide
from netmoments.flips.noisy_network import (
    BACKWARD,
    Clock,
    GradientRequest,
    NoisyNetwork,
    RunRequest,
    comparable,
    in_order,
    labels_of,
    read_classifier,
    results_of_inputs,
)
from netmoments.flips.result import NearestFlip
from netmoments.flips.surrogate import FEWEST, Evidence, Quadratic, surrogates_of
from netmoments.gaussian import Gaussian
from netmoments.moments.request import Request
from netmoments.precision import full_precision

START = 32
"""Samples of the noise that a search starts with."""
LEAST_ROUND = 48
"""A round has at least so many gradients."""
GROWTH = 0.35
"""A round has this share of the gradients of all before it, if that is more."""
CANDIDATES = 4
"""A start looks at so many rivals at most."""
WITHIN = 3.0
"""A rival is likely if its margin is at most so many standard deviations farther from 0 than that of the likeliest, or
at most 1.5 times as far.
"""
RIVAL_START = 12
"""Every likely rival gets at least so many gradients at the start."""
PULLS = 3
"""Newton steps that pull a sample across the boundary."""
LONGEST_PULL = 12.0
"""The longest of these steps, in standard deviations of the noise."""
OWN_SHARE = 0.12
"""Where there are several surrogates, each gets this share of a round for itself, all together at most half of it."""
FIRST_ROUNDS = 2
"""In so many first rounds every surrogate gets this share, later only those that matter."""
MATTERS = 1e-3
"""A surrogate matters if its share of Σ_j E h_j is more than this. One with more than 1 − OWN_SHARE has most samples of
the guide anyway, and gets none for itself.
"""
FARTHEST = 1e12
"""No flip is looked for beyond so many standard deviations: squares of lengths must be numbers in float32."""
RIVALS_COMPARED = 8
"""So many rivals, those with the smallest margins at the mean, are compared by their gradients there."""
STARTS = 4
"""Steps go to so many of these rivals, whose boundaries seem nearest, and start from so many samples too."""
STEPS = 6
"""Steps to the boundary from each start."""
RAYS, BLIND_RAYS = 16, 64
"""Random directions that are tried in addition, and where there are no gradients."""
FARTHER = (1.05, 1.2, 1.5, 2.0, 3.0, 5.0)
"""A ray through a point that does not flip is followed to so many times the point's length."""
NARROWINGS = 8
"""Rounds that close in on where a ray crosses the boundary, at most."""
FINEST = {torch.float32: 1e-6, torch.float64: 1e-7}
"""How exactly a crossing is found, relative to the length."""
CLEAR = 8
"""A flip must show by so many rounding errors of the largest score, so that it shows in any batch."""
SLIDES = 8
"""Steps along the boundary, at most."""
SLIDING = (1.0, 0.5, 0.2, 0.05)
"""The shares that are tried of the way to the nearest point of the linearized boundary."""
BACK_OUT = (0.0, 0.35, 0.7)
"""The shares that are tried of the way from such a point back to the length before, along its ray: the boundary may
have bent away.
"""
LEAST_GAIN = 1e-4
"""Steps along the boundary go on as long as each shortens the length by more than this share."""
ENLARGEMENTS = 12
"""If the network does not flip at the noise that was found, this is enlarged up to so many times, first by `FINEST` of
its length, then by twice as much each time.
"""


@dataclass(eq=False)
class Search:
    """A search for surrogates: the runs that it made, and the guide that follows from them."""

    network: NoisyNetwork
    evidence: Evidence
    """The runs that surrogates are fitted to."""
    start: Evidence | None = None
    """Runs on the way to pulled samples, which are used for fits until there were two rounds."""
    guide: Guide | None = None
    """That of the last fit; None before it, or where nothing moves the margins."""
    rounds: int = 0
    """Rounds so far, without the start."""
    plain_margins: Tensor | None = None
    """The smallest margins (N,) at the plain samples that the search started with; None if it started from others."""

    @classmethod
    async def from_noise(cls, network: NoisyNetwork) -> Search:
        """A search that starts with samples of the noise: gradients of the smallest margin, and of likely rivals'."""
        evidence = await _run_with_gradients(network, network.normal(START))
        search = cls(network, evidence, plain_margins=evidence.margins.amin(1))
        for rival in likely_rivals(evidence.margins):
            await search.look_at_rival(rival)
        return search

    @classmethod
    async def from_pulled(cls, network: NoisyNetwork) -> Search:
        """A search that starts with samples pulled across the boundary, each by Newton steps along its gradient."""
        white = network.normal(START)
        pulled = []
        for _ in range(PULLS):
            runs = await _run_with_gradients(network, white)
            pulled.append(runs)
            margin = runs.margins.gather(1, runs.rivals.unsqueeze(1)).to(white.dtype)
            square = runs.gradients.square().sum(1, keepdim=True)
            step = torch.where(square > 0, margin * runs.gradients / square.clamp(min=1e-30), 0.0)
            length = step.norm(dim=1, keepdim=True)
            white = white - step * (LONGEST_PULL / length.clamp(min=LONGEST_PULL))
        search = cls(network, pulled[0], start=pulled[1].joined(pulled[2]))
        for rival in likely_rivals(pulled[0].margins):
            await search.look_at_rival(rival)
        return search

    @classmethod
    def joined(cls, first: Search, second: Search) -> Search:
        """A search that knows the runs of both."""
        return cls(first.network, first.evidence.joined(second.evidence), rounds=FIRST_ROUNDS)

    async def look_at_rival(self, rival: int) -> None:
        """Make sure that there are `RIVAL_START` gradients of a rival's margin, at samples of the noise."""
        missing = RIVAL_START - int((self.evidence.rivals == rival).sum())
        if missing > 0:
            white = self.network.normal(missing)
            which = torch.full((missing,), rival, device=white.device)
            self.evidence = self.evidence.joined(await _run_with_gradients(self.network, white, which))

    @property
    def gradients(self) -> int:
        """How many gradients the search has taken."""
        return len(self.evidence) + (0 if self.start is None else len(self.start))

    @property
    def next_round(self) -> int:
        """Gradients of the next round."""
        return max(LEAST_ROUND, int(GROWTH * self.gradients))

    @property
    def gradient_runs(self) -> int:
        """What all gradients so far took, in runs of the network: one run each, and a backward pass."""
        return (1 + BACKWARD) * self.gradients

    @property
    def next_round_runs(self) -> int:
        return (1 + BACKWARD) * self.next_round

    def surrogates(self) -> tuple[Quadratic, ...]:
        """A surrogate for every rival with enough gradients, or two where its boundary has two faces."""
        evidence = self.evidence
        if self.start is not None and self.rounds < 2:
            evidence = evidence.joined(self.start)
        counts = evidence.rivals.bincount(minlength=1).tolist()
        rivals = [rival for rival, count in enumerate(counts) if count >= FEWEST]
        found = [surrogate for rival in rivals for surrogate in surrogates_of(evidence, rival)]
        return tuple(surrogate for surrogate in found if surrogate.deviation > 0)

    def refit(self, points: int = SMALL_POOL) -> None:
        """Make a guide, with a pool of so many points, from all evidence; None where nothing moves the margins."""
        self.network.clock.require_time()
        surrogates = self.surrogates()
        self.guide = guide(surrogates, self.network.generator, points) if surrogates else None

    async def advance(self) -> None:
        """One more round, and the guide that follows from it."""
        if self.guide is None:
            self.refit()
        if self.guide is not None:
            await self.add_round()
            self.refit()

    async def add_round(self) -> None:
        """Take gradients at samples of the guide, and at some of each surrogate alone."""
        white, which = self._samples(self.next_round)
        self.evidence = self.evidence.joined(await _run_with_gradients(self.network, white, which))
        self.rounds += 1

    def _samples(self, count: int) -> tuple[Tensor, Tensor]:
        """ε (count, n), and the rival (count,) whose margin is differentiated at each, −1 for the strongest.

        A part of the samples is drawn from guides of single surrogates; at every other one of these the margin of the
        surrogate's rival is differentiated.
        """
        assert self.guide is not None
        with_shares = zip(self.guide.surrogates, self.guide.shares, strict=True)
        single = [each for each, share in with_shares if self.rounds < FIRST_ROUNDS or share > MATTERS]
        single = single if len(self.guide.surrogates) > 1 else []
        count_each = max(2, min(int(OWN_SHARE * count), count // (2 * max(1, len(single)))))
        drawn = [self.guide.draw(self.network.normal(max(2, count - count_each * len(single))))]
        which = [torch.full((len(drawn[0]),), -1, device=drawn[0].device)]
        for surrogate in single:
            alone = guide((surrogate,), self.network.generator, SMALL_POOL)
            white = alone.draw(self.network.normal(count_each))
            rivals = torch.full((count_each,), -1, device=white.device)
            rivals[::2] = surrogate.rival
            drawn.append(white)
            which.append(rivals)
        return torch.cat(drawn), torch.cat(which)


async def _run_with_gradients(network: NoisyNetwork, white: Tensor, which: Tensor | None = None) -> Evidence:
    """Runs at ε (N, n) with gradients of the margins of rivals `which` (N,), or everywhere of the strongest."""
    which = torch.full((len(white),), -1, device=white.device) if which is None else which
    values, gradients = await network.with_gradients(white, which)
    return Evidence(white, values, gradients, torch.where(which < 0, values.argmin(1), which))


def likely_rivals(margins: Tensor) -> list[int]:
    """The rivals whose margins (N, d) are the fewest standard deviations above 0."""
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
        seed: the seed of the samples of the noise from which some of the searches start.
        key: which output, for a network that returns several.
        memory_budget: bytes that a batch of the network may take, by default as many as is fastest.

    Newton-like steps go from the mean towards the nearest rivals, and from a few samples, then along the boundary as
    long as that shortens the change: a few hundred runs for each input. The network itself was seen to flip at every
    answer. It is a search, no certificate: the nearest flip is at most so far away. Without gradients random directions
    are tried, whose flips are much farther away than the nearest.

    >>> network = torch.nn.Linear(2, 2, bias=False)
    >>> network.weight.data = torch.eye(2)
    >>> found = nearest_flip(network.eval(), Gaussian(torch.tensor([3.0, 0.0]), std=0.5))
    >>> round(float(found.distance), 4), int(found.rival)  # 3/√2 away, over 0.5
    (4.2426, 1)
    """
    require_positive("nearest_flip", "limit", limit, "10_000 standard deviations")
    require_seed("nearest_flip", seed)
    request = read_classifier("nearest_flip", network, noise, memory_budget, key)
    return request.model.answer(partial(_nearest_of_entries, request, label, min(float(limit), FARTHEST), seed))


def _nearest_of_entries(request: Request, label: int | Tensor | None, limit: float, seed: int) -> NearestFlip:
    flat, batch = request.flat, request.noise.batch_shape
    with torch.inference_mode(False), torch.no_grad(), full_precision():
        labels = labels_of("nearest_flip", request, label)
        found = results_of_inputs(
            partial(_nearest_of_entry, limit=limit), "nearest flips", request.model, flat, labels.tolist(),
            seed=seed, purpose="nearest flip", clock=Clock(),
        )  # fmt: skip
        ordered = in_order(found)
        noises = torch.stack([nearest.noise for nearest in ordered])
        distance = noises.new_tensor([nearest.distance for nearest in ordered], dtype=torch.float64)
        noises, distance, rival = confirmed_by_network(request, noises.reshape(flat.mean.shape), distance, labels)
    return NearestFlip(
        noise=noises.reshape(*batch, *flat.event_shape),
        distance=distance.reshape(batch),
        label=labels.reshape(batch),
        rival=rival.reshape(batch),
        runs=torch.tensor([nearest.network.runs for nearest in ordered], device=rival.device).reshape(batch),
    )


def confirmed_by_network(
    request: Request, noises: Tensor, distance: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Noise (N, *event), distances and rivals (N,) for which the network itself gives another answer than the labels.

    Where rounding keeps it from flipping, the noise is made a little larger. Where it never flips, the noise is NaN,
    its distance ∞ and the rival −1.
    """
    mean, network = request.flat.mean, request.model.network
    rival = torch.full_like(labels, -1)
    enlargement = FINEST.get(mean.dtype, FINEST[torch.float32])
    left = torch.arange(len(labels), device=labels.device)[torch.isfinite(distance)]
    for _ in range(ENLARGEMENTS):
        for part in left.split(64) if len(left) else ():
            scores = network(mean[part] + noises[part])
            of_label = scores.gather(1, labels[part].unsqueeze(1)).squeeze(1)
            flipped = scores.amax(1) > of_label
            rival[part[flipped]] = scores.argmax(1)[flipped]
        left = left[rival[left] < 0]
        noises[left], distance[left] = (1 + enlargement) * noises[left], (1 + enlargement) * distance[left]
        enlargement *= 2
    missing = rival < 0
    noises[missing], distance[missing] = torch.nan, torch.inf
    return noises, distance, rival


@dataclass(eq=False)
class NearestSoFar:
    """The margins of one input; of all points ε that were run, the nearest that flips is kept."""

    network: NoisyNetwork
    limit: float
    probabilities: bool
    """Whether the network returns probabilities."""
    white: Tensor | None = field(default=None, init=False)
    """The nearest flip, (n,), if there is one."""
    distance: float = field(default=math.inf, init=False)

    @property
    def noise(self) -> Tensor:
        """L ε, of the input's size; NaN where nothing was found."""
        if self.white is None:
            return torch.full_like(self.network.mean, torch.nan)
        return self.network.covariance.coloured(self.white.unsqueeze(0))[0]

    @property
    def reach(self) -> float:
        """How far away it is worth to look."""
        return min(self.limit, self.distance)

    async def margins_at(self, white: Tensor) -> Tensor:
        """The margins (N, d) at ε (N, n), enlarged by what rounding may be; +∞ where outputs are not finite."""
        scores = (await RunRequest(self.network, white)).scores
        return self._margins(white, comparable(scores, self.probabilities))

    async def with_gradients(self, white: Tensor, rivals: Tensor) -> tuple[Tensor, Tensor]:
        """The margins (N,) of the rivals (N,), −1 for the strongest, at ε (N, n), and their gradients (N, n)."""
        answer = await RunRequest(self.network, white, GradientRequest(rivals, self.probabilities), 1 + BACKWARD)
        assert answer.gradients is not None
        margins = self._margins(white, answer.scores)
        chosen = torch.where(rivals < 0, margins.argmin(1), rivals)
        return margins.gather(1, chosen.unsqueeze(1)).squeeze(1), answer.gradients

    def _margins(self, white: Tensor, scores: Tensor) -> Tensor:
        """The margins from comparable scores, after a look at whether one of these points is the nearest flip."""
        scores, label = scores.double(), self.network.label
        rounding = CLEAR * torch.finfo(white.dtype).eps * scores.abs().amax(1, keepdim=True)
        margins = scores[:, label : label + 1] - scores + rounding
        margins[:, label] = torch.inf
        margins[~torch.isfinite(scores).all(1)] = torch.inf
        lengths = white.double().norm(dim=1)
        lengths = torch.where(margins.amin(1) < 0, lengths, torch.inf)
        nearest = int(lengths.argmin())
        if float(lengths[nearest]) < self.distance and float(lengths[nearest]) <= self.limit:
            self.white, self.distance = white[nearest], float(lengths[nearest])
        return margins


async def _nearest_of_entry(network: NoisyNetwork, limit: float) -> NearestSoFar:
    """The nearest flip of one input."""
    nearest = NearestSoFar(network, limit, await network.returns_probabilities())
    origin = network.normal(1).zero_()
    at_mean = (await nearest.margins_at(origin))[0]
    if nearest.distance == 0 or not bool((network.covariance.variances() > 0).any()):
        return nearest
    points = network.normal(RAYS if network.has_gradient else BLIND_RAYS)
    if network.has_gradient:
        points = torch.cat([await _stepped_to_boundary(nearest, at_mean), points])
    crossings = await Crossings.on_rays(nearest, points, float(at_mean.min()))
    await crossings.narrow(nearest)
    if network.has_gradient and nearest.white is not None:
        await _slide_along_boundary(nearest, float(at_mean.min()))
    return nearest


async def _stepped_to_boundary(nearest: NearestSoFar, at_mean: Tensor) -> Tensor:
    """Points (N, n) to which steps lead: from the mean to rivals near by, from samples to the strongest rival there.

    `at_mean` (d,) are the margins at the mean.
    """
    rivals = at_mean.argsort()[: min(RIVALS_COMPARED, len(at_mean) - 1)]
    white = nearest.network.normal(len(rivals)).zero_()
    margin, gradients = await nearest.with_gradients(white, rivals)
    near = (margin / gradients.double().norm(dim=1)).argsort()[:STARTS]
    white = torch.cat([nearest_on_plane(white, margin, gradients)[near], nearest.network.normal(STARTS)])
    which = torch.cat([rivals[near], rivals.new_full((STARTS,), -1)])
    for step in range(STEPS):
        white = shortened(white, nearest.reach)
        margin, gradients = await nearest.with_gradients(white, which)
        stepped = shortened(nearest_on_plane(white, margin, gradients), nearest.reach)
        stepped = torch.where(gradients.any(1, keepdim=True), stepped, nearest.network.normal(len(white)))
        stepped = stepped if 2 * step < STEPS else 0.5 * (white + stepped)  # whole steps may go to and fro
        white = torch.where(torch.isfinite(margin).unsqueeze(1), stepped, 0.5 * white)
    return white


def nearest_on_plane(white: Tensor, margin: Tensor, gradients: Tensor) -> Tensor:
    """g (g·ε − f)/|g|², (N, n): the point nearest to 0 at which f (N,), made linear at ε with gradient g (N, n), is 0.

    ε (N, n) itself where g is 0 or not finite.
    """
    slope = gradients.double()
    square = slope.square().sum(1, keepdim=True)
    ahead = (slope * white.double()).sum(1, keepdim=True) - margin.unsqueeze(1)
    usable = (square > 0) & torch.isfinite(square) & torch.isfinite(ahead)
    nearest = slope * (ahead / torch.where(usable, square, 1.0))
    return torch.where(usable, nearest, white.double()).to(white.dtype)


def shortened(white: Tensor, most: float) -> Tensor:
    """Points (N, n), where those with a larger norm than `most` are scaled to it."""
    return white * (most / white.norm(dim=1, keepdim=True).clamp(min=most))


@dataclass(eq=False)
class Crossings:
    """Rays from the mean through points (N, n) that cross the boundary between `low` and `high` times their length."""

    points: Tensor
    low: Tensor
    high: Tensor
    low_margin: Tensor
    """The smallest margin (N,) at `low`, not negative."""
    high_margin: Tensor
    """The smallest margin (N,) at `high`, negative."""

    @classmethod
    async def on_rays(cls, nearest: NearestSoFar, points: Tensor, start: float) -> Crossings:
        """Those of the rays that flip at their points or somewhat farther; the margin at the mean is `start`."""
        points = points[points.any(1)]
        most = (nearest.reach / points.double().norm(dim=1, keepdim=True)).clamp(min=1.0)
        scales = torch.tensor((0.0, 1.0, *FARTHER), dtype=torch.float64, device=points.device)
        scales = torch.minimum(scales.expand(len(points), -1), most)
        values = torch.full_like(scales, start)
        if len(points) > 0:
            values[:, 1] = (await nearest.margins_at(points)).amin(1)
        ahead = ((values[:, 1] >= 0) & (most.squeeze(1) > 1)).nonzero().squeeze(1)
        if len(ahead) > 0:
            farther = points[ahead].unsqueeze(1) * scales[ahead, 2:, None].to(points.dtype)
            values[ahead, 2:] = (await nearest.margins_at(farther.flatten(0, 1))).amin(1).reshape(len(ahead), -1)
        crossing = (values < 0).any(1)
        after = (values[crossing] < 0).int().argmax(1, keepdim=True)
        ends = (x[crossing].gather(1, place).squeeze(1) for x in (scales, values) for place in (after - 1, after))
        return cls(points[crossing], *ends)

    async def narrow(self, nearest: NearestSoFar) -> None:
        """Close in on the crossings that may be the nearest flip.

        Runs are on both sides of where the margin would be 0 if it were linear, and every third time of the middle.
        """
        finest = FINEST.get(self.points.dtype, FINEST[torch.float32])
        lengths = self.points.double().norm(dim=1)
        for attempt in range(NARROWINGS):
            unclear = (self.high - self.low > 3 * finest * self.high) & (self.low * lengths < nearest.distance)
            if not bool(unclear.any()):
                return
            low, high, above, below = (x[unclear] for x in (self.low, self.high, self.low_margin, self.high_margin))
            linear = torch.isfinite(above) & (attempt % 3 < 2)
            middle = low + torch.where(linear, above / (above - below), 0.5) * (high - low)
            for side in (-1, 1):
                at = torch.minimum(torch.maximum(middle + side * finest * high, low), high)
                ray = self.points[unclear] * at.unsqueeze(1).to(self.points.dtype)
                self._cut(unclear, at, (await nearest.margins_at(ray)).amin(1))

    def _cut(self, which: Tensor, at: Tensor, value: Tensor) -> None:
        """Cut the rays `which` at `at` times their length, where the smallest margin is `value`, and keep the side on
        which the sign changes.
        """
        low, high, above, below = (x[which] for x in (self.low, self.high, self.low_margin, self.high_margin))
        inside, flips = (at > low) & (at < high), value < 0
        self.low[which] = torch.where(inside & ~flips, at, low)
        self.low_margin[which] = torch.where(inside & ~flips, value, above)
        self.high[which] = torch.where(inside & flips, at, high)
        self.high_margin[which] = torch.where(inside & flips, value, below)


async def _slide_along_boundary(nearest: NearestSoFar, start: float) -> None:
    """Go from the nearest flip along the boundary to where that is nearest to the mean, as long as it gets shorter."""
    for _ in range(SLIDES):
        assert nearest.white is not None
        white, before = nearest.white.unsqueeze(0), nearest.distance
        margin, gradients = await nearest.with_gradients(white, torch.full((1,), -1, device=white.device))
        ahead = nearest_on_plane(white, margin, gradients)
        points = torch.cat([white + share * (ahead - white) for share in SLIDING])
        longer = before / points.double().norm(dim=1, keepdim=True).clamp(min=1e-300) - 1
        await nearest.margins_at(torch.cat([points * (1 + share * longer).to(points.dtype) for share in BACK_OUT]))
        if nearest.distance < before:
            crossings = await Crossings.on_rays(nearest, nearest.white.unsqueeze(0), start)
            await crossings.narrow(nearest)
        if nearest.distance > (1 - LEAST_GAIN) * before:
            return
