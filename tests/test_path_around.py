"""The path around the ReLU of an `AffineReluAffine`, D: against the dense formula, and a network without it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

import netmoments as nm
from tests.closeness import assert_close
from tests.gaussians import KINDS, SIZE, structures
from tests.networks import random_network
from tests.test_affine_relu_affine import dense_covariance


def with_path(network: nm.AffineReluAffine, seed: int = 8) -> nm.AffineReluAffine:
    shape = (*network.batch_shape, network.B.shape[-2], network.A.shape[-1])
    D = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return nm.AffineReluAffine(network.A, network.c1, network.B, network.c2, D)


def augmented(g: nm.AffineReluAffine, shift: float = 60.0) -> nm.AffineReluAffine:
    """The same without a path around: x = relu(x + shift) − shift where x + shift is never negative."""
    assert g.D is not None
    eye, n = torch.eye(g.A.shape[-1], dtype=torch.float64), g.A.shape[-1]
    return nm.AffineReluAffine(
        torch.cat([g.A, eye]),
        torch.cat([g.c1, torch.full((n,), shift, dtype=torch.float64)]),
        torch.cat([g.B, g.D], 1),
        g.c2 - shift * g.D.sum(1),
    )


def dense_with_path(g: nm.AffineReluAffine, noise: nm.Gaussian) -> Tensor:
    """B K Bᵀ + B diag(Φ) A Σ Dᵀ + its transpose + D Σ Dᵀ, as Cov(x, relu(z)) = Cov(x, z)Φ; Φ(0) = ½ for variance 0."""
    assert g.D is not None
    covariance = noise.covariance.dense()
    pushed = g.A @ covariance @ g.A.mT
    mean = (g.A @ noise.flat_mean.unsqueeze(-1)).squeeze(-1) + g.c1
    s = pushed.diagonal(dim1=-2, dim2=-1).clamp(min=1e-300).sqrt()
    cross = g.B @ (torch.special.ndtr(mean / s).unsqueeze(-1) * (g.A @ covariance)) @ g.D.mT
    return dense_covariance(g, noise) + cross + cross.mT + g.D @ covariance @ g.D.mT


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_path_around_against_the_dense_formula_and_an_augmented_network(kind, batch):
    """Rounding: the augmented network carries means of 60 where the others have 1, so 1e-14·60 a term."""
    noise = structures(batch)[kind]
    g = with_path(random_network(SIZE, 11, 3, seed=1))
    twin = augmented(g)
    expected = dense_with_path(g, noise).expand(*batch, 3, 3)
    size = max(1.0, float(expected.abs().max()))
    assert_close(g.covariance(noise), expected, atol=1e-13 * size)
    assert_close(g.variance(noise), expected.diagonal(dim1=-2, dim2=-1), atol=1e-13 * size)
    assert_close(g.covariance(noise), twin.covariance(noise), atol=1e-12 * size)
    assert_close(g.mean(noise), twin.mean(noise), atol=1e-11)
    x = noise.sample(4, generator=torch.Generator().manual_seed(1))
    assert_close(g(x), twin(x), atol=1e-11)


def test_gradients_in_d():
    noise = structures()["dense"]
    g = with_path(random_network(SIZE, 5, 2, seed=2))
    assert g.D is not None

    def moments(D: Tensor) -> tuple[Tensor, ...]:
        network = nm.AffineReluAffine(g.A, g.c1, g.B, g.c2, D)
        return network.mean(noise), network.variance(noise), network.covariance(noise)

    assert gradcheck(moments, (g.D.clone().requires_grad_(),))


def test_d_goes_along():
    """Conversion, batches, choices of outputs and of entries; float32."""
    g = with_path(random_network(SIZE, 5, 3, seed=2))
    assert g.D is not None
    batch = nm.AffineReluAffine(g.A, g.c1, g.B, g.c2, g.D.expand(4, -1, -1))
    assert batch.batch_shape == (4,)
    noise = nm.Gaussian(torch.zeros(SIZE, dtype=torch.float64), std=0.5)
    assert_close(batch.variance(noise), g.variance(noise).expand(4, -1), atol=1e-14)
    assert_close(g.outputs(torch.tensor([2, 0])).covariance(noise), g.covariance(noise)[[2, 0]][:, [2, 0]], atol=1e-15)
    assert_close(g.outputs(torch.tensor([[2], [0]])).mean(noise), g.mean(noise)[[2, 0]].unsqueeze(1), atol=1e-15)
    single = g.to(torch.float32)
    assert single.D is not None
    assert single.D.dtype == torch.float32
    assert_close(single.variance(noise.to(torch.float32)), g.variance(noise), rtol=1e-5)


BAD_D: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "transposed": (lambda: ones_with(torch.ones(3, 2)), ValueError, r"D must have shape \(\.\.\., 2, 3\), from inputs"),
    "a vector": (lambda: ones_with(torch.ones(3)), ValueError, r"D must have shape"),
    "another dtype": (lambda: ones_with(torch.ones(2, 3).double()), TypeError, r"A and D must have one dtype"),
    "a list": (lambda: ones_with([[1.0]]), TypeError, r"D must be a torch tensor, got a list"),
    "not finite": (lambda: ones_with(torch.full((2, 3), torch.inf)), ValueError, r"D must be finite, got 6"),
    "another batch": (
        lambda: nm.AffineReluAffine(
            torch.ones(5, 4, 3), torch.ones(4), torch.ones(2, 4), torch.ones(2), torch.ones(7, 2, 3)
        ),
        ValueError,
        r"shapes must broadcast, got A \(5,\), .*D \(7,\)",
    ),
}


def ones_with(D) -> nm.AffineReluAffine:
    return nm.AffineReluAffine(torch.ones(4, 3), torch.ones(4), torch.ones(2, 4), torch.ones(2), D)


@pytest.mark.parametrize("case", BAD_D)
def test_bad_paths_around(case):
    call, error, message = BAD_D[case]
    with pytest.raises(error, match=message):
        call()
