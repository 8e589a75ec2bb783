"""Propagation on a CUDA device: agreement with the CPU, derivatives, batches, recordings and their replay."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import netmoments as nm
from netmoments.propagate.replay import replayed
from tests.gpu import NEEDS_CUDA, tf32_allowed

pytestmark = [pytest.mark.gpu, NEEDS_CUDA]


@pytest.fixture(autouse=True)
def _tf32():
    with tf32_allowed():
        yield


class Skip(nn.Module):
    """For (1, 12, 12) images."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.last = nn.Linear(4 * 36, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        y = torch.relu(y + self.second(y))
        return self.last(functional.max_pool2d(y, 2).flatten(1))


def pooled() -> nn.Module:
    """For (1, 12, 12) images, with pools of 2×2 and of overlapping 3×3."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(6, 8, 3, padding=1), nn.MaxPool2d(3, 2, 1),
        nn.ReLU(), nn.Flatten(), nn.Linear(72, 24), nn.LeakyReLU(0.1), nn.Linear(24, 4),
    )  # fmt: skip


NETWORKS = {"residual": Skip, "lenet-like": pooled}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_layerwise_is_the_cpu_s(name, dtype):
    """To rounding in float64. In float32, 1e-3 of variances: rounding may decide which input of a window is largest."""
    torch.manual_seed(0)
    net = NETWORKS[name]().to(dtype).eval()
    x = torch.randn(1, 1, 12, 12).to(dtype)
    here = nm.output_moments(net, nm.Gaussian(x, std=0.3), "layerwise")
    there = nm.output_moments(net.cuda(), nm.Gaussian(x.cuda(), std=0.3), "layerwise").to("cpu")
    tolerance = 1e-8 if dtype == torch.float64 else 2e-3
    torch.testing.assert_close(there.mean, here.mean, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(there.covariance, here.covariance, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("method", ["layerwise", "sketch", nm.Sampling(500, control="sketch")])
def test_propagated_moments_against_samples(method):
    torch.manual_seed(0)
    net = pooled().cuda().eval()
    noise = nm.Gaussian(torch.randn(2, 1, 12, 12, device="cuda"), std=0.1)
    found = nm.output_moments(net, noise, method)
    sampled = nm.monte_carlo(net, noise, 200_000, seed=3)
    error = nm.relative_difference(found.variance.double(), sampled.variance)
    assert float(error.mean()) < 0.06


def test_layerwise_has_gradients():
    torch.manual_seed(0)
    net = pooled().cuda().double().eval()
    x = torch.randn(1, 1, 12, 12, device="cuda", dtype=torch.float64)
    towards = torch.randn_like(x)

    def value(at: Tensor) -> Tensor:
        return nm.output_moments(net, nm.Gaussian(at, std=0.2), "layerwise").mean.sum()

    at = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(value(at), at)
    with torch.no_grad():
        difference = (value(x + 1e-4 * towards) - value(x - 1e-4 * towards)) / 2e-4
    assert float((slope * towards).sum()) == pytest.approx(float(difference), rel=1e-2, abs=1e-3)


@pytest.mark.parametrize("method", ["layerwise", "sketch", "two-stage"])
def test_a_batch_is_its_images(method):
    """Images with noise of their own, together and one at a time; float64, so that only rounding differs.

    The probes of a sketch depend on the place: each image is the last of a batch of those up to it.
    """
    torch.manual_seed(0)
    net = pooled().cuda().double().eval()
    x = torch.randn(5, 1, 12, 12, device="cuda", dtype=torch.float64)
    std = torch.linspace(0.05, 0.3, 5, device="cuda", dtype=torch.float64)
    together = nm.output_moments(net, nm.Gaussian(x, nm.Isotropic(std**2, 144), event_ndim=3), method)
    for place in range(5):
        first = slice(0 if method == "sketch" else place, place + 1)
        found = nm.output_moments(net, nm.Gaussian(x[first], nm.Isotropic(std[first] ** 2, 144), event_ndim=3), method)
        torch.testing.assert_close(found.mean[-1], together.mean[place], rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(found.covariance[-1], together.covariance[place], rtol=1e-7, atol=1e-10)


# recordings


@pytest.fixture(scope="module")
def lenet():
    return nm.zoo.pretrained("lenet").cuda()


def test_a_replayed_sketch_is_the_same_sketch(lenet, monkeypatch):
    """As it is done, recorded and replayed, for another image, and after the weights have changed."""
    network = copy.deepcopy(lenet)
    images = torch.rand(2, 1, 28, 28, generator=torch.Generator().manual_seed(0)).cuda()
    first, second = (nm.Gaussian(image, std=0.05) for image in images.split(1))

    def sketch(noise: nm.Gaussian) -> Tensor:
        return nm.output_moments(network, noise, "sketch").covariance

    done, recorded, again, other = (sketch(noise) for noise in (first, first, first, second))
    with torch.no_grad():
        next(network.parameters()).mul_(1.5)
    changed = sketch(second)
    monkeypatch.setattr("netmoments.propagate.sketch.REPLAYED_BYTES", 0)
    stronger = sketch(second)
    with torch.no_grad():
        next(network.parameters()).div_(1.5)
    for found, expected in ((recorded, done), (again, done), (other, sketch(second)), (changed, stronger)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    assert not torch.allclose(other, done, rtol=0.01)
    assert not torch.allclose(changed, other, rtol=0.01)


class Reordered(nn.Module):
    """Reads an order from the host, which no recording can do."""

    order = torch.tensor([2, 0, 1])

    def forward(self, x: Tensor) -> Tensor:
        return x[:, self.order]


def test_what_cannot_be_recorded_is_done_and_leaves_the_stream_as_it_was():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), Reordered(), nn.Linear(3, 2)).cuda().eval()
    noise, before = nm.Gaussian(torch.zeros(1, 4, device="cuda"), std=0.3), torch.cuda.current_stream()
    found = [nm.output_moments(net, noise, "sketch").covariance for _ in range(4)]
    assert torch.cuda.current_stream() == before
    for again in found[1:]:
        torch.testing.assert_close(again, found[0])


def test_a_recording_made_in_inference_mode_serves_outside(lenet):
    noise = nm.Gaussian(torch.rand(1, 1, 28, 28, generator=torch.Generator().manual_seed(0)).cuda(), std=0.05)
    outputs = list(range(10))
    with torch.inference_mode():
        for _ in range(2):
            nm.output_moments(lenet, noise, nm.Sampling(100, control="sketch"), outputs)
    found = [nm.output_moments(lenet, noise, "sketch", outputs).covariance for _ in range(3)]
    for again in found[1:]:
        torch.testing.assert_close(again, found[0])


def test_recordings_go_with_their_network():
    """Nothing that was recorded is held by the device once the network is gone."""
    torch.manual_seed(0)
    net = pooled().cuda().eval()
    noise = nm.Gaussian(torch.randn(4, 1, 12, 12, device="cuda"), std=0.1)
    for _ in range(3):
        nm.output_moments(net, noise, "sketch")
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    weights = sum(parameter.numel() * parameter.element_size() for parameter in net.parameters())
    del net
    gc.collect()
    assert torch.cuda.memory_allocated() < held - weights


def test_the_next_network_is_recorded_when_the_last_one_is_gone():
    """Torch frees the memory of recordings with the last of them: another network's recordings need a new pool."""
    x = torch.ones(3, device="cuda")
    for _ in range(2):
        recordings: dict = {}
        for _ in range(3):
            assert replayed(recordings, lambda x: (x + 1,), x)[0].tolist() == [2.0, 2.0, 2.0]
        (shapes,) = recordings.values()
        assert shapes.recording is not None
        del shapes, recordings
        gc.collect()


def test_what_cannot_be_recorded_leaves_random_numbers_as_they_were():
    """Work that waits for a value is refused and done as it is, and the device's generator goes on where it was."""

    def waits(x: Tensor) -> tuple[Tensor, ...]:
        return (x * float(x.sum()),)

    x, recordings = torch.ones(3, device="cuda"), {}
    torch.manual_seed(0)
    torch.randn(3, device="cuda")
    wanted = torch.randn(3, device="cuda")
    torch.manual_seed(0)
    torch.randn(3, device="cuda")
    for _ in range(3):
        assert replayed(recordings, waits, x)[0].tolist() == [3.0, 3.0, 3.0]
    assert torch.equal(torch.randn(3, device="cuda"), wanted)
