"""Assertions that say where two tensors differ, by how much, and in what units."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_close(
    actual: Tensor, expected: Tensor | list[float], *, atol: float = 0.0, rtol: float = 0.0, what: str = ""
) -> None:
    """|actual − expected| ≤ atol + rtol·|expected| everywhere; a report of the worst place otherwise."""
    expected = torch.as_tensor(expected, dtype=torch.float64).expand(actual.shape)
    actual = actual.detach().double()
    assert torch.isfinite(actual).all(), f"{what}: {int((~torch.isfinite(actual)).sum())} values are not finite"
    error = (actual - expected.detach()).abs()
    excess = error - (atol + rtol * expected.detach().abs())
    if bool((excess > 0).any()):
        worst = int(excess.argmax())
        raise AssertionError(
            f"{what}: {int((excess > 0).sum())} of {error.numel()} values differ; worst at flat index {worst}: "
            f"{float(actual.flatten()[worst])!r} against {float(expected.flatten()[worst])!r}, "
            f"error {float(error.flatten()[worst]):.3g}, allowed {atol:g} + {rtol:g}·|expected|"
        )


def assert_within_standard_errors(sampled: Tensor, exact: Tensor, standard_error: Tensor, count: float = 5.0) -> None:
    """Sampled values within `count` of their standard errors of the exact ones."""
    score = ((sampled - exact.detach().double()) / standard_error).abs()
    assert torch.isfinite(score).all()
    assert float(score.max()) <= count, f"off by {float(score.max()):.1f} standard errors, allowed {count}"
