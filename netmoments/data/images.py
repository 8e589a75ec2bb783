"""Images with labels: the class `LabelledImages`, and what all sources of images share.

That is checks of splits, sizes and counts, the conversion of arrays to pixels in [0, 1], resizing, and the search for
images that occur in two sets.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from netmoments.checks import describe
from netmoments.files import require_room

FER2013_CLASSES = ("anger", "disgust", "fear", "happiness", "sadness", "surprise", "neutral")
FER2013_USAGES = {"train": "Training", "public-test": "PublicTest", "private-test": "PrivateTest"}
"""What fer2013.csv calls each split."""
DEFAULT_SPLIT = "test"


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
        skipped: the files and folders that gave no image.

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


def numbered(prefix: str, count: int) -> tuple[str, ...]:
    """Names for images that have none: "test/0", "test/1", …"""
    return tuple(f"{prefix}/{index}" for index in range(count))


def labelled_arrays(
    path: Path,
    pixels: np.ndarray[Any, Any],
    labels: np.ndarray[Any, Any] | None,
    names: tuple[str, ...],
    classes: tuple[str, ...],
) -> LabelledImages:
    """The images of a file, made from its arrays; an error names the file."""
    try:
        label_tensor = None if labels is None else torch.from_numpy(labels.astype(np.int64))
        return LabelledImages(images_from_array(pixels), label_tensor, names, classes)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


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
    """`count` of the numbers from 0 to `total` − 1, in order and evenly spread."""
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


def require_split(source: str, split: str, known: Iterable[str]) -> str:
    """`split` if `source` has it, else a ValueError that lists those it has."""
    known = tuple(known)
    if split not in known:
        raise ValueError(f"{source} has the splits {', '.join(known)}; got {split!r}")
    return split


def fer2013_split(source: str, split: str) -> str:
    """The full name of a split; "test" is the private test, the one the challenge was decided on."""
    return "private-test" if split == "test" else require_split(source, split, FER2013_USAGES)


def require_no_split(source: str, split: str) -> None:
    """Raise a ValueError if a split was asked for from a source that has none."""
    if split != DEFAULT_SPLIT:
        raise ValueError(
            f"{source} is not divided into splits, so it has no {split!r}; take mnist, fer2013 or digits, which are, "
            f"or leave split out"
        )


CHANNELS = (1, 3)
"""Numbers of channels that images may have."""
MOST_IMAGES = 10_000_000
"""Images that one file or folder may hold."""
MOST_PIXELS = 100_000_000
"""Pixels that one image may have."""


def require_plausible_count(count: int, source: str) -> None:
    """Require that a source does not claim to hold more images than anyone has."""
    if count > MOST_IMAGES:
        raise ValueError(f"{source} has {count:,} images, more than the {MOST_IMAGES:,} allowed; divide it")


def images_from_array(array: np.ndarray[Any, Any]) -> Tensor:
    """Float32 images (N, C, H, W) from uint8 (N, H, W) or (N, H, W, C), divided by 255, or from floats (N, [C,] H, W).

    C is 1 or 3; an array that has its channels in another dimension is an error.
    """
    eight_bit = array.dtype == np.uint8
    require_plausible_count(len(array) if array.ndim else 0, "the array")
    if not eight_bit and array.dtype.kind != "f":
        raise ValueError(
            f"images must be uint8, or floats in [0, 1], got {array.dtype}; convert them with .astype(...)"
        )
    if array.ndim == 3:
        channels_first = array[:, None]
    elif array.ndim == 4 and array.shape[3 if eight_bit else 1] in CHANNELS:
        channels_first = np.moveaxis(array, 3, 1) if eight_bit else array
    else:
        layout = "(N, H, W) or (N, H, W, C)" if eight_bit else "(N, H, W) or (N, C, H, W)"
        raise ValueError(
            f"{'uint8' if eight_bit else 'float'} images must be {layout} with C 1 or 3, got shape {array.shape}; "
            f"move the channels with np.moveaxis"
        )
    require_room(4 * array.size, "the images, as float32,")
    images = torch.from_numpy(channels_first.astype(np.float32, order="C"))
    return images.div_(255) if eight_bit else images


def require_size(size: int | None) -> None:
    """Require that `size` is None or a whole number of pixels."""
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise ValueError(f"size must be a number of pixels, 1 or more, got {size!r}")
    if size is not None and size**2 > MOST_PIXELS:
        raise ValueError(f"size must be at most {math.isqrt(MOST_PIXELS):,} pixels a side, got {size:,}")


def resize_and_crop(images: Tensor, size: int) -> Tensor:
    """Images (N, C, size, size): the shorter side resized to `size` (bicubic, antialiased), then the centre cut out."""
    height, width = images.shape[-2:]
    shorter = min(height, width)
    scaled = [round(side * size / shorter) for side in (height, width)]
    if math.prod(scaled) > MOST_PIXELS:
        raise ValueError(
            f"{height}×{width} pixels become {scaled[0]}×{scaled[1]} with {size} on the shorter side, more than the "
            f"{MOST_PIXELS:,} allowed"
        )
    if shorter != size:
        images = functional.interpolate(images, size=scaled, mode="bicubic", antialias=True).clamp(0, 1)
    top, left = ((side - size) // 2 for side in scaled)
    return images[..., top : top + size, left : left + size].contiguous()


def duplicates_of(images: Tensor, reference: Tensor) -> Tensor:
    """Which `images` occur, pixel for pixel at 8 bits, in `reference`: a boolean mask (N,).

    Both are (N, C, H, W) in [0, 1] with the same image shape. In FER2013, 568 test images also occur in the training
    set: 280 of the 3,589 of the public test and 288 of the 3,589 of the private test, which are 531 distinct images.
    """
    if images.ndim != 4 or reference.ndim != 4 or images.shape[1:] != reference.shape[1:]:
        raise ValueError(
            f"duplicates_of: images and reference must be (N, C, H, W) with one image shape, "
            f"got {describe(images)} and {describe(reference)}"
        )
    known = set(_contents(reference))
    return torch.tensor([content in known for content in _contents(images)], dtype=torch.bool, device=images.device)


def _contents(images: Tensor) -> list[bytes]:
    """The pixels of each image at 8 bits."""
    eight_bit = images.detach().mul(255).round().to("cpu", torch.uint8).numpy()
    return [image.tobytes() for image in eight_bit]


@torch.no_grad()
def correct(network: nn.Module, held_out: LabelledImages, *, device: torch.device | str = "cpu") -> Tensor:
    """Which of the images the network classifies correctly, (N,) booleans."""
    if held_out.labels is None:
        raise ValueError("accuracy: the images have no labels")
    network = network.to(device).eval()
    scores = [network(batch.to(device)).argmax(-1).cpu() for batch in held_out.images.split(1000)]
    return torch.cat(scores) == held_out.labels
