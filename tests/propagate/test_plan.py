"""A network cut into affine parts and nonlinear layers computes what the network computes."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

import netmoments as nm
from netmoments import memory
from netmoments.network.graph import shape_of
from netmoments.network.model import NetworkModel
from netmoments.propagate import plan as plans
from netmoments.propagate.plan import Plan
from netmoments.rules.black_box import black_box
from netmoments.rules.maximum import Largest
from tests.networks import seeded
from tests.propagate.small import SMALL, Normalised, image, isotropic, leaky, moments, plan_for, sampled


def run_plan(plan: Plan, x: Tensor) -> Tensor:
    """The network's scores, computed from its plan."""
    values = {plan.image: x}
    for stage in plan.stages:
        z = stage.before.value(values)
        values[stage.output] = stage.rule.values(stage.rule.gathered(z)).reshape(shape_of(stage.output))
    return plan.last.value(values)


@pytest.mark.parametrize("name", SMALL)
def test_a_plan_computes_what_the_network_computes(name):
    make, shape = SMALL[name]
    network = seeded(make)
    plan = plan_for(network, image(*shape))
    for seed in range(3):
        x = image(*shape, seed=10 + seed)
        torch.testing.assert_close(run_plan(plan, x), network(x)[0], rtol=1e-12, atol=1e-12)


def test_pools_and_relus_are_one_function_of_the_window():
    rules = [stage.rule for stage in plan_for(seeded(Normalised), image(1, 9, 9)).stages]
    assert [type(rule) for rule in rules] == [Largest, Largest]
    assert all(rule.with_zero for rule in rules)
    assert rules[0].windows.shape == (6 * 25, 9)
    assert int((rules[0].windows < 0).sum()) > 0  # padding


def test_the_graph_follows_the_weights():
    network, x = seeded(leaky), image(12)
    before, _ = moments(network, x, isotropic(0.2, x))
    with torch.no_grad():
        network[-1].bias += 1
    after, _ = moments(network, x, isotropic(0.2, x))
    torch.testing.assert_close(after - before, torch.ones(4, dtype=torch.float64))


def test_a_kept_plan_follows_the_weights():
    """The same plan while nothing changes; another after a change, and where gradients are wanted."""
    network, x = seeded(leaky), image(12)
    with torch.no_grad():
        kept, before = plan_for(network, x), moments(network, x, isotropic(0.2, x))[0]
        assert plan_for(network, x) is kept
        network[-1].bias += 0
        assert plan_for(network, x) is kept
        network[-1].bias += 1
        assert plan_for(network, x) is not kept
        torch.testing.assert_close(moments(network, x, isotropic(0.2, x))[0] - before, torch.ones(4).double())
    assert plan_for(network, x) is not plan_for(network, x)


def test_a_network_is_planned_once_while_nothing_changes(monkeypatch):
    """Users call with gradients enabled, as torch starts: the plan is kept all the same, and follows the weights."""
    made = []
    original = plans._Planner.plan
    monkeypatch.setattr(plans._Planner, "plan", lambda self: made.append(1) or original(self))
    net, noise = seeded(leaky), nm.Gaussian(image(12), std=0.2)

    def mean() -> Tensor:
        return nm.output_moments(net, noise, "layerwise").mean

    before = [mean() for _ in range(2)]
    assert len(made) == 1
    assert torch.equal(*before)
    with torch.no_grad():
        net[-1].bias += 1
    torch.testing.assert_close(mean(), before[0] + 1)
    assert len(made) == 2
    net[-1].bias.data += 1  # which torch does not count as a change
    torch.testing.assert_close(mean(), before[0] + 2)
    assert len(made) == 3
    net[-1].bias.data = net[-1].bias.data.clone()  # the same, elsewhere: what was recorded would read the old place
    torch.testing.assert_close(mean(), before[0] + 2)
    assert len(made) == 4


class Called(nn.Module):
    """A layer on the image in some shape, called as a function says, and a linear layer on what it returns."""

    def __init__(
        self, layer: nn.Module, call: Callable[[Any, Tensor], Tensor], shape: tuple[int, ...], out: int
    ) -> None:
        super().__init__()
        self.layer, self.call, self.shape, self.last = layer, call, shape, nn.Linear(out, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.call(self.layer, x.reshape(len(x), *self.shape)).flatten(1))


def attention_by_hand(qkv: nn.Module, x: Tensor) -> Tensor:
    q, k, v = qkv(x).chunk(3, -1)
    later = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
    return (q @ k.transpose(1, 2) / 2).masked_fill(later, -torch.inf).softmax(-1) @ v


def attention_by_einsum(qkv: nn.Module, x: Tensor) -> Tensor:
    q, k, v = qkv(x).chunk(3, -1)
    return torch.einsum("bij,bjd->bid", torch.einsum("bid,bjd->bij", q, k).softmax(-1), v)


def excited(layer: nn.Module, x: Tensor) -> Tensor:
    y = torch.relu(x)
    return y * torch.sigmoid(layer(y.mean((2, 3))))[:, :, None, None]


def encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


ATTENDED = partial(nn.MultiheadAttention, 4, 2, batch_first=True)
TOKENS, MAPS = (5, 4), (3, 4, 4)
ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: Called(ATTENDED(), lambda m, x: m(x, x, x, need_weights=False)[0], TOKENS, 20),
    "attention, with weights": lambda: Called(ATTENDED(), lambda m, x: m(x[:, :2], x, x)[0], TOKENS, 8),
    "attention, masked": lambda: Called(nn.Linear(4, 12), attention_by_hand, TOKENS, 20),
    "attention, causal": lambda: Called(
        nn.Linear(4, 12), lambda m, x: scaled_dot_product_attention(*m(x).chunk(3, -1), is_causal=True), TOKENS, 20
    ),
    "attention by einsum": lambda: Called(nn.Linear(4, 12), attention_by_einsum, TOKENS, 20),
    "encoder": lambda: Called(encoder(), lambda m, x: m(x), (3, 8), 24),
    "encoder, norm first": lambda: Called(encoder(norm_first=True, activation="gelu"), lambda m, x: m(x), (3, 8), 24),
    "LSTM": lambda: Called(nn.LSTM(4, 3, 2, batch_first=True), lambda m, x: m(x)[0][:, -1], TOKENS, 3),
    "LSTM, both ways": lambda: Called(
        nn.LSTM(4, 3, bidirectional=True, batch_first=True), lambda m, x: m(x)[1][1].transpose(0, 1), TOKENS, 6
    ),
    "GRU": lambda: Called(nn.GRU(4, 3, batch_first=True), lambda m, x: m(x)[0], TOKENS, 15),
    "RNN": lambda: Called(nn.RNN(4, 3, batch_first=True), lambda m, x: m(x)[0], TOKENS, 15),
    "cells": lambda: Called(nn.LSTMCell(4, 3), lambda m, x: m(x[:, 1], m(x[:, 0]))[0], TOKENS, 3),
    "layer norm": lambda: Called(nn.LayerNorm((3, 4, 4)), lambda m, x: m(x), MAPS, 48),
    "layer norm of few": lambda: Called(nn.LayerNorm(4), lambda m, x: m(x), TOKENS, 20),
    "RMS norm": lambda: Called(nn.RMSNorm((3, 4, 4)), lambda m, x: m(x), MAPS, 48),
    "group norm": lambda: Called(nn.GroupNorm(1, 3), lambda m, x: m(x), MAPS, 48),
    "instance norm": lambda: Called(nn.InstanceNorm2d(3, affine=True), lambda m, x: m(x), MAPS, 48),
    "local responses": lambda: Called(nn.LocalResponseNorm(2), lambda m, x: m(x), MAPS, 48),
    "squeeze and excite": lambda: Called(nn.Linear(3, 3), excited, MAPS, 48),
    "GLU": lambda: Called(nn.Sequential(nn.Linear(4, 8), nn.GLU()), lambda m, x: m(x), TOKENS, 20),
    "SwiGLU": lambda: Called(nn.Linear(4, 8), lambda m, x: silu(m(x)[..., :4]) * m(x)[..., 4:], TOKENS, 20),
    "bilinear": lambda: Called(nn.Bilinear(4, 4, 5), lambda m, x: m(x[:, 0], x[:, 1]), TOKENS, 5),
    "weights from the image": lambda: Called(
        nn.Linear(4, 12), lambda m, x: x[:, 1:] @ m(x[:, 0]).reshape(-1, 4, 3), TOKENS, 12
    ),
    "log-softmax": lambda: Called(nn.LogSoftmax(1), lambda m, x: m(x), MAPS, 48),
    "embedding": lambda: Called(nn.Embedding(5, 4), lambda m, x: torch.tanh(x + m(torch.arange(5))), TOKENS, 20),
    "L2 pool": lambda: Called(nn.LPPool2d(2, 2), lambda m, x: m(x), MAPS, 12),
    "L3 pool of ReLUs": lambda: Called(nn.LPPool2d(3, 2), lambda m, x: m(torch.relu(x)), MAPS, 12),
    "adaptive pool": lambda: Called(nn.AdaptiveMaxPool1d(2), lambda m, x: m(torch.relu(x)), TOKENS, 10),
    "upsampling": lambda: Called(
        nn.Sequential(nn.ReLU(), nn.Upsample(scale_factor=2, mode="bilinear")), lambda m, x: m(x), MAPS, 192
    ),
    "patches folded into a batch": lambda: Called(
        nn.Linear(4, 4), lambda m, x: torch.tanh(m(x.reshape(-1, 4))).reshape(len(x), -1), TOKENS, 20
    ),
}


def network_and_image(name: str) -> tuple[nn.Module, Tensor]:
    network = seeded(ARCHITECTURES[name])
    return network, image(math.prod(network.shape), seed=3)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_people_build_is_planned(name):
    """The plan computes what the network computes, and every stage has a formula."""
    network, x = network_and_image(name)
    plan = plan_for(network, x)
    assert plan.has_formulas
    for seed in range(2):
        x = image(x.shape[1], seed=10 + seed)
        torch.testing.assert_close(run_plan(plan, x), network(x)[0], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_people_build_against_samples(name):
    """At σ = 0.1, within five standard errors of 20,000 samples: 0.04 deviations, 0.05 of a variance."""
    network, x = network_and_image(name)
    mean, covariance = moments(network, x, isotropic(0.1, x))
    reference = sampled(network, x, 0.1, 20_000, seed=5)
    deviation = reference.variance.sqrt()
    assert float(((mean - reference.mean) / deviation).abs().max()) < 0.04
    assert float((covariance.diagonal() / reference.variance - 1).abs().max()) < 0.06


def test_what_does_not_fit_is_left_to_samples(monkeypatch):
    """A matrix for every window must fit; else there is no rule, and a sketch knows the operation from samples."""
    network, x = network_and_image("attention by einsum")
    monkeypatch.setitem(memory.PIECE["cpu"], "matrices", 100)
    with pytest.raises(plans.NoRule, match="no rule for bmm"):
        plans._Planner(NetworkModel.of(network, x, "test"), None).plan()
    found = plans._Planner(NetworkModel.of(network, x, "test"), black_box).plan()
    assert not found.has_formulas


def test_a_rule_of_ones_own_comes_before_the_library_s(monkeypatch):
    from netmoments.rules import registry

    network, x = network_and_image("L2 pool")
    calls = []

    def users_rule(module, example):
        calls.append(type(module))
        return registry.LIBRARY_LAYERS[nn.LPPool2d](module, example)

    monkeypatch.setitem(registry.LAYER_RULES, nn.LPPool2d, users_rule)
    plan_for(network, x)
    assert calls == [nn.LPPool2d]


class _Doubled(nn.Module):
    def forward(self, x):
        return x + torch.sin(x)


def test_a_rule_must_give_what_its_layer_gives(monkeypatch):
    from netmoments.rules import registry

    layer = _Doubled()
    network = nn.Sequential(nn.Linear(3, 3), layer, nn.Linear(3, 2)).eval()
    noise = nm.Gaussian(torch.zeros(3), std=0.3)

    def another(module, example):
        return nm.rules.Elementwise(torch.tanh, (3,), example)

    monkeypatch.setitem(registry.LAYER_RULES, _Doubled, another)
    with pytest.raises(ValueError, match="gives other values than the layer"):
        nm.output_moments(network, noise, "layerwise")
    monkeypatch.setitem(registry.LAYER_RULES, _Doubled, nm.rules.elementwise)
    handle = layer.register_forward_hook(lambda module, inputs, output: 10 * output)
    hooked = nm.output_moments(network, noise, "layerwise").mean
    sampled = nm.monte_carlo(network, noise, 20_000, seed=1)
    handle.remove()
    assert bool(((hooked - sampled.mean).abs() <= 5 * sampled.mean_standard_error).all())


def test_a_layer_called_network_has_its_rule(monkeypatch):
    """A layer's name must not be mistaken for that of the network as a whole, whose rule would be left out."""
    from netmoments.rules import registry

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.network, self.last = nn.Linear(3, 3), _Doubled(), nn.Linear(3, 2)

        def forward(self, x):
            return self.last(self.network(self.first(x)))

    monkeypatch.setitem(registry.LAYER_RULES, _Doubled, nm.rules.elementwise)
    (stage,) = plan_for(Wrapped().eval(), torch.zeros(1, 3)).stages
    assert stage.name == "network"


def test_a_plan_that_holds_the_network_is_not_kept(monkeypatch):
    """The one cache must not keep a network alive whose own class has a rule."""
    from netmoments.rules import registry

    monkeypatch.setitem(registry.LAYER_RULES, _Doubled, nm.rules.elementwise)
    network = _Doubled().eval()
    with torch.no_grad():
        assert plan_for(network, torch.zeros(1, 3)) is not plan_for(network, torch.zeros(1, 3))
    alive = weakref.ref(network)
    del network
    gc.collect()
    assert alive() is None


def test_a_function_of_a_plan_is_computed_once():
    make, shape = SMALL["residual"]
    plan, calls = plan_for(seeded(make), image(*shape)), []

    def count_stages(argument: Plan) -> int:
        calls.append(argument)
        return len(argument.stages)

    assert plan.once(count_stages) == plan.once(count_stages) == len(plan.stages)
    assert calls == [plan]


class Converting(nn.Module):
    """Computes in the dtype of its inner layer between layers of float32, with skip connections in both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        y = torch.relu(self.first(x))
        z = y.to(self.inner.weight.dtype)
        z = z + nn.functional.gelu(self.inner(z))
        return self.last((z.softmax(-1) + torch.relu(z)).to(y.dtype) + y)


@pytest.mark.parametrize("method", ["auto", "layerwise", "sketch", "two-stage", "linear"])
@pytest.mark.filterwarnings("ignore:.*is linearized at the given point")
def test_a_network_that_converts_tensors_on_its_way(method):
    """The same as in one dtype throughout."""
    plain, network = seeded(Converting, torch.float32), seeded(Converting, torch.float32)
    network.inner.double()
    noise = nm.Gaussian(torch.linspace(-1, 1, 5), std=0.5)
    found, expected = (nm.output_moments(each, noise, method) for each in (network, plain))
    assert torch.allclose(found.mean, expected.mean, atol=1e-5)
    assert torch.allclose(found.covariance, expected.covariance, atol=1e-5)


def test_a_network_of_another_dtype_is_refused():
    """It has layers of other dtypes, and does not convert its input."""
    network = seeded(Converting, torch.float64)
    with pytest.raises(
        TypeError, match=r"the network is torch\.float64 \(first\.weight\) but the input torch\.float32"
    ):
        nm.output_moments(network, nm.Gaussian(torch.zeros(5), std=0.5))
