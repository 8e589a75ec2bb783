"""The sweep of the frontier: run every method on images of networks, and summarize its moments and times.

A `Case` is a network with its images and noise, a `Way` a method with its probes or samples, `FrontierSweep` the work,
and `Frontier` the averaged results: errors, times, and how many samples would be as accurate.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.baselines import adf, unscented
from netmoments import data
from netmoments.checks import random_seed
from netmoments.covariances import LowRank
from netmoments.data.images import evenly_spread
from netmoments.gaussian import Gaussian
from netmoments.memory import memory_limit
from netmoments.moments.methods import Method, Sampling, Sketch, method_named
from netmoments.moments.output_moments import output_moments
from netmoments.network.model import NetworkModel
from netmoments.precision import full_precision
from netmoments.progress import silence
from netmoments.propagate.layerwise import need_of
from netmoments.propagate.plan import Plan, plan_of
from netmoments.sampling.monte_carlo import relative_difference
from netmoments.sweep.item import Columns
from reproduction import figure_5
from reproduction.experiment import Settings
from reproduction.faces import faces_network
from reproduction.image_sweeps import StudiedImages
from reproduction.lenet_on_mnist import chosen_network, pooled, spread_over_test

NAME = "error-and-time"
"""The folder of the sweep; the outcome has its own, `frontier`."""
SIGMA = 0.05
"""The noise level, for pixels in [0, 1]."""
LEVELS = {"cpu": (SIGMA,), "cuda": (SIGMA, 0.005, 0.02, 0.1, 0.3)}
"""All noise levels; those other than `SIGMA` use a quarter of the images."""
MOST_SCORES = 10
"""The most scores of a gallery's network that are measured."""
LARGEST = 5
"""How many of SqueezeNet's 1000 scores are measured."""
LONG = {"cpu": 1.0, "cuda": 5.0}
"""A call that takes more seconds is not repeated to be timed."""
REPEATS = 3
PROBES = 64
"""Probes of the sketch that assists sampling."""
SEEDS = 2**31
DONE, NO_ROOM, TOO_LONG, REFUSED = "", "does not fit", "left out", "not for this network"
BESIDE = 10_000
"""The number of plain samples whose time is the unit of the others'."""
LEAST = 1e-12
"""The least error: an exact method counts as very many samples, not infinitely many."""
RIVALS = {"diagonal": adf, "unscented": unscented}
"""Methods from the literature."""
Moments = tuple[Tensor, Tensor]
"""Means and variances, (k,)."""


@dataclass(frozen=True)
class Size:
    """How much is computed for a network on a kind of device."""

    images: int
    reference: int
    """Samples of the reference, in two halves."""
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
"""On one busy CPU core a sample took 1.3 ms for LeNet, 19 ms for the face network and 150 ms for SqueezeNet."""
FEW_SIZES = {
    "LeNet": Size(2, 10_000, (16, 64), (1_000,)),
    "faces": Size(1, 500, (16,), (100,), ("unscented", "layerwise")),
    "SqueezeNet": Size(1, 100, (16,), (100,), ("two-stage", "diagonal", "unscented", "layerwise")),
}
"""Sizes of a run with few images."""
GALLERY = {"cpu": Size(1, 10_000, (16, 64), (1_000,)), "cuda": Size(2, 200_000)}
"""Sizes for each network of a gallery."""


@dataclass(frozen=True, eq=False)
class Case:
    """One network with its images, and how much of each method is run on it."""

    network: str
    studied: StudiedImages
    size: Size
    random: bool
    """Whether each image has a random covariance, as in Table 2, or independent pixels."""
    largest: int | None = None
    """How many of the largest scores are measured; None for all."""
    sigma: float = SIGMA
    in_full: bool = True
    """Whether it has a table of its own, or else one line in the table of many networks."""

    @property
    def name(self) -> str:
        return self.network if self.sigma == SIGMA else f"{self.network}, σ = {self.sigma:g}"

    def description(self) -> dict[str, Any]:
        size = self.size
        return {
            **self.studied.description(),
            "sigmas": [self.sigma],
            "reference": size.reference,
            "probes": list(size.probes),
            "assisted": list(size.assisted),
            "left_out": list(size.left_out),
            "random_covariance": self.random,
            "largest": self.largest,
        }

    def on(self, device: str) -> Case:
        return replace(self, studied=self.studied.on(device))

    def noise(self, place: int) -> Gaussian:
        """The noise at one image, as a batch of one."""
        image = self.studied.images[place : place + 1]
        if not self.random:
            return Gaussian(image, std=self.sigma, event_ndim=image.dim() - 1)
        factor = self.sigma * self.studied.factor(place).unsqueeze(0)
        return Gaussian(image, LowRank(factor), event_ndim=image.dim() - 1)

    @torch.no_grad()
    def outputs(self, place: int) -> Tensor:
        """Indices of the scores that are measured, (k,)."""
        with full_precision():
            scores = self.studied.network(self.studied.images[place : place + 1]).flatten()
        every = torch.arange(len(scores), device=scores.device)
        return every if self.largest is None else scores.topk(self.largest).indices

    def at(self, sigma: float) -> Case:
        """The case at another noise level, with a quarter of the images."""
        few = max(1, self.size.images // 4)
        studied = replace(self.studied, images=self.studied.images[:few], numbers=self.studied.numbers[:few])
        return replace(self, studied=studied, size=replace(self.size, images=few), sigma=sigma, in_full=False)

    @property
    def noise_in_words(self) -> str:
        return "a random covariance" if self.random else "independent pixels"


def cases(settings: Settings) -> list[Case]:
    """LeNet, the network for faces and SqueezeNet, with as many images as the settings allow, at most those above; then
    those of the gallery, if one is given. Every one at all noise levels."""
    made = [make(settings) for make in MADE] + list(_gallery(settings))
    first, *others = LEVELS[settings.device.type]
    return [*(replace(case, sigma=first) for case in made), *(case.at(level) for case in made for level in others)]


def _lenet(settings: Settings) -> Case:
    size = _size("LeNet", settings)
    numbers, chosen = spread_over_test(max(2, size.images), settings.data_dir)
    places = slice(size.images)
    studied = StudiedImages(chosen_network(settings), chosen.images[places], numbers[places], settings.seed)
    return Case("LeNet", studied, size, random=True)


def _faces(settings: Settings) -> Case:
    size = _size("faces", settings)
    everything = data.load("fer2013", data_dir=settings.data_dir)
    numbers = evenly_spread(len(everything), size.images)
    studied = StudiedImages(faces_network(), everything.images[numbers], numbers, settings.seed)
    return Case("faces", studied, size, random=False)


def _squeezenet(settings: Settings) -> Case:
    size = _size("SqueezeNet", settings)
    model = figure_5.chosen_model(replace(settings, model="squeezenet", weights=None))
    photographs = figure_5.natural_images(settings, model.side)
    numbers = evenly_spread(len(photographs), size.images)
    studied = StudiedImages(model.network, photographs.images[numbers], numbers, settings.seed)
    return Case("SqueezeNet", studied, size, random=False, largest=LARGEST)


def _gallery(settings: Settings) -> Iterator[Case]:
    """The networks of a folder with `networks.py` (`NETWORKS`, `load(name)`, `images_for(name, images)`), on MNIST."""
    if settings.gallery is None:
        return
    path = settings.gallery / "networks.py"
    spec = importlib.util.spec_from_file_location("gallery_networks", path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"{settings.gallery} is no gallery: a folder with networks.py was wanted")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    size = replace(GALLERY[settings.device.type], images=min(GALLERY[settings.device.type].images, settings.images))
    numbers, chosen = spread_over_test(max(2, size.images), settings.data_dir)
    numbers = numbers[: size.images]
    for name in module.NETWORKS:
        images = module.images_for(name, chosen.images[: size.images])
        network = nn.Sequential(module.load(name), nn.Flatten()).eval()  # one may return an image
        with torch.no_grad():
            scores = network(images[:1]).numel()
        studied = StudiedImages(network, images, numbers, settings.seed)
        yield Case(name, studied, size, random=False, largest=min(MOST_SCORES, scores), in_full=False)


MADE: tuple[Callable[[Settings], Case], ...] = (_lenet, _faces, _squeezenet)


def _size(name: str, settings: Settings) -> Size:
    size = FEW_SIZES[name] if settings.few else SIZES[name, settings.device.type]
    return replace(size, images=min(size.images, settings.images))


class Way(NamedTuple):
    """A method with its number of probes or samples, which is 0 if it has neither."""

    method: str
    size: int = 0

    def of_the_library(self, seed: int) -> Method:
        """The method as `output_moments` takes it, with this seed if it is random."""
        if self.method == "sketch":
            return Sketch(self.size, seed)
        if self.method == "sampling":
            return Sampling(self.size, seed=seed)
        if self.method == "assisted":
            return Sampling(self.size, control=Sketch(PROBES), seed=seed)
        return method_named(self.method, NAME)


def ways(case: Case) -> list[Way]:
    """All methods, with plain sampling up to a tenth of the reference's samples."""
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

    Methods that do not fit into memory, or were left out, have NaN. `sample_seconds` is the time of one plain sample,
    measured while sampling the reference of the same image.
    """

    name: str
    cases: Sequence[Case]
    unit: ClassVar[str] = "images"

    @property
    def configuration(self) -> dict[str, Any]:
        return {case.name: case.description() for case in self.cases}

    @property
    def counts(self) -> Sequence[int]:
        return [1 for case in self.cases for _ in case.studied.images]

    def prepare(self, device: str) -> Callable[[int], Columns]:
        sizes = [len(case.studied.images) for case in self.cases]
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
    """One image with its noise, and the scores that are measured."""

    case: Case
    place: int
    noise: Gaussian
    outputs: Tensor

    @classmethod
    def of(cls, case: Case, place: int) -> _Image:
        return cls(case, place, case.noise(place), case.outputs(place))

    def seed(self, purpose: str) -> int:
        studied = self.case.studied
        return random_seed(studied.seed, f"{NAME}, {purpose}", int(studied.numbers[self.place])) % SEEDS

    def moments(self, way: Way, purpose: str = "") -> Moments:
        """The moments by one of the ways."""
        network = self.case.studied.network
        if way.method in RIVALS:
            mean, variance = RIVALS[way.method](network, self.noise, self.outputs.unsqueeze(0))
        else:
            seed = self.seed(purpose or f"{way.method} {way.size}")
            found = output_moments(
                network, self.noise, way.of_the_library(seed), self.outputs.tolist(), check=0,
                memory_budget=self.room if way.method == "layerwise" else None,
            )  # fmt: skip
            mean, variance = found.mean, found.variance
        return mean.squeeze(0), variance.squeeze(0)

    def fits(self, way: Way) -> bool:
        """Whether a way fits into memory; layerwise knows its need in advance."""
        if way.method != "layerwise":
            return True
        need = need_of(self.plan(), self.noise.covariance.rank, self.noise.dtype.itemsize, self.plan().last.size)
        return need.bytes <= self.room

    @property
    def room(self) -> int:
        """Bytes that layerwise may take: three quarters of the free memory, in place of half of it."""
        return 3 * memory_limit(self.noise.device, None) // 2

    def plan(self) -> Plan:
        return plan_of(NetworkModel.of(self.case.studied.network, self.noise.mean, NAME))


@dataclass(frozen=True, eq=False)
class _Timed:
    """The result of one call and how long it took, or why it was not made."""

    moments: Moments
    seconds: float
    status: str = DONE


@torch.no_grad()
def rows_of(case: Case, place: int) -> Columns:
    """All rows of one image; the case is on the device."""
    image = _Image.of(case, place)
    half = case.size.reference // 2
    with silence(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of networks that a method is not made for: its errors say how little
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
    nothing = image.outputs.new_full(image.outputs.shape, np.nan, dtype=torch.float64)
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
    except (NotImplementedError, TypeError, ValueError):
        return _Timed((nothing, nothing), np.nan, REFUSED)
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
    """Examine the network and load libraries before anything is timed."""
    with silence(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image.plan()
        for way in (Way("linear"), Way("sampling", 20)):
            image.moments(way)


def _columns(
    image: _Image, way: Way, one: _Timed, reference: dict[str, Tensor], sample_seconds: float
) -> dict[str, np.ndarray]:
    count = len(image.outputs)
    values = {"mean": one.moments[0], "variance": one.moments[1], **reference}
    return {
        "network": np.full(count, image.case.name),
        "image": np.full(count, int(image.case.studied.numbers[image.place]), np.int32),
        "method": np.full(count, way.method),
        "size": np.full(count, way.size, np.int32),
        "logit": image.outputs.cpu().numpy().astype(np.int16),
        **{name: value.double().cpu().numpy() for name, value in values.items()},
        "seconds": np.full(count, one.seconds),
        "sample_seconds": np.full(count, sample_seconds),
        "status": np.full(count, one.status),
    }


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
    """The median of the ratio to the time of 10⁴ plain samples of the same image."""

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
        """The c in the law c/√N of plain sampling's error of the variance: the median over its runs.

        The reference counts as one of them, with its floor.
        """
        runs = [(point.variance_error, point.way.size) for point in self.plain]
        runs.append((self.variance_floor, self.case.size.reference))
        return float(np.median([error * size**0.5 for error, size in runs]))

    def as_good_samples(self, point: Point) -> float:
        """How many plain samples have this error of the variance."""
        return (self.of_one_sample / max(point.variance_error, LEAST)) ** 2

    def gain(self, point: Point) -> float:
        """The time of equally accurate plain samples, as a multiple of the method's."""
        return self.as_good_samples(point) * self.sample_seconds / point.seconds

    def best(self) -> list[Point]:
        """Methods that neither another method nor plain sampling beats in time and error at once; the fastest first."""
        done = sorted((point for point in self.methods if point.done), key=lambda point: point.seconds)
        kept: list[Point] = []
        for point in done:
            if self.gain(point) > 1 and all(point.variance_error < other.variance_error for other in kept):
                kept.append(point)
        return kept


def frontiers(cases: Sequence[Case], columns: Columns) -> list[Frontier]:
    """One for each network, from the rows of the sweep."""
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
