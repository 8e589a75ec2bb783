"""The paper's Figure 8: how misclassification and sparsity change with γ, for faces of surprise turned into sadness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from netmoments.attacks.sparse_smooth import SparseSmooth
from netmoments.report.pictures import BLUE, INK, ORANGE, SMALL, new_figure
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
    on_linearization,
    percent,
    summarized,
)
from reproduction.plots import GREY, dress
from reproduction.published import FIGURE_8_SPARSITY, TABLE_5
from reproduction.table_5 import lowest_published_pair

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "figure-8"
SOURCE, TARGET = 5, 4
"""The classes surprise and sadness."""
MOST = 30
BLOCK = {"cpu": 1, "cuda": 30}
"""Images per item, each attacked with every γ by two kinds of attack."""
GAMMAS = (0.0, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0)
"""The values of γ, in logits."""
FEW_GAMMAS = (0.0, 4.0)
FORMULA, FOLLOWED = "formula", "followed"
KINDS = {
    FORMULA: SparseSmooth(gamma=0.0, polish=0, bounds=None, samples=SAMPLES),
    FOLLOWED: SparseSmooth(gamma=0.0, samples=SAMPLES, polish=POLISH),
}
WORDS = {FORMULA: "formula alone, as the paper", FOLLOWED: "network followed, pixels in [0, 1]"}
FLAT = 0.01
"""A share that changes by at most this is described as unchanged."""
Curve = Sequence[Mapping[str, Any]]
"""Summaries of the attacks of one kind, in order of increasing γ."""
STYLES = (
    ("as the paper: formula alone", BLUE, "o", "separation_by_formula"),
    ("network followed", ORANGE, "s", "separation_sampled"),
)
FULL = 1.02
"""The upper end of an axis of shares."""


def reproduce(settings: Settings) -> Outcome:
    network, everything = face_attacks.network_and_faces(settings)
    wanted = {SOURCE: max(1, min(MOST, settings.images // 2 if settings.few else settings.images))}
    faces = chosen_faces(network, everything, wanted, settings.seed, NAME)
    kinds = {kind: in_time(attack, settings) for kind, attack in KINDS.items()}
    return study(settings, faces, kinds, FEW_GAMMAS if settings.few else GAMMAS, TARGET)


def study(
    settings: Settings, faces: Faces, kinds: Mapping[str, SparseSmooth], gammas: Sequence[float], target: int
) -> Outcome:
    """The curves for faces of one class, by the two kinds of attack called `FORMULA` and `FOLLOWED`."""
    (source,) = set(faces.labels.tolist())
    attacks = {attack_name(kind, gamma): replace(kinds[kind], gamma=gamma) for kind in kinds for gamma in gammas}
    results = settings.run(TargetedSweep(NAME, faces, {source: [target]}, attacks, BLOCK[settings.device.type]))
    curves = {kind: [_point(results.columns, kind, gamma) for gamma in gammas] for kind in kinds}
    first, last = curves[FORMULA][0], curves[FORMULA][-1]
    classes = faces.classes
    return Outcome(
        name=NAME,
        title=f"Figure 8: {classes[source]} taken for {classes[target]} with growing γ",
        reading=_reading(faces, curves, source, target),
        comparisons=(
            BesidePaper(
                f"images fooled at γ = {gammas[0]:g}, {WORDS[FORMULA]} (paper: Table 5)",
                first["images_fooled"],
                TABLE_5[SOURCE][TARGET],
            ),
            BesidePaper(
                f"sparsity at γ = {gammas[0]:g}, {WORDS[FORMULA]} (paper: around)", first["sparsity"], FIGURE_8_SPARSITY
            ),
            BesidePaper(f"sparsity at γ = {gammas[-1]:g}, {WORDS[FORMULA]}", last["sparsity"], None),
            *_at_ends(curves),
        ),
        panels=tuple(_panel(WORDS[kind], curves[kind]) for kind in kinds),
        drawings=(
            Drawing(
                NAME,
                f"{len(faces.images)} images, {SAMPLES} samples each, those for which the problem was solved, over the "
                "mean separation between the target's "
                "score and the best other one: for the formula alone as the formula expects it, for the network "
                "followed as sampled. Dashed: share of images of which most samples are fooled.",
                partial(draw_curves, curves[FORMULA], curves[FOLLOWED], FIGURE_8_SPARSITY),
            ),
        ),
        numbers={
            "images": len(faces.images),
            "samples": SAMPLES,
            "source": source,
            "target": target,
            "kept_relu": faces.kept_relu(kinds[FORMULA].layer),
            "curves": curves,
        },
        seconds=results.seconds,
    )


def attack_name(kind: str, gamma: float) -> str:
    """The name of the rows of one γ.

    >>> attack_name("formula", 0.5)
    'formula, γ = 0.5'
    """
    return f"{kind}, γ = {gamma:g}"


def _point(columns: Columns, kind: str, gamma: float) -> dict[str, Any]:
    """Averages over the images for which the problem was solved, or over all images if it was solved for none."""
    rows = chosen_rows(columns, columns["variant"] == attack_name(kind, gamma))
    held = rows["feasible"] if rows["feasible"].any() else np.ones_like(rows["feasible"])
    return {"gamma": gamma, **summarized(chosen_rows(rows, held)), "attacks": len(held)}


def _at_ends(curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[BesidePaper]:
    return [
        BesidePaper(f"samples fooled at γ = {one['gamma']:g}, {WORDS[kind]}", one["samples_fooled"], None)
        for kind, curve in curves.items()
        for one in (curve[0], curve[-1])
    ]


def _panel(words: str, curve: Sequence[Mapping[str, Any]]) -> Panel:
    rows = tuple(
        (
            f"{one['gamma']:g}",
            in_cell(one["separation_by_formula"]),
            in_cell(one["separation_sampled"]),
            in_cell(one["samples_fooled"], 3),
            in_cell(one["images_fooled"], 3),
            percent(one["sparsity"]),
            percent(one["sparsity_where_fooled"]),
            f"{one['feasible']} / {one['attacks']}",
            in_cell(one["median_gap"], 3),
        )
        for one in curve
    )
    headings = (
        "γ", "separation, formula", "separation, sampled", "samples fooled", "images fooled", "sparsity",
        "sparsity where fooled", "problem holds", "median gap",
    )  # fmt: skip
    caption = (
        "Means over the images for which the problem holds at the end. Separation: the target's score less the best "
        "other one."
    )
    return Panel(f"By γ: {words}", headings, rows, caption, emphasis=(3, 5))


def _reading(
    faces: Faces, curves: Mapping[str, Sequence[Mapping[str, Any]]], source: int, target: int
) -> tuple[str, ...]:
    from_, to, rate = lowest_published_pair()
    first, last = curves[FORMULA][0], curves[FORMULA][-1]
    own_first, own_last = curves[FOLLOWED][0], curves[FOLLOWED][-1]
    return (
        f"{len(faces.images)} test images of FER2013 of class {source} ({faces.classes[source]}) that the network gets "
        f"right, chosen at random, all towards class {target} ({faces.classes[target]}), with γ from "
        f"{first['gamma']:g} to {last['gamma']:g} logits. Otherwise as Table 5: σ one grey level, l = 3 read as the "
        f"last ReLU, {SAMPLES} samples an image, sparsity the share of pixels changed by at most a thousandth of a "
        "grey level.",
        "The paper chose this pair because its Table 5 has the highest rate there; in the printed table "
        f"{from_} → {to} is the lowest, {rate:g}.",
        f"By the formula alone, as the paper: {_course('the share of fooled samples', first, last, 'samples_fooled')}, "
        f"as γ goes from {first['gamma']:g} to {last['gamma']:g} and the separation that the formula expects from "
        f"{in_cell(first['separation_by_formula'])} to {in_cell(last['separation_by_formula'])}; "
        f"{_course('sparsity', first, last, 'sparsity')}. In the paper the rate rises and the sparsity starts at "
        f"around {FIGURE_8_SPARSITY:.0%} and falls only slightly.",
        f"The constraint of the formula's problem holds at the end {_held(curves[FORMULA])}. At γ = "
        f"{first['gamma']:g}: {on_linearization(first)} At γ = {last['gamma']:g}: {on_linearization(last)}",
        "With the network followed and pixels kept in [0, 1] "
        f"{_course('the share of fooled samples', own_first, own_last, 'samples_fooled')}, over separations sampled "
        f"from {in_cell(own_first['separation_sampled'])} to {in_cell(own_last['separation_sampled'])}; "
        f"{_course('sparsity', own_first, own_last, 'sparsity')}. What the formula says of that noise is no use as an "
        "axis: it is linearized at the image, and the noise was not made with it.",
    )


def _held(curve: Sequence[Mapping[str, Any]]) -> str:
    """The range, over all γ, of the number of images for which the problem was solved."""
    least, most = (choose(one["feasible"] for one in curve) for choose in (min, max))
    counted = f"{least}" if least == most else f"{least} to {most}, depending on γ,"
    return f"for {counted} of {curve[0]['attacks']} images"


def _course(what: str, first: Mapping[str, Any], last: Mapping[str, Any], key: str) -> str:
    """Describe how a share changes from one end of the curve to the other."""
    change = last[key] - first[key]
    if abs(change) <= FLAT:
        return f"{what} stays at {percent(first[key])}"
    return f"{what} {'rises' if change > 0 else 'falls'} from {percent(first[key])} to {percent(last[key])}"


def draw_curves(formula: Curve, followed: Curve, paper_sparsity: float) -> Figure:
    """Draw the rate on the left, the sparsity on the right; filled marks count samples, hollow ones images mostly
    fooled.
    """
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
