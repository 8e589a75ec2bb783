"""Compare all methods on LeNet as Table 2 does, on fewer images and against many more samples.

Layerwise errors are smaller than Table 2's 10⁴ samples can resolve, so this comparison has a reference of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from netmoments.checks import random_seed
from netmoments.covariances import LowRank
from netmoments.data.images import evenly_spread
from netmoments.gaussian import Gaussian
from netmoments.moments.methods import Layerwise, Linear, Method, Sampling, Sketch, TwoStage
from netmoments.moments.output_moments import output_moments
from netmoments.report.pictures import BLUE, INK, SMALL, new_figure
from netmoments.sweep.item import Columns
from reproduction.experiment import Panel, Settings
from reproduction.image_sweeps import SIGMAS, BlocksOfImages, StudiedImages, cube, rows, same_bits
from reproduction.lenet_on_mnist import Errors, sampled_moments
from reproduction.plots import AMBER, GREEN, GREY, PALE, PURPLE, dress

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "tighter"
"""The folder of the sweep, and the name from which its random numbers derive."""
MOST_IMAGES = 100
"""At most so many of Table 2's images are used."""
ONE_IN = {"cpu": 50, "cuda": 1}
"""One in so many of them is used: an image takes minutes on a CPU and seconds on a GPU."""
REFERENCE = {"cpu": 100_000, "cuda": 1_000_000}
"""The number of samples of the reference, which are corrected by a sketch."""
PLAIN, ASSISTED, PROBES = 10_000, 1_000, 64
"""The numbers of plain samples, of corrected samples, and of a sketch's probes."""
SEEDS = 2**31
"""Seeds of methods are below this."""
METHODS = ("two_stage", "delta", "sketch", "assisted", "layerwise", "plain")
MOMENTS = ("mean", "variance")
LABELS = {
    "two_stage": "two-stage",
    "delta": "delta method",
    "sketch": f"sketch, {PROBES} probes",
    "assisted": f"{ASSISTED:,} assisted samples",
    "layerwise": "layerwise",
    "plain": f"{PLAIN:,} samples",
}
SEEN = 1.5
"""An error below so many floors cannot be told from zero."""
STYLES: dict[str, dict[str, Any]] = {
    "two_stage": {"color": GREEN, "marker": "o"},
    "delta": {"color": GREY, "marker": "o", "linestyle": "--", "linewidth": 1.1, "zorder": 3},
    "sketch": {"color": AMBER, "marker": "s"},
    "assisted": {"color": PURPLE, "marker": "v"},
    "layerwise": {"color": BLUE, "marker": "D", "linewidth": 2.2, "zorder": 4},
}


@dataclass(frozen=True, eq=False)
class EveryMethodSweep(BlocksOfImages):
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
            **self.studied.description(),
            "block": self.block,
            "reference": self.reference,
            "plain": self.plain,
            "assisted": self.assisted,
            "probes": self.probes,
        }

    def rows_of(self, studied: StudiedImages, places: range) -> Columns:
        with same_bits():
            found = [self.moments_at(studied, place) for place in places]
        numbers = studied.numbers[places.start : places.stop].tolist()
        return rows(numbers, {name: torch.stack([one[name] for one in found]) for name in found[0]})

    @torch.no_grad()
    def moments_at(self, studied: StudiedImages, place: int) -> dict[str, Tensor]:
        """All values for one image, (levels, scores)."""
        network, image, factor = studied.network, studied.images[place], studied.factor(place)
        factors = torch.stack([sigma * factor for sigma in SIGMAS])
        noise = Gaussian(image.expand(len(SIGMAS), *image.shape), LowRank(factors), event_ndim=image.dim())

        def sampled(purpose: str, samples: int) -> tuple[Tensor, Tensor]:
            return sampled_moments(network, image, factor, samples, studied.generator(f"{self.name}, {purpose}", place))

        def seed(purpose: str) -> int:
            return random_seed(studied.seed, f"{self.name}, {purpose}", int(studied.numbers[place])) % SEEDS

        def by(method: Method) -> tuple[Tensor, Tensor]:
            moments = output_moments(network, noise, method, check=0)
            return moments.mean, moments.variance

        def assisted(purpose: str, samples: int) -> tuple[Tensor, Tensor]:
            return by(Sampling(samples, control=Sketch(self.probes), seed=seed(purpose)))

        first, second = (assisted(f"{which} half", self.reference // 2) for which in ("first", "second"))
        found = {
            "first": first,
            "second": second,
            "reference": averaged(first, second),
            "plain": sampled("plain", self.plain),
            "two_stage": by(TwoStage()),
            "delta": by(Linear()),
            "sketch": by(Sketch(self.probes, seed("sketch"))),
            "assisted": assisted("sampling", self.assisted),
            "layerwise": by(Layerwise()),
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
class EveryMethod:
    """Errors against the reference by moment and method, the difference between its halves, and the time taken."""

    errors: dict[str, dict[str, Errors]]
    halves: dict[str, Errors]
    reference: int
    seconds: float

    @property
    def images(self) -> int:
        return self.halves["mean"].images

    def floor(self, moment: str, level: int) -> float:
        """The error that exact values would show: the mean of the two halves is off by half of their difference."""
        return self.halves[moment].average(level) / 2


def sweep_of(settings: Settings, studied: StudiedImages) -> EveryMethodSweep | None:
    """The sweep over some of the studied images, evenly spread, or None if there would be none."""
    kind = settings.device.type
    count = min(MOST_IMAGES, len(studied.images) // ONE_IN[kind])
    if count == 0:
        return None
    places = evenly_spread(len(studied.images), count)
    chosen = StudiedImages(studied.network, studied.images[places], studied.numbers[places], studied.seed)
    return EveryMethodSweep(NAME, chosen, 1, REFERENCE[kind])


def errors_of_methods(settings: Settings, sweep: EveryMethodSweep) -> EveryMethod:
    """Run what is missing of the sweep, and compute the errors."""
    found = settings.run(sweep)

    def values(name: str, moment: str) -> np.ndarray:
        return cube(found.columns, f"{name}_{moment}", sweep.studied.numbers)

    errors = {
        moment: {name: Errors.between(values(name, moment), values("reference", moment)) for name in METHODS}
        for moment in MOMENTS
    }
    halves = {moment: Errors.between(values("first", moment), values("second", moment)) for moment in MOMENTS}
    return EveryMethod(errors, halves, sweep.reference, found.seconds)


def panels(found: EveryMethod) -> tuple[Panel, ...]:
    """A panel for the mean and one for the variance, with a row for each noise level and a column for each method."""
    caption = (
        f"Averages over {_images(found)} and logits, against {found.reference:,} assisted samples: unbiased, corrected "
        f"by a sketch of {PROBES} probes. The floor is what exact values would show against these."
    )
    return tuple(
        Panel(
            f"Every method: error of the {moment}",
            ("σ", *(LABELS[name] for name in METHODS), "floor"),
            tuple(_row(found, moment, level) for level in range(len(SIGMAS))),
            caption,
            emphasis=(1 + METHODS.index("layerwise"),),
        )
        for moment in MOMENTS
    )


def _row(found: EveryMethod, moment: str, level: int) -> tuple[str, ...]:
    errors = (found.errors[moment][name].average(level) for name in METHODS)
    return (f"{SIGMAS[level]}", *(f"{error:.2g}" for error in errors), f"{found.floor(moment, level):.2g}")


def reading(found: EveryMethod | None) -> tuple[str, ...]:
    """What each error is made of, and which errors can be seen at all."""
    if found is None:
        return (
            "The other methods (layer by layer, sketch, assisted sampling) are compared on a GPU, or on a CPU from "
            f"--images {ONE_IN['cpu']} on, one image in {ONE_IN['cpu']}: that takes minutes an image.",
        )
    return (
        f"Every method on {_images(found)}, with a reference of its own, {found.reference:,} assisted samples in two "
        "independent halves: their difference says what the reference itself is worth (the floor). What the errors are "
        "made of: two-stage and delta method take the slopes at the image, where the expected slopes under the noise "
        "are wanted: a bias that no kernel removes. A sketch has the expected slopes, from "
        f"{PROBES} probes: what is left is the randomness of these, and a bias where deep tensors are "
        "not Gaussian. Assisted samples have no bias; their error "
        "is the sampling error of what the linear surrogate leaves over. Layer by layer, what is left is of second "
        "order in the third cumulants of deeper layers, and beyond these. "
        f"{PLAIN:,} samples err by chance alone.",
        _seen(found),
    )


def _seen(found: EveryMethod) -> str:
    """How the error of the tightest method compares with the floor and with plain sampling."""
    sentences = []
    for moment in MOMENTS:
        below, better = [], []
        for level, sigma in enumerate(SIGMAS):
            error = found.errors[moment]["layerwise"].average(level)
            if error < SEEN * found.floor(moment, level):
                below.append(f"{sigma}")
            if error < found.errors[moment]["plain"].average(level):
                better.append(f"{sigma}")
        bound = f"; at {_levels(below)} it is less than {SEEN} times the floor, so only a bound on it is known"
        sentences.append(
            f"Of the {moment}, layerwise's error is below that of {PLAIN:,} samples at {_levels(better)}"
            f"{bound if below else ''}."
        )
    return " ".join(sentences)


def _levels(sigmas: list[str]) -> str:
    return f"σ = {', '.join(sigmas)}" if sigmas else "no noise level"


def _images(found: EveryMethod) -> str:
    return "one image" if found.images == 1 else f"{found.images} images"


def numbers(found: EveryMethod | None) -> dict[str, Any] | None:
    """For machines."""
    if found is None:
        return None
    return {
        "images": found.images,
        "reference_samples": found.reference,
        "plain_samples": PLAIN,
        "assisted_samples": ASSISTED,
        "probes": PROBES,
        "levels": [
            {
                "sigma": sigma,
                **{
                    moment: {
                        "floor": found.floor(moment, level),
                        **{name: _number(found.errors[moment][name], level) for name in METHODS},
                    }
                    for moment in MOMENTS
                },
            }
            for level, sigma in enumerate(SIGMAS)
        ],
    }


def _number(errors: Errors, level: int) -> dict[str, Any]:
    several = errors.images > 1
    return {
        "average": errors.average(level),
        "standard_error": errors.standard_error(level) if several else None,
        "spread": errors.average_spread(level) if several else None,
        "not_finite": errors.beyond(level),
    }


def draw_methods(found: EveryMethod) -> Figure:
    """Draw the mean on the left and the variance on the right, shaded up to the error of 10⁴ samples."""
    figure = new_figure(8.0, 4.3)
    both = figure.subplots(1, 2)
    for axes, moment in zip(both, MOMENTS, strict=True):
        _lines(axes, found, moment)
        dress(axes, moment, "noise level σ", "average error")
        axes.tick_params(which="both", labelsize=SMALL, colors=INK)
    handles, labels = both[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=SMALL, labelcolor=INK)
    return figure


def _lines(axes: Axes, found: EveryMethod, moment: str) -> None:
    levels = range(len(SIGMAS))
    axes.set(xscale="log", yscale="log")
    errors = {name: [one.average(level) for level in levels] for name, one in found.errors[moment].items()}
    for name, style in STYLES.items():
        axes.plot(SIGMAS, errors[name], label=LABELS[name], **{"linewidth": 1.6, "markersize": 3.5} | style)
    floor = [found.floor(moment, level) for level in levels]
    axes.plot(SIGMAS, floor, color=INK, linestyle=":", linewidth=1.2, label="floor of the reference")
    every = [value for values in (*errors.values(), floor) for value in values if value > 0]
    bottom = min(every) / 1.5 if every else 1e-7
    axes.fill_between(SIGMAS, errors["plain"], bottom, color=PALE, linewidth=0, label=f"below {LABELS['plain']}")
    axes.set_ylim(bottom=bottom)
