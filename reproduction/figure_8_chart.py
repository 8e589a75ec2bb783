"""The drawing of Figure 8: misclassification and sparsity over the expected separation of the predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from netmoments.report.pictures import BLUE, GREY, INK, ORANGE, SMALL, dress, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curve = Sequence[Mapping[str, Any]]
"""Summaries of the attacks of one kind, γ rising."""
STYLES = (
    ("as the paper: formula alone", BLUE, "o", "separation_by_formula"),
    ("network followed", ORANGE, "s", "separation_sampled"),
)
FULL = 1.02
"""Where an axis of shares ends."""


def draw_curves(formula: Curve, followed: Curve, paper_sparsity: float) -> Figure:
    """Left the rate, right the sparsity; filled: samples, hollow: images of which most samples are fooled."""
    figure = new_figure(8.0, 3.9)
    left, right = figure.subplots(1, 2)
    for curve, (label, colour, marker, place) in zip((formula, followed), STYLES, strict=True):
        drawn = {"color": colour, "marker": marker, "markersize": 4.5}
        _line(left, curve, place, "samples_fooled", label=f"samples, {label}", linewidth=1.6, **drawn)
        _line(left, curve, place, "images_fooled", label=f"images, {label}", linewidth=1.0, linestyle="--",
              markerfacecolor="white", **drawn)  # fmt: skip
        _line(right, curve, place, "sparsity", label=label, linewidth=1.6, **drawn)
    right.axhline(paper_sparsity, color=GREY, linestyle=":", linewidth=1.2, label="where the paper's starts")
    dress(left, "taken for the target", "separation in favour of the target (logits)", "share")
    dress(right, "sparsity of μ", "separation in favour of the target (logits)", "share of pixels unchanged")
    for axes in (left, right):
        axes.set_ylim(0, FULL)
        axes.legend(
            loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=1, frameon=False, fontsize=SMALL, labelcolor=INK
        )
    return figure


def _line(axes: Axes, curve: Curve, place: str, value: str, **style: Any) -> None:
    points = [(one[place], one[value]) for one in curve if one[place] is not None and one[value] is not None]
    axes.plot([x for x, _ in points], [y for _, y in points], **style)
