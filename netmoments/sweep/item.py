"""What a sweep is: numbered items of work that can be computed anywhere and in any order, and engines that do so."""

from __future__ import annotations

import pickle
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Columns = Mapping[str, np.ndarray]
"""The rows an item yields: 1-D arrays of one length, of integers, float32, float64, bool or str."""


class Sweep(Protocol):
    """Work over a dataset, divided into items 0, 1, …; it can be pickled, so that any process can compute any item."""

    @property
    def name(self) -> str:
        """The name of its folder, such as `monte-carlo`."""

    @property
    def unit(self) -> str:
        """What items consist of, such as `images`."""

    @property
    def configuration(self) -> Mapping[str, Any]:
        """Everything that changes the results, as plain JSON."""

    @property
    def counts(self) -> Sequence[int]:
        """How many units each item holds."""

    def prepare(self, device: str) -> Callable[[int], Columns]:
        """The function that computes an item from its number; it is made once in each process, to load data there."""


Finished = tuple[int, Columns, float]
"""The number of an item, its rows, and the seconds of work."""


class Engine(Protocol):
    """Where the items of a sweep are computed."""

    @property
    def device_type(self) -> str:
        """cpu or cuda, whose results are not mixed."""

    def results(self, sweep: Sweep, items: Sequence[int]) -> Generator[Finished, None, None]:
        """Compute items, and yield them as they finish, in any order. Closing it early stops the work and processes."""


@dataclass(frozen=True)
class Failure:
    """An exception as a value that can be sent to another process, with its traceback as a note."""

    pickled: bytes

    @classmethod
    def of(cls, error: Exception) -> Failure:
        note = "in a worker process:\n" + "".join(traceback.format_exception(error))
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # whatever an exception's own pickling raises
            error = RuntimeError(f"{type(error).__name__}: {error}")
        error.add_note(note)
        return cls(pickle.dumps(error))


def compute_item(sweep: Sweep, compute: Callable[[int], Columns], item: int) -> Finished:
    """Compute one item and time it; an exception names the item."""
    start = time.perf_counter()
    try:
        columns = compute(item)
    except Exception as error:
        _add_context(error, f"item {item} of {sweep.name}")
        raise
    return item, columns, time.perf_counter() - start


def attempt(work: Callable[[], Finished]) -> Finished | Failure:
    """The result of `work()`, or its exception as a value, for workers that must send an answer."""
    try:
        return work()
    except Exception as error:
        return Failure.of(error)


def unwrap(answer: Finished | Failure) -> Finished:
    """The result in a worker's answer; the worker's exception is raised here."""
    if isinstance(answer, Failure):
        raise pickle.loads(answer.pickled)
    return answer


def _add_context(error: Exception, work: str) -> None:
    """Put the work before the exception's message if that is its only argument, else in a note."""
    if len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (f"{work}: {error.args[0]}",)
    else:
        error.add_note(f"in {work}")
