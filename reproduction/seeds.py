"""Table 2's averages for LeNets trained from several seeds, by our recipe and the paper's, to show how much is luck."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from netmoments.data.images import LabelledImages
from reproduction import lenet_on_mnist
from reproduction.experiment import BesidePaper, Outcome, Panel, Settings
from reproduction.image_sweeps import SIGMAS
from reproduction.lenet_on_mnist import Errors
from reproduction.published import TABLE_2
from reproduction.trained import splits, trained_once
from reproduction.training import RECIPES, Recipe, accuracy

SEEDS = (0, 1, 2)
MOST_IMAGES = 1000
"""The most images for each network; six networks are studied."""
AS_THE_PAPER = Recipe("lenet", "mnist", epochs=3, batch=500, rate=1e-3)
"""The paper's recipe: Adam, 3 epochs, batches of 500; the rate, which it does not give, is Adam's usual one."""
TRAINED = {"the shipped recipe": RECIPES["lenet"], "the paper's recipe": AS_THE_PAPER}
QUANTITIES = {
    "mean": ("mean", "mean_error"),
    "delta_mean": ("mean, delta method", "mean_error"),
    "authors_old": ("old variance, as run", "variance_error_old"),
    "variance": ("new variance, exact", "variance_error_new"),
    "delta_variance": ("variance, delta method", "variance_error_new"),
}


@dataclass(frozen=True, eq=False)
class Trial:
    """One trained network and its errors."""

    recipe: str
    seed: int
    accuracy: float
    errors: dict[str, Errors]
    floor: dict[str, Errors]
    seconds: float


def reproduce(settings: Settings) -> Outcome:
    images, seeds = splits(settings, "mnist"), SEEDS[:2] if settings.few else SEEDS
    trials = [_trial(settings, recipe, seed, images) for recipe in TRAINED for seed in seeds]
    groups = {recipe: [trial for trial in trials if trial.recipe == recipe] for recipe in TRAINED}
    return Outcome(
        name="seeds",
        title="Table 2 for several trained networks",
        reading=(
            f"LeNets trained from seeds {', '.join(map(str, seeds))}, by the recipe of the shipped weights (5 epochs, "
            "weight decay 1.0, averaged weights) and by the paper's (Adam, 3 epochs, batches of 500), every one shown, "
            f"on {len(images[0]):,} training images. "
            f"{trials[0].errors['mean'].images:,} images and {settings.samples:,} samples each, otherwise as "
            "Table 2. The spread is the standard deviation over seeds; all networks see the same images, whose choice "
            "adds the error in the last column.",
            "Where the delta method's error equals the two-stage linearization's, the error is the linearization's and "
            "differs from network to network; sampling's floor is what exact values would show.",
        ),
        comparisons=tuple(_comparisons(groups)),
        panels=(_summary(groups), _every(trials)),
        drawings=(),
        numbers={
            "trials": [
                {
                    "recipe": trial.recipe,
                    "seed": trial.seed,
                    "test_accuracy": trial.accuracy,
                    "images": trial.errors["mean"].images,
                    **{
                        name: [error.average(level) for level in range(len(SIGMAS))]
                        for name, error in trial.errors.items()
                    },
                    "standard_errors_from_images": {
                        name: [error.standard_error(level) for level in range(len(SIGMAS))]
                        for name, error in trial.errors.items()
                    },
                    "sampling_floor": {
                        name: [trial.floor[name].resolution(level) for level in range(len(SIGMAS))]
                        for name in ("mean", "variance")
                    },
                }
                for trial in trials
            ]
        },
        seconds=sum(trial.seconds for trial in trials),
    )


def _trial(settings: Settings, recipe: str, seed: int, images: tuple[LabelledImages, LabelledImages]) -> Trial:
    """Train unless done before, then run Table 2's sweeps, all under a name of their own."""
    words = recipe.replace(" ", "-").replace("'", "")
    label = f"{words}-{seed}"
    weights, training_seconds = trained_once(settings, words, TRAINED[recipe], seed, images)
    own = replace(settings, weights=weights, images=min(settings.images, MOST_IMAGES))
    studied = lenet_on_mnist.studied_images(own)
    right = accuracy(studied.network, images[1], device=settings.here)
    studied.network.to("cpu")
    first = lenet_on_mnist.sampled_scores(own, studied, f"{label}-monte-carlo")
    again = lenet_on_mnist.sampled_again(own, studied, f"{label}-monte-carlo-again")
    found = lenet_on_mnist.computed_scores(own, studied, first, f"{label}-tightness")
    seconds = training_seconds + first.seconds + again.seconds + found.seconds
    return Trial(recipe, seed, right, found.errors, lenet_on_mnist.floor(first, again), seconds)


def _comparisons(groups: dict[str, list[Trial]]) -> list[BesidePaper]:
    return [
        BesidePaper(
            f"{words}, {recipe}, mean of {len(trials)} seeds, σ = {sigma}",
            _mean(trials, name, level),
            getattr(TABLE_2[sigma, "avg"], column)[0],
        )
        for recipe, trials in groups.items()
        for level, sigma in enumerate(SIGMAS)
        for name, (words, column) in QUANTITIES.items()
        if name in ("mean", "variance")
    ]


def _mean(trials: Sequence[Trial], name: str, level: int) -> float:
    return sum(trial.errors[name].average(level) for trial in trials) / len(trials)


def _spread(trials: Sequence[Trial], name: str, level: int) -> float:
    centre = _mean(trials, name, level)
    squares = sum((trial.errors[name].average(level) - centre) ** 2 for trial in trials)
    return (squares / (len(trials) - 1)) ** 0.5


def _summary(groups: dict[str, list[Trial]]) -> Panel:
    rows: list[tuple[str, ...]] = []
    for level, sigma in enumerate(SIGMAS):
        for name, (words, column) in QUANTITIES.items():
            shown = (
                f"{_mean(trials, name, level):.4f} ± {_spread(trials, name, level):.4f}" for trials in groups.values()
            )
            kind = "mean" if name in ("mean", "delta_mean") else "variance"
            every = [trial for trials in groups.values() for trial in trials]
            floor = sum(trial.floor[kind].resolution(level) for trial in every) / len(every)
            choice = sum(trial.errors[name].standard_error(level) for trial in every) / len(every)
            paper = f"{getattr(TABLE_2[sigma, 'avg'], column)[0]:.3f}"
            rows.append((f"{sigma}", words, paper, *shown, f"{floor:.2g}", f"{choice:.2g}"))
    size = len(QUANTITIES)
    return Panel(
        "Mean over seeds ± standard deviation over seeds",
        ("σ", "error of", "paper", *groups, "sampling's floor", "± by the choice of images"),
        tuple(rows),
        breaks=tuple(range(size, len(rows), size)),
    )


def _every(trials: Sequence[Trial]) -> Panel:
    rows = tuple(
        (
            trial.recipe, str(trial.seed), f"{trial.accuracy:.2%}",
            *(
                f"{trial.errors['mean'].average(level):.4f} / {trial.errors['variance'].average(level):.4f}"
                for level in range(len(SIGMAS))
            ),
        )
        for trial in trials
    )  # fmt: skip
    headings = ("recipe", "seed", "test accuracy", *(f"σ = {sigma}: mean / variance" for sigma in SIGMAS))
    return Panel(
        "Every network",
        headings,
        rows,
        "Errors of the mean and of the exact new variance.",
        breaks=(len(trials) // len(TRAINED),),
    )
