"""What all attacks share: reading what is given, linearizing in groups, and letting the network decide."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from netmoments.attacks.judge import Bounds, Success, noisy_scores
from netmoments.attacks.margins import fooled_margin
from netmoments.attacks.result import AttackResult, Skipped, joined
from netmoments.attacks.subjects import Preprocessing, Read, Subjects, read_bounds, read_subjects
from netmoments.linearize.memory import memory_limit
from netmoments.linearize.two_stage import two_stage
from netmoments.network.cut import find_relu
from netmoments.network.inspection import inspect
from netmoments.progress import Progress

GREY_LEVELS = 255
TOGETHER = {"cpu": 64, "cuda": 256}
"""Images that are attacked at a time, at most."""
COPIES = 3
"""Of a linearized network that an attack holds: A, Aᵀ and what making them takes."""


@dataclass(frozen=True, eq=False)
class Solved:
    """What a solver found for a group of images; see the fields of `AttackResult`."""

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
    """What the network says to samples of the noise, (samples, N): margins as they are, and cut to the bounds."""

    margins: Tensor
    clipped: Tensor | None
    mean_margin: Tensor
    """The margin of the mean scores, (N,)."""
    answers: Tensor


@dataclass(frozen=True, kw_only=True)
class Attack(ABC):
    """Settings that every attack has.

    Args:
        bounds: lowest and highest value of a pixel, which M + μ keeps; None for no such limit, as in the paper.
        layer: the ReLU that the linearization at the image keeps; see `two_stage`.
        rivals: without targets, how many of the best other classes are tried; the best of them is kept.
        polish: steps on the network itself after those on the formula, which is linearized at the image: within a box
            where too few samples are fooled, for sparse and smooth noise always; 0 for the formula alone, as in the
            paper.
        samples: noisy images that the network is asked about, for each image, twice (cut to the bounds or not).
        seed: of the samples.
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
        object.__setattr__(self, "bounds", read_bounds(self._name, self.bounds))
        for name, least in (("rivals", 1), ("polish", 0), ("samples", 2), ("seed", 0)):
            self._require_count(name, least)

    def __call__(self, network: Any, images: Tensor, labels: Any, targets: Any = None) -> AttackResult:
        """Noise for each image that the network classifies as its label; the others are reported and skipped.

        Args:
            network: a module in eval mode, or an exported program.
            images: (N, C, H, W), float32 or float64, on the network's device.
            labels: the true classes, one for each image (or one for all).
            targets: what they are to be taken for, likewise; None for anything but the label.
        """
        with torch.inference_mode(False):
            return self._attacked(network, images, labels, targets)

    def _attacked(self, network: Any, images: Tensor, labels: Any, targets: Any) -> AttackResult:
        read = read_subjects(self._name, network, images, labels, targets, self.bounds, self.preprocessing)
        skipped = self._skipped(read, labels)
        if not len(read.subjects):
            return self._nothing(read, images, skipped)
        parts = []
        size = self._group(read.subjects)
        with Progress("attacking", len(read.subjects)) as progress:
            for start in range(0, len(read.subjects), size):
                group = read.subjects.take(torch.arange(start, min(start + size, len(read.subjects))))
                parts.append(self._judged(group, self._solved(group), skipped))
                progress.advance(len(group))
        return joined(parts)

    def _near_enough(self, success: Success, share: float, errors: float) -> Tensor:
        """Whether a share of samples is what was asked for, or above, to within so many of its standard errors."""
        return success.rate >= share - errors * (share * (1 - share) / success.samples) ** 0.5

    @abstractmethod
    def _solved(self, subjects: Subjects) -> Solved:
        """The noise for a group of images."""

    @abstractmethod
    def _as_asked(self, success: Success, sampled: Sampled) -> Tensor:
        """Whether the network is fooled as was asked, as far as samples can tell, (N,)."""

    @property
    def _name(self) -> str:
        return type(self).__name__

    @property
    def grey_level(self) -> float:
        """One of 255 steps between the bounds; 1/255 without bounds."""
        low, high = self.bounds or (0.0, 1.0)
        return (high - low) / GREY_LEVELS

    def _require_count(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{self._name}: {name} must be a whole number of at least {least}, got {value!r}")

    def _require_positive(self, name: str, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ValueError(
                f"{self._name}: {name} must be a number above 0, in the units of the images, got {value!r}"
            )

    def _group(self, subjects: Subjects) -> int:
        """How many images are attacked at a time."""
        found = inspect(subjects.network, subjects.images, self._name)
        units = find_relu(found.relus, self.layer).size
        each = COPIES * units * subjects.images[0].numel() * subjects.images.element_size()
        limit = memory_limit(subjects.images.device, self.memory_budget)
        return max(1, min(limit // each, TOGETHER.get(subjects.images.device.type, TOGETHER["cpu"])))

    def _linearized(self, subjects: Subjects) -> Any:
        """At the images, the followed classes only."""
        return two_stage(
            subjects.network, subjects.images, self.layer,
            outputs=subjects.followed(self.rivals), event_ndim=3, memory_budget=self.memory_budget,
        )  # fmt: skip

    def _box(self, subjects: Subjects) -> tuple[Tensor, Tensor]:
        """What μ may be so that M + μ keeps the bounds, (N, n)."""
        flat = subjects.images.flatten(1)
        if self.bounds is None:
            return torch.full_like(flat, -torch.inf), torch.full_like(flat, torch.inf)
        return self.bounds[0] - flat, self.bounds[1] - flat

    def _sampled(self, subjects: Subjects, solved: Solved) -> Sampled:
        centres = subjects.images + solved.mu
        margins, total = [], torch.zeros_like(subjects.scores)
        answers = torch.zeros_like(subjects.scores, dtype=torch.int64)
        noise = (subjects.network, centres, solved.sigma, subjects.places, self.samples, self.seed)
        for scores in noisy_scores(*noise):
            total += scores.sum(0)
            margins.append(fooled_margin(scores, subjects.labels, subjects.targets))
            answers = answers + torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).sum(0)
        clipped = None
        if self.bounds is not None:
            parts = noisy_scores(*noise, self.bounds)
            clipped = torch.cat([fooled_margin(scores, subjects.labels, subjects.targets) for scores in parts])
        mean_margin = fooled_margin(total / self.samples, subjects.labels, subjects.targets)
        return Sampled(torch.cat(margins), clipped, mean_margin, answers.argmax(-1))

    def _judged(self, subjects: Subjects, solved: Solved, skipped: tuple[Skipped, ...]) -> AttackResult:
        sampled = self._sampled(subjects, solved)
        success = Success.of(sampled.margins < 0)
        return AttackResult(
            attack=self._name,
            places=subjects.places,
            images=subjects.images,
            labels=subjects.labels,
            targets=subjects.targets,
            skipped=skipped,
            network_margin=sampled.mean_margin,
            success=success,
            success_clipped=None if sampled.clipped is None else Success.of(sampled.clipped < 0),
            answers=sampled.answers,
            fooled=self._as_asked(success, sampled),
            bounds=self.bounds,
            zero=1e-3 * self.grey_level,
            **{name: getattr(solved, name) for name in Solved.__dataclass_fields__},
        )

    def _skipped(self, read: Read, labels: Any) -> tuple[Skipped, ...]:
        kept = set(read.subjects.places.tolist())
        given = torch.as_tensor(labels).expand(len(read.predicted)).tolist()
        pairs = enumerate(zip(given, read.predicted.tolist(), strict=True))
        return tuple(Skipped(place, label, seen) for place, (label, seen) in pairs if place not in kept)

    def _nothing(self, read: Read, images: Tensor, skipped: tuple[Skipped, ...]) -> AttackResult:
        """No image was right to begin with."""
        whole = read.subjects.places
        number, yes = images.new_zeros(0), whole.bool()
        none = Success(number.double(), number.double(), number.double(), self.samples)
        return AttackResult(
            attack=self._name, places=whole, images=read.subjects.images, labels=read.subjects.labels,
            targets=read.subjects.targets, skipped=skipped, mu=read.subjects.images, sigma=number, towards=whole,
            gamma=number, margin=number, network_margin=number, success=none,
            success_clipped=None if self.bounds is None else none, answers=whole, feasible=yes, fooled=yes,
            polished=whole, iterations=whole, gap=number, bounds=self.bounds, zero=1e-3 * self.grey_level,
        )  # fmt: skip
