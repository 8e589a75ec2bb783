"""The style of plots: colours beside those of `netmoments.report.pictures`, titles, axes and grids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from netmoments.report.pictures import INK, SMALL

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GREEN, PURPLE, SKY, AMBER = "#009E73", "#CC79A7", "#56B4E9", "#E69F00"
"""The others of Okabe and Ito's colours that are used."""
GREY, PALE = "#767676", "#E6E6E6"
"""Colours of axes and grids."""


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
