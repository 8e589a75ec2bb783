"""Run a sweep to its end, or as far as it gets: finished items are kept, and the next run goes on from there.

Progress is shown as a bar on a terminal, and elsewhere as a line now and then, for logs.
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from netmoments import progress
from netmoments.sweep.item import Engine, Sweep
from netmoments.sweep.store import Store

INTERVAL = 30.0
"""Seconds between two lines of progress where there is no terminal."""


class Watch:
    """Progress of a sweep on stderr: `with Watch("monte-carlo", "images", total, done) as watch: … watch.advance(n)`.

    Nothing is shown in the first second. What earlier runs have done counts as done, but not in the rate. Bars of the
    work inside are not shown.
    """

    def __init__(self, name: str, unit: str, total: int, done: int) -> None:
        self._name = name
        self._unit = unit
        self._total = total
        self._done_before = self._done = done
        self._bar: Any = None
        self._silence = ExitStack()

    def __enter__(self) -> Self:
        self._start = time.monotonic()
        self._next_line = self._start + progress.PATIENCE
        if sys.stderr.isatty():
            self._open_bar()
        self._silence.enter_context(progress.silence())
        return self

    def advance(self, count: int) -> None:
        """Show that `count` more units are done."""
        self._done += count
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, description=self.line(now))
        elif now >= self._next_line and not sys.stderr.isatty():
            print(self.line(now), file=sys.stderr, flush=True)
            self._next_line = now + INTERVAL

    def line(self, now: float) -> str:
        """Progress in words: `monte-carlo: 1,250 of 10,000 images, 21.3/s, 6m50s left`."""
        text = f"{self._name}: {self._done:,} of {self._total:,} {self._unit}"
        rate = (self._done - self._done_before) / max(now - self._start, 1e-9)
        if rate == 0:
            return text
        return f"{text}, {rate:.3g}/s, {_duration((self._total - self._done) / rate)} left"

    def _open_bar(self) -> None:
        """Make a bar that appears when the first second has passed, even if no item is finished by then."""
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
        self._silence.close()
        if self._bar is not None:
            self._timer.cancel()
            self._timer.join()
            if self._bar.live.is_started:
                self._bar.stop()


def _duration(seconds: float) -> str:
    """Seconds in words, such as 6m50s."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


MERGE_EVERY = 500
"""Items with a file of their own after which these are merged: few enough for any folder."""


@dataclass(frozen=True)
class Results:
    """All rows of a sweep in the order of the items, with the column `item`, and the seconds of work in all runs."""

    columns: dict[str, np.ndarray]
    seconds: float


def run_sweep(sweep: Sweep, out: Path, engine: Engine) -> Results:
    """Compute the items that are missing in `<out>/<sweep.name>`, and return all results.

    On Ctrl-C and on errors, everything that is finished is kept.
    """
    if not sweep.counts:
        raise ValueError(f"{sweep.name} has no items; give it at least one of its {sweep.unit}")
    with Store.open(out, sweep, engine.device_type) as store:
        try:
            if len(store.finished) < len(sweep.counts):
                _complete(sweep, store, engine)
        except BaseException:
            with suppress(Exception):  # merging only tidies up, and the next run would do it
                store.read()
                store.merge()
            raise
        store.merge()
        return Results(store.columns(), store.seconds)


def _complete(sweep: Sweep, store: Store, engine: Engine) -> None:
    """Compute the missing items and add them to the store."""
    counts, finished = sweep.counts, store.finished
    missing = [item for item in range(len(counts)) if item not in finished]
    total, done = sum(counts), sum(counts[item] for item in finished)
    with Watch(sweep.name, sweep.unit, total, done) as watch, closing(engine.results(sweep, missing)) as results:
        for item, columns, took in results:
            store.add(item, columns, took)
            if store.unmerged >= MERGE_EVERY:
                store.merge()
            watch.advance(counts[item])
    if len(store.finished) < len(counts):
        raise RuntimeError(f"{sweep.name}: the engine gave {len(store.finished)} of {len(counts)} items and ended")
