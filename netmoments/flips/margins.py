"""What a network says about noisy inputs, in whitened noise: its scores, its margins, their gradients, and the count of
runs; of one input as if it were alone, of many together.

An input is x = mean + L ε with ε ~ N(0, I), whatever the covariance L Lᵀ is: isotropic, diagonal, dense or of low rank.
The margin of a rival is f_j(ε) = score_label − score_j; noise flips the answer where some margin is negative.

Whoever asks for margins waits for them (`await`): `together` runs the network for many inputs that wait, in one batch.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Coroutine, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from netmoments.checks import describe
from netmoments.gaussian import Gaussian, random_seed
from netmoments.memory import elements_together
from netmoments.moments.request import Request
from netmoments.network.model import NetworkModel
from netmoments.precision import full_precision, without_cudnn
from netmoments.sampling.fast_network import FastNetwork, fast_network

LOOKED_AT = 7
"""Samples, beside the mean, at which outputs must be probabilities to be taken for such."""
BACKWARD = 2
"""What a gradient costs beside the run it belongs to, in runs of the network."""
LEAST_ASKED = 32
"""Runs that an input waits for at a time, or more."""
HELD = 3000
"""Whitened inputs that one holds on the way: samples, and gradients at them."""
POOLED = 40_000 * 600
"""Other numbers that it holds: those of the points that surrogates are looked at."""

Result = TypeVar("Result")


class OutOfTime(Exception):
    """The seconds that a caller allowed are over."""


@dataclass(eq=False)
class Clock:
    """When work must end; asked before every piece of it."""

    seconds: float | None = None
    start: float = field(default_factory=time.perf_counter)

    @property
    def over(self) -> bool:
        return self.seconds is not None and time.perf_counter() - self.start > self.seconds

    def require_time(self) -> None:
        if self.over:
            raise OutOfTime


@dataclass(eq=False)
class NoisyMargins:
    """The margins of one label against all others, for one entry of the noise, with the number of runs they took."""

    model: NetworkModel
    noise: Gaussian
    """One entry: its batch is (1,)."""
    label: int
    generator: torch.Generator
    clock: Clock = field(default_factory=Clock)
    caller: str = "flip_probability"
    runs: int = field(default=0, init=False)
    """Of the network, but for the eight that tell what its outputs are; a backward pass counts two."""
    _probabilities: bool | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.fast: FastNetwork = fast_network(self.model)
        self.covariance = self.noise.covariance.entries(0)
        self.mean = self.noise.flat_mean[0]
        self.has_gradient = self.model.has_gradient and not any(
            x.is_inference() for x in self.model.network.parameters()
        )

    @property
    def dimension(self) -> int:
        """How many standard normal numbers make a sample."""
        return self.covariance.normals

    @property
    def rivals(self) -> int:
        return self.model.outputs

    def normal(self, count: int) -> Tensor:
        """Standard normal numbers (count, n)."""
        return torch.randn(
            (count, self.dimension), dtype=self.mean.dtype, device=self.mean.device, generator=self.generator
        )

    def inputs(self, white: Tensor) -> Tensor:
        """x = mean + L ε for ε (N, n): (N, *event)."""
        coloured = self.covariance.coloured(white)
        return (self.mean + coloured).reshape(len(white), *self.noise.event_shape)

    async def probabilities(self) -> bool:
        """Whether the outputs are probabilities, at the mean and some samples; looked at once."""
        if self._probabilities is None:
            own = torch.Generator(self.mean.device).manual_seed(random_seed(0, "looked at", 0))
            white = torch.zeros(1 + LOOKED_AT, self.dimension, dtype=self.mean.dtype, device=self.mean.device)
            white[1:].normal_(generator=own)
            self._probabilities = are_probabilities((await Asked(self, white, runs_each=0)).scores)
        return self._probabilities

    async def of(self, white: Tensor) -> Tensor:
        """The margins (N, d) at ε (N, n), in float64; the label's own is +∞."""
        probabilities = await self.probabilities()
        answer = await Asked(self, white)
        return self._margins(comparable(answer.scores, probabilities))

    async def with_gradients(self, white: Tensor, rivals: Tensor) -> tuple[Tensor, Tensor]:
        """The margins (N, d), and the gradient (N, n) in ε of the margin of one rival (N,) of each sample: Lᵀ∇f.

        A rival of −1 is the strongest one at that sample.
        """
        probabilities = await self.probabilities()
        answer = await Asked(self, white, Slopes(rivals, probabilities), 1 + BACKWARD)
        assert answer.gradients is not None
        return self._margins(answer.scores), answer.gradients

    def _margins(self, scores: Tensor) -> Tensor:
        scores = scores.double()
        if not bool(torch.isfinite(scores).all()):
            bad = int((~torch.isfinite(scores)).any(1).sum())
            raise ValueError(
                f"{self.caller}: {bad} of {len(scores)} samples gave NaN or infinite outputs, so that no class is the "
                f"largest; use less noise, clamp the network's input, or choose another output with key="
            )
        margins = scores[:, self.label].unsqueeze(1) - scores
        margins[:, self.label] = torch.inf
        return margins


@dataclass(frozen=True, eq=False)
class Slopes:
    """Whose margins are differentiated, (N,), −1 for the strongest; and whether outputs are probabilities."""

    rivals: Tensor
    probabilities: bool


@dataclass(frozen=True, eq=False)
class Answer:
    """Scores (N, d), and gradients (N, n) where they were asked for."""

    scores: Tensor
    gradients: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Asked:
    """Runs of the network at ε (N, n) that an input waits for; with `slopes`, gradients of margins, too."""

    margins: NoisyMargins
    white: Tensor
    slopes: Slopes | None = None
    runs_each: int = 1

    def __await__(self) -> Generator[Asked, Answer, Answer]:
        answer: Answer = yield self
        return answer


Work = Coroutine[Asked, Answer, Result]
"""What is done for one input: it waits for runs of the network, and ends with a result."""


def together(works: Iterable[Work[Result]], most: int) -> Iterator[tuple[int, Result]]:
    """Results with the places of their works, as they come; at most so many works go on at a time.

    Every work that goes on waits for some runs; the network is run for all of them, and each goes on with its own. It
    is told where the time was over before its runs were made (`OutOfTime`).
    """
    coming, waiting = enumerate(works), dict[int, tuple[Work[Result], Asked]]()
    try:
        while True:
            answers = answered([asked for _, asked in waiting.values()])
            before = [(place, work) for place, (work, _) in waiting.items()]
            ready = [*before, *islice(coming, most - len(waiting))]
            if not ready:
                return
            for (place, work), answer in zip_longest(ready, answers):
                try:
                    waiting[place] = (work, _resumed(work, answer))
                except StopIteration as ended:
                    waiting.pop(place, None)
                    yield place, ended.value
    finally:
        for work, _ in waiting.values():
            work.close()


def _resumed(work: Work[Result], answer: Answer | OutOfTime | None) -> Asked:
    """What a work asks for next, after this answer; None where it has not begun."""
    if isinstance(answer, OutOfTime):
        return work.throw(answer)
    return work.send(cast(Answer, answer))


def alone(work: Work[Result]) -> Result:
    """The result of one work."""
    ((_, result),) = together([work], 1)
    return result


def inputs_together(model: NetworkModel, noise: Gaussian) -> int:
    """How many inputs go on at a time: as many as fill a batch of the network, if their numbers fit into memory."""
    filling = -(-fast_network(model).batch // LEAST_ASKED)
    held = HELD * noise.covariance.normals + POOLED
    return min(filling, elements_together("matrices", noise.mean, held))


def answered(asked: list[Asked]) -> list[Answer | OutOfTime]:
    """The network run for all, in as few batches as possible; works that ask alike go through together."""
    kinds: dict[Any, list[int]] = {}
    for place, one in enumerate(asked):
        kind = None if one.slopes is None else one.slopes.probabilities
        kinds.setdefault((id(one.margins.fast), kind), []).append(place)
    found: dict[int, Answer | OutOfTime] = {}
    for places in kinds.values():
        found |= zip(places, _answered_alike([asked[place] for place in places]), strict=True)
    return [found[place] for place in range(len(asked))]


@dataclass(frozen=True)
class _Part:
    """Some runs of one of those who ask: which, and the rows from where to where."""

    place: int
    rows: slice


def _answered_alike(asked: list[Asked]) -> list[Answer | OutOfTime]:
    margins, sloping = asked[0].margins, asked[0].slopes is not None
    if sloping:
        most = min(margins.fast.batch, elements_together("backward", margins.mean, margins.model.pass_size))
    else:
        most = elements_together("pass", margins.mean, 2 * margins.noise.size + margins.dimension)
    found: list[list[Answer]] = [[] for _ in asked]
    for parts in batches([len(one.white) for one in asked], max(1, most)):
        if any(asked[part.place].margins.clock.over for part in parts):
            break
        for part, answer in zip(parts, _run(asked, parts), strict=True):
            found[part.place].append(answer)
            one = asked[part.place]
            one.margins.runs += one.runs_each * len(answer.scores)
    return [_joined(parts, len(one.white)) for one, parts in zip(asked, found, strict=True)]


def batches(counts: list[int], most: int) -> Iterator[list[_Part]]:
    """Rows of several, so many of each, in batches of `most` and a last one."""
    parts, room = list[_Part](), most
    for place, count in enumerate(counts):
        start = 0
        while start < count:
            stop = min(count, start + room)
            parts.append(_Part(place, slice(start, stop)))
            room -= stop - start
            start = stop
            if room == 0:
                yield parts
                parts, room = [], most
    if parts:
        yield parts


def _joined(parts: list[Answer], count: int) -> Answer | OutOfTime:
    if sum(len(part.scores) for part in parts) < count:
        return OutOfTime()
    scores = torch.cat([part.scores for part in parts])
    gradients = [part.gradients for part in parts if part.gradients is not None]
    return Answer(scores, torch.cat(gradients) if gradients else None)


def _run(asked: list[Asked], parts: list[_Part]) -> list[Answer]:
    """One batch."""
    fast, sizes = asked[0].margins.fast, [part.rows.stop - part.rows.start for part in parts]
    every = [asked[part.place].margins for part in parts]
    white = [asked[part.place].white[part.rows] for part in parts]
    wanted = [asked[part.place].slopes for part in parts]
    if wanted[0] is None:
        scores = fast.values(torch.cat([own.inputs(x) for own, x in zip(every, white, strict=True)]))
        return [Answer(own) for own in scores.split(sizes)]
    rivals = torch.cat([own.rivals[part.rows] for own, part in zip(wanted, parts, strict=True) if own is not None])
    labels = torch.cat([rivals.new_full((size,), own.label) for own, size in zip(every, sizes, strict=True)])
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in white]
        inputs = [own.inputs(leaf) for own, leaf in zip(every, leaves, strict=True)]
        scores, slopes = margin_slopes(fast, wanted[0].probabilities, torch.cat(inputs).detach(), labels, rivals)
        found = zip(inputs, leaves, slopes.split(sizes), scores.split(sizes), strict=True)
        return [Answer(own, torch.autograd.grad(x, leaf, slope.to(x.dtype))[0]) for x, leaf, slope, own in found]


def margin_slopes(
    fast: FastNetwork, probabilities: bool, inputs: Tensor, labels: Tensor, rivals: Tensor
) -> tuple[Tensor, Tensor]:
    """Comparable scores (N, d), and the gradient (N, *event) of the margin of a label (N,) to a rival (N,) of each.

    On a GPU from a recording, of a number of inputs that is a power of two, so that few are needed.
    """

    def work(x: Tensor, label: Tensor, which: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad(), full_precision():
            x = x.detach().requires_grad_()
            scores = comparable(fast(x.clone()), probabilities)  # which it may write into
            own = label.unsqueeze(1)
            strongest = scores.detach().scatter(1, own, -torch.inf).argmax(1)
            rival = torch.where(which < 0, strongest, which).unsqueeze(1)
            margin = scores.gather(1, own) - scores.gather(1, rival)
            (slope,) = torch.autograd.grad(margin.sum(), x)
        return scores.detach(), slope

    count = len(inputs)
    missing = 0 if fast.recordings is None else 2 ** (count - 1).bit_length() - count
    given = [torch.cat([x, x[:1].expand(missing, *x.shape[1:])]) for x in (inputs, labels, rivals)]
    try:
        scores, slopes = fast.replayed(("margin", probabilities), work, *given)
    except RuntimeError:
        with without_cudnn():
            scores, slopes = work(*given)
    return scores[:count], slopes[:count]


def comparable(scores: Tensor, probabilities: bool) -> Tensor:
    """The scores, of a softmax their logarithms: the same one is the largest, and margins are nearer to linear."""
    return scores.clamp(min=torch.finfo(scores.dtype).tiny).log() if probabilities else scores


def read_classifier(caller: str, network: Any, noise: Any, memory_budget: int | None, key: str | int | None) -> Request:
    """The request, of a network with at least two scores of one input, and nothing else."""
    request = Request.read(network, noise, None, memory_budget, caller, key=key)
    parts = request.model.parts
    if len(parts) > 1:
        names = ", ".join(repr(part.name) for part in parts)
        raise ValueError(
            f"{caller}: the network returns {len(parts)} outputs, {names}; say with key= which of them are the scores"
        )
    if sum(size > 1 for size in parts[0].shape) > 1:
        raise ValueError(
            f"{caller}: the network must return one vector of scores, of which the largest is its answer, got outputs "
            f"of shape {tuple(parts[0].shape)}; wrap it in a module that picks one place, or sums them up"
        )
    if request.model.outputs < 2:
        raise ValueError(
            f"{caller}: the network must return at least two scores, of which the largest is its answer, got "
            f"{request.model.outputs}; for one score s, return (s, 0)"
        )
    return request


def labels_of(caller: str, request: Request, label: int | Tensor | None) -> Tensor:
    """A class (N,) for each entry: as told, or the answer at the mean."""
    mean, classes = request.flat.mean, request.model.outputs
    if label is None:
        scores = torch.cat([request.model.network(part.clone()) for part in mean.split(64)])
        if not bool(torch.isfinite(scores).all()):
            raise ValueError(f"{caller}: the network gives NaN or infinite outputs at the mean of the noise")
        return scores.argmax(1)
    if isinstance(label, Tensor) and (label.is_meta or label.is_quantized or label.layout != torch.strided):
        raise TypeError(f"{caller}: label must be an integer or a plain tensor of them, got {describe(label)}")
    wanted = torch.as_tensor(label, device=mean.device)
    if wanted.is_floating_point() or wanted.is_complex() or wanted.dtype == torch.bool:
        raise TypeError(f"{caller}: label must be an integer or a tensor of them, got {describe(label)}")
    batch = request.noise.batch_shape
    try:
        wanted = wanted.expand(batch).reshape(-1).long()
    except RuntimeError:
        raise ValueError(
            f"{caller}: label must be one class, or of the noise's batch shape {tuple(batch)}, got {describe(label)}"
        ) from None
    if not bool(((wanted >= 0) & (wanted < classes)).all()):
        raise ValueError(
            f"{caller}: label must be a class from 0 to {classes - 1}, got {int(wanted.min())} to {int(wanted.max())}"
        )
    return wanted


def own_seed(seed: int, purpose: str, mean: Tensor) -> int:
    """A seed of an input's own, by its mean (n,): the same alone and in any batch, another for another input."""
    digest = hashlib.sha256(mean.detach().cpu().contiguous().numpy().tobytes()).digest()
    return random_seed(seed, purpose, int.from_bytes(digest[:6], "big"))


def are_probabilities(scores: Tensor) -> bool:
    """Whether scores (N, d) are not negative and sum to 1, as those of a softmax."""
    return bool((scores >= 0).all()) and bool(((scores.sum(1) - 1).abs() < 1e-3).all())
