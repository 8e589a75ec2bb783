"""Probabilities of orthants: the pieces that they are made of."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch

from netmoments.moments.orthants import orthant_by_separation, quasi_random, saddle_point_tilt, truncated_normal
from tests.closeness import assert_close

F64 = torch.float64


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


@pytest.mark.parametrize(
    ("below", "above"), [(-1.0, 2.0), (5.0, 6.0), (-30.0, -29.0), (20.0, math.inf), (-math.inf, 0)]
)
def test_truncated_normal(below, above):
    value, middle = truncated_normal(tensor(below), tensor(above), tensor(0.5))
    tail = (-above, -below) if below > 0 else (below, above)
    expected = float(mpmath.ncdf(tail[1]) - mpmath.ncdf(tail[0]))
    assert_close(value, tensor(expected), rtol=1e-12)
    assert below < float(middle) < above


def test_the_tilt_solves_its_equations():
    """For independent constraints there is nothing to tilt; for a sum, the first variable goes to its share of it."""
    assert_close(saddle_point_tilt(tensor([[-5.0, -3.0]]), torch.eye(2, dtype=F64)[None]), [0.0, 0.0], atol=1e-12)
    tilt = saddle_point_tilt(tensor([[30.0, -30.0]]), tensor([[[1.0, 0.0], [1.0, 1.0]]]))
    assert_close(tilt[0], [-15.0, 0.0], atol=0.1)  # z₁ + z₂ ≤ −30 is nearest at (−15, −15), up to 1/15


def test_below_the_smallest_number_is_zero_not_nan():
    limit = torch.full((1, 9), -20.0, dtype=F64)
    eye = torch.eye(9, dtype=F64)
    value = orthant_by_separation(limit, eye[None], torch.zeros_like(limit), quasi_random(9, 64, limit.device))
    assert float(value) == 0.0
