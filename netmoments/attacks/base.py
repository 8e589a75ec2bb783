"""What all attacks share: reading the arguments, linearizing images in groups, and letting the network judge the noise.

`Attack.__call__` is the whole course. `read_subjects` checks the arguments and leaves out images that the network gets
wrong without noise. For each group of images a subclass finds the noise (`_solved`). Samples of that noise then go
through the network (`_sampled`), and what it says becomes the `AttackResult` (`_judged`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from netmoments.attacks.evaluation import Bounds, Success, fooled_margin, noisy_scores, scores_of
from netmoments.attacks.margins import ClassPairs, Formula, LinearizedScores
from netmoments.attacks.result import AttackResult, SkippedImage, joined
from netmoments.checks import describe, require_count, require_finite, require_float_tensor, require_seed
from netmoments.linearize.two_stage import linearized_at, tangent_at
from netmoments.memory import memory_limit
from netmoments.network.model import NetworkModel, network_of
from netmoments.network.replica import replica
from netmoments.progress import progress_bar

GREY_LEVELS = 255
"""Steps between the lowest and the highest value of a pixel."""
FOLLOWED = 20
"""Where there are more classes than this, the formula follows only the label, the target and the best scores."""
TOLERANCE = 1e-6
"""Images may leave the bounds by this much; they are then cut to them."""
TOGETHER = {"cpu": 64, "cuda": 256}
"""At most so many images are attacked at a time: in larger groups the slowest image keeps too many others waiting."""
COPIES = 3
"""An attack holds memory for so many copies of a linearized network: A, Aᵀ and what making them takes."""

Preprocessing = Callable[[Tensor], Tensor]
Parts = TypeVar("Parts")


def entries(value: Parts, index: Tensor | tuple[Tensor, Tensor]) -> Parts:
    """The same dataclass for some of its images: every tensor (N, ...) is indexed, in dataclasses inside it too.

    Two indices (N, 1), of images and of their problems, pick one problem of each image: tensors (N, R, ...) become
    (N, 1, ...).
    """
    indexed: dict[str, Any] = {}
    for field in fields(value):  # type: ignore[arg-type]
        content = getattr(value, field.name)
        if isinstance(content, Tensor):
            indexed[field.name] = content[index]
        elif is_dataclass(content):
            indexed[field.name] = entries(content, index)
    return replace(value, **indexed)  # type: ignore[type-var]


@dataclass(frozen=True, eq=False)
class Subjects:
    """A network and images (N, C, H, W) that it classifies correctly, with targets (N,) or None."""

    model: NetworkModel
    images: Tensor
    labels: Tensor
    targets: Tensor | None
    scores: Tensor
    """The network's scores without noise, (N, d)."""
    places: Tensor
    """The images' indices among those that the caller gave, (N,)."""
    lower: Tensor
    upper: Tensor
    """Between `lower` and `upper`, (N, n) each, μ leaves M + μ within the bounds."""

    def followed(self, rivals: int) -> Tensor:
        """The classes whose expected scores are computed, (N, F).

        Up to `FOLLOWED` classes these are all. Of more, they are the label and its best rivals, or with targets the
        label, the target and the best of the rest.
        """
        classes = self.scores.shape[1]
        if classes <= FOLLOWED:
            return torch.arange(classes, device=self.scores.device).expand(len(self.scores), -1)
        if self.targets is None:
            return torch.cat([self.labels.unsqueeze(1), self.rivals(rivals)], 1)
        first = torch.stack([self.labels, self.targets], 1)
        rest = self.scores.scatter(1, first, -torch.inf).topk(FOLLOWED - 2, dim=1).indices
        return torch.cat([first, rest], 1)

    def rivals(self, count: int) -> Tensor:
        """The classes with the best scores apart from the label, (N, R)."""
        others = self.scores.scatter(1, self.labels.unsqueeze(1), -torch.inf)
        return others.topk(min(count, self.scores.shape[1] - 1), dim=1).indices

    def class_pairs(self, rivals: int) -> ClassPairs:
        """Which scores must fall below which.

        Without targets there are R problems of one margin each, the label against each of its best rivals. With targets
        there is one problem, every other followed class against the target.
        """
        if self.targets is None:
            smaller = self.rivals(rivals).unsqueeze(2)
            return ClassPairs(self.labels.reshape(-1, 1, 1).expand_as(smaller), smaller)
        followed = self.followed(rivals)
        others = followed[followed != self.targets.unsqueeze(1)].reshape(len(self.images), 1, -1)
        return ClassPairs(others, self.targets.reshape(-1, 1, 1).expand_as(others))


def read_subjects(
    caller: str,
    network: Any,
    images: Any,
    labels: Any,
    targets: Any,
    bounds: Bounds | None,
    preprocessing: Preprocessing | None,
) -> tuple[Subjects, tuple[SkippedImage, ...]]:
    """Check the arguments of an attack; images that the network gets wrong are left out, and listed."""
    images = _read_images(caller, images, bounds)
    network = network_of(network, caller)
    if preprocessing is not None:
        network = nn.Sequential(_preprocessing_module(caller, preprocessing), network).eval()
    model = NetworkModel.of(network, images, caller)
    with torch.no_grad():
        scores = scores_of(model.network, images)
    require_finite(caller, "the network's scores", scores)
    classes = scores.shape[1]
    if classes < 2:
        raise ValueError(f"{caller}: a network with one score has nothing to be taken for; it needs at least 2 classes")
    labels = _read_classes(caller, "labels", labels, images, classes)
    if targets is not None:
        targets = _read_classes(caller, "targets", targets, images, classes)
        same = (targets == labels).nonzero().flatten().tolist()
        if same:
            raise ValueError(
                f"{caller}: a target must differ from the label; they are equal for images {same[:8]}"
                f"{' and others' if len(same) > 8 else ''}"
            )
    places, (low, high) = torch.arange(len(images), device=images.device), bounds or (-torch.inf, torch.inf)
    lower, upper = low - images.flatten(1), high - images.flatten(1)
    all_images = Subjects(model, images, labels, targets, scores, places, lower, upper)
    predicted = scores.argmax(1)
    wrong = (predicted != labels).nonzero().flatten().tolist()
    skipped = tuple([SkippedImage(place, int(labels[place]), int(predicted[place])) for place in wrong])
    return entries(all_images, (predicted == labels).nonzero().flatten()), skipped


def _read_images(caller: str, images: Any, bounds: Bounds | None) -> Tensor:
    images = require_float_tensor(caller, "images", images).detach().clone()  # also out of inference mode
    if images.dim() != 4 or images.numel() == 0:
        raise ValueError(f"{caller}: images must be a batch (N, C, H, W) of at least one, got {describe(images)}")
    require_finite(caller, "images", images)
    if bounds is not None:
        low, high = bounds
        least, most = float(images.min()), float(images.max())
        if least < low - TOLERANCE or most > high + TOLERANCE:
            raise ValueError(
                f"{caller}: images must be within the bounds ({low:g}, {high:g}), got values from {least:g} to "
                f"{most:g}; give bounds= of your pixels (and sigma= in their units), or bounds=None"
            )
        images = images.clamp(low, high)
    return images


def read_bounds(caller: str, bounds: Any) -> Bounds | None:
    """Check the lowest and highest value of a pixel; None means no bounds."""
    if bounds is None:
        return None
    try:
        low, high = map(float, bounds)
    except (TypeError, ValueError):
        raise ValueError(f"{caller}: bounds must be two numbers (lowest, highest) or None, got {bounds!r}") from None
    if not 0 < (high - low) / GREY_LEVELS < float("inf"):  # a grey level may underflow to 0, or overflow
        raise ValueError(f"{caller}: bounds must be finite with the lowest first, got {bounds!r}")
    return low, high


def _read_classes(caller: str, name: str, given: Any, images: Tensor, classes: int) -> Tensor:
    try:
        value = torch.as_tensor(given)
    except (RuntimeError, TypeError, ValueError):
        raise TypeError(f"{caller}: {name} must be whole numbers, got {describe(given)}") from None
    if value.is_floating_point() or value.dtype == torch.bool or value.is_complex():
        raise TypeError(f"{caller}: {name} must be whole numbers, got {describe(value)}")
    if value.dim() == 0:
        value = value.expand(len(images))
    if value.shape != (len(images),):
        raise ValueError(f"{caller}: {name} must be one number or one for each of {len(images)} images, got "
                         f"{describe(value)}")  # fmt: skip
    if int(value.min()) < 0 or int(value.max()) >= classes:
        raise ValueError(
            f"{caller}: {name} must be from 0 to {classes - 1}, got {int(value.min())} to {int(value.max())}"
        )
    return value.to(images.device, torch.int64)


def _preprocessing_module(caller: str, preprocessing: Preprocessing) -> nn.Module:
    """The preprocessing as a module that may be switched to eval mode: a copy of the user's, or a wrapped function."""
    if isinstance(preprocessing, nn.Module):
        if preprocessing.training and any(True for _ in preprocessing.parameters()):
            raise ValueError(f"{caller}: preprocessing is in training mode; call preprocessing.eval() first")
        return replica(preprocessing)
    if not callable(preprocessing):
        raise TypeError(
            f"{caller}: preprocessing must be a module or a function of images, got {describe(preprocessing)}"
        )
    return _FunctionModule(preprocessing)


class _FunctionModule(nn.Module):
    """A function as a module."""

    def __init__(self, function: Preprocessing) -> None:
        super().__init__()
        self._function = function

    def forward(self, images: Tensor) -> Tensor:
        return self._function(images)


@dataclass(frozen=True, eq=False)
class Solved:
    """What a solver found for a group of images; `AttackResult` says what the fields are."""

    mu: Tensor
    sigma: Tensor
    towards: Tensor
    gamma: Tensor
    margin: Tensor
    feasible: Tensor
    polished: Tensor
    iterations: Tensor
    gap: Tensor


@dataclass(frozen=True, eq=False)
class Sampled:
    """What the network says to samples of the noise."""

    margins: Tensor
    """The margin of each sample, (samples, N)."""
    clipped: Tensor | None
    """The same for samples cut to the bounds; None without bounds."""
    mean_margin: Tensor
    """The margin of the mean scores, (N,)."""
    answers: Tensor
    """The class that most samples get, (N,)."""


@dataclass(frozen=True, kw_only=True)
class Attack(ABC):
    """Settings that every attack has.

    Args:
        bounds: lowest and highest value of a pixel, which M + μ keeps to; None for no such limit, as in the paper.
        layer: the ReLU that the linearization at the image keeps exactly; see `two_stage`. A network without any ReLU
            is linearized as a whole.
        rivals: without targets, how many of the best other classes are tried. The best of them is kept: the
            lowest margin within a box, the least ‖μ‖₁ + TV(μ) otherwise.
        polish: steps on the network itself, after those on the formula, which is linearized at the image. Within a box
            they are made where too few samples are fooled. For sparse and smooth noise they are always made: half as
            many at first, then so many in each of up to four turns. 0 leaves it at the formula, as in the paper.
        samples: how many noisy copies of each image the network is asked about, once as they are and once cut to the
            bounds.
        seed: seed of the samples.
        preprocessing: a module or function from the given images to what the network takes.
        memory_budget: bytes that linearized networks may take, by default half of what is free.
    """

    bounds: Bounds | None = (0.0, 1.0)
    layer: int | str = -1
    rivals: int = 3
    polish: int = 100
    samples: int = 200
    seed: int = 0
    preprocessing: Preprocessing | None = None
    memory_budget: int | None = None

    def __post_init__(self) -> None:
        caller = type(self).__name__
        object.__setattr__(self, "bounds", read_bounds(caller, self.bounds))
        for name, least in (("rivals", 1), ("polish", 0), ("samples", 2)):
            require_count(caller, name, getattr(self, name), least=least)
        require_seed(caller, self.seed)

    def __call__(self, network: Any, images: Tensor, labels: Any, targets: Any = None) -> AttackResult:
        """Make noise for each image that the network classifies as its label; the others are skipped and listed.

        Args:
            network: a module in eval mode, or an exported program.
            images: (N, C, H, W), float32 or float64, on the network's device.
            labels: the true classes, one for each image or one for all.
            targets: the classes that the images are to be taken for, one for each or one for all; None for any class
                but the label.
        """
        with torch.inference_mode(False):
            subjects, skipped = read_subjects(
                type(self).__name__, network, images, labels, targets, self.bounds, self.preprocessing
            )
            subjects.model.memory_budget = self.memory_budget
            count = len(subjects.images)
            if not count:
                return self._empty_result(subjects, skipped)
            results, size = [], self._group_size(subjects)
            with progress_bar("attacking", count) as show:
                for start in range(0, count, size):
                    show(start)
                    group = entries(subjects, torch.arange(start, min(start + size, count)))
                    results.append(self._judged(group, self._solved(group), skipped))
            return joined(results)

    @abstractmethod
    def _solved(self, subjects: Subjects) -> Solved:
        """Find the noise for a group of images."""

    @abstractmethod
    def _fooled_as_asked(self, success: Success, sampled: Sampled) -> Tensor:
        """Whether the network is fooled as the settings ask, as far as samples can tell, (N,)."""

    @property
    def grey_level(self) -> float:
        """One of 255 steps between the bounds; 1/255 without bounds."""
        low, high = self.bounds or (0.0, 1.0)
        return (high - low) / GREY_LEVELS

    def _group_size(self, subjects: Subjects) -> int:
        """How many images are attacked at a time."""
        units = len(subjects.scores[0])  # a network without a ReLU is linearized by its tangent, a row for each score
        if subjects.model.relus:
            units = subjects.model.relu(self.layer).shape.numel()
        bytes_each = COPIES * units * subjects.images[0].numel() * subjects.images.element_size()
        limit = memory_limit(subjects.images.device, self.memory_budget)
        return max(1, min(limit // bytes_each, TOGETHER.get(subjects.images.device.type, TOGETHER["cpu"])))

    def _formula(self, subjects: Subjects, free: Tensor | None = None) -> Formula:
        """The followed scores of the network linearized at the images, or its tangents if it has no ReLU.

        `free` (N, m) are the coordinates that μ may change; all by default.
        """
        images, followed, model = subjects.images, subjects.followed(self.rivals), subjects.model
        if model.relus:
            linearized = linearized_at(model, images, self.layer, followed)
        else:
            linearized = tangent_at(model, images, followed)
        return Formula(images, followed, linearized, LinearizedScores.of(linearized, images, free))

    def _sampled(self, subjects: Subjects, solved: Solved) -> Sampled:
        centres = subjects.images + solved.mu
        margins, total = [], torch.zeros_like(subjects.scores)
        answers = torch.zeros_like(subjects.scores, dtype=torch.int64)
        noise = (subjects.model.network, centres, solved.sigma, subjects.places, self.samples, self.seed)
        for scores in noisy_scores(*noise):
            total += scores.sum(0)
            margins.append(fooled_margin(scores, subjects.labels, subjects.targets))
            answers = answers + torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).sum(0)
        clipped = None
        if self.bounds is not None:
            batches = noisy_scores(*noise, self.bounds)
            clipped = torch.cat([fooled_margin(scores, subjects.labels, subjects.targets) for scores in batches])
        mean_margin = fooled_margin(total / self.samples, subjects.labels, subjects.targets)
        return Sampled(torch.cat(margins), clipped, mean_margin, answers.argmax(-1))

    def _judged(self, subjects: Subjects, solved: Solved, skipped: tuple[SkippedImage, ...]) -> AttackResult:
        sampled = self._sampled(subjects, solved)
        success = Success.of(sampled.margins < 0)
        return AttackResult(
            attack=type(self).__name__,
            places=subjects.places,
            images=subjects.images,
            labels=subjects.labels,
            targets=subjects.targets,
            skipped=skipped,
            network_margin=sampled.mean_margin,
            success=success,
            success_clipped=None if sampled.clipped is None else Success.of(sampled.clipped < 0),
            answers=sampled.answers,
            fooled=self._fooled_as_asked(success, sampled),
            bounds=self.bounds,
            zero=1e-3 * self.grey_level,
            **vars(solved),
        )

    def _empty_result(self, subjects: Subjects, skipped: tuple[SkippedImage, ...]) -> AttackResult:
        """The result where the network gets none of the images right."""
        integers = subjects.places
        reals, booleans = subjects.images.new_zeros(0), integers.bool()
        success = Success(reals.double(), self.samples)
        return AttackResult(
            attack=type(self).__name__, places=integers, images=subjects.images, labels=subjects.labels,
            targets=subjects.targets, skipped=skipped, mu=subjects.images, sigma=reals, towards=integers,
            gamma=reals, margin=reals, network_margin=reals, success=success,
            success_clipped=None if self.bounds is None else success, answers=integers, feasible=booleans,
            fooled=booleans, polished=integers, iterations=integers, gap=reals, bounds=self.bounds,
            zero=1e-3 * self.grey_level,
        )  # fmt: skip
