"""Values of two-stage linearizations are those of their matrices, by forward and by reverse mode."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import netmoments as nm
from reproduction import two_stage_value as module
from reproduction.two_stage_value import along, two_stage_value
from tests.closeness import assert_close
from tests.networks import FACTORIES, inputs, network


@pytest.mark.parametrize("name", FACTORIES)
def test_the_value_is_that_of_the_matrices(name):
    """At every ReLU, far enough away that units change sign; `only backward` has no forward mode."""
    net, at = network(name), inputs(name, 4)
    x = at + inputs(name, 4, seed=2)
    for relu in nm.relus(net, at):
        expected = nm.two_stage(net, at, relu.name)(x)
        assert_close(two_stage_value(net, at, x, relu.name), expected, atol=1e-12, what=f"{name} {relu.name}")
        assert_close(two_stage_value(net, at, at, relu.index), net(at.clone()), atol=1e-13, what=f"{name} {relu.name}")


@pytest.mark.parametrize("name", ["lenet", "residual", "shared"])
def test_away_from_the_point_it_is_not_the_network(name):
    """Nor the linear extrapolation, which is what is left when the ReLU is linearized too."""
    net, at = network(name).requires_grad_(False), inputs(name, 4)
    x = at + inputs(name, 4, seed=2)
    linear = sum(along(net, (at,), (x - at,)))
    for relu in nm.relus(net, at):
        value = two_stage_value(net, at, x, relu.index)
        assert float((value - net(x.clone())).abs().max()) > 1e-3, relu.name
        assert float((value - linear).abs().max()) > 1e-3, relu.name


def test_paths_around_the_relu_count():
    net, at = network("residual"), inputs("residual", 2)
    x = at + 0.5 * inputs("residual", 2, seed=2)
    g = nm.two_stage(net, at, "block1.relu1")
    assert g.D is not None
    without = nm.AffineReluAffine(g.A, g.c1, g.B, g.c2 + (g.D @ at.flatten(1).unsqueeze(-1)).squeeze(-1))
    value = two_stage_value(net, at, x, "block1.relu1")
    assert float((value - without(x)).abs().max()) > 0.02
    assert_close(value, g(x), atol=1e-12)


@pytest.mark.parametrize("name", ["lenet", "residual", "nested", "transposed", "mutating"])
def test_values_by_forward_and_reverse_mode_agree(name, monkeypatch):
    net, at = network(name), inputs(name, 3)
    x = at + inputs(name, 3, seed=2)
    forward = [two_stage_value(net, at, x, relu.index) for relu in nm.relus(net, at)]

    def refused(*_):
        raise RuntimeError("no forward mode")

    monkeypatch.setattr(module, "value_and_slope", refused)
    for relu, expected in zip(nm.relus(net, at), forward, strict=True):
        assert_close(two_stage_value(net, at, x, relu.index), expected, atol=1e-12, what=relu.name)


def test_one_point_in_float32_and_in_pieces(monkeypatch):
    net, at = network("lenet", torch.float32), inputs("lenet", 5, torch.float32)
    x = at + 0.3 * inputs("lenet", 5, torch.float32, seed=2)
    values = two_stage_value(net, at, x, 1)
    assert values.dtype == torch.float32
    assert_close(values, nm.two_stage(net.double(), at.double(), 1)(x.double()), atol=1e-5)
    net = network("lenet", torch.float32)
    alone = two_stage_value(net, at[2], x[2], 1)
    assert alone.shape == (10,)
    assert_close(alone, values[2], atol=1e-6)
    monkeypatch.setattr(module, "elements_together", lambda *_: 2)
    with torch.inference_mode():
        assert_close(two_stage_value(net, at, x, 1), values, atol=1e-6)


def test_a_function_that_does_not_depend_on_its_input_has_no_slope():
    x = torch.ones(2, 3)
    value, slope = module._along_by_reverse_mode(lambda x: torch.ones(2), (x,), (x,))
    assert_close(slope, [0.0, 0.0])
    assert_close(value, [1.0, 1.0])
    value, slope = along(lambda x: 3 * x, (x,), (2 * x,))
    assert_close(slope, 6 * x)


def test_bad_values():
    net, at = network("shared"), inputs("shared", 2)
    with pytest.raises(ValueError, match=r"at and x must have one shape, got .*\(2, 6\) and .*\(6,\)"):
        two_stage_value(net, at, at[0])
    with pytest.raises(ValueError, match="layer 2 is not one"):
        two_stage_value(net, at, at, 2)
    with pytest.raises(ValueError, match="x must be finite"):
        two_stage_value(net, at, at / 0)
    with pytest.raises(TypeError, match="one dtype"):
        two_stage_value(net, at, at.float())
    with pytest.raises(ValueError, match="no ReLU"):
        two_stage_value(nn.Linear(6, 2).double().eval(), at, at)
