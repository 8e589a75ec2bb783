"""What a sweep is: numbered pieces of work, each of which can be computed anywhere and in any order."""

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
    """Work over a dataset in items 0, 1, …; it can be pickled, so that any process can do any item."""

    @property
    def name(self) -> str:
        """The name of its folder, such as `monte-carlo`."""

    @property
    def unit(self) -> str:
        """What is counted, such as `images`."""

    @property
    def configuration(self) -> Mapping[str, Any]:
        """Everything that changes the results, as plain JSON."""

    @property
    def counts(self) -> Sequence[int]:
        """How many units each item holds."""

    def prepare(self, device: str) -> Callable[[int], Columns]:
        """What computes an item from its number; made once in each process, with whatever is heavy in it."""


Finished = tuple[int, Columns, float]
"""An item, its rows, and the seconds of work."""


class Engine(Protocol):
    """Where the items of a sweep are computed."""

    @property
    def device_type(self) -> str:
        """cpu or cuda: results of one are not mixed with results of the other."""

    def results(self, sweep: Sweep, items: Sequence[int]) -> Generator[Finished, None, None]:
        """The items in any order, as they finish. Closing it early stops the work and its processes."""


@dataclass(frozen=True)
class Failure:
    """An exception on its way to another process, with its traceback as a note."""

    pickled: bytes

    @classmethod
    def of(cls, error: Exception) -> Failure:
        where = "in a worker process:\n" + "".join(traceback.format_exception(error))
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # whatever an exception's own pickling raises
            error = RuntimeError(f"{type(error).__name__}: {error}")
        error.add_note(where)
        return cls(pickle.dumps(error))


def compute_item(sweep: Sweep, compute: Callable[[int], Columns], item: int) -> Finished:
    """One item, timed; an exception says which item it was."""
    start = time.perf_counter()
    try:
        columns = compute(item)
    except Exception as error:
        _name(error, f"item {item} of {sweep.name}")
        raise
    return item, columns, time.perf_counter() - start


def attempt(work: Callable[[], Finished]) -> Finished | Failure:
    """For workers: an exception becomes a value that can be sent."""
    try:
        return work()
    except Exception as error:
        return Failure.of(error)


def unwrap(answer: Finished | Failure) -> Finished:
    """For whoever gets a worker's answer: the value becomes the exception again."""
    if isinstance(answer, Failure):
        raise pickle.loads(answer.pickled)
    return answer


def _name(error: Exception, work: str) -> None:
    """Put the work before the message where the message is all there is; else in a note."""
    if len(error.args) == 1 and isinstance(error.args[0], str):
        error.args = (f"{work}: {error.args[0]}",)
    else:
        error.add_note(f"in {work}")
