"""How far a network is from its two-stage linearization a little away from the point, in all readings of Table 1."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from netmoments.linearize.two_stage import two_stage_value
from netmoments.precision import full_precision
from netmoments.sampling.evaluation import random_seed
from netmoments.sweep.item import Columns
from reproduction.over_images import BlocksOfImages, Subjects, same_bits
from reproduction.published import TABLE_1_NOISE

NAME = "table-1"
LEVELS = TABLE_1_NOISE
LAYERS = (1, 2, 3)
"""The paper's l: ReLUs counted from 1."""
GREY_LEVEL = 1 / 255
SCORES = ("logits", "softmax")
BLOCK = 100
"""Images of an item."""


class Reading(NamedTuple):
    """What the paper's text may mean: the law of the noise, and which image is linearized at; the other is compared."""

    law: str
    at: str


READINGS = tuple(Reading(law, at) for law in ("gaussian", "uniform") for at in ("clean", "noisy"))


@dataclass(frozen=True, eq=False)
class LinearizationErrorSweep(BlocksOfImages):
    """Every reading at every ReLU and noise level: the rows of `differences`."""

    @property
    def configuration(self) -> Mapping[str, Any]:
        return {
            **self.subjects.description(),
            "block": self.block,
            "levels": list(LEVELS),
            "layers": list(LAYERS),
            "readings": [list(reading) for reading in READINGS],
        }

    def rows_of(self, subjects: Subjects, places: range) -> Columns:
        part = slice(places.start, places.stop)
        with same_bits():
            return differences(subjects.network, subjects.images[part], subjects.numbers[part], subjects.seed)


def differences(
    network: nn.Module, images: Tensor, numbers: Tensor, seed: int, levels: tuple[float, ...] = LEVELS
) -> Columns:
    """‖network − linearization‖₂ of the scores, and of their softmax: a row for each image, reading, level and layer.

    All levels of an image scale one draw of the noise.
    """
    fields = noise_fields(numbers, images.shape[1:], seed)
    parts: list[dict[str, np.ndarray]] = []
    for (place, reading), level in itertools.product(enumerate(READINGS), levels):
        noisy = images + level * GREY_LEVEL * fields[reading.law].to(images)
        at, x = (images, noisy) if reading.at == "clean" else (noisy, images)
        with torch.no_grad(), full_precision():
            expected = network(x)
        for layer in LAYERS:
            value = two_stage_value(network, at, x, layer - 1)
            parts.append(
                {
                    "image": numbers.numpy(),
                    "reading": np.full(len(images), place),
                    "level": np.full(len(images), level),
                    "layer": np.full(len(images), layer),
                    "logits": _distance(value, expected),
                    "softmax": _distance(value.softmax(1), expected.softmax(1)),
                }
            )
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def noise_fields(numbers: Tensor, shape: torch.Size, seed: int) -> dict[str, Tensor]:
    """Noise of unit scale for each image, from its own seed: Gaussian of std 1, and uniform on ±1."""
    fields: dict[str, list[Tensor]] = {"gaussian": [], "uniform": []}
    for number in numbers.tolist():
        generator = torch.Generator().manual_seed(random_seed(seed, NAME, number))
        fields["gaussian"].append(torch.randn(shape, generator=generator))
        fields["uniform"].append(2 * torch.rand(shape, generator=generator) - 1)
    return {law: torch.stack(field) for law, field in fields.items()}


def _distance(a: Tensor, b: Tensor) -> np.ndarray:
    return (a - b).double().norm(dim=1).cpu().numpy()
