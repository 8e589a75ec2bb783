"""The drawing of the frontier: error against time, a panel for each network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from netmoments.report.pictures import (
    AMBER,
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PALE,
    PURPLE,
    SKY,
    SMALL,
    dress,
    new_figure,
)
from reproduction.frontier_errors import Frontier, Point

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLES = {
    "linear": ("delta method", GREY, "o"), "two-stage": ("two-stage", GREEN, "o"),
    "diagonal": ("diagonal (ADF)", SKY, "X"), "unscented": ("unscented", SKY, "P"),
    "layerwise": ("layerwise", BLUE, "D"), "sketch": ("sketch, by probes", AMBER, "s"),
    "assisted": ("assisted samples", PURPLE, "v"),
}  # fmt: skip
BEYOND = 10.0
"""How far the line of sampling goes on in time beyond what was taken, or beyond the slowest method."""


def draw_frontiers(found: Sequence[Frontier]) -> Figure:
    """Small multiples; to the lower left is better."""
    figure = new_figure(3.4 * max(2, len(found)), 3.9)
    every = figure.subplots(1, len(found), squeeze=False)[0]
    handles: dict[str, Artist] = {}
    for axes, one in zip(every, found, strict=True):
        _panel(axes, one)
        dress(axes, one.case.name, "seconds an image", "relative error of the variance" if axes is every[0] else "")
        axes.tick_params(which="both", labelsize=SMALL, colors=INK)
        drawn, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, drawn, strict=True))
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=5, frameon=False, fontsize=SMALL,
        labelcolor=INK,
    )  # fmt: skip
    return figure


def _panel(axes: Axes, one: Frontier) -> None:
    axes.set(xscale="log", yscale="log")
    done = [point for point in one.points if point.done and point.variance_error > 0]
    _sampling(axes, one, [point.seconds for point in done])
    for method, (label, colour, marker) in STYLES.items():
        mine = [point for point in done if point.way.method == method]
        if not mine:
            continue
        axes.plot(
            [point.seconds for point in mine], [point.variance_error for point in mine], color=colour, marker=marker,
            markersize=6, linewidth=0.8, linestyle="-" if len(mine) > 1 else "none", label=label, zorder=4,
        )  # fmt: skip
        for point in mine:
            _size(axes, point, colour)
    errors = [point.variance_error for point in done] + [one.variance_floor]
    bottom, top = min(errors) / 2, max(errors) * 1.7
    axes.axhspan(bottom, one.variance_floor, color=PALE, linewidth=0, label="below the reference's floor", zorder=0)
    axes.set_ylim(bottom, top)


def _sampling(axes: Axes, one: Frontier, times: Sequence[float]) -> None:
    """What was taken as points, the law c/√N as a line."""
    taken = one.plain
    start = min((point.seconds for point in taken), default=100 * one.sample_seconds)
    stop = max((*times, start * BEYOND))
    ends = (start, stop)
    law = [one.of_one_sample * (seconds / one.sample_seconds) ** -0.5 for seconds in ends]
    axes.plot(ends, law, color=INK, linestyle="--", linewidth=1.0, label="c/√N", zorder=2)
    axes.plot(
        [point.seconds for point in taken], [point.variance_error for point in taken], color=INK, marker=".",
        markersize=7, linewidth=1.3, label="plain samples", zorder=3,
    )  # fmt: skip
    for point in taken:
        _size(axes, point, INK)


def _size(axes: Axes, point: Point, colour: str) -> None:
    """The probes or samples, beside the point."""
    if point.way.size:
        axes.annotate(
            _short(point.way.size), (point.seconds, point.variance_error), xytext=(5, 4), textcoords="offset points",
            fontsize=SMALL - 1.5, color=colour if colour != AMBER else ORANGE, zorder=5,
        )  # fmt: skip


def _short(size: int) -> str:
    power = len(str(size)) - 1
    return rf"$10^{power}$" if size >= 100 and size == 10**power else f"{size}"
