"""Progress of long work on a terminal: silent for the first second, and wherever nobody is watching."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE = 1.0
_around = threading.local()

Show = Callable[[int], None]
"""Told how many steps are done."""


@contextmanager
def progress_bar(description: str, total: int) -> Iterator[Show]:
    """`with progress_bar("sampling", total) as show: …`, in which every step begins with `show(done)`.

    Draws a bar on stderr once a second has passed, if stderr is a terminal and rich is installed. Inside another one
    that counts more than a single step it stays silent: one bar is enough.
    """
    start, bar, totals = time.monotonic(), None, _around.__dict__.setdefault("totals", [])
    watched = sys.stderr.isatty() and max(totals, default=0) <= 1

    def show(done: int) -> None:
        nonlocal bar, watched
        if watched and bar is None and time.monotonic() - start > PATIENCE:
            bar = _drawn(description, total)
            watched = bar is not None
        if bar is not None:
            bar.update(bar.task_ids[0], completed=done)

    totals.append(total)
    try:
        yield show
    finally:
        totals.remove(total)
        if bar is not None:
            bar.stop()


def _drawn(description: str, total: int) -> Any:
    """A bar of rich with one task; None where that is not installed."""
    try:
        from rich import progress
        from rich.console import Console
    except ImportError:
        return None
    bar = progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    bar.start()
    bar.add_task(description, total=total)
    return bar


@contextmanager
def silence() -> Iterator[None]:
    """No bars inside, in this thread: the progress of the whole is shown elsewhere."""
    with progress_bar("", 2):
        yield
