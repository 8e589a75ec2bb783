"""Compare training on the expected loss with training on noisy copies: accuracy under noise, and time per step.

The authors' companion paper, *Analytical Moment Regularizer for Gaussian Robust Networks* (arXiv 1904.11005), finds its
regulariser worth 3 to 21 folds of noisy copies. Here the expected loss goes through every layer (`expected_loss`).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import nn

from netmoments.checks import random_seed
from netmoments.data.images import LabelledImages, evenly_spread
from netmoments.network.weights import digest_of
from netmoments.precision import full_precision
from netmoments.report.pictures import BLUE, INK, ORANGE, SMALL, new_figure
from netmoments.sweep.item import Columns
from reproduction.experiment import BesidePaper, Drawing, Outcome, Panel, Settings
from reproduction.image_sweeps import blocks
from reproduction.plots import AMBER, GREEN, PURPLE, SKY, dress
from reproduction.trained import network_as_trained, splits, trained_once
from reproduction.training import RECIPES, Recipe, fresh_state, one_step

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "moments-training"
FOLDS = (1, 3, 21)
WEIGHT = 1.0
"""The λ for which the loss is the expected loss itself."""
PLAIN, MOMENTS = "plain", "expected loss"
STEPS, WARM = {"cpu": 3, "cuda": 20}, 1
"""Steps that are timed, and warm-up steps before them."""
BLOCK = 500
"""Test images per item."""
DRAWS = 5
"""Noisy versions of each test image."""
LEAST_TEST = 1000
"""The fewest test images, however few are asked for."""
FACES_FROM = 1000
"""From so many images on, the face network is trained too: it takes minutes on a GPU, and a day on a CPU."""


@dataclass(frozen=True)
class Subject:
    """A network to be trained against noise of one level, and the levels at which it is tested."""

    title: str
    recipe: Recipe
    sigma: float
    levels: tuple[float, ...]
    seeds: tuple[int, ...] = (0, 1, 2)

    def kinds(self) -> dict[str, Recipe]:
        """The recipe in three kinds: plain, with noisy copies, and with the expected loss."""
        copies = {f"{count} fold{'s' if count > 1 else ''}": replace(self.recipe, sigma=self.sigma, folds=count)
                  for count in FOLDS}  # fmt: skip
        moments = replace(self.recipe, sigma=self.sigma, moments=WEIGHT)
        return {PLAIN: self.recipe, **copies, MOMENTS: moments}


SUBJECTS = (
    Subject("lenet", Recipe("lenet", "mnist", epochs=3, batch=500, rate=1e-3), 0.4, (0.1, 0.2, 0.3, 0.4, 0.5)),
    Subject("faces", replace(RECIPES["faces-plain"], epochs=8), 0.1, (0.02, 0.05, 0.1, 0.15, 0.2), (0,)),
)


@dataclass(frozen=True, eq=False)
class Trial:
    """A trained network: the share of test images that it gets right at each noise level, 0 first."""

    kind: str
    seed: int
    right: tuple[float, ...]
    seconds: float


@dataclass(frozen=True, eq=False)
class Trained:
    """All trials of a subject, and the time of a step as a multiple of a plain one."""

    subject: Subject
    trials: Sequence[Trial]
    times: Mapping[str, float]
    training: int
    test: int

    def mean(self, kind: str, place: int) -> float:
        found = [one.right[place] for one in self.trials if one.kind == kind]
        return sum(found) / len(found)

    def spread(self, kind: str, place: int) -> float:
        """Standard deviation over seeds; 0 for one."""
        found = [one.right[place] for one in self.trials if one.kind == kind]
        return statistics.stdev(found) if len(found) > 1 else 0.0

    @property
    def at_sigma(self) -> int:
        """The index of the noise level that was trained against."""
        return 1 + self.subject.levels.index(self.subject.sigma)


def reproduce(settings: Settings) -> Outcome:
    subjects = SUBJECTS if settings.images >= FACES_FROM else SUBJECTS[:1]
    found = [study(settings, subject) for subject in subjects]
    return Outcome(
        name=NAME,
        title="Training on the expected loss, and on noisy copies",
        reading=tuple(_reading(found)),
        comparisons=tuple(_comparisons(found)),
        panels=tuple(_panel(one) for one in found),
        drawings=tuple(
            Drawing(f"{NAME}-{one.subject.title}", f"{one.subject.title}: test accuracy against the noise level, "
                    "averaged over seeds; dotted: the noise that was trained against.", partial(draw_accuracy, one))
            for one in found
        ),
        numbers={one.subject.title: _numbers(one) for one in found},
        seconds=sum(trial.seconds for one in found for trial in one.trials),
    )  # fmt: skip


def study(settings: Settings, subject: Subject) -> Trained:
    """Train with every kind and seed, then test under noise."""
    images = splits(settings, subject.recipe.data)
    test = images[1].take(evenly_spread(len(images[1]), min(len(images[1]), max(LEAST_TEST, settings.images))))
    trials = []
    for kind, recipe in subject.kinds().items():
        for seed in subject.seeds[: max(1, settings.images // 100)]:
            label = f"{subject.title}-{kind.replace(' ', '-')}"
            weights, seconds = trained_once(settings, label, recipe, seed, images)
            sweep = UnderNoise(f"{NAME}-{label}-{seed}", network_as_trained(recipe, weights), test,
                               subject.levels, settings.seed)  # fmt: skip
            asked = settings.run(sweep)
            right = tuple(
                float(asked.columns["right"][asked.columns["sigma"] == level].mean()) for level in (0, *subject.levels)
            )
            trials.append(Trial(kind, seed, right, seconds + asked.seconds))
    times = relative_times(subject.kinds(), images[0], settings.here, 1 if settings.few else STEPS[settings.here.type])
    return Trained(subject, trials, times, len(images[0]), len(test))


@dataclass(frozen=True, eq=False)
class UnderNoise:
    """Whether noisy test images are answered right. Rows: image, sigma, draw, right; one draw without noise."""

    name: str
    network: nn.Module
    test: LabelledImages
    levels: tuple[float, ...]
    seed: int
    unit: ClassVar[str] = "images"

    @property
    def configuration(self) -> dict[str, Any]:
        assert self.test.labels is not None
        return {
            "network": digest_of(*self.network.state_dict().values()),
            "pixels": digest_of(self.test.images, self.test.labels),
            "levels": list(self.levels), "seed": self.seed, "draws": DRAWS, "block": BLOCK,
        }  # fmt: skip

    @property
    def counts(self) -> Sequence[int]:
        return [len(part) for part in blocks(len(self.test), BLOCK)]

    def prepare(self, device: str) -> Callable[[int], Columns]:
        network, parts = self.network.to(device).eval(), blocks(len(self.test), BLOCK)
        return lambda item: self.rows_of(network, parts[item], device)

    @torch.no_grad()
    def rows_of(self, network: nn.Module, places: range, device: str) -> Columns:
        """The rows of some images; all networks see the same noise."""
        assert self.test.labels is not None
        images = self.test.images[places.start : places.stop].to(device)
        labels = self.test.labels[places.start : places.stop].to(device)
        generator = torch.Generator(device).manual_seed(random_seed(self.seed, NAME, places.start))
        parts: list[Columns] = []
        for sigma in (0.0, *self.levels):
            for draw in range(DRAWS if sigma else 1):
                noise = torch.randn(images.shape, generator=generator, device=device) if sigma else 0.0
                with full_precision():
                    right = network(images + sigma * noise).argmax(1) == labels
                parts.append(
                    {
                        "image": np.arange(places.start, places.stop, dtype=np.int32),
                        "sigma": np.full(len(images), sigma),
                        "draw": np.full(len(images), draw, dtype=np.int16),
                        "right": right.cpu().numpy(),
                    }
                )
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def relative_times(
    kinds: Mapping[str, Recipe], training: LabelledImages, device: torch.device, steps: int
) -> dict[str, float]:
    """The time of a step of each kind as a multiple of a plain one: medians of interleaved steps on one batch."""
    assert training.labels is not None
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        states = {kind: fresh_state(recipe, 0, device) for kind, recipe in kinds.items()}
        batch = next(iter(kinds.values())).batch
        images, labels = training.images[:batch].to(device), training.labels[:batch].to(device)
        took: dict[str, list[float]] = {kind: [] for kind in kinds}
        for step in range(WARM + steps):
            for kind, recipe in kinds.items():
                states[kind].network.train()
                _settle(device)
                start = time.perf_counter()
                one_step(recipe, states[kind], recipe.seen(images), labels)
                _settle(device)
                if step >= WARM:
                    took[kind].append(time.perf_counter() - start)
    plain = statistics.median(took[PLAIN])
    return {kind: statistics.median(values) / plain for kind, values in took.items()}


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _numbers(one: Trained) -> dict[str, Any]:
    return {
        "sigma": one.subject.sigma,
        "levels": [0.0, *one.subject.levels],
        "training_images": one.training,
        "test_images": one.test,
        "draws": DRAWS,
        "relative_step_time": dict(one.times),
        "trials": [{"kind": trial.kind, "seed": trial.seed, "right": list(trial.right)} for trial in one.trials],
    }


def _panel(one: Trained) -> Panel:
    levels = (0.0, *one.subject.levels)

    def cell(kind: str, place: int) -> str:
        spread = one.spread(kind, place)
        return f"{one.mean(kind, place):.2%}" + (f" ± {spread:.2%}" if spread else "")

    rows = tuple(
        (kind, f"{one.times[kind]:.2f}", *(cell(kind, place) for place in range(len(levels)))) for kind in one.times
    )
    return Panel(
        f"{one.subject.title}: test accuracy under noise, trained against σ = {one.subject.sigma:g}",
        ("training", "time a step", *(f"σ = {level:g}" for level in levels)),
        rows,
        "Time a step as a multiple of a plain one, in the same process. ±: standard deviation over seeds. "
        "n folds: n noisy copies of each image in a step, drawn anew, beside the image.",
        emphasis=(1 + one.at_sigma,),
    )


def worth(one: Trained) -> str:
    """Describe how many folds the expected loss is worth at the noise trained against, within the seeds' spread."""
    place = one.at_sigma
    own = one.mean(MOMENTS, place)

    def reached(kind: str) -> bool:
        return one.mean(kind, place) <= own + math.hypot(one.spread(kind, place), one.spread(MOMENTS, place))

    beaten = [kind for kind in one.times if kind not in (PLAIN, MOMENTS) and reached(kind)]
    if not beaten:
        return "not as good as one fold"
    within = " within the spread of the seeds" if one.mean(beaten[-1], place) > own else ""
    return f"as good as {beaten[-1]}{within}"


def _comparisons(found: Sequence[Trained]) -> list[BesidePaper]:
    made = []
    for one in found:
        title, place = one.subject.title, one.at_sigma
        at = f"σ = {one.subject.sigma:g}"
        made += [BesidePaper(f"{title}, accuracy at {at}, {kind}", one.mean(kind, place), None) for kind in one.times]
        made.append(BesidePaper(f"{title}, time a step, {MOMENTS}", one.times[MOMENTS], None))
    return made


def _reading(found: Sequence[Trained]) -> list[str]:
    words = [
        "The expected cross-entropy to second order under N(0, σ²I), mean and spread of the scores from one stacked "
        "pass with one random direction (reproduction/expected_loss.py), beside plain training and noisy copies. The "
        "companion paper (arXiv 1904.11005) finds its regulariser worth 3 to 21 folds.",
    ]
    most = f"{FOLDS[-1]} folds"
    for one in found:
        right = {kind: f"{one.mean(kind, one.at_sigma):.2%}" for kind in one.times}
        words.append(
            f"{one.subject.title}, {one.training:,} training images: at σ = {one.subject.sigma:g} the expected loss is "
            f"{worth(one)} ({right[MOMENTS]}; plain {right[PLAIN]}, 1 fold {right['1 fold']}, {most} {right[most]}) at "
            f"{one.times[MOMENTS]:.1f} times a plain step; 1 fold takes {one.times['1 fold']:.1f} times, {most} "
            f"{one.times[most]:.1f}."
        )
    return words


def draw_accuracy(one: Trained) -> Figure:
    figure = new_figure(6.0, 3.6)
    axes = figure.subplots()
    levels = (0.0, *one.subject.levels)
    colours = (INK, SKY, BLUE, PURPLE, ORANGE, GREEN, AMBER)
    for kind, colour in zip(one.times, colours, strict=False):
        values = [one.mean(kind, place) for place in range(len(levels))]
        axes.plot(levels, values, marker="o", markersize=3.5, color=colour, linewidth=1.6,
                  label=f"{kind}, {one.times[kind]:.1f} × a step")  # fmt: skip
    axes.axvline(one.subject.sigma, color=INK, linewidth=0.8, linestyle=":")
    dress(axes, one.subject.title, "noise level σ", "test accuracy")
    axes.legend(frameon=False, fontsize=SMALL, labelcolor=INK)
    return figure
