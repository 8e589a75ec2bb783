"""Reproduced tables and figures as files, and all of them on one page; each file written whole or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from netmoments.experiments.outcome import Outcome
from netmoments.files import require_writable_folder, whole_file, write_text_whole
from netmoments.report.figures import figure_files
from netmoments.report.markdown import as_markdown
from netmoments.report.provenance import Provenance
from netmoments.report.reproduction_page import render_page
from netmoments.report.summary import SUMMARY, as_json, read_summary, summary_of

PAGE = "report.html"


def write_outcome(outcome: Outcome, provenance: Provenance, folder: Path) -> list[Path]:
    """The pictures, `table.md` and `summary.json` in `folder/<name>/`, which is made if need be.

    Everything is made before anything is written, and the summary is written last: where it is, the rest is.
    """
    summary = summary_of(outcome, provenance)
    record, text = as_json(summary), as_markdown(summary)
    contents: dict[str, bytes] = {}
    for drawing in outcome.drawings:
        contents |= figure_files(drawing)
    contents |= {"table.md": text.encode(), SUMMARY: record.encode()}
    place = folder / outcome.name
    require_writable_folder(place)
    place.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        with whole_file(place / name) as temporary:
            temporary.write_bytes(content)
    return [place / name for name in contents]


def write_page(folder: Path, names: Sequence[str]) -> Path:
    """`report.html` of all experiments that have a summary in the folder, in the order of `names`."""
    present = [folder / name for name in dict.fromkeys(names) if (folder / name / SUMMARY).exists()]
    if not present:
        raise FileNotFoundError(f"no experiment has a {SUMMARY} in {folder}: there is nothing to put on the page yet")
    page = render_page([(read_summary(place / SUMMARY), place) for place in present])
    write_text_whole(folder / PAGE, page)
    return folder / PAGE
