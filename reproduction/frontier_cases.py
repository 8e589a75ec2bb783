"""The networks, images and noise on which all methods are compared by error and time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from netmoments import data
from netmoments.covariances import LowRank
from netmoments.data.images import evenly_spread
from netmoments.gaussian import Gaussian
from netmoments.precision import full_precision
from reproduction import figure_5
from reproduction.attacked_faces import faces_network
from reproduction.images import chosen_network, spread_over_test
from reproduction.over_images import Subjects
from reproduction.settings import Settings

SIGMA = 0.05
"""Of pixels in [0, 1]."""
LARGEST = 5
"""Scores of SqueezeNet that are looked at, of 1000."""


@dataclass(frozen=True)
class Size:
    """How much is done with a network on a kind of device."""

    images: int
    reference: int
    """Samples, in two halves."""
    probes: tuple[int, ...] = (16, 64, 256)
    assisted: tuple[int, ...] = (1_000, 10_000)
    left_out: tuple[str, ...] = ()
    """Methods that would take too long."""


SIZES = {
    ("LeNet", "cpu"): Size(4, 100_000),
    ("faces", "cpu"): Size(2, 5_000, assisted=(1_000,), left_out=("unscented",)),
    ("SqueezeNet", "cpu"): Size(1, 1_000, (16, 64), (1_000,), ("diagonal", "unscented")),
    ("LeNet", "cuda"): Size(8, 1_000_000),
    ("faces", "cuda"): Size(4, 200_000),
    ("SqueezeNet", "cuda"): Size(2, 100_000, left_out=("unscented",)),
}
"""On one busy CPU core a sample took LeNet 1.3 ms, the network for faces 19 ms, SqueezeNet 150 ms."""


@dataclass(frozen=True, eq=False)
class Case:
    """One network with its images, and how much of what is done with it."""

    name: str
    subjects: Subjects
    size: Size
    random: bool
    """Whether each image has a random covariance, as in Table 2, or independent pixels."""
    largest: int | None = None
    """How many of the largest scores; None for all."""

    def description(self) -> dict[str, Any]:
        size = self.size
        return {
            **self.subjects.description(),
            "sigmas": [SIGMA],
            "reference": size.reference,
            "probes": list(size.probes),
            "assisted": list(size.assisted),
            "left_out": list(size.left_out),
            "random_covariance": self.random,
            "largest": self.largest,
        }

    def on(self, device: str) -> Case:
        return replace(self, subjects=self.subjects.on(device))

    def noise(self, place: int) -> Gaussian:
        """At one image, as a batch of one."""
        image = self.subjects.images[place : place + 1]
        if not self.random:
            return Gaussian(image, std=SIGMA, event_ndim=image.dim() - 1)
        factor = SIGMA * self.subjects.factor(place).unsqueeze(0)
        return Gaussian(image, LowRank(factor), event_ndim=image.dim() - 1)

    @torch.no_grad()
    def rows(self, place: int) -> Tensor:
        """Which scores, (k,)."""
        with full_precision():
            scores = self.subjects.network(self.subjects.images[place : place + 1]).squeeze(0)
        every = torch.arange(len(scores), device=scores.device)
        return every if self.largest is None else scores.topk(self.largest).indices

    @property
    def noise_in_words(self) -> str:
        return "a random covariance" if self.random else "independent pixels"


def cases(settings: Settings) -> list[Case]:
    """LeNet, the network for faces and SqueezeNet, with as many images as the settings allow, at most those above."""
    return [made(settings) for made in MADE]


def _lenet(settings: Settings) -> Case:
    size = _size("LeNet", settings)
    numbers, chosen = spread_over_test(max(2, size.images), settings.data_dir)
    places = slice(size.images)
    on = Subjects(chosen_network(settings), chosen.images[places], numbers[places], settings.seed)
    return Case("LeNet", on, size, random=True)


def _faces(settings: Settings) -> Case:
    size = _size("faces", settings)
    everything = data.load("fer2013", data_dir=settings.data_dir)
    numbers = evenly_spread(len(everything), size.images)
    on = Subjects(faces_network(), everything.images[numbers], numbers, settings.seed)
    return Case("faces", on, size, random=False)


def _squeezenet(settings: Settings) -> Case:
    size = _size("SqueezeNet", settings)
    model = figure_5.chosen_model(replace(settings, model="squeezenet", weights=None))
    photographs = figure_5.natural_images(settings, model.side)
    numbers = evenly_spread(len(photographs), size.images)
    on = Subjects(model.network, photographs.images[numbers], numbers, settings.seed)
    return Case("SqueezeNet", on, size, random=False, largest=LARGEST)


MADE: tuple[Callable[[Settings], Case], ...] = (_lenet, _faces, _squeezenet)


def _size(name: str, settings: Settings) -> Size:
    size = SIZES[name, settings.device.type]
    return replace(size, images=min(size.images, settings.images))
