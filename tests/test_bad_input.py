"""Bad input: every case is an error of the right type that names the argument, what came, and what was wanted."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

import netmoments as nm

F32 = torch.zeros(3)
EYE = torch.eye(3)
NETWORK = nm.AffineReluAffine(torch.ones(4, 3), torch.zeros(4), torch.ones(2, 4), torch.zeros(2))
NOISE = nm.Gaussian(F32, std=1.0)


def network(A=(4, 3), c1=(4,), B=(2, 4), c2=(2,)) -> nm.AffineReluAffine:
    parts = (A, c1, B, c2)
    return nm.AffineReluAffine(*(x if isinstance(x, torch.Tensor) else torch.ones(x) for x in parts))


CASES: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    # Gaussian: values
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
    # Gaussian: shapes and types
    "no covariance": (lambda: nm.Gaussian(F32), ValueError, "either covariance= .* or std= .*, got neither"),
    "covariance and std": (lambda: nm.Gaussian(F32, 1.0, std=1.0), ValueError, "got both"),
    "scalar mean": (lambda: nm.Gaussian(torch.tensor(1.0), std=1.0), ValueError, "0 dimensions"),
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
    "sample count": (lambda: NOISE.sample(0), ValueError, "count must be a positive integer, got 0"),
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
    # kernels
    "mean of the wrong type": (
        lambda: nm.relu_mean(1.0, F32),
        TypeError,
        "relu_mean: mean must be a torch tensor, got 1.0",
    ),
    "integer std": (
        lambda: nm.relu_variance(F32, torch.ones(3, dtype=torch.int32)),
        TypeError,
        "std must be float32 or float64",
    ),
    "kernel shapes": (lambda: nm.relu_mean(F32, torch.ones(4)), ValueError, r"mean \(3,\), std \(4,\)"),
    "negative variance in a kernel": (lambda: nm.relu_covariance(F32, -EYE), ValueError, "must be ≥ 0"),
    "no units": (lambda: nm.relu_covariance(torch.zeros(0), torch.zeros(0, 0)), ValueError, "p ≥ 1"),
    "covariance shape": (
        lambda: nm.relu_covariance(F32, torch.eye(4)),
        ValueError,
        r"\(\.\.\., 3, 3\).*got .*\(4, 4\)",
    ),
    "kernel dtypes": (
        lambda: nm.relu_covariance(F32, EYE.double()),
        TypeError,
        "mean and covariance must have one dtype",
    ),
    "kernel batches": (
        lambda: nm.relu_covariance(torch.zeros(2, 3), EYE.expand(4, 3, 3)),
        ValueError,
        r"mean \(2,\), covariance \(4,\)",
    ),
    "nan in a kernel": (lambda: nm.relu_covariance(F32, EYE * math.nan + EYE), ValueError, "NaN"),
    "tiny budget": (lambda: nm.relu_covariance(F32, EYE, memory_budget=10), ValueError, "at least 65536, got 10"),
    "orthant shape": (lambda: nm.orthant_probability(F32, torch.eye(2)), ValueError, r"\(\.\.\., 3, 3\)"),
    # AffineReluAffine
    "A is a vector": (lambda: network(A=(4,)), ValueError, r"A must have shape \(\.\.\., p, n\)"),
    "no rows": (lambda: network(A=(0, 3), c1=(0,), B=(2, 0)), ValueError, "p, n ≥ 1"),
    "c1": (lambda: network(c1=(3,)), ValueError, r"c1 must have shape \(\.\.\., 4\)"),
    "B and A": (lambda: network(B=(2, 5)), ValueError, r"B must have shape \(\.\.\., d, 4\).*A has shape \(4, 3\)"),
    "c2": (lambda: network(c2=(3,)), ValueError, r"c2 must have shape \(\.\.\., 2\)"),
    "batches": (lambda: network(A=(5, 4, 3), B=(6, 2, 4)), ValueError, r"A \(5,\).*B \(6,\)"),
    "weights' dtype": (lambda: network(B=torch.ones(2, 4).double()), TypeError, "A and B must have one dtype"),
    "integer weights": (
        lambda: network(A=torch.ones(4, 3, dtype=torch.int64)),
        TypeError,
        "A must be float32 or float64",
    ),
    "nan weights": (
        lambda: network(B=torch.full((2, 4), math.nan)),
        ValueError,
        "AffineReluAffine: B must be finite, got 8 NaN",
    ),
    "infinite offset": (lambda: network(c2=torch.full((2,), math.inf)), ValueError, "c2 must be finite"),
    "noise is a tensor": (lambda: NETWORK.mean(F32), TypeError, "noise must be a netmoments.Gaussian"),
    "noise size": (
        lambda: NETWORK.mean(nm.Gaussian(torch.zeros(5), std=1.0)),
        ValueError,
        r"A must have shape \(\.\.\., p, 5\).*got .*\(4, 3\)",
    ),
    "image noise size": (
        lambda: NETWORK.mean(nm.Gaussian(torch.zeros(1, 2, 2), std=1.0)),
        ValueError,
        r"event shape \(1, 2, 2\)",
    ),
    "noise dtype": (
        lambda: NETWORK.variance(nm.Gaussian(F32.double(), std=1.0)),
        TypeError,
        r"noise\.to\(torch\.float32\)",
    ),
    "noise batch": (
        lambda: network(A=(5, 4, 3)).covariance(nm.Gaussian(torch.zeros(2, 3), std=1.0)),
        ValueError,
        "broadcast",
    ),
    "offset": (
        lambda: NOISE.affine(torch.ones(2, 3), torch.ones(3)),
        ValueError,
        r"offset must have shape \(\.\.\., 2\)",
    ),
    "calling with other sizes": (lambda: NETWORK(torch.ones(5)), ValueError, r"x must have shape \(\.\.\., 3\)"),
    "empty batch of kernels": (lambda: nm.relu_covariance(torch.zeros(0, 3), EYE), ValueError, "must not be empty"),
    # sampling and the paper
    "seed": (lambda: nm.monte_carlo(NETWORK, NOISE, 10, seed=-1), ValueError, "seed must be an integer of at least 0"),
    "not a function": (lambda: nm.monte_carlo(3.0, NOISE, 10), TypeError, "function must be callable, got 3.0"),
    "nan difference": (lambda: nm.relative_difference(F32, F32 * math.nan), ValueError, "y must be finite"),
    "difference of shapes": (lambda: nm.relative_difference(F32, torch.ones(2)), ValueError, "shapes must broadcast"),
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
    "no terms": (
        lambda: nm.paper.relu_cross_moment_series(F32, F32, F32, F32, F32, terms=0),
        ValueError,
        "terms must be a positive integer, got 0",
    ),
    "odd Price": (lambda: nm.paper.price_theorem_sides(torch.add, F32, EYE), ValueError, "p even"),
    "difference of lists": (lambda: nm.relative_difference([1.0], F32), TypeError, "x must be a torch tensor"),
}


@pytest.mark.parametrize("case", list(CASES))
def test_bad_input(case):
    call, kind, message = CASES[case]
    with pytest.raises(kind, match=message):
        call()
