"""A reproduced table or figure in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.constrain import Constrain
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from netmoments.experiments.outcome import Comparison, Outcome, Panel
from netmoments.report.numbers import number_columns
from netmoments.report.summary import COMPARISON_COLUMNS, comparison_cells

READING_WIDTH = 100
MOST_COMPARISONS = 16


def draw(outcome: Outcome) -> RenderableType:
    """The reading, the numbers beside the paper's, and the panels."""
    parts: list[RenderableType] = [Text(outcome.title, style="bold")]
    parts += [Group(Text(), _paragraph(text)) for text in outcome.reading]
    if outcome.comparisons:
        parts += [Text(), Text("Beside the paper", style="bold"), _comparisons(outcome.comparisons)]
        if len(outcome.comparisons) > MOST_COMPARISONS:
            parts.append(Text(f"{len(outcome.comparisons) - MOST_COMPARISONS} more in table.md", style="dim"))
    for panel in outcome.panels:
        parts += [Text(), Text(panel.title, style="bold"), _Fitted(panel)]
        if panel.caption:
            parts.append(_paragraph(panel.caption, style="dim"))
    for panel in outcome.details:
        parts += [Text(), Text(f"{panel.title}: {len(panel.rows)} rows in table.md", style="dim")]
    return Group(*parts)


def _paragraph(text: str, style: str = "") -> Constrain:
    return Constrain(Text(text, style=style), READING_WIDTH)


def _comparisons(comparisons: Sequence[Comparison]) -> _Fitted:
    rows = tuple(comparison_cells(item) for item in comparisons[:MOST_COMPARISONS])
    return _Fitted(Panel("", COMPARISON_COLUMNS, rows, emphasis=(1,)))


@dataclass(frozen=True)
class _Fitted:
    """A panel that loses no cell: in a narrow terminal headings are broken, then it becomes several tables."""

    panel: Panel

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        def fits(table: Table) -> bool:
            return Measurement.get(console, options.update(max_width=10_000), table).minimum <= options.max_width

        whole = _table(self.panel, range(len(self.panel.columns)), {})
        if Measurement.get(console, options.update(max_width=10_000), whole).maximum <= options.max_width:
            yield whole
            return
        for places in self._divisions():
            tables = [_table(self.panel, part, self._narrowest()) for part in places]
            if all(map(fits, tables)):
                break
        yield from tables

    def _divisions(self) -> Iterator[list[list[int]]]:
        """All columns, then ever more groups of about the same size, each beginning with those that name the row."""
        numbers = number_columns(self.panel.columns, self.panel.rows)
        keys = list(range(numbers.index(False) + 1 if False in numbers[:3] else 1))
        others = list(range(len(keys), len(numbers)))
        for count in range(1, max(len(others), 1) + 1):
            ends = [round(len(others) * k / count) for k in range(count + 1)]
            yield [[*keys, *others[start:end]] for start, end in pairwise(ends)]

    def _narrowest(self) -> dict[int, int]:
        """The least widths of columns of numbers: no number is broken, nor a word of a heading."""
        numbers = number_columns(self.panel.columns, self.panel.rows)
        return {
            place: max(map(cell_len, [*name.split(), *(row[place] for row in self.panel.rows)]))
            for place, name in enumerate(self.panel.columns)
            if numbers[place]
        }


def _table(panel: Panel, places: Sequence[int], widths: Mapping[int, int]) -> Table:
    """Some columns of a panel, numbers to the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    numbers = number_columns(panel.columns, panel.rows)
    for place in places:
        table.add_column(
            Text(panel.columns[place]),
            justify="right" if numbers[place] else "left",
            style="bold" if place in panel.emphasis else None,
            width=widths.get(place),
        )
    for following, row in enumerate(panel.rows, start=1):
        table.add_row(*(Text(row[place]) for place in places), end_section=following in panel.breaks)
    return table
