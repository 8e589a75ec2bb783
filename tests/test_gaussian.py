"""Gaussian inputs: what arguments mean, structures against their dense twins, sampling, conversion."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

import netmoments as nm
from tests.closeness import assert_close


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
    assert noise.event_given
    noise = nm.Gaussian(torch.zeros(1, 2, 3, 4, 5), std=1.0)
    assert (noise.batch_shape, noise.event_shape, noise.event_given) == ((1,), (2, 3, 4, 5), False)


def test_other_readings_have_the_same_numbers():
    """Of noise without a batch of its own, unless the caller said which dimensions are one input."""
    mean = torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(1))
    for noise in (nm.Gaussian(mean, std=0.5), nm.Gaussian(mean, nm.Diagonal(mean.flatten()))):
        assert noise.event_ndim == 3
        readings = noise.readings()
        assert [(r.batch_shape, r.event_shape) for r in readings] == [((2,), (3, 4)), ((2, 3), (4,))]
        for reading in readings:
            assert torch.equal(reading.mean, mean)
            assert torch.equal(
                reading.covariance.variances().expand(*reading.batch_shape, reading.size).flatten(),
                noise.covariance.variances().expand(noise.size),
            )
            assert not reading.readings()
    assert not nm.Gaussian(mean, std=0.5, event_ndim=3).readings()
    assert not nm.Gaussian(torch.zeros(4), nm.Dense(torch.eye(4))).readings()
    own = nm.Gaussian(torch.zeros(5, 4), nm.Isotropic(torch.rand(5), 4))
    assert not own.readings()  # a variance for each of 5: they are a batch


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


F32, EYE = torch.zeros(3), torch.eye(3)
NOISE = nm.Gaussian(F32, std=1.0)
BAD = {
    # values
    "nan mean": (
        lambda: nm.Gaussian(torch.tensor([0.0, math.nan]), std=1.0),
        ValueError,
        r"mean must be finite, got 1 NaN",
    ),
    "infinite mean": (lambda: nm.Gaussian(torch.tensor([math.inf]), std=1.0), ValueError, "mean must be finite"),
    "nan number": (lambda: nm.Gaussian(F32, math.nan), ValueError, "variance must be finite"),
    "infinite std": (lambda: nm.Gaussian(F32, std=math.inf), ValueError, "std must be finite"),
    "negative variance": (lambda: nm.Gaussian(F32, -0.1), ValueError, r"variance must be ≥ 0 everywhere, got .* -0\.1"),
    "negative std": (lambda: nm.Gaussian(F32, std=-0.1), ValueError, r"std must be ≥ 0 everywhere, got .* -0\.1"),
    "negative diagonal": (
        lambda: nm.Gaussian(F32, torch.tensor([1.0, -2.0, 1.0])),
        ValueError,
        r"variance must be ≥ 0.* -2",
    ),
    "nan covariance": (lambda: nm.Gaussian(F32, torch.full((3, 3), math.nan)), ValueError, "covariance must be finite"),
    "asymmetric": (
        lambda: nm.Gaussian(F32, EYE + torch.tensor([[0, 0.1, 0]] * 3).triu(1)),
        ValueError,
        r"symmetric, got .*0\.1",
    ),
    "indefinite": (
        lambda: nm.Gaussian(F32, torch.tensor([[1.0, 2, 0], [2, 1, 0], [0, 0, 1]])),
        ValueError,
        "positive semidefinite, got a smallest eigenvalue of -1",
    ),
    "indefinite in a batch": (
        lambda: nm.Gaussian(torch.zeros(2, 3), torch.stack([EYE, EYE - 0.5])),
        ValueError,
        "positive semidefinite",
    ),
    "negative on the diagonal": (lambda: nm.Gaussian(F32, -EYE), ValueError, "variances ≥ 0 on its diagonal, got -1"),
    "nan factor": (
        lambda: nm.Gaussian(F32, nm.LowRank(torch.full((3, 1), math.nan))),
        ValueError,
        "factor must be finite",
    ),
    "negative low-rank diagonal": (
        lambda: nm.Gaussian(F32, nm.LowRank(torch.ones(3, 1), -1.0)),
        ValueError,
        "diagonal must be ≥ 0",
    ),
    # shapes and types
    "no covariance": (lambda: nm.Gaussian(F32), ValueError, "either covariance= .* or std= .*, got neither"),
    "covariance and std": (lambda: nm.Gaussian(F32, 1.0, std=1.0), ValueError, "got both"),
    "scalar mean": (lambda: nm.Gaussian(torch.tensor(1.0), std=1.0), ValueError, "at least one dimension"),
    "empty mean": (lambda: nm.Gaussian(torch.zeros(0), std=1.0), ValueError, "at least one coordinate"),
    "list mean": (
        lambda: nm.Gaussian([0.0, 1.0], std=1.0),
        TypeError,
        r"mean must be a torch tensor, got a list.*as_tensor",
    ),
    "integer mean": (
        lambda: nm.Gaussian(torch.zeros(3, dtype=torch.int64), std=1.0),
        TypeError,
        r"got a int64 tensor .*\.float\(\)",
    ),
    "half mean": (lambda: nm.Gaussian(torch.zeros(3).half(), std=1.0), TypeError, "float32 or float64, got a float16"),
    "mixed dtype": (lambda: nm.Gaussian(F32, EYE.double()), TypeError, "mean and covariance must have one dtype"),
    "mixed dtype std": (
        lambda: nm.Gaussian(F32, std=torch.ones(3).double()),
        TypeError,
        "mean and std must have one dtype",
    ),
    "mixed device": (
        lambda: nm.Gaussian(F32, torch.eye(3, device="meta")),
        ValueError,
        "mean and covariance must be on one device",
    ),
    "wrong diagonal": (lambda: nm.Gaussian(F32, torch.ones(4)), ValueError, r"variances of shape \(3,\).*got .*\(4,\)"),
    "wrong dense": (
        lambda: nm.Gaussian(F32, torch.eye(4)),
        ValueError,
        r"dense matrix of shape \(3, 3\).*got .*\(4, 4\)",
    ),
    "dense std": (lambda: nm.Gaussian(F32, std=EYE), ValueError, "a dense matrix is a covariance="),
    "structure as std": (lambda: nm.Gaussian(F32, std=nm.Dense(EYE)), TypeError, "pass it as covariance="),
    "wrong factor": (
        lambda: nm.Gaussian(F32, nm.LowRank(torch.ones(4, 2))),
        ValueError,
        r"factor must have shape \(\.\.\., 3, r\)",
    ),
    "wrong low-rank diagonal": (
        lambda: nm.Gaussian(F32, nm.LowRank(torch.ones(3, 2), torch.ones(2))),
        ValueError,
        "LowRank diagonal must have shape",
    ),
    "wrong batch": (
        lambda: nm.Gaussian(torch.zeros(2, 3), nm.Dense(EYE.expand(4, 3, 3))),
        ValueError,
        r"batch shape must be \(2,\) or \(\)",
    ),
    "not square": (lambda: nm.Gaussian(F32, nm.Dense(torch.ones(3, 2))), ValueError, "square matrix"),
    "text covariance": (
        lambda: nm.Gaussian(F32, "isotropic"),
        TypeError,
        "covariance must be a torch tensor, got a str",
    ),
    "event_ndim": (lambda: nm.Gaussian(F32, std=1.0, event_ndim=2), ValueError, "event_ndim must be between 1 and"),
    "sample count": (lambda: NOISE.sample(0), ValueError, "count must be an integer of at least 1, got 0"),
    "low-rank variance that overflows": (
        lambda: nm.Gaussian(F32, nm.LowRank(torch.full((3, 1), 1e30))),
        ValueError,
        "variance must be finite",
    ),
    "empty batch": (lambda: nm.Gaussian(torch.zeros(0, 3), std=1.0), ValueError, "no empty batch"),
    "std too small": (lambda: nm.Gaussian(F32, std=1e-25), ValueError, "std is too small or too large for its square"),
    "std too large": (lambda: nm.Gaussian(F32, std=1e25), ValueError, "std is too small or too large for its square"),
    "isotropic of another dtype": (
        lambda: nm.Gaussian(F32, nm.Isotropic(torch.tensor(1.0, dtype=torch.float64), 3)),
        TypeError,
        "mean and variance must have one dtype",
    ),
    "isotropic of a number": (
        lambda: nm.Gaussian(F32, nm.Isotropic(0.1, 3)),
        TypeError,
        "variance must be a torch tensor",
    ),
    "low-rank number of another dtype": (
        lambda: nm.Gaussian(F32, nm.LowRank(torch.ones(3, 1), torch.tensor(0.2, dtype=torch.float64))),
        TypeError,
        "mean and diagonal must have one dtype",
    ),
    "affine nan": (lambda: NOISE.affine(torch.full((2, 3), math.nan)), ValueError, "matrix must be finite"),
    "affine dtypes": (lambda: NOISE.affine(torch.ones(2, 3), torch.ones(2).double()), TypeError, "must have one dtype"),
    "conversion that overflows": (
        lambda: nm.Gaussian(F32.double() + 1e300, std=1.0).to(torch.float32),
        ValueError,
        "Gaussian.to: mean must be finite",
    ),
    "offset": (
        lambda: NOISE.affine(torch.ones(2, 3), torch.ones(3)),
        ValueError,
        r"offset must have shape \(\.\.\., 2\)",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    call, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize("kind", ["isotropic", "mixed batches", "low rank"])
def test_entries_of_a_batch(kind):
    """Chosen entries of a Gaussian whose parts have their batch dimensions in different places."""
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    noise = {
        "isotropic": lambda: nm.Gaussian(normal(3, 4), std=0.3),
        "mixed batches": lambda: nm.Gaussian(normal(2, 3, 4), 1.0, event_ndim=1).affine(normal(2, 1, 4, 4)),
        "low rank": lambda: nm.Gaussian(normal(3, 4), nm.LowRank(normal(4, 2), normal(3, 4).square())),
    }[kind]()
    flat = noise.flattened()
    count = noise.batch_shape.numel()
    index = torch.tensor([count - 1, 0])
    dense = noise.covariance.dense().expand(*noise.batch_shape, 4, 4).reshape(count, 4, 4)
    chosen = flat.entries(index)
    assert_close(chosen.mean, noise.mean.reshape(count, 4)[index], atol=0)
    assert_close(chosen.covariance.dense().expand(2, 4, 4), dense[index], atol=1e-15)
    if len(noise.batch_shape) == 1:
        assert_close(noise.entries(index).covariance.dense().expand(2, 4, 4), dense[index], atol=1e-15)
    else:
        with pytest.raises(ValueError, match=r"one batch dimension is needed, got \(2, 3\)"):
            noise.entries(index)


SILENT = {
    "a variance": lambda: nm.Gaussian(torch.zeros(3), covariance=1e-60),
    "a deviation": lambda: nm.Gaussian(torch.zeros(3), std=1e-60),
    "a large variance": lambda: nm.Gaussian(torch.zeros(3), covariance=1e60),
    "a factor": lambda: nm.Gaussian(torch.zeros(3), covariance=nm.LowRank(torch.full((3, 1), 1e-30))),
    "a diagonal": lambda: nm.Gaussian(torch.zeros(3), covariance=nm.LowRank(torch.zeros(3, 1), 1e-60)),
    "a conversion": lambda: nm.Gaussian(torch.zeros(3).double(), covariance=1e-60).to(torch.float32),
    "one of a batch": lambda: nm.Gaussian(
        torch.zeros(2, 3), covariance=nm.LowRank(torch.tensor([1.0, 1e-30]).reshape(2, 1, 1).expand(2, 3, 1))
    ),
}


@pytest.mark.parametrize("case", SILENT)
def test_noise_does_not_vanish_silently(case):
    with pytest.raises(ValueError, match=r"too small .*use float64"):
        SILENT[case]()


def test_no_noise_at_all_and_a_vanishing_part_of_it_are_good_input():
    assert float(nm.Gaussian(torch.zeros(3), covariance=0.0).variance.max()) == 0
    assert float(nm.Gaussian(torch.zeros(3), covariance=nm.LowRank(torch.zeros(3, 1))).variance.max()) == 0
    factor = torch.tensor([[1.0], [1e-30], [0.0]])
    assert nm.Gaussian(torch.zeros(3), covariance=nm.LowRank(factor)).variance.tolist() == [1, 0, 0]
    tiny = nm.Gaussian(torch.zeros(3).double(), covariance=1e-60)
    assert float(tiny.variance[0]) == 1e-60


@pytest.mark.parametrize("name", ["std", "covariance"])
@pytest.mark.parametrize("value", [10**400, -(10**400), Fraction(10**400, 3)])
def test_numbers_beyond_floats(name, value):
    with pytest.raises(ValueError, match=f"Gaussian: {name} must be a finite number, got"):
        nm.Gaussian(torch.zeros(3), **{name: value})
    with pytest.raises(ValueError, match="LowRank diagonal must be a finite number"):
        nm.Gaussian(torch.zeros(3), covariance=nm.LowRank(torch.ones(3, 1), value))


def test_a_dense_form_of_a_factor_is_symmetric_to_the_bit():
    factor = torch.randn(50, 7, generator=torch.Generator().manual_seed(0))
    matrix = nm.LowRank(factor, 0.1).dense()
    assert torch.equal(matrix, matrix.mT)
