"""How the experiments' figures look: colours that the colour-blind can tell apart, sizes for a single column."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, PURPLE, SKY, AMBER = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00"
"""Okabe and Ito's colours."""
INK, GREY, PALE = "#222222", "#767676", "#E6E6E6"
SMALL = 8.0
"""Points: the smallest type in a figure of column width."""


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches that lays itself out; nothing global is touched."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def dress(axes: Axes, title: str, x: str, y: str) -> None:
    """Titles, a light grid behind the data, and no frame where there is no scale."""
    axes.set_title(title, fontsize=SMALL + 1, color=INK, loc="left")
    axes.set_xlabel(x, fontsize=SMALL + 0.5, color=INK)
    axes.set_ylabel(y, fontsize=SMALL + 0.5, color=INK)
    axes.tick_params(labelsize=SMALL, colors=INK, length=3)
    axes.grid(True, color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GREY)
