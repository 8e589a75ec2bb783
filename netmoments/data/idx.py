"""The IDX format of the original MNIST files: a typed array with big-endian numbers, plain or gzipped."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

GZIP_MAGIC = b"\x1f\x8b"
IDX_MAGIC = b"\x00\x00"
DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
MOST_DIMENSIONS = 4


def looks_like_idx(path: Path) -> bool:
    """Whether a file is called IDX, or begins like an IDX or a gzip file."""
    if "idx" in path.name.lower():
        return True
    with path.open("rb") as file:
        return file.read(2) in (IDX_MAGIC, GZIP_MAGIC)


def read_idx(path: str | Path) -> np.ndarray[Any, Any]:
    """The array in an IDX file of 1 to 4 dimensions, in the machine's byte order; gzip is told by its first bytes.

    The header is two zero bytes, the type, the number of dimensions, and each dimension as a big-endian uint32.
    A file that is no IDX file, is cut short or has bytes too many is a ValueError.
    """
    path = Path(path)
    content = _decompressed(path)
    if len(content) < 4 or content[:2] != IDX_MAGIC or content[2] not in DTYPES:
        raise ValueError(
            f"{path}: not an IDX file: it must begin with 00 00 and a type ({', '.join(f'{t:02x}' for t in DTYPES)}), "
            f"got {content[:4].hex(' ') or 'an empty file'}"
        )
    dimensions = content[3]
    if not 1 <= dimensions <= MOST_DIMENSIONS:
        raise ValueError(
            f"{path}: an IDX array must have 1 to {MOST_DIMENSIONS} dimensions, the header says {dimensions}"
        )
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise ValueError(
            f"{path}: the file ends inside its header, after {len(content)} of {start} bytes; get it again"
        )
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    dtype = np.dtype(DTYPES[content[2]])
    wanted = start + math.prod(shape) * dtype.itemsize
    if len(content) != wanted:
        problem = "cut short" if len(content) < wanted else "too long"
        raise ValueError(
            f"{path}: the file is {problem}: shape {shape} needs {wanted} bytes, got {len(content)}; get it again"
        )
    return np.frombuffer(content, dtype, offset=start).reshape(shape).astype(dtype.newbyteorder("="))


def _decompressed(path: Path) -> bytes:
    content = path.read_bytes()
    if not content.startswith(GZIP_MAGIC):
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: the gzip file is cut short or damaged ({error}); get it again") from error
