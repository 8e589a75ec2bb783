"""Linearizations made beforehand: the nearest point and how far it is, clusters, files."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import netmoments as nm
from netmoments.linearize.bank import k_means_centres, members_farthest_from
from tests.closeness import assert_close
from tests.linearize.same import assert_same_network
from tests.networks import inputs, network, seeded


@pytest.fixture
def bank() -> nm.LinearizationBank:
    return nm.LinearizationBank.at(network("residual"), inputs("residual", 4, seed=9), "block2.relu1")


def test_a_bank_knows_its_nearest_point_and_how_far_it_is(bank):
    assert len(bank) == 4
    assert bank.relu == "block2.relu1"
    x = inputs("residual", 6, seed=10).reshape(2, 3, 2, 6, 6)
    index, distance = bank.nearest(x)
    distances = torch.cdist(x.reshape(6, -1), bank.points.flatten(1))
    assert torch.equal(index, distances.argmin(1).reshape(2, 3))
    assert_close(distance, distances.min(1).values.reshape(2, 3), rtol=1e-12)
    index, distance = bank.nearest(bank.points[2])
    assert (int(index), float(distance)) == (2, 0.0)


def test_a_bank_answers_with_the_linearization_at_the_nearest_point(bank):
    net, points = network("residual"), inputs("residual", 4, seed=9)
    for i in range(4):
        assert_same_network(bank.member(i), nm.two_stage(net, points[i], "block2.relu1"))
    near = points[torch.tensor([3, 1, 1])] + 1e-3
    noise = nm.Gaussian(near, std=0.2)
    found = nm.output_moments(net, noise, nm.TwoStage(bank=bank))
    assert found.cut == "block2.relu1"
    assert_close(found.distance, [1e-3 * 72**0.5] * 3, rtol=1e-9)
    for i, number in enumerate([3, 1, 1]):
        expected = nm.two_stage(net, points[number], "block2.relu1").covariance(nm.Gaussian(near[i], std=0.2))
        assert_close(found.covariance[i], expected, atol=1e-13)
    chosen = nm.output_moments(net, noise, nm.TwoStage(bank=bank), [2, 0])
    assert_close(chosen.covariance, found.covariance[:, [2, 0]][:, :, [2, 0]], atol=1e-14)
    at_points = nm.Gaussian(points, std=0.2)
    by_bank, linearized = (
        nm.output_moments(net, at_points, method) for method in (nm.TwoStage(bank=bank), nm.TwoStage("block2.relu1"))
    )
    assert_close(by_bank.mean, linearized.mean, atol=1e-13)


def test_a_bank_answers_for_one_input():
    net, x = network("shared"), inputs("shared", 3)
    bank = nm.LinearizationBank.at(net, x)
    moments = nm.output_moments(net, nm.Gaussian(x[0], std=0.1), nm.TwoStage(bank=bank))
    assert moments.mean.shape == (3,)
    assert moments.distance.shape == ()
    with pytest.raises(ValueError, match="a bank has its own ReLU"):
        nm.TwoStage(layer=0, bank=bank)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["residual", "lenet"])
def test_a_bank_is_saved_and_loaded_to_the_bit(name, dtype, tmp_path):
    bank = nm.LinearizationBank.at(network(name, dtype), inputs(name, 3, dtype), 1)
    assert (bank.networks.D is None) == (name == "lenet")
    bank.save(tmp_path / "folder" / "bank.safetensors")
    again = nm.LinearizationBank.load(tmp_path / "folder" / "bank.safetensors")
    assert again.relu == bank.relu
    assert torch.equal(again.points, bank.points)
    assert_same_network(again.networks, bank.networks, atol=0)
    assert again.points.dtype == again.networks.A.dtype == dtype
    assert again.to(torch.float64).points.dtype == torch.float64


def test_banks_of_clusters(generator):
    """Four clusters far apart: the centres are their means, the farthest members those that brute force finds."""
    net = network("shared")
    corners = 20 * torch.eye(6, dtype=torch.float64)[:4]
    x = (corners[:, None] + torch.randn(4, 15, 6, dtype=torch.float64, generator=generator)).reshape(60, 6)
    means = x.reshape(4, 15, 6).mean(1)
    bank = nm.LinearizationBank.k_means(net, x, 4, seed=1)
    order = torch.cdist(means, bank.points).argmin(1)
    assert_close(bank.points[order], means, atol=1e-10)
    farthest = nm.LinearizationBank.farthest(net, x, 4, seed=1)
    distance = (x.reshape(4, 15, 6) - means[:, None]).norm(dim=2)
    expected = x.reshape(4, 15, 6)[torch.arange(4), distance.argmax(1)]
    assert torch.equal(farthest.points[order], expected)
    assert_same_network(farthest.member(0), nm.two_stage(net, farthest.points[0]))
    started = k_means_centres(x, 4, initial=means)
    assert_close(started, means, atol=1e-10)
    assert torch.equal(k_means_centres(x, 4, seed=3), k_means_centres(x, 4, seed=3))
    with_empty = torch.cat([means, 1e3 * torch.ones(1, 6, dtype=torch.float64)])
    assert torch.equal(members_farthest_from(with_empty, x)[4], with_empty[4])


def other_bank() -> nm.LinearizationBank:
    return nm.LinearizationBank.at(network("shared"), inputs("shared", 2))


def wide_bank() -> nm.LinearizationBank:
    """A bank for vectors of 6 with as many scores as LeNet."""
    net = seeded(lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 10)))
    return nm.LinearizationBank.at(net, inputs("shared", 2))


BAD_BANKS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "another event shape": (
        lambda: other_bank().nearest(torch.zeros(3, 2, 6, 7, dtype=torch.float64)),
        ValueError,
        r"inputs must have shape \(\.\.\., 6\), got a float64 tensor of shape \(3, 2, 6, 7\)",
    ),
    "noise of another event shape": (
        lambda: nm.output_moments(
            network("lenet"), nm.Gaussian(inputs("lenet", 1), std=0.1), nm.TwoStage(bank=wide_bank())
        ),
        ValueError,
        r"inputs must have shape \(\.\.\., 6\)",
    ),
    "another dtype": (
        lambda: other_bank().nearest(torch.zeros(6)),
        TypeError,
        r"points and inputs must have one dtype",
    ),
    "another network": (
        lambda: nm.output_moments(
            nn.Sequential(nn.Linear(6, 4), nn.ReLU()).double().eval(),
            nm.Gaussian(inputs("shared", 1), std=0.1),
            nm.TwoStage(bank=other_bank()),
        ),
        ValueError,
        r"the bank is of another network: its linearizations have 3 scores, the network 4",
    ),
    "bank for another method": (
        lambda: nm.ExpectedLogits(network("shared"), 0.1, method=nm.TwoStage(bank=other_bank())),
        ValueError,
        r"a bank is for output_moments; give at=",
    ),
    "not a bank": (
        lambda: nm.TwoStage(bank=3),
        TypeError,
        r"bank must be a netmoments\.LinearizationBank, got 3",
    ),
    "one point": (
        lambda: nm.LinearizationBank.at(network("shared"), torch.zeros(6).double()),
        ValueError,
        r"points must be \(k, \.\.\.\)",
    ),
    "points as a list": (
        lambda: nm.LinearizationBank.at(network("shared"), [[0.0] * 6]),
        TypeError,
        r"points must be a torch tensor, got a list",
    ),
    "too many clusters": (
        lambda: nm.LinearizationBank.k_means(network("shared"), inputs("shared", 3), 4),
        ValueError,
        r"count must be from 1 to the number of images, 3, got 4",
    ),
    "integer images": (
        lambda: nm.LinearizationBank.farthest(network("shared"), torch.zeros(3, 6, dtype=torch.int64), 2),
        TypeError,
        r"images must be float32 or float64",
    ),
    "points without their networks": (
        lambda: nm.LinearizationBank(inputs("shared", 3), other_bank().networks, "act#1"),
        ValueError,
        r"one linearization for each of the 3 points is needed, got a batch of \(2,\)",
    ),
}


@pytest.mark.parametrize("case", BAD_BANKS)
def test_bad_banks(case):
    call, error, message = BAD_BANKS[case]
    with pytest.raises(error, match=message):
        call()


def test_bad_bank_files(tmp_path):
    save_file({"points": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="is not a linearization bank"):
        nm.LinearizationBank.load(tmp_path / "other.safetensors")
    path = tmp_path / "bank.safetensors"
    other_bank().save(path)
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(ValueError, match="damaged"):
        nm.LinearizationBank.load(path)
    with pytest.raises(FileNotFoundError, match="no weights at"):
        nm.LinearizationBank.load(tmp_path / "none.safetensors")


def test_clusters_leave_every_random_state_as_it_was(generator):
    """In a fresh process: importing scikit-learn alone draws from Python's."""
    code = (
        "import random, numpy, torch, netmoments as nm\n"
        "network = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).eval()\n"
        "images = torch.randn(20, 3)\n"
        "def state():\n"
        "    kind, keys, *rest = numpy.random.get_state()\n"
        "    return random.getstate(), keys.tolist(), rest, torch.get_rng_state().tolist()\n"
        "before = state()\n"
        "nm.LinearizationBank.k_means(network, images, 3)\n"
        "nm.LinearizationBank.farthest(network, images, 3)\n"
        "assert state() == before\n"
    )
    found = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


def test_seeds_of_clusters(generator):
    images = torch.randn(20, 3, generator=generator)
    assert k_means_centres(images, 2, seed=2**80).shape == (2, 3)
    for seed in (-1, 1.5, None, True):
        with pytest.raises(ValueError, match="k_means_centres: seed must be an integer of at least 0"):
            k_means_centres(images, 2, seed=seed)
