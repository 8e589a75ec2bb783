"""Progress bars: nothing for short work or without a terminal, a bar for long work on one."""

from __future__ import annotations

import io
import sys

import pytest

from netmoments import progress
from netmoments.progress import progress_bar, silence


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", -1.0)


def watched(monkeypatch) -> Terminal:
    """Put a terminal in place of stderr; a fixture could not, since pytest replaces stderr before the test."""
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    return terminal


def test_long_work_on_a_terminal_shows_a_bar(monkeypatch, impatient):
    terminal = watched(monkeypatch)
    with progress_bar("sampling", 10) as show:
        show(4)
        show(10)
    assert "sampling" in terminal.getvalue()
    assert "10/10" in terminal.getvalue()


def test_short_work_is_silent(monkeypatch):
    terminal = watched(monkeypatch)
    with progress_bar("sampling", 10) as show:
        show(10)
    assert terminal.getvalue() == ""


def test_nothing_is_drawn_where_nobody_watches(monkeypatch, impatient):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_bar("sampling", 10) as show:
        show(10)
    assert stream.getvalue() == ""


def test_one_bar_is_enough(monkeypatch, impatient):
    terminal = watched(monkeypatch)
    with progress_bar("images", 1) as outer, progress_bar("layers", 2) as inner, progress_bar("rows", 2) as innermost:
        for show in (innermost, inner, outer):
            show(0)
    assert "rows" not in terminal.getvalue()
    assert "layers" in terminal.getvalue()
    with silence(), progress_bar("quiet", 2) as show:
        show(1)
    assert "quiet" not in terminal.getvalue()


def test_nothing_is_drawn_without_rich(monkeypatch, impatient):
    terminal = watched(monkeypatch)
    monkeypatch.setitem(sys.modules, "rich", None)
    with progress_bar("sampling", 10) as show:
        show(1)
        show(2)
    assert terminal.getvalue() == ""


def test_an_interruption_closes_the_bar(monkeypatch, impatient):
    watched(monkeypatch)
    drawn, bars = progress._drawn, []
    monkeypatch.setattr(progress, "_drawn", lambda *what: bars.append(drawn(*what)) or bars[0])

    def interrupted() -> None:
        with progress_bar("sampling", 10) as show:
            show(1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not bars[0].live.is_started
    with progress_bar("again", 10) as show:  # nothing is left of the one before
        show(1)
    assert len(bars) == 2
