"""A network under the noise of one input (`NoisyNetwork`), and runs of it for many inputs in shared batches.

Noise is whitened: a sample is x = mean + L ε with ε ~ N(0, I), whatever the covariance L Lᵀ is (isotropic, diagonal,
dense or of low rank). The margin of a rival j is f_j(ε) = score_label − score_j. Noise flips the answer where some
margin is negative.

The work on each input is a coroutine, written as if that input were alone. It awaits runs of the network, and
`run_together` collects what many inputs are waiting for and runs the network on it in one batch. `results_of_inputs`
does a piece of work in this way on every input of a call.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from netmoments.checks import describe, random_seed
from netmoments.gaussian import Gaussian
from netmoments.memory import elements_together
from netmoments.moments.request import Request
from netmoments.network.model import NetworkModel
from netmoments.precision import full_precision, without_cudnn
from netmoments.progress import progress_bar
from netmoments.sampling.fast_network import FastNetwork, fast_network

CHECKED_SAMPLES = 7
"""The outputs at so many samples, and at the mean, decide whether a network returns probabilities."""
HUGE = 1e10
"""Scores beyond this are counted in units of their own size."""
BACKWARD = 2
"""The cost of a gradient, in runs of the network, beside the run it belongs to."""
RUNS_AT_A_TIME = 32
"""An input is taken to await at least so many runs at a time; that says how many inputs fill a batch of the network."""
HELD_POINTS = 3000
"""An input is taken to hold so many points ε in memory: samples, and gradients at them."""
HELD_NUMBERS = 40_000 * 600
"""An input is taken to hold so many other numbers: those of the points at which surrogates are evaluated."""

Result = TypeVar("Result")


class OutOfTime(Exception):
    """The seconds that a caller allowed are over."""


@dataclass(eq=False)
class Clock:
    """The time at which work must end. It is asked before every piece of work."""

    seconds: float | None = None
    start: float = field(default_factory=time.perf_counter)

    @property
    def over(self) -> bool:
        return self.seconds is not None and time.perf_counter() - self.start > self.seconds

    def require_time(self) -> None:
        if self.over:
            raise OutOfTime


@dataclass(eq=False)
class NoisyNetwork:
    """A network under the noise of one input: the margins of its label as a function of whitened noise ε.

    It draws the noise, with random numbers of its own, and counts the runs of the network. ε are rows (N, n), where n
    is `dimension`; margins are (N, d), one for each of d classes.
    """

    model: NetworkModel
    fast: FastNetwork
    """The model's network as it is run, the same for all inputs of a call."""
    noise: Gaussian
    """One entry: its batch is (1,)."""
    label: int
    """The class that should win."""
    generator: torch.Generator
    """Where all random numbers for this input come from: samples of the noise, and choices among them."""
    clock: Clock = field(default_factory=Clock)
    runs: int = field(default=0, init=False)
    """Runs of the network so far; a backward pass counts two. The few that check its outputs are not counted."""
    _returns_probabilities: bool | None = field(default=None, init=False)
    _unit: float = field(default=1.0, init=False)
    """What margins and gradients are divided by: 1, or where scores are so large that float32 cannot represent their
    squares, a power of two near the largest.
    """

    def __post_init__(self) -> None:
        self.covariance = self.noise.covariance.entries(0)
        self.mean = self.noise.flat_mean[0]
        self.has_gradient = self.model.has_gradient and not any(
            x.is_inference() for x in self.model.network.parameters()
        )

    @property
    def dimension(self) -> int:
        """n: how many standard normal numbers make a sample."""
        return self.covariance.normals

    @property
    def classes(self) -> int:
        return self.model.outputs

    def normal(self, count: int) -> Tensor:
        """Samples ε (count, n) of whitened noise: standard normal numbers."""
        return torch.randn(
            (count, self.dimension), dtype=self.mean.dtype, device=self.mean.device, generator=self.generator
        )

    def inputs(self, white: Tensor) -> Tensor:
        """x = mean + L ε for ε (N, n): (N, *event)."""
        coloured = self.covariance.coloured(white)
        return (self.mean + coloured).reshape(len(white), *self.noise.event_shape)

    async def returns_probabilities(self) -> bool:
        """Whether the outputs at the mean and at some samples are probabilities; found out once."""
        if self._returns_probabilities is None:
            generator = torch.Generator(self.mean.device).manual_seed(random_seed(0, "looked at", 0))
            white = torch.zeros(1 + CHECKED_SAMPLES, self.dimension, dtype=self.mean.dtype, device=self.mean.device)
            white[1:].normal_(generator=generator)
            answer = await RunRequest(self, white, runs_each=0)
            self._returns_probabilities = are_probabilities(answer.scores)
            largest = float(answer.scores.abs().nan_to_num(0.0, 0.0).max())
            self._unit = 2.0 ** (math.frexp(largest)[1] - 1) if largest > HUGE else 1.0
        return self._returns_probabilities

    async def margins_at(self, white: Tensor) -> Tensor:
        """The margins (N, d) at ε (N, n), in float64; the label's own is +∞."""
        probabilities = await self.returns_probabilities()
        answer = await RunRequest(self, white)
        return self._margins_of(comparable(answer.scores, probabilities))

    async def with_gradients(self, white: Tensor, rivals: Tensor) -> tuple[Tensor, Tensor]:
        """The margins (N, d) at ε (N, n), and gradients (N, n): ∂f_j/∂ε = Lᵀ∇f_j for the rival j of each row.

        `rivals` (N,) are these rivals; −1 stands for the strongest one at that ε.
        """
        probabilities = await self.returns_probabilities()
        answer = await RunRequest(self, white, GradientRequest(rivals, probabilities), 1 + BACKWARD)
        assert answer.gradients is not None
        return self._margins_of(answer.scores), answer.gradients / self._unit

    def _margins_of(self, scores: Tensor) -> Tensor:
        """The margins (N, d) of comparable scores (N, d), in their unit; an error where scores are not finite."""
        scores = scores.double() / self._unit
        if not bool(torch.isfinite(scores).all()):
            bad = int((~torch.isfinite(scores)).any(1).sum())
            raise ValueError(
                f"{self.model.caller}: {bad} of {len(scores)} samples gave NaN or infinite outputs, so no class is the "
                f"largest; use less noise, clamp the network's input, or choose another output with key="
            )
        margins = scores[:, self.label].unsqueeze(1) - scores
        margins[:, self.label] = torch.inf
        return margins


def noisy_networks(
    model: NetworkModel, noise: Gaussian, labels: Sequence[int], seed: int, purpose: str, clock: Clock
) -> Iterator[NoisyNetwork]:
    """The network under each entry of noise with one batch dimension; each entry has random numbers of its own.

    `purpose` is what they are for: calls with other purposes draw other numbers from the same seed.
    """
    fast = fast_network(model)
    for place, label in enumerate(labels):
        entry = noise.entries(torch.tensor([place], device=noise.device))
        generator = torch.Generator(noise.device).manual_seed(seed_of_input(seed, purpose, entry.flat_mean[0]))
        yield NoisyNetwork(model, fast, entry, label, generator, clock)


def seed_of_input(seed: int, purpose: str, mean: Tensor) -> int:
    """A seed that depends on the input's mean (size,): the same alone and in any batch, another for another input."""
    digest = hashlib.sha256(mean.detach().cpu().contiguous().numpy().tobytes()).digest()
    return random_seed(seed, purpose, int.from_bytes(digest[:6], "big"))


@dataclass(frozen=True, eq=False)
class GradientRequest:
    """Which margin is to be differentiated at each of N points: that of the rivals (N,), −1 for the strongest."""

    rivals: Tensor
    probabilities: bool
    """Whether the network returns probabilities, which are then compared by their logarithms."""


@dataclass(frozen=True, eq=False)
class Answer:
    """Scores (N, d) as the network returns them. If gradients were asked for, these (N, n), and `comparable` scores."""

    scores: Tensor
    gradients: Tensor | None = None


@dataclass(frozen=True, eq=False)
class RunRequest:
    """Runs of the network at ε (N, n) that the work on one input awaits, with gradients of margins if wanted."""

    network: NoisyNetwork
    white: Tensor
    gradients: GradientRequest | None = None
    runs_each: int = 1
    """What each ε adds to the count of runs."""

    def __await__(self) -> Generator[RunRequest, Answer, Answer]:
        answer: Answer = yield self
        return answer


Work = Coroutine[RunRequest, Answer, Result]
"""The work on one input: it awaits runs of the network, and ends with a result."""


def results_of_inputs(
    work: Callable[[NoisyNetwork], Work[Result]],
    description: str,
    model: NetworkModel,
    noise: Gaussian,
    labels: Sequence[int],
    *,
    seed: int,
    purpose: str,
    clock: Clock,
) -> Iterator[tuple[int, Result]]:
    """Do the work on every input (noise with one batch dimension), and yield place and result of each as it ends.

    The network is run for many inputs together. The result of one does not depend on the others, to rounding. The other
    arguments are those of `noisy_networks`; a progress bar shows the description.
    """
    networks = noisy_networks(model, noise, labels, seed, purpose, clock)
    ending = run_together(map(work, networks), inputs_together(model, noise))
    with progress_bar(description, len(labels)) as show:
        for done in itertools.count():
            show(done)
            with torch.inference_mode(False), torch.no_grad(), full_precision():
                ended = next(ending, None)
            if ended is None:
                return
            yield ended


def in_order(results: Iterable[tuple[int, Result]]) -> list[Result]:
    """The results in the order of their places."""
    return [result for _, result in sorted(results, key=itemgetter(0))]


def run_together(works: Iterable[Work[Result]], most: int) -> Iterator[tuple[int, Result]]:
    """Run works, at most so many at a time, and yield the place and the result of each as it ends.

    All that go on wait for runs. The network is run for all of them together, and each is resumed with its own answer,
    or with `OutOfTime` where the time was over before all of its runs were made.
    """
    coming, waiting = enumerate(works), dict[int, tuple[Work[Result], RunRequest]]()
    try:
        while True:
            answers = answers_to([request for _, request in waiting.values()])
            begun = [(place, work) for place, (work, _) in waiting.items()]
            ready = [*begun, *itertools.islice(coming, most - len(waiting))]
            if not ready:
                return
            for (place, work), answer in itertools.zip_longest(ready, answers):
                try:
                    waiting[place] = (work, _resumed(work, answer))
                except StopIteration as ended:
                    waiting.pop(place, None)
                    yield place, ended.value
    finally:
        for work, _ in waiting.values():
            work.close()


def inputs_together(model: NetworkModel, noise: Gaussian) -> int:
    """How many inputs to work on at a time: as many as fill a batch of the network, if they fit into memory."""
    filling = -(-fast_network(model).batch // RUNS_AT_A_TIME)
    held = HELD_POINTS * noise.covariance.normals + HELD_NUMBERS
    return min(filling, elements_together("matrices", noise.mean, held, model.memory_budget))


def _resumed(work: Work[Result], answer: Answer | OutOfTime | None) -> RunRequest:
    """The next request of a work that is resumed with this answer, or begun with None."""
    if isinstance(answer, OutOfTime):
        return work.throw(answer)
    return work.send(cast(Answer, answer))


def answers_to(requests: list[RunRequest]) -> list[Answer | OutOfTime]:
    """Answer all requests, which are of one call, those of one kind in as few batches of the network as possible."""
    kinds: dict[bool | None, list[int]] = {}
    for place, request in enumerate(requests):
        kind = None if request.gradients is None else request.gradients.probabilities
        kinds.setdefault(kind, []).append(place)
    answers: dict[int, Answer | OutOfTime] = {}
    for places in kinds.values():
        answers |= zip(places, _answers_to_one_kind([requests[place] for place in places]), strict=True)
    return [answers[place] for place in range(len(requests))]


@dataclass(frozen=True)
class _Part:
    """Some rows of the ε of one request."""

    request: int
    """The place of the request."""
    rows: slice


def _answers_to_one_kind(requests: list[RunRequest]) -> list[Answer | OutOfTime]:
    network = requests[0].network
    budget = network.model.memory_budget
    if requests[0].gradients is not None:
        most = min(network.fast.batch, elements_together("backward", network.mean, network.model.pass_size, budget))
    else:
        most = elements_together("pass", network.mean, 2 * network.noise.size + network.dimension, budget)
    answers: list[list[Answer]] = [[] for _ in requests]
    for parts in batches([len(request.white) for request in requests], max(1, most)):
        if any(requests[part.request].network.clock.over for part in parts):
            break
        for part, answer in zip(parts, _run_batch(requests, parts), strict=True):
            answers[part.request].append(answer)
            request = requests[part.request]
            request.network.runs += request.runs_each * len(answer.scores)
    return [_joined(parts, len(request.white)) for request, parts in zip(requests, answers, strict=True)]


def batches(counts: list[int], most: int) -> Iterator[list[_Part]]:
    """The rows of several requests, with these counts, in batches of `most` rows and a last one."""
    parts, room = list[_Part](), most
    for request, count in enumerate(counts):
        start = 0
        while start < count:
            stop = min(count, start + room)
            parts.append(_Part(request, slice(start, stop)))
            room -= stop - start
            start = stop
            if room == 0:
                yield parts
                parts, room = [], most
    if parts:
        yield parts


def _joined(parts: list[Answer], count: int) -> Answer | OutOfTime:
    """The answer to a request for so many rows; `OutOfTime` if some are missing."""
    if sum(len(part.scores) for part in parts) < count:
        return OutOfTime()
    scores = torch.cat([part.scores for part in parts])
    gradients = [part.gradients for part in parts if part.gradients is not None]
    return Answer(scores, torch.cat(gradients) if gradients else None)


def _run_batch(requests: list[RunRequest], parts: list[_Part]) -> list[Answer]:
    """Run the network on one batch, and answer each of its parts."""
    fast, sizes = requests[0].network.fast, [part.rows.stop - part.rows.start for part in parts]
    networks = [requests[part.request].network for part in parts]
    white = [requests[part.request].white[part.rows] for part in parts]
    wanted = [requests[part.request].gradients for part in parts]
    if wanted[0] is None:
        scores = fast.values(torch.cat([each.inputs(x) for each, x in zip(networks, white, strict=True)]))
        return [Answer(rows) for rows in scores.split(sizes)]
    rivals = torch.cat([each.rivals[part.rows] for each, part in zip(wanted, parts, strict=True) if each is not None])
    labels = torch.cat([rivals.new_full((size,), each.label) for each, size in zip(networks, sizes, strict=True)])
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in white]
        inputs = [each.inputs(leaf) for each, leaf in zip(networks, leaves, strict=True)]
        scores, gradients = margin_gradients(fast, wanted[0].probabilities, torch.cat(inputs).detach(), labels, rivals)
        rows = zip(inputs, leaves, gradients.split(sizes), scores.split(sizes), strict=True)
        return [Answer(y, torch.autograd.grad(x, leaf, slope.to(x.dtype))[0]) for x, leaf, slope, y in rows]


def margin_gradients(
    fast: FastNetwork, probabilities: bool, inputs: Tensor, labels: Tensor, rivals: Tensor
) -> tuple[Tensor, Tensor]:
    """Comparable scores (N, d), and the gradients (N, *event) of the margins between labels (N,) and rivals (N,).

    On a GPU the work is recorded and replayed. The number of inputs is then filled up to a power of two, so that few
    recordings are needed.
    """

    def work(x: Tensor, label: Tensor, which: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad(), full_precision():
            x = x.detach().requires_grad_()
            scores = comparable(fast(x.clone()), probabilities)  # a clone, as the network may write into its input
            label = label.unsqueeze(1)
            strongest = scores.detach().scatter(1, label, -torch.inf).argmax(1)
            rival = torch.where(which < 0, strongest, which).unsqueeze(1)
            margin = scores.gather(1, label) - scores.gather(1, rival)
            (slope,) = torch.autograd.grad(margin.sum(), x)
        return scores.detach(), slope

    count = len(inputs)
    missing = 0 if fast.recordings is None else 2 ** (count - 1).bit_length() - count
    filled = [torch.cat([x, x[:1].expand(missing, *x.shape[1:])]) for x in (inputs, labels, rivals)]
    try:
        scores, slopes = fast.replayed(("margin", probabilities), work, *filled)
    except RuntimeError:
        with without_cudnn():
            scores, slopes = work(*filled)
    # 0·∞ in a branch that torch.where did not take, say: such a run shows a value only
    return scores[:count], slopes[:count].nan_to_num(0.0, 0.0, 0.0)


def comparable(scores: Tensor, probabilities: bool) -> Tensor:
    """The scores, or the logarithms of probabilities: the largest stays the largest, margins are nearer to linear."""
    return scores.clamp(min=torch.finfo(scores.dtype).tiny).log() if probabilities else scores


def are_probabilities(scores: Tensor) -> bool:
    """Whether scores (N, d) are not negative and sum to 1, as those of a softmax."""
    return bool((scores >= 0).all()) and bool(((scores.sum(1) - 1).abs() < 1e-3).all())


def read_classifier(caller: str, network: Any, noise: Any, memory_budget: int | None, key: str | int | None) -> Request:
    """The checked request for a classifier: a network with one output, a vector of at least two scores."""
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
    """The label (N,) of each entry: as given, or the network's answer at the mean."""
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
