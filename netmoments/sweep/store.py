"""The folder of a sweep: finished items on disk, which survive whatever happens to the process that computes them.

Each item is first written whole to a file of its own, a shard, `item-000123.parquet`. Now and then the shards are
merged into parts, `part-0000.parquet` and so on. A part is written whole before its shards are deleted, so that a
finished item is in one of them at every moment, and an item that is in both counts once.

A file holds the rows of one item or of several, with a column `item`. Its metadata is a note (the fingerprint of the
configuration, and each item's number of rows, seconds of work and SHA-256 digest) and the digest of that note, which
show that a file is whole and belongs where it lies. A folder belongs to one configuration, which is kept in a file
beside the others, and has one writer at a time.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import numpy as np

from netmoments import __version__
from netmoments.files import require_writable_folder, whole_file, write_text_whole
from netmoments.sweep.item import Columns, Sweep

PART_BYTES = 8 * 2**20
"""Bytes of the rows in a part before compression; only a single item may have more."""


class Store:
    """The finished items of a sweep, in the folder `<out>/<name of the sweep>`.

    Inside `with Store.open(out, sweep) as store:` this process alone writes to the folder.
    """

    @classmethod
    @contextmanager
    def open(cls, out: Path, sweep: Sweep, device_type: str = "cpu") -> Iterator[Self]:
        """Open the folder, and check every byte that is there; an error names a file that cannot be used."""
        if not re.fullmatch(r"\w[\w.-]*", sweep.name):
            raise ValueError(f"a sweep's name is the name of its folder, such as monte-carlo: {sweep.name!r}")
        folder = out / sweep.name
        require_writable_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with only_writer(folder):
            yield cls(folder, sweep, device_type)

    def __init__(self, folder: Path, sweep: Sweep, device_type: str) -> None:
        """Read the folder; to be called by `open` only, which holds the lock."""
        self._folder = folder
        self._name = sweep.name
        self._count = len(sweep.counts)
        self._configuration = full_configuration(sweep, device_type)
        self._fingerprint = fingerprint(self._configuration)
        self.read()

    def read(self) -> None:
        """Take stock of the folder.

        After an interruption only this knows what is there: it may have come after a file got its name, and before this
        object noted it.
        """
        self._schema: dict[str, str] = {}
        self._entries: dict[int, _Entry] = {}
        self._unmerged: set[int] = set()
        for left_over in self._folder.glob(".*.tmp"):
            left_over.unlink()
        parts, shards = self._numbered("part"), self._numbered("item")
        _settle(self._folder, self._configuration, has_results=bool(parts or shards))
        for path in parts.values():
            self._read_part(path)
        for item, path in shards.items():
            self._read_shard(item, path)

    @property
    def finished(self) -> set[int]:
        """The numbers of the finished items."""
        return set(self._entries)

    @property
    def unmerged(self) -> int:
        """How many items have a file of their own."""
        return len(self._unmerged)

    @property
    def seconds(self) -> float:
        """Seconds of work in the finished items, in all runs together."""
        return sum(self._entries[item].seconds for item in sorted(self._entries))

    def columns(self) -> dict[str, np.ndarray]:
        """The rows of all finished items, in the order of the items, with the column `item`."""
        files = sorted({entry.path for entry in self._entries.values()})
        items = [rows for path in files for rows in read_rows(path, self._fingerprint)]
        return stack(sorted(items, key=lambda rows: rows.item))

    def add(self, item: int, columns: Columns, seconds: float) -> None:
        """Keep the rows of an item; they are on disk when this returns."""
        whose = f"item {item} of {self._name}"
        if item not in range(self._count) or item in self._entries:
            raise ValueError(f"{whose} is not one of those still to do, of {self._count}")
        require_rows(columns, whose)
        rows = Rows(item, columns, seconds)
        self._require_schema(rows, whose)
        path = self._folder / f"item-{item:06d}.parquet"
        write_rows(path, self._fingerprint, [rows])
        self._entries[item] = _Entry(path, seconds, rows.digest)
        self._unmerged.add(item)

    def merge(self) -> None:
        """Move items from files of their own into parts of at most about `PART_BYTES`, in order."""
        batch: list[Rows] = []
        for item in sorted(self._unmerged):
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
        self._unmerged.difference_update(rows.item for rows in batch)
        for shard in shards:
            shard.unlink()

    def _numbered(self, kind: str) -> dict[int, Path]:
        """The files `<kind>-<number>.parquet`, by number."""
        by_number = {}
        for path in sorted(self._folder.glob(f"{kind}-*.parquet")):
            match = re.fullmatch(rf"{kind}-(\d+)\.parquet", path.name)
            if match is None:
                raise ValueError(f"{path} is not a name that a sweep gives; move it elsewhere")
            by_number[int(match[1])] = path
        return by_number

    def _read_part(self, path: Path) -> None:
        for rows in read_rows(path, self._fingerprint):
            if rows.item in self._entries:
                other = self._entries[rows.item].path
                raise ValueError(f"item {rows.item} is in {other} and in {path}; remove one of them and run again")
            self._note(rows, path)

    def _read_shard(self, item: int, path: Path) -> None:
        items = read_rows(path, self._fingerprint)
        if [rows.item for rows in items] != [item]:
            there = ", ".join(str(rows.item) for rows in items)
            raise ValueError(f"{path} holds item {there}, not what its name says; {REMEDY}")
        in_part = self._entries.get(item)
        if in_part is None:
            self._note(items[0], path)
            self._unmerged.add(item)
        elif in_part.digest == items[0].digest:
            path.unlink()  # a merge was interrupted between writing the part and deleting this shard
        else:
            raise ValueError(
                f"item {item} is in {in_part.path} and in {path}, with other rows; remove one and run again"
            )

    def _note(self, rows: Rows, path: Path) -> None:
        """Note that an item is finished, and in which file."""
        if rows.item not in range(self._count):
            raise ValueError(f"{path} has an item {rows.item}, of {self._count} items from 0; {REMEDY}")
        self._require_schema(rows, str(path))
        self._entries[rows.item] = _Entry(path, rows.seconds, rows.digest)

    def _require_schema(self, rows: Rows, whose: str) -> None:
        """Require the columns of the first item that was seen."""
        self._schema = self._schema or rows.schema
        if rows.schema != self._schema:
            raise ValueError(f"{whose} has the columns {rows.schema}, where other items have {self._schema}")


@dataclass(frozen=True)
class _Entry:
    """The file of a finished item, its seconds of work, and the digest of its rows."""

    path: Path
    seconds: float
    digest: str


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; a second writer gets a BlockingIOError.

    The system releases the lock when the process ends, in whatever way. It is on a file that is open for writing, since
    NFS locks no folders, which is what `netmoments.files.writing_to` does where it can.
    """
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            text = f"another process is writing to {folder}; wait until it is done, or give another --out"
            raise BlockingIOError(error.errno, text) from error
        yield


def _flush_names(folder: Path) -> None:
    """Wait until the names of new files are on disk, so that the files they replace can be deleted."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


ITEM = "item"
"""The column that says to which item a row belongs."""
NOTE, NOTE_DIGEST = b"netmoments", b"netmoments.sha256"
"""Keys in a file's metadata: of the note on its items, and of the SHA-256 digest of that note."""
REMEDY = "remove it and run again, only its items are computed again"
"""What to do with a file that cannot be used."""


@dataclass(frozen=True)
class Rows:
    """The rows of one item, and the seconds of work that they took."""

    item: int
    columns: Columns
    seconds: float

    @property
    def bytes(self) -> int:
        return sum(values.nbytes for values in self.columns.values())

    @property
    def schema(self) -> dict[str, str]:
        return {name: _kind(values) for name, values in self.columns.items()}

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the names, types and values; the order of the columns does not matter."""
        sha = hashlib.sha256()
        for name, values in sorted(self.columns.items()):
            is_text = values.dtype.kind == "U"
            content = json.dumps(values.tolist()).encode() if is_text else np.ascontiguousarray(values).tobytes()
            sha.update(json.dumps([name, _kind(values), len(content)]).encode() + content)
        return sha.hexdigest()


def _kind(values: np.ndarray) -> str:
    return "str" if values.dtype.kind == "U" else values.dtype.name


def require_rows(columns: Columns, whose: str) -> None:
    """Require rows that can be stored: named 1-D arrays of one length, of types that come back as they were."""
    if not columns:
        raise ValueError(f"{whose} yielded no columns; give at least one")
    for name, values in columns.items():
        if name == ITEM:
            raise ValueError(f"{whose} yielded a column {ITEM!r}, which is added by itself; give it another name")
        if not isinstance(values, np.ndarray) or values.ndim != 1:
            came = f"shape {values.shape}" if isinstance(values, np.ndarray) else type(values).__name__
            raise ValueError(f"{whose}: column {name!r} must be a 1-D numpy array, not {came}")
        if not (values.dtype.kind in "iubU" or values.dtype in (np.float32, np.float64)) or not values.dtype.isnative:
            raise ValueError(
                f"{whose}: column {name!r} has dtype {values.dtype}; "
                "wanted integers, float32, float64, bool or str, in this machine's byte order"
            )
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1 or 0 in lengths.values():
        raise ValueError(f"{whose}: columns must have one length, at least 1: {lengths}")


def write_rows(path: Path, fingerprint: str, items: Sequence[Rows]) -> None:
    """Write a file of these items, whole or not at all."""
    pyarrow = _pyarrow()
    note = json.dumps(
        {
            "fingerprint": fingerprint,
            "items": [[rows.item, len(rows), rows.seconds, rows.digest] for rows in items],
        }
    ).encode()
    table = pyarrow.table({name: pyarrow.array(values) for name, values in stack(items).items()})
    table = table.replace_schema_metadata({NOTE: note, NOTE_DIGEST: hashlib.sha256(note).hexdigest()})
    content = io.BytesIO()
    pyarrow.parquet.write_table(table, content, compression="zstd")
    with whole_file(path) as temporary:
        temporary.write_bytes(content.getbuffer())


def read_rows(path: Path, fingerprint: str) -> list[Rows]:
    """The items of a file, after every byte of their rows was checked."""
    content = path.read_bytes()
    pyarrow = _pyarrow()
    try:
        table = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(content)).read(use_threads=False)
        note = _checked_note(table.schema.metadata or {})
        items = _split(table, note["items"])
    except Exception as error:  # Arrow raises many kinds on damaged bytes
        raise ValueError(f"{path} is damaged ({error}); {REMEDY}") from error
    if note["fingerprint"] != fingerprint:
        raise ValueError(f"{path} is of another configuration than its folder; {REMEDY}")
    return items


def _checked_note(metadata: Mapping[bytes, bytes]) -> dict[str, Any]:
    note = metadata.get(NOTE, b"")
    if hashlib.sha256(note).hexdigest().encode() != metadata.get(NOTE_DIGEST):
        raise ValueError("its metadata is not what was written")
    return json.loads(note)


def _split(table: Any, listed: Sequence[tuple[int, int, float, str]]) -> list[Rows]:
    """The items in a table, given the number, the count of rows, the seconds and the digest of each."""
    columns = {name: _as_numpy(table.column(name)) for name in table.column_names}
    numbers = columns.pop(ITEM)
    if not np.array_equal(numbers, np.repeat([item for item, *_ in listed], [count for _, count, *_ in listed])):
        raise ValueError("its rows are not those of its items")
    items, start = [], 0
    for item, count, seconds, digest in listed:
        rows = Rows(item, {name: values[start : start + count] for name, values in columns.items()}, seconds)
        if rows.digest != digest:
            raise ValueError(f"the rows of item {item} are not what was written")
        items.append(rows)
        start += count
    return items


def _as_numpy(column: Any) -> np.ndarray:
    """A column as an array: texts as wide as the longest of them, everything else bit for bit as it was."""
    if str(column.type) == "string":
        return np.array(column.to_pylist(), dtype=np.str_)
    return column.to_numpy()


def stack(items: Sequence[Rows]) -> dict[str, np.ndarray]:
    """The rows of several items in one table, with the column `item`."""
    numbers = np.repeat(np.array([rows.item for rows in items], np.int64), [len(rows) for rows in items])
    names = list(items[0].columns) if items else []
    return {ITEM: numbers, **{name: np.concatenate([rows.columns[name] for rows in items]) for name in names}}


def _pyarrow() -> ModuleType:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError('sweeps keep their results in Parquet files: pip install "netmoments[sweeps]"') from error
    return pyarrow


FILE = "_configuration.json"
"""The file of a folder's configuration; readers of Parquet folders skip names that begin with an underscore."""
ADDED = ("device", "netmoments", "work items")
"""Keys that are added to every sweep's own configuration."""


def full_configuration(sweep: Sweep, device_type: str) -> dict[str, Any]:
    """Everything that the results in a folder depend on, in the form in which it comes back from JSON.

    This is the sweep's own configuration, the type of device, the version of netmoments, and how the work is divided
    into items, since the number of an item has a meaning for one division only.
    """
    for key in ADDED:
        if key in sweep.configuration:
            raise ValueError(
                f"the configuration of {sweep.name} has a key {key!r}, which is taken; give it another name"
            )
    runs = [(count, len(list(run))) for count, run in groupby(sweep.counts)]
    division = ", ".join(f"{times} of {count} {sweep.unit}" for count, times in runs)
    try:
        added = dict(zip(ADDED, (device_type, __version__, division), strict=True))
        return json.loads(_canonical({**sweep.configuration, **added}))
    except (TypeError, ValueError) as error:
        raise TypeError(f"the configuration of {sweep.name} must be plain JSON: {error}") from error


def fingerprint(configuration: Any) -> str:
    """SHA-256 of a configuration; the order of its keys does not matter."""
    return hashlib.sha256(_canonical(configuration).encode()).hexdigest()


def _canonical(configuration: Any) -> str:
    return json.dumps(configuration, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _settle(folder: Path, configuration: Mapping[str, Any], has_results: bool) -> None:
    """Write the configuration into a folder that has none, or require that the one there is the same."""
    path = folder / FILE
    if path.exists():
        _compare(path, configuration)
    elif has_results:
        raise ValueError(f"{folder} has results but no {FILE} that says of what; give another --out, or remove it")
    else:
        write_text_whole(path, json.dumps(configuration, indent=1, sort_keys=True, allow_nan=False) + "\n")


def require_same(out: Path, sweeps: Iterable[Sweep], device_type: str) -> None:
    """Require that existing folders of these sweeps have their configurations; one error names all that do not."""
    problems = []
    for sweep in sweeps:
        path = out / sweep.name / FILE
        if path.exists():
            try:
                _compare(path, full_configuration(sweep, device_type))
            except ValueError as error:
                problems.append(str(error))
    if problems:
        raise ValueError("\n".join(problems))


def _compare(path: Path, wanted: Mapping[str, Any]) -> None:
    try:
        there = json.loads(path.read_bytes())
        same = _canonical(there) == _canonical(wanted)  # 1 and 1.0 are equal, but not the same
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); give another --out, or remove its folder") from error
    if not isinstance(there, dict):
        raise ValueError(f"{path} is damaged (a JSON object was wanted); give another --out, or remove its folder")
    if not same:
        pairs = [(key, _shown(wanted, key), _shown(there, key)) for key in sorted({*there, *wanted})]
        lines = [f"  {key}: wanted {want}, there {found}" for key, want, found in pairs if want != found]
        said = f"{path} is of another configuration; repeat its options, give another --out, or remove the folder:"
        raise ValueError("\n".join([said, *lines]))


def _shown(configuration: Mapping[str, Any], key: str) -> str:
    if key not in configuration:
        return "nothing"
    text = json.dumps(configuration[key], sort_keys=True)
    return text if len(text) <= 200 else f"{text[:180]}… ({fingerprint(configuration[key])[:8]})"
