"""Bad input: every case is an error of the right type that names the argument, what came, and what was wanted."""

from __future__ import annotations

import math

import pytest
import torch

import netmoments as nm

F32 = torch.zeros(3)
NETWORK = nm.AffineReluAffine(torch.ones(4, 3), torch.zeros(4), torch.ones(2, 4), torch.zeros(2))
NOISE = nm.Gaussian(F32, std=1.0)
BAD = {
    "seed": (lambda: nm.monte_carlo(NETWORK, NOISE, 10, seed=-1), ValueError, "seed must be an integer of at least 0"),
    "not a function": (lambda: nm.monte_carlo(3.0, NOISE, 10), TypeError, "function must be callable, got 3.0"),
    "nan difference": (lambda: nm.relative_difference(F32, F32 * math.nan), ValueError, "y must be finite"),
    "difference of shapes": (lambda: nm.relative_difference(F32, torch.ones(2)), ValueError, "shapes must broadcast"),
    "one sample": (
        lambda: nm.monte_carlo(NETWORK, NOISE, 1),
        ValueError,
        "samples must be an integer of at least 2, got 1",
    ),
    "batch of none": (
        lambda: nm.monte_carlo(NETWORK, NOISE, 10, batch=0),
        ValueError,
        "batch must be an integer of at least 1",
    ),
    "sampling a tensor": (lambda: nm.monte_carlo(NETWORK, F32, 10), TypeError, "noise must be a netmoments.Gaussian"),
    "function of another shape": (
        lambda: nm.monte_carlo(lambda x: x.sum(), NOISE, 10),
        ValueError,
        "one row for each of the 10 inputs",
    ),
    "function of integers": (lambda: nm.monte_carlo(lambda x: x.argmax(-1), NOISE, 10), TypeError, "floating-point"),
    "function that overflows": (lambda: nm.monte_carlo(lambda x: x / 0, NOISE, 10), ValueError, "NaN or infinite"),
    "difference of lists": (lambda: nm.relative_difference([1.0], F32), TypeError, "x must be a torch tensor"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    call, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        call()
