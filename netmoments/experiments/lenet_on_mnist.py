"""What Tables 2, 3 and 4 share: LeNet, MNIST's test images, their sampled moments and their computed ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from netmoments.experiments.errors import Errors
from netmoments.experiments.images import chosen_images, chosen_network
from netmoments.experiments.over_images import Subjects, cube
from netmoments.experiments.sampled import MonteCarloSweep
from netmoments.experiments.settings import Settings
from netmoments.experiments.tightness import TightnessSweep
from netmoments.sweep import Results

BLOCK = {"cpu": 1, "cuda": 25}
"""Images that make one item: a second of work or more."""
LEAST_AGAIN = 5


def subjects(settings: Settings) -> Subjects:
    """The network and the images that the settings ask for."""
    numbers, images = chosen_images(settings)
    return Subjects(chosen_network(settings), images, numbers, settings.seed)


def block(settings: Settings) -> int:
    return BLOCK[settings.device.type]


@dataclass(frozen=True, eq=False)
class Sampled:
    """Sampled means and variances of the scores, (images, noise levels, logits)."""

    mean: np.ndarray
    variance: np.ndarray
    seconds: float


def sampled(settings: Settings, on: Subjects, name: str = "monte-carlo") -> Sampled:
    """Monte Carlo for every image, once for all tables."""
    return _sampled(settings.run(MonteCarloSweep(name, on, settings.samples, block(settings))), on)


def sampled_again(settings: Settings, on: Subjects, name: str = "monte-carlo-again") -> Sampled:
    """A second, independent run on every tenth image: how far sampling is from itself. NaN for the others."""
    count = min(len(on.images), max(LEAST_AGAIN, len(on.images) // 10))
    chosen = (torch.arange(count) * len(on.images)) // count
    few = Subjects(on.network, on.images[chosen], on.numbers[chosen], on.seed)
    return _sampled(settings.run(MonteCarloSweep(name, few, settings.samples, block(settings))), on)


def _sampled(found: Results, on: Subjects) -> Sampled:
    columns = found.columns
    return Sampled(cube(columns, "mean", on.numbers), cube(columns, "variance", on.numbers), found.seconds)


@dataclass(frozen=True, eq=False)
class Tightness:
    """Errors of every computed quantity against sampling, the values themselves, and the time they took."""

    errors: dict[str, Errors]
    values: dict[str, np.ndarray]
    seconds: float


VARIANCES = ("variance", "series", "theorem_2", "authors_old", "delta_variance")
MEANS = ("mean", "delta_mean")


def tightness(settings: Settings, on: Subjects, against: Sampled, name: str = "tightness") -> Tightness:
    """Two-stage linearization at each image, l = 3, and everything the tables compare."""
    found = settings.run(TightnessSweep(name, on, block(settings)))
    values = {column: cube(found.columns, column, on.numbers) for column in (*MEANS, *VARIANCES)}
    errors = {column: Errors.between(values[column], against.mean) for column in MEANS}
    errors |= {column: Errors.between(values[column], against.variance) for column in VARIANCES}
    return Tightness(errors, values, found.seconds)


def floor(again: Sampled, first: Sampled) -> dict[str, Errors]:
    """How far two runs of the sampling are from each other, for mean and variance."""
    return {
        "mean": Errors.between(first.mean, again.mean),
        "variance": Errors.between(first.variance, again.variance),
    }
