"""How far a sweep is: a bar on a terminal; elsewhere a line now and then, which a log can keep."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from netmoments import progress

INTERVAL = 30.0


class Watch:
    """`with Watch("monte-carlo", "images", total, done) as watch: ... watch.advance(n)`, on stderr.

    Silent for the first second. What was done before counts as done, but not in the rate. Bars of the work inside are
    silent.
    """

    def __init__(self, name: str, unit: str, total: int, done: int) -> None:
        self._name = name
        self._unit = unit
        self._total = total
        self._before = self._done = done
        self._bar: Any = None
        self._around = ExitStack()

    def __enter__(self) -> Self:
        self._start = time.monotonic()
        self._next_line = self._start + progress.PATIENCE
        if sys.stderr.isatty():
            self._open_bar()
        self._around.enter_context(progress.silence())
        return self

    def advance(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, description=self.line(now))
        elif now >= self._next_line and not sys.stderr.isatty():
            print(self.line(now), file=sys.stderr, flush=True)
            self._next_line = now + INTERVAL

    def line(self, now: float) -> str:
        """`monte-carlo: 1,250 of 10,000 images, 21.3/s, 6m50s left`"""
        text = f"{self._name}: {self._done:,} of {self._total:,} {self._unit}"
        rate = (self._done - self._before) / max(now - self._start, 1e-9)
        if rate == 0:
            return text
        return f"{text}, {rate:.3g}/s, {_duration((self._total - self._done) / rate)} left"

    def _open_bar(self) -> None:
        """Made now, shown when the first second has passed, even if no item is finished then."""
        try:
            from rich import progress as rich
            from rich.console import Console
        except ImportError:
            return
        self._bar = rich.Progress(
            rich.BarColumn(),
            rich.TextColumn("{task.description}"),
            console=Console(file=sys.stderr),
            transient=True,
        )
        self._task = self._bar.add_task(self.line(self._start), total=self._total, completed=self._done)
        self._timer = threading.Timer(progress.PATIENCE, self._bar.start)
        self._timer.daemon = True
        self._timer.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._around.close()
        if self._bar is not None:
            self._timer.cancel()
            self._timer.join()
            if self._bar.live.is_started:
                self._bar.stop()


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
