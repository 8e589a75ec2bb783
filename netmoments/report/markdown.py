"""An outcome as a Markdown file beside its pictures."""

from __future__ import annotations

import re
from collections.abc import Sequence

from netmoments.experiments.outcome import Panel
from netmoments.report.numbers import number_columns, seconds_in_words
from netmoments.report.summary import COMPARISON_COLUMNS, Picture, Summary, comparison_cells


def as_markdown(summary: Summary) -> str:
    """Title, reading, comparisons, figures, panels, and a last line that says where it all came from."""
    blocks = [f"# {plain(summary.title)}", *map(_paragraph, summary.reading)]
    if summary.comparisons:
        blocks += [
            "## Beside the paper",
            table(COMPARISON_COLUMNS, [comparison_cells(item) for item in summary.comparisons]),
        ]
    for picture in summary.pictures:
        blocks += _picture(picture)
    for panel in summary.panels:
        blocks += _panel(panel)
    return "\n\n".join([*blocks, _origin(summary)]) + "\n"


def plain(text: str) -> str:
    """Text on one line that Markdown, also inside a table, shows as it is.

    >>> print(plain("P(a|b) of *x* in <b>, < 1e-6"))
    P(a\\|b) of \\*x\\* in &lt;b>, < 1e-6
    """
    text = re.sub(r"([\\`*_|$~])", r"\\\1", " ".join(text.split()))
    text = re.sub(r"&(?=#?\w+;)", "&amp;", text)
    return re.sub(r"<(?=[a-zA-Z/!?])", "&lt;", text).replace("](", r"]\(")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], emphasis: Sequence[int] = ()) -> str:
    """Cells in words as a Markdown table: numbers to the right, the columns of `emphasis` bold."""
    rule = ["---:" if number else "---" for number in number_columns(columns, rows)]
    lines = [[plain(column) for column in columns], rule]
    for row in rows:
        cells = [plain(cell) for cell in row]
        lines.append([f"**{cell}**" if k in emphasis and cell else cell for k, cell in enumerate(cells)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _paragraph(text: str) -> str:
    """Plain text that does not begin a heading, a list or a quotation."""
    text = re.sub(r"^(\d+)([.)])(?=\s|$)", r"\1\\\2", plain(text))
    return re.sub(r"^(#|>|[+-](?=\s|$)|[=-]+$)", r"\\\1", text)


def _picture(picture: Picture) -> list[str]:
    words = re.sub(r"([\[\]])", r"\\\1", plain(picture.caption))
    link = f"([PDF]({picture.pdf}))"
    return [f"![{words}]({picture.png})", f"{_paragraph(picture.caption)} {link}".lstrip()]


def _panel(panel: Panel) -> list[str]:
    blocks = [f"## {plain(panel.title)}", table(panel.columns, panel.rows, panel.emphasis)]
    return [*blocks, _paragraph(panel.caption)] if panel.caption else blocks


def _origin(summary: Summary) -> str:
    """Command, versions, seed, date, device and time on one line."""
    origin = summary.provenance
    facts = (
        f"netmoments {origin.netmoments}, torch {origin.torch}, Python {origin.python}",
        f"seed {origin.seed}",
        origin.date,
        origin.device,
        f"{seconds_in_words(summary.seconds)} of work",
    )
    return " · ".join([_code(origin.command), *map(plain, facts)])


def _code(text: str) -> str:
    """Text as code, fenced by more backticks than it has in a row."""
    text = " ".join(text.split())
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    return f"{fence} {text} {fence}" if longest else f"{fence}{text}{fence}"
