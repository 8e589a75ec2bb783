"""The folder of a sweep: finished items on the disk, whatever happens to the process that computes them.

Each item is written whole to a file of its own, `item-000123.parquet`. Now and then these are merged into
`part-0000.parquet` and so on: a part is written whole before the files of its items are deleted, so that each finished
item is in one of them at every moment, and one that is in both counts once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from netmoments.files import require_writable_folder
from netmoments.sweep.configuration import fingerprint, full_configuration, settle
from netmoments.sweep.item import Columns, Sweep
from netmoments.sweep.lock import only_writer
from netmoments.sweep.shards import REMEDY, Rows, read_rows, require_rows, stack, write_rows

PART_BYTES = 8 * 2**20


@dataclass(frozen=True)
class _Entry:
    """Where a finished item lies, and what it took."""

    path: Path
    seconds: float
    digest: str


class Store:
    """`with Store.open(out, sweep) as store:`, and this process alone writes to `<out>/<name of the sweep>`."""

    @classmethod
    @contextmanager
    def open(cls, out: Path, sweep: Sweep, device_type: str = "cpu") -> Iterator[Self]:
        """Checks everything that is there, byte for byte; what cannot be used is an error that names the file."""
        if not re.fullmatch(r"\w[\w.-]*", sweep.name):
            raise ValueError(f"a sweep's name is the name of its folder, such as monte-carlo: {sweep.name!r}")
        folder = out / sweep.name
        require_writable_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with only_writer(folder):
            yield cls(folder, sweep, device_type)

    def __init__(self, folder: Path, sweep: Sweep, device_type: str) -> None:
        """For `open`, which holds the lock."""
        self._folder = folder
        self._name = sweep.name
        self._count = len(sweep.counts)
        self._configuration = full_configuration(sweep, device_type)
        self._fingerprint = fingerprint(self._configuration)
        self.read()

    def read(self) -> None:
        """Take stock of the folder. After an interruption only this says what is there: it may have come between the
        moment a file got its name and the moment this object heard of it."""
        self._schema: dict[str, str] = {}
        self._entries: dict[int, _Entry] = {}
        self._loose: set[int] = set()
        for left_over in self._folder.glob(".*.tmp"):
            left_over.unlink()
        parts, shards = self._numbered("part"), self._numbered("item")
        settle(self._folder, self._configuration, has_results=bool(parts or shards))
        for path in parts.values():
            self._take_part(path)
        for item, path in shards.items():
            self._take_shard(item, path)

    @property
    def finished(self) -> set[int]:
        return set(self._entries)

    @property
    def loose(self) -> int:
        """How many items have a file of their own."""
        return len(self._loose)

    @property
    def seconds(self) -> float:
        """Of work in the finished items, whoever did them and when."""
        return sum(self._entries[item].seconds for item in sorted(self._entries))

    def columns(self) -> dict[str, np.ndarray]:
        """The rows of all finished items, in the order of the items, and the column `item`."""
        files = sorted({entry.path for entry in self._entries.values()})
        items = [rows for path in files for rows in read_rows(path, self._fingerprint)]
        return stack(sorted(items, key=lambda rows: rows.item))

    def add(self, item: int, columns: Columns, seconds: float) -> None:
        """Keep what an item yielded; it is on the disk when this returns."""
        whose = f"item {item} of {self._name}"
        if item not in range(self._count) or item in self._entries:
            raise ValueError(f"{whose} is not one of those still to do, of {self._count}")
        require_rows(columns, whose)
        rows = Rows(item, columns, seconds)
        self._require_schema(rows, whose)
        path = self._folder / f"item-{item:06d}.parquet"
        write_rows(path, self._fingerprint, [rows])
        self._entries[item] = _Entry(path, seconds, rows.digest)
        self._loose.add(item)

    def merge(self) -> None:
        """Items with a file of their own go into parts of about `PART_BYTES` at most, in order."""
        batch: list[Rows] = []
        for item in sorted(self._loose):
            (rows,) = read_rows(self._entries[item].path, self._fingerprint)
            if batch and sum(other.bytes for other in batch) + rows.bytes > PART_BYTES:
                self._write_part(batch)
                batch = []
            batch.append(rows)
        if batch:
            self._write_part(batch)

    def _write_part(self, batch: list[Rows]) -> None:
        number = max(self._numbered("part"), default=-1) + 1
        path = self._folder / f"part-{number:04d}.parquet"
        write_rows(path, self._fingerprint, batch)
        _flush_names(self._folder)
        shards = [self._entries[rows.item].path for rows in batch]
        self._entries.update({rows.item: _Entry(path, rows.seconds, rows.digest) for rows in batch})
        self._loose.difference_update(rows.item for rows in batch)
        for shard in shards:
            shard.unlink()

    def _numbered(self, kind: str) -> dict[int, Path]:
        """The files `<kind>-<number>.parquet`, by number."""
        found = {}
        for path in sorted(self._folder.glob(f"{kind}-*.parquet")):
            match = re.fullmatch(rf"{kind}-(\d+)\.parquet", path.name)
            if match is None:
                raise ValueError(f"{path} is not a name that a sweep gives; move it elsewhere")
            found[int(match[1])] = path
        return found

    def _take_part(self, path: Path) -> None:
        for rows in read_rows(path, self._fingerprint):
            if rows.item in self._entries:
                other = self._entries[rows.item].path
                raise ValueError(f"item {rows.item} is in {other} and in {path}; remove one of them and run again")
            self._take(rows, path)

    def _take_shard(self, item: int, path: Path) -> None:
        read = read_rows(path, self._fingerprint)
        if [rows.item for rows in read] != [item]:
            there = ", ".join(str(rows.item) for rows in read)
            raise ValueError(f"{path} holds item {there}, not what its name says; {REMEDY}")
        part = self._entries.get(item)
        if part is None:
            self._take(read[0], path)
            self._loose.add(item)
        elif part.digest == read[0].digest:
            path.unlink()  # a merge was interrupted between writing the part and deleting this
        else:
            raise ValueError(f"item {item} is in {part.path} and in {path}, with other rows; remove one and run again")

    def _take(self, rows: Rows, path: Path) -> None:
        if rows.item not in range(self._count):
            raise ValueError(f"{path} has an item {rows.item}, of {self._count} items from 0; {REMEDY}")
        self._require_schema(rows, str(path))
        self._entries[rows.item] = _Entry(path, rows.seconds, rows.digest)

    def _require_schema(self, rows: Rows, whose: str) -> None:
        """The first item seen says which columns there are."""
        self._schema = self._schema or rows.schema
        if rows.schema != self._schema:
            raise ValueError(f"{whose} has the columns {rows.schema}, where other items have {self._schema}")


def _flush_names(folder: Path) -> None:
    """That a file's new name is on the disk, before the files it replaces are deleted."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
