"""How each network of the zoo was trained."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from netmoments.network.training.augment import Augmentation, shifted_digits, unchanged, varied_faces

Schedule = Callable[[float], float]


def constant(done: float) -> float:
    return 1.0


def one_cycle(done: float) -> float:
    """Up from 0.05 to 1 over the first fifth, then down to 0 along a cosine."""
    return 0.05 + 0.95 * done / 0.2 if done < 0.2 else 0.5 * (1 + math.cos(math.pi * (done - 0.2) / 0.8))


@dataclass(frozen=True)
class Recipe:
    """Adam with decoupled weight decay, a scheduled rate, and an average of the weights."""

    network: str
    data: str
    epochs: int
    batch: int
    rate: float
    weight_decay: float = 0.0
    schedule: Schedule = constant
    """The share of `rate` that applies when a given share of the run is over."""
    label_smoothing: float = 0.0
    averaging: float = 0.0
    """Decay of the exponential average of the weights, which is what is kept; 0 keeps the last weights."""
    augmentation: Augmentation = unchanged


RECIPES = {
    "digits": Recipe(
        "digits", "digits", epochs=60, batch=64, rate=3e-3, weight_decay=1e-3, schedule=one_cycle, label_smoothing=0.05,
        averaging=0.99, augmentation=shifted_digits,
    ),
    "lenet": Recipe(
        "lenet", "mnist", epochs=5, batch=500, rate=3e-3, weight_decay=1.0, schedule=one_cycle, averaging=0.95,
    ),
    "faces": Recipe(
        "faces", "fer2013", epochs=80, batch=256, rate=2e-3, weight_decay=5e-2, schedule=one_cycle, label_smoothing=0.1,
        averaging=0.998, augmentation=varied_faces,
    ),
}  # fmt: skip
