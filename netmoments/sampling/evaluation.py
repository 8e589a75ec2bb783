"""A function evaluated on samples: what it is given, what it must return, how much of it at a time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from netmoments.affine_relu_affine import AffineReluAffine
from netmoments.checks import describe, require_broadcastable, require_count
from netmoments.gaussian import Gaussian
from netmoments.memory import piece_bytes

SMALLEST_BATCH = 16


@dataclass(frozen=True, eq=False)
class Evaluation:
    """A function and the samples it is evaluated on; iterated, batches of samples with the function's values.

    Samples are (N, *noise's batch, *event), values (N, *entries, *output). Same seed, batch and device: same samples.
    """

    caller: str
    function: Callable[[Tensor], Tensor]
    noise: Gaussian
    entries: torch.Size
    """The batch of the noise, and of the function where it has one of its own."""
    samples: int
    seed: int
    batch: int

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator(self.noise.device).manual_seed(self.seed)
        for start in range(0, self.samples, self.batch):
            x = self.noise.sample(min(self.batch, self.samples - start), generator=generator)
            yield x, self._values(x)

    def flat(self, values: Tensor) -> Tensor:
        """The same values as (N, *entries, D)."""
        return values.reshape(*values.shape[: 1 + len(self.entries)], -1)

    def output_shape(self, values: Tensor) -> torch.Size:
        return values.shape[1 + len(self.entries) :]

    def _values(self, x: Tensor) -> Tensor:
        """The network of this library takes samples as they are, one network for each entry of its own batch; anything
        else gets one flat batch of inputs.
        """
        if isinstance(self.function, AffineReluAffine):
            return self._finite(
                self.function(for_entries(x, self.noise, self.entries)).expand(len(x), *self.entries, -1)
            )
        inputs = x.reshape(-1, *self.noise.event_shape)
        values = self.function(inputs)
        if not isinstance(values, Tensor) or values.dim() < 1 or values.shape[0] != inputs.shape[0]:
            raise ValueError(
                f"{self.caller}: function must return a tensor with one row for each of the {inputs.shape[0]} inputs "
                f"of shape {tuple(self.noise.event_shape)}, got {describe(values)}"
            )
        if not values.is_floating_point():
            raise TypeError(f"{self.caller}: function must return floating-point values, got {describe(values)}")
        return self._finite(values.reshape(len(x), *self.entries, *values.shape[1:]))

    def _finite(self, values: Tensor) -> Tensor:
        if not bool(torch.isfinite(values).all()):
            raise ValueError(f"{self.caller}: function returned NaN or infinite values")
        return values


def evaluation(
    caller: str, function: Any, noise: Any, samples: int, seed: int, batch: int | None, *, least: int
) -> Evaluation:
    """What is to be evaluated, checked; `least` samples are needed."""
    require_count(caller, "samples", samples, least=least)
    require_count(caller, "seed", seed, least=0)
    if not isinstance(noise, Gaussian):
        raise TypeError(f"{caller}: noise must be a netmoments.Gaussian, got {describe(noise)}")
    if not callable(function):
        raise TypeError(f"{caller}: function must be callable, got {describe(function)}")
    entries = noise.batch_shape
    if isinstance(function, AffineReluAffine):
        entries = require_broadcastable(caller, network=function.batch_shape, noise=noise.batch_shape)
    if batch is None:
        batch = _default_batch(noise, entries, samples)
    require_count(caller, "batch", batch, least=1)
    return Evaluation(caller, function, noise, entries, samples, seed, batch)


def for_entries(x: Tensor, noise: Gaussian, entries: torch.Size) -> Tensor:
    """Samples (N, *noise's batch, *event) as (N, ..., n), which broadcasts with entries that have more dimensions."""
    ones = (1,) * (len(entries) - len(noise.batch_shape))
    return x.reshape(len(x), *ones, *noise.batch_shape, noise.size)


def random_seed(seed: int, purpose: str, item: int) -> int:
    """A seed of 63 bits that depends on these three only: not on the order of the items, nor on who computes them.

    A generator may take fewer of them: torch's on a CPU takes the lowest 32.
    """
    digest = hashlib.sha256(json.dumps([seed, purpose, item]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _default_batch(noise: Gaussian, entries: torch.Size, samples: int) -> int:
    bytes_each = noise.size * noise.dtype.itemsize
    inputs = max(SMALLEST_BATCH, piece_bytes("inputs", noise.device) // bytes_each)
    return max(1, min(samples, inputs // entries.numel()))
