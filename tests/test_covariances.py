"""Structures of covariances against their dense twins."""

from __future__ import annotations

import pytest
import torch

import netmoments as nm
from tests.closeness import assert_close
from tests.gaussians import KINDS, SIZE, structures


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_structure_equals_its_dense_twin(kind, batch):
    noise = structures(batch)[kind]
    dense = noise.covariance.dense()
    assert_close(
        noise.covariance.variances(),
        dense.diagonal(dim1=-2, dim2=-1).expand(noise.covariance.variances().shape),
        atol=1e-15,
    )
    for rows in (4, 9):
        A = torch.randn(rows, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))
        pushed = A @ dense @ A.mT
        assert_close(noise.covariance.times(A), A @ dense, atol=1e-14)
        assert_close(noise.covariance.push(A), pushed, atol=1e-13)
        assert_close(noise.covariance.push_diagonal(A), pushed.diagonal(dim1=-2, dim2=-1), atol=1e-13)
        left, right, scale = noise.covariance.factors(A)
        assert_close(left @ right.mT * (1 if scale is None else scale), pushed, atol=1e-13)
        image = noise.affine(A, torch.ones(rows, dtype=torch.float64))
        assert_close(image.covariance.dense(), pushed, atol=1e-13)
        assert_close(image.mean, noise.mean @ A.mT + 1, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_have_the_mean_and_the_covariance(kind):
    noise = structures((2,))[kind]
    samples = noise.sample(200_000, generator=torch.Generator().manual_seed(0))
    assert samples.shape == (200_000, 2, SIZE)
    for i in range(2):
        x = samples[:, i]
        dense = noise.covariance.dense()
        dense = dense if dense.dim() == 2 else dense[i]
        spread = (dense.diagonal().outer(dense.diagonal()) + dense**2) / len(x)
        assert ((x.mean(0) - noise.mean[i]).abs() <= 5 * (dense.diagonal() / len(x)).sqrt() + 1e-12).all()
        assert ((torch.cov(x.T) - dense).abs() <= 5 * spread.sqrt() + 1e-12).all()


def test_isotropic_noise_stays_small():
    """σ²I of a million coordinates: no n×n, not even an n."""
    noise = nm.Gaussian(torch.zeros(10**6), std=0.1)
    assert isinstance(noise.covariance, nm.Isotropic)
    assert noise.covariance.variance.numel() == 1
    A = torch.ones(2, 10**6)
    assert_close(noise.affine(A).covariance.dense(), torch.full((2, 2), 1e4), rtol=1e-5)


def test_a_tall_map_of_small_noise_stays_low_rank():
    noise = nm.Gaussian(torch.zeros(3), std=0.1)
    image = noise.affine(torch.ones(50_000, 3))
    assert isinstance(image.covariance, nm.LowRank)
    assert image.covariance.factor.shape == (50_000, 3)


def test_a_learnable_number_as_low_rank_diagonal():
    diagonal = torch.tensor(0.2, dtype=torch.float64, requires_grad=True)
    noise = nm.Gaussian(
        torch.zeros(3, dtype=torch.float64), nm.LowRank(torch.ones(3, 1, dtype=torch.float64), diagonal)
    )
    (gradient,) = torch.autograd.grad(noise.variance.sum(), diagonal)
    assert gradient.item() == 3
    assert (
        nm.Gaussian(torch.zeros(3, dtype=torch.float64), nm.LowRank(torch.ones(3, 1).double(), 1e39)).variance[0] > 1e38
    )
