"""A linearization that never stores A gives what the stored one gives."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import netmoments as nm
from netmoments.network.zoo import LeNet
from tests.networks import Residual, seeded

ROUNDING = 1e-12
"""Sums of at most a thousand float64 terms of order 1."""


@pytest.fixture
def network():
    return seeded(lambda: LeNet(side=8, channels=(3, 4), hidden=12))


@pytest.fixture
def image(generator):
    return torch.rand(1, 8, 8, generator=generator, dtype=torch.float64)


def noises(image, generator):
    factor = 0.05 * torch.randn(64, 64, generator=generator, dtype=torch.float64)
    return {
        "isotropic": nm.Gaussian(image, std=0.2),
        "diagonal": nm.Gaussian(image, covariance=0.04 * torch.rand(1, 8, 8, generator=generator, dtype=torch.float64)),
        "dense": nm.Gaussian(image, covariance=factor @ factor.T),
        "low rank": nm.Gaussian(image, nm.LowRank(factor[:, :5], 0.01)),
        "another mean": nm.Gaussian(image + 0.05, std=0.1),
        "none": nm.Gaussian(image, std=0.0),
    }


def assert_same_moments(maps, stored, noise):
    mean, covariance = maps.moments(noise)
    torch.testing.assert_close(mean, stored.mean(noise), rtol=ROUNDING, atol=ROUNDING)
    torch.testing.assert_close(covariance, stored.covariance(noise), rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_moments_equal_those_of_the_stored_linearization(network, image, generator, layer):
    stored = nm.two_stage(network, image, layer, outputs=[3, 0, 7])
    maps = nm.two_stage_maps(network, image, layer, outputs=[3, 0, 7])
    for noise in noises(image, generator).values():
        assert_same_moments(maps, stored, noise)
    torch.testing.assert_close(maps.mean(noise), stored.mean(noise))
    torch.testing.assert_close(maps.variance(noise), stored.variance(noise))


@pytest.mark.parametrize("layer", [0, 1])
def test_rows_that_do_not_fit_are_streamed(network, image, generator, layer, monkeypatch):
    stored = nm.two_stage(network, image, layer, outputs=[3, 0])
    maps = nm.two_stage_maps(network, image, layer, outputs=[3, 0], memory_budget=390_000)
    maps = dataclasses.replace(maps, limit=1)
    monkeypatch.setattr("netmoments.linearize.matrix_free.pairs_form", None)  # what is used if the rows fit
    for name in ("isotropic", "dense"):
        assert_same_moments(maps, stored, noises(image, generator)[name])


def test_a_path_around_the_relu(generator):
    network = seeded(Residual, seed=1)
    x = torch.rand(2, 4, 4, generator=generator, dtype=torch.float64)
    for relu in nm.relus(network, x[None]):
        stored = nm.two_stage(network, x, relu.index)
        maps = nm.two_stage_maps(network, x, relu.index)
        noise = nm.Gaussian(x + 0.1, std=0.5)
        torch.testing.assert_close(maps.mean(noise), stored.mean(noise), rtol=ROUNDING, atol=ROUNDING)
        torch.testing.assert_close(maps.covariance(noise), stored.covariance(noise), rtol=ROUNDING, atol=ROUNDING)


def test_products_rows_columns_and_norms_are_those_of_the_matrix(network, image, generator):
    A = nm.two_stage(network, image, 1).A
    maps = nm.two_stage_maps(network, image, 1, memory_budget=10**6)
    assert maps.A.shape == tuple(A.shape)
    v = torch.randn(5, A.shape[1], generator=generator, dtype=torch.float64)
    w = torch.randn(5, A.shape[0], generator=generator, dtype=torch.float64)
    index = torch.tensor([4, 0, 9])
    torch.testing.assert_close(maps.A.times(v), v @ A.T)
    torch.testing.assert_close(maps.A.transposed_times(w), w @ A)
    torch.testing.assert_close(maps.A.rows(index), A[index])
    torch.testing.assert_close(maps.A.columns(index), A[:, index])


def test_squeezenets_first_jacobian_is_refused_and_mapped(data_dir):
    weights = data_dir / "squeezenet" / "squeezenet_v1.0_deepcompressed.npz"
    if not weights.exists():
        pytest.skip(f"no SqueezeNet at {weights}")
    network = nm.zoo.pretrained("squeezenet", weights)
    image = torch.rand(3, 227, 227, generator=torch.Generator().manual_seed(0))
    with pytest.raises(MemoryError, match=r"× 154587, .* GB for each image.*two_stage_maps.*passes"):
        nm.two_stage(network, image, 0, outputs=[1, 2], memory_budget=2**30)
    maps = nm.two_stage_maps(network, image, 0, outputs=[1, 2], memory_budget=2**30)
    units, inputs = maps.A.shape
    assert inputs == 154_587
    assert units < 96 * 111 * 111  # those behind the max-pools are gone
    column = maps.A.columns(torch.tensor([70_000]))[:, 0]
    row = int(column.abs().argmax())
    torch.testing.assert_close(maps.A.rows(torch.tensor([row]))[0, 70_000], column[row])


def test_bad_input(network, image):
    maps = nm.two_stage_maps(network, image)
    with pytest.raises(ValueError, match="one point at a time"):
        nm.two_stage_maps(network, image.expand(2, -1, -1, -1))
    for noise in (nm.Gaussian(torch.zeros(5, dtype=torch.float64), std=1.0), nm.Gaussian(image.float(), std=1.0)):
        with pytest.raises(ValueError, match="one Gaussian over 64 inputs"):
            maps.mean(noise)
