"""A network cut into affine parts and nonlinear layers computes what the network computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import netmoments as nm
from netmoments.network.graph import shape_of
from netmoments.propagate import plan as plans
from netmoments.propagate.plan import Plan
from netmoments.rules.maximum import Largest
from tests.networks import seeded
from tests.propagate.small import SMALL, Normalised, image, isotropic, leaky, moments, plan


def run_plan(cut: Plan, x: Tensor) -> Tensor:
    """The network's scores, computed from its plan."""
    values = {cut.image: x}
    for stage in cut.stages:
        z = stage.before.value(values)
        values[stage.output] = stage.rule.values(stage.rule.gathered(z)).reshape(shape_of(stage.output))
    return cut.last.value(values)


@pytest.mark.parametrize("name", SMALL)
def test_a_plan_computes_what_the_network_computes(name):
    make, shape = SMALL[name]
    network = seeded(make)
    cut = plan(network, image(*shape))
    for seed in range(3):
        x = image(*shape, seed=10 + seed)
        torch.testing.assert_close(run_plan(cut, x), network(x)[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", SMALL)
def test_the_linear_part_of_every_segment_is_its_derivative(name):
    make, shape = SMALL[name]
    network = seeded(make)
    cut = plan(network, image(*shape))
    for segment in [stage.before for stage in cut.stages] + [cut.last]:
        points = {node: torch.randn(shape_of(node), dtype=torch.float64) for node in segment.sources}
        steps = {node: torch.randn(shape_of(node), dtype=torch.float64) for node in segment.sources}
        moved = {node: points[node] + steps[node] for node in segment.sources}
        change = segment.value(moved) - segment.value(points)
        torch.testing.assert_close(segment.linear(steps), change, rtol=1e-10, atol=1e-10)


def test_pools_and_relus_are_one_function_of_the_window():
    rules = [stage.rule for stage in plan(seeded(Normalised), image(1, 9, 9)).stages]
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
        kept, before = plan(network, x), moments(network, x, isotropic(0.2, x))[0]
        assert plan(network, x) is kept
        network[-1].bias += 0
        assert plan(network, x) is kept
        network[-1].bias += 1
        assert plan(network, x) is not kept
        torch.testing.assert_close(moments(network, x, isotropic(0.2, x))[0] - before, torch.ones(4).double())
    assert plan(network, x) is not plan(network, x)


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
