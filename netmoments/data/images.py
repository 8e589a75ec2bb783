"""Images in [0, 1] with their labels and names, validated once, when they are put together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from netmoments.checks import describe

Selection = slice | Sequence[int] | Tensor | np.ndarray[Any, Any]


class Skipped(NamedTuple):
    """A file or class folder that gave no image, and why."""

    path: str
    reason: str


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """Images (N, C, H, W), float32 in [0, 1], with labels where they are known.

    Args:
        images: (N, C, H, W) float32 in [0, 1], N ≥ 1.
        labels: (N,) int64 ≥ 0, below the number of classes where `classes` is known; None if unknown.
        names: one for each image, a file name or "test/17".
        classes: class names in the order of the labels, () if unknown.
        skipped: what could not be read on the way here.

    >>> LabelledImages(torch.zeros(2, 1, 8, 8), torch.tensor([0, 1]), ("a", "b"), ("cat", "dog"))
    LabelledImages(2 of (1, 8, 8), 2 classes)
    """

    images: Tensor
    labels: Tensor | None
    names: tuple[str, ...]
    classes: tuple[str, ...]
    skipped: tuple[Skipped, ...] = ()

    def __post_init__(self) -> None:
        _require_images(self.images)
        if len(self.names) != len(self):
            raise ValueError(f"LabelledImages: need one name for each of {len(self)} images, got {len(self.names)}")
        if self.labels is not None:
            _require_labels(self.labels, len(self), self.classes)

    def __len__(self) -> int:
        return self.images.shape[0]

    def __repr__(self) -> str:
        known = f"{len(self.classes)} classes" if self.classes else "classes unknown"
        labels = known if self.labels is not None else "no labels"
        skipped = f", {len(self.skipped)} skipped" if self.skipped else ""
        return f"LabelledImages({len(self)} of {tuple(self.event_shape)}, {labels}{skipped})"

    @property
    def event_shape(self) -> torch.Size:
        """(C, H, W), the shape of one image."""
        return self.images.shape[1:]

    def take(self, selection: Selection) -> LabelledImages:
        """The images at a slice, at indices or under a boolean mask, with their labels and names."""
        indices = _indices(len(self), selection)
        return dataclasses.replace(
            self,
            images=self.images[indices],
            labels=None if self.labels is None else self.labels[indices],
            names=tuple(self.names[index] for index in indices.tolist()),
        )

    def first(self, count: int) -> LabelledImages:
        """The first `count` images; more than there are is an error."""
        if not 1 <= count <= len(self):
            raise ValueError(f"first: count must be between 1 and {len(self)}, the number of images, got {count}")
        return self.take(slice(count))


def _require_images(images: Tensor) -> None:
    if not isinstance(images, Tensor) or images.ndim != 4 or images.dtype != torch.float32:
        raise ValueError(f"LabelledImages: images must be a float32 tensor (N, C, H, W), got {describe(images)}")
    if images.numel() == 0:
        raise ValueError(f"LabelledImages: images must hold at least one image, got {describe(images)}")
    low, high = (float(value) for value in images.detach().aminmax())
    if not (low >= 0 and high <= 1):
        raise ValueError(
            f"LabelledImages: images must be in [0, 1], got values from {low:g} to {high:g}; divide 8-bit values by 255"
        )


def _require_labels(labels: Tensor, count: int, classes: tuple[str, ...]) -> None:
    if not isinstance(labels, Tensor) or labels.dtype != torch.int64 or labels.shape != (count,):
        raise ValueError(f"LabelledImages: labels must be an int64 tensor of shape ({count},), got {describe(labels)}")
    low, high = (int(value) for value in labels.aminmax())
    if low < 0:
        raise ValueError(f"LabelledImages: labels must be at least 0, got {low}; pass labels=None if they are unknown")
    if classes and high >= len(classes):
        raise ValueError(f"LabelledImages: labels must be below {len(classes)}, the number of classes, got {high}")


def evenly_spread(total: int, count: int) -> Tensor:
    """`count` of the numbers from 0 to total − 1, in order, as far apart as can be."""
    return torch.arange(count) * total // count


def _indices(count: int, selection: Selection) -> Tensor:
    if isinstance(selection, slice):
        return torch.tensor(range(count)[selection], dtype=torch.int64)
    chosen = torch.as_tensor(selection)
    if chosen.ndim != 1 or chosen.is_floating_point() or chosen.is_complex():
        raise ValueError(
            f"take: need a slice, a list of indices or a boolean mask, at least one image, got {describe(chosen)}"
        )
    if chosen.dtype == torch.bool:
        if len(chosen) != count:
            raise ValueError(f"take: a mask must have one entry for each of {count} images, got {len(chosen)}")
        return chosen.nonzero().squeeze(1).cpu()
    if bool(((chosen < -count) | (chosen >= count)).any()):
        raise IndexError(f"take: indices must be below {count}, the number of images, got {chosen.tolist()}")
    return chosen.to("cpu", torch.int64) % count
