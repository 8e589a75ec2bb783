"""The files of a sweep: Parquet, with what is needed to see that a file is whole and belongs where it lies.

A file holds the rows of one item or of several, with a column `item`. Its metadata is a note, the fingerprint of the
configuration and each item's number of rows, seconds of work and SHA-256 digest, and the digest of that note.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from netmoments.files import whole_file
from netmoments.sweep.item import Columns

ITEM = "item"
NOTE, NOTE_DIGEST = b"netmoments", b"netmoments.sha256"
REMEDY = "remove it and run again, only its items are computed again"


@dataclass(frozen=True)
class Rows:
    """What one item yielded, and the seconds it took."""

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
            text = values.dtype.kind == "U"
            content = json.dumps(values.tolist()).encode() if text else np.ascontiguousarray(values).tobytes()
            sha.update(json.dumps([name, _kind(values), len(content)]).encode() + content)
        return sha.hexdigest()


def _kind(values: np.ndarray) -> str:
    return "str" if values.dtype.kind == "U" else values.dtype.name


def require_rows(columns: Columns, whose: str) -> None:
    """That these are rows as they are stored: named 1-D arrays of one length, of types that come back as they were."""
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
    """A file of these items, whole or not at all."""
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
    """The items of a file, every byte of their rows checked."""
    content = path.read_bytes()
    pyarrow = _pyarrow()
    try:
        table = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(content)).read(use_threads=False)
        note = _note(table.schema.metadata or {})
        items = _split(table, note["items"])
    except Exception as error:  # Arrow raises many kinds on damaged bytes
        raise ValueError(f"{path} is damaged ({error}); {REMEDY}") from error
    if note["fingerprint"] != fingerprint:
        raise ValueError(f"{path} is of another configuration than its folder; {REMEDY}")
    return items


def _note(metadata: Mapping[bytes, bytes]) -> dict[str, Any]:
    note = metadata.get(NOTE, b"")
    if hashlib.sha256(note).hexdigest().encode() != metadata.get(NOTE_DIGEST):
        raise ValueError("its metadata is not what was written")
    return json.loads(note)


def _split(table: Any, listed: Sequence[tuple[int, int, float, str]]) -> list[Rows]:
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
    """Texts come back as wide as the longest of them; everything else as it was, bit for bit."""
    if str(column.type) == "string":
        return np.array(column.to_pylist(), dtype=np.str_)
    return column.to_numpy()


def stack(items: Sequence[Rows]) -> dict[str, np.ndarray]:
    """The rows of several items below each other, with the column `item`."""
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
