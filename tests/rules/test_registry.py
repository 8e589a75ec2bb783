"""Which rule an operator has: windows of pools and reductions, and rules of one's own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import netmoments as nm
from netmoments.rules import registry as rules
from netmoments.rules.maximum import Largest
from netmoments.rules.one_number import relu
from netmoments.rules.registry import LAYER_RULES, adaptive_windows, pooling_windows, reduction_windows
from tests.closeness import assert_close, assert_within_standard_errors
from tests.moments.problems import PROPAGATED, assert_same, means, noise, perceptron
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
def registered():
    """The registered rules, empty during a test and restored after it."""
    with mock.patch.dict(LAYER_RULES, clear=True):
        yield LAYER_RULES


class OwnTanh(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sign() * (1 - 2 / (torch.exp(2 * x.abs()) + 1))


class OwnRelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (x > 0)


class Spectrum(nn.Module):
    """An affine layer of operators that have no rule."""

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
def test_an_elementwise_rule(method, registered):
    net = with_layer(OwnTanh())
    with pytest.raises(ValueError, match=r"no rule for sign in 3 "):
        nm.output_moments(net, noise(), "layerwise")
    rules.register_rule(OwnTanh, rules.elementwise)
    assert_same(nm.output_moments(net, noise(), method), nm.output_moments(with_layer(nn.Tanh()), noise(), method))


@pytest.mark.parametrize("method", PROPAGATED)
def test_an_affine_rule(method, registered):
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


def test_a_rule_of_ones_own(registered):
    rules.register_rule(OwnRelu, lambda module, example: relu(example.numel(), example))
    net = seeded(lambda: nn.Sequential(nn.Linear(4, 9), OwnRelu(), nn.Linear(9, 3)))
    found = nm.output_moments(net, noise(std=2.0))
    assert (found.method, found.reason) == ("exact", "the only nonlinear layer is 1, which is piecewise linear")
    assert_same(found, nm.output_moments(perceptron(), noise(std=2.0)))


class Products(nn.Module):
    """The product of each number with the next."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.roll(-1, 1)


@dataclass(frozen=True, eq=False)
class ProductRule(nm.rules.Nonlinearity):
    """A rule with only what it must have: exact moments of one product."""

    windows: Tensor

    def values(self, z: Tensor) -> Tensor:
        return z[..., 0] * z[..., 1]

    def local(
        self, mean: Tensor, covariance: Tensor, cumulants: nm.rules.ThirdCumulants | None = None
    ) -> nm.rules.Local:
        turned = mean.flip(-1)
        own, across = covariance.diagonal(dim1=-2, dim2=-1), covariance[..., 0, 1]
        linear = ((covariance @ turned.unsqueeze(-1)).squeeze(-1) * turned).sum(-1)
        return nm.rules.Local(
            mean=mean.prod(-1) + across,
            variance=linear + own.prod(-1) + across**2,
            gain=turned,
            curvature=(1 - torch.eye(2).to(mean)).expand(*mean.shape, 2),
        )


def product_rule(layer: nn.Module, example: Tensor) -> ProductRule:
    places = torch.arange(example.numel())
    return ProductRule(torch.stack([places, places.roll(-1)], -1))


def moments_of_products(net: nn.Module, given: nm.Gaussian) -> tuple[Tensor, Tensor]:
    """For Linear, Products, Linear: f = ½ zᵀHz has E f = ½(mᵀHm + tr HS), Cov = (Hm)ᵀS(H'm) + ½ tr(HSH'S)."""
    first, last = net[0], net[2]
    with torch.no_grad():
        m, S = first(given.mean), first.weight @ given.covariance.dense() @ first.weight.mT
        H = torch.zeros(7, 7, 7, dtype=torch.float64)
        for unit in range(7):
            H[unit, unit, (unit + 1) % 7] = H[unit, (unit + 1) % 7, unit] = 1
        slopes, curved = H @ m, H @ S
        mean = 0.5 * (slopes @ m + curved.diagonal(dim1=1, dim2=2).sum(-1))
        covariance = slopes @ S @ slopes.mT + 0.5 * torch.einsum("uij,vji->uv", curved, curved)
        return last(mean), last.weight @ covariance @ last.weight.mT


def test_a_rule_with_values_moments_and_windows_gets_every_path(registered):
    """Products are quadratic: "layerwise" is exact for them, and a sketch is right to the error of its probes."""
    net = seeded(lambda: nn.Sequential(nn.Linear(4, 7), Products(), nn.Linear(7, 3)))
    given = noise(std=0.8)
    nm.register_rule(Products, product_rule)
    mean, covariance = moments_of_products(net, given)
    with_gradient = nm.Gaussian(given.mean.clone().requires_grad_(), std=0.8)
    for method, which in (("layerwise", given), ("auto", with_gradient)):
        found = nm.output_moments(net, which, method, check=0)
        assert found.method == "layerwise"
        assert_close(found.mean, mean, atol=1e-12)
        assert_close(found.covariance, covariance, atol=1e-12)
    sampled = nm.output_moments(net, given)
    assert_within_standard_errors(sampled.mean, mean, sampled.error.mean)
    assert_within_standard_errors(sampled.covariance, covariance, sampled.error.covariance)
    probes, sd = 1024, covariance.diagonal().sqrt()
    sketch = nm.output_moments(net, given, nm.Sketch(probes))
    assert_close((sketch.mean - mean) / sd, torch.zeros(3), atol=2 * math.sqrt(2 / probes))
    assert_close(
        (sketch.covariance - covariance) / (sd * sd[:, None]), torch.zeros(3, 3), atol=2 * math.sqrt(2 / probes)
    )
    few = nm.output_moments(net, with_gradient, "auto", memory_budget=99)
    assert few.method == "sketch"
    plain, controlled = (
        nm.output_moments(net, given, nm.Sampling(4000, control=control)) for control in (None, "sketch")
    )
    assert_within_standard_errors(controlled.mean, mean, controlled.mean_standard_error)
    assert_within_standard_errors(controlled.covariance, covariance, controlled.covariance_standard_error)
    assert bool((controlled.mean_standard_error < plain.mean_standard_error).all())


def test_a_rule_of_ones_own_deep_in_a_network(registered):
    """The rule works behind another nonlinear layer, with cumulants that it ignores, in a batch, with derivatives."""
    nm.register_rule(Products, product_rule)
    net, given = with_layer(Products()), noise(2, std=0.1)
    sampled = nm.monte_carlo(net, given, 100_000, seed=1)
    for method in ("layerwise", nm.Sketch(512)):
        found = nm.output_moments(net, given, method)
        assert float(nm.relative_difference(found.variance, sampled.variance).max()) < 0.05
        assert float(((found.mean - sampled.mean) / sampled.variance.sqrt()).abs().max()) < 0.05
    at, towards = means(2).requires_grad_(), torch.ones(2, 4, dtype=torch.float64)

    def value(x: Tensor) -> Tensor:
        return nm.output_moments(net, nm.Gaussian(x, std=0.1), "layerwise").mean.sum()

    (slope,) = torch.autograd.grad(value(at), at)
    with torch.no_grad():
        change = (value(at + 1e-5 * towards) - value(at - 1e-5 * towards)) / 2e-5
    assert_close((slope * towards).sum(), change, rtol=1e-6)


class Magnitude(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (2.0 * (x > 0) - 1)


@dataclass(frozen=True, eq=False)
class MagnitudeRule(nm.rules.OneInput):
    """E|z| = m(2Φ(h) − 1) + 2sφ(h), h = m/s; the slope 2Φ(h) − 1, the curvature 2φ(h)/s."""

    windows: Tensor

    def values(self, z: Tensor) -> Tensor:
        return z.squeeze(-1).abs()

    def local(
        self, mean: Tensor, covariance: Tensor, cumulants: nm.rules.ThirdCumulants | None = None
    ) -> nm.rules.Local:
        m, s = mean.squeeze(-1), covariance.squeeze((-2, -1)).sqrt()
        gain, bell = torch.erf(m / s * math.sqrt(0.5)), torch.exp(-0.5 * (m / s) ** 2) * math.sqrt(2 / math.pi)
        expected = m * gain + s * bell
        return nm.rules.Local(
            expected, m**2 + s**2 - expected**2, gain.unsqueeze(-1), (bell / s).unsqueeze(-1).unsqueeze(-1)
        )


class MagnitudeRuleWithPairs(MagnitudeRule):
    """The same rule with the library's exact covariances of pairs for |z|."""

    def pairs(self, mean: Tensor, covariance: Tensor) -> Tensor:
        one = torch.ones(self.units, dtype=mean.dtype)
        return nm.rules.PiecewiseLinear(0 * one, -one, 2 * one[None], 0 * one[None]).pairs(mean, covariance)


def test_exact_pairs_of_ones_own_are_used(registered):
    """A user's rule for |z| is close to the library's without `pairs`, and equal to it with them."""
    net = seeded(lambda: nn.Sequential(nn.Linear(4, 9), Magnitude(), nn.Linear(9, 3)))
    same = seeded(lambda: nn.Sequential(nn.Linear(4, 9), nn.Identity(), nn.Linear(9, 3)))
    same[1].forward = torch.abs
    given = noise(2)
    expected = nm.output_moments(same, given, "layerwise")
    found = {}
    for kind in (MagnitudeRule, MagnitudeRuleWithPairs):
        nm.register_rule(Magnitude, lambda layer, example, kind=kind: kind(torch.arange(9).unsqueeze(-1)))
        found[kind] = nm.output_moments(net, given, "layerwise")
        assert_close(found[kind].mean, expected.mean, atol=1e-12)
        assert_same(nm.output_moments(net, given, "sketch"), nm.output_moments(same, given, "sketch"), atol=1e-10)
    off = (found[MagnitudeRule].covariance - expected.covariance).abs().max() / expected.variance.max()
    assert 1e-6 < float(off) < 0.05
    assert_close(found[MagnitudeRuleWithPairs].covariance, expected.covariance, atol=1e-12)


@pytest.mark.parametrize("layer", [Square, Bent, OwnTanh, nn.ReLU])
def test_what_is_not_affine_is_refused_as_affine(layer, registered):
    rules.register_rule(layer, rules.affine)
    net = seeded(lambda: nn.Sequential(nn.Linear(4, 7), layer(), nn.Linear(7, 3)))
    with pytest.raises(ValueError, match=rf"1 \({layer.__name__}\) is registered as affine \(by None\), but is not"):
        nm.output_moments(net, noise(), "layerwise")


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


def test_bad_rules(registered):
    with pytest.raises(TypeError, match=r"register_rule: layer must be a class of modules, got "):
        rules.register_rule(nn.ReLU(), rules.affine)
    with pytest.raises(TypeError, match=r"register_rule: rule must be a function of a module and an example"):
        rules.register_rule(nn.ReLU, "affine")
    assert not registered
    rules.register_rule(Two, rules.elementwise)
    with pytest.raises(ValueError, match=r"both \(Two\) has a rule of its own, for which it must take one tensor"):
        nm.output_moments(seeded(TakesTwo), noise(), "layerwise")


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("returned", [3, object.__new__(nm.rules.Elementwise)])
def test_what_is_no_rule_is_refused(returned):
    """Something else, or a rule whose windows were never set."""
    rules.register_rule(OwnTanh, lambda module, example: returned)
    network = seeded(lambda: nn.Sequential(nn.Linear(4, 4), OwnTanh(), nn.Linear(4, 2)))
    with pytest.raises(TypeError, match=r"must return a netmoments.rules.Nonlinearity whose windows are set, or None"):
        nm.output_moments(network, noise(), "layerwise")
