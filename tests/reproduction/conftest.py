"""A stand-in for MNIST's test set, where the images themselves do not matter."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(scope="session")
def few(tmp_path_factory) -> Path:
    """A folder with 30 images that have a black background, three of each digit."""
    folder = tmp_path_factory.mktemp("mnist")
    pixels = np.random.default_rng(5).integers(0, 256, (30, 28, 28), dtype=np.uint8)
    pixels[:, :8], pixels[:, 20:], pixels[:, :, :8], pixels[:, :, 20:] = 0, 0, 0, 0
    header = struct.pack(">4B3I", 0, 0, 8, 3, *pixels.shape)
    (folder / "t10k-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
    labels = struct.pack(">4BI", 0, 0, 8, 1, 30) + bytes(range(10)) * 3
    (folder / "t10k-labels-idx1-ubyte").write_bytes(labels)
    return folder
