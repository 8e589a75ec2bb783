"""The private twin of a network: shared modules give right answers, and the network stays as it was.

It does after an answer, an error in the middle of a run, an interrupt, and with other threads at work.
"""

from __future__ import annotations

import collections
import itertools
import threading
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import netmoments as nm
from netmoments.network.graph import NetworkGraph
from netmoments.network.replica import replica
from tests.closeness import assert_close, assert_within_standard_errors
from tests.moments.problems import assert_same
from tests.network.sharing import SHARING, Untouched, shared, unshared
from tests.networks import FACTORIES, inputs, network, seeded

METHODS: dict[str, object] = {
    "layerwise": "layerwise",
    "sketch": nm.Sketch(probes=8),
    "two-stage": "two-stage",
    "linear": "linear",
    "sampling": nm.Sampling(200),
    "sampling with a control": nm.Sampling(200, control=nm.Sketch(probes=8)),
    "auto": nm.Auto(0.1),
}
MEAN = torch.tensor([0.4, -0.2, 0.9], dtype=torch.float64)
NOISE = nm.Gaussian(MEAN, std=0.5)


@pytest.mark.parametrize("name", SHARING)
def test_shared_modules_give_right_answers_and_stay_as_they_are(name):
    """Answers are those for an equal network without sharing, by every method, and again from what is kept."""
    net, plain = shared(name), unshared(name)
    assert_close(net(MEAN[None]), plain(MEAN[None]), atol=1e-14)
    with Untouched(net):
        for method in METHODS.values():
            expected = nm.output_moments(plain, NOISE, method)
            for _ in range(2):
                found = nm.output_moments(net, NOISE, method)
                assert found.method == expected.method
                assert_same(found, expected)
        for layer in range(len(nm.relus(plain, MEAN[None]))):
            assert_close(nm.two_stage(net, MEAN, layer).A, nm.two_stage(plain, MEAN, layer).A, atol=1e-13)
            maps = nm.two_stage_maps(net, MEAN, layer)
            assert_close(maps.covariance(NOISE), nm.two_stage(plain, MEAN, layer).covariance(NOISE), atol=1e-13)


@pytest.mark.parametrize("name", ["a module used twice", "tied parameters", "a list, twice"])
def test_shared_modules_against_samples(name):
    """Within five standard errors: two nonlinear layers, little noise."""
    noise = nm.Gaussian(MEAN, std=0.05)
    sampled = nm.monte_carlo(shared(name), noise, 40_000, seed=1)
    report = nm.output_moments(shared(name), noise, "layerwise").compare(sampled)
    for part in (report.mean, report.variance, report.covariance):
        assert float(part.abs().max()) < 5


@pytest.mark.parametrize("name", [name for name in SHARING if name != "modules torch does not know"])
def test_training_goes_on(name):
    """A backward pass reaches every weight, a step changes the scores, and the next answer is about the new ones."""
    net = shared(name)
    before = nm.output_moments(net, NOISE, "layerwise")
    net.train()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(16, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    net(x).square().sum().backward()
    for key, parameter in net.named_parameters():
        assert parameter.grad is not None, key
        assert bool(parameter.grad.any()), key
    optimizer.step()
    assert set(net.state_dict()) == set(shared(name).state_dict())
    fresh = shared(name)
    fresh.load_state_dict(net.state_dict())
    after = nm.output_moments(net.eval(), NOISE, "layerwise")
    assert_same(after, nm.output_moments(fresh.eval(), NOISE, "layerwise"))
    assert float((after.mean - before.mean).abs().max()) > 1e-3


def test_gradients_reach_shared_weights():
    """The derivative of the expected scores in a shared weight is the sum of those in the two that it stands for."""
    net, plain = shared("a module used twice"), unshared("a module used twice")
    noise = nm.Gaussian(MEAN.clone().requires_grad_(), std=0.5)
    for method in ("layerwise", "sketch"):
        (shared_slope,) = torch.autograd.grad(nm.output_moments(net, noise, method).mean.sum(), net[0].weight)
        slopes = torch.autograd.grad(
            nm.output_moments(plain, noise, method).mean.sum(), [plain[0].weight, plain[2].weight]
        )
        assert_close(shared_slope, slopes[0] + slopes[1], atol=1e-12, what=method)


# the twin itself


@pytest.mark.parametrize("name", FACTORIES)
def test_a_twin_computes_the_same_with_modules_of_its_own(name):
    net, x = network(name), inputs(name, 2)
    twin = replica(net)
    assert torch.equal(twin(x.clone()), net(x.clone()))
    assert type(twin) is type(net)
    assert not {id(module) for module in twin.modules()} & {id(module) for module in net.modules()}
    assert all(mine is own for mine, own in zip(twin.parameters(), net.parameters(), strict=True))
    assert not {id(buffer) for buffer in twin.buffers()} & {id(buffer) for buffer in net.buffers()}
    assert list(twin.state_dict()) == list(net.state_dict())


TWINNED = [name for name in SHARING if name not in ("modules torch does not know", "an object", "a default argument")]


@pytest.mark.parametrize("name", [name for name in TWINNED if name != "a list in a closure"])
def test_a_twin_s_modules_are_called_where_the_network_s_are(name):
    """Hooks on the twin's modules see every call: none goes to a module of the network instead."""
    net = shared(name)
    calls: dict[str, list[str]] = {"network": [], "twin": []}
    for which, whole in (("network", net), ("twin", replica(net))):
        for key, module in whole.named_modules():
            module.register_forward_hook(lambda *_, which=which, key=key: calls[which].append(key))
        whole(MEAN[None])
        if which == "network":
            assert calls["network"]
            for module in net.modules():
                module._forward_hooks.popitem()
    if name in ("a bound method",):  # forward itself is called, which runs no hooks
        assert "layer" not in calls["network"] + calls["twin"]
    assert calls["twin"] == calls["network"]


def test_what_a_twin_s_forward_stores_does_not_reach_the_network():
    class Storing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
            self.kept: list[Tensor] = []
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
            self.latest: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            y = functional.relu(self.layer(x))
            self.kept.append(y)
            self.calls += 1
            self.latest = y
            return self.last(y)

    net = seeded(Storing)
    twin = replica(net)
    twin(MEAN[None])
    assert (net.kept, int(net.calls), net.latest) == ([], 0, None)
    assert (len(twin.kept), int(twin.calls)) == (1, 1)


class Config(dict):
    """A dictionary with an attribute that its constructor requires."""

    def __init__(self, title: str, **settings: float) -> None:
        super().__init__(**settings)
        self.title = title


class Keeping(nn.Module):
    """Keeps any object, and uses it in forward."""

    def __init__(self, kept: object, use: Callable[[Any], float]) -> None:
        super().__init__()
        self.layer, self.last, self.kept, self.use = nn.Linear(3, 4), nn.Linear(4, 2), kept, use

    def forward(self, x: Tensor) -> Tensor:
        return self.last(functional.relu(self.layer(x))) * self.use(self.kept)


def counted(counts: dict[str, int]) -> float:
    counts["runs"] += 1
    return 2.0


Pair = collections.namedtuple("Pair", ["one", "other"])
KEPT: dict[str, tuple[Callable[[], object], Callable[[Any], float]]] = {
    "a default dictionary": (lambda: collections.defaultdict(int), counted),
    "a counter": (collections.Counter, counted),
    "an ordered dictionary": (lambda: collections.OrderedDict(a=2.0), lambda kept: next(iter(kept.values()))),
    "a dictionary of one's own": (lambda: Config("net", k=2.0), lambda kept: kept["k"] * len(kept.title) / 3),
    "a named tuple": (lambda: Pair(2.0, 3.0), lambda kept: kept.one),
    "a queue": (lambda: collections.deque([2.0]), lambda kept: kept[0]),
    "a set": (lambda: {2.0}, lambda kept: max(kept)),
    "an array": (lambda: np.full(2, 2.0), lambda kept: float(kept[1])),
    "an object": (lambda: types.SimpleNamespace(k=2.0), lambda kept: kept.k),
    "a lock": (threading.Lock, lambda kept: 2.0 - kept.locked()),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_network_may_keep_anything(name):
    kept, use = KEPT[name]
    net, plain = (seeded(lambda value=value: Keeping(value, use)) for value in (kept(), kept()))
    expected = plain(MEAN[None]).detach()[0]
    with nullcontext() if use is counted else Untouched(net):  # what forward counts, it counts
        for method in ("layerwise", "two-stage"):
            found = nm.output_moments(net, nm.Gaussian(MEAN, std=1e-9), method)
            assert_close(found.mean, expected, atol=1e-8, what=method)


# errors and interrupts


class Clock:
    """Counts the runs of a network and its twins, and ends one of them."""

    def __init__(self) -> None:
        self.runs, self.last, self.error = 0, 0, BaseException

    def tick(self) -> None:
        self.runs += 1
        if self.runs == self.last:
            raise self.error("stopped")

    def stop_at(self, run: int, error: type[BaseException]) -> None:
        self.runs, self.last, self.error = 0, run, error


class Stoppable(nn.Module):
    """A shared layer, a normalisation and a hook; the clock ticks in the middle of every run."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.layer, self.norm, self.last = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)
        self.layer.register_forward_hook(lambda module, args, output: 1.5 * output)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm(self.layer(x)))
        self.clock.tick()
        return self.last(functional.relu(self.layer(y)))


CALLS: dict[str, Callable[[nn.Module], object]] = {
    **{
        name: lambda net, method=method: nm.output_moments(net, NOISE, method, check=0)
        for name, method in METHODS.items()
    },
    "layerwise, checked": lambda net: nm.output_moments(net, NOISE, "layerwise", check=16),
    "model": lambda net: nm.NetworkModel(net, MEAN).graph,
    "maps": lambda net: nm.two_stage_maps(net, MEAN).covariance(NOISE),
    "expected logits": lambda net: nm.ExpectedLogits(net, 0.5, method="layerwise")(MEAN[None]),
}


def ended_by(call: Callable[[nn.Module], object], net: nn.Module) -> BaseException | None:
    try:
        call(net)
    except BaseException as error:
        return error
    return None


LONG = "layerwise, checked"
"""The call with the most runs, at each of which it is stopped."""
ENDS = [pytest.param(KeyboardInterrupt, name, marks=[pytest.mark.slow] if name == LONG else []) for name in CALLS] + [
    (error, name) for error in (RuntimeError, ZeroDivisionError) for name in ("layerwise", "two-stage")
]


@pytest.mark.parametrize(("error", "name"), ENDS)
def test_a_run_that_ends_early_leaves_the_network_as_it_was(name, error):
    """Stopped at its first run, its second, …, a call ends in that error or in one that quotes it, and works again."""
    call = CALLS[name]
    reference = seeded(Stoppable)
    expected = call(reference)
    assert reference.clock.runs >= 2
    for run in itertools.count(1):
        net = seeded(Stoppable)
        net.clock.stop_at(run, error)
        with Untouched(net):
            stopped = ended_by(call, net)
            if net.clock.runs < run:  # it never came so far
                break
            if stopped is not None or error is not RuntimeError:  # after which recording is tried in another way
                explained = ValueError if issubclass(error, Exception) else error  # an interrupt must come through
                assert isinstance(stopped, error | explained)
                assert "stopped" in str(stopped)
            again = call(net)
        if isinstance(expected, nm.OutputMoments):
            assert isinstance(again, nm.OutputMoments)
            assert_same(again, expected)
        elif isinstance(expected, Tensor):
            assert_close(again, expected, atol=1e-13)
    assert run > 2


# threads


@pytest.mark.parametrize("name", ["a module used twice", "hooks", "normalisation used twice, and a shared buffer"])
def test_four_threads_on_one_fresh_network(name):
    """All methods at the same time, each thread in another order: the same answers as alone."""
    expected = {key: nm.output_moments(shared(name), NOISE, method) for key, method in METHODS.items()}
    for number in range(2):
        net, barrier = shared(name), threading.Barrier(4)
        failed: list[BaseException] = []

        def work(own: int, net: nn.Module = net, barrier: threading.Barrier = barrier, failed: list = failed) -> None:
            keys = list(METHODS)
            keys = keys[own:] + keys[:own]
            try:
                barrier.wait(60)
                for key in keys:
                    assert_same(nm.output_moments(net, NOISE, METHODS[key]), expected[key])
            except BaseException as error:
                failed.append(error)

        with Untouched(net):
            threads = [threading.Thread(target=work, args=(number + own,)) for own in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(300)
        assert not failed, failed[0]


def test_threads_while_the_weights_change():
    """Every answer belongs to weights that the network had: no mixture is kept for later calls."""
    net = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    done = threading.Event()
    failed: list[BaseException] = []

    def ask() -> None:
        try:
            while not done.is_set():
                nm.output_moments(net, NOISE, "layerwise")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for step in range(10):
            with torch.no_grad():
                net[-1].bias += 1
            if step % 3 == 0:
                nm.output_moments(net, NOISE, "sketch")
    finally:
        done.set()
        for thread in threads:
            thread.join(300)
    assert not failed, failed[0]
    fresh = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    fresh.load_state_dict(net.state_dict())
    assert_same(nm.output_moments(net, NOISE, "layerwise"), nm.output_moments(fresh.eval(), NOISE, "layerwise"))


@pytest.mark.parametrize("before", [0, 1], ids=["graph", "plan"])
def test_weights_that_change_between_two_runs(before, monkeypatch):
    """Another thread trains between the runs that a graph or a plan compares: they are made again, and none is kept."""
    net = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    runs, values = itertools.count(), NetworkGraph.values

    def then_trained(graph: NetworkGraph, *given: Any) -> Any:
        result = values(graph, *given)
        if next(runs) == before:
            with torch.no_grad():
                net[-1].bias += 1
        return result

    monkeypatch.setattr(NetworkGraph, "values", then_trained)
    first = nm.output_moments(net, NOISE, "layerwise", check=0)
    assert next(runs) == 4 + before  # one run compared with the network for each graph, and two for each plan
    monkeypatch.undo()
    fresh = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
    fresh.load_state_dict(net.state_dict())
    expected = nm.output_moments(fresh, NOISE, "layerwise", check=0)
    assert_same(first, expected)
    assert_same(nm.output_moments(net, NOISE, "layerwise", check=0), expected)


class Meanwhile(nn.Module):
    """While it runs, another thread draws a random number, if `wanted`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.drawn = types.SimpleNamespace(numbers=[], wanted=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.drawn.wanted:
            thread = threading.Thread(target=lambda: self.drawn.numbers.append(float(torch.rand(()))))
            thread.start()
            thread.join()
        return self.last(functional.relu(self.layer(x)))


@pytest.mark.parametrize("name", ["layerwise", "sketch", "two-stage", "linear"])
def test_random_numbers_of_other_threads_are_not_drawn_twice(name):
    """Other threads (a data loader, say) may draw torch's random numbers while a known network is checked."""
    net = seeded(Meanwhile)
    nm.output_moments(net, NOISE, METHODS[name])
    net.drawn.wanted = True
    torch.manual_seed(5)
    nm.output_moments(net, NOISE, METHODS[name])
    found = [*net.drawn.numbers, float(torch.rand(()))]
    torch.manual_seed(5)
    assert found == [float(torch.rand(())) for _ in found]


class _Pushes(nn.Module):
    def __init__(self, stack: list) -> None:
        super().__init__()
        self.stack, self.linear = stack, nn.Linear(4, 4)

    def forward(self, x):
        self.stack.append(x)
        return torch.relu(self.linear(x))


class _Pops(nn.Module):
    def __init__(self, stack: list) -> None:
        super().__init__()
        self.stack, self.linear = stack, nn.Linear(4, 2)

    def forward(self, x):
        return self.linear(x + self.stack.pop())


class _Slotted(nn.Module):
    __slots__ = ("scale",)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.scale = 3.0

    def forward(self, x):
        return torch.relu(self.linear(x)) * self.scale


def test_a_container_that_modules_share_is_shared_by_their_twins():
    torch.manual_seed(0)
    stack: list = []
    network = nn.Sequential(_Pushes(stack), _Pops(stack)).double().eval()
    noise = nm.Gaussian(torch.linspace(-1, 1, 4, dtype=torch.float64), std=0.2)
    found = nm.output_moments(network, noise, "layerwise")
    sampled = nm.monte_carlo(network, noise, 20_000, seed=1)
    assert_within_standard_errors(sampled.mean, found.mean, sampled.mean_standard_error)
    assert stack == []


def test_slots_and_cycles_are_followed():
    torch.manual_seed(0)
    network = _Slotted().eval()
    network.itself = {"cycle": None}
    network.itself["cycle"] = network.itself
    x = torch.ones(1, 4)
    twin = replica(network)
    assert torch.equal(twin(x), network(x))
    assert twin.itself["cycle"] is twin.itself
    assert twin.itself is not network.itself
