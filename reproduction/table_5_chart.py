"""The drawing of Table 5: rates from every class to every other, the paper's and ours, and the sparsity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from netmoments.report.pictures import GREY, INK, PALE, SMALL, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = "Blues"
PALE_BELOW = 0.6
"""Cells up to this have dark letters."""


def draw_matrices(
    classes: Sequence[str], paper: np.ndarray, at_zero: np.ndarray, confident: np.ndarray, sparsity: np.ndarray
) -> Figure:
    """Above the paper's rates and ours at γ = 0; below ours at 95 %, and the sparsity of that noise."""
    figure = new_figure(8.0, 7.4)
    axes = figure.subplots(2, 2)
    panels = (
        ("the paper, γ = 0", paper),
        ("ours, γ = 0, formula alone", at_zero),
        ("ours, 95 % of samples, network followed", confident),
        ("sparsity of the noise at 95 %", sparsity),
    )
    for axis, (title, values) in zip(axes.flat, panels, strict=True):
        _heat_map(axis, classes, values, title)
    for axis in axes[:, 0]:
        axis.set_ylabel("source", fontsize=SMALL + 0.5, color=INK)
    for axis in axes[1]:
        axis.set_xlabel("target", fontsize=SMALL + 0.5, color=INK)
    return figure


def _heat_map(axes: Axes, classes: Sequence[str], values: np.ndarray, title: str) -> None:
    from matplotlib import colormaps

    colours = colormaps[COLOURS].with_extremes(bad=PALE)
    axes.imshow(np.ma.masked_invalid(values), cmap=colours, vmin=0, vmax=1)
    for (row, column), value in np.ndenumerate(values):
        if not math.isnan(value):
            ink = INK if value <= PALE_BELOW else "white"
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=SMALL, color=ink)
    mean = float(np.nanmean(values)) if np.isfinite(values).any() else math.nan
    average = "" if math.isnan(mean) else f", mean {mean:.3f}"
    axes.set_title(f"{title}{average}", fontsize=SMALL + 1, color=INK, loc="left")
    places = range(len(classes))
    axes.set_xticks(places, classes, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(places, classes)
    axes.tick_params(labelsize=SMALL, colors=INK, length=0)
    for side in axes.spines.values():
        side.set_color(GREY)
