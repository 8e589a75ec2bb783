"""Which part of a dataset is wanted."""

from __future__ import annotations

from collections.abc import Iterable

DEFAULT_SPLIT = "test"


def require_split(source: str, split: str, known: Iterable[str]) -> str:
    """`split` if `source` has it, else a ValueError that lists those it has."""
    known = tuple(known)
    if split not in known:
        raise ValueError(f"{source} has the splits {', '.join(known)}; got {split!r}")
    return split


def require_no_split(source: str, split: str) -> None:
    """A ValueError if a split was asked of a source that has none."""
    if split != DEFAULT_SPLIT:
        raise ValueError(f"{source} is not divided into splits, got split={split!r}; leave split out")
