"""Every method on a CUDA device: near samples, within its memory, winners and sampling as on the CPU, float16."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import netmoments as nm
from netmoments.moments.contests import winning_probabilities
from netmoments.network.model import NetworkModel
from netmoments.sampling.fast_network import half_network
from netmoments.sampling.monte_carlo import SampledMoments
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


# as many samples as a tolerance needs


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.GRU(8, 16, batch_first=True), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.cell(x)
        return self.last(states[:, -1])


def assert_unbiased(found: nm.OutputMoments, reference: SampledMoments) -> None:
    """Means and variances within 5 standard errors of both."""
    for name in ("mean", "variance"):
        off = getattr(found, name).double() - getattr(reference, name)
        error = (getattr(found.error, name).double() ** 2 + getattr(reference, f"{name}_standard_error") ** 2).sqrt()
        assert float((off / error).abs().max()) < 5, name


def wide() -> nn.Module:
    """Convolutions that are large enough for half precision to be worth it."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 128, 3, padding=1), nn.BatchNorm2d(128), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Conv2d(128, 128, 3, padding=1), nn.BatchNorm2d(128), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)).cuda().eval()


def wide_noise(*batch: int) -> nm.Gaussian:
    mean = torch.rand(*batch, 3, 32, 32, generator=torch.Generator().manual_seed(1)).cuda()
    return nm.Gaussian(mean, std=0.2, event_ndim=3)


def test_half_precision_is_used_where_it_is_faster_and_corrected():
    """Eight seeds of samples in float16 against 40 000 plain ones in float32: unbiased, on average too."""
    net, given = wide(), wide_noise()
    half = half_network(NetworkModel.of_any(net, given.mean.unsqueeze(0), "test"))
    assert half is not None
    assert half.dtype == torch.float16
    reference = nm.monte_carlo(net, given, 40_000, seed=9)
    runs = [nm.output_moments(net, given, nm.Auto(0.02, seed=seed)) for seed in range(8)]
    for found in runs:
        assert found.mean.dtype == torch.float32
        assert found.met
        assert_unbiased(found, reference)
    mean, error = (torch.stack(xs).double() for xs in ([r.mean for r in runs], [r.error.mean for r in runs]))
    together = (error.square().mean(0) / 8 + reference.mean_standard_error**2).sqrt()
    assert float(((mean.mean(0) - reference.mean) / together).abs().max()) < 5


def test_half_precision_is_not_used_for_double():
    net = wide().double()
    assert half_network(NetworkModel.of_any(net, wide_noise().mean.double().unsqueeze(0), "test")) is None


class Huge(nn.Module):
    """Activations beyond 65504, the largest number of float16, and scores of about 1."""

    def __init__(self) -> None:
        super().__init__()
        self.net = wide()

    def forward(self, x: Tensor) -> Tensor:
        return self.net[1:](1e6 * self.net[0](x)) * 1e-6


def test_what_float16_cannot_hold_is_done_in_float32_and_said():
    net, given = Huge().cuda().eval(), wide_noise()
    found = nm.output_moments(net, given, tolerance=0.02)
    assert bool(torch.isfinite(found.mean).all())
    assert bool(torch.isfinite(found.error.covariance).all())
    assert found.met
    if half_network(NetworkModel.of_any(net, given.mean.unsqueeze(0), "test")) is not None:
        assert found.reason.endswith(", in float32 as float16 overflowed")
    assert_unbiased(found, nm.monte_carlo(net, given, 40_000, seed=9))


def test_a_recurrent_network():
    """Whose derivatives cuDNN refuses in eval mode."""
    torch.manual_seed(1)
    net = Recurrent().cuda().eval()
    given = nm.Gaussian(torch.rand(4, 12, 8, generator=torch.Generator().manual_seed(1)).cuda(), std=1.0, event_ndim=2)
    found = nm.output_moments(net, given, tolerance=0.02)
    assert "slopes" in found.reason
    assert_unbiased(found, nm.monte_carlo(net, given, 40_000, seed=9))


def test_sixteen_inputs_together(lenet):
    """Each as by itself: within 5 standard errors of both; and again, from what was recorded the first time."""
    images = torch.rand(16, 1, 28, 28, generator=torch.Generator().manual_seed(5)).cuda()
    given = nm.Gaussian(images, nm.Isotropic(torch.linspace(0.02, 0.5, 16).cuda() ** 2, 784))
    together = nm.output_moments(lenet, given, tolerance=0.02)
    assert together.reached.shape == (16,)
    assert bool((together.reached <= 0.02).all())
    assert_unbiased(together, nm.monte_carlo(lenet, given, 20_000, seed=9))
    for seed in (0, 1, 0):
        again = nm.output_moments(lenet, given, nm.Auto(0.02, seed=seed))
        off = (again.mean - together.mean).abs() / (again.error.mean + together.error.mean)
        assert float(off.max()) < (1 if seed == 0 else 5)  # the same samples, but for kernels that round otherwise
    alone = nm.output_moments(
        lenet, nm.Gaussian(images[3], std=float(torch.linspace(0.02, 0.5, 16)[3])), tolerance=0.02
    )
    off = (alone.mean - together.mean[3]).abs() / (alone.error.mean + together.error.mean[3])
    assert float(off.max()) < 5


def test_limits_bind(lenet):
    given = nm.Gaussian(torch.rand(3, 1, 28, 28, generator=torch.Generator().manual_seed(5)).cuda(), std=0.3)
    found = nm.output_moments(lenet, given, tolerance=1e-5, samples=5000)
    assert found.stopped == "the limit of 5,000 samples"
    assert found.samples <= 5000 + 2 * 512 + 16  # and the pairs of a correction, and points for slopes


def test_new_weights_are_sampled_not_the_recorded_ones(lenet):
    net = copy.deepcopy(lenet)
    given = nm.Gaussian(torch.rand(1, 28, 28, generator=torch.Generator().manual_seed(5)).cuda(), std=0.1)
    before = [nm.output_moments(net, given, tolerance=0.02) for _ in range(3)][-1]
    with torch.no_grad():
        for parameter in list(net.parameters())[-2:]:
            parameter *= 3
    after = nm.output_moments(net, given, tolerance=0.02)
    assert float(((after.mean - 3 * before.mean) / (after.error.mean + 3 * before.error.mean)).abs().max()) < 5
    ratio = after.variance / (9 * before.variance)
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=0.3)
