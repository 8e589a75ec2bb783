"""ReLUs in all spellings, calls that are none, and networks cut at each ReLU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import netmoments as nm
from netmoments.network.relu_calls import Cut, find_relu, smooth_name
from netmoments.rules import registry
from tests.closeness import assert_close
from tests.network.small import POINT, Wrapped, small, wrapped
from tests.networks import FACTORIES, inputs, network, seeded


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
    """head(x, relu(stem(x))) = network(x); the stem gives what the ReLU got, and the input is not changed."""
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


def test_smooth_functions_with_a_rule_are_known_as_smooth():
    """`network` may not import rules, so that it has a list of its own."""
    aten = torch.ops.aten
    for operator in (*registry.SMOOTH, *registry.ONE_SIGNED, aten.log_softmax, aten.native_layer_norm):
        assert smooth_name(getattr(operator, operator.overloads()[0])) is not None, operator


SMALL = seeded(small, torch.float32)
TWICE = seeded(lambda: nn.Sequential(nn.Linear(4, 4), *[nn.ReLU()] * 2), torch.float32)
BAD_LAYERS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
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
}


@pytest.mark.parametrize("case", BAD_LAYERS)
def test_bad_layers(case):
    call, error, message = BAD_LAYERS[case]
    with pytest.raises(error, match=message):
        call()


class Mixed(nn.Module):
    """Half precision inside, as after training in mixed precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = torch.relu(self.second(torch.relu(self.first(x))))
        return self.last(y.float())


@pytest.mark.parametrize("layer", [0, 1])
def test_a_cut_in_half_precision_is_in_that_of_the_input(layer):
    network, x = seeded(Mixed, torch.float32), torch.rand(4, 3)
    cut = Cut(network, nm.relus(network, x)[layer])
    z = cut.stem(x)
    assert z.dtype == torch.float32
    torch.testing.assert_close(cut.head(x, z.relu()), network(x))
    noise = nm.Gaussian(x, std=0.2)
    found, true = nm.output_moments(network, noise, nm.TwoStage(layer)), nm.monte_carlo(network, noise, 4000)
    off = (found.mean - true.mean).abs()
    assert bool((off <= 3 * found.error.mean + 5 * true.mean_standard_error).all())
