"""What an experiment found, ready to be shown: numbers beside the paper's, tables, figures, and how it was read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Comparison:
    """One number of ours beside the paper's, where it has one."""

    what: str
    ours: float
    paper: float | None

    @property
    def difference(self) -> float | None:
        return None if self.paper is None else self.ours - self.paper


@dataclass(frozen=True)
class Panel:
    """A table of cells already in words; `emphasis` are the columns that matter most."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    emphasis: tuple[int, ...] = ()
    breaks: tuple[int, ...] = ()
    """Rows before which a new group begins."""


@dataclass(frozen=True)
class Drawing:
    """A figure that is drawn when it is wanted: its name is its file's, without an ending."""

    name: str
    caption: str
    draw: Callable[[], Figure]


@dataclass(frozen=True)
class Outcome:
    """One table or figure of the paper, reproduced."""

    name: str
    """As on the command line: figure-2, table-4."""
    title: str
    reading: tuple[str, ...]
    """Paragraphs: what was done, which reading of the paper was chosen, what is to be seen."""
    comparisons: tuple[Comparison, ...]
    panels: tuple[Panel, ...]
    drawings: tuple[Drawing, ...]
    numbers: dict[str, Any]
    """Everything for machines: plain values, lists and dictionaries."""
    seconds: float
    """Time of the work itself, over all runs that contributed."""
    details: tuple[Panel, ...] = ()
    """Panels for the files and the page, too long for a terminal."""
