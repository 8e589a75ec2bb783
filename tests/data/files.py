"""Small files of every kind that images are read from."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

SIDE = 48
HEADER = "emotion,pixels,Usage"
FACE = " ".join(["7"] * SIDE * SIDE)
TWO = np.zeros((2, 4, 4), np.uint8)


def idx_bytes(array: np.ndarray) -> bytes:
    code = {"u1": 8, "i1": 9, "i2": 11, "i4": 12, "f4": 13, "f8": 14}[array.dtype.str[1:]]
    header = struct.pack(f">HBB{array.ndim}I", 0, code, array.ndim, *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def write_idx_pair(folder: Path, prefix: str, count: int, labels: list[int]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    pixels = np.arange(count * 6, dtype=np.uint8).reshape(count, 2, 3)
    images = folder / f"{prefix}-images-idx3-ubyte"
    images.write_bytes(idx_bytes(pixels))
    (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(idx_bytes(np.array(labels, np.uint8)))
    return images


def save_picture(path: Path, mode: str = "RGB", size: tuple[int, int] = (6, 4), colour: object = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour if colour is not None else 100 if mode in ("L", "P") else 0).save(path)
    return path


def claiming_npz(path: Path, **shapes: tuple[int, ...]) -> Path:
    """An .npz file of uint8 arrays whose headers claim these shapes, and which have 16 bytes each."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, shape in shapes.items():
            header = io.BytesIO()
            np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": shape})
            file.writestr(f"{name}.npy", header.getvalue() + bytes(16))
    return path
