"""The paper's Table 4: k points of linearization for all images instead of one point for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from netmoments import data
from netmoments.affine_relu_affine import AffineReluAffine
from netmoments.linearize.bank import k_means_centres, members_farthest_from, nearest
from netmoments.linearize.two_stage import two_stage
from netmoments.network.weights import digest_of, read_tensors, write_tensors
from netmoments.report.pictures import BLUE, INK, ORANGE, SMALL, new_figure
from netmoments.sweep.item import Columns
from netmoments.sweep.run import Results, Watch
from reproduction import lenet_on_mnist
from reproduction.experiment import BesidePaper, Drawing, Outcome, Panel, Settings
from reproduction.image_sweeps import SIGMAS, StudiedImages, cube, rows, same_bits
from reproduction.lenet_on_mnist import ComputedScores, Errors, SampledScores, core_moments_at
from reproduction.plots import GREEN, PURPLE, dress
from reproduction.published import TABLE_4

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COUNTS = (250, 500, 1000, 2500, 5000)
"""The paper's numbers of points; with one point for each image the result is Table 2."""
FARTHEST = (250, 500)
"""The numbers for which the paper also linearizes at the member of each cluster farthest from its centre."""
TOGETHER = 25
"""Images of a cluster whose moments are computed at once; the largest clusters have a hundred."""
EVERY = 10_000
"""The number of points that the paper names when each image has its own."""
QUANTITIES = {"mean": "mean_error", "authors_old": "variance_error_old", "variance": "variance_error_new"}
"""Our columns, and the paper's column beside each."""
WORDS = {"mean": "mean", "authors_old": "old variance, as run", "variance": "new variance, exact"}


@dataclass(frozen=True)
class Points:
    """A number of points, and whether they are the farthest members of the clusters instead of the centres."""

    count: int
    farthest: bool

    @property
    def name(self) -> str:
        return "each image" if self.count == EVERY else f"{self.count:,}{', farthest' if self.farthest else ''}"


Found = dict[Points, dict[str, Errors]]
Lookup = Callable[[float, Points, str], float]
"""A function that gives the average error at a noise level, for points, of a quantity."""


def reproduce(settings: Settings) -> Outcome:
    studied = lenet_on_mnist.shared_images(settings)
    sampled = lenet_on_mnist.sampled_scores(settings, studied)
    at_images = lenet_on_mnist.computed_scores(settings, studied, sampled)
    everything = data.load("mnist", data_dir=settings.data_dir)
    assert everything.labels is not None
    settings.require_time("clusters", 0, sum(COUNTS), "centres")
    places = banks(
        everything.images, everything.labels, studied.images, settings.seed, settings.out / "clusters.safetensors"
    )
    results = settings.run(PointsSweep("points", studied, places, lenet_on_mnist.block(settings)))
    found = _errors(results, studied, sampled, at_images)
    return Outcome(
        name="table-4",
        title="Table 4: how many points of linearization",
        reading=_reading(settings, len(everything.images), len(studied.images)),
        comparisons=tuple(_comparisons(found)),
        panels=(_panel(found),),
        drawings=(
            Drawing(
                "table-4",
                "Errors over the number of points; crosses: farthest members; hollow: the paper's.",
                partial(draw, found),
            ),
        ),
        numbers={
            "images": len(studied.images),
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


@dataclass(frozen=True, eq=False)
class ClusterPoints:
    """Points of linearization, one for each cluster."""

    count: int
    farthest: bool
    points: Tensor
    """(count, *event)."""
    cluster: Tensor
    """The cluster of each studied image, (N,)."""


def banks(images: Tensor, labels: Tensor, studied: Tensor, seed: int, cache: Path) -> list[ClusterPoints]:
    """The clusters of all `images`, and the cluster of each studied image. The centres are kept in the file `cache`.

    As in the paper: k-means from images taken round-robin over the labels, and two weak baselines.
    """
    made = []
    kept = _centres(images, labels, seed, cache)
    for count in COUNTS:
        centres = kept[str(count)]
        cluster, _ = nearest(studied.flatten(1), centres.flatten(1))
        made.append(ClusterPoints(count, False, centres, cluster))
        if count in FARTHEST:
            made.append(ClusterPoints(count, True, members_farthest_from(centres, images), cluster))
    return made


def round_robin(labels: Tensor) -> Tensor:
    """All indices in this order: the first image of each label in turn, then the second of each, and so on."""
    turn = torch.zeros_like(labels)
    for label in labels.unique():
        own = labels == label
        turn[own] = torch.arange(int(own.sum()))
    return torch.argsort(turn * (int(labels.max()) + 1) + labels)


def _centres(images: Tensor, labels: Tensor, seed: int, cache: Path) -> dict[str, Tensor]:
    facts = {"images": digest_of(images, labels), "counts": str(COUNTS), "seed": str(seed)}
    if cache.exists():
        tensors, found = read_tensors(cache)
        if found != facts:
            raise ValueError(
                f"{cache} holds the clusters of another run ({found}, wanted {facts}); remove it or give another --out"
            )
        return tensors
    order = round_robin(labels)
    made = {}
    with Watch("clusters", "centres", sum(COUNTS), 0) as watch:
        for count in COUNTS:
            made[str(count)] = k_means_centres(images, count, seed=seed, initial=images[order[:count]])
            watch.advance(count)
    write_tensors(cache, made, facts)
    return made


class Piece(NamedTuple):
    """Some clusters of a bank, with their points and the images that use them."""

    bank: ClusterPoints
    points: Tensor
    """Numbers of points of the bank."""
    places: Tensor
    """Indices of images among those studied."""
    point_of: Tensor
    """For each of these images, which of `points` it uses."""


@dataclass(frozen=True, eq=False)
class PointsSweep:
    """Moments of every image by the linearization at its cluster's point, a few clusters at a time.

    Rows: points (k), farthest, and image, sigma, logit, mean, variance, authors_old.
    """

    name: str
    studied: StudiedImages
    banks: Sequence[ClusterPoints]
    block: int
    """About how many images an item holds."""
    layer: int = -1
    unit: str = "images"

    @property
    def configuration(self) -> dict[str, Any]:
        points = {f"{bank.count}{' farthest' if bank.farthest else ''}": digest_of(bank.points) for bank in self.banks}
        return {**self.studied.description(), "block": self.block, "layer": self.layer, "points": points}

    @property
    def counts(self) -> Sequence[int]:
        return [len(piece.places) for piece in self._pieces]

    @cached_property
    def _pieces(self) -> list[Piece]:
        return [piece for bank in self.banks for piece in pieces(bank, self.block)]

    def prepare(self, device: str) -> Callable[[int], Columns]:
        studied = self.studied.on(device)
        parts = self._pieces

        def work(item: int) -> Columns:
            piece = parts[item]
            points = piece.bank.points[piece.points].to(device)
            with same_bits():
                network = two_stage(studied.network, points, self.layer)
            parts_of_it = [
                _moments(studied, network, places, point_of)
                for places, point_of in zip(piece.places.split(TOGETHER), piece.point_of.split(TOGETHER), strict=True)
            ]
            values = {name: torch.cat([part[name] for part in parts_of_it]) for name in parts_of_it[0]}
            found = rows(studied.numbers[piece.places].tolist(), values)
            count = len(found["image"])
            return {
                "points": np.full(count, piece.bank.count, dtype=np.int32),
                "farthest": np.full(count, piece.bank.farthest),
                **found,
            }

        return work


def _moments(studied: StudiedImages, network: AffineReluAffine, places: Tensor, point_of: Tensor) -> dict[str, Tensor]:
    """Moments of some images, each by the linearization at its point."""
    device = studied.images.device
    factors = torch.stack([studied.factor(int(place)) for place in places])
    return core_moments_at(network.entries(point_of.to(device)), studied.images[places.to(device)], factors)


def pieces(bank: ClusterPoints, block: int) -> list[Piece]:
    """The clusters with any studied image, grouped whole until a group holds at least `block` images."""
    order = torch.argsort(bank.cluster, stable=True)
    sizes = torch.bincount(bank.cluster, minlength=bank.count)
    found, held = [], 0
    group: list[Tensor] = []
    for members in order.split(sizes[sizes > 0].tolist()):
        group.append(members)
        held += len(members)
        if held >= block:
            found.append(_piece(bank, torch.cat(group)))
            group, held = [], 0
    return [*found, _piece(bank, torch.cat(group))] if group else found


def _piece(bank: ClusterPoints, places: Tensor) -> Piece:
    points, point_of = bank.cluster[places].unique(return_inverse=True)
    return Piece(bank, points, places, point_of)


def _errors(results: Results, studied: StudiedImages, sampled: SampledScores, at_images: ComputedScores) -> Found:
    found: Found = {}
    columns = results.columns
    for count in COUNTS:
        for farthest in (False, True) if count in FARTHEST else (False,):
            chosen = (columns["points"] == count) & (columns["farthest"] == farthest)
            part = {name: values[chosen] for name, values in columns.items()}
            found[Points(count, farthest)] = {
                name: Errors.between(
                    cube(part, name, studied.numbers), sampled.mean if name == "mean" else sampled.variance
                )
                for name in QUANTITIES
            }
    return found | {Points(EVERY, False): {name: at_images.errors[name] for name in QUANTITIES}}


def _rows(found: Found) -> Iterator[tuple[int, float, Points, dict[str, Errors]]]:
    for level, sigma in enumerate(SIGMAS):
        for place, errors in found.items():
            yield level, sigma, place, errors


def _comparisons(found: Found) -> list[BesidePaper]:
    return [
        BesidePaper(
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
    """The same questions asked of the published table."""
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
    """Draw mean, old and new variance over k, with one line for each noise level."""
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
