"""Gaussian inputs: what arguments mean, structures against their dense twins, sampling, conversion."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import netmoments as nm
from tests.closeness import assert_close

SIZE = 6


def structures(batch: tuple[int, ...] = ()) -> dict[str, nm.Gaussian]:
    """One of each kind, with a batch if asked; the zero variances and the missing rank are on purpose."""
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*batch, *shape, dtype=torch.float64, generator=generator)

    mean, factor = normal(SIZE), normal(SIZE, 2)
    variances = normal(SIZE).square()
    variances[..., 2] = 0
    square = factor @ factor.mT
    square = 0.5 * (square + square.mT)
    covariances = {
        "isotropic": 0.3,
        "diagonal": nm.Diagonal(variances),
        "low rank": nm.LowRank(factor),
        "low rank plus number": nm.LowRank(factor, 0.2),
        "low rank plus diagonal": nm.LowRank(factor, variances),
        "dense": nm.Dense(square + torch.diag_embed(variances)),
        "dense and singular": nm.Dense(square),
        "certain": 0.0,
    }
    return {name: nm.Gaussian(mean, covariance, event_ndim=1) for name, covariance in covariances.items()}


KINDS = list(structures())


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


@pytest.mark.parametrize(
    ("mean", "covariance", "kind", "batch"),
    [
        ((5,), 0.1, nm.Isotropic, ()),
        ((3, 5), 0.1, nm.Isotropic, (3,)),
        ((3, 8, 8), 0.1, nm.Isotropic, ()),
        ((2, 3, 8, 8), 0.1, nm.Isotropic, (2,)),
        ((5,), (5,), nm.Diagonal, ()),
        ((3, 5), (5,), nm.Diagonal, (3,)),
        ((3, 5), (3, 5), nm.Diagonal, (3,)),
        ((3, 5), (3, 1), nm.Isotropic, (3,)),
        ((2, 1, 4, 4), (2, 1, 1, 1), nm.Isotropic, (2,)),
        ((1, 4, 4), (1, 4, 4), nm.Diagonal, ()),
        ((5,), (5, 5), nm.Dense, ()),
        ((3, 5), (3, 5, 5), nm.Dense, (3,)),
        ((3, 5), (5, 5), nm.Dense, (3,)),
        ((2, 1, 2, 2), (4, 4), nm.Dense, (2,)),
        ((2, 1, 2, 2), (2, 4, 4), nm.Dense, (2,)),
    ],
)
def test_readings(mean, covariance, kind, batch):
    if isinstance(covariance, tuple):
        square = len(covariance) >= 2 and covariance[-1] == covariance[-2] and kind is nm.Dense
        value = torch.eye(covariance[-1]).expand(covariance) if square else torch.ones(covariance)
    else:
        value = covariance
    noise = nm.Gaussian(torch.zeros(mean), value)
    assert type(noise.covariance) is kind
    assert noise.batch_shape == batch
    assert_close(noise.variance.expand(mean), torch.full(mean, 0.1 if value is covariance else 1.0), rtol=1e-6)


def test_std_and_covariance_agree():
    mean = torch.zeros(2, 4)
    std = torch.tensor([0.1, 0.2, 0.0, 3.0])
    assert_close(nm.Gaussian(mean, std=std).variance, nm.Gaussian(mean, std**2).variance, atol=0)
    assert nm.Gaussian(mean, std=0.5).variance.unique().tolist() == [0.25]
    assert nm.Gaussian(mean, covariance=0.5).variance.unique().tolist() == [0.5]
    per_image = nm.Gaussian(mean, std=torch.tensor([[1.0], [2.0]]))
    assert per_image.variance[:, 0].tolist() == [1.0, 4.0]


def test_event_ndim_decides_where_dimensions_do_not():
    noise = nm.Gaussian(torch.zeros(7, 6, 5), std=1.0, event_ndim=1)
    assert (noise.batch_shape, noise.event_shape) == ((7, 6), (5,))
    with pytest.raises(ValueError, match="pass event_ndim="):
        nm.Gaussian(torch.zeros(1, 2, 3, 4, 5), std=1.0)


def test_what_can_be_read_two_ways_is_an_error():
    square = torch.eye(4)
    with pytest.raises(ValueError, match=r"nm\.Diagonal\(\.\.\.\) or nm\.Dense"):
        nm.Gaussian(torch.zeros(4, 4), square)
    assert isinstance(nm.Gaussian(torch.zeros(4, 4), nm.Dense(square)).covariance, nm.Dense)
    assert isinstance(nm.Gaussian(torch.zeros(4, 4), nm.Diagonal(square)).covariance, nm.Diagonal)


def test_to_and_immutability():
    noise = nm.Gaussian(torch.zeros(3), nm.LowRank(torch.ones(3, 1), torch.ones(3))).to(torch.float64)
    assert noise.dtype == torch.float64
    assert noise.covariance.dense().dtype == torch.float64
    with pytest.raises(AttributeError, match="immutable"):
        noise.mean = torch.ones(3)
    with pytest.raises(TypeError, match="float32 or float64"):
        noise.to(torch.float16)


def test_singular_and_nearly_singular_covariances_are_good_input():
    ones = torch.ones(300, 300)
    nm.Gaussian(torch.zeros(300), ones)
    factor = torch.randn(300, 20, generator=torch.Generator().manual_seed(0))
    nm.Gaussian(torch.zeros(300), factor @ factor.T)
    nm.Gaussian(torch.zeros(3), torch.zeros(3, 3))


def test_values_are_not_read_inside_vmap():
    def variance(mean: Tensor) -> Tensor:
        return nm.Gaussian(mean, std=2.0).variance + mean

    assert torch.func.vmap(variance)(torch.zeros(3, 2)).shape == (3, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_computed_covariances_are_accepted(dtype):
    """Whatever rounding leaves of a singular covariance: of samples, of a projection, of a rotation."""
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(5000, 3, dtype=dtype, generator=generator)
        x[:, 0] = x[:, 1] + x[:, 2]
        nm.Gaussian(torch.zeros(3, dtype=dtype), torch.cov(x.T))
        A = torch.randn(5, 1, dtype=dtype, generator=generator)
        nm.Gaussian(torch.zeros(5, dtype=dtype), A @ (A.T @ A) @ A.T)
    rotation = torch.linalg.qr(torch.randn(300, 300, dtype=dtype, generator=generator)).Q
    nm.Gaussian(
        torch.zeros(300, dtype=dtype), (rotation * torch.rand(300, dtype=dtype, generator=generator)) @ rotation.T
    )


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
