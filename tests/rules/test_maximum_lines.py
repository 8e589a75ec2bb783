"""The largest of a window from a few lines: without bias, exact for one input."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import netmoments as nm
from netmoments.rules.maximum import Largest
from netmoments.rules.maximum_lines import direction_sets, expected_largest, largest_of_contenders
from tests.closeness import assert_close


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def random_windows(count: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Places, −1 for none, means and covariances."""
    windows = torch.randint(-1, 40, (count, width), generator=torch.Generator().manual_seed(0))
    windows[:, 0] = windows[:, 0].clamp(min=0)
    present = windows >= 0
    factor = normal(count, width, width) * present.unsqueeze(-1)
    return windows, 4 * normal(count, width, seed=1) * present, factor @ factor.mT


@pytest.mark.parametrize("width", [1, 2, 6, 7])
@pytest.mark.parametrize(("with_zero", "sign"), [(True, 1), (False, 1), (False, -1)])
def test_few_lines_have_no_bias(width, with_zero, sign):
    """Over 300 windows, against many points each: what is left is the error of the lines, and averages out."""
    windows, mean, covariance = random_windows(300, width)
    exact = Largest(windows, with_zero, sign, points=2048).local(mean, covariance)
    lines = largest_of_contenders(windows, sign * mean[None], covariance[None], probes=64, with_zero=with_zero)
    sd = covariance.diagonal(dim1=-2, dim2=-1).amax(-1).sqrt()
    for found, wanted in ((sign * lines.mean[0], exact.mean), (lines.gain[0].mT * sd, exact.gain.mT * sd)):
        off = (found - wanted) / sd
        assert_close(off, torch.zeros_like(off), atol=0.2)
        assert_close(off.mean(-1), torch.zeros_like(off.mean(-1)), atol=0.005)
    bend, expected = (h * sd[:, None, None] for h in (sign * lines.curvature[0], exact.curvature))
    assert_close((bend * covariance).sum((1, 2)).mean(), (expected * covariance).sum((1, 2)).mean(), rtol=0.03)
    assert_close(lines.gain[0] * (windows < 0), torch.zeros(300, width), atol=0)


def test_one_line_is_exact_for_one_input():
    mean, variance = normal(1, 50), normal(1, 1, 50, seed=1).square()
    lines = expected_largest(
        mean, variance, torch.ones(1, 50, dtype=torch.bool), direction_sets(1, 1)[..., :50], with_zero=True
    )
    h = mean[0] / variance[0, 0].sqrt()
    assert_close(lines.mean, nm.relu_mean(mean[0], variance[0, 0].sqrt()), atol=1e-9)  # S has a floor of 1e-12
    assert_close(lines.gain[0], torch.special.ndtr(h), atol=1e-9)
