"""Error against time for every method on three networks, to help choose a method. This is not in the paper."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from netmoments.report.pictures import BLUE, INK, ORANGE, SMALL, new_figure
from reproduction.experiment import Drawing, Outcome, Panel, Settings
from reproduction.frontier_sweep import (
    BESIDE,
    LONG,
    PROBES,
    REPEATS,
    SIGMA,
    Frontier,
    FrontierSweep,
    Point,
    Way,
    cases,
    frontiers,
)
from reproduction.frontier_sweep import NAME as SWEEP
from reproduction.plots import AMBER, GREEN, GREY, PALE, PURPLE, SKY, dress

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "frontier"
LABELS = {
    "linear": "delta method",
    "two-stage": "two-stage",
    "diagonal": "diagonal (ADF)",
    "unscented": "unscented transform",
    "layerwise": "layerwise",
    "sketch": "sketch, {:,} probes",
    "assisted": "{:,} assisted samples",
    "sampling": "{:,} samples",
}
SEEN = 1.5
"""For an error below so many floors only a bound is known."""
STYLES = {
    "linear": ("delta method", GREY, "o"), "two-stage": ("two-stage", GREEN, "o"),
    "diagonal": ("diagonal (ADF)", SKY, "X"), "unscented": ("unscented", SKY, "P"),
    "layerwise": ("layerwise", BLUE, "D"), "sketch": ("sketch, by probes", AMBER, "s"),
    "assisted": ("assisted samples", PURPLE, "v"),
}  # fmt: skip
BEYOND = 10.0
"""Factor of time by which the line of sampling extends beyond the samples taken, or beyond the slowest method."""


def reproduce(settings: Settings) -> Outcome:
    networks = cases(settings)
    results = settings.run(FrontierSweep(SWEEP, networks))
    found = frontiers(networks, results.columns)
    full = [one for one in found if one.case.in_full]
    return Outcome(
        name=NAME,
        title="Error against time, every method",
        reading=reading(full, settings.device.type),
        comparisons=(),
        panels=(*map(panel, full), *([every_case(found)] if len(found) > len(full) else [])),
        drawings=(
            Drawing(
                NAME,
                "Relative error of the variance against time, lower left is better; numbers are probes or samples. "
                "Dashed: plain sampling's c/√N. Shaded: below what the reference can tell.",
                partial(draw_frontiers, full),
            ),
        ),
        numbers={"sigma": SIGMA, "networks": [numbers(one) for one in found]},
        seconds=results.seconds,
    )


def panel(one: Frontier) -> Panel:
    """A panel with a row for each method."""
    size = one.case.size
    count = len(one.case.studied.images)
    return Panel(
        f"{one.case.name}: {count} image{'s' if count > 1 else ''}, {one.case.noise_in_words}, σ = {SIGMA}",
        ("method", "error of the mean", "error of the variance", "seconds", "by 10⁴ samples", "as good", "gain"),
        tuple(_row(one, point) for point in one.points),
        f"Against {size.reference:,} samples, whose floor is {one.mean_floor:.2g} for the mean and "
        f"{one.variance_floor:.2g} for the variance. As good: how many plain samples have this error of the variance; "
        f"gain: their time by the method's; ≥ where the error is less than {SEEN} floors, so only a bound is known.",
        emphasis=(2,),
        breaks=(len(one.methods),) if one.plain else (),
    )


MANY = (Way("linear"), Way("two-stage"), Way("layerwise"), Way("sketch", PROBES), Way("assisted", 1_000))
"""The ways in the table of many networks."""


def every_case(found: Sequence[Frontier]) -> Panel:
    """A line for each network and noise level: the error of the variance, and the time relative to 10⁴ samples."""
    ordered = sorted(found, key=lambda one: ([other.case.network for other in found].index(one.case.network),
                                             one.case.sigma))  # fmt: skip
    names = [one.case.network for one in ordered]
    return Panel(
        "Every network and noise level: error of the variance (time by 10⁴ samples)",
        ("network", "σ", *(LABELS[way.method].format(way.size) for way in MANY), "of 10⁴ samples", "nothing beats"),
        tuple(_line(one) for one in ordered),
        "Of 10⁴ samples: their error by the law c/√N. Nothing beats, in time and error at once: the most exact.",
        breaks=tuple(place for place in range(1, len(names)) if names[place] != names[place - 1]),
    )


def _line(one: Frontier) -> tuple[str, ...]:
    points = {point.way: point for point in one.points}
    cells = [
        "—" if way not in points else f"{points[way].variance_error:.2g} ({points[way].ratio:.2g})"
        if points[way].done else points[way].status
        for way in MANY
    ]  # fmt: skip
    best = one.best()
    kept = name_of(best[-1]) if best else "samples"
    return (one.case.network, f"{one.case.sigma:g}", *cells, f"{one.of_one_sample / BESIDE**0.5:.2g}", kept)


def _row(one: Frontier, point: Point) -> tuple[str, ...]:
    if not point.done:
        return (name_of(point), point.status, "—", "—", "—", "—", "—")
    least = "≥ " if _bounded(one, point) else ""
    return (
        name_of(point),
        f"{point.mean_error:.2g}",
        f"{point.variance_error:.2g}",
        f"{point.seconds:.3g}",
        f"{point.ratio:.2g}",
        "—" if point.way.method == "sampling" else f"{least}{_samples(one.as_good_samples(point))}",
        "—" if point.way.method == "sampling" else f"{least}{one.gain(point):.2g}",
    )


def name_of(point: Point) -> str:
    """The name of the method in the tables."""
    return LABELS[point.way.method].format(point.way.size)


def _samples(count: float) -> str:
    """A number of samples, to two digits."""
    digits = 10 ** max(0, math.floor(math.log10(max(count, 1))) - 1)
    return f"{round(count / digits) * digits:,.0f}"


def _bounded(one: Frontier, point: Point) -> bool:
    return point.variance_error < SEEN * one.variance_floor


def reading(found: Sequence[Frontier], device: str) -> tuple[str, ...]:
    """What was measured, what each error is made of, and which methods are unbeaten."""
    return (
        f"Noise of σ = {SIGMA} on pixels in [0, 1]. Errors are 2|x−y|/(|x|+|y|) against a reference of plain samples, "
        "averaged over images and scores; its floor, from two independent halves, is what exact values would show. "
        "Times are of one image at a time, with everything a call does, in one process, after the network has been "
        f"looked into; of what takes less than {LONG[device]:g} s, the median of {REPEATS} calls after a first one; of "
        "what takes longer, one call. Over images, the median. Machines differ: what carries over are the ratios to "
        f"{BESIDE:,} plain samples, whose time is that of the reference of the same image.",
        "Delta method and two-stage are linearized at the image: a bias that more time does not reduce. Diagonal (ADF) "
        "drops all correlations. The unscented transform has two points for each direction of the noise, far out. "
        "Layerwise carries all covariances, and has only its small bias. A sketch's error falls with its probes until "
        f"its own bias is reached. Assisted samples, corrected by a sketch of {PROBES} probes, have no bias: their "
        "error falls as plain sampling's does, from a lower start, which pays where the sketch's time is made up for.",
        *map(_best, found),
    )


def _best(one: Frontier) -> str:
    few = [name_of(point) for point in one.methods if not point.done]
    count = len(one.case.studied.images)
    best = [
        f"{name_of(point)} (error {point.variance_error:.2g}{', a bound' if _bounded(one, point) else ''}; as many "
        f"samples as are as good take {one.gain(point):.2g} times as long)"
        for point in one.best()
    ]
    words = f"beaten by nothing in both time and error: {'; '.join(best)}" if best else "nothing beats plain sampling"
    missing = f" Not there: {', '.join(few)}." if few else ""
    caution = " One image: no more than an example." if count == 1 else ""
    return f"{one.case.name}, variance: {words}.{missing}{caution}"


def numbers(one: Frontier) -> dict[str, Any]:
    """For machines; None where a method did not run."""
    return {
        "network": one.case.network,
        "sigma": one.case.sigma,
        "images": len(one.case.studied.images),
        "noise": one.case.noise_in_words,
        "reference_samples": one.case.size.reference,
        "floor": {"mean": one.mean_floor, "variance": one.variance_floor},
        "seconds_of_10000_samples": BESIDE * one.sample_seconds,
        "methods": [_numbers(one, point) for point in one.points],
    }


def _numbers(one: Frontier, point: Point) -> dict[str, Any]:
    plain = {"method": point.way.method, "size": point.way.size, "status": point.status or "done"}
    if not point.done:
        return plain
    return plain | {
        "mean_error": point.mean_error,
        "variance_error": point.variance_error,
        "seconds": point.seconds,
        "ratio_to_10000_samples": point.ratio,
        "as_good_samples": one.as_good_samples(point),
        "gain": one.gain(point),
        "bounded_by_floor": _bounded(one, point),
    }


def draw_frontiers(found: Sequence[Frontier]) -> Figure:
    """Draw one chart per network; lower left is better."""
    figure = new_figure(3.4 * max(2, len(found)), 3.9)
    every = figure.subplots(1, len(found), squeeze=False)[0]
    handles: dict[str, Artist] = {}
    for axes, one in zip(every, found, strict=True):
        _draw_panel(axes, one)
        dress(axes, one.case.name, "seconds an image", "relative error of the variance" if axes is every[0] else "")
        axes.tick_params(which="both", labelsize=SMALL, colors=INK)
        drawn, labels = axes.get_legend_handles_labels()
        handles |= dict(zip(labels, drawn, strict=True))
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=5, frameon=False, fontsize=SMALL,
        labelcolor=INK,
    )  # fmt: skip
    return figure


def _draw_panel(axes: Axes, one: Frontier) -> None:
    axes.set(xscale="log", yscale="log")
    done = [point for point in one.points if point.done and point.variance_error > 0]
    _draw_sampling(axes, one, [point.seconds for point in done])
    for method, (label, colour, marker) in STYLES.items():
        mine = [point for point in done if point.way.method == method]
        if not mine:
            continue
        axes.plot(
            [point.seconds for point in mine], [point.variance_error for point in mine], color=colour, marker=marker,
            markersize=6, linewidth=0.8, linestyle="-" if len(mine) > 1 else "none", label=label, zorder=4,
        )  # fmt: skip
        for point in mine:
            _label_size(axes, point, colour)
    errors = [point.variance_error for point in done] + [one.variance_floor]
    bottom, top = min(errors) / 2, max(errors) * 1.7
    axes.axhspan(bottom, one.variance_floor, color=PALE, linewidth=0, label="below the reference's floor", zorder=0)
    axes.set_ylim(bottom, top)


def _draw_sampling(axes: Axes, one: Frontier, times: Sequence[float]) -> None:
    """Draw the samples taken as points, and the law c/√N as a line."""
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
        _label_size(axes, point, INK)


def _label_size(axes: Axes, point: Point, colour: str) -> None:
    """Write the number of probes or samples beside the point."""
    if point.way.size:
        axes.annotate(
            _short_number(point.way.size), (point.seconds, point.variance_error), xytext=(5, 4),
            textcoords="offset points", fontsize=SMALL - 1.5, color=colour if colour != AMBER else ORANGE, zorder=5,
        )  # fmt: skip


def _short_number(size: int) -> str:
    power = len(str(size)) - 1
    return rf"$10^{power}$" if size >= 100 and size == 10**power else f"{size}"
