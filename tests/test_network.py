"""Any network: its ReLUs however they are written, cuts at each of them, exported programs, loading, bad input."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

import netmoments as nm
from netmoments.network.exported import ExportedNetwork
from netmoments.network.relu_calls import Cut, find_relu
from netmoments.network.validate import as_network
from netmoments.network.weights import read_weights
from tests.closeness import assert_close, assert_within_standard_errors
from tests.networks import FACTORIES, Block, Residual, inputs, network, seeded

POINT = torch.tensor([[0.3, -1.0, 0.7, 0.2]])


class Wrapped(nn.Module):
    """Linear, a function, linear."""

    def __init__(self, function: Callable[[Tensor], Tensor], hidden: int = 5) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(4, hidden), nn.Linear(hidden, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


def wrapped(function: Callable[[Tensor], Tensor]) -> nn.Module:
    return seeded(lambda: Wrapped(function), torch.float32)


def statement(x: Tensor) -> Tensor:
    x.relu_()
    return x


def functional_statement(x: Tensor) -> Tensor:
    functional.relu(x, inplace=True)
    return x


def clamped_statement(x: Tensor) -> Tensor:
    x.clamp_(min=0)
    return x


RELUS: dict[str, Callable[[Tensor], Tensor]] = {
    "nn.ReLU": nn.ReLU(),
    "nn.ReLU in place": nn.ReLU(inplace=True),
    "functional.relu": functional.relu,
    "functional.relu in place": lambda x: functional.relu(x, inplace=True),
    "functional.relu in place by position": lambda x: functional.relu(x, True),
    "functional.relu by keyword": lambda x: functional.relu(input=x),
    "functional.relu as a statement": functional_statement,
    "functional.relu_": lambda x: functional.relu_(x),
    "torch.relu": torch.relu,
    "torch.relu_": torch.relu_,
    "Tensor.relu": lambda x: x.relu(),
    "Tensor.relu_": lambda x: x.relu_(),
    "Tensor.relu_ as a statement": statement,
    "torch.clamp": lambda x: torch.clamp(x, min=0),
    "torch.clamp by keyword": lambda x: torch.clamp(input=x, min=0.0),
    "torch.clamp by a tensor": lambda x: torch.clamp(x, min=torch.zeros(())),
    "torch.clamp without maximum": lambda x: torch.clamp(x, 0, None),
    "torch.clip": lambda x: torch.clip(x, 0),
    "Tensor.clamp": lambda x: x.clamp(0),
    "Tensor.clamp_ as a statement": clamped_statement,
    "Tensor.clip_": lambda x: x.clip_(min=0.0),
    "torch.clamp_min": lambda x: torch.clamp_min(x, 0),
    "Tensor.clamp_min_": lambda x: x.clamp_min_(0.0),
    "nn.Threshold": nn.Threshold(0, 0),
    "functional.threshold": lambda x: functional.threshold(x, 0, 0),
    "functional.threshold in place": lambda x: functional.threshold(x, 0.0, 0.0, True),
    "functional.threshold_": lambda x: functional.threshold_(x, 0.0, 0.0),
    "aten": lambda x: torch.ops.aten.relu.default(x),
}

OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu6": functional.relu6,
    "nn.ReLU6": nn.ReLU6(),
    "hardtanh": lambda x: functional.hardtanh(x, 0, 6),
    "clamp(0, 6)": lambda x: x.clamp(0, 6),
    "clamp(max=0)": lambda x: x.clamp(max=0),
    "clamp(0.1)": lambda x: x.clamp(0.1),
    "clamp_min(-1)": lambda x: x.clamp_min(-1),
    "leaky_relu": functional.leaky_relu,
    "prelu": nn.PReLU(),
    "threshold(0.1, 0)": lambda x: functional.threshold(x, 0.1, 0),
    "threshold(0, 1)": lambda x: functional.threshold(x, 0, 1),
    "abs": torch.abs,
}


@pytest.mark.parametrize("spelling", RELUS)
def test_every_spelling_is_a_relu(spelling):
    net = wrapped(RELUS[spelling])
    (relu,) = nm.relus(net, POINT)
    assert (relu.index, relu.shape, relu.size, relu.batched) == (0, (5,), 5, True)
    assert relu.name == ("function" if spelling.startswith("nn.") else "network")
    cut = Cut(net, relu)
    z = cut.stem(POINT)
    assert torch.equal(z, net.first(POINT))
    assert torch.equal(cut.head(POINT, torch.relu(z)), net(POINT))
    other = torch.rand(1, 5)
    assert torch.equal(cut.head(POINT, other), net.last(other))


@pytest.mark.parametrize("spelling", OTHERS)
def test_what_is_not_a_relu(spelling):
    assert nm.relus(wrapped(OTHERS[spelling]), POINT) == ()


def names(name: str) -> list[str]:
    return [relu.name for relu in nm.relus(network(name), inputs(name, 1))]


def test_names_and_shapes():
    assert names("lenet") == ["relu1", "relu2", "relu3"]
    assert names("residual") == ["relu", "block1.relu1", "block1.relu2", "block2.relu1", "block2.relu2"]
    assert names("shared") == ["act#0", "act#1"]
    assert names("nested") == ["inner", "network#0", "network#1"]
    assert names("concatenation") == ["network#0", "network#1"]
    shapes = [relu.shape for relu in nm.relus(network("lenet"), inputs("lenet", 3))]
    assert shapes == [(3, 4, 4), (4, 2, 2), (12,)]
    assert [relu.size for relu in nm.relus(network("lenet"), inputs("lenet", 1))] == [48, 16, 12]
    sequential = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2), nn.ReLU()).eval()
    assert [(relu.index, relu.name) for relu in nm.relus(sequential, POINT)] == [(0, "1"), (1, "3")]


def test_a_relu_is_found_from_either_end_or_by_name():
    found = nm.relus(network("residual"), inputs("residual", 1))
    assert find_relu(found, 0).name == find_relu(found, -5).name == "relu"
    assert find_relu(found, -1) == find_relu(found, 4) == find_relu(found, "block2.relu2") == found[4]


@pytest.mark.parametrize("name", FACTORIES)
def test_cutting_and_joining_is_the_network(name):
    """head(x, relu(stem(x))) = network(x); the pre-activations are what the ReLU got, the input is left alone."""
    net, x = network(name), inputs(name, 3)
    kept, expected = x.clone(), net(x.clone())
    for relu in nm.relus(net, x):
        cut = Cut(net, relu)
        z = cut.stem(x)
        assert z.shape == (3, *relu.shape)
        assert_close(cut.head(x, torch.relu(z)), expected, rtol=1e-13, atol=1e-14, what=relu.name)
        one = cut.head(x[1:2], torch.relu(cut.stem(x[1:2])))
        assert_close(one, expected[1:2], rtol=1e-13, atol=1e-14, what=relu.name)
        y = torch.relu(z)
        before = y.clone()
        cut.head(x, y)
        assert torch.equal(y, before)
    assert torch.equal(x, kept)


def test_relus_that_do_not_see_the_batch_first():
    for name, shape in (("folded", (2, 4)), ("transposed", (2, 1, 4)), ("image by image", (5,))):
        (relu,) = nm.relus(network(name), inputs(name, 2))
        assert (relu.shape, relu.batched) == (shape, False)


def test_a_network_that_catches_exceptions_is_cut_all_the_same():
    class Careful(Wrapped):
        def forward(self, x: Tensor) -> Tensor:
            try:
                return super().forward(x)
            except Exception:
                return x[:, :3]

    net = seeded(lambda: Careful(torch.relu), torch.float32)
    assert torch.equal(Cut(net, nm.relus(net, POINT)[0]).stem(POINT), net.first(POINT))


def test_looking_leaves_nothing_behind():
    net = network("residual", torch.float32)
    net.fc.weight.requires_grad_(False)
    needs = [parameter.requires_grad for parameter in net.parameters()]
    state = {name: value.clone() for name, value in net.state_dict().items()}
    random = torch.get_rng_state()
    nm.relus(net, inputs("residual", 1, torch.float32))
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(state[name], value) for name, value in net.state_dict().items())
    assert [parameter.requires_grad for parameter in net.parameters()] == needs
    assert all(parameter.grad is None for parameter in net.parameters())
    assert not any(m.training or m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_hooks_are_gone_after_an_error():
    net = network("lenet")
    with pytest.raises(ValueError, match="cannot take an input"):
        nm.relus(net, torch.zeros(1, 3, 8, 8, dtype=torch.float64))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_a_compiled_network_is_looked_through():
    net = network("shared")
    assert as_network(torch.compile(net), "test") is net


# smooth functions


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


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.memory, self.last = kind(2, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.memory(x.reshape(len(x), 2, 2))[0][:, -1]))


SMOOTH: dict[str, Callable[[], nn.Module]] = {
    "sigmoid in function": lambda: Wrapped(nn.Sigmoid()),
    "tanh in network": lambda: Wrapped(torch.tanh),
    "exp in network": lambda: Wrapped(lambda x: x.exp()),
    "pow in network": lambda: Wrapped(lambda x: x**2),
    "softmax in function": lambda: Wrapped(nn.Softmax(1)),
    "layer_norm in function": lambda: Wrapped(nn.LayerNorm(5)),
    "silu in function": lambda: Wrapped(nn.SiLU(inplace=True)),
    "lstm in memory": lambda: Recurrent(nn.LSTM),
    "gru in memory": lambda: Recurrent(nn.GRU),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_smooth_functions_are_known(name):
    net = seeded(SMOOTH[name], torch.float32)
    with pytest.warns(UserWarning, match=f"output_moments: the network calls {name}, which is smooth"):
        nm.output_moments(net, nm.Gaussian(POINT[0], std=0.1), "linear")


def test_sampling_and_listing_do_not_linearize_and_so_do_not_warn():
    net = smooth_network()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nm.relus(net, POINT.double())
        nm.output_moments(net, nm.Gaussian(POINT[0].double(), std=0.1), "sampling", samples=10)
    with pytest.warns(UserWarning, match="gelu"):
        nm.two_stage(net, POINT[0].double())


# exported programs


class ForExport(nn.Module):
    """All kinds of ReLU calls, with a skip connection, for (2, 5, 5) images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.block = nn.Conv2d(2, 3, 3), Block(3)
        self.hidden, self.last = nn.Linear(27, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.conv(x)
        z.relu_()
        return self.last(torch.clamp(self.hidden(self.block(z).flatten(1)), min=0))


EXPORTS = {"fixed": (1, None), "dynamic": (3, ({0: torch.export.Dim("batch")},))}


@pytest.fixture(scope="module")
def plain() -> nn.Module:
    return seeded(ForExport)


@pytest.fixture(scope="module", params=EXPORTS)
def exported(request, plain) -> torch.export.ExportedProgram:
    batch, dynamic = EXPORTS[request.param]
    example = torch.zeros(batch, 2, 5, 5, dtype=torch.float64)
    return torch.export.export(plain, (example,), dynamic_shapes=dynamic)


def images(count: int) -> Tensor:
    return torch.randn(count, 2, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def test_an_exported_program_has_the_names_of_its_modules(exported, plain):
    wanted = ["network#0", "block.relu1", "block.relu2", "network#1"]
    for net in (plain, exported, exported.module(), as_network(exported, "test")):
        found = nm.relus(net, images(2))
        assert [relu.name for relu in found] == wanted
        assert [relu.shape for relu in found] == [(3, 3, 3)] * 3 + [(6,)]


def test_an_exported_program_is_cut_and_linearized_as_its_network(exported, plain):
    x = images(3)
    for relu, same in zip(nm.relus(exported, x), nm.relus(plain, x), strict=True):
        cut, expected = Cut(as_network(exported, "test"), relu), Cut(plain, same)
        assert_close(cut.stem(x), expected.stem(x), atol=1e-14)
        y = torch.rand(3, *relu.shape, dtype=torch.float64)
        assert_close(cut.head(x, y), expected.head(x, y), atol=1e-14)
        g, h = nm.two_stage(exported, x, relu.index), nm.two_stage(plain, x, relu.name)
        assert (g.D is None) == (h.D is None) == (relu.name in ("block.relu2", "network#1", "network#0"))
        for part in ("A", "c1", "B", "c2") if g.D is None else ("A", "c1", "B", "c2", "D"):
            assert_close(getattr(g, part), getattr(h, part), atol=1e-13, what=f"{relu.name} {part}")


def test_an_exported_program_inside_a_network(exported, plain):
    x = images(3)
    net = nn.Sequential(nn.Identity(), as_network(exported, "test")).eval()
    assert [relu.name for relu in nm.relus(net, x)] == [f"1#{number}" for number in range(4)]
    for layer in range(4):
        assert_close(nm.two_stage(net, x, layer).A, nm.two_stage(plain, x, layer).A, atol=1e-13)


def test_an_exported_program_is_saved_loaded_and_used(exported, plain, tmp_path):
    torch.export.save(exported, tmp_path / "network.pt2")
    net = nm.load_network(tmp_path / "network.pt2")
    assert isinstance(net, ExportedNetwork)
    assert not net.train().training
    x = images(4)
    assert_close(net(x), plain(x), atol=1e-14)
    noise = nm.Gaussian(x, std=0.05)
    for method in ("two-stage", "linear"):
        found, expected = nm.output_moments(net, noise, method), nm.output_moments(plain, noise, method)
        assert_close(found.mean, expected.mean, atol=1e-13)
        assert_close(found.covariance, expected.covariance, atol=1e-14)
    assert nm.output_moments(net, noise, layer="block.relu1").cut == "block.relu1"
    sampled, reference = (nm.monte_carlo(which, noise, 500) for which in (net, plain))
    assert_close(sampled.variance, reference.variance, rtol=1e-10)


# loading

FACTORY = """
from __future__ import annotations
from dataclasses import dataclass
from torch import nn

@dataclass
class Sizes:
    hidden: int = 5

class Small(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, Sizes().hidden), nn.ReLU(), nn.Dropout(), nn.Linear(5, 3))

def make():
    return Small()

def nothing():
    return 7
"""


@pytest.fixture
def factory_file(tmp_path) -> Path:
    path = tmp_path / "small_network.py"
    path.write_text(FACTORY)
    return path


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Dropout(), nn.Linear(5, 3))


@pytest.mark.parametrize("name", ["make", "Small"])
def test_a_factory_in_a_file_with_weights(factory_file, tmp_path, name):
    trained = seeded(small, torch.float32, seed=4)
    save_file(trained.state_dict(), tmp_path / "weights.safetensors")
    net = nm.load_network(f"{factory_file}:{name}", tmp_path / "weights.safetensors")
    assert not any(module.training for module in net.modules())
    assert torch.equal(net(POINT), trained(POINT))
    assert not nm.load_network(f"{factory_file}:{name}").training


def test_weights_in_half_precision_and_from_numpy(tmp_path):
    import numpy as np

    trained = seeded(small, torch.float32, seed=4)
    save_file({k: v.half() for k, v in trained.state_dict().items()}, tmp_path / "half.safetensors")
    assert all(x.dtype == torch.float32 for x in read_weights(tmp_path / "half.safetensors").values())
    np.savez(tmp_path / "weights.npz", **{k: v.numpy() for k, v in trained.state_dict().items()})
    assert all(torch.equal(read_weights(tmp_path / "weights.npz")[k], v) for k, v in trained.state_dict().items())


@pytest.mark.parametrize(("name", "relus"), [("digits", 3), ("lenet", 3), ("faces", 7)])
def test_networks_of_the_zoo_come_trained(name, relus):
    net = nm.load_network(name)
    example = torch.zeros(1, *nm.zoo.entry(name).input_shape)
    assert len(nm.relus(net, example)) == relus
    fresh = nm.zoo.build(name)
    assert not fresh.training
    assert fresh(example).shape == net(example).shape


def test_the_fire_modules_of_squeezenet():
    net = nm.zoo.build("squeezenet")
    found = nm.relus(net, torch.zeros(1, 3, 227, 227))
    assert len(found) == 18
    assert [found[0].name, found[2].name, found[-1].name] == ["1.relu1", "1.fire2.expand_relu", "1.relu10"]
    assert found[2].shape == (128, 55, 55)


# bad input


class Returning(nn.Module):
    """Returns a function of relu(x); what it returns is the matter."""

    def __init__(self, function: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> object:
        return self.function(torch.relu(x))


def returning(function: Callable[[Tensor], object]) -> nn.Module:
    return Returning(function).eval()


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
TWICE = seeded(lambda: nn.Sequential(nn.Linear(4, 4), *[nn.ReLU()] * 2), torch.float32)

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
    "scripted": (lambda: nm.relus(scripted(), POINT), TypeError, "a scripted network cannot be looked into"),
    "no ReLU": (
        lambda: nm.two_stage(nn.Linear(4, 2).eval(), POINT[0]),
        ValueError,
        r"has no ReLU.*method='linear' or method='sampling'",
    ),
    "unknown name": (
        lambda: nm.two_stage(SMALL, POINT[0], "relu7"),
        ValueError,
        r"no ReLU is named 'relu7'; the ReLUs are: 0 '1'",
    ),
    "name without its number": (
        lambda: nm.two_stage(TWICE, POINT[0], "1"),
        ValueError,
        r"'1' calls a ReLU 2 times; choose one of 1#0, 1#1",
    ),
    "index too large": (lambda: nm.two_stage(SMALL, POINT[0], 1), ValueError, r"layer 1 is not one of .* 1 ReLUs: 0"),
    "index too small": (lambda: nm.two_stage(SMALL, POINT[0], -2), ValueError, r"layer -2 is not one of"),
    "layer of another type": (lambda: nm.two_stage(SMALL, POINT[0], 0.5), TypeError, r"a number or a name, got 0\.5"),
    "layer true": (lambda: nm.two_stage(SMALL, POINT[0], True), TypeError, r"a number or a name, got True"),
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
        r"the input must be float32 or float64, got a uint8",
    ),
    "list of images": (lambda: nm.relus(SMALL, [[0.0] * 4]), TypeError, "the input must be a torch tensor"),
    "integer point": (
        lambda: nm.two_stage(SMALL, torch.zeros(4, dtype=torch.int64)),
        TypeError,
        r"at must be float32 or float64",
    ),
    "nan point": (lambda: nm.two_stage(SMALL, torch.full((4,), torch.nan)), ValueError, "at must be finite"),
    "no point": (lambda: nm.two_stage(SMALL, torch.zeros(0, 4)), ValueError, "at least one point"),
    "point of five dimensions": (lambda: nm.two_stage(SMALL, torch.zeros(1, 1, 1, 1, 4)), ValueError, "event_ndim="),
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
        lambda: nm.two_stage(SMALL, POINT[0].double()),
        TypeError,
        r"network is torch\.float32 \(0\.weight\) but the input torch\.float64; convert one",
    ),
    "wrong dtype after conversion": (
        lambda: nm.two_stage(converted_afterwards(), POINT[0]),
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


BAD_SOURCES: dict[str, tuple[str, type[Exception], str]] = {
    "pickle": ("network.pt", ValueError, r"is a pickle, .*refused; export the network with torch\.export\.save"),
    "checkpoint": ("network.ckpt", ValueError, r"is a pickle"),
    "unknown word": ("resnet50", ValueError, r"'resnet50' is not a network: wanted a \.pt2 file, .*\(digits, lenet"),
    "file without factory": ("{file}", ValueError, r"which network\? .*small_network\.py:factory"),
    "unknown factory": ("{file}:build", ValueError, r"has no function or class 'build'; it has .*Small, make, nothing"),
    "no such file": ("elsewhere.py:make", FileNotFoundError, r"no file elsewhere\.py"),
    "not a module": ("{file}:nothing", TypeError, r"nothing must return a torch\.nn\.Module, got 7"),
    "file that fails": ("{tmp}/broken.py:make", ValueError, r"broken\.py could not be run: ZeroDivisionError"),
    "no such program": ("{tmp}/none.pt2", FileNotFoundError, r"no exported network at .*none\.pt2"),
    "not an archive": ("{tmp}/text.pt2", ValueError, r"is not an archive written by torch\.export\.save"),
    "damaged archive": ("{tmp}/damaged.pt2", ValueError, r"damaged"),
    "another archive": ("{tmp}/other.pt2", ValueError, r"could not be read as an exported network"),
    "weights not shipped": ("alexnet", ValueError, r"no weights come with 'alexnet' \(they do with digits, lenet"),
}


@pytest.fixture
def bad_files(tmp_path, factory_file) -> Path:
    import zipfile

    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "text.pt2").write_text("no archive")
    with zipfile.ZipFile(tmp_path / "other.pt2", "w") as archive:
        archive.writestr("something", "else" * 100)
    whole = (tmp_path / "other.pt2").read_bytes()
    (tmp_path / "damaged.pt2").write_bytes(whole[: len(whole) // 2])
    return tmp_path


@pytest.mark.parametrize("case", BAD_SOURCES)
def test_bad_sources(case, bad_files, factory_file):
    source, error, message = BAD_SOURCES[case]
    with pytest.raises(error, match=message):
        nm.load_network(source.format(file=factory_file, tmp=bad_files))


def test_bad_weights(tmp_path, factory_file):
    source = f"{factory_file}:make"
    state = seeded(small, torch.float32).state_dict()
    path = tmp_path / "weights.safetensors"
    save_file({"0.weight": state["0.weight"], "0.bias": torch.zeros(7), "extra": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match=r"does not fit Small: 0\.bias is \(7,\), wanted \(5,\); missing 3\.bias"):
        nm.load_network(source, path)
    with pytest.raises(ValueError, match="unknown extra"):
        nm.load_network(source, path)
    with pytest.raises(ValueError, match=r"does not fit LeNet: .*; …"):
        nm.load_network("lenet", path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="is not a safetensors file, or is damaged"):
        nm.load_network(source, path)
    with pytest.raises(FileNotFoundError, match="no weights at"):
        nm.load_network(source, tmp_path / "none.safetensors")
    with pytest.raises(ValueError, match=r"is a pickle.*save_file"):
        nm.load_network(source, tmp_path / "weights.pth")
    (tmp_path / "weights.npz").write_text("no archive")
    with pytest.raises(ValueError, match="does not hold plain arrays"):
        nm.load_network(source, tmp_path / "weights.npz")


def test_weights_for_an_exported_program_are_refused(bad_files):
    with pytest.raises(ValueError, match="has its weights inside"):
        nm.load_network(bad_files / "text.pt2", bad_files / "weights.safetensors")


def test_an_exported_program_for_batches_of_three_is_refused():
    program = torch.export.export(SMALL, (torch.zeros(3, 4),))
    with pytest.raises(ValueError, match=r"batches of exactly 3; export it with a batch of 1, or with a free one"):
        nm.relus(program, POINT)
    fixed = torch.export.export(SMALL, (torch.zeros(1, 4),))
    with pytest.raises(ValueError, match=r"cannot take an input of shape \(5,\)"):
        nm.relus(fixed, torch.zeros(1, 5))


def test_a_residual_network_sampled_and_its_linearization_agree_for_little_noise():
    """The two-stage linearization of a residual network is right to first order: at σ → 0 its moments are the true."""
    net, x = seeded(Residual), inputs("residual", 1)[0]
    noise = nm.Gaussian(x, std=1e-4)
    sampled = nm.monte_carlo(net, noise, 20_000)
    for layer in range(5):
        moments = nm.output_moments(net, noise, layer=layer)
        assert_within_standard_errors(sampled.variance, moments.variance, sampled.variance_standard_error)


def test_an_exported_network_with_a_largest_batch(tmp_path):
    net = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).eval()
    batch = torch.export.Dim("batch", min=1, max=4)
    program = torch.export.export(net, (torch.rand(2, 6),), dynamic_shapes=({0: batch},))
    torch.export.save(program, tmp_path / "net.pt2")
    loaded = nm.load_network(tmp_path / "net.pt2")
    x = torch.rand(10, 6)
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), net(x))
    noise = nm.Gaussian(x, std=0.1)
    found, expected = (nm.output_moments(which, noise, "two-stage") for which in (loaded, net))
    torch.testing.assert_close(found.variance, expected.variance)
