"""Readings of Table 2: LeNets trained by several recipes, and the old variance under every reading of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from netmoments import paper
from netmoments.affine_relu_affine import AffineReluAffine
from netmoments.covariances import LowRank
from netmoments.data.images import LabelledImages
from netmoments.gaussian import Gaussian
from netmoments.linearize.two_stage import two_stage
from netmoments.precision import matvec
from netmoments.report.pictures import BLUE, INK, ORANGE, SMALL, new_figure
from netmoments.sweep.item import Columns
from reproduction import lenet_on_mnist
from reproduction.experiment import BesidePaper, Drawing, Outcome, Panel, Settings
from reproduction.image_sweeps import SIGMAS, BlocksOfImages, StudiedImages, cube, rows, same_bits
from reproduction.lenet_on_mnist import Errors
from reproduction.plots import GREEN, GREY, dress
from reproduction.published import TABLE_2
from reproduction.trained import network_as_trained, splits, trained_once
from reproduction.training import RECIPES, Recipe, accuracy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "readings-2"
SEEDS = (0, 1, 2)
MOST_IMAGES = 100
"""The most images for each network; 54 networks are studied."""
GREY_LEVELS = 255
PAPER = Recipe("lenet", "mnist", epochs=3, batch=500, rate=1e-3)
"""The paper's recipe: Adam, 3 epochs, batches of 500; the rate, which it does not give, is Adam's usual one."""
TRAINED = {
    "as the paper": PAPER,
    "decay 1": replace(PAPER, weight_decay=1.0),
    "20 epochs": replace(PAPER, epochs=20),
    "dropout": replace(PAPER, dropout=0.5),
    "1 epoch": replace(PAPER, epochs=1),
    "5 epochs": replace(PAPER, epochs=5),
    "10 epochs": replace(PAPER, epochs=10),
    "decay 0.01": replace(PAPER, weight_decay=0.01),
    "decay 0.1": replace(PAPER, weight_decay=0.1),
    "decay 1, 20 epochs": replace(PAPER, weight_decay=1.0, epochs=20),
    "dropout, 10 epochs": replace(PAPER, dropout=0.5, epochs=10),
    "dropout, decay 1": replace(PAPER, dropout=0.5, weight_decay=1.0),
    "dropout, 20 epochs": replace(PAPER, dropout=0.5, epochs=20),
    "SGD": replace(PAPER, optimizer="sgd", rate=1e-2, batch=100),
    "SGD, 20 epochs": replace(PAPER, optimizer="sgd", rate=1e-2, batch=100, epochs=20),
    "pixels in [−0.5, 0.5]": replace(PAPER, centre=0.5),
    "pixels in [−127.5, 127.5]": replace(PAPER, centre=0.5, spread=1 / GREY_LEVELS),
    "the shipped recipe": RECIPES["lenet"],
}
"""In the order in which they are taken where images are few. The authors' package of 2018 gives LeNet images less 0.5,
in its trainer as they are and by default times 255."""
MEAN_AND_NEW = {"mean": ("mean", "mean_error"), "variance": ("new variance", "variance_error_new")}
OLD = {
    "theorem_2": "Theorem 2: means of the pre-activations zero",
    "authors_old": "own variances exact, pairs as if of mean zero",
    "mixed": "E[g²] as Theorem 2, less the square of Theorem 1's mean",
    "no_bias": "exact, c₁ = 0 and the mean kept",
    "no_mean": "exact, mean of the input zero and c₁ kept",
    "independent": "units independent: own variances only",
    "independent_zero": "units independent and of mean zero",
}
"""Readings of the old variance. The package of 2018 has two: `special_variance` is Theorem 2, and `batch_moments` has
own variances exact and pairs as if of mean zero. Which of them made the table it does not say."""
OLD_FOR = ("as the paper", "decay 1", "20 epochs", "dropout", "pixels in [−127.5, 127.5]")
NEAR = 0.25
"""An error within this share of the published one counts as matching it."""


@dataclass(frozen=True, eq=False)
class Trial:
    """One trained network and its errors."""

    recipe: str
    seed: int
    accuracy: float
    errors: dict[str, Errors]
    seconds: float
    learned: bool = True
    """Whether its accuracy is at least half of the best network's. Other networks are listed but left out of averages.
    """


def reproduce(settings: Settings) -> Outcome:
    images = splits(settings, "mnist")
    trials = [
        _trial(settings, recipe, seed, images)
        for recipe in list(TRAINED)[: max(4, settings.images)]
        for seed in SEEDS[: max(1, min(len(SEEDS), settings.images // 10))]
    ]
    return outcome_of(trials, len(images[0]), settings.samples)


def outcome_of(trials: Sequence[Trial], training: int, samples: int) -> Outcome:
    """The tables and the chart of these networks. Averages leave out networks that did not learn."""
    best = max(one.accuracy for one in trials)
    trials = [replace(one, learned=one.accuracy >= best / 2) for one in trials]
    groups = {recipe: [one for one in trials if one.recipe == recipe and one.learned] for recipe in TRAINED}
    groups = {recipe: found for recipe, found in groups.items() if found}
    return Outcome(
        name=NAME,
        title="Readings of Table 2",
        reading=tuple(_reading(groups, trials, training, samples)),
        comparisons=tuple(_comparisons(groups)),
        panels=(_by_recipe(groups), _old_variance(groups), _every(trials)),
        drawings=(
            Drawing(NAME, "Errors of the mean and of the new variance by training recipe, each seed a mark; the lines "
                    "are the published errors.", partial(draw_recipes, groups)),
        ),
        numbers={
            "training_images": training,
            "trials": [
                {
                    "recipe": one.recipe,
                    "seed": one.seed,
                    "test_accuracy": one.accuracy,
                    "learned": one.learned,
                    "images": one.errors["mean"].images,
                    **{name: [error.average(level) for level in range(len(SIGMAS))] for name, error in
                       one.errors.items()},
                }
                for one in trials
            ],
        },
        seconds=sum(one.seconds for one in trials),
    )  # fmt: skip


def _trial(settings: Settings, recipe: str, seed: int, images: tuple[LabelledImages, LabelledImages]) -> Trial:
    """Train unless done before, then sample, compute and, for some, evaluate the readings of the old variance."""
    words = f"lenet-{list(TRAINED).index(recipe)}"
    weights, seconds = trained_once(settings, words, TRAINED[recipe], seed, images)
    own = replace(settings, images=min(settings.images, MOST_IMAGES))
    numbers, pixels = lenet_on_mnist.chosen_images(own)
    network = network_as_trained(TRAINED[recipe], weights)
    right = accuracy(network, images[1], device=settings.here)
    studied = StudiedImages(network.to("cpu"), pixels, numbers, settings.seed)
    label = f"{NAME}-{words.removeprefix('lenet-')}-{seed}"
    sampled = lenet_on_mnist.sampled_scores(own, studied, f"{label}-monte-carlo")
    computed = settings.run(VarianceReadings(f"{label}-moments", studied, lenet_on_mnist.block(own)))
    errors = {}
    for column in ("mean", "variance", *OLD):
        against = sampled.mean if column == "mean" else sampled.variance
        errors[column] = Errors.between(cube(computed.columns, column, numbers), against)
    return Trial(recipe, seed, right, errors, seconds + sampled.seconds + computed.seconds)


@dataclass(frozen=True, eq=False)
class VarianceReadings(BlocksOfImages):
    """The two-stage linearization at each image, l = 3. Rows: image, sigma, logit, and the values of `readings_at`."""

    @property
    def configuration(self) -> dict[str, Any]:
        return {**self.studied.description(), "block": self.block, "old": list(OLD)}

    def rows_of(self, studied: StudiedImages, places: range) -> Columns:
        images = studied.images[places.start : places.stop]
        factors = torch.stack([studied.factor(place) for place in places])
        with same_bits():
            network = two_stage(studied.network, images)
        return rows(studied.numbers[places.start : places.stop].tolist(), readings_at(network, images, factors))


@torch.no_grad()
def readings_at(network: AffineReluAffine, images: Tensor, factors: Tensor) -> dict[str, Tensor]:
    """The mean, the exact variance, and the readings `OLD` of the old one, (images, levels, outputs)."""
    network = without_dead_units(network)
    found = dict(lenet_on_mnist.core_moments_at(network, images, factors))
    unit = Gaussian(images, LowRank(factors))
    level_free = {
        "theorem_2": paper.variance_zero_mean(network, unit),
        "independent_zero": _independent_zero_mean(network, unit),
    }
    squares = torch.tensor([sigma**2 for sigma in SIGMAS], dtype=images.dtype, device=images.device)
    found |= {name: value.unsqueeze(1) * squares.unsqueeze(-1) for name, value in level_free.items()}
    second = paper.second_moment_zero_mean(AffineReluAffine(network.A, network.c1, network.B, 0 * network.c2), unit)
    without_offset = found["mean"] - network.c2.unsqueeze(1)
    found["mixed"] = second.unsqueeze(1) * squares.unsqueeze(-1) - without_offset.square()
    no_bias = AffineReluAffine(network.A, torch.zeros_like(network.c1), network.B, network.c2, network.D)
    levels = [sigma * factors for sigma in SIGMAS]
    found["no_bias"] = torch.stack([no_bias.variance(Gaussian(images, LowRank(one))) for one in levels], 1)
    nothing = torch.zeros_like(images)
    found["no_mean"] = torch.stack([network.variance(Gaussian(nothing, LowRank(one))) for one in levels], 1)
    own = [lenet_on_mnist.own_variance(network, Gaussian(images, LowRank(one))) for one in levels]
    found["independent"] = torch.stack(own, 1)
    return found


def without_dead_units(network: AffineReluAffine) -> AffineReluAffine:
    """The same function, changed so that no output reads a unit without input (with a dead layer before it).

    The paper's expressions divide by the standard deviation of every unit. Such a unit adds a constant, which
    moves to c₂; a unit with weights 1 that no output reads takes its place.
    """
    dead = (network.A == 0).all(-1)
    constant = matvec(network.B, torch.where(dead, network.c1.relu(), 0))
    A = torch.where(dead.unsqueeze(-1), 1, network.A)
    B = torch.where(dead.unsqueeze(-2), 0, network.B)
    return AffineReluAffine(A, torch.where(dead, 0, network.c1), B, network.c2 + constant, network.D)


def _independent_zero_mean(network: AffineReluAffine, noise: Gaussian) -> Tensor:
    """Σ b² s² (½ − 1/2π): units of mean zero, independent."""
    variance = noise.covariance.push_diagonal(network.A)
    return matvec(network.B**2, variance) * (0.5 - 1 / (2 * torch.pi))


def _mean_over(trials: Sequence[Trial], name: str, level: int) -> float:
    return sum(one.errors[name].average(level) for one in trials) / len(trials)


def _published(column: str, level: int) -> float:
    return getattr(TABLE_2[SIGMAS[level], "avg"], column).mean


def _comparisons(groups: Mapping[str, Sequence[Trial]]) -> list[BesidePaper]:
    first = next(iter(groups))
    found = [
        BesidePaper(f"{words}, {recipe}, σ = {SIGMAS[level]}", _mean_over(trials, name, level),
                    _published(column, level))
        for recipe, trials in groups.items()
        for name, (words, column) in MEAN_AND_NEW.items()
        for level in (2, 3)
    ]  # fmt: skip
    return found + [
        BesidePaper(f"old variance, {words}, {first}, σ = {SIGMAS[2]}", _mean_over(groups[first], name, 2),
                    _published("variance_error_old", 2))
        for name, words in OLD.items()
    ]  # fmt: skip


def _by_recipe(groups: Mapping[str, Sequence[Trial]]) -> Panel:
    def cells(trials: Sequence[Trial]) -> list[str]:
        return [
            " / ".join(f"{_mean_over(trials, name, level):.3f}" for name in MEAN_AND_NEW)
            for level in range(len(SIGMAS))
        ]

    printed = [
        " / ".join(f"{_published(column, level):.3f}" for _, column in MEAN_AND_NEW.values())
        for level in range(len(SIGMAS))
    ]
    found = tuple(
        (recipe, str(len(trials)), f"{sum(one.accuracy for one in trials) / len(trials):.2%}", *cells(trials))
        for recipe, trials in groups.items()
    )
    return Panel(
        "Error of mean / new variance, by training recipe",
        ("recipe", "seeds", "test accuracy", *(f"σ = {sigma}" for sigma in SIGMAS)),
        (("published", "", "", *printed), *found),
        "Averages over images, logits and seeds. Unless the row says otherwise: Adam, rate 0.001, 3 epochs, batches of "
        "500, no decay, pixels in [0, 1]. Decay is decoupled from the gradient.",
        breaks=(1,),
    )


def _old_variance(groups: Mapping[str, Sequence[Trial]]) -> Panel:
    found = []
    for recipe in (name for name in OLD_FOR if name in groups):
        for name, words in OLD.items():
            values = (f"{_mean_over(groups[recipe], name, level):.3f}" for level in range(len(SIGMAS)))
            found.append((recipe, words, *values))
    printed = (f"{_published('variance_error_old', level):.3f}" for level in range(len(SIGMAS)))
    breaks = (1, *range(1 + len(OLD), len(found), len(OLD)))
    return Panel(
        "Error of the old variance, by reading",
        ("recipe", "reading", *(f"σ = {sigma}" for sigma in SIGMAS)),
        (("published", "", *printed), *found),
        "The largest possible error is 2.",
        breaks=breaks,
    )


def _every(trials: Sequence[Trial]) -> Panel:
    found = tuple(
        (
            one.recipe, str(one.seed), f"{one.accuracy:.2%}",
            *(f"{one.errors['mean'].average(level):.3f} / {one.errors['variance'].average(level):.3f}"
              for level in range(len(SIGMAS))),
        )
        for one in trials
    )  # fmt: skip
    return Panel("Every network", ("recipe", "seed", "test accuracy", *(f"σ = {sigma}" for sigma in SIGMAS)), found)


def met(groups: Mapping[str, Sequence[Trial]], name: str, column: str) -> list[str]:
    """The recipes whose errors, averaged over seeds, match the published ones at the two largest noise levels."""
    return [
        recipe
        for recipe, trials in groups.items()
        if all(
            abs(_mean_over(trials, name, level) - _published(column, level)) <= NEAR * _published(column, level)
            for level in (2, 3)
        )
    ]


def _reading(groups: Mapping[str, Sequence[Trial]], trials: Sequence[Trial], training: int, samples: int) -> list[str]:
    first = next(iter(groups))
    images = groups[first][0].errors["mean"].images
    words = [
        f"LeNets by {len(groups)} recipes, {len(groups[first])} seeds each, on {training:,} training images; errors as "
        f"in Table 2 on {images} test images each, against {samples:,} samples.",
    ]
    if lost := [f"{one.recipe}, seed {one.seed}" for one in trials if not one.learned]:
        words.append(f"Did not learn, listed and left out of averages: {'; '.join(lost)}.")
    for name, (what, column) in MEAN_AND_NEW.items():
        near = met(groups, name, column)
        words.append(
            f"The published error of the {what} at σ = 0.05 and 0.1 "
            f"({_published(column, 2):.3f}, {_published(column, 3):.3f}) is met within {NEAR:.0%} by "
            f"{len(near)} of {len(groups)} recipes{_listed(near)}."
        )
    old = _published("variance_error_old", 2)
    near = [
        f"{text}, {recipe} ({_mean_over(groups[recipe], name, 2):.3f})"
        for recipe in groups
        for name, text in OLD.items()
        if abs(_mean_over(groups[recipe], name, 2) - old) <= NEAR * old
    ]
    words.append(
        f"The published error of the old variance at σ = 0.05 ({old:.3f}) is met within {NEAR:.0%} by "
        f"{len(near)} of {len(OLD) * len(groups)} readings by recipe{_listed(near)}. Some come near by chance."
    )
    return words


def _listed(near: Sequence[str]) -> str:
    return f": {'; '.join(near)}" if near else ""


def draw_recipes(groups: Mapping[str, Sequence[Trial]]) -> Figure:
    """Draw the mean on the left, the new variance on the right, with a line per recipe and a colour per noise level."""
    figure = new_figure(8.0, 1.4 + 0.26 * len(groups))
    colours = (GREY, GREEN, BLUE, ORANGE)
    for axes, (name, (what, column)) in zip(figure.subplots(1, 2, sharey=True), MEAN_AND_NEW.items(), strict=True):
        for level, sigma in enumerate(SIGMAS):
            points = [(one.errors[name].average(level), place)
                      for place, trials in enumerate(groups.values()) for one in trials]  # fmt: skip
            axes.plot(*zip(*points, strict=True), linestyle="none", marker="o", markersize=3.5, color=colours[level],
                      label=f"σ = {sigma}")  # fmt: skip
            axes.axvline(_published(column, level), color=colours[level], linewidth=1.0, linestyle="--")
        axes.set_xscale("log")
        axes.xaxis.set_minor_formatter("")
        axes.set_yticks(range(len(groups)), list(groups))
        dress(axes, what, "average error", "")
    axes.invert_yaxis()
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=SMALL, labelcolor=INK)
    return figure
