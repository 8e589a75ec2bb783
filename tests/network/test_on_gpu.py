"""Networks on a CUDA device: never changed, never stale, also where something was recorded before a change."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import netmoments as nm
from tests.gpu import NEEDS_CUDA
from tests.network.sharing import Untouched, shared

pytestmark = [pytest.mark.gpu, NEEDS_CUDA]
METHODS: dict[str, object] = {
    "layerwise": "layerwise",
    "sketch": "sketch",
    "two-stage": "two-stage",
    "linear": "linear",
    "sampling": nm.Sampling(200, control="sketch"),
}


def noise(size: int) -> nm.Gaussian:
    mean = torch.linspace(-0.5, 1, size, dtype=torch.float64, device="cuda")
    return nm.Gaussian(mean, std=0.5)


def assert_same(found: nm.OutputMoments, expected: nm.OutputMoments) -> None:
    torch.testing.assert_close(found.mean, expected.mean, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(found.covariance, expected.covariance, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["a module used twice", "tied parameters", "a closure", "hooks"])
def test_shared_modules_stay_as_they_are(name):
    net, here = shared(name).cuda(), shared(name)
    with Untouched(net):
        random = torch.cuda.get_rng_state()
        for key, method in METHODS.items():
            found = [nm.output_moments(net, noise(3), method) for _ in range(3)]
            for again in found[1:]:
                assert_same(again, found[0])
            if key in ("layerwise", "two-stage", "linear"):
                mean, covariance = noise(3).mean.cpu(), noise(3).covariance.to("cpu")
                assert_same(found[0].to("cpu"), nm.output_moments(here, nm.Gaussian(mean, covariance), method))
        assert torch.equal(random, torch.cuda.get_rng_state())


def configured() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.LeakyReLU(0.1), nn.Linear(8, 8), nn.Hardtanh(), nn.Linear(8, 6),
        nn.ReLU(), nn.Linear(6, 3),
    )  # fmt: skip
    return net.double().cuda().eval()


def weights_in_place(net: nn.Module) -> None:
    with torch.no_grad():
        net[0].weight.mul_(1.5)


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "weights in place": weights_in_place,
    "weights by .data": lambda net: net[3].weight.data.mul_(1.5),
    "another Parameter": lambda net: setattr(net[3], "weight", nn.Parameter(1.5 * net[3].weight.detach())),
    "a buffer": lambda net: net[1].running_mean.add_(0.5),
    "negative_slope": lambda net: setattr(net[2], "negative_slope", 0.7),
    "a limit": lambda net: setattr(net[4], "max_val", 0.2),
    "another activation": lambda net: net.__setitem__(6, nn.Hardtanh().eval()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_was_recorded_before_a_change_is_not_replayed_after_it(name):
    net = configured()
    before = {method: nm.output_moments(net, noise(4), method) for method in ("layerwise", "sketch") for _ in range(3)}
    CHANGES[name](net)
    for method, old in before.items():
        expected = nm.output_moments(copy.deepcopy(net), noise(4), method)
        for _ in range(3):
            assert_same(nm.output_moments(net, noise(4), method), expected)
        assert not torch.allclose(old.covariance, expected.covariance, rtol=1e-6)


def test_four_threads_on_one_fresh_network():
    expected = {key: nm.output_moments(configured(), noise(4), method) for key, method in METHODS.items()}
    net, barrier = configured(), threading.Barrier(4)
    failed: list[BaseException] = []

    def work(own: int) -> None:
        keys = list(METHODS)
        try:
            barrier.wait(60)
            for key in (keys[own:] + keys[:own]) * 3:
                assert_same(nm.output_moments(net, noise(4), METHODS[key]), expected[key])
        except BaseException as error:
            failed.append(error)

    with Untouched(net):
        threads = [threading.Thread(target=work, args=(own,)) for own in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
    assert not failed, failed[0]


def convolutional() -> nn.Module:
    torch.manual_seed(1)
    features = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*features, nn.Linear(36, 16), nn.Hardtanh(), nn.Linear(16, 3)).double().cuda().eval()


def image_noise() -> nm.Gaussian:
    mean = torch.linspace(-1, 1, 64, dtype=torch.float64, device="cuda").reshape(1, 8, 8)
    return nm.Gaussian(mean, std=0.2)


class OnStreams:
    """Calls every method on one network, on a stream that is kept busy, so that all work has to wait there."""

    def __init__(self, net: nn.Module, given: nm.Gaussian) -> None:
        self.net, self.given = net, given
        torch.cuda.synchronize()

    def check(self, stream: torch.cuda.Stream, keys: list[str], expected: dict[str, nm.OutputMoments]) -> None:
        with torch.cuda.stream(stream):
            for key in keys:
                torch.cuda._sleep(5_000_000)
                found = nm.output_moments(self.net, self.given, METHODS[key])
                assert_same(found, expected[key])
            torch.cuda._sleep(5_000_000)
            sampled, true = nm.output_moments(self.net, self.given, samples=2000), expected["layerwise"]
            apart = (sampled.mean - true.mean).abs() - true.error.mean
            assert bool((apart < 5 * sampled.error.mean).all())
            assert torch.cuda.current_stream() == stream


@pytest.mark.parametrize("make", [configured, convolutional])
@pytest.mark.parametrize("state", ["cold", "warm"])
@pytest.mark.parametrize("threads", ["one thread", "two threads"])
def test_two_streams(make, state, threads):
    """Answers are those of a network alone on the default stream, whichever stream was the first to use the network."""
    given = noise(4) if make is configured else image_noise()
    expected = {key: nm.output_moments(make(), given, method) for key, method in METHODS.items()}
    torch.cuda.synchronize()
    net = make()
    work, streams = OnStreams(net, given), [torch.cuda.Stream() for _ in range(2)]
    orders = [list(METHODS), list(METHODS)[::-1]]
    if state == "warm":
        for key in orders[0] * 3:
            nm.output_moments(net, given, METHODS[key])
    failed: list[BaseException] = []

    def on(stream: torch.cuda.Stream, keys: list[str]) -> None:
        try:
            for _ in range(3):
                work.check(stream, keys, expected)
        except BaseException as error:
            failed.append(error)

    with Untouched(net):
        if threads == "one thread":
            for stream, keys in zip(streams, orders, strict=True):
                on(stream, keys)
        else:
            running = [threading.Thread(target=on, args=pair) for pair in zip(streams, orders, strict=True)]
            for thread in running:
                thread.start()
            for thread in running:
                thread.join(300)
            assert not any(thread.is_alive() for thread in running)
    torch.cuda.synchronize()
    assert not failed, failed[0]


def test_gradients_reach_the_weights():
    net = configured()
    given = nm.Gaussian(noise(4).mean.clone().requires_grad_(), std=0.5)
    for method in ("layerwise", "sketch"):
        slopes: tuple[Tensor, ...] = torch.autograd.grad(
            nm.output_moments(net, given, method).mean.sum(), [net[0].weight, net[-1].weight]
        )
        assert all(bool(slope.any()) for slope in slopes)
