"""The joint covariance carried through every layer: exact where it must be, within Monte Carlo's error elsewhere."""

from __future__ import annotations

import pytest
import torch
from netmoments.propagate.rows import Rows
from torch import Tensor, nn
from torch.nn import functional

import netmoments as nm
from netmoments.covariances import Covariance, Dense, Diagonal, Isotropic, LowRank
from netmoments.moments.output_moments import plan_of
from netmoments.network.graph import shape_of, traced_graph
from netmoments.propagate.layerwise import gaussian_layerwise, layerwise, layerwise_need
from netmoments.propagate.plan import Plan
from netmoments.rules.base import Nonlinearity, ThirdCumulants, whitened
from netmoments.rules.maximum import Largest
from netmoments.rules.piecewise_linear import PiecewiseLinear, between, one_kink, relu
from netmoments.rules.registry import adaptive_windows, pooling_windows, reduction_windows
from netmoments.rules.smooth import Elementwise
from tests.networks import Residual


def seeded(make: type[nn.Module] | object, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    made: nn.Module = make()  # type: ignore[operator]
    return made.double().eval()


def image(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(1, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def isotropic(std: float, x: Tensor) -> Isotropic:
    return Isotropic(torch.tensor(std**2, dtype=torch.float64), x.numel())


def moments(network: nn.Module, x: Tensor, covariance: Covariance) -> tuple[Tensor, Tensor]:
    plan = plan_of(network, x, "test")
    with torch.no_grad():
        mean, every = layerwise(plan, x, covariance, torch.arange(network(x).shape[1]).unsqueeze(0))
    return mean[0], every[0]


class Normalised(nn.Module):
    """Batch normalisation, overlapping 3×3 pools with padding, an average at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 3, padding=1, bias=False), nn.Conv2d(6, 8, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(6), nn.BatchNorm2d(8)
        self.last = nn.Linear(8, 4)
        for norm in (self.norm1, self.norm2):
            norm.running_mean.normal_(0, 0.2)
            norm.running_var.uniform_(0.2, 0.6)
            nn.init.uniform_(norm.weight, 0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.norm1(self.conv1(x))), 3, 2, 1)
        x = functional.relu(functional.max_pool2d(self.norm2(self.conv2(x)), 3, 2, 1))
        return self.last(x.mean((2, 3)))


def pooled() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(6, 8, 3, padding=1), nn.MaxPool2d(2),
        nn.ReLU(), nn.Flatten(), nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 4),
    )  # fmt: skip


def leaky() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 60), nn.LeakyReLU(0.1), nn.Linear(60, 60), nn.PReLU(60, 0.3), nn.Linear(60, 60), nn.ReLU6(),
        nn.Dropout(), nn.Linear(60, 4),
    )  # fmt: skip


class Spellings(nn.Module):
    """Operations that a plan must treat as what they are."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.prelu, self.last = nn.PReLU(4), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu_(self.conv(x) * 0.5 - 0.1)
        z = self.prelu(y + functional.pad(x, (0, 0, 0, 0, 1, 1)))
        z = functional.avg_pool2d(z, 2).clamp(-1, 6)
        z = torch.maximum(z, z.flip(-1)).abs()
        low, high = torch.minimum(z, 0.3 - z).split(2, 1)
        z = torch.cat([high, low - 1], 1).transpose(-1, -2)
        top = z.amax((2, 3)).clamp_max(0.8)
        rest = functional.hardtanh(z, -0.4, 0.4).reshape(-1, 4, 9).sum(-1) / 3
        return self.last(torch.cat([top, rest, functional.adaptive_max_pool2d(z, (2, 1)).flatten(1)], 1))


SMALL = {
    "residual": (Residual, (2, 6, 6)),
    "normalised, overlapping 3×3 pools": (Normalised, (1, 9, 9)),
    "2×2 pools": (pooled, (1, 8, 8)),
    "leaky": (leaky, (12,)),
    "spellings": (Spellings, (2, 6, 6)),
}


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
    plan = plan_of(network, image(*shape), "test")
    for seed in range(3):
        x = image(*shape, seed=10 + seed)
        torch.testing.assert_close(run_plan(plan, x), network(x)[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", SMALL)
def test_the_linear_part_of_every_segment_is_its_derivative(name):
    make, shape = SMALL[name]
    network = seeded(make)
    plan = plan_of(network, image(*shape), "test")
    for segment in [stage.before for stage in plan.stages] + [plan.last]:
        points = {node: torch.randn(shape_of(node), dtype=torch.float64) for node in segment.sources}
        steps = {node: torch.randn(shape_of(node), dtype=torch.float64) for node in segment.sources}
        moved = {node: points[node] + steps[node] for node in segment.sources}
        change = segment.value(moved) - segment.value(points)
        torch.testing.assert_close(segment.linear(steps), change, rtol=1e-10, atol=1e-10)


def test_pools_and_relus_are_one_function_of_the_window():
    plan = plan_of(seeded(Normalised), image(1, 9, 9), "test")
    assert [type(stage.rule) for stage in plan.stages] == [Largest, Largest]
    assert all(stage.rule.with_zero for stage in plan.stages)
    assert plan.stages[0].rule.windows.shape == (6 * 25, 9)
    assert int((plan.stages[0].rule.windows < 0).sum()) > 0  # padding


@pytest.mark.parametrize("covariance", ["isotropic", "diagonal", "low rank", "dense"])
def test_equal_to_the_exact_engine(covariance):
    generator = torch.Generator().manual_seed(5)
    network = seeded(lambda: nn.Sequential(nn.Linear(6, 30), nn.ReLU(), nn.Linear(30, 4)))
    x = image(6)
    factor = 0.5 * torch.randn(6, 4, dtype=torch.float64, generator=generator)
    structure: dict[str, Covariance] = {
        "isotropic": isotropic(0.7, x),
        "diagonal": Diagonal(torch.rand(6, dtype=torch.float64, generator=generator)),
        "low rank": LowRank(factor, 0.1),
        "dense": Dense(factor @ factor.T),
    }
    mean, found = moments(network, x, structure[covariance])
    exact = nm.AffineReluAffine(network[0].weight, network[0].bias, network[2].weight, network[2].bias)
    noise = nm.Gaussian(x[0], structure[covariance])
    torch.testing.assert_close(mean, exact.mean(noise).detach(), rtol=0, atol=1e-10)
    torch.testing.assert_close(found, exact.covariance(noise).detach(), rtol=0, atol=1e-10)


ONE_LAYER = {
    "leaky": nn.LeakyReLU(0.2), "prelu": nn.PReLU(30, 0.25), "relu6": nn.ReLU6(), "hardtanh": nn.Hardtanh(-0.5, 0.3),
    "relu": nn.ReLU(),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE_LAYER)
def test_one_piecewise_linear_layer_is_exact(name):
    """Of 2·10⁵ samples, within five standard errors in every mean and covariance."""
    network = seeded(lambda: nn.Sequential(nn.Linear(6, 30), ONE_LAYER[name], nn.Linear(30, 4)))
    x = image(6)
    mean, covariance = moments(network, x, isotropic(1.0, x))
    sampled = nm.monte_carlo(network, nm.Gaussian(x[0], std=1.0), 200_000, seed=2)
    assert float(((mean - sampled.mean) / sampled.mean_standard_error).abs().max()) < 5
    assert float(((covariance - sampled.covariance) / sampled.covariance_standard_error).abs().max()) < 5


BOUNDS = {
    "residual": (0.02, 0.03, 0.3),
    "normalised, overlapping 3×3 pools": (0.02, 0.03, 0.3),
    "2×2 pools": (0.02, 0.03, 0.5),
    "leaky": (0.01, 0.05, 0.5),
}
"""At the larger noise: mean errors in deviations, relative variance errors, and that noise's standard deviation."""


@pytest.mark.parametrize("name", BOUNDS)
def test_within_five_standard_errors_at_small_noise(name):
    make, shape = SMALL[name]
    network, x = seeded(make), image(*shape)
    mean, covariance = moments(network, x, isotropic(0.02, x))
    sampled = nm.monte_carlo(network, nm.Gaussian(x[0], std=0.02), 100_000, seed=3)
    assert float(((mean - sampled.mean) / sampled.mean_standard_error).abs().max()) < 5
    assert float(((covariance - sampled.covariance) / sampled.covariance_standard_error).abs().max()) < 5


@pytest.mark.parametrize("name", BOUNDS)
def test_within_stated_bounds_at_larger_noise(name):
    make, shape = SMALL[name]
    network, x = seeded(make), image(*shape)
    in_deviations, relative, std = BOUNDS[name]
    mean, covariance = moments(network, x, isotropic(std, x))
    sampled = nm.monte_carlo(network, nm.Gaussian(x[0], std=std), 100_000, seed=4)
    deviation = sampled.variance.sqrt()
    slack = 5 * sampled.mean_standard_error / deviation
    assert bool(((mean - sampled.mean).abs() / deviation < in_deviations + slack).all())
    error = (covariance.diagonal() - sampled.variance).abs() / sampled.variance
    assert bool((error < relative + 5 * sampled.variance_standard_error / sampled.variance).all()), error


class Branches(nn.Module):
    """relu(Ax), relu(Bx) and x side by side: (Affine, ReLU, Affine) in two stages, with a path around."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = nn.Linear(6, 30), nn.Linear(6, 30), nn.Linear(66, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([torch.relu(self.left(x)), torch.relu(self.right(x)), x], 1))


def test_parallel_branches_have_their_nonlinear_covariance():
    """Against the exact engine; across branches it is two terms of the series, so 0.5 % and not 1e-10."""
    network, x = seeded(Branches), image(6)
    mean, covariance = moments(network, x, isotropic(1.0, x))
    both = torch.cat([network.left.weight, network.right.weight]), torch.cat([network.left.bias, network.right.bias])
    weights = network.last.weight
    exact = nm.AffineReluAffine(*both, weights[:, :60], network.last.bias, weights[:, 60:])
    noise = nm.Gaussian(x[0], std=1.0)
    torch.testing.assert_close(mean, exact.mean(noise).detach(), rtol=0, atol=1e-10)
    torch.testing.assert_close(covariance.diagonal(), exact.variance(noise).detach(), rtol=5e-3, atol=0)


@pytest.mark.parametrize("name", ["residual", "2×2 pools"])
def test_tiles_change_nothing(name, monkeypatch):
    make, shape = SMALL[name]
    network, x = seeded(make), image(*shape)
    mean, covariance = moments(network, x, isotropic(0.3, x))
    monkeypatch.setattr("netmoments.rules.maximum.CHUNK_ELEMENTS", {"cpu": 5000})
    monkeypatch.setattr("netmoments.propagate.layerwise.DIRECTION_ELEMENTS", {"cpu": 3000})
    tiled_mean, tiled = moments(network, x, isotropic(0.3, x))
    torch.testing.assert_close(tiled_mean, mean, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(tiled, covariance, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["residual", "leaky"])
def test_third_cumulants_make_it_tighter(name):
    make, shape = SMALL[name]
    network, x = seeded(make), image(*shape)
    std = 0.5
    sampled = nm.monte_carlo(network, nm.Gaussian(x[0], std=std), 100_000, seed=4)
    plan, rows = plan_of(network, x, "test"), torch.arange(sampled.mean.numel()).unsqueeze(0)
    with torch.no_grad():
        found = [method(plan, x, isotropic(std, x), rows)[1][0] for method in (layerwise, gaussian_layerwise)]
    errors = [float(((one.diagonal() - sampled.variance) / sampled.variance).abs().max()) for one in found]
    assert errors[0] < 0.6 * errors[1]


def test_float32_is_float64_to_its_rounding():
    network, x = seeded(pooled), image(1, 8, 8)
    mean, covariance = moments(network, x, isotropic(0.1, x))
    single = Isotropic(torch.tensor(0.01), x.numel())
    mean_32, covariance_32 = moments(pooled_like(network), x.float(), single)
    torch.testing.assert_close(mean_32.double(), mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(covariance_32.double(), covariance, rtol=2e-3, atol=1e-6)


def pooled_like(network: nn.Module) -> nn.Module:
    copy = pooled()
    copy.load_state_dict(network.state_dict())
    return copy.float().eval()


@pytest.mark.parametrize("name", ["residual", "2×2 pools", "leaky", "normalised, overlapping 3×3 pools"])
def test_derivatives_in_the_mean_and_the_weights(name, monkeypatch):
    """Against central differences: exact but for their own error, with all pairs of directions.

    With fewer, those that lead follow the scores, and derivatives take them as fixed: see the next test.
    The lines through windows of nine inputs change their order often, so that a difference needs a longer step there.
    """
    monkeypatch.setattr("netmoments.propagate.rows.PAIRED", 128)
    make, shape = SMALL[name]
    network, x = seeded(make), image(*shape)
    rows, structure = torch.arange(network(x).shape[1]).unsqueeze(0), isotropic(0.3, x)
    weights = list(network.parameters())
    generator = torch.Generator().manual_seed(0)
    towards = torch.randn(x.shape, dtype=torch.float64, generator=generator)
    turned = [torch.randn(p.shape, dtype=torch.float64, generator=generator) for p in weights]

    def value(at: Tensor) -> Tensor:
        return layerwise(plan_of(network, x, "test"), at, structure, rows)[0].sum()

    def nudged(amount: float) -> float:
        with torch.no_grad():
            for p, direction in zip(weights, turned, strict=True):
                p.add_(amount * direction)
            return float(value(x))

    step = 1e-3 if "3×3" in name else 1e-4
    at = x.clone().requires_grad_()
    slope, *by_weight = torch.autograd.grad(value(at), [at, *weights], allow_unused=True)
    with torch.no_grad():
        difference = float(value(x + step * towards) - value(x - step * towards)) / (2 * step)
    along = sum(float((g * d).sum()) for g, d in zip(by_weight, turned, strict=True) if g is not None)
    up, down = nudged(step), nudged(-2 * step)
    tolerance = 1e-2 if "3×3" in name else 2e-4
    assert float((slope * towards).sum()) == pytest.approx(difference, rel=tolerance, abs=tolerance)
    assert along == pytest.approx((up - down) / (2 * step), rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("name", ["residual", "2×2 pools"])
def test_derivatives_with_some_of_the_pairs_are_near_those_with_all(name, monkeypatch):
    make, shape = SMALL[name]
    network, x = seeded(make), image(*shape)
    rows, plan = torch.arange(network(x).shape[1]).unsqueeze(0), plan_of(network, x, "test")

    def slope() -> Tensor:
        at = x.clone().requires_grad_()
        mean, covariance = layerwise(plan, at, isotropic(0.3, x), rows)
        return torch.autograd.grad(mean.sum() + covariance.diagonal(dim1=1, dim2=2).sum(), at)[0]

    some = slope()
    monkeypatch.setattr("netmoments.propagate.rows.PAIRED", 128)
    every = slope()
    assert float((some - every).norm() / every.norm()) < 0.02


def test_leading_directions_reduce_the_chance_error(monkeypatch):
    """Variances with 32 of 72 directions, some of them those the scores depend on or all at random, against all 72."""
    make, shape = SMALL["residual"]
    network, x = seeded(make), image(*shape)

    def variance() -> Tensor:
        return moments(network, x, isotropic(0.5, x))[1].diagonal()

    leading = variance()
    monkeypatch.setattr("netmoments.propagate.layerwise.rows_for", lambda rank, scores: Rows(rank, 32, 64, 0))
    at_random = variance()
    monkeypatch.undo()
    monkeypatch.setattr("netmoments.propagate.rows.PAIRED", 128)
    every = variance()
    errors = [float((some / every - 1).abs().max()) for some in (leading, at_random)]
    assert errors[0] < 0.01
    assert errors[0] < errors[1] / 3


def test_windows_of_one_input_are_looked_up():
    """A pool of one pixel with stride 2 picks pixels: the network is (Affine, ReLU, Affine) of those it picks."""
    network = seeded(lambda: nn.Sequential(nn.MaxPool2d(1, 2), nn.ReLU(), nn.Flatten(), nn.Linear(4, 3)))
    x = image(1, 4, 4)
    mean, covariance = moments(network, x, isotropic(0.5, x))
    picked = x[0, 0, ::2, ::2].reshape(-1)
    last = network[-1]
    exact = nm.AffineReluAffine(torch.eye(4).double(), torch.zeros(4).double(), last.weight, last.bias)
    noise = nm.Gaussian(picked, std=0.5)
    torch.testing.assert_close(mean, exact.mean(noise).detach(), rtol=0, atol=1e-10)
    torch.testing.assert_close(covariance, exact.covariance(noise).detach(), rtol=0, atol=1e-10)


def test_many_images_are_each_their_own():
    """Entries of a batch, with noise of their own, equal those alone."""
    network = seeded(pooled)
    x = torch.cat([image(1, 8, 8, seed=seed) for seed in range(3)])
    variance = torch.tensor([0.01, 0.04, 0.09], dtype=torch.float64)
    plan, rows = plan_of(network, x, "test"), torch.tensor([[0, 1], [3, 1], [2, 2]])
    with torch.no_grad():
        mean, covariance = layerwise(plan, x, Isotropic(variance, 64), rows)
        for place in range(3):
            alone = layerwise(plan, x[place : place + 1], Isotropic(variance[place], 64), rows[place : place + 1])
            torch.testing.assert_close(mean[place], alone[0][0], rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(covariance[place], alone[1][0], rtol=1e-10, atol=1e-12)


RULES: dict[str, Nonlinearity] = {
    "relu": relu(1, torch.zeros(1, dtype=torch.float64)),
    "leaky": one_kink(torch.tensor([0.2]).double(), torch.tensor([0.8]).double()),
    "|z|": one_kink(torch.tensor([-1.0]).double(), torch.tensor([2.0]).double()),
    "hard tanh": between(torch.tensor([-0.5]).double(), torch.tensor([0.4]).double(), 1, torch.zeros(1).double()),
    "tanh": Elementwise(torch.tanh, (1,), torch.zeros(1, dtype=torch.float64)),
    "largest": Largest(torch.arange(4)[None], with_zero=False),
    "largest and 0": Largest(torch.arange(4)[None], with_zero=True),
    "smallest": Largest(torch.arange(3)[None], with_zero=False, sign=-1),
    "largest, padded": Largest(torch.tensor([[0, -1, 1, 2]]), with_zero=True),
}


def gaussian_window(rule: Nonlinearity, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    width = rule.width
    root = torch.randn(width, width, dtype=torch.float64, generator=generator) / width**0.5
    mean = 0.3 * torch.randn(1, width, dtype=torch.float64, generator=generator)
    covariance = (root @ root.T + 0.3 * torch.eye(width, dtype=torch.float64)).unsqueeze(0)
    present = (rule.windows >= 0).double()
    return mean * present, covariance * present.unsqueeze(-1) * present.unsqueeze(-2)


@pytest.mark.parametrize("name", RULES)
def test_moments_of_one_unit_against_samples(name):
    """Mean and variance within five standard errors of 10⁶ samples, plus 0.002 deviations where points are used."""
    rule = RULES[name]
    mean, covariance = gaussian_window(rule)
    local = rule.local(mean, covariance)
    generator = torch.Generator().manual_seed(1)
    values, vectors = torch.linalg.eigh(covariance[0])
    root = vectors * values.clamp(min=0).sqrt()
    z = torch.randn(10**6, rule.width, dtype=torch.float64, generator=generator) @ root.T
    y = rule.values((mean[0] + z).unsqueeze(1)).squeeze(1)
    slack = 2e-3 if isinstance(rule, Largest) else 0.0
    deviation = float(y.std())
    assert abs(float(local.mean) - float(y.mean())) < deviation * (5e-3 + slack)
    fourth = float(((y - y.mean()) ** 4).mean())
    allowed = 5 * ((fourth - deviation**4) / 1e6) ** 0.5 + 2 * slack * deviation**2
    assert abs(float(local.variance) - float(y.var())) < allowed
    with_inputs = (z * (y - y.mean()).unsqueeze(-1)).mean(0)
    expected = (covariance[0] @ local.gain[0]).squeeze()
    allowed = 5e-3 * float(z.std()) * deviation + slack
    torch.testing.assert_close(with_inputs, expected.reshape(-1), rtol=0, atol=allowed)


@pytest.mark.parametrize("name", [name for name in RULES if name != "largest, padded"])
def test_gain_curvature_and_cumulants_are_derivatives_of_the_mean(name):
    """∂E f/∂m = g, ∂g/∂m = H, and third cumulants add κ/6 times the third derivative."""
    rule = RULES[name]
    mean, covariance = gaussian_window(rule, seed=3)
    slack = 5e-3 if isinstance(rule, Largest) else 1e-7  # tanh: 64 nodes end there, its poles being at ±iπ/2
    root, _ = whitened(covariance, covariance, rule.windows >= 0, rule.width)

    def expected(m: Tensor) -> Tensor:
        return rule.local(m, covariance).mean.sum()

    def gain(m: Tensor) -> Tensor:
        return rule.local(m, covariance).gain[0]

    def curvature(m: Tensor) -> Tensor:
        return rule.local(m, covariance).curvature[0]

    local = rule.local(mean, covariance)
    torch.testing.assert_close(torch.autograd.functional.jacobian(expected, mean)[0], local.gain[0], rtol=0, atol=slack)
    by_mean = torch.autograd.functional.jacobian(gain, mean)[:, 0]
    torch.testing.assert_close(by_mean, local.curvature[0], rtol=0, atol=10 * slack)
    third = torch.autograd.functional.jacobian(curvature, mean)[:, :, 0]
    generator = torch.Generator().manual_seed(2)
    single = torch.randn(rule.width, dtype=torch.float64, generator=generator)
    kappa = 0.05 * torch.einsum("a,b,c->abc", single, single, single).unsqueeze(0)
    skewed = rule.local(mean, covariance, ThirdCumulants(root, kappa))
    in_z = torch.einsum("abc,ia,jb,kc->ijk", kappa[0], root[0], root[0], root[0])
    expected_change = (third * in_z).sum() / 6
    assert float(skewed.mean - local.mean) == pytest.approx(float(expected_change), rel=0.05, abs=slack / 10 + 1e-7)


@pytest.mark.parametrize("name", ["relu", "hard tanh", "|z|", "tanh", "largest and 0"])
def test_skewed_moments_against_samples_of_a_skewed_input(name):
    """z = m + R(u + κ/6 (u₁² − 1)e₁) to first order in κ = 0.2: what is left is of order κ²."""
    rule = RULES[name]
    mean, covariance = gaussian_window(rule, seed=4)
    root, _ = whitened(covariance, covariance, rule.windows >= 0, rule.width)
    kappa = torch.zeros(1, rule.width, rule.width, rule.width, dtype=torch.float64)
    kappa[0, 0, 0, 0] = 0.2
    local = rule.local(mean, covariance, ThirdCumulants(root, kappa))
    u = torch.randn(10**6, rule.width, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    u[:, 0] += 0.2 / 6 * (u[:, 0] ** 2 - 1)
    y = rule.values((mean[0] + u @ root[0].T).unsqueeze(1)).squeeze(1)
    deviation = float(y.std())
    assert abs(float(local.mean) - float(y.mean())) < 0.008 * deviation
    assert abs(float(local.variance) / float(y.var()) - 1) < 0.015


def test_two_fully_correlated_kinks():
    """The variance of one unit with two kinks has a closed form of its own; against quadrature."""
    rule = RULES["hard tanh"]
    nodes = torch.linspace(-9, 9, 200_001, dtype=torch.float64)
    density = torch.exp(-nodes * nodes / 2)
    density /= density.sum()
    for mean, std in ((0.1, 0.9), (-1.5, 0.4), (3.0, 1.0), (0.0, 1e-3)):
        y = (mean + std * nodes).clamp(-0.5, 0.4)
        centre = (density * y).sum()
        local = rule.local(torch.tensor([[mean]]).double(), torch.tensor([[[std**2]]]).double())
        assert float(local.mean) == pytest.approx(float(centre), abs=1e-7)
        assert float(local.variance) == pytest.approx(float((density * (y - centre) ** 2).sum()), rel=1e-4, abs=1e-8)


def test_pairs_of_two_kinks_are_exact():
    """Cov of two hard tanhs against a two-dimensional Gauss–Hermite sum of the conditional closed form."""
    rule = PiecewiseLinear(*(torch.cat([x, x], -1) for x in _parts(RULES["hard tanh"])))
    mean = torch.tensor([0.2, -0.1]).double()
    covariance = torch.tensor([[0.8, 0.5], [0.5, 0.6]]).double()
    found = rule.pairs(mean, covariance)[0, 1]
    gains = rule.local(mean.unsqueeze(-1), covariance.diagonal().reshape(2, 1, 1)).gain.squeeze(-1)
    total = found + gains[0] * gains[1] * covariance[0, 1]
    nodes = torch.linspace(-9, 9, 20_001, dtype=torch.float64)
    weight = torch.exp(-nodes * nodes / 2)
    weight /= weight.sum()
    first = mean[0] + covariance[0, 0].sqrt() * nodes
    slope = covariance[0, 1] / covariance[0, 0]
    rest = (covariance[1, 1] - slope * covariance[0, 1]).expand(len(nodes)).reshape(-1, 1, 1)
    one = PiecewiseLinear(*(x.expand(*x.shape[:-1], len(nodes)) for x in _parts(RULES["hard tanh"])))
    second = one.local((mean[1] + slope * (first - mean[0])).unsqueeze(-1), rest).mean
    y = first.clamp(-0.5, 0.4)
    expected = (weight * y * second).sum() - (weight * y).sum() * (weight * second).sum()
    assert float(total) == pytest.approx(float(expected), abs=1e-7)


def _parts(rule: Nonlinearity) -> tuple[Tensor, ...]:
    assert isinstance(rule, PiecewiseLinear)
    return rule.offset, rule.slope, rule.bends, rule.kinks


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


def test_tied_and_constant_windows():
    """Equal means, a singular covariance, no noise at all: finite, and right where the answer is known."""
    rule = Largest(torch.arange(8).reshape(2, 4), with_zero=False)
    mean = torch.zeros(2, 4, dtype=torch.float64)
    covariance = torch.zeros(2, 4, 4, dtype=torch.float64)
    covariance[0] = 1.0  # four copies of one number
    local = rule.local(mean, covariance)
    assert float(local.mean[0]) == pytest.approx(0, abs=1e-3)
    assert float(local.variance[0]) == pytest.approx(1, abs=1e-2)
    assert float(local.gain[0].sum()) == pytest.approx(1, abs=1e-6)
    assert local.mean[1] == 0
    assert local.variance[1] == 0
    assert all(bool(torch.isfinite(part).all()) for part in local)


def test_the_need_grows_with_the_largest_layer_and_names_it():
    """In proportion beyond the layers that have exact pairs, whose squares count too."""

    def need(width: int) -> tuple[str, int]:
        layers = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2)
        network = seeded(lambda: nn.Sequential(*layers))
        return layerwise_need(plan_of(network, image(4), "test"), 4, 8)

    assert need(1000)[0] == "3"
    assert need(2000)[1] > 3 * need(1000)[1]
    assert need(16000)[1] == pytest.approx(4 * need(4000)[1], rel=0.05)


def test_the_graph_follows_the_weights():
    network, x = seeded(leaky), image(12)
    before, _ = moments(network, x, isotropic(0.2, x))
    with torch.no_grad():
        network[-1].bias += 1
    after, _ = moments(network, x, isotropic(0.2, x))
    torch.testing.assert_close(after - before, torch.ones(4, dtype=torch.float64))


def test_a_kept_plan_follows_the_weights():
    """The same plan while nothing changes; another after a change, however made, and where gradients are wanted."""
    network, x = seeded(leaky), image(12)
    with torch.no_grad():
        kept, before = plan_of(network, x, "test"), moments(network, x, isotropic(0.2, x))[0]
        assert plan_of(network, x, "test") is kept
        network[-1].bias.data += 1
        assert plan_of(network, x, "test") is not kept
        torch.testing.assert_close(moments(network, x, isotropic(0.2, x))[0] - before, torch.ones(4).double())
    assert plan_of(network, x, "test") is not plan_of(network, x, "test")


def test_graphs_say_where_an_operation_is():
    graph = traced_graph(seeded(Residual), image(2, 6, 6), "test")
    places = {graph.where(node) for node in graph.nodes if node in graph.noisy}
    assert {"stem", "block1.conv1", "block2.norm2"} <= places
