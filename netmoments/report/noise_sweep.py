"""A noise study of many images in parts, which are kept on disk and resumed: on every GPU here or on a Ray cluster.

`study_in_parts` runs three sweeps: samples of all images (`SurveySweep`), the flip probabilities of those nearest to
flipping (`RareSweep`), and the nearest flips of those shown first (`NearestSweep`). Every image has random numbers of
its own, so results do not depend on the images computed together or on how many devices of one kind compute them,
except for rounding.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from netmoments.data.images import LabelledImages
from netmoments.gaussian import Gaussian
from netmoments.network.model import NetworkModel, network_of
from netmoments.network.weights import digest_of
from netmoments.report.arguments import StudyConfig, Subject, with_classes_of
from netmoments.report.noise_study import (
    CALLER,
    FlippedImage,
    Level,
    Refined,
    Study,
    TimePlan,
    attacks_on,
    classifier,
    examples_of,
    nearest_candidates,
    nearest_of,
    rare_candidates,
    refined_together,
    survey_of,
    with_refined,
)
from netmoments.sweep.item import Columns, Engine
from netmoments.sweep.local import LocalEngine
from netmoments.sweep.on_ray import RayEngine
from netmoments.sweep.run import run_sweep

PART, RARE_PART = 64, 8
"""Images in a part: of the survey, and of the two other sweeps."""
PER_SCORE = ("outputs", "mean_error", "deviation_error")
"""Fields of `Scores`, with a column for each of the k scores: outputs_0, …"""
PER_LEVEL = ("samples", "flips", "right", "rivals", "lead")
"""Fields of a `Level`, with a column for each level: samples_at_0, …"""
PER_LEVEL_AND_SCORE = ("shares", "mean", "deviation")
"""Fields of a `Level`, with a column for each level and score: shares_at_0_0, …"""


def engine_named(name: str, device: torch.device, address: str | None) -> Engine:
    """The engine that `--engine` means: `local`, all GPUs here unless the device is a single one; `ray`, a cluster."""
    if name == "ray":
        return RayEngine(device.type, address)
    if address is not None:
        raise ValueError(f"--address {address} is for --engine ray")
    if device.type == "cuda" and device.index is None:
        return LocalEngine([f"cuda:{index}" for index in range(torch.cuda.device_count())])
    return LocalEngine([str(device)])


def study_in_parts(subject: Subject, config: StudyConfig, classes: tuple[str, ...], out: Path, engine: Engine) -> Study:
    """A `Study` like that of `study`, without a limit of time; parts are kept in `out`, where a second call goes on."""
    start = time.perf_counter()
    if config.seconds is not None:
        raise ValueError(f"{CALLER}: with --engine there is no limit of time; leave out --seconds, work can be resumed")
    if config.method != "auto":
        raise ValueError(f"{CALLER}: with --engine scores are those of the samples; leave out --method")
    network, images = subject.load()
    digests = Digests.of(subject, network, images)
    network = network_of(network.to(config.device), CALLER)
    model = classifier(network, images.images[:1].to(config.device), config)
    images, names = with_classes_of(images, classes, model.outputs, CALLER)
    survey = SurveySweep(subject, config, digests, len(images))
    so_far = survey.study(run_sweep(survey, out, engine).columns, images, names, model.outputs)
    if numbers := rare_candidates(so_far):
        rare = RareSweep(subject, config, digests, tuple(numbers), tuple(so_far.predicted[numbers].tolist()))
        so_far = with_refined(so_far, rare.refined(run_sweep(rare, out, engine).columns))
    noise = config.noise(images.images.to(config.device))
    so_far = dataclasses.replace(so_far, examples=examples_of(model, noise, so_far))
    if numbers := nearest_candidates(so_far):
        sweep = NearestSweep(subject, config, digests, tuple(numbers), tuple(so_far.predicted[numbers].tolist()))
        nearest = sweep.nearest(run_sweep(sweep, out, engine).columns, images.event_shape)
        so_far = dataclasses.replace(so_far, nearest=nearest)
    return dataclasses.replace(so_far, attacks=attacks_on(network, so_far), seconds=time.perf_counter() - start)


@dataclass(frozen=True)
class Digests:
    """What a report is of, whatever the files are called: parts of another network or of other images are refused."""

    network_digest: str
    """Of the weights, and of the file that the network comes from."""
    images_digest: str

    @classmethod
    def of(cls, subject: Subject, network: nn.Module, images: LabelledImages) -> Digests:
        """From the network and the images as they were read."""
        weights = digest_of(*network.state_dict().values())
        path = Path(subject.model.rpartition(":")[0] or subject.model)
        code = hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else ""
        return cls(weights + code, digest_of(images.images, *([] if images.labels is None else [images.labels])))


def loaded(subject: Subject, digests: Digests) -> tuple[nn.Module, LabelledImages]:
    """The network and the images, which must be those that the report began with."""
    network, images = subject.load()
    found = dataclasses.asdict(Digests.of(subject, network, images))
    changed = [name.removesuffix("_digest") for name, value in found.items() if value != getattr(digests, name)]
    if changed:
        raise ValueError(
            f"{CALLER}: this report began with other contents of the {' and the '.join(changed)}: a file was changed "
            f"meanwhile, or is another one on this machine; take the same files, or another --out"
        )
    return network, images


NOT_IN_PARTS = {"rare", "seconds", "method", "examples", "device", "attacks", "layer"}
"""Settings of a study that the parts of a sweep do not depend on: what is computed beside them, and where."""


def _configuration(subject: Subject, config: StudyConfig, digests: Digests) -> dict[str, Any]:
    """Everything that the results depend on, as plain JSON."""
    values = {field.name: getattr(subject, field.name) for field in dataclasses.fields(subject)}
    settings = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    settings = {name: value for name, value in settings.items() if name not in NOT_IN_PARTS}
    settings["samples_at_most"] = settings.pop("samples")  # `samples` of a part are those that were taken
    if config.covariance is not None:
        settings["covariance"] = hashlib.sha256(config.covariance.double().contiguous().numpy().tobytes()).hexdigest()
    return {
        **{name: str(value) if isinstance(value, Path) else value for name, value in values.items()},
        **dataclasses.asdict(digests), **settings, "levels": list(config.levels),
    }  # fmt: skip


@dataclass(frozen=True)
class SurveySweep:
    """Samples of all images at every level."""

    subject: Subject
    config: StudyConfig
    digests: Digests
    total: int
    name: str = "survey"
    unit: str = "images"

    @property
    def configuration(self) -> Mapping[str, Any]:
        columns = ["predicted", *PER_SCORE, *PER_LEVEL, *PER_LEVEL_AND_SCORE]
        return {
            **_configuration(self.subject, self.config, self.digests),
            "part": PART, "total": self.total, "columns": columns,
        }  # fmt: skip

    @property
    def counts(self) -> Sequence[int]:
        return [min(PART, self.total - start) for start in range(0, self.total, PART)]

    def prepare(self, device: str) -> Callable[[int], Columns]:
        network, images = loaded(self.subject, self.digests)
        plan = TimePlan.without_limit(self.total)

        def compute(item: int) -> Columns:
            part = images.take(slice(item * PART, (item + 1) * PART))
            config = dataclasses.replace(self.config, device=torch.device(device))
            return columns_of(survey_of(network, part, config, plan))

        return compute

    def study(
        self, columns: Mapping[str, np.ndarray], images: LabelledImages, names: tuple[str, ...], count: int
    ) -> Study:
        """The study from the columns of all parts."""
        outputs, *errors = (_wide(columns, name) for name in PER_SCORE)
        sigmas = [0.0, *self.config.levels]
        levels = tuple(_joined_level(columns, place, sigma) for place, sigma in enumerate(sigmas))
        predicted = _narrow(columns, "predicted")
        return Study.of_samples(self.config, images, names, count, predicted, outputs, (errors[0], errors[1]), levels)


def columns_of(part: Study) -> Columns:
    """A part as columns with a row for each image."""
    narrow, wide = {"predicted": part.predicted}, {name: getattr(part.scores, name) for name in PER_SCORE}
    for place, level in enumerate(part.levels):
        narrow |= {f"{name}_at_{place}": getattr(level, name) for name in PER_LEVEL}
        wide |= {f"{name}_at_{place}": getattr(level, name) for name in PER_LEVEL_AND_SCORE}
    for name, values in wide.items():
        narrow |= {f"{name}_{k}": column for k, column in enumerate(values.unbind(1))}
    return {name: column.numpy().copy() for name, column in narrow.items()}


def _narrow(columns: Mapping[str, np.ndarray], name: str) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(columns[name]))


def _wide(columns: Mapping[str, np.ndarray], name: str) -> Tensor:
    """The columns name_0, name_1, … as one matrix (N, k)."""
    count = sum(1 for key in columns if key.removeprefix(f"{name}_").isdecimal() and key.startswith(f"{name}_"))
    return torch.from_numpy(np.stack([columns[f"{name}_{place}"] for place in range(count)], 1))


def _joined_level(columns: Mapping[str, np.ndarray], place: int, sigma: float) -> Level:
    narrow = {name: _narrow(columns, f"{name}_at_{place}") for name in PER_LEVEL}
    wide = {name: _wide(columns, f"{name}_at_{place}") for name in PER_LEVEL_AND_SCORE}
    return Level(sigma, **narrow, **wide)


@dataclass(frozen=True)
class SomeImages:
    """A sweep over some of the images, given by their numbers, with the answers to them without noise."""

    subject: Subject
    config: StudyConfig
    digests: Digests
    numbers: tuple[int, ...]
    predicted: tuple[int, ...]
    unit: str = "images"
    kept: tuple[str, ...] = ()
    """The names of the columns."""

    @property
    def configuration(self) -> Mapping[str, Any]:
        return {
            **_configuration(self.subject, self.config, self.digests),
            "part": RARE_PART, "numbers": list(self.numbers), "columns": list(self.kept),
        }  # fmt: skip

    @property
    def counts(self) -> Sequence[int]:
        return [min(RARE_PART, len(self.numbers) - start) for start in range(0, len(self.numbers), RARE_PART)]

    def prepare(self, device: str) -> Callable[[int], Columns]:
        network, images = loaded(self.subject, self.digests)
        network = network_of(network.to(device), CALLER)
        pixels = images.images.to(device)
        model = classifier(network, pixels[:1], self.config)
        noise = self.config.noise(pixels)

        def compute(item: int) -> Columns:
            part = slice(item * RARE_PART, (item + 1) * RARE_PART)
            return self.columns(model, noise, self.numbers[part], self.predicted[part])

        return compute

    def columns(
        self, model: NetworkModel, noise: Gaussian, numbers: tuple[int, ...], predicted: tuple[int, ...]
    ) -> Columns:
        """Columns with a row for each of these images; `noise` is that of all images."""
        raise NotImplementedError


@dataclass(frozen=True)
class RareSweep(SomeImages):
    """The flip probabilities of the images nearest to flipping."""

    name: str = "rare"
    kept: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(Refined))

    def columns(
        self, model: NetworkModel, noise: Gaussian, numbers: tuple[int, ...], predicted: tuple[int, ...]
    ) -> Columns:
        refined = model.answer(lambda: list(refined_together(model, noise, numbers, predicted, self.config)))
        rows = sorted(refined, key=lambda row: numbers.index(row.number))
        return {name: np.array([getattr(row, name) for row in rows]) for name in self.kept}

    def refined(self, columns: Mapping[str, np.ndarray]) -> list[Refined]:
        """The rows of all parts."""
        return [Refined(*row) for row in zip(*(columns[name].tolist() for name in self.kept), strict=True)]


@dataclass(frozen=True)
class NearestSweep(SomeImages):
    """The nearest flips of the images that are shown first, with a row for each pixel of a change.

    On a CPU a large image takes half a minute, so that these are kept too.
    """

    name: str = "nearest"
    kept: tuple[str, ...] = ("image", "change", "distance", "becomes")

    def columns(
        self, model: NetworkModel, noise: Gaussian, numbers: tuple[int, ...], predicted: tuple[int, ...]
    ) -> Columns:
        flips = nearest_of(model, noise, numbers, torch.tensor(predicted), self.config.seed)
        found, none = {flip.image: flip for flip in flips}, torch.zeros(noise.event_shape)
        rows = [found.get(number, FlippedImage(number, none, math.inf, -1)) for number in numbers]
        change = torch.cat([row.change.float().flatten() for row in rows])
        others = {name: [getattr(row, name) for row in rows] for name in self.kept if name != "change"}
        return {"change": change.numpy(), **{name: np.repeat(values, none.numel()) for name, values in others.items()}}

    def nearest(self, columns: Mapping[str, np.ndarray], shape: torch.Size) -> tuple[FlippedImage, ...]:
        """The nearest flips that were found, from the columns of all parts."""
        changes = _narrow(columns, "change").reshape(-1, *shape)
        others = (columns[name][:: shape.numel()].tolist() for name in ("image", "distance", "becomes"))
        return tuple(
            FlippedImage(image, change.clone(), distance, becomes)
            for change, image, distance, becomes in zip(changes, *others, strict=True)
            if math.isfinite(distance)
        )
