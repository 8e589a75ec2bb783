"""The paper's Table 5: targeted sparse and smooth noise on faces, from every class to every other class."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from netmoments.attacks.sparse_smooth import SparseSmooth
from netmoments.report.pictures import INK, SMALL, new_figure
from netmoments.sweep.item import Columns
from reproduction import faces as face_attacks
from reproduction.attack_rows import in_time
from reproduction.experiment import BesidePaper, Drawing, Outcome, Panel, Settings
from reproduction.faces import (
    POLISH,
    SAMPLES,
    Faces,
    TargetedSweep,
    chosen_faces,
    chosen_rows,
    in_cell,
    mean_of,
    most_fooled,
    on_linearization,
    percent,
    summarized,
)
from reproduction.plots import GREY, PALE
from reproduction.published import TABLE_5, TABLE_5_AVERAGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "table-5"
PER_CLASS = 10
BLOCK = {"cpu": 1, "cuda": 35}
"""Images per item, each with six targets and two attacks."""
CONFIDENCE = 0.95
PAPER, CONFIDENT = "paper", "confident"
ATTACKS = {
    PAPER: SparseSmooth(gamma=0.0, polish=0, bounds=None, samples=SAMPLES),
    CONFIDENT: SparseSmooth(confidence=CONFIDENCE, samples=SAMPLES, polish=POLISH),
}
WORDS = {PAPER: "γ = 0, as the paper", CONFIDENT: f"{CONFIDENCE:.0%} of samples, network followed"}
COLOURS = "Blues"
PALE_BELOW = 0.6
"""Cells up to this value have dark letters."""


def reproduce(settings: Settings) -> Outcome:
    network, everything = face_attacks.network_and_faces(settings)
    classes = range(len(everything.classes))
    count = min(PER_CLASS, settings.images // len(classes))
    wanted = dict.fromkeys(classes, count) if count else dict.fromkeys(classes[: settings.images], 1)
    attacks = {name: in_time(attack, settings) for name, attack in ATTACKS.items()}
    return study(settings, chosen_faces(network, everything, wanted, settings.seed, NAME), attacks)


def study(settings: Settings, faces: Faces, attacks: Mapping[str, SparseSmooth]) -> Outcome:
    """The table for these faces and their classes, by two attacks called `PAPER` and `CONFIDENT`."""
    classes, there = range(len(faces.classes)), sorted(set(faces.labels.tolist()))
    among = there if len(there) > 1 else classes
    targets = {source: [target for target in among if target != source] for source in there}
    results = settings.run(TargetedSweep(NAME, faces, targets, attacks, BLOCK[settings.device.type]))
    found = {name: chosen_rows(results.columns, results.columns["variant"] == name) for name in attacks}
    overall = {name: summarized(columns) for name, columns in found.items()}
    kept = faces.kept_relu(attacks[PAPER].layer)
    fooled = {name: matrix(columns, most_fooled(columns), len(classes)) for name, columns in found.items()}
    sparsity = {name: matrix(columns, columns["sparsity"], len(classes)) for name, columns in found.items()}
    samples = {name: matrix(columns, columns["success"], len(classes)) for name, columns in found.items()}
    return Outcome(
        name=NAME,
        title="Table 5: targeted noise on faces",
        reading=_reading(faces, overall, kept),
        comparisons=tuple(_comparisons(overall)),
        panels=(
            _summary(overall),
            *(_rates(faces.classes, fooled[name], samples[name], WORDS[name]) for name in attacks),
            *(_sparsity(faces.classes, sparsity[name], WORDS[name]) for name in attacks),
        ),
        drawings=(
            Drawing(
                NAME,
                f"Share of images for which most of {SAMPLES} noisy samples are taken for the target: the paper's, "
                "ours by the same problem, and ours with the network followed; and how sparse that noise is.",
                partial(
                    draw_matrices,
                    faces.classes,
                    published(len(classes)),
                    fooled[PAPER],
                    fooled[CONFIDENT],
                    sparsity[CONFIDENT],
                ),
            ),
        ),
        numbers={
            "images": len(faces.images),
            "samples": SAMPLES,
            "classes": list(faces.classes),
            "kept_relu": kept,
            "paper_average": TABLE_5_AVERAGE,
            "overall": overall,
            "pairs": _pairs(found, len(classes)),
        },
        seconds=results.seconds,
        details=(_every_pair(faces.classes, found),),
    )


def matrix(columns: Columns, values: np.ndarray, classes: int) -> np.ndarray:
    """Means by source (rows) and target (columns), NaN where there is nothing."""
    sums, counts = np.zeros((classes, classes)), np.zeros((classes, classes))
    np.add.at(sums, (columns["source"], columns["target"]), values)
    np.add.at(counts, (columns["source"], columns["target"]), 1)
    return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)


def published(classes: int) -> np.ndarray:
    """Table 5 as a matrix with NaN on the diagonal; for any other number of classes it is all NaN."""
    if classes != len(TABLE_5):
        return np.full((classes, classes), np.nan)
    return np.array([[math.nan if rate is None else rate for rate in row] for row in TABLE_5])


def _of_pair(columns: Columns, source: int, target: int) -> dict[str, np.ndarray]:
    return chosen_rows(columns, (columns["source"] == source) & (columns["target"] == target))


def _pairs(found: Mapping[str, Columns], classes: int) -> list[dict[str, Any]]:
    paper = published(classes)
    return [
        {
            "source": source,
            "target": target,
            "published": None if math.isnan(paper[source, target]) else float(paper[source, target]),
            **{name: summarized(_of_pair(columns, source, target)) for name, columns in found.items()},
        }
        for source in range(classes)
        for target in range(classes)
        if source != target
    ]


def _comparisons(overall: Mapping[str, Mapping[str, Any]]) -> list[BesidePaper]:
    readings = {"images_fooled": "images of which most samples are fooled", "samples_fooled": "samples fooled"}
    rates = [
        BesidePaper(f"{words}, {WORDS[name]}", overall[name][key], TABLE_5_AVERAGE)
        for name in overall
        for key, words in readings.items()
    ]
    return rates + [BesidePaper(f"sparsity, {WORDS[name]}", overall[name]["sparsity"], None) for name in overall]


def _summary(overall: Mapping[str, Mapping[str, Any]]) -> Panel:
    rows = tuple(
        (
            WORDS[name],
            _with_error(one["images_fooled"], one["images_fooled_error"]),
            _with_error(one["samples_fooled"], one["samples_fooled_error"]),
            in_cell(one["samples_fooled_clipped"], 3),
            f"{one['fooled_as_asked']} / {one['attacks']}",
            percent(one["sparsity"]),
            percent(one["sparsity_where_fooled"]),
            f"{one['feasible']} / {one['attacks']}",
            in_cell(one["median_gap"], 3),
        )
        for name, one in overall.items()
    )
    headings = (
        "noise", "images fooled", "samples fooled", "samples, cut to [0, 1]", "fooled as asked", "sparsity",
        "sparsity where fooled", "problem holds", "median gap",
    )  # fmt: skip
    return Panel(
        "All pairs",
        headings,
        rows,
        f"The paper's average is {TABLE_5_AVERAGE}. An image is fooled if most of its samples are; ± is the standard "
        "error from the choice of images. Gap: how much less ‖μ‖₁ + TV(μ) could be at most, by duality.",
        emphasis=(1, 5),
    )


def _with_error(value: float, error: float | None) -> str:
    return f"{value:.3f}" if error is None else f"{value:.3f} ± {error:.3f}"


def _rates(classes: Sequence[str], images: np.ndarray, samples: np.ndarray, words: str) -> Panel:
    paper = published(len(classes))

    def cell(source: int, target: int) -> str:
        if source == target:
            return "—"
        return " / ".join(in_cell(float(values[source, target])) for values in (images, samples, paper))

    return Panel(
        f"Rates by source and target: {words}",
        ("from \\ to", *classes),
        tuple((name, *(cell(source, target) for target in range(len(classes)))) for source, name in enumerate(classes)),
        "Share of images fooled / share of samples fooled / the paper's rate.",
    )


def _sparsity(classes: Sequence[str], values: np.ndarray, words: str) -> Panel:
    rows = tuple(
        (name, *("—" if math.isnan(share) else f"{100 * share:.0f} %" for share in values[source].tolist()))
        for source, name in enumerate(classes)
    )
    caption = "Share of pixels that μ changes by at most a thousandth of a grey level."
    return Panel(f"Sparsity by source and target: {words}", ("from \\ to", *classes), rows, caption)


def _every_pair(classes: Sequence[str], found: Mapping[str, Columns]) -> Panel:
    rows: list[tuple[str, ...]] = []
    for pair in _pairs(found, len(classes)):
        cells = [f"{classes[pair['source']]} → {classes[pair['target']]}", in_cell(pair["published"], 1)]
        for name in found:
            one = pair[name]
            cells += [
                in_cell(one["images_fooled"]), in_cell(one["samples_fooled"]),
                f"{one['fooled_as_asked']} / {one['attacks']}", percent(one["sparsity"]),
            ]  # fmt: skip
        rows.append(tuple(cells))
    per_attack = ("images fooled", "samples fooled", "as asked", "sparsity")
    headings = ("pair", "paper", *(f"{words}, {name}" for name in found for words in per_attack))
    size = len(classes) - 1
    return Panel("Every pair", headings, tuple(rows), breaks=tuple(range(size, len(rows), size)))


def _reading(faces: Faces, overall: Mapping[str, Mapping[str, Any]], kept: str) -> tuple[str, ...]:
    paper, confident = overall[PAPER], overall[CONFIDENT]
    counts = np.bincount(faces.labels.numpy(), minlength=len(faces.classes))
    each = str(counts.min()) if counts.min() == counts.max() else f"{counts.min()} to {counts.max()}"
    return (
        f"{len(faces.images)} test images of FER2013 that the network gets right, chosen at random, {each} of each "
        f"class, each towards the {len(faces.classes) - 1} other classes: least ‖μ‖₁ + TV(μ) with the target's "
        "expected score above all others, under noise N(μ, σ²I) of one grey level. Linearized at the image; the "
        f"paper's l = 3 is read as the last ReLU ({kept}), which it keeps wherever it says nothing else, and the β of "
        "its constraint, which it does not define there, as 1.",
        "The paper does not say whether a rate counts images or samples; with ten images a pair its tenths suggest "
        f"images. Here γ = 0 by the formula alone, without limits on pixels, {SAMPLES} samples an attack: "
        f"{percent(paper['images_fooled'])} of the images have most samples taken for the target, and "
        f"{percent(paper['samples_fooled'])} of all samples are; the paper has {percent(TABLE_5_AVERAGE)}. γ = 0 asks "
        "for equal expected scores and no more: an exact formula would fool about half of the samples. "
        f"{percent(paper['sparsity'])} of the pixels are left alone, {percent(paper['sparsity_where_fooled'])} where "
        "most samples are fooled.",
        f"The constraint of that problem holds at the end for {paper['feasible']} of {paper['attacks']} attacks"
        f"{_nothing_found(paper)}. {on_linearization(paper)} {percent(paper['pixels_outside'])} of the pixels of M + μ "
        "are outside [0, 1].",
        f"With the network followed from there, pixels kept in [0, 1], and {CONFIDENCE:.0%} of samples asked for: "
        f"{percent(confident['images_fooled'])} of the images and {percent(confident['samples_fooled'])} of the "
        f"samples ({percent(confident['samples_fooled_clipped'])} cut to [0, 1]) at a sparsity of "
        f"{percent(confident['sparsity'])}. {confident['fooled_as_asked']} of {confident['attacks']} attacks reach "
        f"the {CONFIDENCE:.0%}, as far as {SAMPLES} samples can tell; a share of samples just there is what was "
        "asked for, more would take more noise.",
    )


def _nothing_found(one: Mapping[str, Any]) -> str:
    return f"; for {one['left_alone']} no noise was found at all (μ = 0)" if one["left_alone"] else ""


def lowest_published_pair() -> tuple[int, int, float]:
    """Source, target and rate of the smallest entry in the paper's table.

    >>> lowest_published_pair()
    (5, 4, 0.6)
    """
    rates = [
        (rate, source, target)
        for source, row in enumerate(TABLE_5)
        for target, rate in enumerate(row)
        if rate is not None
    ]
    rate, source, target = min(rates)
    return source, target, rate


def average_published() -> float | None:
    """The mean of the paper's entries."""
    return mean_of(published(len(TABLE_5)))


def draw_matrices(
    classes: Sequence[str], paper: np.ndarray, at_zero: np.ndarray, confident: np.ndarray, sparsity: np.ndarray
) -> Figure:
    """Draw the paper's rates and ours at γ = 0 above; below, ours at 95 % and the sparsity of that noise."""
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
