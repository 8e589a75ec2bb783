"""What is attacked: a network, images, labels and targets, read and checked once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from netmoments.attacks.judge import Bounds
from netmoments.attacks.margins import Contest
from netmoments.checks import describe, require_finite, require_float_tensor
from netmoments.network.inspection import as_network, inspect
from netmoments.precision import full_precision

FOLLOWED = 20
"""Of more classes than this, only the label, the target and the best scores are followed by the formula."""
TOLERANCE = 1e-6
"""By which images may leave the bounds."""

Preprocessing = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Subjects:
    """A network and correctly classified images (N, C, H, W) of it; `targets` (N,) or None."""

    network: nn.Module
    images: Tensor
    labels: Tensor
    targets: Tensor | None
    scores: Tensor
    """(N, d), without noise."""
    places: Tensor
    """Which of the given images they are, (N,)."""

    def take(self, index: Tensor) -> Subjects:
        targets = None if self.targets is None else self.targets[index]
        images, labels, scores, places = (x[index] for x in (self.images, self.labels, self.scores, self.places))
        return Subjects(self.network, images, labels, targets, scores, places)

    def __len__(self) -> int:
        return len(self.images)

    @property
    def shape(self) -> tuple[int, int, int]:
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    def followed(self, rivals: int) -> Tensor:
        """The classes whose expected scores are computed, (N, F).

        All of them where they are few; else without targets the label and the best rivals, with them the label, the
        target and the best of the rest.
        """
        classes = self.scores.shape[1]
        if classes <= FOLLOWED:
            return torch.arange(classes, device=self.scores.device).expand(len(self), -1)
        if self.targets is None:
            return torch.cat([self.labels.unsqueeze(1), self.rivals(rivals)], 1)
        first = torch.stack([self.labels, self.targets], 1)
        rest = self.scores.scatter(1, first, -torch.inf).topk(FOLLOWED - 2, dim=1).indices
        return torch.cat([first, rest], 1)

    def rivals(self, count: int) -> Tensor:
        """The classes with the best scores but the label, (N, R)."""
        others = self.scores.scatter(1, self.labels.unsqueeze(1), -torch.inf)
        return others.topk(min(count, self.scores.shape[1] - 1), dim=1).indices

    def contests(self, rivals: int) -> Contest:
        """Which score must fall below which.

        Without targets R problems of one margin, the label against each of the best rivals; with them one problem, the
        target against every other class that is followed.
        """
        if self.targets is None:
            smaller = self.rivals(rivals).unsqueeze(2)
            return Contest(self.labels.reshape(-1, 1, 1).expand_as(smaller), smaller)
        followed = self.followed(rivals)
        others = followed[followed != self.targets.unsqueeze(1)].reshape(len(self), 1, -1)
        return Contest(others, self.targets.reshape(-1, 1, 1).expand_as(others))


@dataclass(frozen=True, eq=False)
class Read:
    """The subjects that can be attacked, and what the network says of every image."""

    subjects: Subjects
    predicted: Tensor


def read_subjects(
    caller: str,
    network: Any,
    images: Any,
    labels: Any,
    targets: Any,
    bounds: Bounds | None,
    preprocessing: Preprocessing | None,
) -> Read:
    """The arguments of an attack, checked; images that the network gets wrong are left out."""
    images = _read_images(caller, images, bounds)
    network = as_network(network, caller)
    whole = network if preprocessing is None else nn.Sequential(_module(preprocessing), network).eval()
    inspect(whole, images, caller)
    with torch.no_grad(), full_precision():
        scores = torch.cat([whole(part) for part in images.split(256)])
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
    predicted = scores.argmax(1)
    everyone = Subjects(whole, images, labels, targets, scores, torch.arange(len(images), device=images.device))
    return Read(everyone.take((predicted == labels).nonzero().flatten()), predicted)


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
    """The two ends, or None."""
    if bounds is None:
        return None
    try:
        low, high = (float(end) for end in bounds)
    except (TypeError, ValueError):
        raise ValueError(f"{caller}: bounds must be two numbers (lowest, highest) or None, got {bounds!r}") from None
    if not low < high or abs(low) == float("inf") or abs(high) == float("inf"):
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


def _module(preprocessing: Preprocessing) -> nn.Module:
    if isinstance(preprocessing, nn.Module):
        if preprocessing.training and any(True for _ in preprocessing.parameters()):
            raise ValueError("preprocessing is in training mode; call preprocessing.eval() first")
        return preprocessing
    if not callable(preprocessing):
        raise TypeError(f"preprocessing must be a module or a function of images, got {describe(preprocessing)}")
    return _Called(preprocessing)


class _Called(nn.Module):
    """A function as a module."""

    def __init__(self, function: Preprocessing) -> None:
        super().__init__()
        self._function = function

    def forward(self, images: Tensor) -> Tensor:
        return self._function(images)
