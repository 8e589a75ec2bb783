"""Every method beside each other on LeNet: fewer images than Table 2's, with a reference of many more samples.

The errors of the layer by layer propagation are below what Table 2's 10⁴ samples can tell, so these have their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from netmoments.covariances import LowRank
from netmoments.data.images import evenly_spread
from netmoments.gaussian import Gaussian
from netmoments.moments.output_moments import output_moments
from netmoments.sampling.evaluation import random_seed
from netmoments.sweep.item import Columns
from reproduction.errors import Errors
from reproduction.over_images import SIGMAS, BlocksOfImages, Subjects, cube, rows, same_bits
from reproduction.sampled import sampled_moments
from reproduction.settings import Settings

NAME = "tighter"
MOST_IMAGES = 100
ONE_IN = {"cpu": 50, "cuda": 1}
"""Of Table 2's images, one in so many: an image takes minutes on a CPU, seconds on a GPU."""
REFERENCE = {"cpu": 100_000, "cuda": 1_000_000}
PLAIN, ASSISTED, PROBES = 10_000, 1_000, 64
SEEDS = 2**31
METHODS = ("two_stage", "delta", "sketch", "assisted", "layerwise", "plain")
MOMENTS = ("mean", "variance")


@dataclass(frozen=True, eq=False)
class TighterSweep(BlocksOfImages):
    """Rows: image, sigma, logit, and mean and variance (`sketch_mean`, …) of each of `METHODS` and of the reference.

    The reference is two independent halves, `first_…` and `second_…`, and all of its samples, `reference_…`.
    """

    reference: int
    plain: int = PLAIN
    assisted: int = ASSISTED
    probes: int = PROBES

    @property
    def configuration(self) -> dict[str, Any]:
        return {
            **self.subjects.description(),
            "block": self.block,
            "reference": self.reference,
            "plain": self.plain,
            "assisted": self.assisted,
            "probes": self.probes,
        }

    def rows_of(self, subjects: Subjects, places: range) -> Columns:
        with same_bits():
            found = [self.moments_at(subjects, place) for place in places]
        numbers = subjects.numbers[places.start : places.stop].tolist()
        return rows(numbers, {name: torch.stack([one[name] for one in found]) for name in found[0]})

    @torch.no_grad()
    def moments_at(self, subjects: Subjects, place: int) -> dict[str, Tensor]:
        """All values for one image, (levels, scores)."""
        network, image, factor = subjects.network, subjects.images[place], subjects.factor(place)
        factors = torch.stack([sigma * factor for sigma in SIGMAS])
        noise = Gaussian(image.expand(len(SIGMAS), *image.shape), LowRank(factors), event_ndim=image.dim())

        def sampled(purpose: str, samples: int) -> tuple[Tensor, Tensor]:
            return sampled_moments(
                network, image, factor, samples, subjects.generator(f"{self.name}, {purpose}", place)
            )

        def by(method: str, purpose: str = "", **options: Any) -> tuple[Tensor, Tensor]:
            own = f"{self.name}, {purpose or method}"
            seed = random_seed(subjects.seed, own, int(subjects.numbers[place])) % SEEDS
            moments = output_moments(network, noise, method, seed=seed, **options)
            return moments.mean, moments.variance

        halves = {"control": "sketch", "samples": self.reference // 2, "probes": self.probes}
        first, second = (by("sampling", f"{which} half", **halves) for which in ("first", "second"))
        found = {
            "first": first,
            "second": second,
            "reference": averaged(first, second),
            "plain": sampled("plain", self.plain),
            "two_stage": by("two-stage"),
            "delta": by("linear"),
            "sketch": by("sketch", probes=self.probes),
            "assisted": by("sampling", control="sketch", samples=self.assisted, probes=self.probes),
            "layerwise": by("layerwise"),
        }
        return {
            f"{name}_{moment}": value.double()
            for name, pair in found.items()
            for moment, value in zip(MOMENTS, pair, strict=True)
        }


def averaged(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and variance from two independent, unbiased estimates of each."""
    return (first[0] + second[0]) / 2, (first[1] + second[1]) / 2


@dataclass(frozen=True, eq=False)
class Tighter:
    """Errors against the reference, by moment and method, how far its halves are apart, and the time it took."""

    errors: dict[str, dict[str, Errors]]
    halves: dict[str, Errors]
    reference: int
    seconds: float

    @property
    def images(self) -> int:
        return self.halves["mean"].images

    def floor(self, moment: str, level: int) -> float:
        """The error that exact values would show: the mean of two halves is off by half of what they are apart."""
        return self.halves[moment].average(level) / 2


def sweep_of(settings: Settings, on: Subjects) -> TighterSweep | None:
    """Over some of the subjects' images, evenly spread; None where that would be none."""
    kind = settings.device.type
    count = min(MOST_IMAGES, len(on.images) // ONE_IN[kind])
    if count == 0:
        return None
    places = evenly_spread(len(on.images), count)
    chosen = Subjects(on.network, on.images[places], on.numbers[places], on.seed)
    return TighterSweep(NAME, chosen, 1, REFERENCE[kind])


def tighter(settings: Settings, sweep: TighterSweep) -> Tighter:
    """Run what is missing, and take the errors."""
    found = settings.run(sweep)

    def values(name: str, moment: str) -> np.ndarray:
        return cube(found.columns, f"{name}_{moment}", sweep.subjects.numbers)

    errors = {
        moment: {name: Errors.between(values(name, moment), values("reference", moment)) for name in METHODS}
        for moment in MOMENTS
    }
    halves = {moment: Errors.between(values("first", moment), values("second", moment)) for moment in MOMENTS}
    return Tighter(errors, halves, sweep.reference, found.seconds)
