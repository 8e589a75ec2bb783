"""Progress bars for long work: none in the first second, and none where stderr is not a terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE = 1.0
"""Seconds after which progress is shown."""
_this_thread = threading.local()
"""`totals`: the numbers of steps of the bars that this thread is inside."""

Show = Callable[[int], None]
"""A function that is called with the number of steps that are done."""


@contextmanager
def progress_bar(description: str, total: int) -> Iterator[Show]:
    """`with progress_bar("sampling", total) as show: …`, in which every step begins with `show(done)`.

    A bar appears on stderr once a second has passed, if stderr is a terminal and rich is installed. Inside another bar
    that counts more than a single step none is drawn, since one is enough.
    """
    start, bar, totals = time.monotonic(), None, _this_thread.__dict__.setdefault("totals", [])
    may_draw = sys.stderr.isatty() and max(totals, default=0) <= 1

    def show(done: int) -> None:
        nonlocal bar, may_draw
        if may_draw and bar is None and time.monotonic() - start > PATIENCE:
            bar = _drawn(description, total)
            may_draw = bar is not None
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
    """A progress bar of rich with one task; None if rich is not installed."""
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
    """Inside this block, this thread draws no bars, since the progress of the whole is shown elsewhere."""
    with progress_bar("", 2):
        yield
