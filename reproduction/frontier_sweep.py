"""The sweep of the frontier: every method on one image of one network, its moments and the time it takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.baselines import diagonal, unscented
from netmoments.gaussian import Gaussian
from netmoments.memory import memory_limit
from netmoments.moments.methods import plan_of
from netmoments.moments.output_moments import output_moments
from netmoments.progress import silence
from netmoments.propagate.layerwise import layerwise_need
from netmoments.sampling.evaluation import random_seed
from netmoments.sweep.item import Columns
from reproduction.frontier_cases import Case

NAME = "error-and-time"
"""The folder: the outcome has its own, `frontier`."""
LONG = {"cpu": 1.0, "cuda": 5.0}
"""Seconds: what takes longer is not run again to be timed."""
REPEATS = 3
PROBES = 64
"""Of the sketch that assists sampling."""
SEEDS = 2**31
DONE, NO_ROOM, TOO_LONG = "", "does not fit", "left out"
Moments = tuple[Tensor, Tensor]
"""Means and variances, (k,)."""


class Way(NamedTuple):
    """A method with its probes or samples, 0 for those that have neither."""

    method: str
    size: int = 0


def ways(case: Case) -> list[Way]:
    """All methods, and plain sampling up to a tenth of the reference."""
    plain = [10**power for power in range(2, 7) if 10 ** (power + 1) <= case.size.reference]
    return [
        *map(Way, ("linear", "two-stage", "diagonal", "unscented", "layerwise")),
        *(Way("sketch", probes) for probes in case.size.probes),
        *(Way("assisted", samples) for samples in case.size.assisted),
        *(Way("sampling", samples) for samples in plain),
    ]


@dataclass(frozen=True, eq=False)
class FrontierSweep:
    """Rows: network, image, method, size, logit, mean, variance, seconds and status, and the reference's two halves.

    Methods that do not fit the memory, or were left out, have NaN. `sample_seconds` is what one plain sample takes,
    from the reference of the same image.
    """

    name: str
    cases: Sequence[Case]
    unit: ClassVar[str] = "images"

    @property
    def configuration(self) -> dict[str, Any]:
        return {case.name: case.description() for case in self.cases}

    @property
    def counts(self) -> Sequence[int]:
        return [1 for case in self.cases for _ in case.subjects.images]

    def prepare(self, device: str) -> Callable[[int], Columns]:
        sizes = [len(case.subjects.images) for case in self.cases]
        items = [(number, place) for number, size in enumerate(sizes) for place in range(size)]
        ready: dict[int, Case] = {}

        def work(item: int) -> Columns:
            number, place = items[item]
            if number not in ready:
                ready.clear()
                ready[number] = self.cases[number].on(device)
                _warmed(_Image.of(ready[number], place))
            return rows_of(ready[number], place)

        return work


@dataclass(frozen=True, eq=False)
class _Image:
    """One image with its noise, and the scores that are looked at."""

    case: Case
    place: int
    noise: Gaussian
    rows: Tensor

    @classmethod
    def of(cls, case: Case, place: int) -> _Image:
        return cls(case, place, case.noise(place), case.rows(place))

    def seed(self, purpose: str) -> int:
        subjects = self.case.subjects
        return random_seed(subjects.seed, f"{NAME}, {purpose}", int(subjects.numbers[self.place])) % SEEDS

    def moments(self, way: Way, purpose: str = "") -> Moments:
        """By one of the ways."""
        network, noise, rows = self.case.subjects.network, self.noise, self.rows
        if way.method in ("diagonal", "unscented"):
            covariance = noise.covariance.entries(0)
            if way.method == "diagonal":
                return diagonal(plan_of(network, noise.mean, NAME), noise.mean, covariance, rows)
            mean, every = unscented(network, noise.mean, covariance, rows)
            return mean, every.diagonal()
        options: dict[str, Any] = {"seed": self.seed(purpose or f"{way.method} {way.size}")}
        if way.method == "sketch":
            options["probes"] = way.size
        if way.method in ("sampling", "assisted"):
            options["samples"] = way.size
        if way.method == "assisted":
            options |= {"control": "sketch", "probes": PROBES}
        method = "sampling" if way.method == "assisted" else way.method
        found = output_moments(network, noise, method, rows.tolist(), **options)
        return found.mean.squeeze(0), found.variance.squeeze(0)

    def fits(self, way: Way) -> bool:
        """Layer by layer needs memory that is known beforehand."""
        if way.method != "layerwise":
            return True
        noise = self.noise
        plan = plan_of(self.case.subjects.network, noise.mean, NAME)
        need = layerwise_need(plan, noise.covariance.rank, noise.dtype.itemsize)
        return need.bytes <= memory_limit(noise.device, None)


@dataclass(frozen=True, eq=False)
class _Timed:
    moments: Moments
    seconds: float
    status: str = field(default=DONE)


@torch.no_grad()
def rows_of(case: Case, place: int) -> Columns:
    """All rows of one image; the case is on the device."""
    image = _Image.of(case, place)
    half = case.size.reference // 2
    with silence():
        first, second = (
            _once(image, Way("sampling", half), f"reference, {which} half") for which in ("first", "second")
        )
        found = {way: _found(image, way) for way in ways(case)}
    each = (first.seconds + second.seconds) / (2 * half)
    reference = {
        f"{name}_{moment}": value
        for name, one in (("first", first), ("second", second))
        for moment, value in zip(("mean", "variance"), one.moments, strict=True)
    }
    parts = [_columns(image, way, one, reference, each) for way, one in found.items()]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _found(image: _Image, way: Way) -> _Timed:
    nothing = image.rows.new_full(image.rows.shape, np.nan, dtype=torch.float64)
    if way.method in image.case.size.left_out:
        return _Timed((nothing, nothing), np.nan, TOO_LONG)
    if not image.fits(way):
        return _Timed((nothing, nothing), np.nan, NO_ROOM)
    try:
        first = _once(image, way)
        if first.seconds > LONG[image.noise.device.type]:
            return first
        again = [_once(image, way).seconds for _ in range(REPEATS)]
    except torch.OutOfMemoryError:
        return _Timed((nothing, nothing), np.nan, NO_ROOM)
    return _Timed(first.moments, statistics.median(again))


def _once(image: _Image, way: Way, purpose: str = "") -> _Timed:
    _finished(image.noise.device)
    start = time.perf_counter()
    moments = image.moments(way, purpose)
    _finished(image.noise.device)
    return _Timed(moments, time.perf_counter() - start)


def _finished(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()
def _warmed(image: _Image) -> None:
    """A network is looked into, and libraries are loaded, before anything is timed."""
    with silence():
        plan_of(image.case.subjects.network, image.noise.mean, NAME)
        for way in (Way("linear"), Way("sampling", 20)):
            image.moments(way)


def _columns(
    image: _Image, way: Way, one: _Timed, reference: dict[str, Tensor], sample_seconds: float
) -> dict[str, np.ndarray]:
    count = len(image.rows)
    values = {"mean": one.moments[0], "variance": one.moments[1], **reference}
    return {
        "network": np.full(count, image.case.name),
        "image": np.full(count, int(image.case.subjects.numbers[image.place]), np.int32),
        "method": np.full(count, way.method),
        "size": np.full(count, way.size, np.int32),
        "logit": image.rows.cpu().numpy().astype(np.int16),
        **{name: value.double().cpu().numpy() for name, value in values.items()},
        "seconds": np.full(count, one.seconds),
        "sample_seconds": np.full(count, sample_seconds),
        "status": np.full(count, one.status),
    }
