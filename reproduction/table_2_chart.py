"""The drawing of Table 2: errors of mean and variance over the noise level, beside the paper's and sampling's floor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from netmoments.report.pictures import AMBER, BLUE, GREEN, GREY, INK, ORANGE, PALE, PURPLE, SMALL, dress, new_figure
from reproduction.errors import Errors
from reproduction.over_images import SIGMAS
from reproduction.published import TABLE_2

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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


def draw_errors(errors: Mapping[str, Errors], floor: Mapping[str, Errors]) -> Figure:
    """Left the mean, right the variance."""
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
