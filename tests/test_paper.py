"""The paper's expressions: against integrals, each other, and the exact engine; and their documented slips."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
import torch
import torch.nn.functional as F
from torch import Tensor

import netmoments as nm
from netmoments import paper
from tests.closeness import assert_close
from tests.networks import random_network


def scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def cross_moment(mu1: Tensor, mu2: Tensor, sigma1: Tensor, sigma2: Tensor, rho: Tensor) -> Tensor:
    """E[max(x₁,0) max(x₂,0)] by the exact kernel, for tensors of one shape (pairs,)."""
    mean, std = torch.stack([mu1, mu2], -1), torch.stack([sigma1, sigma2], -1)
    correlation = torch.stack(
        [torch.stack([torch.ones_like(rho), rho], -1), torch.stack([rho, torch.ones_like(rho)], -1)], -2
    )
    covariance = nm.relu_covariance(mean, correlation * std.unsqueeze(-1) * std.unsqueeze(-2))[:, 0, 1]
    return covariance + nm.relu_mean(mean, std).prod(-1)


def test_remark_1():
    """Mass and density of max(x, 0) make a distribution, whose mean is relu_mean."""
    mean, std = scalar(0.4), scalar(1.3)
    density = lambda y: float(paper.relu_density(scalar(y), mean, std))  # noqa: E731
    mass = scipy.integrate.quad(density, 0, 15)[0]
    assert mass + float(paper.relu_atom(mean, std)) == pytest.approx(1, abs=1e-12)
    first = scipy.integrate.quad(lambda y: y * density(y), 0, 15)[0]
    assert first == pytest.approx(float(nm.relu_mean(mean, std)), abs=1e-12)
    assert float(paper.relu_mean_zero_mean(std)) == pytest.approx(float(nm.relu_mean(scalar(0.0), std)))
    assert density(-1.0) == 0


def test_lemma_1():
    std = scalar(0.8)
    density = lambda y: float(paper.squared_relu_density(scalar(y), std))  # noqa: E731
    # y = t² takes the singularity at 0 away
    mass = scipy.integrate.quad(lambda t: 2 * t * density(t * t), 0, 9)[0]
    first = scipy.integrate.quad(lambda t: 2 * t**3 * density(t * t), 0, 9)[0]
    assert mass == pytest.approx(0.5, abs=1e-12)
    assert first == pytest.approx(float(paper.squared_relu_mean(std)), abs=1e-12)
    assert density(0.0) == 0


def test_theorem_1_is_the_engines_mean():
    network, noise = random_network(6, 30, 4, seed=1), nm.Gaussian(torch.ones(6, dtype=torch.float64), std=0.7)
    assert_close(paper.expected_output(network, noise), network.mean(noise), rtol=1e-13)


def test_lemma_2_on_a_product_of_four_smooth_relus():
    generator = torch.Generator().manual_seed(2)
    factor = 0.4 * torch.randn(4, 4, dtype=torch.float64, generator=generator)
    covariance = factor @ factor.mT + 0.2 * torch.eye(4, dtype=torch.float64)
    mean = torch.tensor([0.1, -0.3, 0.5, 0.2], dtype=torch.float64)
    left, right = paper.price_theorem_sides(
        lambda a, b, c, d: F.softplus(a) * F.silu(b) * F.gelu(c) * F.softplus(d), mean, covariance, nodes=24
    )
    assert float(left) == pytest.approx(float(right), rel=1e-6)
    assert abs(float(left)) > 0.01


def test_lemma_2_on_four_relus_in_two_independent_pairs():
    """Then E[Ψ] is a product of two cross moments, its derivative in σ₁₂ and σ₃₄ the product of two orthants."""
    shifts = torch.tensor([0.3, -0.4], dtype=torch.float64, requires_grad=True)
    mean = torch.tensor([[0.2, -0.5], [0.8, 0.1]], dtype=torch.float64)
    base = torch.tensor([[[1.0, 0.3], [0.3, 1.0]], [[2.0, -0.4], [-0.4, 1.5]]], dtype=torch.float64)
    swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    covariance = base * torch.eye(2, dtype=torch.float64) + shifts[:, None, None] * swap
    std = base.diagonal(dim1=1, dim2=2).sqrt()
    means = nm.relu_mean(mean, std)
    pair = nm.relu_covariance(mean, covariance)[:, 0, 1] + means[:, 0] * means[:, 1]
    by_shift = torch.autograd.grad(pair.sum(), shifts)[0]
    blocks = torch.block_diag(*covariance.detach()).numpy()
    expected = scipy.stats.multivariate_normal.cdf(
        mean.flatten().numpy(), np.zeros(4), blocks, abseps=1e-7, maxpts=10**6
    )
    assert float(by_shift.prod()) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("rho", [-1.0, -0.8, 0.0, 0.3, 0.999, 1.0])
def test_lemma_3_is_the_kernel_at_zero_mean(rho):
    s1, s2 = scalar(0.7), scalar(1.9)
    exact = cross_moment(*(x.reshape(1) for x in (scalar(0.0), scalar(0.0), s1, s2, scalar(rho))))
    assert_close(paper.relu_product_zero_mean(rho * s1 * s2, s1, s2).reshape(1), exact, atol=1e-15)


@pytest.mark.parametrize("rho", [-1.0, -0.9, -0.75, -0.4, 0.0, 0.2, 0.6, 0.8, 1.0])
def test_lemma_4_recovers_lemma_3_at_zero_mean(rho):
    """The appendix's proposition, on both branches."""
    zero, one, two = scalar(0.0), scalar(1.0), scalar(2.0)
    series = paper.relu_cross_moment_series(zero, zero, one, two, scalar(rho), terms=150)
    assert_close(series, paper.relu_product_zero_mean(2 * scalar(rho), one, two), atol=1e-14)


def random_pairs(low: float, high: float, count: int = 4000) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(5)

    def uniform(a: float, b: float) -> Tensor:
        return a + (b - a) * torch.rand(count, dtype=torch.float64, generator=generator)

    sign = torch.where(uniform(-1, 1) < 0, -1.0, 1.0)
    return uniform(-2, 2), uniform(-2, 2), uniform(0.2, 2), uniform(0.2, 2), sign * uniform(low, high)


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.6), (0.8, 1.0), (1.0, 1.0)])
def test_lemma_4_with_50_terms_agrees_with_the_kernel(low, high):
    pairs = random_pairs(low, high)
    assert_close(paper.relu_cross_moment_series(*pairs, terms=50), cross_moment(*pairs), atol=1e-9)


def test_lemma_4_converges_slowly_near_the_seam():
    pairs = random_pairs(0.69, 0.72)
    exact = cross_moment(*pairs)
    errors = [float((value - exact).abs().max()) for value in paper.relu_cross_moment_partial_sums(*pairs, 50)]
    assert errors[4] > 1e-2
    assert 1e-3 < errors[19] < 1e-2
    seam = torch.full_like(pairs[0], math.sqrt(0.5))
    assert torch.isfinite(paper.relu_cross_moment_series(*pairs[:4], seam, terms=50)).all()


def test_partial_sums_count_terms():
    pairs = random_pairs(0.1, 0.6, count=20)
    sums = list(paper.relu_cross_moment_partial_sums(*pairs, terms=7))
    assert len(sums) == 7
    assert_close(sums[2], paper.relu_cross_moment_series(*pairs, terms=3), atol=0)


def test_theorem_2_corrected_and_as_printed():
    network = random_network(5, 12, 3, seed=4)
    network = nm.AffineReluAffine(network.A, torch.zeros_like(network.c1), network.B, network.c2)
    noise = nm.Gaussian(torch.zeros(5, dtype=torch.float64), std=1.2)
    exact = network.variance(noise) + network.mean(noise) ** 2
    assert_close(paper.second_moment_zero_mean(network, noise), exact, rtol=1e-13)
    slip = paper.second_moment_zero_mean(network, noise) - paper.second_moment_as_printed(network, noise)
    without = network.mean(noise) - network.c2
    assert_close(slip, 2 * network.c2 * without + network.c2**2 - network.c2, atol=1e-13)
    assert_close(paper.variance_zero_mean(network, noise), network.variance(noise), rtol=1e-12)


def test_the_general_variance_by_the_series():
    network, noise = random_network(40, 25, 3, seed=5), nm.Gaussian(torch.ones(40, dtype=torch.float64), std=0.5)
    assert_close(paper.variance_series(network, noise, terms=60), network.variance(noise), rtol=1e-8)
    five = paper.variance_series(network, noise, terms=5)
    assert float(nm.relative_difference(five, network.variance(noise)).max()) > 1e-9


def test_series_by_pairs_is_the_series_but_for_rounding():
    network, noise = random_network(40, 25, 3, seed=5), nm.Gaussian(torch.ones(40, dtype=torch.float64), std=0.5)
    assert_close(
        paper.variance_series_by_pairs(network, noise, terms=60), paper.variance_series(network, noise, terms=60),
        rtol=1e-9,
    )  # fmt: skip


def test_old_variance_as_the_authors_ran_it():
    """Own variances exactly, pairs as if of zero mean: entry by entry from the engine's own covariances."""
    network, noise = random_network(40, 25, 3, seed=5), nm.Gaussian(torch.ones(40, dtype=torch.float64), std=0.5)
    layer = noise.affine(network.A, network.c1)
    covariance = layer.covariance.dense()
    pairs = nm.relu_covariance(torch.zeros_like(layer.mean), covariance)
    own = nm.relu_variance(layer.mean, covariance.diagonal(dim1=-2, dim2=-1).sqrt())
    mixed = torch.diagonal_scatter(pairs, own, dim1=-2, dim2=-1)
    expected = (network.B @ mixed * network.B).sum(-1)
    assert_close(paper.variance_zero_mean_pairs(network, noise), expected, rtol=1e-11)


F32, EYE = torch.zeros(3), torch.eye(3)
NETWORK = nm.AffineReluAffine(torch.ones(4, 3), torch.zeros(4), torch.ones(2, 4), torch.zeros(2))
BAD = {
    "series with zero sigma": (
        lambda: nm.paper.relu_cross_moment_series(F32, F32, F32, F32, F32),
        ValueError,
        "sigma1 and sigma2 must be > 0",
    ),
    "series with |rho| > 1": (
        lambda: nm.paper.relu_cross_moment_series(F32, F32, F32 + 1, F32 + 1, F32 + 2),
        ValueError,
        "rho must be within",
    ),
    "the paper without noise": (
        lambda: nm.paper.expected_output(NETWORK, nm.Gaussian(F32, std=0.0)),
        ValueError,
        "divide by the standard deviation",
    ),
    "no terms": (
        lambda: nm.paper.relu_cross_moment_series(F32, F32, F32, F32, F32, terms=0),
        ValueError,
        "terms must be a positive integer, got 0",
    ),
    "odd Price": (lambda: nm.paper.price_theorem_sides(torch.add, F32, EYE), ValueError, "p even"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    call, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        call()
