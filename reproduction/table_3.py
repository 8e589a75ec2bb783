"""The paper's Table 3: histograms of the variances of LeNet's outputs, sampled and computed."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from netmoments.report.pictures import ORANGE, new_figure
from reproduction import lenet_on_mnist
from reproduction.experiment import BesidePaper, Drawing, Outcome, Panel, Settings
from reproduction.image_sweeps import SIGMAS
from reproduction.lenet_on_mnist import ComputedScores, SampledScores
from reproduction.plots import GREEN
from reproduction.published import TABLE_2

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BINS = 40
QUANTILES = (0.05, 0.5, 0.95)


def reproduce(settings: Settings) -> Outcome:
    studied = lenet_on_mnist.shared_images(settings)
    sampled = lenet_on_mnist.sampled_scores(settings, studied)
    found = lenet_on_mnist.computed_scores(settings, studied, sampled)
    return Outcome(
        name="table-3",
        title="Table 3: histograms of the output variances",
        reading=(
            f"The variances of LeNet's ten outputs over {len(studied.images):,} MNIST test images, from "
            f"{settings.samples:,} samples and from the formulas, ten histograms for each noise level as in the paper. "
            "Old is the old variance as the authors ran it, new the exact kernel; the legends give the error averaged "
            "over images, 2|x−y|/(|x|+|y|). The axis ends at the 99th percentile.",
        ),
        comparisons=tuple(_comparisons(found)),
        panels=(_quantiles(sampled, found),),
        drawings=tuple(_drawing(level, sampled, found) for level in range(len(SIGMAS))),
        numbers={"images": len(studied.images), "samples": settings.samples, "histograms": _histograms(sampled, found)},
        seconds=sampled.seconds + found.seconds,
    )


def _comparisons(found: ComputedScores) -> list[BesidePaper]:
    """Comparisons of the legends, which are errors of Table 2; that table has the paper's values."""
    return [
        BesidePaper(
            f"{words}, averaged over logits, σ = {sigma}",
            found.errors[name].average(level),
            getattr(TABLE_2[sigma, "avg"], column)[0],
        )
        for level, sigma in enumerate(SIGMAS)
        for name, words, column in (
            ("authors_old", "old variance", "variance_error_old"),
            ("variance", "new variance", "variance_error_new"),
        )
    ]


def _quantiles(sampled: SampledScores, found: ComputedScores) -> Panel:
    rows = []
    for level, sigma in enumerate(SIGMAS):
        for words, values in _three(sampled, found):
            shown = (f"{x:.3g}" for x in np.quantile(values[:, level], QUANTILES))
            rows.append((f"{sigma}", words, *shown))
    headings = ("σ", "variance", *(f"{q:.0%} quantile" for q in QUANTILES))
    breaks = tuple(range(3, len(rows), 3))
    return Panel("The variances in numbers, all logits together", headings, tuple(rows), breaks=breaks)


def _three(sampled: SampledScores, found: ComputedScores) -> tuple[tuple[str, np.ndarray], ...]:
    return (
        ("sampled", sampled.variance),
        ("old", found.values["authors_old"]),
        ("new", found.values["variance"]),
    )


def _edges(sampled: SampledScores, found: ComputedScores, level: int, logit: int) -> np.ndarray:
    every = np.concatenate([values[:, level, logit] for _, values in _three(sampled, found)])
    return np.linspace(0, np.quantile(every, 0.99), BINS + 1)


def _histograms(sampled: SampledScores, found: ComputedScores) -> list[dict[str, object]]:
    """The counts of the histograms that are drawn."""
    made: list[dict[str, object]] = []
    for level, sigma in enumerate(SIGMAS):
        for logit in range(sampled.variance.shape[2]):
            edges = _edges(sampled, found, level, logit)
            counts = {
                words: np.histogram(values[:, level, logit], edges)[0].tolist()
                for words, values in _three(sampled, found)
            }
            made.append({"sigma": sigma, "logit": logit, "end": float(edges[-1]), **counts})
    return made


def _drawing(level: int, sampled: SampledScores, found: ComputedScores) -> Drawing:
    sigma = SIGMAS[level]
    return Drawing(
        f"table-3-sigma-{sigma}", f"Variances of the ten outputs at σ = {sigma}.", partial(draw, level, sampled, found)
    )


def draw(level: int, sampled: SampledScores, found: ComputedScores) -> Figure:
    """Draw ten histograms in two rows."""
    logits = sampled.variance.shape[2]
    columns = min(5, logits)
    lines = -(-logits // columns)
    figure = new_figure(2.5 * columns, 1.95 * lines)
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    for logit, axis in enumerate(axes[:logits]):
        _histogram(axis, level, logit, sampled, found)
    for axis in axes[logits:]:
        axis.set_visible(False)
    figure.supxlabel(f"variance of the output at σ = {SIGMAS[level]}", fontsize=9)
    return figure


def _histogram(axis: Axes, level: int, logit: int, sampled: SampledScores, found: ComputedScores) -> None:
    edges = _edges(sampled, found, level, logit).tolist()
    axis.hist(sampled.variance[:, level, logit], edges, color="#CBD5DC", label="sampled")
    for name, words, colour in (("authors_old", "old", ORANGE), ("variance", "new", GREEN)):
        error = found.errors[name].mean(level, logit)
        axis.hist(
            found.values[name][:, level, logit], edges, histtype="step", color=colour, linewidth=1.2,
            label=f"{words} ({error:.3f})",
        )  # fmt: skip
    axis.set_title(f"logit {logit}", fontsize=8)
    axis.tick_params(labelsize=6)
    axis.ticklabel_format(axis="x", style="sci", scilimits=(-2, 3))
    axis.xaxis.get_offset_text().set_fontsize(6)
    axis.set_yticks([])
    axis.legend(fontsize=6.5, frameon=False)
