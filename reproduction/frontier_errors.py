"""What the sweep of the frontier found, averaged: errors, times, and how many samples would do as well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from netmoments.sampling.monte_carlo import relative_difference
from netmoments.sweep.item import Columns
from reproduction.frontier_cases import Case
from reproduction.frontier_sweep import DONE, Way, ways
from reproduction.sampled import pooled

BESIDE = 10_000
"""Samples whose time others are measured by."""
LEAST = 1e-12
"""Of an error: what is exact is as good as very many samples, not infinitely many."""


@dataclass(frozen=True)
class Point:
    """One method on one network, over all images and scores."""

    way: Way
    status: str
    mean_error: float
    variance_error: float
    seconds: float
    """The median over images."""
    ratio: float
    """To the time of 10⁴ plain samples of the same image, the median."""

    @property
    def done(self) -> bool:
        return self.status == DONE


@dataclass(frozen=True)
class Frontier:
    """All methods on one network."""

    case: Case
    points: tuple[Point, ...]
    mean_floor: float
    variance_floor: float
    """The error that exact values would show against the reference."""
    sample_seconds: float

    @property
    def plain(self) -> list[Point]:
        return [point for point in self.points if point.way.method == "sampling"]

    @property
    def methods(self) -> list[Point]:
        return [point for point in self.points if point.way.method != "sampling"]

    @property
    def of_one_sample(self) -> float:
        """c of the law c/√N of plain sampling's error of the variance: the median of what each run of it says.

        The reference is one of them, with its floor.
        """
        runs = [(point.variance_error, point.way.size) for point in self.plain]
        runs.append((self.variance_floor, self.case.size.reference))
        return float(np.median([error * size**0.5 for error, size in runs]))

    def as_good_samples(self, point: Point) -> float:
        """How many plain samples have this error of the variance."""
        return (self.of_one_sample / max(point.variance_error, LEAST)) ** 2

    def gain(self, point: Point) -> float:
        """The time of as many samples, in times of the method."""
        return self.as_good_samples(point) * self.sample_seconds / point.seconds

    def best(self) -> list[Point]:
        """Methods that none, nor plain sampling, beats in time and error at once; the fastest first."""
        done = sorted((point for point in self.methods if point.done), key=lambda point: point.seconds)
        kept: list[Point] = []
        for point in done:
            if self.gain(point) > 1 and all(point.variance_error < other.variance_error for other in kept):
                kept.append(point)
        return kept


def frontiers(cases: Sequence[Case], columns: Columns) -> list[Frontier]:
    return [_frontier(case, {k: v[columns["network"] == case.name] for k, v in columns.items()}) for case in cases]


def _frontier(case: Case, columns: dict[str, np.ndarray]) -> Frontier:
    one = columns["method"] == "linear"
    mean_floor, variance_floor = (
        float(_difference(columns[f"first_{moment}"][one], columns[f"second_{moment}"][one]).mean()) / 2
        for moment in ("mean", "variance")
    )
    points = tuple(_point(way, case.size.reference // 2, columns) for way in ways(case))
    return Frontier(case, points, mean_floor, variance_floor, float(np.median(columns["sample_seconds"][one])))


def _point(way: Way, half: int, columns: dict[str, np.ndarray]) -> Point:
    mine = (columns["method"] == way.method) & (columns["size"] == way.size)
    chosen = {name: torch.from_numpy(values[mine]) for name, values in columns.items() if values.dtype.kind == "f"}
    first, second = ((chosen[f"{which}_mean"], chosen[f"{which}_variance"]) for which in ("first", "second"))
    reference = pooled(first, second, half)
    statuses = columns["status"][mine]
    ratio = chosen["seconds"] / (BESIDE * chosen["sample_seconds"])
    undone = [status for status in statuses.tolist() if status != DONE]
    if undone:
        return Point(way, undone[0], np.nan, np.nan, np.nan, np.nan)
    mean, variance = (
        float(_difference(chosen[name].numpy(), wanted.numpy()).mean())
        for name, wanted in zip(("mean", "variance"), reference, strict=True)
    )
    return Point(way, DONE, mean, variance, float(chosen["seconds"].median()), float(ratio.median()))


def _difference(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return relative_difference(torch.from_numpy(first), torch.from_numpy(second)).numpy()
