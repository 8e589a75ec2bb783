"""The paper's Table 2: how tight mean, old and new variance are on LeNet, for every logit."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from netmoments.report.pictures import BLUE, INK, ORANGE, SMALL, new_figure
from reproduction import every_method, lenet_on_mnist
from reproduction.experiment import BesidePaper, Drawing, Outcome, Panel, Settings
from reproduction.image_sweeps import SIGMAS
from reproduction.lenet_on_mnist import Errors
from reproduction.plots import AMBER, GREEN, GREY, PALE, PURPLE, dress
from reproduction.published import TABLE_2

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAPER_COLUMN = {
    "mean": "mean_error",
    "variance": "variance_error_new",
    "series": "variance_error_new",
    "authors_old": "variance_error_old",
}
"""The published column that stands beside each of ours."""
NAMES = {
    "mean": "mean",
    "delta_mean": "mean, delta method",
    "theorem_2": "old variance, Theorem 2 to the letter",
    "authors_old": "old variance, as the authors ran it",
    "series": "new variance, 5 terms as the authors ran it",
    "variance": "new variance, exact kernel",
    "delta_variance": "variance, delta method",
}
LINES = {
    "mean": ("two-stage", GREEN), "delta_mean": ("delta method", GREY), "theorem_2": ("old, Theorem 2", AMBER),
    "authors_old": ("old, as run", ORANGE), "series": ("new, 5 terms as run", BLUE),
    "variance": ("new, exact", GREEN), "delta_variance": ("delta method", GREY),
}  # fmt: skip
PUBLISHED = {
    "mean_error": ("paper", INK),
    "variance_error_old": ("paper, old", PURPLE),
    "variance_error_new": ("paper, new", INK),
}


def reproduce(settings: Settings) -> Outcome:
    studied = lenet_on_mnist.shared_images(settings)
    sweep = every_method.sweep_of(settings, studied)
    settings.check(*([] if sweep is None else [sweep]))
    first = lenet_on_mnist.sampled_scores(settings, studied)
    again = lenet_on_mnist.sampled_again(settings, studied)
    found = lenet_on_mnist.computed_scores(settings, studied, first)
    others = None if sweep is None else every_method.errors_of_methods(settings, sweep)
    errors, floor = found.errors, lenet_on_mnist.floor(first, again)
    return Outcome(
        name="table-2",
        title="Table 2: tightness of the moments on LeNet",
        reading=(*_reading(settings, errors, floor), *every_method.reading(others)),
        comparisons=tuple(comparisons(errors)),
        panels=(
            mean_panel(errors, floor),
            variance_panel(errors, floor),
            *(() if others is None else every_method.panels(others)),
        ),
        drawings=(
            Drawing(
                "table-2",
                f"Errors averaged over images and logits. Shaded: what {settings.samples:,} samples cannot tell apart.",
                partial(draw_errors, errors, floor),
            ),
            *(() if others is None else (_drawing(others),)),
        ),
        numbers={
            "images": len(studied.images),
            "images_sampled_twice": floor["mean"].images,
            "samples": settings.samples,
            "levels": [level_numbers(level, errors, floor) for level in range(len(SIGMAS))],
            "tighter": every_method.numbers(others),
        },
        seconds=first.seconds + again.seconds + found.seconds + (0.0 if others is None else others.seconds),
        details=(_by_logit(errors, floor),),
    )


def _drawing(found: every_method.EveryMethod) -> Drawing:
    return Drawing(
        "table-2-methods",
        f"Errors of every method on {found.images} of the images, against {found.reference:,} samples. Shaded: below "
        "what 10,000 samples are off.",
        partial(every_method.draw_methods, found),
    )


def comparisons(errors: Mapping[str, Errors]) -> list[BesidePaper]:
    """Comparisons with the average row of the paper's table, at all noise levels."""
    return [
        BesidePaper(f"{NAMES[name]}, σ = {sigma}", errors[name].average(level), _published(sigma, "avg", column)[0])
        for name, column in PAPER_COLUMN.items()
        for level, sigma in enumerate(SIGMAS)
    ]


def mean_panel(errors: Mapping[str, Errors], floor: Mapping[str, Errors]) -> Panel:
    rows = []
    for level, sigma in enumerate(SIGMAS):
        paper = _published(sigma, "avg", "mean_error")
        ours = [_with_spread(errors[name], level) for name in ("mean", "delta_mean")]
        rows.append((f"{sigma}", _pair(*paper), *ours, f"{floor['mean'].resolution(level):.2g}"))
    return Panel(
        "Error of the mean, averaged over logits",
        ("σ", "paper", "two-stage", "delta method", "sampling's floor"),
        tuple(rows),
        "Mean over images and logits ± the mean over logits of the standard deviation over images, as in the paper.",
        emphasis=(2,),
    )


def variance_panel(errors: Mapping[str, Errors], floor: Mapping[str, Errors]) -> Panel:
    rows = []
    for level, sigma in enumerate(SIGMAS):
        old, new = (_published(sigma, "avg", f"variance_error_{which}") for which in ("old", "new"))
        shown = {name: _with_spread(errors[name], level) for name in errors}
        rows.append(
            (
                f"{sigma}", _pair(*old), shown["theorem_2"], shown["authors_old"], _pair(*new), shown["series"],
                shown["variance"], shown["delta_variance"], f"{floor['variance'].resolution(level):.4f}",
            )
        )  # fmt: skip
    headings = (
        "σ", "old: paper", "old: Theorem 2", "old: as run", "new: paper", "new: 5 terms, as run", "new: exact",
        "delta method", "sampling's floor",
    )  # fmt: skip
    return Panel("Error of the variance, averaged over logits", headings, tuple(rows), emphasis=(6,))


def _by_logit(errors: Mapping[str, Errors], floor: Mapping[str, Errors]) -> Panel:
    ours = ("mean", "theorem_2", "authors_old", "series", "variance", "delta_variance")
    rows: list[tuple[str, ...]] = []
    breaks = []
    for level, sigma in enumerate(SIGMAS):
        breaks.append(len(rows))
        for logit in range(errors["mean"].each.shape[2]):
            paper = [_pair(*published) for published in TABLE_2[sigma, str(logit)]]
            shown = [_pair(errors[name].mean(level, logit), errors[name].spread(level, logit)) for name in ours]
            again = f"{floor['variance'].mean(level, logit) / 2**0.5:.3f}"
            rows.append(
                (f"{sigma},\u00a0g{logit}", paper[0], shown[0], paper[1], *shown[1:3], paper[2], *shown[3:], again)
            )
    headings = (
        "σ, logit", "mean: paper", "mean", "old: paper", "old: Theorem 2", "old: as run", "new: paper",
        "new: 5 terms, as run", "new: exact", "delta method", "sampling's floor",
    )  # fmt: skip
    caption = "Mean ± standard deviation over images."
    return Panel("Every logit", headings, tuple(rows), caption, emphasis=(2, 8), breaks=tuple(breaks[1:]))


def level_numbers(level: int, errors: Mapping[str, Errors], floor: Mapping[str, Errors]) -> dict[str, Any]:
    """All averages at one noise level, as plain numbers."""
    return {
        "sigma": SIGMAS[level],
        "sampling_floor": {name: floor[name].resolution(level) for name in ("mean", "variance")},
        **{
            name: {
                "average": error.average(level),
                "standard_error": error.standard_error(level),
                "spread": error.average_spread(level),
                "not_finite": error.beyond(level),
                "by_logit": [round(error.mean(level, logit), 6) for logit in range(error.each.shape[2])],
            }
            for name, error in errors.items()
        },
    }


def _reading(settings: Settings, errors: Mapping[str, Errors], floor: Mapping[str, Errors]) -> tuple[str, ...]:
    beyond = sum(errors["series"].beyond(level) for level in range(len(SIGMAS)))
    return (
        f"LeNet linearized at l = 3, at each of {errors['mean'].images:,} MNIST test images in [0, 1]; a random "
        "covariance for each (eigenvalues uniform on (0, 1], eigenvectors from a QR decomposition), scaled to the four "
        f"noise levels; {settings.samples:,} samples. Errors are 2|x−y|/(|x|+|y|) against the sampled value: smaller "
        "is better.",
        "Two readings of the old variance: Theorem 2 to the letter takes every unit as if its mean were zero; the "
        "authors' program takes the units' own variances exactly and only pairs as if their means were zero. The "
        "5-term series is run as they ran it, in float32, subtracting E[y₁]E[y₂] from E[y₁y₂] pair by pair"
        + (f" ({beyond} values were not finite and count as the largest error, 2)." if beyond else "."),
        f"Sampling's floor is the error that exact values would show against {settings.samples:,} samples, from a "
        f"second independent run on {floor['mean'].images:,} of the images. The delta method (scores and derivative "
        "at the image) shows how much of the error is the linearization itself: where it equals the exact kernel's, no "
        "kernel could do better.",
    )


def _published(sigma: float, logit: str, column: str) -> tuple[float, float]:
    return getattr(TABLE_2[sigma, logit], column)


def _pair(mean: float, spread: float) -> str:
    return f"{mean:.3f} ± {spread:.3f}"


def _with_spread(errors: Errors, level: int) -> str:
    return f"{errors.average(level):.4f} ± {errors.average_spread(level):.3f}"


def draw_errors(errors: Mapping[str, Errors], floor: Mapping[str, Errors]) -> Figure:
    """Draw the mean on the left and the variance on the right."""
    figure = new_figure(8.0, 4.3)
    left, right = figure.subplots(1, 2)
    _lines(left, errors, ("mean", "delta_mean"), ("mean_error",), floor["mean"])
    dress(left, "mean", "noise level σ", "average error")
    variances = ("theorem_2", "authors_old", "series", "variance", "delta_variance")
    _lines(right, errors, variances, ("variance_error_old", "variance_error_new"), floor["variance"])
    dress(right, "variance", "noise level σ", "average error")
    for axes in (left, right):
        axes.legend(
            loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, frameon=False, fontsize=SMALL, labelcolor=INK
        )
    return figure


def _lines(
    axes: Axes, errors: Mapping[str, Errors], names: tuple[str, ...], published: tuple[str, ...], floor: Errors
) -> None:
    levels = range(len(SIGMAS))
    axes.set(xscale="log", yscale="log")
    for name in names:
        label, colour = LINES[name]
        style = {"linestyle": "--", "linewidth": 1.1, "zorder": 3} if colour == GREY else {"linewidth": 1.8}
        values = [errors[name].average(level) for level in levels]
        axes.plot(SIGMAS, values, marker="o", markersize=3.5, color=colour, label=label, **style)
    for column in published:
        label, colour = PUBLISHED[column]
        values = [getattr(TABLE_2[sigma, "avg"], column).mean for sigma in SIGMAS]
        axes.plot(
            SIGMAS, values, linestyle="none", marker="D", markersize=6, markerfacecolor="none", color=colour,
            label=label, zorder=4,
        )  # fmt: skip
    seen = [floor.resolution(level) for level in levels]
    bottom = max(min(seen) / 3, 1e-7)
    axes.fill_between(SIGMAS, seen, bottom, color=PALE, linewidth=0, label="below sampling's floor")
    axes.set_ylim(bottom=bottom)
