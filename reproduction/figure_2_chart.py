"""The drawing of Figure 2: largest errors over the number of terms, and over the correlation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from netmoments.report.pictures import AMBER, BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, SMALL, dress, new_figure
from netmoments.sweep.item import Columns
from reproduction.grid_errors import NODES, PAPER_CORRELATIONS, SEAM, TERMS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROUNDING = 1e-17
"""Where an error of exactly zero is drawn."""
SHADES = (AMBER, ORANGE, PURPLE, SKY, BLUE)
MARKERS = "osD^v"


def draw_errors(columns: Columns, samples: int) -> Figure:
    """Left: over the number of terms, or of nodes, the worst of the paper's grid. Right: over ρ."""
    figure = new_figure(6.0, 3.9)
    left, right = figure.subplots(1, 2, sharey=True)
    _over_terms(left, columns, samples)
    _over_correlation(right, columns)
    for axes in (left, right):
        axes.legend(
            loc="upper center", bbox_to_anchor=(0.45, -0.2), ncols=2, columnspacing=1, handlelength=1.8, frameon=False,
            fontsize=SMALL, labelcolor=INK,
        )  # fmt: skip
    return figure


def _over_terms(axes: Axes, columns: Columns, samples: int) -> None:
    paper = np.isin(columns["rho"], PAPER_CORRELATIONS)
    moderate = paper & (np.abs(columns["rho"]) <= SEAM)

    def worst(kind: str, counts: Sequence[int], rows: np.ndarray) -> list[float]:
        return [max(ROUNDING, float(columns[f"{kind}_{count}"][rows].max())) for count in counts]

    axes.semilogy(TERMS, worst("sampled", TERMS, paper), color=ORANGE, marker="s", markersize=4, linewidth=1.3,
                  label="series vs sampling")  # fmt: skip
    axes.axhline(columns["monte_carlo"][paper].max(), color=ORANGE, linestyle="--", linewidth=1,
                 label=f"sampling, {samples:,}")  # fmt: skip
    axes.semilogy(TERMS, worst("series", TERMS, paper), color=BLUE, marker="o", markersize=4, linewidth=1.3,
                  label="series vs exact")  # fmt: skip
    axes.semilogy(NODES, worst("nodes", NODES, paper), color=GREEN, marker="^", markersize=4, linewidth=1.3,
                  label="quadrature nodes")  # fmt: skip
    axes.semilogy(NODES, worst("nodes", NODES, moderate), color=GREEN, marker="^", markersize=4, linewidth=1.3,
                  markerfacecolor="white", linestyle=":", label="nodes, |ρ| ≤ 0.7")  # fmt: skip
    axes.axhline(max(ROUNDING, columns["kernel"][paper].max()), color=INK, linestyle="-.", linewidth=1,
                 label="netmoments")  # fmt: skip
    dress(axes, "The paper's grid", "terms of the series, or nodes", "largest absolute error")
    axes.set_xticks([1, 10, 20, 30, 40, 50])


def _over_correlation(axes: Axes, columns: Columns) -> None:
    order = np.argsort(columns["rho"])
    rho = columns["rho"][order]
    for count, colour, marker in zip(TERMS, SHADES, MARKERS, strict=True):
        error = np.maximum(ROUNDING, columns[f"series_{count}"][order])
        axes.semilogy(rho, error, color=colour, marker=marker, markersize=2.2, linewidth=1,
                      label=f"{count} term{'s' if count > 1 else ''}")  # fmt: skip
    kernel = np.maximum(ROUNDING, columns["kernel"][order])
    axes.semilogy(rho, kernel, color=INK, linestyle="-.", linewidth=1.1, label="netmoments")
    for place in (-SEAM, SEAM):
        axes.axvline(place, color=GREY, linestyle=":", linewidth=0.9)
    dress(axes, "By correlation", "correlation ρ", "")
    axes.set_xticks([-1, -SEAM, -0.5, 0, 0.5, SEAM, 1], ["−1", "−1/√2", "", "0", "", "1/√2", "1"])
