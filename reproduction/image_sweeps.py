"""Sweeps over images: a network with its images, random covariances, blocks of images as items, and rows as cubes.

Every item is a block of images, every row one (image, noise level, logit).
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Generator, Tensor, nn

from netmoments.checks import random_seed
from netmoments.network.weights import digest_of
from netmoments.sweep.item import Columns

SIGMAS = (0.001, 0.01, 0.05, 0.1)
"""The paper's noise levels, for pixels in [0, 1]."""


@dataclass(frozen=True, eq=False)
class StudiedImages:
    """A network and the images it is studied on."""

    network: nn.Module
    images: Tensor
    """(N, C, H, W)."""
    numbers: Tensor
    """Their places in the dataset, (N,), from which an image's random numbers derive."""
    seed: int

    def description(self) -> dict[str, Any]:
        """Everything that affects results, as plain values."""
        return {
            "network": digest_of(*self.network.state_dict().values()),
            "images": len(self.images),
            "pixels": digest_of(self.images, self.numbers),
            "seed": self.seed,
            "sigmas": list(SIGMAS),
        }

    def on(self, device: str) -> StudiedImages:
        network = copy.deepcopy(self.network).to(device).eval()
        return StudiedImages(network, self.images.to(device), self.numbers, self.seed)

    def factor(self, place: int) -> Tensor:
        """The factor F of the random covariance FFᵀ of one image, at noise level 1, on its device and in the images'
        dtype.
        """
        generator = self.generator("covariance", place)
        return random_factor(self.images[0].numel(), generator).to(self.images.dtype)

    def generator(self, purpose: str, place: int) -> torch.Generator:
        """A generator whose random numbers depend only on the seed, the purpose and the image."""
        value = random_seed(self.seed, purpose, int(self.numbers[place]))
        return torch.Generator(self.images.device).manual_seed(value)


def random_covariance(size: int, sigma: float, generator: Generator) -> Tensor:
    """A dense (size, size) covariance in float64 with trace σ²·size, on the generator's device.

    As in Tables 2 and 4: eigenvalues uniform on (0, 1], scaled to the trace; eigenvectors from the QR decomposition of
    a Gaussian matrix.
    """
    factor = random_factor(size, generator)
    return sigma**2 * (factor @ factor.T)


def random_factor(size: int, generator: Generator) -> Tensor:
    """F, (size, size) in float64, with F Fᵀ a random covariance of trace `size`: noise of level σ is N(·, σ²FFᵀ)."""
    device = generator.device
    values = 1 - torch.rand(size, dtype=torch.float64, device=device, generator=generator)
    gaussian = torch.randn(size, size, dtype=torch.float64, device=device, generator=generator)
    return orthogonalized(gaussian) * (values * (size / values.sum())).sqrt()


def orthogonalized(matrix: Tensor) -> Tensor:
    """The Q of the QR decomposition with a positive diagonal of R, by two rounds of Cholesky: much faster on a GPU.

    One round is orthogonal to eps·cond², two to rounding while that is below 1; beyond it, Householder's QR is used.
    """
    once, failed = _cholesky_round(matrix)
    twice, failed_again = _cholesky_round(once)
    if bool(failed + failed_again):
        q, r = torch.linalg.qr(matrix)
        return q * torch.sign(r.diagonal())
    return twice


def _cholesky_round(matrix: Tensor) -> tuple[Tensor, Tensor]:
    root, failed = torch.linalg.cholesky_ex(matrix.mT @ matrix, upper=True)
    return torch.linalg.solve_triangular(root, matrix, upper=True, left=False), failed


@contextmanager
def same_bits() -> Iterator[None]:
    """Use algorithms for convolutions and their derivatives that give the same bits every time on a GPU."""
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    cudnn.deterministic, cudnn.benchmark = True, False
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark = before


@dataclass(frozen=True, eq=False)
class BlocksOfImages(ABC):
    """A sweep whose items are blocks of the studied images."""

    name: str
    studied: StudiedImages
    block: int
    unit: ClassVar[str] = "images"

    @property
    def counts(self) -> Sequence[int]:
        return [len(part) for part in blocks(len(self.studied.images), self.block)]

    def prepare(self, device: str) -> Callable[[int], Columns]:
        studied = self.studied.on(device)
        parts = blocks(len(studied.images), self.block)
        return lambda item: self.rows_of(studied, parts[item])

    @abstractmethod
    def rows_of(self, studied: StudiedImages, places: range) -> Columns:
        """The rows of some images; they and the network are on the device."""


def blocks(count: int, size: int) -> list[range]:
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def rows(numbers: Sequence[int], values: Mapping[str, Tensor]) -> Columns:
    """Turn values (images, noise levels, logits) into rows with the columns image, sigma, logit, and one for each
    value.
    """
    first = next(iter(values.values()))
    images, levels, logits = first.shape
    assert (images, levels) == (len(numbers), len(SIGMAS))
    return {
        "image": np.repeat(np.asarray(numbers, dtype=np.int32), levels * logits),
        "sigma": np.tile(np.repeat(np.asarray(SIGMAS), logits), images),
        "logit": np.tile(np.arange(logits, dtype=np.int16), images * levels),
        **{name: value.flatten().cpu().numpy() for name, value in values.items()},
    }


def cube(columns: Columns, name: str, numbers: Tensor) -> np.ndarray:
    """One column as (images, noise levels, logits) in float64, images in the order of `numbers`; NaN where absent."""
    order = numbers.numpy()
    by_number = np.argsort(order)
    place = by_number[np.searchsorted(order, columns["image"], sorter=by_number)]
    level = np.searchsorted(np.asarray(SIGMAS), columns["sigma"])
    filled = np.full((len(order), len(SIGMAS), int(columns["logit"].max()) + 1), np.nan)
    filled[place, level, columns["logit"]] = columns[name]
    return filled
