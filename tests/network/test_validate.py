"""What a network and its input must be: each case is an error that says what is wrong and what to do."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import netmoments as nm
from netmoments.network.model import network_of
from netmoments.network.validate import same_values
from tests.network.small import POINT, returning, small
from tests.networks import network, seeded


def test_a_compiled_network_is_looked_through():
    net = network("shared")
    assert network_of(torch.compile(net), "test") is net


def left_in_training() -> nn.Module:
    net = seeded(small, torch.float32)
    net[2].train()
    return net


def container_left_in_training() -> nn.Module:
    net = nn.Sequential(seeded(small, torch.float32)).eval()
    net[0].training = True
    return net


def converted_afterwards() -> nn.Module:
    net = seeded(small, torch.float32)
    nm.relus(net, POINT)
    return net.double()


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(seeded(small, torch.float32))


def batch_norm_without_statistics() -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(1, track_running_stats=False), nn.ReLU(), nn.Flatten()).eval()


SMALL = seeded(small, torch.float32)
IMAGE = torch.zeros(1, 1, 4, 4)
BAD: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "training mode": (
        lambda: nm.relus(seeded(small, torch.float32).train(), POINT),
        ValueError,
        r"relus: the network is in training mode.*call network\.eval\(\)",
    ),
    "submodule in training mode": (
        lambda: nm.relus(left_in_training(), POINT),
        ValueError,
        r"2 left in training mode; call network\.eval\(\)",
    ),
    "container in training mode": (
        lambda: nm.relus(container_left_in_training(), POINT),
        ValueError,
        r"0 left in training mode",
    ),
    "not a module": (
        lambda: nm.relus(torch.relu, POINT),
        TypeError,
        r"must be a torch\.nn\.Module or an exported program, got a",
    ),
    "a path": (lambda: nm.relus("network.pt2", POINT), TypeError, r"must be a torch\.nn\.Module .*got a str"),
    "scripted": (lambda: nm.relus(scripted(), POINT), TypeError, "a scripted or traced network cannot be looked into"),
    "output of images": (
        lambda: nm.relus(returning(lambda y: y), IMAGE),
        ValueError,
        r"scores of shape \(batch, classes\), got a float32 tensor of shape \(1, 1, 4, 4\)",
    ),
    "output without batch": (lambda: nm.relus(returning(lambda y: y[0]), POINT), ValueError, r"scores of shape"),
    "output a tuple": (lambda: nm.relus(returning(lambda y: (y, y)), POINT), ValueError, r"scores .*got a tuple"),
    "output empty": (lambda: nm.relus(returning(lambda y: y[:, :0]), POINT), ValueError, r"scores .*\(1, 0\)"),
    "output infinite": (
        lambda: nm.relus(returning(lambda y: y / 0), POINT),
        ValueError,
        r"the network's output must be finite, got",
    ),
    "integer images": (
        lambda: nm.relus(SMALL, torch.zeros(1, 4, dtype=torch.uint8)),
        TypeError,
        r"(the input|example) must be float32 or float64, got a uint8",
    ),
    "list of images": (lambda: nm.relus(SMALL, [[0.0] * 4]), TypeError, "(the input|example) must be a torch tensor"),
    "one number": (lambda: nm.relus(SMALL, torch.tensor(1.0)), ValueError, r"a batch \(N, \.\.\.\) of at least one"),
    "no images": (lambda: nm.relus(SMALL, torch.zeros(0, 4)), ValueError, r"at least one image, got .*\(0, 4\)"),
    "wrong size": (
        lambda: nm.relus(SMALL, torch.zeros(1, 5)),
        ValueError,
        r"cannot take an input of shape \(5,\): .*1x5 and 4x5",
    ),
    "wrong dimensions": (
        lambda: nm.relus(network("residual", torch.float32), torch.zeros(1, 72)),
        ValueError,
        r"cannot take an input of shape \(72,\)",
    ),
    "wrong dtype": (
        lambda: nm.relus(SMALL, POINT.double()),
        TypeError,
        r"network is torch\.float32 \(0\.weight\) but the input torch\.float64; convert one",
    ),
    "wrong dtype after conversion": (
        lambda: nm.relus(converted_afterwards(), POINT),
        TypeError,
        r"network is torch\.float64 \(0\.weight\) but the input torch\.float32",
    ),
    "wrong device": (
        lambda: nm.relus(small().eval().to("meta"), POINT),
        ValueError,
        r"network is on meta \(0\.weight\) but the input on cpu; move one",
    ),
    "dropout on": (
        lambda: nm.relus(returning(lambda y: functional.dropout(y + 1)), POINT),
        ValueError,
        r"not deterministic: two runs on the same input differ",
    ),
    "batch matters": (
        lambda: nm.relus(returning(lambda y: y + y.mean(0)), POINT),
        ValueError,
        r"depends on the other images of the batch",
    ),
    "batch matters, not for equal images": (
        lambda: nm.relus(batch_norm_without_statistics(), IMAGE),
        ValueError,
        r"depends on the other images of the batch",
    ),
    "only one image": (
        lambda: nm.relus(returning(lambda y: y.reshape(1, 4)), POINT),
        ValueError,
        r"takes one image but not a batch of two: .*invalid for input of size 8",
    ),
    "batch lost": (
        lambda: nm.relus(returning(lambda y: y.reshape(1, -1)), POINT),
        ValueError,
        r"depends on the other images of the batch",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_networks_and_inputs(case):
    call, error, message = BAD[case]
    with pytest.raises(error, match=message):
        call()


class Rounded(nn.Module):
    def forward(self, x):
        return torch.round(3 * x) @ torch.ones(4, 2, dtype=x.dtype)


@pytest.mark.parametrize("steep", [1.0, 1e2, 1e4])
def test_a_network_that_is_saturated_wherever_it_is_looked_at(steep):
    """It has a derivative, but neither at the point nor at the other image that is tried."""
    net = nn.Sequential(nn.Linear(4, 1), nn.Hardtanh(), nn.Linear(1, 2)).eval()
    with torch.no_grad():
        net[0].weight.copy_(steep * torch.tensor([[4.0, -4.0, 4.0, -4.0]]))
        net[0].bias.fill_(steep)
    found = nm.output_moments(net, nm.Gaussian(-POINT[0] * 3, std=1e-4), "linear")
    assert torch.equal(found.variance, torch.zeros(2))


def test_a_network_that_rounds_has_no_derivative():
    with pytest.raises(ValueError, match="their derivative is zero or missing"):
        nm.output_moments(Rounded().eval(), nm.Gaussian(POINT[0], std=0.1), "linear")


def test_values_that_are_not_finite_are_the_same_in_the_same_places_only():
    """What torch records of a network that leaves torch, for numpy say, may be anything, also NaN."""
    nan, inf = float("nan"), float("inf")
    found = torch.tensor([nan, 1.0, -inf])
    assert same_values(found, found + torch.tensor([0.0, 1e-7, 0.0]))
    assert not same_values(found, torch.tensor([2.0, 1.0, -inf]))
    assert not same_values(torch.tensor([nan, 1.0]), torch.tensor([nan, 2.0]))
    assert not same_values(torch.tensor([inf, 1.0]), torch.tensor([1.0, 1.0]))


class ThroughNumpy(nn.Module):
    def forward(self, x):
        return torch.from_numpy(x.numpy() ** 2)


@pytest.mark.parametrize("method", ["auto", "sampling"])
def test_a_network_that_goes_through_numpy_is_sampled(method):
    """It runs where no gradient is asked for."""
    found = nm.output_moments(ThroughNumpy().eval(), nm.Gaussian(torch.zeros(3), std=0.1), method)
    assert bool(((found.mean - 0.01).abs() < 5 * found.error.mean).all())


def test_a_network_that_goes_through_numpy_has_no_derivative():
    with pytest.raises(ValueError, match="hands it to numpy"):
        nm.output_moments(ThroughNumpy().eval(), nm.Gaussian(torch.zeros(3), std=0.1), "linear")


class Decides(nn.Module):
    def forward(self, x):
        return torch.where(x[:, :1] > 0, torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))


@pytest.mark.parametrize("place", [0.0, 1.0])
def test_a_network_that_only_decides_has_no_gradient_to_ask_for(place):
    """Whether or not it was seen to change; sampling needs no gradient."""
    model = nm.NetworkModel(Decides().eval(), POINT[0] + place)
    assert not model.has_gradient
    found = nm.output_moments(model, nm.Gaussian(torch.full((4,), 0.1), std=0.1))
    assert bool(((found.mean - torch.tensor([0.8413, 0.1587])).abs() < 5 * found.error.mean).all())
