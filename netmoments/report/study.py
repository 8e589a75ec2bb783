"""What noise does to a network's answers on a set of images: what was asked, and what came out."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from netmoments.data import LabelledImages
from netmoments.moments.result import OutputMoments
from netmoments.report.attack_study import AttackStudy, NotAttacked

CALLER = "report"
RELATIVE_LEVELS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
"""Noise levels of the accuracy curve, in units of the chosen one."""


@dataclass(frozen=True)
class StudyConfig:
    """How much noise, and how it is computed and checked."""

    sigma: float
    layer: int | str = -1
    check: int = 6
    """Images that are also sampled."""
    samples: int = 2000
    seed: int = 0
    scores: int = 10
    """How many of the largest scores are followed when there are many classes."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    attacks: int = 4
    """Images that noise is made for, to fool the network."""

    def __post_init__(self) -> None:
        if not 0 < self.sigma < float("inf"):
            raise ValueError(f"{CALLER}: sigma must be a positive number (pixels are in [0, 1]), got {self.sigma}")
        if self.check < 0 or self.attacks < 0 or self.samples < 2 or self.scores < 2:
            raise ValueError(
                f"{CALLER}: check and attacks must be ≥ 0, samples ≥ 2 and scores ≥ 2, got {self.check}, "
                f"{self.attacks}, {self.samples} and {self.scores}"
            )

    @property
    def levels(self) -> tuple[float, ...]:
        return tuple(self.sigma * level for level in RELATIVE_LEVELS)


@dataclass(frozen=True, eq=False)
class Check:
    """One image sampled, beside what was computed for it."""

    image: int
    flips: Tensor
    """Sampled flip frequencies at the levels of the curve."""
    kept: Tensor
    """Sampled frequencies of what the curve counts: the right answer, or the same one where there are no labels."""
    mean: Tensor
    deviation: Tensor
    """Sampled mean and standard deviation of the scores that are shown, at the chosen noise."""
    draws: Tensor
    """A few sampled scores, (draws, k)."""
    noisy: Tensor
    """A few noisy copies of the image."""
    noisy_classes: Tensor


@dataclass(frozen=True, eq=False)
class Study:
    """Everything the report shows. N images, k scores shown, L noise levels."""

    config: StudyConfig
    images: LabelledImages
    classes: tuple[str, ...]
    scores: Tensor
    """Without noise, (N, classes)."""
    moments: OutputMoments
    """At the chosen noise, of the k scores that are largest without noise."""
    probabilities: Tensor
    """How often each of the k classes wins at the chosen noise, (N, k)."""
    flips: Tensor
    """How often another class than the predicted one wins, at each level, (N, L)."""
    right: Tensor | None
    """How often the right class wins, (N, L); None without labels."""
    checks: tuple[Check, ...]
    attacks: AttackStudy | NotAttacked | None = None
    """Noise made to fool the network, or why there is none; None where none was asked for."""

    @property
    def predicted(self) -> Tensor:
        return self.scores.argmax(1)

    @property
    def chosen_level(self) -> int:
        return RELATIVE_LEVELS.index(1.0)

    @property
    def flip(self) -> Tensor:
        """At the chosen noise, (N,)."""
        return self.flips[:, self.chosen_level]

    @property
    def ranking(self) -> Tensor:
        """The images, the most fragile first."""
        return self.flip.argsort(descending=True, stable=True)

    @property
    def clean_accuracy(self) -> float | None:
        labels = self.images.labels
        return None if labels is None else float((self.predicted == labels).double().mean())

    @property
    def curve(self) -> list[tuple[float, float]]:
        """(sigma, share of answers that are right; without labels, that stay the same), beginning without noise."""
        return self._curve_of(torch.arange(len(self.images)))

    @property
    def checked_curve(self) -> list[tuple[float, float]]:
        """The same of the images that were sampled."""
        return self._curve_of(torch.tensor([check.image for check in self.checks]))

    @property
    def sampled_curve(self) -> list[tuple[float, float, float]]:
        """(sigma, share, standard error) of the sampled images."""
        kept = torch.stack([check.kept for check in self.checks])
        error = (kept * (1 - kept) / self.config.samples).sum(0).sqrt() / len(kept)
        return list(zip(self.config.levels, kept.mean(0).tolist(), error.tolist(), strict=True))

    def _curve_of(self, images: Tensor) -> list[tuple[float, float]]:
        labels = self.images.labels
        clean = torch.ones(len(images)) if labels is None else (self.predicted == labels)[images]
        shares = self.kept[images].double().mean(0).tolist()
        return [(0.0, float(clean.double().mean())), *zip(self.config.levels, shares, strict=True)]

    @property
    def largest_check_error(self) -> float | None:
        """The largest difference between computed and sampled flip probability at the chosen noise."""
        level = self.chosen_level
        gaps = [abs(float(self.flips[c.image, level]) - float(c.flips[level])) for c in self.checks]
        return max(gaps) if gaps else None

    def rival(self, number: int) -> int:
        """The class that wins most often in place of the predicted one."""
        assert self.moments.outputs is not None
        outputs = self.moments.outputs[number]
        mine = outputs == self.predicted[number]
        others = self.probabilities[number].masked_fill(mine, -1.0)
        if float(others.max()) <= 0:
            others = self.moments.mean[number].masked_fill(mine, float("-inf"))
        return int(outputs[others.argmax()])

    @property
    def followed(self) -> int:
        """How many scores of each image were followed."""
        return self.moments.mean.shape[1]

    @property
    def kept(self) -> Tensor:
        """What the curve is the mean of, (N, L): the right answer, or the same one where there are no labels."""
        return 1 - self.flips if self.right is None else self.right

    def class_name(self, number: int) -> str:
        return self.classes[number] if self.classes else str(number)
