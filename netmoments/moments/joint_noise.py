"""Several noisy inputs as one Gaussian: independent blocks of one row of numbers, and how a network is called with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from netmoments.checks import describe
from netmoments.covariances import Covariance
from netmoments.gaussian import Gaussian
from netmoments.network.interface import Arguments, NoisyArgument


@dataclass(frozen=True, eq=False)
class Blocks(Covariance):
    """Independent parts, one after the other: a block-diagonal covariance with a structure for each block."""

    parts: tuple[Covariance, ...]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def rank(self) -> int:
        return sum(part.rank for part in self.parts)

    @property
    def batch_shape(self) -> torch.Size:
        return torch.broadcast_shapes(*(part.batch_shape for part in self.parts))

    @property
    def normals(self) -> int:
        return sum(part.normals for part in self.parts)

    @property
    def _kept_dimensions(self) -> dict[str, int]:
        return {}

    def _each(self, change: Callable[[Tensor, int], Tensor]) -> Self:
        return type(self)(tuple(part._each(change) for part in self.parts))

    def flattened(self, batch: torch.Size) -> Self:
        return type(self)(tuple(part.flattened(batch) for part in self.parts))

    def entries(self, index: Tensor | slice | int) -> Self:
        return type(self)(tuple(part.entries(index) for part in self.parts))

    def variances(self) -> Tensor:
        return _side_by_side([part.variances() for part in self.parts], 1)

    def times(self, matrix: Tensor) -> Tensor:
        columns = matrix.split([part.size for part in self.parts], -1)
        return _side_by_side([part.times(some) for part, some in zip(self.parts, columns, strict=True)], 2)

    def root(self) -> Tensor:
        roots = [part.root() for part in self.parts]
        made = roots[0].new_zeros(*self.batch_shape, self.size, self.rank)
        row = column = 0
        for own in roots:
            made[..., row : row + own.shape[-2], column : column + own.shape[-1]] = own
            row, column = row + own.shape[-2], column + own.shape[-1]
        return made

    def coloured(self, white: Tensor) -> Tensor:
        parts = white.split([part.normals for part in self.parts], -1)
        return torch.cat([part.coloured(some) for part, some in zip(self.parts, parts, strict=True)], -1)


def _side_by_side(parts: list[Tensor], kept: int) -> Tensor:
    """Tensors with equal batches, but for `kept` dimensions, joined along the last."""
    batch = torch.broadcast_shapes(*(part.shape[: part.dim() - kept] for part in parts))
    return torch.cat([part.expand(*batch, *part.shape[part.dim() - kept :]) for part in parts], -1)


def joint_noise(given: Any, caller: str) -> tuple[Gaussian, Arguments]:
    """A tuple or dictionary of Gaussians and constants as one Gaussian of rows, and the call it is for.

    The Gaussians are independent; their batches must be the same, or absent.
    """
    if isinstance(given, Mapping):
        named = {str(name): value for name, value in given.items()}
    elif isinstance(given, tuple | list):
        named = {str(place): value for place, value in enumerate(given)}
    else:
        raise TypeError(
            f"{caller}: noise must be a netmoments.Gaussian, or a tuple or dictionary of the network's arguments with "
            f"Gaussians among them, got {describe(given)}"
        )
    noisy = {name: value for name, value in named.items() if isinstance(value, Gaussian)}
    if not noisy:
        raise ValueError(f"{caller}: none of the network's arguments is a netmoments.Gaussian, got {', '.join(named)}")
    first = next(iter(noisy.values()))
    for name, value in noisy.items():
        if (value.dtype, value.device) != (first.dtype, first.device):
            raise TypeError(
                f"{caller}: all noisy arguments must have one dtype and device, got {first.dtype} on {first.device} "
                f"and {value.dtype} on {value.device} ({name}); convert one with .to()"
            )
    try:
        batch = torch.broadcast_shapes(*(value.batch_shape for value in noisy.values()))
    except RuntimeError:
        shapes = ", ".join(f"{name} {tuple(value.batch_shape)}" for name, value in noisy.items())
        raise ValueError(f"{caller}: the noisy arguments must have the same batch shape, got {shapes}") from None
    means, structure, start = [], dict(named), 0
    for name, value in noisy.items():
        means.append(value.flat_mean.expand(*batch, value.size))
        structure[name] = NoisyArgument(start, value.event_shape)
        start += value.size
    noise = Gaussian._trusted(torch.cat(means, -1), Blocks(tuple(value.covariance for value in noisy.values())), 1)
    return noise, Arguments(structure if isinstance(given, Mapping) else tuple(structure.values()))
