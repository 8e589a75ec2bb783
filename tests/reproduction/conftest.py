"""Stand-ins for MNIST's test set and for LeNet, where the images and their scores themselves do not matter."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(scope="session")
def few(tmp_path_factory) -> Path:
    """A folder with 30 images of 16×16 pixels that have a black background, three of each digit."""
    folder = tmp_path_factory.mktemp("mnist")
    pixels = np.random.default_rng(5).integers(0, 256, (30, 16, 16), dtype=np.uint8)
    pixels[:, :4], pixels[:, 12:], pixels[:, :, :4], pixels[:, :, 12:] = 0, 0, 0, 0
    header = struct.pack(">4B3I", 0, 0, 8, 3, *pixels.shape)
    (folder / "t10k-images-idx3-ubyte").write_bytes(header + pixels.tobytes())
    labels = struct.pack(">4BI", 0, 0, 8, 1, 30) + bytes(range(10)) * 3
    (folder / "t10k-labels-idx1-ubyte").write_bytes(labels)
    return folder


@pytest.fixture
def little_lenet(monkeypatch) -> None:
    """The experiments on LeNet have a small network, with the weights of the settings where there are any."""
    from netmoments.network.weights import read_tensors
    from reproduction import lenet_on_mnist
    from tests.reproduction.small import small_lenet

    def chosen(settings):
        network = small_lenet()
        if settings.weights is not None:
            network.load_state_dict(read_tensors(settings.weights)[0])
        return network

    monkeypatch.setattr(lenet_on_mnist, "chosen_network", chosen)
