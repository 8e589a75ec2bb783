"""Progress of long work on a terminal: silent for the first second, and wherever nobody is watching."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

PATIENCE = 1.0
_open = threading.local()


@dataclass(eq=False)
class Progress:
    """`with Progress("sampling", total) as progress: ... progress.advance(n)`.

    Draws a bar on stderr once a second has passed, if stderr is a terminal and rich is installed. Inside another one
    that counts more than a single step it stays silent: one bar is enough.
    """

    description: str
    total: int
    _done: int = field(default=0, init=False)
    _bar: Any = field(default=None, init=False)
    _task: Any = field(default=None, init=False)

    def __enter__(self) -> Self:
        self._start = time.monotonic()
        around: list[Progress] = _open.__dict__.setdefault("bars", [])
        self._watched = sys.stderr.isatty() and not any(bar.total > 1 for bar in around)
        around.append(self)
        return self

    def advance(self, count: int) -> None:
        self._done += count
        if self._bar is None and self._watched and time.monotonic() - self._start > PATIENCE:
            self._open()
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)

    def _open(self) -> None:
        try:
            from rich import progress
            from rich.console import Console
        except ImportError:
            self._watched = False
            return
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._bar.start()
        self._task = self._bar.add_task(self.description, total=self.total)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _open.bars.remove(self)
        if self._bar is not None:
            self._bar.stop()


@contextmanager
def silence() -> Iterator[None]:
    """No bars inside, in this thread: the progress of the whole is shown elsewhere."""
    with Progress("", 2):
        yield
