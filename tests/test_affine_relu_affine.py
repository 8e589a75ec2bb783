"""(Affine, ReLU, Affine): against the dense kernel, Monte Carlo and finite differences, in every arrangement."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

import netmoments as nm
from netmoments.experiments.engine import random_network
from tests.closeness import assert_close, assert_within_standard_errors
from tests.test_gaussian import KINDS, SIZE, structures


def dense_covariance(network: nm.AffineReluAffine, noise: nm.Gaussian) -> Tensor:
    """B K Bᵀ with everything stored: the dense twin."""
    mean = (network.A @ noise.flat_mean.unsqueeze(-1)).squeeze(-1) + network.c1
    pushed = network.A @ noise.covariance.dense() @ network.A.mT
    return network.B @ nm.relu_covariance(mean, 0.5 * (pushed + pushed.mT)) @ network.B.mT


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_its_dense_twin(kind, batch):
    noise = structures(batch)[kind]
    network = random_network(SIZE, 11, 3, seed=1)
    expected = dense_covariance(network, noise).expand(*batch, 3, 3)
    assert_close(network.covariance(noise), expected, atol=2e-15 * max(1, float(expected.max())) * 11)
    assert_close(
        network.variance(noise), expected.diagonal(dim1=-2, dim2=-1), atol=2e-14 * max(1, float(expected.max()))
    )
    assert network.mean(noise).shape == (*batch, 3)


def test_one_network_an_image():
    noise = structures((4,))["dense"]
    networks = [random_network(SIZE, 8, 2, seed=i) for i in range(4)]
    together = nm.AffineReluAffine(
        *(torch.stack([getattr(n, part) for n in networks]) for part in ("A", "c1", "B", "c2"))
    )
    for i, network in enumerate(networks):
        alone = nm.Gaussian(noise.mean[i], nm.Dense(noise.covariance.dense()[i]))
        assert_close(together.mean(noise)[i], network.mean(alone), atol=1e-15)
        assert_close(together.variance(noise)[i], network.variance(alone), atol=1e-14)
        assert_close(together.covariance(noise)[i], network.covariance(alone), atol=1e-14)
    same_noise = nm.Gaussian(noise.mean[0], std=0.3)
    assert_close(together.variance(same_noise)[2], networks[2].variance(same_noise), atol=1e-14)
    half_batched = nm.AffineReluAffine(together.A, networks[0].c1, networks[0].B, together.c2)
    expected = nm.AffineReluAffine(networks[3].A, networks[0].c1, networks[0].B, networks[3].c2).variance(same_noise)
    assert_close(half_batched.variance(same_noise)[3], expected, atol=1e-14)


def test_images_are_flattened():
    network = random_network(12, 5, 2, seed=2)
    image = torch.randn(3, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    flat = network.variance(nm.Gaussian(image.flatten(), std=0.1))
    assert_close(network.variance(nm.Gaussian(image, std=0.1)), flat, atol=0)
    assert network.mean(nm.Gaussian(image.expand(7, 3, 2, 2), std=0.1)).shape == (7, 2)


@pytest.mark.parametrize("kind", ["isotropic", "low rank plus diagonal", "dense and singular"])
def test_seeded_monte_carlo(kind):
    noise = structures((2,))[kind]
    network = random_network(SIZE, 40, 3, seed=3)
    sampled = nm.monte_carlo(network, noise, samples=300_000, seed=5)
    assert_within_standard_errors(sampled.mean, network.mean(noise), sampled.mean_standard_error)
    assert_within_standard_errors(sampled.variance, network.variance(noise), sampled.variance_standard_error)
    assert_within_standard_errors(sampled.covariance, network.covariance(noise), sampled.covariance_standard_error)


def parameters(batch: tuple[int, ...] = ()) -> list[Tensor]:
    network = random_network(4, 7, 2, seed=4)
    generator = torch.Generator().manual_seed(2)
    extra = [torch.randn(*batch, 4, dtype=torch.float64, generator=generator)]
    return [x.clone().requires_grad_() for x in (network.A, network.c1, network.B, network.c2, *extra)]


@pytest.mark.parametrize("batch", [(), (3,)])
def test_gradients_to_everything(batch):
    generator = torch.Generator().manual_seed(3)
    factor = torch.randn(4, 2, dtype=torch.float64, generator=generator, requires_grad=True)
    diagonal = torch.rand(4, dtype=torch.float64, generator=generator, requires_grad=True)

    def covariance(A, c1, B, c2, mean, factor, diagonal):
        return nm.AffineReluAffine(A, c1, B, c2).covariance(nm.Gaussian(mean, nm.LowRank(factor, diagonal)))

    def mean_and_variance(A, c1, B, c2, mean, factor):
        noise = nm.Gaussian(mean, nm.Dense(factor @ factor.mT))
        network = nm.AffineReluAffine(A, c1, B, c2)
        return network.mean(noise), network.variance(noise)

    assert gradcheck(covariance, (*parameters(batch), factor, diagonal), atol=1e-7)
    assert gradcheck(mean_and_variance, (*parameters(batch), factor), atol=1e-7)


def test_gradient_to_an_isotropic_variance_that_is_zero():
    """At zero noise dVar/dσ² is the squared norm of the slope: finite and right, though σ itself has none."""
    A, c1, B, c2, mean = (x.detach() for x in parameters())
    network = nm.AffineReluAffine(A, c1, B, c2)
    variance = torch.zeros((), dtype=torch.float64, requires_grad=True)
    output = network.variance(nm.Gaussian(mean, variance))
    slope = torch.func.jacrev(network)(mean)
    for i in range(2):
        (gradient,) = torch.autograd.grad(output[i], variance, retain_graph=True)
        assert_close(gradient, slope[i].square().sum(), rtol=1e-14)
    (by_mean,) = torch.autograd.grad(network.mean(nm.Gaussian(mean, variance)).sum(), variance)
    assert by_mean.item() == 0


def test_unused_units_are_skipped_but_not_for_the_gradient_in_b():
    A, c1, B, c2, mean = (x.detach() for x in parameters())
    B[:, [1, 4]] = 0
    noise = nm.Gaussian(mean, std=0.4)
    live = [0, 2, 3, 5, 6]
    pruned = nm.AffineReluAffine(A[live], c1[live], B[:, live], c2)
    assert_close(nm.AffineReluAffine(A, c1, B, c2).variance(noise), pruned.variance(noise), atol=1e-15)
    variance = lambda B: nm.AffineReluAffine(A, c1, B, c2).variance(noise)  # noqa: E731
    assert gradcheck(variance, (B.clone().requires_grad_(),), atol=1e-7)
    expected = torch.autograd.functional.jacobian(lambda B: variance(B).sum(), B)
    assert expected[:, 1].abs().max() > 1e-3
    summed = torch.func.grad(lambda many: torch.func.vmap(variance)(many).sum())(torch.stack([B, B]))
    assert_close(summed[1], expected, atol=1e-14)


def test_functional_transforms():
    A, c1, B, c2, mean = (x.detach() for x in parameters((3,)))

    def variance(A: Tensor, mean: Tensor) -> Tensor:
        return nm.AffineReluAffine(A, c1, B, c2).variance(nm.Gaussian(mean, std=0.5))

    assert_close(torch.func.vmap(variance, in_dims=(None, 0))(A, mean), variance(A, mean), atol=1e-15)
    jacobian = torch.func.jacrev(variance, argnums=(0, 1))(A, mean[0])
    expected = torch.autograd.functional.jacobian(variance, (A, mean[0]))
    assert_close(jacobian[0], expected[0], atol=1e-14)
    assert_close(jacobian[1], expected[1], atol=1e-14)
    each = torch.func.vmap(torch.func.jacrev(variance, argnums=1), in_dims=(None, 0))(A, mean)
    assert_close(each[0], expected[1], atol=1e-14)


@pytest.mark.parametrize("memory_budget", [2**16, 2**22])
def test_the_memory_budget_changes_nothing(memory_budget):
    network = random_network(20, 300, 4, seed=6)
    A = network.A.clone().requires_grad_()
    noise = nm.Gaussian(torch.zeros(5, 20, dtype=torch.float64), std=0.3)
    varied = nm.AffineReluAffine(A, network.c1, network.B, network.c2)
    reference = varied.variance(noise)
    value = varied.variance(noise, memory_budget=memory_budget)
    assert_close(value, reference, rtol=1e-13)
    (gradient,) = torch.autograd.grad(value.sum(), A)
    (expected,) = torch.autograd.grad(reference.sum(), A)
    assert_close(gradient, expected, atol=1e-13)


def test_small_noise_in_float32():
    """Means of order 1, noise 0.01, 1024 units: E[g²] − E[g]² would leave nothing of it in float32."""
    generator = torch.Generator().manual_seed(7)
    network = random_network(100, 1024, 10, seed=8)
    network = nm.AffineReluAffine(
        network.A, torch.randn(1024, dtype=torch.float64, generator=generator), network.B, network.c2
    )
    noise = nm.Gaussian(torch.randn(100, dtype=torch.float64, generator=generator), std=0.01)
    single, single_noise = network.to(torch.float32), noise.to(torch.float32)
    exact = single.to(torch.float64).variance(single_noise.to(torch.float64))
    assert_close(single.variance(single_noise), exact, rtol=1e-5)
    series = nm.paper.variance_series(single, single_noise, terms=5).double()
    assert float((series / exact - 1).abs().max()) > 1e-3  # what the paper's way of writing it costs


def test_batches_of_one_and_of_shared_factors_agree_in_float32():
    network = random_network(30, 64, 5, seed=9, dtype=torch.float32)
    noise = nm.Gaussian(torch.randn(20, 30, generator=torch.Generator().manual_seed(0)), std=0.2)
    together = network.variance(noise)
    for i in (0, 7, 19):
        assert_close(network.variance(nm.Gaussian(noise.mean[i], std=0.2)), together[i].double(), rtol=1e-5)
