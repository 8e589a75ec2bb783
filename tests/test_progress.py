"""Progress bars: nothing for short work or without a terminal, a bar for long work on one."""

from __future__ import annotations

import io
import sys

import pytest

from netmoments import progress
from netmoments.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", -1.0)


def test_long_work_on_a_terminal_shows_a_bar(monkeypatch, impatient):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress("sampling", 10) as bar:
        bar.advance(4)
        bar.advance(6)
    assert "sampling" in terminal.getvalue()
    assert "10/10" in terminal.getvalue()


def test_short_work_is_silent(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress("sampling", 10) as bar:
        bar.advance(10)
    assert terminal.getvalue() == ""


def test_nothing_is_drawn_where_nobody_watches(monkeypatch, impatient):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress("sampling", 10) as bar:
        bar.advance(10)
    assert stream.getvalue() == ""


def test_an_interruption_closes_the_bar(monkeypatch, impatient):
    monkeypatch.setattr(sys, "stderr", Terminal())
    work = Progress("sampling", 10)

    def interrupted() -> None:
        with work as bar:
            bar.advance(1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not work._bar.live.is_started
