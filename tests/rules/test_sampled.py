"""The quadratic part of a covariance from pairs of samples: unbiased."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from netmoments.rules.sampled import curved_units, quadratic_covariance
from tests.closeness import assert_within_standard_errors


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_the_quadratic_part_is_unbiased():
    """Against ½ Σ_uv a_iu a_jv tr(H_u C_uv H_v C_uvᵀ) with all pairs formed, the mean of the samples far from 0."""
    inputs, units, width, count, runs = 7, 5, 3, 6, 3000
    root, mean, weights = normal(inputs, inputs), 3 * normal(inputs, seed=1), normal(2, units, seed=2)
    windows = torch.randint(0, inputs, (units, width), generator=torch.Generator().manual_seed(0))
    windows[0, 2] = -1
    curvature = normal(units, width, width, seed=3)
    curvature = curvature + curvature.mT
    present = (windows >= 0).double()
    curvature = curvature * present.unsqueeze(-1) * present.unsqueeze(-2)
    covariance = root @ root.mT
    cross = covariance[windows.clamp(min=0)[:, :, None, None], windows.clamp(min=0)[None, None]]  # (u, w, v, w)
    pairs = torch.einsum("uij,ujvk,vkl,uivl->uv", curvature, cross, curvature, cross)
    dense = 0.5 * weights @ pairs @ weights.mT
    own = torch.stack([cross[unit, :, unit] for unit in range(units)])  # of each window
    found = []
    for seed in range(runs):
        z = mean + normal(count, inputs, seed=seed) @ root.mT
        forms = curved_units(windows, curvature[None], own[None], z[None])
        assert forms is not None
        found.append(quadratic_covariance(forms(weights[None]).across)[0])
    estimates = torch.stack(found)
    assert_within_standard_errors(estimates.mean(0), dense, estimates.std(0) / math.sqrt(runs))
