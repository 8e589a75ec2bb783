"""The images and the network that the experiments on MNIST share."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from netmoments import data
from netmoments.data.images import LabelledImages, evenly_spread
from netmoments.network import zoo

if TYPE_CHECKING:
    from reproduction.settings import Settings


def chosen_images(settings: Settings) -> tuple[Tensor, Tensor]:
    """Indices (N,) into MNIST's test set, and those images (N, 1, 28, 28): `settings.images`, evenly spread."""
    indices, chosen = spread_over_test(settings.images, settings.data_dir)
    return indices, chosen.images


def spread_over_test(count: int, data_dir: Path | None) -> tuple[Tensor, LabelledImages]:
    """`count` of MNIST's test images, evenly spread over the file, and where they are in it."""
    everything = data.load("mnist", data_dir=data_dir)
    if not 2 <= count <= len(everything):
        raise ValueError(f"images: from 2 to {len(everything)}, which is what MNIST's test set has here, got {count}")
    indices = evenly_spread(len(everything), count)
    return indices, everything.take(indices)


def chosen_network(settings: Settings) -> nn.Module:
    """The paper's LeNet in eval mode and float32: with the weights that are shipped, or those of the settings."""
    return zoo.pretrained("lenet", settings.weights).float()


def digest_of(*tensors: Tensor) -> str:
    """16 hexadecimal digits of the SHA-256 of tensors in order, with their shapes and dtypes."""
    digest = hashlib.sha256()
    for tensor in tensors:
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
        digest.update(plain.numpy().tobytes())
    return digest.hexdigest()[:16]
