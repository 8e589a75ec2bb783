"""The paper's Table 4: fewer points of linearization than images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from netmoments import data
from netmoments.report.pictures import BLUE, GREEN, INK, ORANGE, PURPLE, SMALL, dress, new_figure
from netmoments.sweep.run import Results
from reproduction import lenet_on_mnist
from reproduction.errors import Errors
from reproduction.lenet_on_mnist import Sampled, Tightness
from reproduction.outcome import Comparison, Drawing, Outcome, Panel
from reproduction.over_images import SIGMAS, Subjects, cube
from reproduction.points import COUNTS, FARTHEST, PointsSweep, banks
from reproduction.published import TABLE_4
from reproduction.settings import Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUANTITIES = {"mean": "mean_error", "authors_old": "variance_error_old", "variance": "variance_error_new"}
"""Our columns, and the paper's beside them."""
WORDS = {"mean": "mean", "authors_old": "old variance, as run", "variance": "new variance, exact"}
EVERY = 10_000
"""What the paper calls the number of points when each image has its own."""


@dataclass(frozen=True)
class Points:
    """A number of points, and whether they are the farthest members instead of the centres."""

    count: int
    farthest: bool

    @property
    def name(self) -> str:
        return "each image" if self.count == EVERY else f"{self.count:,}{', farthest' if self.farthest else ''}"


Found = dict[Points, dict[str, Errors]]


def reproduce(settings: Settings) -> Outcome:
    on = lenet_on_mnist.shared_subjects(settings)
    sampled = lenet_on_mnist.sampled(settings, on)
    at_images = lenet_on_mnist.tightness(settings, on, sampled)
    everything = data.load("mnist", data_dir=settings.data_dir)
    assert everything.labels is not None
    settings.require_time("clusters", 0, sum(COUNTS), "centres")
    places = banks(
        everything.images, everything.labels, on.images, settings.seed, settings.out / "clusters.safetensors"
    )
    results = settings.run(PointsSweep("points", on, places, lenet_on_mnist.block(settings)))
    found = _errors(results, on, sampled, at_images)
    return Outcome(
        name="table-4",
        title="Table 4: how many points of linearization",
        reading=_reading(settings, len(everything.images), len(on.images)),
        comparisons=tuple(_comparisons(found)),
        panels=(_panel(found),),
        drawings=(
            Drawing(
                "table-4",
                "Errors over the number of points; crosses: farthest members; hollow: the paper's.",
                lambda: draw(found),
            ),
        ),
        numbers={
            "images": len(on.images),
            "rows": [
                {
                    "sigma": sigma,
                    "points": place.count,
                    "farthest": place.farthest,
                    **{name: [error.average(level), error.average_spread(level)] for name, error in errors.items()},
                    "not_finite": {name: error.beyond(level) for name, error in errors.items()},
                }
                for level, sigma, place, errors in _rows(found)
            ],
        },
        seconds=sampled.seconds + at_images.seconds + results.seconds,
        details=(_ordering(found),),
    )


def _errors(results: Results, on: Subjects, sampled: Sampled, at_images: Tightness) -> Found:
    found: Found = {}
    columns = results.columns
    for count in COUNTS:
        for farthest in (False, True) if count in FARTHEST else (False,):
            chosen = (columns["points"] == count) & (columns["farthest"] == farthest)
            part = {name: values[chosen] for name, values in columns.items()}
            found[Points(count, farthest)] = {
                name: Errors.between(cube(part, name, on.numbers), sampled.mean if name == "mean" else sampled.variance)
                for name in QUANTITIES
            }
    return found | {Points(EVERY, False): {name: at_images.errors[name] for name in QUANTITIES}}


def _rows(found: Found) -> Iterator[tuple[int, float, Points, dict[str, Errors]]]:
    for level, sigma in enumerate(SIGMAS):
        for place, errors in found.items():
            yield level, sigma, place, errors


def _comparisons(found: Found) -> list[Comparison]:
    return [
        Comparison(
            f"{WORDS[name]}, {place.name}, σ = {sigma}", errors[name].average(level), _paper(sigma, place, name)[0]
        )
        for name in QUANTITIES
        for level, sigma, place, errors in _rows(found)
    ]


def _paper(sigma: float, place: Points, name: str) -> tuple[float, float]:
    return getattr(TABLE_4[sigma, place.count, place.farthest], QUANTITIES[name])


def _panel(found: Found) -> Panel:
    rows: list[tuple[str, ...]] = []
    for level, sigma, place, errors in _rows(found):
        cells: list[str] = []
        for name in QUANTITIES:
            mean, spread = _paper(sigma, place, name)
            ours = errors[name]
            cells += [f"{mean:.3f} ± {spread:.3f}", f"{ours.average(level):.3f} ± {ours.average_spread(level):.3f}"]
        rows.append((f"{sigma}", place.name, *cells))
    headings = ("σ", "points", *(heading for name in QUANTITIES for heading in (f"{WORDS[name]}: paper", "ours")))
    group = len(found)
    return Panel(
        "Errors averaged over images and logits",
        headings,
        tuple(rows),
        "± the mean over logits of the standard deviation over images, as in the paper.",
        emphasis=(3, 5, 7),
        breaks=tuple(range(group, len(rows), group)),
    )


Lookup = Callable[[float, Points, str], float]
"""The average error at a noise level, for points, of a quantity."""


def orderings(average: Lookup) -> list[tuple[str, str, bool]]:
    """For each noise level and quantity: does the error fall with every step in k, are the farthest members worse?"""
    made = []
    for sigma in SIGMAS:
        for name in QUANTITIES:
            falling = [average(sigma, Points(count, False), name) for count in (*COUNTS, EVERY)]
            steps = all(more >= fewer for more, fewer in pairwise(falling))
            made.append((f"{WORDS[name]}, σ = {sigma}", "falls with every step in k", steps))
            worse = all(
                average(sigma, Points(count, True), name) > average(sigma, Points(count, False), name)
                for count in FARTHEST
            )
            made.append((f"{WORDS[name]}, σ = {sigma}", "farthest members are worse than centres", worse))
    return made


def published_orderings() -> list[tuple[str, str, bool]]:
    """The same questions of the published table."""
    return orderings(lambda sigma, place, name: _paper(sigma, place, name)[0])


def _ordering(found: Found) -> Panel:
    here = orderings(lambda sigma, place, name: found[place][name].average(SIGMAS.index(sigma)))
    rows = tuple(
        (what, question, "yes" if theirs else "no", "yes" if ours else "no")
        for (what, question, ours), (_, _, theirs) in zip(here, published_orderings(), strict=True)
    )
    return Panel("The order of the rows", ("quantity", "question", "paper", "ours"), rows)


def _reading(settings: Settings, clustered: int, studied: int) -> tuple[str, ...]:
    return (
        f"k-means clusters of all {clustered:,} MNIST test images, started from images taken round-robin over the "
        f"labels. Every one of {studied:,} images is answered by the linearization at its cluster's centre (farthest: "
        "at the member of the cluster that is farthest from the centre), made cluster by cluster; noise and sampled "
        "moments are those of Table 2, and so is the last row, where each image is linearized at itself. Smaller is "
        "better.",
        "The new variance is the exact kernel; the old one is as the authors ran it.",
    )


def draw(found: Found) -> Figure:
    """Mean, old and new variance over k, one line a noise level."""
    figure = new_figure(9.0, 4.2)
    axes = figure.subplots(1, 3)
    counts = (*COUNTS, EVERY)
    for axis, name in zip(axes, QUANTITIES, strict=True):
        for level, (sigma, colour) in enumerate(zip(SIGMAS, (BLUE, ORANGE, GREEN, PURPLE), strict=True)):
            ours = [found[Points(count, False)][name].average(level) for count in counts]
            theirs = [_paper(sigma, Points(count, False), name)[0] for count in counts]
            axis.plot(counts, ours, color=colour, marker="o", markersize=3.5, label=f"σ = {sigma}")
            axis.plot(counts, theirs, color=colour, linestyle=":", marker="o", markersize=5, markerfacecolor="none")
            far = [found[Points(count, True)][name].average(level) for count in FARTHEST]
            far_theirs = [_paper(sigma, Points(count, True), name)[0] for count in FARTHEST]
            axis.plot(FARTHEST, far, color=colour, linestyle="none", marker="X", markersize=6)
            axis.plot(
                FARTHEST, far_theirs, color=colour, linestyle="none", marker="X", markersize=7, markerfacecolor="none"
            )
        axis.set_xscale("log")
        axis.set_xticks(counts, [str(count) for count in counts], rotation=45)
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
        dress(axis, WORDS[name], "number of points k", "average error")
    for marker, label, face in (("o", "paper", "none"), ("X", "farthest members", INK), ("X", "paper's", "none")):
        axes[0].plot([], [], color=INK, linestyle="none", marker=marker, markerfacecolor=face, label=label)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=SMALL)
    return figure
