"""What computes items: the interface, and how an item is timed and its failure carried from process to process."""

from __future__ import annotations

import pickle
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

from netmoments.sweep.item import Columns, Sweep

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
