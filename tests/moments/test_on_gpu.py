"""Every method on a CUDA device: near samples, within its memory, winners and sampling as on the CPU."""

from __future__ import annotations

import pytest
import torch

import netmoments as nm
from netmoments.moments.class_probabilities import winning_probabilities
from tests.closeness import assert_within_standard_errors
from tests.gpu import NEEDS_CUDA, tf32_allowed

pytestmark = [pytest.mark.gpu, NEEDS_CUDA]


@pytest.fixture(autouse=True)
def _tf32():
    with tf32_allowed():
        yield


@pytest.fixture(scope="module")
def lenet():
    return nm.zoo.pretrained("lenet").cuda()


def test_the_first_relu_of_lenet_has_moments(lenet):
    image = torch.rand(1, 28, 28, generator=torch.Generator().manual_seed(2)).cuda()
    noise = nm.Gaussian(image, std=0.05)
    moments = nm.output_moments(lenet, noise, nm.TwoStage(0))
    g = nm.two_stage(lenet, image, 0)
    sampled = nm.monte_carlo(g, noise, 20_000)
    assert g.A.shape == (6272, 784)
    assert float(moments.compare(sampled).mean.abs().max()) < 5
    assert float(moments.compare(sampled).variance.abs().max()) < 5


def test_every_method(lenet):
    images = torch.rand(5, 1, 28, 28, generator=torch.Generator().manual_seed(3)).cuda()
    noise = nm.Gaussian(images, std=0.01)
    sampled = nm.output_moments(lenet, noise, nm.Sampling(20_000), 3)
    for method in ("auto", "layerwise", "sketch", "two-stage", "linear"):
        moments = nm.output_moments(lenet, noise, method, 3)
        assert moments.mean.is_cuda
        assert float(nm.relative_difference(moments.variance.double(), sampled.variance).mean()) < 0.1
        chances = moments.class_probabilities()
        assert chances.is_cuda
        torch.testing.assert_close(chances.sum(-1), torch.ones_like(chances[..., 0]))


def test_winning_probabilities_are_the_same_as_on_the_cpu():
    generator = torch.Generator().manual_seed(4)
    mean = torch.randn(20, 10, generator=generator, dtype=torch.float64)
    factor = torch.randn(20, 10, 10, generator=generator, dtype=torch.float64)
    covariance = factor @ factor.mT
    here = winning_probabilities(mean, covariance)
    there = winning_probabilities(mean.cuda(), covariance.cuda()).cpu()
    torch.testing.assert_close(here, there, rtol=1e-6, atol=1e-15)


def test_memory_of_a_batch_stays_within_its_budget(lenet):
    images = torch.rand(64, 1, 28, 28, generator=torch.Generator().manual_seed(7)).cuda()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    budget = 256 * 2**20
    nm.output_moments(lenet, nm.Gaussian(images, std=0.05), "two-stage", memory_budget=budget)
    jacobians = 2 * 64 * 1024 * 784 * 4  # A of all images, and their Gaussian's factors, were they held together
    tiles = 2**30
    assert torch.cuda.max_memory_allocated() - before < min(jacobians, 2 * budget) + tiles


def test_sampling():
    network = nm.AffineReluAffine(
        torch.ones(5, 3).cuda(), torch.zeros(5).cuda(), torch.ones(2, 5).cuda(), torch.zeros(2).cuda()
    )
    noise = nm.Gaussian(torch.zeros(4, 3), std=0.3).to("cuda")
    sampled = nm.monte_carlo(network, noise, samples=100_000, seed=1)
    assert sampled.mean.device.type == "cuda"
    assert_within_standard_errors(sampled.mean, network.mean(noise), sampled.mean_standard_error)
    assert_within_standard_errors(sampled.variance, network.variance(noise), sampled.variance_standard_error)
