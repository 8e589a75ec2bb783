"""Samples of what the units of a layer look at, window by window."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

WINDOW_ELEMENTS = {"cpu": 2**19, "cuda": 2**28}
"""Numbers of units that are looked at together: on a CPU what fits its caches."""


def laid_out(transposed: Tensor) -> Tensor:
    """A transposed (N, p, K) with its last dimension in one piece; of one image as a matrix, which is copied faster."""
    return transposed[0].contiguous().unsqueeze(0) if len(transposed) == 1 else transposed.contiguous()


def windows_in_parts(windows: Tensor, columns: Tensor, each: int) -> Iterator[tuple[slice, Tensor]]:
    """Some windows (m, w) at a time, and what columns (N, p, K) have at their places, (N, some, w, K): 0 at place −1.

    So many that `each` of a unit's numbers are `WINDOW_ELEMENTS`.
    """
    whole = bool((windows >= 0).all())
    for part in units_in_parts(columns, len(columns) * each, len(windows)):
        some = windows[part]
        found = columns.index_select(1, some.clamp(min=0).reshape(-1)).unflatten(1, some.shape)
        yield part, found if whole else found * (some >= 0).unsqueeze(-1)


def units_in_parts(like: Tensor, each: int, count: int) -> Iterator[slice]:
    """`count` units, so many at a time that `each` of their numbers are `WINDOW_ELEMENTS`."""
    together = max(1, WINDOW_ELEMENTS.get(like.device.type, WINDOW_ELEMENTS["cpu"]) // each)
    for start in range(0, count, together):
        yield slice(start, min(start + together, count))


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Put together; one alone is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim)


def centred(samples: Tensor, dim: int) -> Tensor:
    """z − z̄, the samples being along a dimension."""
    return samples - samples.mean(dim, keepdim=True)


def window_covariance(columns: Tensor) -> Tensor:
    """S = Σ_k (z_k − z̄)(z_k − z̄)ᵀ / (K − 1), (..., w, w), of samples (..., w, K)."""
    deviations = centred(columns, -1)
    return deviations @ deviations.mT / (columns.shape[-1] - 1)


def variances(samples: Tensor) -> Tensor:
    """Σ_k (z_k − z̄)² / (K − 1) of samples (N, K, p): (N, p)."""
    images, count, places = samples.shape
    parts = units_in_parts(samples, images * count, places)
    squares = [centred(samples[..., some], 1).square().sum(1) for some in parts]
    return joined(squares, -1) / (count - 1)
