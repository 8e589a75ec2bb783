"""One self-contained HTML page of all reproduced experiments: no scripts, nothing fetched."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from netmoments.experiments.outcome import Panel
from netmoments.report.figures import DPI
from netmoments.report.numbers import number_columns, seconds_in_words
from netmoments.report.summary import COMPARISON_COLUMNS, Picture, Summary, comparison_cells

TEMPLATE = Path(__file__).parent / "templates" / "reproduction.html"
SHOWN = 8
"""Comparisons of one experiment in the overview; its section has them all."""
SHOWN_WHOLE = 50
"""Rows of a panel; one with more scrolls under its heading."""


def render_page(found: Sequence[tuple[Summary, Path]]) -> str:
    """The page as text, from summaries and the folders with their pictures."""
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError:
        raise ImportError('the page needs jinja2: pip install "netmoments[report]"') from None
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        subtitle=_subtitle([summary for summary, _ in found]),
        experiments=[_experiment(summary, folder) for summary, folder in found],
        columns=COMPARISON_COLUMNS,
        shown=SHOWN,
        shown_whole=SHOWN_WHOLE,
    )


def _subtitle(found: Sequence[Summary]) -> str:
    """The paper, the days of the first and the last result, the machines."""
    days = sorted({summary.provenance.date.split(" ")[0] for summary in found})
    devices = dict.fromkeys(summary.provenance.device for summary in found)
    return ", ".join(["Network Moments", " to ".join(dict.fromkeys((days[0], days[-1]))), *devices])


def _experiment(summary: Summary, folder: Path) -> dict[str, Any]:
    return {
        "name": summary.name,
        "title": summary.title,
        "reading": summary.reading,
        "comparisons": [comparison_cells(item) for item in summary.comparisons],
        "pictures": [_picture(picture, folder) for picture in summary.pictures],
        "panels": [_panel(panel) for panel in summary.panels],
        "command": summary.provenance.command,
        "origin": _origin(summary),
    }


def _panel(panel: Panel) -> dict[str, Any]:
    """Each cell with its classes: numbers to the right, emphasis bold."""
    kinds = [
        " ".join(["number"] * number + ["strong"] * (place in panel.emphasis))
        for place, number in enumerate(number_columns(panel.columns, panel.rows))
    ]
    return {
        "title": panel.title,
        "caption": panel.caption,
        "columns": list(zip(panel.columns, kinds, strict=True)),
        "rows": [(number in panel.breaks, list(zip(row, kinds, strict=True))) for number, row in enumerate(panel.rows)],
    }


def _picture(picture: Picture, folder: Path) -> dict[str, Any]:
    """The PNG as a data URI, with the size the figure has on paper."""
    path = folder / picture.png
    content = path.read_bytes()
    if content[:8] != b"\x89PNG\r\n\x1a\n" or content[-8:-4] != b"IEND":
        raise ValueError(f"{path} is not a whole PNG; reproduce {folder.name} again")
    width, height = (round(pixels * 96 / DPI) for pixels in struct.unpack(">II", content[16:24]))
    data = "data:image/png;base64," + base64.b64encode(content).decode()
    return {"data": data, "width": width, "height": height, "caption": picture.caption}


def _origin(summary: Summary) -> list[tuple[str, str]]:
    origin = summary.provenance
    return [
        ("netmoments", origin.netmoments),
        ("torch", origin.torch),
        ("Python", origin.python),
        ("seed", str(origin.seed)),
        ("date", origin.date),
        ("device", origin.device),
        ("work", seconds_in_words(summary.seconds)),
    ]
