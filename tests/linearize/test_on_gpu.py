"""Linearizations on a CUDA device equal those of the CPU, at full precision even where TF32 is allowed."""

from __future__ import annotations

import pytest
import torch

import netmoments as nm
from netmoments.precision import full_precision
from tests.gpu import NEEDS_CUDA, tf32_allowed

pytestmark = [pytest.mark.gpu, NEEDS_CUDA]


@pytest.fixture(autouse=True)
def _tf32():
    with tf32_allowed():
        yield


@pytest.fixture(scope="module")
def lenet():
    return nm.zoo.pretrained("lenet").cuda()


def test_two_stage_is_the_same_as_on_the_cpu(lenet):
    """Float32 Jacobians: sums of a few hundred products of order 1, so 1e-4 of the largest entry."""
    images = torch.rand(3, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    for layer in range(3):
        here = nm.two_stage(nm.zoo.pretrained("lenet"), images, layer)
        there = nm.two_stage(lenet, images.cuda(), layer)
        for name in ("A", "c1", "B", "c2"):
            x, y = getattr(here, name), getattr(there, name).cpu()
            assert float((x - y).abs().max()) < 1e-4 * float(x.abs().max()), (layer, name)


def test_two_stage_reproduces_the_output_whatever_the_settings(lenet):
    images = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(1)).cuda()
    with full_precision(), torch.no_grad():
        exact = lenet(images)
    assert torch.backends.cudnn.conv.fp32_precision != "ieee"  # TF32 is on outside
    for layer in range(3):
        value = nm.two_stage(lenet, images, layer)(images)
        assert float(((value - exact).abs().amax(1) / exact.abs().amax(1)).max()) < 1e-5


def test_maps():
    network = nm.zoo.pretrained("digits").cuda()
    image = torch.rand(1, 8, 8, generator=torch.Generator().manual_seed(5)).cuda()
    noise = nm.Gaussian(image, std=0.2)
    stored, maps = nm.two_stage(network, image, 0), nm.two_stage_maps(network, image, 0)
    mean, covariance = maps.moments(noise)
    torch.testing.assert_close(mean, stored.mean(noise), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(covariance, stored.covariance(noise), rtol=1e-4, atol=1e-5)


def test_a_bank_moves_to_the_gpu(lenet):
    points = torch.rand(3, 1, 28, 28, generator=torch.Generator().manual_seed(6))
    bank = nm.LinearizationBank.at(nm.zoo.pretrained("lenet"), points).to("cuda")
    noise = nm.Gaussian(points.flip(0).cuda() + 0.001, std=0.01)
    moments = nm.output_moments(lenet, noise, nm.TwoStage(bank=bank))
    assert moments.distance is not None
    torch.testing.assert_close(moments.distance.float().cpu(), torch.full((3,), 0.028), rtol=1e-3, atol=0)
