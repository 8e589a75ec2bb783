"""The paper's Table 1: the error of LeNet's two-stage linearization near its point, for l = 1, 2, 3."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from netmoments.checks import random_seed
from netmoments.precision import full_precision
from netmoments.report.pictures import BLUE, INK, ORANGE, SMALL, new_figure
from netmoments.sweep.item import Columns
from reproduction.experiment import BesidePaper, Drawing, Outcome, Panel, Settings
from reproduction.image_sweeps import BlocksOfImages, StudiedImages, same_bits
from reproduction.lenet_on_mnist import studied_images
from reproduction.plots import GREEN, dress
from reproduction.published import TABLE_1, TABLE_1_NOISE
from reproduction.two_stage_value import two_stage_value

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "table-1"
LEVELS = TABLE_1_NOISE
"""Levels of the noise, in grey levels."""
LAYERS = (1, 2, 3)
"""The paper's l: ReLUs counted from 1."""
GREY_LEVEL = 1 / 255
SCORES = ("logits", "softmax")
BLOCK = 100
"""Images per item."""


class Reading(NamedTuple):
    """A possible meaning of the text: the noise distribution, and the image to linearize at; the other is compared."""

    law: str
    at: str


READINGS = tuple(Reading(law, at) for law in ("gaussian", "uniform") for at in ("clean", "noisy"))
CHOSEN = (Reading("gaussian", "clean"), "logits")
CONVERSE = (Reading("gaussian", "noisy"), "logits")
LAWS = {"gaussian": "Gaussian, std a/255", "uniform": "uniform, ±a/255"}
UNIT = LEVELS.index(1.0)
"""The index of the level ±1."""
Table = dict[int, list[tuple[float, float]]]
"""For each layer, the mean and standard deviation over the images at each level."""
Tables = Mapping[tuple[Reading, str], Table]
PRINTED: Table = {layer: [(value, 0.0) for value in TABLE_1[layer]] for layer in LAYERS}


def reproduce(settings: Settings) -> Outcome:
    results = settings.run(LinearizationErrorSweep("layers", studied_images(settings), BLOCK))
    tables = {
        (reading, scores): table_of(results.columns, reading, scores) for reading in READINGS for scores in SCORES
    }
    main = tables[CHOSEN]
    count = len(np.unique(results.columns["image"]))
    caption = (
        f"ℓ2 difference of the scores of LeNet and of its two-stage linearization, mean over {count:,} MNIST images; "
        "hollow: the paper's Table 1."
    )
    return Outcome(
        name=NAME,
        title="Table 1: the error of the two-stage linearization by the ReLU that is kept",
        reading=_words(main, tables[CONVERSE], count),
        comparisons=tuple(
            BesidePaper(f"ℓ2 difference, l = {layer}, noise ±{level:g}", main[layer][place][0], TABLE_1[layer][place])
            for layer in LAYERS
            for place, level in enumerate(LEVELS)
        ),
        panels=(_main_panel(main, count), _readings_panel(tables)),
        drawings=(Drawing(NAME, caption, partial(draw, main)),),
        numbers={"images": count, "noise": list(LEVELS), "readings": [_plain(*key, tables[key]) for key in tables]},
        seconds=results.seconds,
    )


@dataclass(frozen=True, eq=False)
class LinearizationErrorSweep(BlocksOfImages):
    """A sweep over every reading at every ReLU and noise level, with the rows of `differences`."""

    @property
    def configuration(self) -> Mapping[str, Any]:
        return {
            **self.studied.description(),
            "block": self.block,
            "levels": list(LEVELS),
            "layers": list(LAYERS),
            "readings": [list(reading) for reading in READINGS],
        }

    def rows_of(self, studied: StudiedImages, places: range) -> Columns:
        part = slice(places.start, places.stop)
        with same_bits():
            return differences(studied.network, studied.images[part], studied.numbers[part], studied.seed)


def differences(
    network: nn.Module, images: Tensor, numbers: Tensor, seed: int, levels: tuple[float, ...] = LEVELS
) -> Columns:
    """‖network − linearization‖₂ of the scores, and of their softmax: a row for each image, reading, level and layer.

    All levels of an image scale the same draw of the noise.
    """
    fields = noise_fields(numbers, images.shape[1:], seed)
    parts: list[dict[str, np.ndarray]] = []
    for (place, reading), level in itertools.product(enumerate(READINGS), levels):
        noisy = images + level * GREY_LEVEL * fields[reading.law].to(images)
        at, x = (images, noisy) if reading.at == "clean" else (noisy, images)
        with torch.no_grad(), full_precision():
            expected = network(x)
        for layer in LAYERS:
            value = two_stage_value(network, at, x, layer - 1)
            parts.append(
                {
                    "image": numbers.numpy(),
                    "reading": np.full(len(images), place),
                    "level": np.full(len(images), level),
                    "layer": np.full(len(images), layer),
                    "logits": _distance(value, expected),
                    "softmax": _distance(value.softmax(1), expected.softmax(1)),
                }
            )
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def noise_fields(numbers: Tensor, shape: torch.Size, seed: int) -> dict[str, Tensor]:
    """Noise of unit scale for each image, from its own seed: Gaussian of std 1, and uniform on ±1."""
    fields: dict[str, list[Tensor]] = {"gaussian": [], "uniform": []}
    for number in numbers.tolist():
        generator = torch.Generator().manual_seed(random_seed(seed, NAME, number))
        fields["gaussian"].append(torch.randn(shape, generator=generator))
        fields["uniform"].append(2 * torch.rand(shape, generator=generator) - 1)
    return {law: torch.stack(field) for law, field in fields.items()}


def _distance(a: Tensor, b: Tensor) -> np.ndarray:
    return (a - b).double().norm(dim=1).cpu().numpy()


def table_of(columns: Columns, reading: Reading, scores: str) -> Table:
    """The mean ± standard deviation over images, arranged as in the paper's table."""
    mine = columns["reading"] == READINGS.index(reading)
    cells: Table = {}
    for layer in LAYERS:
        chosen = (columns[scores][mine & (columns["layer"] == layer) & (columns["level"] == a)] for a in LEVELS)
        cells[layer] = [(float(values.mean()), float(values.std(ddof=1))) for values in chosen]
    return cells


def growth(table: Table) -> float:
    """The power of the noise level with which the error grows: the slope of the logarithms, averaged over layers."""
    return float(np.polyfit(np.log(LEVELS), np.log(_means(table)).T, 1)[0].mean())


def magnitude(table: Table) -> float:
    """The geometric mean over the table of our numbers divided by the paper's."""
    return float(np.exp(np.log(_means(table) / _means(PRINTED)).mean()))


def draw(table: Table) -> Figure:
    """Draw the error over the noise, with a line for each ReLU and hollow marks for the paper's values."""
    figure = new_figure(3.6, 3.1)
    axes = figure.add_subplot()
    ours, printed = [], []
    for layer, colour, marker in zip(LAYERS, (BLUE, ORANGE, GREEN), "os^", strict=True):
        style: dict[str, Any] = {"color": colour, "marker": marker}
        ours += axes.plot(
            LEVELS, [m for m, _ in table[layer]], markersize=4, linewidth=1.4, label=f"l = {layer}, ours", **style
        )
        printed += axes.plot(
            LEVELS, TABLE_1[layer], markersize=5 + 2 * (layer == 3), markerfacecolor="none", linestyle=":",
            linewidth=0.8, label=f"l = {layer}, paper", **style,
        )  # fmt: skip
    dress(axes, "Error of the linearization", "noise, grey levels of 255", "ℓ2 difference of the scores")
    axes.set_xticks(LEVELS, [f"±{level:g}" for level in LEVELS])
    axes.set_ylim(bottom=0)
    figure.legend(
        handles=[*ours, *printed], loc="outside lower center", ncols=2, frameon=False, fontsize=SMALL, labelcolor=INK
    )
    return figure


def _means(table: Table) -> np.ndarray:
    return np.array([[mean for mean, _ in table[layer]] for layer in LAYERS])


def _plain(reading: Reading, scores: str, table: Table) -> dict[str, Any]:
    return {
        "law": reading.law,
        "linearized_at": reading.at,
        "scores": scores,
        "chosen": (reading, scores) == CHOSEN,
        "growth": growth(table),
        "ours_over_paper": magnitude(table),
        "mean": {str(layer): [mean for mean, _ in cells] for layer, cells in table.items()},
        "std": {str(layer): [std for _, std in cells] for layer, cells in table.items()},
    }


def _main_panel(table: Table, count: int) -> Panel:
    rows: list[tuple[str, ...]] = []
    for layer in LAYERS:
        rows.append((str(layer), "ours", *(f"{mean:.4f} ± {std:.4f}" for mean, std in table[layer])))
        rows.append(("", "paper", *(f"{value:.4f}" for value in TABLE_1[layer])))
    return Panel(
        title=f"ℓ2 difference of the scores, LeNet and its linearization, {count:,} images",
        columns=("l", "", *(f"±{level:g}" for level in LEVELS)),
        rows=tuple(rows),
        caption="Linearized at the image, compared at it plus Gaussian noise of std a/255; mean ± std over images.",
        breaks=tuple(range(2, len(rows), 2)),
    )


def _readings_panel(tables: Tables) -> Panel:
    rows = [
        (f"{LAWS[reading.law]}{' ←' if (reading, scores) == CHOSEN else ''}", reading.at, scores, *_structure(table))
        for (reading, scores), table in tables.items()
    ]
    columns = (
        "noise",
        "linearized at",
        "scores",
        "l = 1",
        "l = 2",
        "l = 3",
        "l2/l1",
        "l3/l2",
        "grows as a^",
        "ours/paper",
    )
    return Panel(
        title="The readings of the text, at noise ±1",
        columns=columns,
        rows=(*rows, ("paper", "", "", *_structure(PRINTED))),
        caption="The last two columns are over all levels and layers. ← the reading of the main table.",
        breaks=(len(rows),),
    )


def _structure(table: Table) -> tuple[str, ...]:
    """What can be checked of a reading: its values at ±1, their order, the growth with noise, and the magnitude."""
    first, second, third = (table[layer][UNIT][0] for layer in LAYERS)
    values = f"{first:.2g}", f"{second:.2g}", f"{third:.2g}"
    return *values, f"{second / first:.2f}", f"{third / second:.2f}", f"{growth(table):.2f}", f"{magnitude(table):.2g}"


def _words(main: Table, converse: Table, count: int) -> tuple[str, ...]:
    first, second, third = (main[layer][UNIT][0] for layer in LAYERS)
    return (
        f"LeNet is linearized at one point and compared with itself at another, for {count:,} MNIST test images with "
        "one draw of noise each. The paper does not say in what unit its noise is, whether scores are logits, nor "
        "where the two are compared. Levels of 0.5 to 2 make sense as grey levels of 255 only: as parts of the pixel "
        "range they would drown the image.",
        "Chosen: Gaussian noise (the table's caption says so) of std a/255, logits, the linearization made at the "
        f"clean image and compared at the noisy one. The published errors grow as a^{growth(PRINTED):.2f}, and this "
        f"reading as a^{growth(main):.2f}; the converse, linearized at the noisy image as the text has it and compared "
        f"at the clean one, grows as a^{growth(converse):.2f} and is {magnitude(main) / magnitude(converse):.0f} times "
        "smaller. The reason is MNIST's background: its equal pixels tie in the max-pools, so the clean image lies on "
        "kinks of the network and the error starts out linear; the straight way from a noisy image to the clean one "
        "ends on those kinks and crosses none of them.",
        f"In magnitude ours are {magnitude(main):.2f} of the paper's, whose network was another one. At ±1, l = 2 is "
        f"{second / first:.2f} times l = 1 (paper {TABLE_1[2][UNIT] / TABLE_1[1][UNIT]:.2f}) and l = 3 is "
        f"{third / second:.2f} times l = 2 (paper {TABLE_1[3][UNIT] / TABLE_1[2][UNIT]:.2f}).",
    )
