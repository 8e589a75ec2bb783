"""Numbers that commands of this repository printed, read back for the site: from benchmarks/records and results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
RECORDS, RESULTS = ROOT / "benchmarks" / "records", ROOT / "results"

KINDS = {
    "mlp": "MLP",
    "smooth": "convolutions, smooth activations",
    "vgg": "VGG",
    "resnet8": "ResNet-8",
    "resnet20": "ResNet-20",
    "mobilenet": "MobileNet",
    "densenet": "DenseNet",
    "senet": "squeeze and excitation",
    "vit": "ViT",
    "series": "1-D convolutions, a series",
    "recurrent": "LSTM",
    "probabilities": "softmax at the end",
    "unet": "U-Net",
}
"""The thirteen networks of `python -m benchmarks.sampler`, in words."""


class DefaultRow(NamedTuple):
    """The default on one network at one noise level, against a million samples."""

    network: str
    sigma: float
    mean: float
    """Error of the means, in standard deviations of the outputs."""
    variance: float
    """Relative error of the variances."""
    within: float
    """Share of the errors that are within twice the stated ones."""
    time: float
    """By that of 10,000 plain samples in the same process, an image alone."""
    samples: float
    together: float | None
    """The same for 16 images together, where that was measured."""


class GalleryRow(NamedTuple):
    """One method on one network at one noise level, against a million samples."""

    network: str
    sigma: float
    method: str
    mean: float
    """Error of the means, in standard deviations of the outputs."""
    variance: float
    """Relative error of the variances."""
    time: float
    """Processor seconds by those of 10,000 plain samples in the same process."""


class Flip(NamedTuple):
    """One flip probability to 10 %: of which network, how rare, our runs, and those of plain sampling."""

    network: str
    probability: float
    runs: float
    plain: float


def newest(pattern: str) -> Path:
    """The last of the records with such a name; names begin with the date."""
    return sorted(RECORDS.glob(pattern))[-1]


def default_rows(path: Path) -> list[DefaultRow]:
    """Of a record of `python -m benchmarks.sampler`, the thirteen networks only."""
    found = []
    for line in path.read_text().splitlines():
        name, _, rest = line.partition(" ")
        numbers = dict(re.findall(r"([a-z]+) ([\d.e+-]+)", rest))
        if name in KINDS and "within" in numbers:
            mean, variance, within, alone, samples = (
                float(numbers[key]) for key in ("mean", "variance", "within", "alone", "samples")
            )
            together = float(numbers["together"]) if "together" in numbers else None
            found.append(DefaultRow(name, float(rest.split()[0]), mean, variance, within, alone, samples, together))
    return found


def gallery_rows(path: Path) -> list[GalleryRow]:
    """Of a record of `python -m benchmarks.gallery`, what has an answer."""
    pattern = r"^(\w+) +([\d.]+) +([\w-]+) +mean (\S+) +variance (\S+) +time (\S+)$"
    rows = re.findall(pattern, path.read_text(), re.M)
    return [
        GalleryRow(name, float(sigma), method, *map(float, numbers))
        for name, sigma, method, *numbers in rows
        if name in KINDS
    ]


def flips(path: Path) -> list[Flip]:
    """The rows of rare flips in a record of `python -m benchmarks.flips`."""
    pattern = r"^(\w+) +\d+ σ [\d.]+ +(\S+) [\d.]+ \S+ +(\d+) +\d+ .*?(\S+)$"
    rows = re.findall(pattern, path.read_text(), re.M)
    return [Flip(name, float(p), float(runs), float(plain)) for name, p, runs, plain in rows]


def latest_flips() -> list[Flip]:
    """Those of each network from the last record that has it."""
    found: dict[str, list[Flip]] = {}
    for path in sorted(RECORDS.glob("*-cpu-flips.txt"), reverse=True):
        own = flips(path)
        found = {**{row.network: [one for one in own if one.network == row.network] for row in own}, **found}
    return [row for rows in found.values() for row in rows]


def ratios(device: str) -> dict[str, float]:
    """What `python -m benchmarks.speed` measured, by its own words."""
    return json.loads((RECORDS / f"speed-{device}.json").read_text())["ratios"]


def result_table(name: str, heading: str) -> dict[str, dict[str, str]]:
    """The table below the heading of results/NAME/table.md that begins so: rows by first cell, cells by column."""
    text = (RESULTS / name / "table.md").read_text()
    (part,) = [part for part in text.split("\n## ") if part.startswith(heading)]
    rows = [line.strip("|").split("|") for line in part.splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip(" *") for cell in row] for row in rows]
    return {row[0]: dict(zip(head, row, strict=True)) for row in rows}


def comparisons(name: str) -> dict[str, tuple[float, float]]:
    """Of results/NAME: ours and the paper's number by what it is of, where the paper has one."""
    rows = json.loads((RESULTS / name / "summary.json").read_text())["comparisons"]
    return {row["what"]: (row["ours"], row["paper"]) for row in rows if row["paper"] is not None}


def startup(path: Path) -> list[tuple[str, str, str]]:
    """Of a record of `python -m benchmarks.startup`: commands, seconds on the clock, of the processor."""
    return re.findall(r"^(.+?) +(\S+) s, processor (\S+) s", path.read_text(), re.M)


def verdicts() -> list[list[str]]:
    """The rows of reproduction/README.md, by `python -m reproduction verdicts`, without links and emphasis."""
    lines = [line for line in (ROOT / "reproduction" / "README.md").read_text().splitlines() if line.startswith("|")]
    plain = (re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", line).replace("**", "") for line in lines[2:])
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in plain]


def of_words(path: Path, beginning: str) -> str:
    """The last word of the line of a record that begins so."""
    (line,) = [line.strip() for line in path.read_text().splitlines() if line.strip().startswith(beginning)]
    return line.split()[-1]
