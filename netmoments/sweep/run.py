"""Run a sweep to its end, or as far as it gets: what is finished is kept, and the next run goes on from there.

How far it is shows as a bar on a terminal; elsewhere as a line now and then, which a log can keep.
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


MERGE_EVERY = 500  # items with a file of their own: few enough for any folder


@dataclass(frozen=True)
class Results:
    """All rows in the order of the items, with the column `item`, and the seconds of work in all runs together."""

    columns: dict[str, np.ndarray]
    seconds: float


class Unfinished(Exception):
    """The time was over before the sweep was done."""

    def __init__(self, name: str, done: int, total: int, unit: str, seconds: float) -> None:
        super().__init__(name, done, total, unit, seconds)
        self.name, self.done, self.total, self.unit, self.seconds = name, done, total, unit, seconds

    def __str__(self) -> str:
        took = f"{self.seconds / 60:.1f} minutes" if self.seconds >= 60 else f"{self.seconds:.1f} seconds"
        return (
            f"{self.name}: {self.done:,} of {self.total:,} {self.unit} done, stopped after {took}; "
            "run the same command again to go on"
        )


def run_sweep(sweep: Sweep, out: Path, engine: Engine, *, seconds: float | None = None) -> Results:
    """Compute what is missing in `<out>/<sweep.name>`, and give all of it.

    With `seconds`, raises `Unfinished` at the first item that finishes after that time with others still missing. On
    this, on Ctrl-C and on errors, everything that is finished stays.
    """
    if not sweep.counts:
        raise ValueError(f"{sweep.name} has no items; give it at least one of its {sweep.unit}")
    with Store.open(out, sweep, engine.device_type) as store:
        try:
            if len(store.finished) < len(sweep.counts):
                _complete(sweep, store, engine, seconds)
        except BaseException:
            with suppress(Exception):  # tidiness only, and the next run's merge would do it
                store.read()
                store.merge()
            raise
        store.merge()
        return Results(store.columns(), store.seconds)


def _complete(sweep: Sweep, store: Store, engine: Engine, seconds: float | None) -> None:
    start = time.monotonic()
    counts, finished = sweep.counts, store.finished
    missing = [item for item in range(len(counts)) if item not in finished]
    total, done = sum(counts), sum(counts[item] for item in finished)
    with Watch(sweep.name, sweep.unit, total, done) as watch, closing(engine.results(sweep, missing)) as results:
        for item, columns, took in results:
            store.add(item, columns, took)
            if store.loose >= MERGE_EVERY:
                store.merge()
            done += counts[item]
            watch.advance(counts[item])
            elapsed = time.monotonic() - start
            if seconds is not None and elapsed >= seconds and len(store.finished) < len(counts):
                raise Unfinished(sweep.name, done, total, sweep.unit, elapsed)
    if len(store.finished) < len(counts):
        raise RuntimeError(f"{sweep.name}: the engine gave {len(store.finished)} of {len(counts)} items and ended")
