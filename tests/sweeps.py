"""Toy sweeps that need no torch, for processes that start fast; and a program that runs one, to be killed."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from netmoments.sampling.evaluation import random_seed
from netmoments.sweep import run as running
from netmoments.sweep import store as shards
from netmoments.sweep.item import Columns
from netmoments.sweep.local import LocalEngine
from netmoments.sweep.run import run_sweep


@dataclass(frozen=True)
class Toy:
    """Item i yields i % 3 + 1 rows of every type there is; who computed it is appended to a log, if there is one."""

    items: int = 12
    seed: int = 1
    delay: float = 0.0
    log: Path | None = None
    name: str = "toy"
    unit: str = "rows"

    @property
    def configuration(self) -> Mapping[str, Any]:
        return {"seed": self.seed, "levels": (0.1, 1), "items": self.items}

    @property
    def counts(self) -> list[int]:
        return [item % 3 + 1 for item in range(self.items)]

    def prepare(self, device: str) -> Callable[[int], Columns]:
        assert device == "cpu"
        return self._rows

    def _rows(self, item: int) -> Columns:
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{item} {os.getpid()}\n")
        time.sleep(self.delay)
        return self._values(item)

    def _values(self, item: int) -> Columns:
        random = np.random.Generator(np.random.PCG64(random_seed(self.seed, self.name, item)))
        count = self.counts[item]
        return {
            "value": random.standard_normal(count),
            "small": random.standard_normal(count).astype(np.float32),
            "label": random.integers(0, 10, count, dtype=np.int32),
            "right": random.random(count) < 0.5,
            "word": np.array([f"é{item}" * (item % 4)] * count),
        }

    def computed(self) -> list[int]:
        """The items that the log says were begun."""
        assert self.log is not None
        return [int(line.split()[0]) for line in self.log.read_text().splitlines()]

    def processes(self, item: int | None = None) -> set[int]:
        """Those that computed anything, or that began this item."""
        assert self.log is not None
        lines = [line.split() for line in self.log.read_text().splitlines()]
        return {int(process) for number, process in lines if item is None or int(number) == item}


NO_SUCH_PIXEL = ValueError("no such pixel")


@dataclass(frozen=True)
class Failing(Toy):
    """Raises at item 5."""

    error: BaseException = NO_SUCH_PIXEL

    def _values(self, item: int) -> Columns:
        if item == 5:
            raise copy(self.error)  # each run has its own, with its own notes
        return super()._values(item)


class Stubborn(Exception):
    """An exception that cannot be sent to another process."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


@dataclass(frozen=True)
class FailingStubbornly(Toy):
    """Raises at item 5 what cannot be sent."""

    def _values(self, item: int) -> Columns:
        if item == 5:
            raise Stubborn(1, 2)
        return super()._values(item)


@dataclass(frozen=True)
class Dying(Toy):
    """Its process gets a signal in item 5, as many times as said."""

    times: int = 1
    by: signal.Signals = signal.SIGKILL

    def _values(self, item: int) -> Columns:
        if item == 5 and self.computed().count(5) <= self.times:
            os.kill(os.getpid(), self.by)
        return super()._values(item)


def run_to_be_killed(out: Path, items: int) -> None:
    """Small items and many merges, each of which spends most of its time between writing the part and its end."""
    running.MERGE_EVERY = 7  # type: ignore[misc]
    unlink = Path.unlink

    def slowly(path: Path, missing_ok: bool = False) -> None:
        time.sleep(0.003)
        unlink(path, missing_ok=missing_ok)

    Path.unlink = slowly  # type: ignore[method-assign]
    shards._pyarrow()
    print("ready", flush=True)
    run_sweep(Toy(items=items, delay=0.004), out, LocalEngine(["cpu"]))


if __name__ == "__main__":
    run_to_be_killed(Path(sys.argv[1]), int(sys.argv[2]))
