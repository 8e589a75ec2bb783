"""Which rule an operator has: windows of pools and reductions, and rules of one's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import netmoments as nm
from netmoments.rules import registry as rules
from netmoments.rules.maximum import Largest
from netmoments.rules.piecewise_linear import relu
from netmoments.rules.registry import adaptive_windows, pooling_windows, reduction_windows
from tests.moments.problems import PROPAGATED, assert_same, noise, perceptron
from tests.networks import seeded


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation", "ceil"),
    [(2, 2, 0, 1, False), (3, 2, 1, 1, False), (3, 1, 1, 1, False), (2, 2, 1, 1, True), (2, 1, 0, 2, False)],
)
def test_pooling_windows_are_torch_s(kernel, stride, padding, dilation, ceil):
    x = torch.randn(1, 3, 7, 8)
    expected = functional.max_pool2d(x, kernel, stride, padding, dilation, ceil)
    windows = pooling_windows(3, (7, 8), expected.shape[-2:], *([n, n] for n in (kernel, stride, padding, dilation)))
    found = Largest(windows, with_zero=False)
    assert torch.equal(found.values(found.gathered(x.reshape(-1))), expected.reshape(-1))


def test_adaptive_and_reduction_windows():
    x = torch.randn(1, 3, 7, 8)
    adaptive = Largest(adaptive_windows(3, (7, 8), (3, 5)), with_zero=False)
    expected = functional.adaptive_max_pool2d(x, (3, 5))
    assert torch.equal(adaptive.values(adaptive.gathered(x.reshape(-1))), expected.reshape(-1))
    over = Largest(reduction_windows(x.shape, (1, 3)), with_zero=False)
    assert torch.equal(over.values(over.gathered(x.reshape(-1))), x.amax((1, 3)).reshape(-1))


# rules of one's own


@pytest.fixture
def registry(monkeypatch) -> dict:
    """An empty registry; what was there comes back."""
    own: dict = {}
    monkeypatch.setattr(rules, "_LAYERS", own)
    return own


class OwnTanh(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 1 - 2 / (torch.exp(2 * x) + 1)


class OwnRelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (x > 0)


class Spectrum(nn.Module):
    """Linear, by operators that have no rule."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(x).real + 1


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x**2


class Bent(nn.Module):
    """Affine for small numbers only."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sinh().clamp(max=1e3)


def with_layer(layer: nn.Module) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 7), layer, nn.Linear(7, 3)))


def test_rules_are_where_messages_say():
    assert nm.register_rule is rules.register_rule


@pytest.mark.parametrize("method", PROPAGATED)
def test_an_elementwise_rule(method, registry):
    net = with_layer(OwnTanh())
    with pytest.raises(ValueError, match=r"no rule for exp in 3 "):
        nm.output_moments(net, noise(), "layerwise")
    rules.register_rule(OwnTanh, rules.elementwise)
    assert "OwnTanh" in rules.known_rules()
    assert_same(nm.output_moments(net, noise(), method), nm.output_moments(with_layer(nn.Tanh()), noise(), method))


@pytest.mark.parametrize("method", PROPAGATED)
def test_an_affine_rule(method, registry):
    net = with_layer(Spectrum())
    with pytest.raises(ValueError, match=r"no rule for .* in 3 "):
        nm.output_moments(net, noise(), "layerwise")
    rules.register_rule(Spectrum, rules.affine)
    same = with_layer(nn.Linear(7, 7).double())
    with torch.no_grad():
        same[3].weight.copy_(torch.fft.fft(torch.eye(7, dtype=torch.float64)).real)
        same[3].bias.fill_(1.0)
        same[4].load_state_dict(net[4].state_dict())
    random = torch.get_rng_state()
    assert_same(nm.output_moments(net, noise(), method), nm.output_moments(same, noise(), method))
    assert torch.equal(random, torch.get_rng_state())


def test_a_rule_of_ones_own(registry):
    rules.register_rule(OwnRelu, lambda module, example: relu(example.numel(), example))
    net = seeded(lambda: nn.Sequential(nn.Linear(4, 9), OwnRelu(), nn.Linear(9, 3)))
    found = nm.output_moments(net, noise(std=2.0))
    assert (found.method, found.reason) == ("exact", "the only nonlinear layer is 1, which is piecewise linear")
    assert_same(found, nm.output_moments(perceptron(), noise(std=2.0)))


@pytest.mark.parametrize("layer", [Square, Bent, OwnTanh, nn.ReLU])
def test_what_is_not_affine_is_refused_as_affine(layer, registry):
    rules.register_rule(layer, rules.affine)
    net = seeded(lambda: nn.Sequential(nn.Linear(4, 7), layer(), nn.Linear(7, 3)))
    with pytest.raises(ValueError, match=rf"1 \({layer.__name__}\) is registered as affine, but is not"):
        nm.output_moments(net, noise())


class Two(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.exp(x - y)


class TakesTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.both = nn.Linear(4, 3), Two()

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x)
        return self.both(z.relu(), z)


def test_bad_rules(registry):
    with pytest.raises(TypeError, match=r"register_rule: layer must be a class of modules, got "):
        rules.register_rule(nn.ReLU(), rules.affine)
    with pytest.raises(TypeError, match=r"register_rule: rule must be a function of a module and an example"):
        rules.register_rule(nn.ReLU, "affine")
    assert not registry
    rules.register_rule(Two, rules.elementwise)
    with pytest.raises(ValueError, match=r"both \(Two\) has a rule of its own, for which it must take one tensor"):
        nm.output_moments(seeded(TakesTwo), noise())
