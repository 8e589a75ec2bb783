"""The drawing of the sweep `tighter`: the error of every method over the noise level, beside 10⁴ samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from netmoments.report.pictures import AMBER, BLUE, GREEN, GREY, INK, PALE, PURPLE, SMALL, dress, new_figure
from reproduction.over_images import SIGMAS
from reproduction.tighter import MOMENTS, Tighter
from reproduction.tighter_panels import LABELS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLES: dict[str, dict[str, Any]] = {
    "two_stage": {"color": GREEN, "marker": "o"},
    "delta": {"color": GREY, "marker": "o", "linestyle": "--", "linewidth": 1.1, "zorder": 3},
    "sketch": {"color": AMBER, "marker": "s"},
    "assisted": {"color": PURPLE, "marker": "v"},
    "layerwise": {"color": BLUE, "marker": "D", "linewidth": 2.2, "zorder": 4},
}


def draw_methods(found: Tighter) -> Figure:
    """Left the mean, right the variance; shaded, up to what 10⁴ samples are off."""
    figure = new_figure(8.0, 4.3)
    both = figure.subplots(1, 2)
    for axes, moment in zip(both, MOMENTS, strict=True):
        _lines(axes, found, moment)
        dress(axes, moment, "noise level σ", "average error")
        axes.tick_params(which="both", labelsize=SMALL, colors=INK)
    handles, labels = both[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=SMALL, labelcolor=INK)
    return figure


def _lines(axes: Axes, found: Tighter, moment: str) -> None:
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
