"""Flips on a CUDA device: known answers, and the CPU's."""

from __future__ import annotations

import pytest
import torch

import netmoments as nm
from tests.flips.classifiers import Corner, at_distance, linear, tail
from tests.gpu import NEEDS_CUDA

pytestmark = [pytest.mark.gpu, NEEDS_CUDA]


@pytest.mark.parametrize("distance", [1.0, 3.0, 5.0, 7.0])
def test_linear_classifiers(distance):
    network = linear()
    mean = at_distance(network, distance)
    found = nm.flip_probability(network.cuda(), nm.Gaussian(mean.cuda(), std=1.0), label=0)
    assert found.probability.device.type == "cuda"
    assert bool(found.met)
    assert abs(float(found.probability) - tail(distance)) < 5 * float(found.standard_error)


def test_two_layers_in_a_batch():
    network = Corner(3.2, 3.0).eval().cuda()
    found = nm.flip_probability(network, nm.Gaussian(torch.zeros(3, 6, device="cuda"), std=1.0, event_ndim=1))
    truth = Corner.probability(3.2, 3.0)
    assert bool(((found.probability - truth).abs() < 5 * found.standard_error).all())


def test_digits_as_on_the_cpu():
    """Common and rare flips and the nearest one; other random numbers, so within 5 errors of both."""
    images = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(3))
    here, there = (
        nm.flip_probability(nm.zoo.pretrained("digits").to(device), nm.Gaussian(images.to(device), std=0.08))
        for device in ("cpu", "cuda")
    )
    error = torch.hypot(here.standard_error, there.standard_error.cpu())
    assert bool(((here.probability - there.probability.cpu()).abs() < 5 * error).all())
    near, same = (
        nm.nearest_flip(nm.zoo.pretrained("digits").to(device), nm.Gaussian(images.to(device), std=0.08))
        for device in ("cpu", "cuda")
    )
    # a search from other random starts: the same boundary, not the same point of it
    torch.testing.assert_close(near.distance, same.distance.cpu(), rtol=0.1, atol=0.0)
