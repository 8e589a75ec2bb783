"""Squares, products, one-signed functions, softmax and the like: closed forms, digits, samples, gradients."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from netmoments.covariances import whitened
from netmoments.rules.base import Local, Nonlinearity, ThirdCumulants
from netmoments.rules.composed import (
    LogSumExp,
    NormalisedRows,
    OneSigned,
    PowerSum,
    Softmax,
    Squared,
    SumOfProducts,
    points_for,
)
from netmoments.rules.one_number import Elementwise

LIKE = torch.zeros((), dtype=torch.float64)


def places(*shape: int) -> Tensor:
    return torch.arange(math.prod(shape)).reshape(shape)


def normalised(width: int, rows: int = 1, eps: float = 1e-5) -> NormalisedRows:
    generator = torch.Generator().manual_seed(width)
    scale, shift = torch.randn(2, rows * width, dtype=torch.float64, generator=generator)
    return NormalisedRows(places(rows, width), eps, scale, shift)


RULES: dict[str, Nonlinearity] = {
    "square": Squared(places(1, 1)),
    "product": SumOfProducts(places(1, 2)),
    "sum of products": SumOfProducts(places(1, 6), torch.tensor([0.7], dtype=torch.float64)),
    "1/√z": OneSigned(torch.rsqrt, (1,), LIKE),
    "log z": OneSigned(torch.log, (1,), LIKE),
    "softmax": Softmax(places(1, 4)),
    "normalised": normalised(6),
    "log-sum": LogSumExp(places(1, 4)),
    "power sum": PowerSum(places(1, 4), 3.0),
    "power sum of ReLUs": PowerSum(places(1, 3), 2.0, with_zero=True),
}
POSITIVE = ("1/√z", "log z")
BY_POINTS = (Softmax, NormalisedRows, LogSumExp, PowerSum)


def gaussian_windows(name: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Means (n, w) and covariances (n, w, w), equal for all units of a row; positive inputs are 10 deviations up."""
    rule, generator = RULES[name], torch.Generator().manual_seed(seed)
    width = rule.width
    root = torch.randn(width, width, dtype=torch.float64, generator=generator) / width**0.5
    mean = 0.5 * torch.randn(width, dtype=torch.float64, generator=generator)
    covariance = 0.3 * (root @ root.T + 0.3 * torch.eye(width, dtype=torch.float64))
    if name in POSITIVE:
        mean, covariance = torch.tensor([5.0], dtype=torch.float64), torch.full((1, 1), 0.25, dtype=torch.float64)
    return mean.expand(rule.units, -1), covariance.expand(rule.units, -1, -1)


def moments_at(rule: Nonlinearity, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The values (K, n) at samples (K, w) of a window, with their mean and variance."""
    y = rule.values(z.unsqueeze(1).expand(-1, rule.units, -1))
    return y, y.mean(0), y.var(0)


def assert_moments_of(rule: Nonlinearity, local: Local, z: Tensor, slack: float) -> None:
    """Check mean and variance to five standard errors plus a slack, which is in deviations."""
    y, mean, variance = moments_at(rule, z)
    count, deviation = len(z), variance.sqrt()
    assert bool(((local.mean - mean).abs() <= (5 / count**0.5 + slack) * deviation).all())
    spread = (((y - mean) ** 4).mean(0) - variance**2).sqrt()
    assert bool(((local.variance - variance).abs() <= 5 * spread / count**0.5 + 2 * slack * variance).all())


@pytest.mark.parametrize("name", RULES)
def test_moments_against_samples(name):
    """The samples are 10⁶, of a Gaussian, or of a Gamma distribution where inputs are positive."""
    rule, (mean, covariance) = RULES[name], gaussian_windows(name)
    generator = torch.Generator().manual_seed(1)
    if name in POSITIVE:
        shape = mean[0, 0] ** 2 / covariance[0, 0, 0]
        torch.manual_seed(1)
        z = torch.distributions.Gamma(shape, mean[0, 0] / covariance[0, 0, 0]).sample((10**6, 1))
    else:
        root = torch.linalg.cholesky(covariance[0])
        z = mean[0] + torch.randn(10**6, rule.width, dtype=torch.float64, generator=generator) @ root.T
    slack = 2e-3 if isinstance(rule, BY_POINTS) else 0.0
    local = rule.local(mean, covariance)
    assert_moments_of(rule, local, z, slack)
    y, expected, variance = moments_at(rule, z)
    if name not in POSITIVE:  # Stein's identity is that of a Gaussian
        with_inputs = (z - mean[0]).T @ (y - expected) / len(z)
        allowed = (5e-3 + slack) * covariance[0].diagonal().max().sqrt() * variance.max().sqrt()
        assert float((with_inputs - covariance[0] @ local.gain.T).abs().max()) <= float(allowed)


@pytest.mark.parametrize("name", [name for name in RULES if name not in POSITIVE])
def test_gain_and_curvature_are_derivatives_of_the_mean(name):
    """∂E f/∂m = g and ∂g/∂m = H; a curvature by Stein's identity has the error of the points."""
    rule, (mean, covariance) = RULES[name], gaussian_windows(name, seed=3)
    by_stein = isinstance(rule, LogSumExp | PowerSum)
    local = rule.local(mean, covariance)

    def expected(shift: Tensor) -> Tensor:
        return rule.local(mean + shift, covariance).mean

    def gain(shift: Tensor) -> Tensor:
        return rule.local(mean + shift, covariance).gain

    nothing = torch.zeros(rule.width, dtype=torch.float64)
    by_mean = torch.autograd.functional.jacobian(expected, nothing)
    torch.testing.assert_close(by_mean, local.gain, rtol=1e-9, atol=1e-9)
    if name == "power sum of ReLUs":
        return  # whose slope jumps, which no derivative at points sees
    bend = torch.autograd.functional.jacobian(gain, nothing)
    torch.testing.assert_close(bend, local.curvature, rtol=0, atol=0.02 if by_stein else 1e-9)


@pytest.mark.parametrize("name", RULES)
def test_third_cumulants_count_to_first_order(name):
    """Samples with κ = 0.15 along one direction, z = m + R(u + κ/6 (u₁² − 1)e₁): the error is of order κ²."""
    rule, (mean, covariance) = RULES[name], gaussian_windows(name, seed=4)
    root, _ = whitened(covariance, covariance, rule.windows >= 0, rule.width)
    kappa = torch.zeros(rule.units, rule.width, rule.width, rule.width, dtype=torch.float64)
    kappa[:, 0, 0, 0] = 0.15
    skewed = rule.local(mean, covariance, ThirdCumulants(root, kappa))
    u = torch.randn(10**6, rule.width, dtype=torch.float64, generator=torch.Generator().manual_seed(6))
    u[:, 0] += 0.15 / 6 * (u[:, 0] ** 2 - 1)
    assert_moments_of(rule, skewed, mean[0] + u @ root[0].T, 5e-3)
    difference = (skewed.gain - rule.local(mean, covariance).gain).abs().max()
    assert float(difference) > 1e-6 or isinstance(rule, Squared | SumOfProducts)  # whose slopes are linear


@pytest.mark.parametrize("name", RULES)
def test_derivatives(name):
    """The derivatives of all four moments in mean and covariance, against differences; images come first."""
    rule, (mean, covariance) = RULES[name], gaussian_windows(name, seed=5)
    mean, covariance = (torch.stack([x, 1.1 * x]).requires_grad_() for x in (mean, covariance))
    if isinstance(rule, BY_POINTS):
        rule = type(rule)(**{**vars_of(rule), "points": 64})

    def moments(m: Tensor, half: Tensor) -> tuple[Tensor, ...]:
        return tuple(rule.local(m, 0.5 * (half + half.mT)))

    assert torch.autograd.gradcheck(moments, (mean, covariance), atol=1e-6)


def vars_of(rule: Nonlinearity) -> dict[str, object]:
    return {name: getattr(rule, name) for name in rule.__dataclass_fields__}  # type: ignore[attr-defined]


def test_products_are_isserlis():
    """A sum of three products, against the sum of Cov(ab, cd) over pairs of products, without third cumulants."""
    rule, (mean, covariance) = RULES["sum of products"], gaussian_windows("sum of products", seed=7)
    m, S = mean[0], covariance[0]
    expected, variance = 0.7, 0.0
    for i in range(3):
        expected += float(m[i] * m[3 + i] + S[i, 3 + i])
        for j in range(3):
            a, b, c, d = i, 3 + i, j, 3 + j
            variance += float(m[a] * m[c] * S[b, d] + m[a] * m[d] * S[b, c] + m[b] * m[c] * S[a, d])
            variance += float(m[b] * m[d] * S[a, c] + S[a, c] * S[b, d] + S[a, d] * S[b, c])
    local = rule.local(mean, covariance)
    assert float(local.mean) == pytest.approx(expected, rel=1e-13)
    assert float(local.variance) == pytest.approx(variance, rel=1e-13)


def test_squares_and_their_pairs_are_those_of_products():
    """z² is the product of z with itself, and Cov(z², z'²) is 4mm'c + 2c²."""
    mean = torch.tensor([[0.4], [-1.2]], dtype=torch.float64)
    covariance = torch.tensor([[0.5, 0.3], [0.3, 0.8]], dtype=torch.float64)
    alone, twice = Squared(places(2, 1)), SumOfProducts(torch.tensor([[0, 0], [1, 1]]))
    own = covariance.diagonal()[:, None, None]
    single, double = alone.local(mean, own), twice.local(mean.expand(-1, 2), own.expand(-1, 2, 2))
    torch.testing.assert_close(single.mean, double.mean)
    torch.testing.assert_close(single.variance, double.variance)
    pairs = alone.pairs(mean.mT, covariance.unsqueeze(0))[0]
    linear = single.gain * covariance * single.gain.mT
    torch.testing.assert_close((pairs + linear).diagonal(), single.variance)
    both = SumOfProducts(torch.tensor([[0, 1, 0, 1]])).local(
        mean.mT.repeat(1, 2), covariance.repeat(2, 2).unsqueeze(0)
    )  # z² + z'², whose variance has the covariance twice
    total = single.variance.sum() + 2 * (pairs + linear)[0, 1]
    torch.testing.assert_close(both.variance.squeeze(), total)


def test_powers_of_squares_are_those_of_quadrature():
    """The quadrature is exact for polynomials of degree 127."""
    mean = torch.tensor([[0.4, -1.2, 0.0, 2.0]], dtype=torch.float64)
    variance = torch.tensor([[0.5, 0.3, 1.0, 0.0]], dtype=torch.float64)
    found = Squared(places(4, 1)).power_moments(mean, variance)
    wanted = Elementwise(torch.square, (4,), LIKE).power_moments(mean, variance)
    assert wanted is not None
    torch.testing.assert_close(tuple(found), tuple(wanted), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("function", "power"), [(torch.rsqrt, -0.5), (torch.sqrt, 0.5), (torch.reciprocal, -1.0)])
@pytest.mark.parametrize(("spread", "tolerance"), [(0.05, 1e-5), (0.1, 1e-4), (0.3, 1e-2)])
def test_powers_of_gamma(function, power, spread, tolerance):
    """E zᵖ = θᵖ Γ(k + p)/Γ(k): the error grows like the fourth power of s/m.

    Gain and curvature give Cov(z, zᵖ)/s² = p E zᵖ/m together, g + ½γsH, to first order in γ.
    """
    k = mpmath.mpf(1) / spread**2
    moment = [mpmath.gamma(k + n * power) / mpmath.gamma(k) * (3 / k) ** (n * power) for n in (1, 2)]
    expected, variance = float(moment[0]), float(moment[1] - moment[0] ** 2)
    for sign in (1, -1) if function is torch.reciprocal else (1,):
        rule, skew = OneSigned(function, (1,), LIKE), 2 * spread * sign
        mean = torch.tensor([[3.0 * sign]], dtype=torch.float64)
        local = rule.local(mean, torch.full((1, 1, 1), (3 * spread) ** 2, dtype=torch.float64))
        assert abs(float(local.mean) * sign - expected) < tolerance * variance**0.5
        assert float(local.variance) == pytest.approx(variance, rel=tolerance)
        slope = float(local.gain) + skew / 2 * 3 * spread * float(local.curvature)
        assert slope == pytest.approx(power * expected / 3, rel=spread**2 / 4)


def test_one_signed_pairs():
    """Far from 0 the covariance of the roots of two correlated inputs is nearly that for Gaussian inputs."""
    mean = torch.tensor([[20.0, 30.0]], dtype=torch.float64)
    covariance = torch.tensor([[[1.0, 0.6], [0.6, 2.0]]], dtype=torch.float64)
    found = OneSigned(torch.sqrt, (2,), LIKE).pairs(mean, covariance)
    plain = Elementwise(torch.sqrt, (2,), LIKE).pairs(mean, covariance)
    torch.testing.assert_close(found, plain, rtol=0.03, atol=0)


def test_softmax_of_two_is_a_logistic_function():
    """E σ(d) for d = z₁ − z₂ ~ N(m, s²), by mpmath."""
    mean, covariance = torch.tensor([0.8, -0.4]).double(), torch.tensor([[1.5, 0.2], [0.2, 0.7]]).double()
    m, s = 1.2, math.sqrt(1.5 + 0.7 - 0.4)
    first, second = (
        float(mpmath.quad(lambda u, n=n: (1 / (1 + mpmath.exp(-m - s * u))) ** n * mpmath.npdf(u), [-10, 0, 10]))
        for n in (1, 2)
    )
    local = Softmax(places(1, 2)).local(mean.expand(2, -1), covariance.expand(2, -1, -1))
    assert local.mean.tolist() == pytest.approx([first, 1 - first], abs=2e-4)
    assert local.variance.tolist() == pytest.approx([second - first**2] * 2, rel=2e-3)


def test_softmax_sums_to_one():
    """Means sum to 1, gains and curvatures over units to 0, and gains over a row to 0, to rounding, skewed or not."""
    rows = places(2, 3, 5).transpose(1, 2).reshape(-1, 3)  # over a dimension in the middle
    rule = Softmax(rows)
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(4, 30, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(rule.values(rule.gathered(z)).reshape(4, 2, 3, 5), z.reshape(4, 2, 3, 5).softmax(2))
    mean = rule.gathered(z[0])
    factor = rule.gathered(torch.randn(6, 30, dtype=torch.float64, generator=generator)).permute(1, 2, 0)
    covariance = factor @ factor.mT
    root, _ = whitened(covariance, covariance, rule.windows >= 0, 3)
    skew = 0.1 * torch.randn(3, dtype=torch.float64, generator=generator)
    kappa = torch.einsum("a,b,c->abc", skew, skew, skew).expand(30, 3, 3, 3)
    for cumulants in (None, ThirdCumulants(root, kappa)):
        local = rule.local(mean, covariance, cumulants)
        torch.testing.assert_close(local.mean[rows].sum(-1), torch.ones(10).double())
        assert float(local.gain[rows].sum(1).abs().max()) < 1e-14
        assert float(local.gain.sum(-1).abs().max()) < 1e-14
        assert float(local.curvature[rows].sum(1).abs().max()) < 1e-14


def test_what_is_masked_has_no_part():
    """An input far below the others counts as missing."""
    mean = torch.tensor([0.3, -1e5, 0.9]).double()
    covariance = torch.diag(torch.tensor([1.0, 0.5, 2.0])).double()
    found = Softmax(places(1, 3)).local(mean.expand(3, -1), covariance.expand(3, -1, -1))
    kept = [0, 2]
    alone = Softmax(places(1, 2)).local(mean[kept].expand(2, -1), covariance[kept][:, kept].expand(2, -1, -1))
    assert float(found.mean[1]) == float(found.variance[1]) == 0
    torch.testing.assert_close(found.mean[kept], alone.mean, rtol=0, atol=1e-3)
    torch.testing.assert_close(found.gain[kept][:, kept], alone.gain, rtol=0, atol=1e-3)


def test_normalisation_is_torch_s():
    z = torch.randn(4, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rule = normalised(8, rows=3)
    wanted = functional.layer_norm(z.reshape(4, 3, 8), (8,), eps=1e-5).flatten(1) * rule.scale + rule.shift
    torch.testing.assert_close(rule.values(rule.gathered(z)), wanted)


def test_normalisation_does_not_see_scale_or_level():
    """Without ε the moments of αz + β are those of z, and gains sum to 0 over a row."""
    rule = normalised(6, eps=0.0)
    mean, covariance = gaussian_windows("normalised", seed=8)
    local, moved = rule.local(mean, covariance), rule.local(3 * mean + 2, 9 * covariance)
    torch.testing.assert_close(moved.mean, local.mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(moved.variance, local.variance, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(3 * moved.gain, local.gain, rtol=1e-9, atol=1e-9)
    assert float(local.gain.sum(-1).abs().max()) < 1e-12
    # Σ yᵢ² = w for all z: the second moments sum to w
    plain = NormalisedRows(places(1, 6), 0.0, torch.ones(6).double(), torch.zeros(6).double()).local(mean, covariance)
    assert float((plain.variance + plain.mean**2).sum()) == pytest.approx(6, rel=1e-9)


@pytest.mark.parametrize(
    ("width", "expected"), [(1, math.sqrt(2 / math.pi)), (2, math.sqrt(math.pi / 2)), (3, math.sqrt(8 / math.pi))]
)
def test_lengths_of_gaussian_vectors(width, expected):
    """The means of the half-normal, Rayleigh's and Maxwell's distributions, and E|z|² = w."""
    rule = PowerSum(places(1, width), 2.0)
    local = rule.local(torch.zeros(1, width).double(), torch.eye(width).double().unsqueeze(0))
    assert float(local.mean) == pytest.approx(expected, rel=2e-3)
    assert float(local.variance + local.mean**2) == pytest.approx(width, rel=1e-9)


def test_log_sum_of_two_is_a_softplus():
    """log(eᵃ + eᵇ) = b + log(1 + e^(a−b)) for independent a and b, by mpmath."""
    expected = float(
        mpmath.quad(lambda u: mpmath.log(1 + mpmath.exp(0.5 + math.sqrt(2) * u)) * mpmath.npdf(u), [-12, 0, 12])
    )
    local = LogSumExp(places(1, 2)).local(torch.tensor([[0.5, 0.0]]).double(), torch.eye(2).double().unsqueeze(0))
    assert float(local.mean) == pytest.approx(expected, abs=2e-4)
    assert float(local.gain.sum()) == pytest.approx(1, abs=1e-12)
    assert float(local.curvature.sum().abs()) < 0.02


def test_points_are_more_for_fewer_windows():
    assert [points_for(windows) for windows in (1, 100, 10**6)] == [8192, 2048, 512]
