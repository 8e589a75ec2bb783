"""Figures of the site that are drawn from records, and the colours of all of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")

import matplotlib.pyplot as plt
import records
from matplotlib.axes import Axes
from matplotlib.transforms import Bbox

GREY = "#7d7d7d"
COLOURS = ["#3b82c4", "#d9822b", "#3f9b6c", "#c4507b", "#8a6fc7", "#9a8f2c"]
"""Each told from the others, and from both a white and a black page."""


def readable_in_light_and_dark(_gallery_conf: Mapping[str, Any] | None = None, _script: str | None = None) -> None:
    """Transparent figures with grey lines and words, seeded torch: what sphinx-gallery calls before every script."""
    import torch

    torch.manual_seed(0)
    torch.set_num_threads(1)
    mpl.rcdefaults()
    mpl.use("agg")
    colours = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "axes.titlecolor")
    mpl.rcParams.update(dict.fromkeys(colours, GREY))
    mpl.rcParams.update({
        "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none", "legend.framealpha": 0.0,
        "axes.prop_cycle": mpl.cycler(color=COLOURS), "axes.spines.top": False, "axes.spines.right": False,
        "figure.figsize": (7.0, 3.4), "figure.constrained_layout.use": True, "figure.dpi": 110, "font.size": 10.0,
        "image.cmap": "viridis",
    })  # fmt: skip


BESIDE = [
    ((6, 3), "left"),
    ((6, -9), "left"),
    ((-6, 3), "right"),
    ((-6, -9), "right"),
    ((0, 7), "center"),
    ((0, -13), "center"),
]
"""Places of a name beside its point, the best first: points to the right and up, and how it is aligned."""


def name_points(panel: Axes, names: Mapping[str, tuple[float, float]]) -> None:
    """Each point's name where it covers least of the other points and names, and is inside the panel."""
    centres = panel.transData.transform(list(names.values()))
    taken = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in centres]
    for words, point in names.items():
        notes = [
            panel.annotate(words, point, place, textcoords="offset points", ha=side, fontsize=7.5, in_layout=False)
            for place, side in BESIDE
        ]
        boxes = [note.get_window_extent() for note in notes]
        costs = [covered(box, taken) + box.width * box.height - covered(box, [panel.bbox]) for box in boxes]
        best = costs.index(min(costs))
        taken.append(boxes[best])
        for place, note in enumerate(notes):
            if place != best:
                note.remove()


def covered(box: Bbox, others: Iterable[Bbox]) -> float:
    """The area that a box has in common with others."""
    shared = (Bbox.intersection(box, other) for other in others)
    return sum(part.width * part.height for part in shared if part is not None)


def error_against_time(target: Path) -> None:
    """Relative error of the variance against time by 10⁴ plain samples', on three networks; lower left is better."""
    networks = {"LeNet": "LeNet", "faces": "AlexNet on faces", "SqueezeNet": "SqueezeNet, 5 scores"}
    figure, panels = plt.subplots(1, 3, figsize=(10.5, 4.8), sharey=True)
    every: list[dict[str, tuple[float, float]]] = []
    for panel, (name, words) in zip(panels, networks.items(), strict=True):
        table = records.result_table("frontier", name)
        measured = {method: cells for method, cells in table.items() if cells["by 10⁴ samples"] != "—"}
        in_order = sorted(measured.items(), key=lambda each: float(each[1]["by 10⁴ samples"]))
        names = {}
        for method, cells in in_order:
            time, error = float(cells["by 10⁴ samples"]), float(cells["error of the variance"])
            plain = method.endswith("samples") and "assisted" not in method
            rival = method in ("diagonal (ADF)", "unscented transform")
            colour = GREY if plain else COLOURS[1] if rival else COLOURS[0]
            panel.plot(time, error, "s" if plain else "x" if rival else "o", color=colour)
            short = method.replace("assisted samples", "assisted").replace(" samples", " plain").replace(" probes", "")
            names[short] = (time, error)
        panel.set(xscale="log", yscale="log", title=words, xlabel="time by that of 10⁴ samples")
        panel.margins(x=0.35)
        every.append(names)
    panels[0].set_ylabel("relative error of the variance")
    figure.canvas.draw()  # where everything is, is known now
    for panel, names in zip(panels, every, strict=True):
        name_points(panel, names)
    figure.savefig(target, transparent=True)
    plt.close(figure)


def default_over_noise(target: Path) -> None:
    """Errors and time of the default on thirteen networks, over the noise level."""
    rows = records.default_rows(records.newest("*-cpu-sampler.txt"))
    figure, panels = plt.subplots(1, 3, figsize=(10.5, 3.6))
    what = {"mean": "mean, in deviations", "variance": "variance, relative", "time": "time by that of 10⁴ samples"}
    for panel, (field, words) in zip(panels, what.items(), strict=True):
        for number, name in enumerate(records.KINDS):
            found = [row for row in rows if row.network == name]
            marked = name in ("probabilities", "unet", "recurrent", "mlp")
            panel.plot(
                [row.sigma for row in found], [getattr(row, field) for row in found], marker=".",
                color=COLOURS[number % 6] if marked else GREY, alpha=1.0 if marked else 0.5,
                label=records.KINDS[name] if marked else None,
            )  # fmt: skip
        panel.set(xscale="log", yscale="log", title=words, xlabel="σ")
        panel.set_xticks([0.01, 0.05, 0.1, 0.3], ["0.01", "0.05", "0.1", "0.3"])
        panel.minorticks_off()
    panels[1].legend(fontsize=7.5)
    figure.savefig(target, transparent=True)
    plt.close(figure)


def runs_of_rare_flips(target: Path) -> None:
    """Runs of the network for a standard error of 10 %, over the probability; plain sampling is the line above."""
    rows = records.latest_flips()
    figure, panel = plt.subplots()
    for marker, name in zip("osD^", dict.fromkeys(row.network for row in rows), strict=False):
        found = [row for row in rows if row.network == name]
        panel.plot([row.probability for row in found], [row.runs for row in found], marker, label=name)
    ends = [min(row.probability for row in rows), max(row.probability for row in rows)]
    panel.plot(ends, [100 / end for end in ends], color=GREY, label="plain samples")
    panel.set(xscale="log", yscale="log", xlabel="probability that the answer flips", ylabel="runs of the network")
    panel.legend()
    figure.savefig(target, transparent=True)
    plt.close(figure)


def write(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    readable_in_light_and_dark()
    error_against_time(folder / "error-against-time.png")
    default_over_noise(folder / "default-over-noise.png")
    runs_of_rare_flips(folder / "runs-of-rare-flips.png")
