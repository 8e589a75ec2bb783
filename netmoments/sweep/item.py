"""What a sweep is: numbered pieces of work, each of which can be computed anywhere and in any order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
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


def random_seed(seed: int, experiment: str, item: int) -> int:
    """A seed of 63 bits that depends on these three only: not on the order of the items, nor on who computes them.

    A generator may take fewer of them: torch's on a CPU takes the lowest 32.
    """
    digest = hashlib.sha256(json.dumps([seed, experiment, item]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
