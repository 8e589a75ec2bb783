"""What Tables 2, 3 and 4 share: LeNet, MNIST's test images, their sampled moments and their computed ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from netmoments.data.images import evenly_spread
from reproduction.errors import Errors
from reproduction.images import chosen_images, chosen_network
from reproduction.over_images import Subjects, cube
from reproduction.sampled import MonteCarloSweep
from reproduction.settings import Settings
from reproduction.tightness import TightnessSweep

BLOCK = {"cpu": 1, "cuda": 25}
"""Images that make one item: a second of work or more."""
LEAST_AGAIN = 5
SAMPLED, SAMPLED_AGAIN, COMPUTED = "monte-carlo", "monte-carlo-again", "tightness"
"""The folders of the sweeps."""


def subjects(settings: Settings) -> Subjects:
    """The network and the images that the settings ask for."""
    numbers, images = chosen_images(settings)
    return Subjects(chosen_network(settings), images, numbers, settings.seed)


def shared_subjects(settings: Settings) -> Subjects:
    """The same for the tables that share their sweeps, of which all that are in the folder must be theirs."""
    on = subjects(settings)
    everywhere, few = torch.arange(len(on.images)), _every_tenth(on)
    settings.check(
        _sampling(settings, on, everywhere, SAMPLED),
        _sampling(settings, on, few, SAMPLED_AGAIN),
        TightnessSweep(COMPUTED, on, block(settings)),
    )
    return on


def block(settings: Settings) -> int:
    return BLOCK[settings.device.type]


@dataclass(frozen=True, eq=False)
class Sampled:
    """Sampled means and variances of the scores, (images, noise levels, logits)."""

    places: np.ndarray
    """Which of the subjects' images."""
    mean: np.ndarray
    variance: np.ndarray
    seconds: float


def sampled(settings: Settings, on: Subjects, name: str = SAMPLED) -> Sampled:
    """Monte Carlo for every image, once for all tables."""
    return _sampled(settings, on, torch.arange(len(on.images)), name)


def sampled_again(settings: Settings, on: Subjects, name: str = SAMPLED_AGAIN) -> Sampled:
    """A second, independent run on every tenth image: how far sampling is from itself."""
    return _sampled(settings, on, _every_tenth(on), name)


def _every_tenth(on: Subjects) -> Tensor:
    count = min(len(on.images), max(LEAST_AGAIN, len(on.images) // 10))
    return evenly_spread(len(on.images), count)


def _sampling(settings: Settings, on: Subjects, places: Tensor, name: str) -> MonteCarloSweep:
    chosen = Subjects(on.network, on.images[places], on.numbers[places], on.seed)
    return MonteCarloSweep(name, chosen, block(settings), settings.samples)


def _sampled(settings: Settings, on: Subjects, places: Tensor, name: str) -> Sampled:
    found = settings.run(_sampling(settings, on, places, name))
    mean, variance = (cube(found.columns, column, on.numbers[places]) for column in ("mean", "variance"))
    return Sampled(places.numpy(), mean, variance, found.seconds)


@dataclass(frozen=True, eq=False)
class Tightness:
    """Errors of every computed quantity against sampling, the values themselves, and the time they took."""

    errors: dict[str, Errors]
    values: dict[str, np.ndarray]
    seconds: float


VARIANCES = ("variance", "series", "theorem_2", "authors_old", "delta_variance")
MEANS = ("mean", "delta_mean")


def tightness(settings: Settings, on: Subjects, against: Sampled, name: str = COMPUTED) -> Tightness:
    """Two-stage linearization at each image, l = 3, and everything the tables compare."""
    found = settings.run(TightnessSweep(name, on, block(settings)))
    values = {column: cube(found.columns, column, on.numbers) for column in (*MEANS, *VARIANCES)}
    errors = {column: Errors.between(values[column], against.mean) for column in MEANS}
    errors |= {column: Errors.between(values[column], against.variance) for column in VARIANCES}
    return Tightness(errors, values, found.seconds)


def floor(first: Sampled, again: Sampled) -> dict[str, Errors]:
    """How far two runs of the sampling are from each other, for mean and variance."""
    return {
        "mean": Errors.between(first.mean[again.places], again.mean),
        "variance": Errors.between(first.variance[again.places], again.variance),
    }
