"""`NetworkModel`: what it shows, where it can be passed, what is kept between calls and for how long; never stale."""

from __future__ import annotations

import copy
import functools
import gc
import types
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import netmoments as nm
from netmoments.network import model as module
from netmoments.rules.registry import LAYER_RULES
from tests.closeness import assert_close
from tests.moments.problems import assert_same
from tests.network.sharing import Pointer, Untouched
from tests.network.small import POINT
from tests.networks import inputs, network, seeded

MEAN = torch.tensor([0.4, -0.2, 0.9, 0.1], dtype=torch.float64)
NOISE = nm.Gaussian(MEAN, std=0.3)


def deep(scores: int = 3) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, scores)))


# what it shows


def test_what_a_model_shows():
    net = network("residual")
    model = nm.NetworkModel(net, inputs("residual", 2))
    assert model.network is net
    assert model.outputs == 3
    assert model.relus == nm.relus(net, inputs("residual", 1))
    assert model.relu("block1.relu2") == model.relus[2]
    assert model.largest == 4 * 6 * 6
    assert model.pass_size == 6 * model.largest
    assert [model.graph.where(model.graph.output), model.graph.image.op] == ["fc", "placeholder"]
    assert repr(model) == "NetworkModel(Residual, inputs (2, 6, 6), 3 scores, 5 ReLUs)"


@pytest.mark.parametrize(
    ("name", "shape"), [("shared", (6,)), ("shared", (3, 6)), ("residual", (2, 6, 6)), ("residual", (3, 2, 6, 6))]
)
def test_an_example_is_an_input_or_a_batch_of_them(name, shape):
    model = nm.NetworkModel(network(name), torch.zeros(shape, dtype=torch.float64))
    assert tuple(model.image.shape) == (1, *inputs(name, 1).shape[1:])


def test_an_example_is_what_the_network_can_take():
    """One input or a batch of them: the first that the network can take."""
    rows = seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 2), nn.ReLU(), nn.Linear(2, 2)))
    assert tuple(nm.NetworkModel(rows, torch.zeros(2, 3, dtype=torch.float64)).image.shape) == (1, 2, 3)
    flat = nn.Sequential(nn.Linear(3, 2), nn.ReLU()).double().eval()
    assert tuple(nm.NetworkModel(flat, torch.zeros(2, 3, dtype=torch.float64)).image.shape) == (1, 3)
    with pytest.raises(ValueError, match=r"NetworkModel: the network cannot take an input of shape \(5,\)"):
        nm.NetworkModel(flat, torch.zeros(5, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"NetworkModel: example must be a torch tensor, got a list"):
        nm.NetworkModel(flat, [0.0] * 3)
    with pytest.raises(TypeError, match=r"NetworkModel: the network is torch\.float64 .* but the input torch\.float32"):
        nm.NetworkModel(flat, torch.zeros(3))
    with pytest.raises(ValueError, match=r"NetworkModel: the network is in training mode"):
        nm.NetworkModel(nn.Linear(3, 2), torch.zeros(3))


# where it can be passed


METHODS: dict[str, object] = {
    "auto": "auto",
    "layerwise": "layerwise",
    "sketch": nm.Sketch(probes=8),
    "two-stage": "two-stage",
    "linear": "linear",
    "sampling": nm.Sampling(50),
    "sampling with a control": nm.Sampling(50, control="two-stage"),
}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_takes_a_model(name):
    net, noise = deep(), nm.Gaussian(torch.stack([MEAN, -MEAN]), std=0.3)
    expected = nm.output_moments(net, noise, METHODS[name], 2)
    found = nm.output_moments(nm.NetworkModel(deep(), MEAN), noise, METHODS[name], 2)
    assert (found.method, found.cut, found.reason) == (expected.method, expected.cut, expected.reason)
    assert torch.equal(found.outputs, expected.outputs)
    assert_same(found, expected, atol=0)


def bank_of(net: Any) -> Tensor:
    return nm.LinearizationBank.at(net, torch.stack([MEAN, -MEAN])).networks.A


def clusters_of(net: Any) -> Tensor:
    images = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return nm.LinearizationBank.k_means(net, images, 2).networks.B


TAKERS: dict[str, Callable[[Any], Tensor]] = {
    "two_stage": lambda net: nm.two_stage(net, MEAN).A,
    "two_stage_maps": lambda net: nm.two_stage_maps(net, MEAN).covariance(NOISE),
    "a bank": bank_of,
    "a bank of clusters": clusters_of,
    "expected logits": lambda net: nm.ExpectedLogits(net, 0.3)(MEAN[None]),
    "expected logits, layerwise": lambda net: nm.ExpectedLogits(net, 0.3, method="layerwise")(MEAN[None]),
    "relus": lambda net: torch.tensor([relu.size for relu in nm.relus(net, MEAN[None])]),
    "a model": lambda net: torch.tensor(nm.NetworkModel(net, MEAN).outputs),
    "tightness": lambda net: torch.tensor(
        nm.tightness(net, NOISE, methods=["linear"], samples=100)["linear"].variance_error
    ),
    "monte_carlo": lambda net: nm.monte_carlo(net, NOISE, 50).mean,
}


@pytest.mark.parametrize("name", TAKERS)
def test_whatever_takes_a_network_takes_a_model(name):
    expected = TAKERS[name](deep())
    assert_close(TAKERS[name](nm.NetworkModel(deep(), MEAN)), expected, atol=0)


def test_attacks_take_a_model():
    net = seeded(lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)))
    images = torch.rand(2, 1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    labels = net(images).argmax(1)
    attack = nm.attacks.SparseSmooth(polish=0, samples=20, seed=1)
    expected, found = (attack(which, images, labels) for which in (net, nm.NetworkModel(net, images)))
    assert_close(found.mu, expected.mu, atol=1e-12)


def test_a_model_takes_inputs_of_other_shapes():
    net = seeded(
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8, 3), nn.ReLU()
        )
    )
    model = nm.NetworkModel(net, torch.zeros(1, 6, 6, dtype=torch.float64))
    for side in (6, 8, 5):
        x = torch.randn(2, 1, side, side, dtype=torch.float64, generator=torch.Generator().manual_seed(side))
        for method in ("layerwise", "two-stage"):
            noise = nm.Gaussian(x, std=0.1)
            fresh = copy.deepcopy(net)
            assert_same(nm.output_moments(model, noise, method), nm.output_moments(fresh, noise, method), atol=0)
    assert model.relus[0].shape == (2, 4, 4)


def test_a_model_of_a_converted_network():
    """Another dtype is another kind of input: nothing of the old one is used."""
    net = deep()
    model = nm.NetworkModel(net, MEAN)
    nm.output_moments(model, NOISE)
    net.float()
    noise = nm.Gaussian(MEAN.float(), std=0.3)
    assert_same(nm.output_moments(model, noise), nm.output_moments(deep().float(), noise), atol=0)
    with pytest.raises(TypeError, match=r"network is torch\.float32"):
        nm.output_moments(model, NOISE)


# smooth functions are warned about


def smooth_network() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)))


def test_a_smooth_function_is_warned_about_once_and_by_name():
    net, point = smooth_network(), POINT[0].double()
    noise = nm.Gaussian(point, std=0.1)
    with pytest.warns(UserWarning, match=r"gelu in 1, which is smooth") as caught:
        nm.output_moments(net, noise, "two-stage")
    assert len(caught) == 1
    assert caught[0].filename == __file__
    nm.two_stage(net, point)  # a warning would be an error here
    nm.two_stage(net, point.expand(2, 4))
    nm.output_moments(net, noise, "linear")
    nm.LinearizationBank.at(net, point.expand(2, 4))
    with pytest.warns(UserWarning, match=r"sigmoid in 3"):
        nm.output_moments(nn.Sequential(*smooth_network()[:3], nn.Sigmoid()).eval(), noise, "linear")


@pytest.mark.parametrize("call", ["two_stage", "two_stage_maps", "linear"])
def test_the_warning_points_to_the_caller(call):
    net = smooth_network()
    calls = {
        "two_stage": lambda: nm.two_stage(net, MEAN),
        "two_stage_maps": lambda: nm.two_stage_maps(net, MEAN),
        "linear": lambda: nm.output_moments(net, NOISE, "linear"),
    }
    with pytest.warns(UserWarning, match="gelu") as caught:
        calls[call]()
    assert [warning.filename for warning in caught] == [__file__]


def test_sampling_and_listing_do_not_linearize_and_so_do_not_warn():
    net = smooth_network()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nm.relus(net, POINT.double())
        nm.output_moments(net, nm.Gaussian(POINT[0].double(), std=0.1), nm.Sampling(10))
    with pytest.warns(UserWarning, match="gelu"):
        nm.two_stage(net, POINT[0].double())


# what is left as it was


def test_looking_leaves_nothing_behind():
    net = network("residual", torch.float32)
    net.fc.weight.requires_grad_(False)
    with Untouched(net):
        nm.relus(net, inputs("residual", 1, torch.float32))
    assert not any(m.training or m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_hooks_are_gone_after_an_error():
    net = network("lenet")
    with pytest.raises(ValueError, match="cannot take an input"), Untouched(net):
        nm.relus(net, torch.zeros(1, 3, 8, 8, dtype=torch.float64))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


# what is kept, and for how long


@pytest.fixture
def looks(monkeypatch) -> dict[str, int]:
    """How often networks are looked at, and graphs recorded."""
    counts = {"examined": 0, "traced_graph": 0}

    def counting(name: str) -> Callable[..., Any]:
        original = getattr(module, name)

        def call(*args: Any) -> Any:
            counts[name] += 1
            return original(*args)

        return call

    for name in counts:
        monkeypatch.setattr(module, name, counting(name))
    return counts


def test_a_network_is_looked_at_once_while_it_stays_the_same(looks):
    """Other weights are no reason to look again; other operations, or inputs of another kind, are."""
    net = deep()
    for method in METHODS.values():
        for _ in range(2):
            nm.output_moments(net, NOISE, method)
            nm.output_moments(nm.NetworkModel(net, MEAN), NOISE, method)
    assert looks == {"examined": 1, "traced_graph": 1}
    with torch.no_grad():
        net[0].weight.mul_(2)
    nm.output_moments(net, NOISE, "layerwise")
    assert looks == {"examined": 1, "traced_graph": 1}
    net[1] = nn.Hardtanh().eval()
    nm.output_moments(net, NOISE, "layerwise")
    assert looks == {"examined": 2, "traced_graph": 2}
    net.float()
    nm.output_moments(net, nm.Gaussian(MEAN.float(), std=0.3), "layerwise")
    assert looks == {"examined": 3, "traced_graph": 3}


def test_an_exported_program_is_looked_at_once_while_it_stays_the_same(looks):
    """The network that is made of it is remembered, but never used with weights of before."""
    program = torch.export.export(deep(), (MEAN[None],))
    for method in ("linear", "two-stage", "linear"):
        before = nm.output_moments(program, NOISE, method)
    assert looks == {"examined": 1, "traced_graph": 0}
    with torch.no_grad():
        program.state_dict["4.weight"].mul_(2)
    assert_close(nm.output_moments(program, NOISE, "linear").variance, 4 * before.variance, rtol=1e-12)
    program.state_dict["4.weight"] = nn.Parameter(program.state_dict["4.weight"].detach() * 2)
    assert_close(nm.output_moments(program, NOISE, "linear").variance, 16 * before.variance, rtol=1e-12)
    gone, others = weakref.ref(program), len(module._programs)
    del program
    gc.collect()
    assert gone() is None
    assert len(module._programs) == others - 1


@pytest.mark.parametrize("kind", ["a network", "a network of one registered layer", "an exported program"])
@pytest.mark.usefixtures("as_before")
def test_what_is_known_does_not_keep_a_network_alive(kind):
    net: Any = deep()
    if kind == "an exported program":
        net = nm.NetworkModel(torch.export.export(net, (MEAN[None],)), MEAN).network
    elif kind == "a network of one registered layer":
        net = seeded(Bent)
        nm.register_rule(Bent, nm.rules.elementwise)
    for method in METHODS.values():
        if kind != "a network of one registered layer" or method in ("layerwise", "auto"):
            nm.output_moments(net, NOISE, method)
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None


class Bent(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.square()


def test_a_model_keeps_its_network():
    model = nm.NetworkModel(deep(), MEAN)
    expected = nm.output_moments(deep(), NOISE)
    gc.collect()
    assert_same(nm.output_moments(model, NOISE), expected, atol=0)


# never stale


LIMIT = 0.9


@dataclass
class Settings:
    high: float = 0.7


class Configured(nn.Module):
    """Uses numbers from attributes, a configuration, a global, its class, plain tensors, arrays and a closure."""

    slope = 0.3

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 3)
        self.register_buffer("shift", torch.full((6,), 0.1))
        self.low, self.scale, self.reversed = -0.8, 1.2, False
        self.settings = Settings()
        self.offset = torch.linspace(-0.2, 0.2, 6, dtype=torch.float64)
        self.table = np.linspace(0.5, 1.5, 6)
        self.power = [1.1]
        self.set_gain, self.gain = closed_over(0.9)
        self.function: Callable[[Tensor], Tensor] = functional.relu
        self.hidden = [nn.Linear(5, 5).double().eval()]

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x) + self.shift.to(x.dtype)
        z = z.clamp(self.low, self.settings.high) * self.scale + self.offset
        z = torch.minimum(z, torch.full_like(z, LIMIT)) * torch.from_numpy(self.table)
        z = functional.leaky_relu(self.gain(z), self.slope) * self.power[0]
        if self.reversed:
            z = z.flip(1)
        return self.last(self.function(self.hidden[0](functional.relu(self.second(z)))))


def closed_over(value: float) -> tuple[Callable[[float], None], Callable[[Tensor], Tensor]]:
    def change(other: float) -> None:
        nonlocal value
        value = other

    return change, lambda x: value * x


def around(*layers: nn.Module) -> nn.Module:
    """Linear, the given layers, Linear, ReLU, Linear."""
    return nn.Sequential(nn.Linear(4, 6), *layers, nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


class Pictures(nn.Module):
    """A convolution and a pool, of the four inputs as one row."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool = nn.Conv1d(1, 2, 3, padding=1), nn.MaxPool1d(2, 1)
        self.last = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(functional.relu(self.pool(self.conv(x.unsqueeze(1)))).mean(2))


class Through(nn.Module):
    """A normalisation that is reached through an object."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.pointer = Pointer(self.norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(functional.relu(self.pointer(self.first(x))))


class OwnRelu(nn.Module):
    """max(x, 0) by operators that have no rule."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (x > 0)


def square() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))


def tied() -> nn.Module:
    net = square()
    net[2].weight = net[0].weight
    return net


Change = Callable[[Any], object]


def in_no_grad(change: Change) -> Change:
    def changing(net: Any) -> None:
        with torch.no_grad():
            change(net)

    return changing


def put(path: str, value: Any) -> Change:
    """Set net.path to a value, or net[number] if the path ends in a number."""

    def change(net: Any) -> None:
        *parents, name = path.split(".")
        for parent in parents:
            net = net[int(parent)] if parent.isdigit() else getattr(net, parent)
        if name.isdigit():
            net[int(name)] = value
        else:
            setattr(net, name, value)

    return change


def in_inference_mode(net: Any) -> None:
    with torch.inference_mode():
        net[0].weight.mul_(1.5)


def by_an_optimizer(net: Any) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(MEAN[None]).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def by_a_hook(net: Any) -> None:
    net[0].register_forward_hook(lambda layer, args, output: output + 1)


def by_a_global(net: Any) -> None:
    global LIMIT
    LIMIT = 0.2


def by_its_class(net: Any) -> None:
    type(net).slope = 0.8


def by_its_forward(net: Any) -> None:
    original = type(net).forward
    net.forward = types.MethodType(lambda self, x: original(self, 2 * x), net)


def by_swapping(net: Any) -> None:
    net[2].weight, net[0].weight = net[0].weight, net[2].weight


def by_untying(net: Any) -> None:
    net[2].weight = nn.Parameter(-net[0].weight.detach().clone())


def by_a_rule(net: Any) -> None:
    nm.register_rule(OwnRelu, lambda layer, example: nm.rules.PiecewiseLinear(*_relu_parts(example)))


def _relu_parts(example: Tensor) -> tuple[Tensor, ...]:
    """The parts of the rule for max(x, 0), with which `OwnRelu` has formulas."""
    flat = torch.zeros_like(example).flatten()
    return flat, flat, flat.unsqueeze(0) + 1, flat.unsqueeze(0)


OTHER = torch.linspace(0.5, 1.5, 24, dtype=torch.float64).reshape(6, 4)
CHANGES: dict[str, tuple[Callable[[], nn.Module], Change]] = {
    "weights in place": (around, in_no_grad(lambda net: net[0].weight.mul_(1.5))),
    "weights in place, in inference mode": (around, in_inference_mode),
    "weights by .data in place": (around, lambda net: net[0].weight.data.mul_(1.5)),
    "weights by another .data": (around, put("0.weight.data", OTHER)),
    "another Parameter": (around, put("0.weight", nn.Parameter(OTHER))),
    "a step of an optimizer": (around, by_an_optimizer),
    "load_state_dict": (around, lambda net: net.load_state_dict({k: 1.5 * v for k, v in net.state_dict().items()})),
    "load_state_dict by assignment": (
        around,
        lambda net: net.load_state_dict({k: 1.5 * v for k, v in net.state_dict().items()}, assign=True),
    ),
    "weights of two layers swapped": (square, by_swapping),
    "tied weights untied": (tied, by_untying),
    "a buffer in place": (Configured, lambda net: net.shift.add_(0.3)),
    "another buffer": (Configured, put("shift", torch.full((6,), 0.4, dtype=torch.float64))),
    "a limit as an attribute": (Configured, put("low", -0.1)),
    "a limit in a configuration": (Configured, put("settings.high", 0.3)),
    "another configuration": (Configured, put("settings", Settings(0.2))),
    "a limit as a global": (Configured, by_a_global),
    "an attribute of its class": (Configured, by_its_class),
    "a float": (Configured, put("scale", 0.7)),
    "a number in a list": (Configured, put("power.0", 0.6)),
    "a variable of a closure": (Configured, lambda net: net.set_gain(0.4)),
    "a plain tensor in place": (Configured, lambda net: net.offset.add_(0.3)),
    "another plain tensor": (Configured, put("offset", torch.linspace(0.3, -0.3, 6, dtype=torch.float64))),
    "an array in place": (Configured, lambda net: net.table.__imul__(0.5)),
    "another array": (Configured, put("table", np.linspace(1.5, 0.5, 6))),
    "a flag in forward": (Configured, put("reversed", True)),
    "another function": (Configured, put("function", torch.abs)),
    "a partial function": (Configured, put("function", functools.partial(functional.leaky_relu, negative_slope=0.4))),
    "weights of a module torch does not know": (Configured, in_no_grad(lambda net: net.hidden[0].weight.mul_(1.5))),
    "another module torch does not know": (
        Configured,
        lambda net: put("hidden.0", seeded(lambda: nn.Linear(5, 5), seed=9))(net),
    ),
    "another forward": (Configured, by_its_forward),
    "another activation": (lambda: around(nn.ReLU()), put("1", nn.Hardtanh().eval())),
    "negative_slope": (lambda: around(nn.LeakyReLU(0.1)), put("1.negative_slope", 0.6)),
    "alpha of ELU": (lambda: around(nn.ELU()), put("1.alpha", 0.3)),
    "beta of Softplus": (lambda: around(nn.Softplus()), put("1.beta", 3.0)),
    "approximate of GELU": (lambda: around(nn.GELU()), put("1.approximate", "tanh")),
    "limits of Hardtanh": (lambda: around(nn.Hardtanh()), put("1.max_val", 0.2)),
    "threshold of Softshrink": (lambda: around(nn.Softshrink(0.1)), put("1.lambd", 0.4)),
    "eps of LayerNorm": (lambda: around(nn.LayerNorm(6)), put("1.eps", 0.5)),
    "eps of BatchNorm": (lambda: around(nn.BatchNorm1d(6)), put("1.eps", 0.5)),
    "running statistics in place": (lambda: around(nn.BatchNorm1d(6)), lambda net: net[1].running_var.mul_(3)),
    "running statistics through an object": (Through, put("norm.running_mean", torch.ones(6, dtype=torch.float64))),
    "padding of a convolution": (Pictures, lambda net: (put("conv.padding_mode", "circular")(net), _padded(net))),
    "kernel of a pool": (Pictures, put("pool.kernel_size", 3)),
    "another stride of a pool": (Pictures, put("pool.stride", 2)),
    "a module at the end": (around, lambda net: net.append(nn.Hardtanh(-0.1, 0.1).eval())),
    "a module less": (lambda: around(nn.ReLU()), lambda net: net.__delitem__(1)),
    "another number of scores": (around, lambda net: put("3", seeded(lambda: nn.Linear(5, 4), seed=9))(net)),
    "a hook": (around, by_a_hook),
    "a registered rule": (lambda: around(OwnRelu()), by_a_rule),
}


def _padded(net: Any) -> None:
    net.conv._reversed_padding_repeated_twice = [1, 1]


NO_EFFECT: dict[str, tuple[Callable[[], nn.Module], Change]] = {
    "p of a dropout": (lambda: around(nn.Dropout(0.1)), put("1.p", 0.9)),
    "momentum of BatchNorm": (lambda: around(nn.BatchNorm1d(6)), put("1.momentum", 0.7)),
    "requires_grad": (around, lambda net: net.requires_grad_(False)),
    "an attribute that forward does not use": (around, put("note", 3.0)),
}
ASKED = ("layerwise", "sketch", "two-stage")


@pytest.fixture
def as_before(monkeypatch):
    """Restores the global settings that tests change."""
    monkeypatch.setitem(globals(), "LIMIT", LIMIT)
    monkeypatch.setattr(Configured, "slope", Configured.slope)
    with mock.patch.dict(LAYER_RULES, clear=True):
        yield


def answer(net: Any, method: str) -> nm.OutputMoments | str:
    """The moments, or why there are none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*which is smooth")
        try:
            return nm.output_moments(net, NOISE, nm.Sketch(probes=8) if method == "sketch" else method)
        except ValueError as error:
            if "no rule for" not in str(error):
                raise
            return str(error)


def another_answer(one: nm.OutputMoments | str, other: nm.OutputMoments | str) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return one != other
    return one.mean.shape != other.mean.shape or not torch.allclose(one.covariance, other.covariance, 1e-6, 0)


def assert_same_answer(found: nm.OutputMoments | str, expected: nm.OutputMoments | str, what: str) -> None:
    if isinstance(expected, str):
        assert found == expected, what
        return
    assert not isinstance(found, str), found
    assert found.mean.shape == expected.mean.shape, what
    assert_close(found.mean, expected.mean, atol=1e-12, what=what)
    assert_close(found.covariance, expected.covariance, atol=1e-12, what=what)


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("name", [*CHANGES, *NO_EFFECT])
def test_a_changed_network_is_never_answered_for_as_it_was(name):
    """After a change, answers for the network and for its model are those for a copy that was never seen before."""
    make, change = {**CHANGES, **NO_EFFECT}[name]
    net = seeded(make)
    model = nm.NetworkModel(net, MEAN)
    before = {method: answer(net, method) for method in ASKED}
    change(net)
    shown = False
    fresh = copy.deepcopy(net)
    for method in ASKED:
        expected = answer(fresh, method)
        assert_same_answer(answer(net, method), expected, f"{method}, {name}")
        shown = shown or another_answer(before[method], expected)
    assert_same_answer(answer(model, ASKED[0]), answer(fresh, ASKED[0]), f"the model, {name}")
    assert shown == (name in CHANGES), "a change must show where it has an effect"


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("name", ["negative_slope", "a limit as a global", "another activation"])
def test_what_does_not_go_through_output_moments_is_not_stale_either(name):
    make, change = CHANGES[name]
    net = seeded(make)
    calls: dict[str, Callable[[Any], Tensor]] = {
        "two_stage": lambda net: nm.two_stage(net, MEAN).B,
        "two_stage_maps": lambda net: nm.two_stage_maps(net, MEAN).covariance(NOISE),
        "expected logits": lambda net: nm.ExpectedLogits(net, 0.3, method="layerwise")(MEAN[None]),
        "a sketch's expected logits": lambda net: nm.ExpectedLogits(net, 0.3, method="sketch")(MEAN[None]),
        "relus": lambda net: torch.tensor([relu.index for relu in nm.relus(net, MEAN[None])]),
    }
    for call in calls.values():
        call(net)
    change(net)
    fresh = copy.deepcopy(net)
    for what, call in calls.items():
        assert_close(call(net), call(fresh), atol=1e-12, what=what)


def test_a_change_is_seen_where_what_was_recorded_is_refused():
    class Either(nn.Module):
        shrinks = True

        def forward(self, y: Tensor) -> Tensor:
            return functional.hardshrink(y, 0.2) if self.shrinks else functional.relu(y)

    net = seeded(lambda: nn.Sequential(nn.Linear(4, 4), Either(), nn.Linear(4, 2)))
    with pytest.raises(ValueError, match="no rule for"):
        nm.output_moments(net, NOISE, "layerwise")
    net[1].shrinks = False
    plain = nn.Sequential(net[0], nn.ReLU(), net[2]).eval()
    assert_same(nm.output_moments(net, NOISE, "layerwise"), nm.output_moments(plain, NOISE, "layerwise"))


def test_scores_that_come_or_go_can_be_asked_for():
    """The number of scores, or their indices, are those of the network as it is now."""
    net = deep(scores=3)
    nm.output_moments(net, NOISE)
    net[4] = seeded(lambda: nn.Linear(5, 4))
    for method in ("layerwise", "sketch", "two-stage", "linear", nm.Sampling(50)):
        net[4] = seeded(lambda: nn.Linear(5, 3))
        nm.output_moments(net, NOISE, method)
        net[4] = seeded(lambda: nn.Linear(5, 4))
        assert nm.output_moments(net, NOISE, method, 4).mean.shape == (4,), method
        net[4] = seeded(lambda: nn.Linear(5, 3))
        nm.output_moments(net, NOISE, method)
        net[4] = seeded(lambda: nn.Linear(5, 4))
        assert nm.output_moments(net, NOISE, method, [3]).mean.shape == (1,), method
        net[4] = seeded(lambda: nn.Linear(5, 2))
        with pytest.raises(ValueError, match=r"from 1 to the network's 2 scores, .*got 4"):
            nm.output_moments(net, NOISE, method, 4)


def test_relus_that_come_and_go_are_listed():
    net = deep()
    model = nm.NetworkModel(net, MEAN)
    net.append(nn.ReLU().eval())
    for which in (net, model):
        assert [relu.name for relu in nm.relus(which, MEAN[None])] == ["1", "3", "5"]
    assert nm.output_moments(model, NOISE, "two-stage").cut == "5"
    net[1] = nn.Identity().eval()
    assert [relu.name for relu in nm.relus(net, MEAN[None])] == ["3", "5"]
    assert nm.output_moments(model, NOISE, nm.TwoStage(0)).cut == "3"


def test_a_network_that_becomes_unfit_is_refused():
    net = deep()
    nm.output_moments(net, NOISE, "layerwise")
    net[1].forward = lambda x: functional.dropout(x, 0.5, training=True)
    for method in ASKED:
        with pytest.raises(ValueError, match="not deterministic"):
            nm.output_moments(net, NOISE, method)
    del net[1].forward
    assert_same(nm.output_moments(net, NOISE, "layerwise"), nm.output_moments(deep(), NOISE, "layerwise"))


class _Recorded(nn.Module):
    """Runs inside a profiler's record, whose operations have arguments that cannot be compared."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))

    def forward(self, x):
        with torch.profiler.record_function("layers"):
            return self.layers(x)


class _Delegating(nn.Module):
    """A wrapper that looks like what it wraps, and scales its scores."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("network"), name)

    def forward(self, x):
        return 10 * self.network(x)


class _Padded(nn.Module):
    """A sequence of six, of which a mask hides two: torch then computes with nested tensors, which have no shape."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder, self.last = nn.TransformerEncoder(layer, 1), nn.Linear(8, 2)

    def forward(self, x):
        hidden = torch.arange(6).expand(len(x), -1) >= 4
        return self.last(self.encoder(x, src_key_padding_mask=hidden)[:, :4].mean(1))


class _Counted(nn.Module):
    """Its scores depend on an integer buffer; another buffer is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(2**24))
        self.register_buffer("unset", torch.tensor(float("nan")))
        self.linear = nn.Linear(4, 2)

    def forward(self, x):
        return torch.relu(self.linear(x)) * (1 + (self.count - 2**24))


def _small_noise() -> nm.Gaussian:
    return nm.Gaussian(torch.linspace(-1, 1, 4), std=0.3)


@pytest.mark.parametrize("method", ["layerwise", "sketch", "two-stage", "linear", "sampling"])
def test_a_profilers_record_is_no_obstacle(method):
    torch.manual_seed(0)
    network = _Recorded().eval()
    plain = nm.output_moments(network.layers, _small_noise(), method)
    torch.testing.assert_close(nm.output_moments(network, _small_noise(), method).mean, plain.mean)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_inside_are_no_obstacle():
    torch.manual_seed(0)
    network = _Padded().eval()
    noise = nm.Gaussian(torch.randn(6, 8), std=0.3, event_ndim=2)
    plain = nm.monte_carlo(network, noise, samples=10_000)
    for method in ("auto", "layerwise"):
        moments = nm.output_moments(network, noise, method)
        torch.testing.assert_close(moments.mean.double(), plain.mean.double(), rtol=0, atol=0.02)


def test_a_wrapper_round_a_compiled_network_is_not_taken_off():
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).eval()
    plain = nm.output_moments(inner, _small_noise(), "layerwise")
    wrapped = nm.output_moments(_Delegating(inner).eval(), _small_noise(), "layerwise")
    torch.testing.assert_close(wrapped.mean, 10 * plain.mean)
    compiled = nm.output_moments(torch.compile(inner), _small_noise(), "layerwise")
    torch.testing.assert_close(compiled.mean, plain.mean)


def test_integer_buffers_are_compared_exactly_and_nan_is_nan(monkeypatch):
    torch.manual_seed(0)
    network = _Counted().eval()
    before = nm.output_moments(network, _small_noise(), "layerwise")
    network.count += 1  # float32 cannot tell the two apart
    torch.testing.assert_close(nm.output_moments(network, _small_noise(), "layerwise").mean, 2 * before.mean)
    computed = []
    layerwise = nm.Layerwise.moments

    def counted(self, request):
        computed.append(self)
        return layerwise(self, request)

    monkeypatch.setattr(nm.Layerwise, "moments", counted)
    nm.output_moments(network, _small_noise(), "layerwise")
    assert len(computed) == 1


def test_weights_that_are_not_made_yet_are_refused():
    network = nn.Sequential(nn.LazyLinear(3), nn.ReLU(), nn.Linear(3, 2)).eval()
    with pytest.raises(ValueError, match=r"lazy modules.*run it once first"):
        nm.output_moments(network, _small_noise())
    assert isinstance(network[0], nn.LazyLinear)
    assert nn.parameter.is_lazy(network[0].weight)


def test_an_example_that_is_refused_says_why():
    network = nn.Sequential(nn.Linear(4, 3), _Random()).eval()
    with pytest.raises(ValueError, match="not deterministic"), Untouched(network):
        nm.NetworkModel(network, torch.zeros(2, 4))


class _Random(nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)


def test_few_shapes_of_inputs_are_remembered():
    network = nn.Sequential(nn.Conv1d(1, 2, 3), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten()).eval()
    models = [nm.NetworkModel(network, torch.zeros(1, 1, size)) for size in range(5, 11 + module.KEPT_SHAPES)]
    assert len(module._known[network]) == module.KEPT_SHAPES
    first = nm.output_moments(models[0], nm.Gaussian(torch.zeros(1, 5), std=0.1), samples=100)  # goes on as it was
    assert first.mean.shape == (2,)


class _EarlyExit(nn.Module):
    """A cascade: rows of which the first layer is sure enough end there."""

    def __init__(self, read: Callable[[Tensor], float]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 3), nn.Tanh())
        self.threshold, self.read = 0.99, read

    def forward(self, x: Tensor) -> Tensor:
        rows = []
        for row in x:
            early = self.first(row)
            rows.append(early if self.read(early.softmax(0).max()) > self.threshold else 5 * self.second(row))
        return torch.stack(rows)


READS: dict[str, Callable[[Tensor], float]] = {
    "item": lambda x: x.detach().item(),
    "float": lambda x: float(x.detach()),
    "list": lambda x: x.reshape(1).tolist()[0],
    "numpy": lambda x: float(x.detach().numpy()),
    "array": lambda x: float(np.asarray(x.detach())),
}


@pytest.mark.parametrize("read", READS)
def test_what_python_decides_by_is_never_stale_nor_exact(read):
    """A threshold at which only noisy images take the other way: no operation of a run shows that it changed."""
    net, given = seeded(lambda: _EarlyExit(READS[read]), torch.float32), nm.Gaussian(torch.ones(4), std=0.5)
    sure = float(net.first(torch.ones(4)).detach().softmax(0).max())
    assert nm.NetworkModel(net, torch.ones(1, 4)).reads_values
    before = nm.output_moments(net, given, tolerance=0.05)
    assert before.method == "sampling"
    net.threshold = sure + 0.01
    now = nm.output_moments(net, given, tolerance=0.05)
    truth = nm.monte_carlo(net, given, 20_000)
    assert bool(((now.mean - truth.mean).abs() < 5 * (now.error.mean**2 + truth.mean_standard_error**2).sqrt()).all())
    assert float(((before.mean - truth.mean).abs() / before.error.mean).max()) > 5


class _Counting(nn.Module):
    """Runs are counted, and a mean of inputs is kept, that nothing depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 3)
        self.register_buffer("runs", torch.zeros(()))
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        self.seen = x
        return torch.relu(self.last(x))


@pytest.mark.parametrize("method", ["auto", "layerwise", "sketch", "two-stage", "linear", "sampling"])
def test_a_run_changes_no_buffer_and_leaves_nothing_in_the_network(method):
    net, given = seeded(_Counting, torch.float32), nm.Gaussian(torch.ones(2, 4), std=0.5)
    for _ in range(2):
        nm.output_moments(net, given, method)
    nm.flip_probability(net, given, relative_error=0.5)
    assert float(net.runs) == 0
    assert not bool(net.average.any())
    assert "seen" not in vars(net)
    with torch.no_grad():  # and its weights still count
        net.last.weight.neg_()
    found, truth = nm.output_moments(net, given, method), nm.monte_carlo(seeded(_Counting, torch.float32), given, 5000)
    assert float((found.mean - truth.mean).abs().max()) > 0.05
