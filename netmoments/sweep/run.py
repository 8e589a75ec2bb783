"""Run a sweep to its end, or as far as it gets: what is finished is kept, and the next run goes on from there."""

from __future__ import annotations

import time
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from netmoments.sweep.engine import Engine
from netmoments.sweep.item import Sweep
from netmoments.sweep.store import Store
from netmoments.sweep.watch import Watch

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
