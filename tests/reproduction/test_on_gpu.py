"""Experiments on a CUDA device: the same bits again, and what a CPU computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import netmoments as nm
from netmoments.data.images import LabelledImages
from netmoments.network.weights import read_tensors
from reproduction.image_sweeps import StudiedImages, random_factor
from reproduction.lenet_on_mnist import MonteCarloSweep, TightnessSweep, delta_method, moments_at
from reproduction.table_1 import LinearizationErrorSweep
from reproduction.table_4 import ClusterPoints, PointsSweep
from reproduction.training import RECIPES, train
from tests.closeness import assert_close
from tests.gpu import NEEDS_CUDA, tf32_allowed

pytestmark = [pytest.mark.gpu, NEEDS_CUDA]


@pytest.fixture(autouse=True)
def _tf32() -> Iterator[None]:
    with tf32_allowed():
        yield


def test_training_on_the_gpu_is_reproducible(tmp_path):
    recipe = dataclasses.replace(RECIPES["lenet"], epochs=1)
    generator = torch.Generator().manual_seed(8)
    images = torch.rand(1000, 1, 28, 28, generator=generator)
    data = LabelledImages(images, torch.randint(10, (1000,), generator=generator), tuple(map(str, range(1000))), ())
    written = []
    for name in ("a", "b"):
        train(recipe, data, data, weights=tmp_path / f"{name}.safetensors", device="cuda")
        written.append(read_tensors(tmp_path / f"{name}.safetensors")[0])
    assert all(torch.equal(written[0][name], written[1][name]) for name in written[0])


def studied_images() -> StudiedImages:
    network = nm.zoo.pretrained("lenet")
    images = torch.rand(3, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    return StudiedImages(network, images, torch.tensor([5, 17, 40]), seed=2)


@pytest.mark.parametrize("kind", ["sampled", "computed", "points", "layers"])
def test_experiments_repeat_bit_for_bit(kind):
    studied = studied_images()
    sweep = {
        "sampled": lambda: MonteCarloSweep("monte-carlo", studied, 3, samples=500),
        "computed": lambda: TightnessSweep("tightness", studied, 3),
        "points": lambda: PointsSweep(
            "points", studied, [ClusterPoints(2, False, studied.images[:2], torch.tensor([0, 1, 1]))], 3
        ),
        "layers": lambda: LinearizationErrorSweep("layers", studied, 3),
    }[kind]()
    first, again = (sweep.prepare("cuda")(0) for _ in range(2))
    for name in first:
        np.testing.assert_array_equal(first[name], again[name], err_msg=name)


def test_experiments_compute_what_they_compute_on_a_cpu():
    studied = studied_images()
    factors = torch.stack([studied.factor(place) for place in range(3)])
    found = []
    for device in ("cpu", "cuda"):
        images = studied.images.to(device)
        network = nm.two_stage(nm.zoo.pretrained("lenet").to(device), images)
        found.append(
            moments_at(network, images, factors.to(device)) | delta_method(network, images, factors.to(device))
        )
    for name, here in found[0].items():
        if name == "series":  # all rounding at small noise
            continue
        there = found[1][name].cpu()
        assert float(nm.relative_difference(here, there).max()) < 2e-3, name


def test_random_factors_on_the_device():
    factor = random_factor(200, torch.Generator("cuda").manual_seed(0))
    values = torch.linalg.eigvalsh(factor @ factor.T)
    assert_close(values.sum().cpu(), torch.tensor(200.0, dtype=torch.float64), rtol=1e-12)
    assert float(values.min()) > 0
