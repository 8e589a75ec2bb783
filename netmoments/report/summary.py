"""An outcome as `summary.json` holds it: everything but the drawings themselves, and where it came from."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from netmoments.experiments.outcome import Comparison, Outcome, Panel
from netmoments.report.numbers import NOTHING, difference_in_words, in_words
from netmoments.report.provenance import Provenance

SUMMARY = "summary.json"
COMPARISON_COLUMNS = ("what", "ours", "paper", "difference")


@dataclass(frozen=True)
class Picture:
    """A drawing in files: `<name>.png` to look at, `<name>.pdf` to print."""

    name: str
    caption: str

    @property
    def png(self) -> str:
        return f"{self.name}.png"

    @property
    def pdf(self) -> str:
        return f"{self.name}.pdf"


@dataclass(frozen=True)
class Summary:
    """What is written about an outcome, and read again for the page."""

    name: str
    title: str
    reading: tuple[str, ...]
    comparisons: tuple[Comparison, ...]
    panels: tuple[Panel, ...]
    pictures: tuple[Picture, ...]
    numbers: dict[str, Any]
    seconds: float
    provenance: Provenance

    def __post_init__(self) -> None:
        names = [picture.name for picture in self.pictures]
        for name in (self.name, *names):
            _require_file_name(name)
        if len(set(names)) < len(names):
            raise ValueError(f"two drawings of {self.name} have one name: {', '.join(names)}")
        for panel in self.panels:
            _require_rectangle(panel)


def summary_of(outcome: Outcome, provenance: Provenance) -> Summary:
    return Summary(
        outcome.name,
        outcome.title,
        outcome.reading,
        outcome.comparisons,
        (*outcome.panels, *outcome.details),
        tuple(Picture(drawing.name, drawing.caption) for drawing in outcome.drawings),
        outcome.numbers,
        outcome.seconds,
        provenance,
    )


def comparison_cells(item: Comparison) -> tuple[str, ...]:
    """In words, for `COMPARISON_COLUMNS`."""
    paper = NOTHING if item.paper is None else in_words(item.paper)
    return item.what, in_words(item.ours), paper, difference_in_words(item.difference)


def as_json(summary: Summary) -> str:
    """The summary for machines; a number that is not finite is an error, JSON has none."""
    record = {
        "name": summary.name,
        "title": summary.title,
        "reading": summary.reading,
        "comparisons": [{**asdict(item), "difference": item.difference} for item in summary.comparisons],
        "panels": [asdict(panel) for panel in summary.panels],
        "drawings": [{**asdict(item), "png": item.png, "pdf": item.pdf} for item in summary.pictures],
        "numbers": summary.numbers,
        "seconds": summary.seconds,
        "provenance": asdict(summary.provenance),
    }
    try:
        return _pretty(record) + "\n"
    except (TypeError, ValueError) as error:
        raise type(error)(f"{summary.name} cannot be written as JSON: {error}") from error


def _pretty(value: Any, depth: int = 0) -> str:
    """JSON with one line an entry, but lists of plain values on a line of their own."""
    nested = (
        value if isinstance(value, (list, tuple)) and any(isinstance(x, (dict, list, tuple)) for x in value) else ()
    )
    entries = [_pretty(x, depth + 1) for x in nested]
    if isinstance(value, dict):
        entries = [f"{json.dumps(str(key), ensure_ascii=False)}: {_pretty(x, depth + 1)}" for key, x in value.items()]
    if not entries:
        return json.dumps(value, allow_nan=False, ensure_ascii=False)
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    lines = f",\n{' ' * (depth + 1)}".join(entries)
    return f"{opening}\n{' ' * (depth + 1)}{lines}\n{' ' * depth}{closing}"


def read_summary(path: Path) -> Summary:
    """A summary from its file; anything amiss is an error that names the file."""
    text = path.read_bytes()
    try:
        summary = _summary_from(json.loads(text))
        if summary.name != path.parent.name:
            raise ValueError(f"it is about {summary.name}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        again = f"reproduce {path.parent.name} again"
        raise ValueError(f"{path} is damaged ({type(error).__name__}: {error}); {again}") from error
    return summary


def _summary_from(record: dict[str, Any]) -> Summary:
    return Summary(
        str(record["name"]),
        str(record["title"]),
        tuple(map(str, record["reading"])),
        tuple(_comparison_from(item) for item in record["comparisons"]),
        tuple(_panel_from(item) for item in record["panels"]),
        tuple(Picture(str(item["name"]), str(item["caption"])) for item in record["drawings"]),
        dict(record["numbers"]),
        float(record["seconds"]),
        Provenance(**record["provenance"]),
    )


def _comparison_from(record: dict[str, Any]) -> Comparison:
    paper = record["paper"]
    return Comparison(str(record["what"]), float(record["ours"]), None if paper is None else float(paper))


def _panel_from(record: dict[str, Any]) -> Panel:
    return Panel(
        str(record["title"]),
        tuple(map(str, record["columns"])),
        tuple(tuple(map(str, row)) for row in record["rows"]),
        str(record["caption"]),
        tuple(map(int, record["emphasis"])),
        tuple(map(int, record["breaks"])),
    )


def _require_file_name(name: str) -> None:
    if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII):
        raise ValueError(f"{name!r} cannot be a file's name; use letters, digits, dashes and underscores")


def _require_rectangle(panel: Panel) -> None:
    for number, row in enumerate(panel.rows):
        if len(row) != len(panel.columns):
            raise ValueError(
                f"row {number} of the panel {panel.title!r} has {len(row)} cells for {len(panel.columns)} columns"
            )
