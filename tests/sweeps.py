"""Toy sweeps that need no torch, for processes that start fast; and a program that runs one, until it is killed."""

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

from netmoments.sweep import run as running
from netmoments.sweep import store
from netmoments.sweep.item import Columns
from netmoments.sweep.local import LocalEngine
from netmoments.sweep.run import run_sweep
from netmoments.sweep.store import Store


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
        random = np.random.default_rng([int(self.seed), item])
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


def same(found: Columns, wanted: Columns) -> bool:
    """Bit for bit, names and types included; the type of a text is its width."""
    return list(found) == list(wanted) and all(
        found[name].dtype == wanted[name].dtype and found[name].tobytes() == wanted[name].tobytes() for name in wanted
    )


def expected(sweep: Toy) -> dict[str, np.ndarray]:
    """The rows of a sweep without any of the machinery."""
    plain = Toy(items=sweep.items, seed=sweep.seed)
    items = [plain._values(item) for item in range(sweep.items)]
    numbers = np.repeat(np.arange(sweep.items), sweep.counts)
    return {"item": numbers, **{name: np.concatenate([rows[name] for rows in items]) for name in items[0]}}


def files(folder: Path) -> list[str]:
    """The names of a sweep's files but for its lock and its configuration."""
    return sorted(path.name for path in folder.iterdir() if path.name not in (".lock", "_configuration.json"))


def filled(out: Path, sweep: Toy, items: range) -> Path:
    """A folder with the files of these items, each its own; the path of the folder."""
    with Store.open(out, sweep) as kept:
        for item in items:
            kept.add(item, sweep._values(item), 0.5)
    return out / sweep.name


def alive(process: int) -> bool:
    """Whether it runs; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that comes at once where nothing else is at work, and later where much is."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def kill_at(moment: int) -> None:
    """Kill this process, as the system does, at so many moments from now.

    There is one in the middle of the writing of a file, one before and one after it gets its name, and one before one
    is deleted.
    """
    write, replace, unlink = Path.write_bytes, os.replace, Path.unlink

    def passes() -> None:
        nonlocal moment
        moment -= 1
        if moment == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def write_half_then_all(path: Path, content: bytes) -> None:
        write(path, bytes(content)[: len(content) // 2])
        passes()
        write(path, content)

    def replace_between(source: Path, target: Path) -> None:
        passes()
        replace(source, target)
        passes()

    def unlink_after(path: Path, missing_ok: bool = False) -> None:
        passes()
        unlink(path, missing_ok=missing_ok)

    Path.write_bytes = write_half_then_all  # type: ignore[method-assign,assignment]
    os.replace = replace_between  # type: ignore[assignment]
    Path.unlink = unlink_after  # type: ignore[method-assign]


def run_slowly() -> None:
    """Most of the time of a merge, of which there are many, is between the writing of the part and its end."""
    unlink = Path.unlink

    def slowly(path: Path, missing_ok: bool = False) -> None:
        time.sleep(0.003)
        unlink(path, missing_ok=missing_ok)

    Path.unlink = slowly  # type: ignore[method-assign]


if __name__ == "__main__":
    folder, count, last_moment = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    running.MERGE_EVERY = 7  # type: ignore[misc]
    kill_at(last_moment) if last_moment else run_slowly()
    store._pyarrow()
    print("ready", flush=True)
    run_sweep(Toy(items=count, delay=0.0 if last_moment else 0.004), folder, LocalEngine(["cpu"]))
