"""Structures of covariances against their dense twins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import netmoments as nm
from netmoments.covariances import Blocks
from tests.closeness import assert_close
from tests.gaussians import KINDS, SIZE, structures
from tests.networks import seeded

CONTROLLED = nm.Sampling(4000, control="sketch")


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


@pytest.mark.parametrize("kind", KINDS)
def test_the_dense_form_is_that_of_the_identity_pushed(kind):
    """However a structure makes it: A Σ Aᵀ for A = I; and so are its derivatives."""
    covariance = structures((2,))[kind].covariance
    tensors = [x.detach().clone().requires_grad_() for x in covariance.tensors()]
    made = covariance.with_tensors(tensors)
    pushed = made.push(torch.eye(SIZE, dtype=torch.float64))
    assert_close(made.dense(), pushed, atol=1e-14)
    weights = torch.randn(pushed.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights = weights + weights.mT
    for one, other in zip(
        torch.autograd.grad((weights * made.dense()).sum(), tensors),
        torch.autograd.grad((weights * pushed).sum(), tensors),
        strict=True,
    ):
        assert_close(one, other, atol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_a_structure_with_other_numbers(kind):
    """Those of its own give itself, twice those twice the noise, or of a factor four times; a number is one of them."""
    own = structures((3,))[kind].covariance
    for covariance in (own, Blocks((own, nm.Isotropic(torch.tensor(0.5, dtype=torch.float64), 2)))):
        numbers = covariance.tensors()
        assert torch.equal(covariance.with_tensors(numbers).dense(), covariance.dense())
        moved = covariance.with_tensors([2 * x for x in numbers])
        assert moved.structure == covariance.structure
        factor = own.factor if isinstance(own, nm.LowRank) else torch.zeros(SIZE, 1, dtype=torch.float64)
        expected = 2 * covariance.dense()
        expected[..., :SIZE, :SIZE] += 2 * factor @ factor.mT
        assert_close(moved.dense(), expected, atol=1e-14)


def test_blocks_are_a_block_diagonal_covariance():
    """Whatever is asked of a structure, against the dense matrix."""
    generator = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    parts = (
        nm.Diagonal(normal(2, 4) ** 2),
        nm.LowRank(normal(9, 2), 0.01),
        nm.Isotropic(torch.tensor(0.3, dtype=torch.float64), 3),
    )
    blocks = Blocks(parts)
    assert (blocks.size, blocks.batch_shape) == (16, (2,))
    dense = torch.stack(
        [torch.block_diag(*(p.entries(i).dense() if p.batch_shape else p.dense() for p in parts)) for i in range(2)]
    )
    assert_close(blocks.dense(), dense, atol=1e-14)
    assert_close(blocks.variances(), dense.diagonal(dim1=1, dim2=2), atol=1e-14)
    A = normal(5, 16)
    assert_close(blocks.push(A), A @ dense @ A.T, atol=1e-13)
    assert_close(blocks.push_diagonal(A), (A @ dense @ A.T).diagonal(dim1=1, dim2=2), atol=1e-13)
    assert_close(blocks.times(A), A @ dense, atol=1e-13)
    root = blocks.root()
    assert root.shape == (2, 16, blocks.rank)
    assert_close(root @ root.mT, dense, atol=1e-14)
    one = blocks.entries(torch.tensor([1]))
    assert_close(one.dense(), dense[1:], atol=1e-14)
    assert blocks.to(torch.float32).dense().dtype == torch.float32
    drawn = blocks.draw((40_000, 2), torch.Generator().manual_seed(1))
    sampled = drawn.movedim(0, 2) @ drawn.movedim(0, 1) / 40_000
    # an entry's standard error is at most √2 times the product of the deviations, over √samples
    scale = dense.diagonal(dim1=1, dim2=2).sqrt()
    assert (
        float(((sampled - dense) / (scale.unsqueeze(-1) * scale.unsqueeze(-2))).abs().max()) < 6 * (2 / 40_000) ** 0.5
    )


@dataclass(frozen=True, eq=False)
class Tied(nm.Covariance):
    """Noise of a user's own kind: neighbours share what varies, x₂ᵢ = x₂ᵢ₊₁, with variances (..., pairs)."""

    shared: Tensor
    note: str = "tied"
    kept_dimensions: ClassVar[dict[str, int]] = {"shared": 1}

    @property
    def size(self) -> int:
        return 2 * self.shared.shape[-1]

    @property
    def batch_shape(self) -> torch.Size:
        return self.shared.shape[:-1]

    def variances(self) -> Tensor:
        return self.shared.repeat_interleave(2, -1)

    def coloured(self, white: Tensor) -> Tensor:
        return (white[..., ::2] * self.shared.sqrt()).repeat_interleave(2, -1)

    def times(self, matrix: Tensor) -> Tensor:
        sums = matrix.unflatten(-1, (-1, 2)).sum(-1)
        return (sums * self.shared.unsqueeze(-2)).repeat_interleave(2, -1)

    def root(self) -> Tensor:
        return torch.diag_embed(self.shared.sqrt()).repeat_interleave(2, -2)

    @property
    def rank(self) -> int:
        return self.shared.shape[-1]


def tied(*batch: int) -> Tied:
    generator = torch.Generator().manual_seed(5)
    return Tied(0.01 + 0.1 * torch.rand(*batch, 3, dtype=torch.float64, generator=generator))


@pytest.mark.parametrize("method", ["auto", "layerwise", "sketch", "two-stage", "linear", "sampling", CONTROLLED])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_a_covariance_of_the_users_own_kind_goes_through_every_method(method, batch):
    """As its dense twin does: exactly by formulas, within standard errors by samples."""
    network = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 2)))
    mean = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(2, 6)[: 2 if batch else 1].reshape(*batch, 6)
    own = nm.Gaussian(mean, tied(*batch))
    twin = nm.Gaussian(mean, nm.Dense(own.covariance.dense()))
    found, expected = (nm.output_moments(network, noise, method) for noise in (own, twin))
    if method in ("layerwise", "two-stage", "linear"):
        assert_close(found.mean, expected.mean, atol=1e-12)
        assert_close(found.variance, expected.variance, rtol=1e-3)  # layers as squares are exact, as rows nearly
    else:
        for name in ("mean", "variance"):
            error = torch.hypot(getattr(found.error, name), getattr(expected.error, name))
            difference = getattr(found, name) - getattr(expected, name)
            assert bool((difference.abs() <= 5 * error + 1e-9).all()), name


def test_a_covariance_of_the_users_own_kind_is_converted_checked_and_divided():
    noise = nm.Gaussian(torch.zeros(2, 6, dtype=torch.float64), tied(2))
    assert noise.to(torch.float32).covariance.shared.dtype == torch.float32
    assert noise.entries(slice(1, 2)).covariance.shared.shape == (1, 3)
    assert nm.flip_probability(seeded(lambda: nn.Linear(6, 3)), noise).probability.shape == (2,)
    with pytest.raises(TypeError, match=r"must have one dtype, got torch.float32 and torch.float64"):
        nm.Gaussian(torch.zeros(6), tied())
    with pytest.raises(ValueError, match=r"variance must be ≥ 0 everywhere, got a smallest value of -1"):
        nm.Gaussian(torch.zeros(6, dtype=torch.float64), Tied(torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64)))


def test_a_structure_that_could_not_be_copied_is_refused():
    class Plain(Tied):
        """Its tensor is in no field that is declared."""

        kept_dimensions: ClassVar[dict[str, int]] = {}

    with pytest.raises(TypeError, match=r"Plain.kept_dimensions must name every tensor .* shared is missing"):
        nm.Gaussian(torch.zeros(6), Plain(torch.ones(3)))
