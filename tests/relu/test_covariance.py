"""The exact covariance of a ReLU layer: digits, an independent implementation, gradients, limits, properties."""

from __future__ import annotations

import csv
import itertools
import math

import mpmath
import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

import netmoments as nm
from netmoments.normal import density, distribution
from tests.closeness import assert_close, assert_within_standard_errors
from tests.reference.bivariate_integrals import PATH, exact_integrals
from tests.relu.layers import random_layer


def test_reference_digits_float64(reference):
    covariance = nm.relu_covariance(reference.mean, reference.matrix)[:, 0, 1].numpy()
    assert np.abs(covariance - reference.covariance).max() <= 1e-15
    orthant = nm.orthant_probability(reference.mean, reference.matrix)[:, 0, 1].numpy()
    assert np.abs(orthant - reference.orthant).max() <= 1e-15


@pytest.mark.slow
def test_the_reference_is_what_mpmath_says():
    """Every row of the reference, which has 25 digits, is computed again from the integrals."""
    with PATH.with_name("relu_covariance.csv").open() as file, mpmath.workdps(34):
        for row in csv.DictReader(file):
            place = [float.fromhex(row[name]) for name in ("h_hex", "k_hex", "rho_hex")]
            integrals, (h, k, rho) = exact_integrals(*place), map(mpmath.mpf, place)
            gates = mpmath.ncdf(h) * mpmath.ncdf(k)
            assert abs(rho * gates + integrals.nonlinear - mpmath.mpf(row["covariance"])) < 1e-25
            assert abs(gates + integrals.excess - mpmath.mpf(row["orthant_probability"])) < 1e-25


def test_reference_digits_float32(reference):
    """Against the digits at the float32 inputs' own values, for which the float64 kernel stands in."""
    mean, matrix = reference.mean.float(), reference.matrix.float()
    exact = nm.relu_covariance(mean.double(), matrix.double())
    assert_close(nm.relu_covariance(mean, matrix), exact, atol=5e-7)
    covariance = nm.relu_covariance(mean, matrix)[:, 0, 1].numpy().astype(np.longdouble)
    assert np.abs(covariance - reference.covariance).max() <= 5e-7


def test_derivative_in_the_covariance_is_the_orthant_probability(reference):
    matrix = reference.matrix.requires_grad_()
    covariance = nm.relu_covariance(reference.mean, matrix)
    (gradient,) = torch.autograd.grad(covariance[:, 0, 1].sum(), matrix)
    assert np.abs(gradient[:, 0, 1].numpy() - reference.orthant).max() <= 1e-14


def test_orthant_probability_against_scipy():
    rng = np.random.default_rng(3)
    for _ in range(40):
        mean, rho = rng.normal(size=2), rng.uniform(-0.999, 0.999)
        matrix = np.array([[1.0, rho], [rho, 1.0]])
        expected = scipy.stats.multivariate_normal(np.zeros(2), matrix).cdf(mean)
        value = nm.orthant_probability(torch.tensor(mean), torch.tensor(matrix))[0, 1]
        assert value.item() == pytest.approx(expected, abs=1e-12)


def test_covariance_against_scipys_bivariate_normal():
    """E[relu relu] by the textbook formula with scipy's bivariate distribution, independent of our nodes."""
    mean, matrix = random_layer(6, seed=4)
    s = matrix.diagonal().sqrt()
    h, rho = mean / s, matrix / s.outer(s)
    for i, j in [(0, 1), (2, 5), (3, 4)]:
        q = float(torch.sqrt(1 - rho[i, j] ** 2))
        joint = scipy.stats.multivariate_normal([0, 0], [[1, float(rho[i, j])], [float(rho[i, j]), 1]])
        orthant = joint.cdf([float(h[i]), float(h[j])])
        a, b = (h[i] - rho[i, j] * h[j]) / q, (h[j] - rho[i, j] * h[i]) / q
        product = (
            (h[i] * h[j] + rho[i, j]) * orthant
            + h[i] * density(h[j]) * distribution(a)
            + h[j] * density(h[i]) * distribution(b)
            + q * density(h[i]) * density(b)
        )
        expected = s[i] * s[j] * product - nm.relu_mean(mean[i], s[i]) * nm.relu_mean(mean[j], s[j])
        assert_close(nm.relu_covariance(mean, matrix)[i, j], expected, atol=1e-9)


def test_seeded_monte_carlo():
    mean, matrix = random_layer(7, seed=5, rank=3)
    sampled = nm.monte_carlo(torch.relu, nm.Gaussian(mean, matrix), samples=400_000, seed=1)
    assert_within_standard_errors(
        sampled.covariance, nm.relu_covariance(mean, matrix), sampled.covariance_standard_error
    )


@pytest.mark.parametrize("rank", [None, 4, 2, 1])
def test_gradcheck_through_a_factor(rank):
    generator = torch.Generator().manual_seed(6)
    mean = torch.randn(5, dtype=torch.float64, generator=generator, requires_grad=True)
    factor = torch.randn(5, rank or 7, dtype=torch.float64, generator=generator, requires_grad=True)
    if rank == 1:  # ρ = ±1 everywhere: one-sided, so compare with a factor that is only almost of rank one
        near = torch.cat([factor.detach(), 1e-7 * torch.randn(5, 3, dtype=torch.float64, generator=generator)], -1)
        weight = torch.randn(5, 5, dtype=torch.float64, generator=generator)
        exact = torch.autograd.grad((nm.relu_covariance(mean, factor @ factor.mT) * weight).sum(), (mean, factor))
        near.requires_grad_()
        close = torch.autograd.grad((nm.relu_covariance(mean, near @ near.mT) * weight).sum(), (mean, near))
        assert_close(exact[0], close[0], atol=1e-5)
        assert_close(exact[1], close[1][:, :1], atol=1e-5)
        return
    assert gradcheck(lambda m, f: nm.relu_covariance(m, f @ f.mT), (mean, factor), atol=1e-7)


def test_gradients_with_saturated_units_and_batches():
    mean, matrix = random_layer(6, seed=7, batch=(2, 3))
    mean = (mean * torch.tensor([1.0, 30.0, -30.0, 0.5, 12.0, 1.0])).requires_grad_()
    matrix = matrix.requires_grad_()
    assert gradcheck(lambda m, s: nm.relu_covariance(m, 0.5 * (s + s.mT)), (mean, matrix), atol=1e-7)


def test_gradients_are_finite_at_the_edges():
    """Gradients are finite for ρ = ±1, equal units, zero variance, zero mean and variance, and as documented."""
    mean = torch.tensor([0.4, 0.4, -0.4, 1.0, 0.0, -2.0], dtype=torch.float64, requires_grad=True)
    factor = torch.tensor([1.0, 1.0, -1.0, 0.0, 0.0, 0.0], dtype=torch.float64).unsqueeze(-1)
    matrix = (factor @ factor.mT).requires_grad_()
    covariance = nm.relu_covariance(mean, matrix)
    by_mean, by_matrix = torch.autograd.grad(covariance.sum(), (mean, matrix))
    assert torch.isfinite(by_mean).all()
    assert torch.isfinite(by_matrix).all()
    assert by_matrix[3, 3].item() == 1.0  # certain and open: its variance passes
    assert by_matrix[5, 5].item() == 0.0  # certain and closed
    assert by_matrix[4, 4].item() == pytest.approx(0.5 - 1 / (2 * np.pi))  # the slope along zero mean
    assert by_matrix[3, 0].item() == pytest.approx(float(distribution(torch.tensor(0.4, dtype=torch.float64))))
    assert by_matrix[0, 1].item() == pytest.approx(float(distribution(torch.tensor(0.4, dtype=torch.float64))))


def test_singular_covariances_give_the_exact_limit():
    mean = torch.tensor([0.3, -0.7, 1.1, 2.0, -1.0], dtype=torch.float64)
    direction = torch.tensor([[1.0], [2.0], [-0.5], [0.0], [0.0]], dtype=torch.float64)
    covariance = nm.relu_covariance(mean, direction @ direction.mT)
    assert covariance[3:].abs().max() == 0
    # one-dimensional noise: integrate the two kinked functions of one normal variable, piece by piece
    kinks = sorted((-mean[:3] / direction[:3, 0]).tolist())
    edges = [-12.0, *kinks, 12.0]
    nodes, weights = np.polynomial.legendre.leggauss(60)
    t = np.concatenate([(b - a) / 2 * nodes + (a + b) / 2 for a, b in itertools.pairwise(edges)])
    measure = np.concatenate([(b - a) / 2 * weights for a, b in itertools.pairwise(edges)])
    measure = torch.tensor(measure * np.exp(-t * t / 2) / np.sqrt(2 * np.pi))
    y = torch.relu(mean[:3] + direction[:3, 0] * torch.tensor(t).unsqueeze(-1))
    expected_mean = measure @ y
    centred = y - expected_mean
    assert_close(covariance[:3, :3], (centred * measure.unsqueeze(-1)).mT @ centred, atol=5e-14)


def test_the_diagonal_is_the_variance():
    mean, matrix = random_layer(20, seed=8, batch=(2,))
    mean = mean * 6
    diagonal = nm.relu_covariance(mean, matrix).diagonal(dim1=-2, dim2=-1)
    assert_close(diagonal, nm.relu_variance(mean, matrix.diagonal(dim1=-2, dim2=-1).sqrt()), rtol=1e-13)


def test_shared_covariance_and_shared_mean_broadcast():
    mean, matrix = random_layer(9, seed=11, batch=(4,))
    shared = matrix[0].clone().requires_grad_()
    value = nm.relu_covariance(mean, shared)
    expected = nm.relu_covariance(mean, matrix[:1].expand(4, 9, 9))
    assert_close(value, expected, atol=1e-16)
    (gradient,) = torch.autograd.grad(value.sum(), shared)
    copies = matrix[:1].expand(4, 9, 9).clone().requires_grad_()
    (apart,) = torch.autograd.grad(nm.relu_covariance(mean, copies).sum(), copies)
    assert_close(gradient, apart.sum(0), atol=1e-14)
    assert nm.relu_covariance(mean[0], matrix).shape == (4, 9, 9)


def test_vmap_grad_and_jacrev():
    mean, matrix = random_layer(4, seed=12, batch=(3,))
    mapped = torch.func.vmap(nm.relu_covariance)(mean, matrix)
    assert_close(mapped, nm.relu_covariance(mean, matrix), atol=1e-16)
    shared = torch.func.vmap(nm.relu_covariance, in_dims=(0, None))(mean, matrix[0])
    assert_close(shared, nm.relu_covariance(mean, matrix[0]), atol=1e-16)
    by_mean, by_matrix = torch.func.jacrev(nm.relu_covariance, argnums=(0, 1))(mean[0], matrix[0])
    expected = torch.autograd.functional.jacobian(nm.relu_covariance, (mean[0], matrix[0]))
    assert_close(by_mean, expected[0], atol=1e-15)
    assert_close(by_matrix, expected[1], atol=1e-15)
    total = lambda m, s: nm.relu_covariance(m, s).square().sum()  # noqa: E731
    each = torch.func.vmap(torch.func.grad(total), in_dims=(0, 0))(mean, matrix)
    assert_close(each[1], torch.func.grad(total)(mean[1], matrix[1]), atol=1e-14)


@given(st.integers(0, 10**6), st.sampled_from([1, 2, 5, 8]), st.floats(1e-3, 1e3))
def test_properties(seed, rank, factor):
    """Positive semidefinite, symmetric, equivariant to scaling and permutation, and to flipping a sign:
    relu(−z₁) = relu(z₁) − z₁ gives Cov(relu(−z₁), relu z₂) = Cov(relu z₁, relu z₂) − S₁₂Φ(k)."""
    mean, matrix = random_layer(6, seed=seed, rank=rank)
    covariance = nm.relu_covariance(mean, matrix)
    scale = matrix.diagonal().max()
    assert torch.equal(covariance, covariance.mT)
    assert torch.linalg.eigvalsh(covariance).min() >= -1e-14 * scale
    assert_close(
        nm.relu_covariance(factor * mean, factor**2 * matrix),
        factor**2 * covariance,
        atol=1e-13 * factor**2 * float(scale),
    )
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    permuted = nm.relu_covariance(mean[order], matrix[order][:, order])
    assert_close(permuted, covariance[order][:, order], atol=1e-15 * float(scale))
    sign = torch.tensor([-1.0, 1, 1, 1, 1, 1], dtype=torch.float64)
    flipped = nm.relu_covariance(sign * mean, sign.outer(sign) * matrix)
    gate = distribution(mean / matrix.diagonal().sqrt())
    assert_close(flipped[0, 1:], (covariance[0] - matrix[0] * gate)[1:], atol=1e-14 * float(scale))


def test_orthant_probability_maps_and_refuses_gradients():
    mean, matrix = random_layer(5, seed=14, batch=(3,))
    mapped = torch.func.vmap(nm.orthant_probability, in_dims=(0, None))(mean, matrix[0])
    assert_close(mapped, nm.orthant_probability(mean, matrix[0]), atol=1e-16)
    with pytest.raises(RuntimeError, match="no derivatives"):
        nm.orthant_probability(mean.requires_grad_(), matrix).sum().backward()


def test_orthant_probability_of_certain_units():
    mean = torch.tensor([1.0, -1.0, 0.0, 0.5], dtype=torch.float64)
    matrix = torch.zeros(4, 4, dtype=torch.float64)
    matrix[3, 3] = 1
    open_last = float(distribution(torch.tensor(0.5, dtype=torch.float64)))
    expected = [1.0, 0.0, 0.5, open_last]
    assert_close(
        nm.orthant_probability(mean, matrix)[3], [p * open_last for p in expected[:3]] + [open_last], atol=1e-16
    )


F32, EYE = torch.zeros(3), torch.eye(3)
BAD = {
    "negative variance": (lambda: nm.relu_covariance(F32, -EYE), ValueError, "must be ≥ 0"),
    "no units": (lambda: nm.relu_covariance(torch.zeros(0), torch.zeros(0, 0)), ValueError, "p ≥ 1"),
    "shape": (lambda: nm.relu_covariance(F32, torch.eye(4)), ValueError, r"\(\.\.\., 3, 3\).*got .*\(4, 4\)"),
    "dtypes": (lambda: nm.relu_covariance(F32, EYE.double()), TypeError, "mean and covariance must have one dtype"),
    "batches": (
        lambda: nm.relu_covariance(torch.zeros(2, 3), EYE.expand(4, 3, 3)),
        ValueError,
        r"mean \(2,\), covariance \(4,\)",
    ),
    "empty batch": (lambda: nm.relu_covariance(torch.zeros(0, 3), EYE), ValueError, "must not be empty"),
    "nan": (lambda: nm.relu_covariance(F32, EYE * math.nan + EYE), ValueError, "NaN"),
    "tiny budget": (lambda: nm.relu_covariance(F32, EYE, memory_budget=10), ValueError, "at least 65536, got 10"),
    "orthant shape": (lambda: nm.orthant_probability(F32, torch.eye(2)), ValueError, r"\(\.\.\., 3, 3\)"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    call, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("variance", [0.01, 0.3, 7.0, 1e-20])
def test_exact_duplicates(dtype, variance):
    """An orthant probability has an infinite slope at ρ = ±1, so a ρ of ±1 must not be rounded to less."""
    matrix = torch.full((2, 2), variance, dtype=dtype)
    h = torch.tensor([0.0, -0.7], dtype=dtype)
    signs = torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=dtype)
    for sign, exact in ((1, torch.minimum(h[0], h[1])), (-1, None)):
        found = nm.orthant_probability(h * matrix.diagonal().sqrt(), matrix * (signs if sign < 0 else 1))[0, 1]
        limit = distribution(exact.double()) if exact is not None else torch.zeros(())
        assert abs(float(found) - float(limit)) <= (1e-7 if dtype == torch.float32 else 1e-14)
    assert float(nm.orthant_probability(torch.zeros(2, dtype=dtype), matrix)[0, 1]) == 0.5


def test_correlations_beyond_one_by_rounding():
    """Duplicates may have a covariance whose smallest eigenvalue is −4e-11 of its largest."""
    matrix = torch.tensor([[1.0, 1 + 4e-11], [1 + 4e-11, 1.0]], dtype=torch.float64)
    zero = torch.zeros(2, dtype=torch.float64)
    assert float(nm.orthant_probability(zero, matrix)[0, 1]) == 0.5
    half = 0.5 - 0.5 / math.pi
    assert_close(nm.relu_covariance(zero, matrix), torch.full((2, 2), half, dtype=torch.float64), atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("units", [5, 40, 150])
def test_results_are_symmetric_to_the_bit(dtype, units):
    """So they are for a covariance of rank 3 with an asymmetry of 4e-11 of its largest entry."""
    generator = torch.Generator().manual_seed(units)
    mean, matrix = random_layer(units, seed=units, rank=3)
    noise = torch.randn(units, units, dtype=torch.float64, generator=generator)
    matrix = (matrix + 4e-11 * matrix.max() * noise).to(dtype)
    mean = (3 * mean).to(dtype)
    for found in (nm.relu_covariance(mean, matrix), nm.orthant_probability(mean, matrix)):
        assert torch.equal(found, found.mT)
        assert torch.isfinite(found).all()
    weights = torch.randn(4, units, dtype=dtype, generator=generator)
    network = nm.AffineReluAffine(weights.mT.contiguous(), mean, weights, torch.zeros(4, dtype=dtype))
    covariance = network.covariance(nm.Gaussian(torch.zeros(4, dtype=dtype), std=0.3))
    assert torch.equal(covariance, covariance.mT)
