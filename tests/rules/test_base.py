"""Rules of every kind: the moments of one unit against samples, and as derivatives of each other.

What samples show of a layer: the quadratic part of a covariance, which is unbiased.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from netmoments.covariances import whitened
from netmoments.rules.base import Nonlinearity, ThirdCumulants, curved_units, quadratic_covariance
from netmoments.rules.maximum import Largest
from netmoments.rules.one_number import Elementwise, between, one_kink, relu
from tests.closeness import assert_within_standard_errors

RULES: dict[str, Nonlinearity] = {
    "relu": relu(1, torch.zeros(1, dtype=torch.float64)),
    "leaky": one_kink(torch.tensor([0.2]).double(), torch.tensor([0.8]).double()),
    "|z|": one_kink(torch.tensor([-1.0]).double(), torch.tensor([2.0]).double()),
    "hard tanh": between(torch.tensor([-0.5]).double(), torch.tensor([0.4]).double(), 1, torch.zeros(1).double()),
    "tanh": Elementwise(torch.tanh, (1,), torch.zeros(1, dtype=torch.float64)),
    "largest": Largest(torch.arange(4)[None], with_zero=False),
    "largest and 0": Largest(torch.arange(4)[None], with_zero=True),
    "smallest": Largest(torch.arange(3)[None], with_zero=False, sign=-1),
    "largest, padded": Largest(torch.tensor([[0, -1, 1, 2]]), with_zero=True),
}


def gaussian_window(rule: Nonlinearity, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    width = rule.width
    root = torch.randn(width, width, dtype=torch.float64, generator=generator) / width**0.5
    mean = 0.3 * torch.randn(1, width, dtype=torch.float64, generator=generator)
    covariance = (root @ root.T + 0.3 * torch.eye(width, dtype=torch.float64)).unsqueeze(0)
    present = (rule.windows >= 0).double()
    return mean * present, covariance * present.unsqueeze(-1) * present.unsqueeze(-2)


@pytest.mark.parametrize("name", RULES)
def test_moments_of_one_unit_against_samples(name):
    """Mean and variance within five standard errors of 10⁶ samples, plus 0.002 deviations where points are used."""
    rule = RULES[name]
    mean, covariance = gaussian_window(rule)
    local = rule.local(mean, covariance)
    generator = torch.Generator().manual_seed(1)
    values, vectors = torch.linalg.eigh(covariance[0])
    root = vectors * values.clamp(min=0).sqrt()
    z = torch.randn(10**6, rule.width, dtype=torch.float64, generator=generator) @ root.T
    y = rule.values((mean[0] + z).unsqueeze(1)).squeeze(1)
    slack = 2e-3 if isinstance(rule, Largest) else 0.0
    deviation = float(y.std())
    assert abs(float(local.mean) - float(y.mean())) < deviation * (5e-3 + slack)
    fourth = float(((y - y.mean()) ** 4).mean())
    allowed = 5 * ((fourth - deviation**4) / 1e6) ** 0.5 + 2 * slack * deviation**2
    assert abs(float(local.variance) - float(y.var())) < allowed
    with_inputs = (z * (y - y.mean()).unsqueeze(-1)).mean(0)
    expected = (covariance[0] @ local.gain[0]).squeeze()
    allowed = 5e-3 * float(z.std()) * deviation + slack
    torch.testing.assert_close(with_inputs, expected.reshape(-1), rtol=0, atol=allowed)


@pytest.mark.parametrize("name", [name for name in RULES if name != "largest, padded"])
def test_gain_curvature_and_cumulants_are_derivatives_of_the_mean(name):
    """∂E f/∂m = g, ∂g/∂m = H, and third cumulants add κ/6 times the third derivative."""
    rule = RULES[name]
    mean, covariance = gaussian_window(rule, seed=3)
    slack = 5e-3 if isinstance(rule, Largest) else 1e-7  # tanh: 64 nodes end there, its poles being at ±iπ/2
    root, _ = whitened(covariance, covariance, rule.windows >= 0, rule.width)

    def expected(m: Tensor) -> Tensor:
        return rule.local(m, covariance).mean.sum()

    def gain(m: Tensor) -> Tensor:
        return rule.local(m, covariance).gain[0]

    def curvature(m: Tensor) -> Tensor:
        return rule.local(m, covariance).curvature[0]

    local = rule.local(mean, covariance)
    torch.testing.assert_close(torch.autograd.functional.jacobian(expected, mean)[0], local.gain[0], rtol=0, atol=slack)
    by_mean = torch.autograd.functional.jacobian(gain, mean)[:, 0]
    torch.testing.assert_close(by_mean, local.curvature[0], rtol=0, atol=10 * slack)
    third = torch.autograd.functional.jacobian(curvature, mean)[:, :, 0]
    generator = torch.Generator().manual_seed(2)
    single = torch.randn(rule.width, dtype=torch.float64, generator=generator)
    kappa = 0.05 * torch.einsum("a,b,c->abc", single, single, single).unsqueeze(0)
    skewed = rule.local(mean, covariance, ThirdCumulants(root, kappa))
    in_z = torch.einsum("abc,ia,jb,kc->ijk", kappa[0], root[0], root[0], root[0])
    expected_change = (third * in_z).sum() / 6
    assert float(skewed.mean - local.mean) == pytest.approx(float(expected_change), rel=0.05, abs=slack / 10 + 1e-7)


@pytest.mark.parametrize("name", ["relu", "hard tanh", "|z|", "tanh", "largest and 0"])
def test_skewed_moments_against_samples_of_a_skewed_input(name):
    """z = m + R(u + κ/6 (u₁² − 1)e₁) to first order in κ = 0.2: what is left is of order κ²."""
    rule = RULES[name]
    mean, covariance = gaussian_window(rule, seed=4)
    root, _ = whitened(covariance, covariance, rule.windows >= 0, rule.width)
    kappa = torch.zeros(1, rule.width, rule.width, rule.width, dtype=torch.float64)
    kappa[0, 0, 0, 0] = 0.2
    local = rule.local(mean, covariance, ThirdCumulants(root, kappa))
    u = torch.randn(10**6, rule.width, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    u[:, 0] += 0.2 / 6 * (u[:, 0] ** 2 - 1)
    y = rule.values((mean[0] + u @ root[0].T).unsqueeze(1)).squeeze(1)
    deviation = float(y.std())
    assert abs(float(local.mean) - float(y.mean())) < 0.008 * deviation
    assert abs(float(local.variance) / float(y.var()) - 1) < 0.015


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
