"""The paper's own expressions, as printed, for comparison with the exact engine, which uses none of them.

The paper is "Network Moments: Extensions and Sparse-Smooth Attacks" by Alfadly, Bibi, Botero, Alsubaihi and Ghanem.
Each function names its equation and says where the printed form has a slip.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from netmoments.affine_relu_affine import AffineReluAffine
from netmoments.checks import require_broadcastable, require_float_tensors, values_hold
from netmoments.gaussian import Gaussian
from netmoments.normal import density, distribution
from netmoments.precision import matmul, matvec
from netmoments.relu.marginal import relu_variance


def relu_atom(mean: Tensor, std: Tensor) -> Tensor:
    """Remark 1: the mass Q(μ/σ) = P(x ≤ 0) that max(x, 0) has at 0."""
    return distribution(-mean / std)


def relu_density(y: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Remark 1: the density f_x(y) u(y) of max(x, 0) away from 0."""
    return torch.where(y > 0, density((y - mean) / std) / std, 0.0)


def relu_mean_zero_mean(std: Tensor) -> Tensor:
    """Remark 1: E max(x, 0) = σ/√(2π) for μ = 0."""
    return std / math.sqrt(2 * math.pi)


def squared_relu_density(y: Tensor, std: Tensor) -> Tensor:
    """Lemma 1: the density f_x(√y)/(2√y) of max²(x, 0) away from 0, for μ = 0. The mass at 0 is 1/2."""
    root = torch.sqrt(torch.where(y > 0, y, 1.0))
    return torch.where(y > 0, density(root / std) / (2 * std * root), 0.0)


def squared_relu_mean(std: Tensor) -> Tensor:
    """Lemma 1: E max²(x, 0) = σ²/2 for μ = 0."""
    return 0.5 * std * std


ROOT_TWO = math.sqrt(2)
ROOT_TWO_PI = math.sqrt(2 * math.pi)
FAR = 26.0
"""The end of infinite ranges of integration: erf is ±1 there, and exp(−x²) has not underflowed in float64."""


def relu_product_zero_mean(covariance: Tensor, std1: Tensor, std2: Tensor) -> Tensor:
    """Lemma 3: E[max(x₁,0) max(x₂,0)] for zero means. (Its proof lacks a square: σ₁₂²/(σ₁²σ₂²) belongs there.)"""
    scale = std1 * std2
    rho = (covariance / scale).clamp(-1, 1)
    return (covariance * torch.asin(rho) + scale * torch.sqrt(1 - rho * rho)) / (2 * math.pi) + covariance / 4


def relu_cross_moment_series(
    mu1: Tensor, mu2: Tensor, sigma1: Tensor, sigma2: Tensor, rho: Tensor, terms: int = 20
) -> Tensor:
    """Lemma 4: E[max(x₁,0) max(x₂,0)] for any means, the series cut to `terms` terms (u = 0, …, terms − 1).

    Both branches are as printed. At |ρ| = 1/√2 exactly the first one is taken, and hardly converges.
    """
    (value,) = deque(relu_cross_moment_partial_sums(mu1, mu2, sigma1, sigma2, rho, terms), maxlen=1)
    return value


def relu_cross_moment_partial_sums(
    mu1: Tensor, mu2: Tensor, sigma1: Tensor, sigma2: Tensor, rho: Tensor, terms: int
) -> Iterator[Tensor]:
    """Lemma 4 with 1, 2, …, `terms` terms, one result after the other."""
    caller = "relu_cross_moment_series"
    named = {"mu1": mu1, "mu2": mu2, "sigma1": sigma1, "sigma2": sigma2, "rho": rho}
    require_float_tensors(caller, **named)
    require_broadcastable(caller, **{name: value.shape for name, value in named.items()})
    if isinstance(terms, bool) or not isinstance(terms, int) or terms < 1:
        raise ValueError(f"{caller}: terms must be a positive integer, got {terms!r}")
    if not values_hold(sigma1 > 0) or not values_hold(sigma2 > 0):
        raise ValueError(f"{caller}: sigma1 and sigma2 must be > 0")
    if not values_hold(rho.abs() <= 1):
        raise ValueError(f"{caller}: rho must be within [−1, 1]")
    return _partial_sums(mu1, mu2, sigma1, sigma2, rho, terms)


def _partial_sums(
    mu1: Tensor, mu2: Tensor, sigma1: Tensor, sigma2: Tensor, rho: Tensor, terms: int
) -> Iterator[Tensor]:
    """`relu_cross_moment_partial_sums` of arguments that are checked."""
    h, k = mu1 / sigma1, mu2 / sigma2
    root = torch.sqrt((1 - rho) * (1 + rho))
    first = _quotient(h - rho * k, root)  # e₁ᵀΣ̃μ
    second = _quotient(k - rho * h, root)  # e₂ᵀΣ̃μ
    scale = mu1 * mu2 + rho * sigma1 * sigma2
    omega = (
        sigma1 * sigma2 * root / (2 * math.pi) * torch.exp(-0.5 * (h**2 + second**2))
        + mu1 * sigma2 / (2 * ROOT_TWO_PI) * torch.exp(-0.5 * k**2) * (1 + torch.erf(first / ROOT_TWO))
        + mu2 * sigma1 / (2 * ROOT_TWO_PI) * torch.exp(-0.5 * h**2) * (1 + torch.erf(second / ROOT_TWO))
        + scale / 4 * (1 + torch.erf(k / ROOT_TWO))
    )
    near = rho.abs() <= 1 / ROOT_TWO
    sign = torch.copysign(torch.ones_like(rho), rho)
    divisor = torch.where(near, root, rho.abs())
    a = torch.where(near, rho, root) / divisor
    b = torch.where(near, h, -sign * h) / (ROOT_TWO * divisor)
    limit = torch.where(near, -k, sign * first) / ROOT_TWO
    closed = 0.25 * math.pi * (sign + torch.erf(first / ROOT_TWO) * torch.erf(k / ROOT_TWO))
    for integral in _integrals_beyond(a, b, limit, terms):
        yield omega + scale / math.pi * torch.where(near, integral, closed - sign * integral)


def _integrals_beyond(a: Tensor, b: Tensor, x: Tensor, terms: int) -> Iterator[Tensor]:
    """I(∞) − I(x) with 1, 2, … terms of the series of I(x) = (√π/2) ∫₀ˣ exp(−t²) erf(at+b) dt, for |a| ≤ 1.

    Both sums of the lemma are one over n = 2u and 2u + 1:
    I(x) = π/4 erf(x) erf(b) + (√π/2) e^{−b²} Σₙ (−sign x)ⁿ (a/2)ⁿ⁺¹ P(n/2+1, x²) Hₙ(b) / Γ(n/2+3/2).
    The Hermite polynomials are computed times e^{−b²}/√(2ⁿn!), so that nothing overflows.
    """
    a, b, x = torch.broadcast_tensors(a, b, x.clamp(-FAR, FAR))
    sign = torch.sign(x)
    total = 0.25 * math.pi * (1 - torch.erf(x)) * torch.erf(b)
    previous, hermite = torch.zeros_like(b), torch.exp(-b * b)
    for n, gamma in enumerate(_incomplete_gammas(x * x, 2 * terms)):
        beyond = 1 - gamma if n % 2 == 0 else sign * gamma - 1
        log_size = 0.5 * (math.lgamma(n + 1) - (n + 2) * math.log(2)) - math.lgamma(n / 2 + 1.5)
        total = total + 0.5 * math.sqrt(math.pi) * math.exp(log_size) * a ** (n + 1) * hermite * beyond
        hermite, previous = b * math.sqrt(2 / (n + 1)) * hermite - math.sqrt(n / (n + 1)) * previous, hermite
        if n % 2 == 1:
            yield total


def _incomplete_gammas(y: Tensor, count: int) -> Iterator[Tensor]:
    """P(n/2 + 1, y) for n = 0, 1, …, from P(s+1, y) = P(s, y) − yˢe^{−y}/Γ(s+1)."""
    decay, root = torch.exp(-y), torch.sqrt(y)
    step_whole, step_half = decay * y, decay * root * (2 / math.sqrt(math.pi))
    whole, half = -torch.expm1(-y), torch.erf(root) - step_half
    step_half = step_half * y / 1.5
    for n in range(count):
        s = n / 2 + 1
        if n % 2 == 0:
            yield whole
            whole, step_whole = (whole - step_whole).clamp(min=0), step_whole * y / (s + 1)
        else:
            yield half
            half, step_half = (half - step_half).clamp(min=0), step_half * y / (s + 1)


def _quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Infinite at ρ = ±1, except 0/0 = 0."""
    return torch.where(numerator == 0, torch.zeros_like(numerator), numerator / denominator)


def price_theorem_sides(
    function: Callable[..., Tensor], mean: Tensor, covariance: Tensor, nodes: int = 24
) -> tuple[Tensor, Tensor]:
    """Both sides of Lemma 2 (Price's theorem, 1958) for a smooth Ψ(x₁, …, x_p) of an even number p of Gaussians:

        ∂^{p/2} E[Ψ(x)] / ∂σ₁₂ ∂σ₃₄ …  =  E[∂^p Ψ(x) / ∂x₁ … ∂x_p].

    Expectations are Gauss–Hermite sums with `nodes` points in each dimension, through the Cholesky factor of the
    covariance; derivatives are exact. The left side differentiates the sum in the covariances, the right side the
    function.
    """
    mean, covariance = require_float_tensors("price_theorem_sides", mean=mean, covariance=covariance)
    size = mean.numel()
    if mean.dim() != 1 or size % 2 or covariance.shape != (size, size):
        raise ValueError(
            "price_theorem_sides: mean must have shape (p,) with p even and covariance (p, p), "
            f"got {tuple(mean.shape)} and {tuple(covariance.shape)}"
        )
    points, weights = _gauss_hermite_grid(size, nodes, mean)
    left = _derivative_of_expectation(function, mean, covariance, points, weights)
    x = mean + points @ torch.linalg.cholesky(covariance).mT
    return left, (weights * _mixed_derivative(function, x)).sum()


def _derivative_of_expectation(
    function: Callable[..., Tensor], mean: Tensor, covariance: Tensor, points: Tensor, weights: Tensor
) -> Tensor:
    """∂^{p/2} E[Ψ(x)] / ∂σ₁₂ ∂σ₃₄ …"""
    shifts = [torch.zeros((), dtype=mean.dtype, device=mean.device, requires_grad=True) for _ in mean[::2]]
    moved = covariance.detach().clone()
    for pair, shift in enumerate(shifts):
        step = torch.zeros_like(covariance)
        step[2 * pair, 2 * pair + 1] = step[2 * pair + 1, 2 * pair] = 1
        moved = moved + shift * step
    x = mean.detach() + points @ torch.linalg.cholesky(moved).mT
    value = (weights * function(*x.unbind(-1))).sum()
    for shift in shifts:
        (value,) = torch.autograd.grad(value, shift, create_graph=True)
    return value.detach()


def _mixed_derivative(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    """∂^p Ψ(x) / ∂x₁ … ∂x_p at points (..., p)."""
    coordinates = [column.clone().requires_grad_() for column in x.detach().unbind(-1)]
    value = function(*coordinates)
    for coordinate in coordinates:
        (value,) = torch.autograd.grad(value.sum(), coordinate, create_graph=True)
    return value.detach()


def _gauss_hermite_grid(size: int, nodes: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Points (nodes^size, size) and weights with Σ w f(point) = E f(N(0, I)) for polynomials of degree 2·nodes − 1."""
    line, weight = np.polynomial.hermite_e.hermegauss(nodes)
    points = torch.tensor(list(itertools.product(line, repeat=size)), dtype=like.dtype, device=like.device)
    weights = torch.ones((), dtype=like.dtype, device=like.device)
    for _ in range(size):
        weights = torch.outer(weights.flatten(), weights.new_tensor(weight / weight.sum())).flatten()
    return points, weights


def expected_output(network: AffineReluAffine, noise: Gaussian) -> Tensor:
    """Theorem 1 with the error function as printed: E g(x). Relative accuracy is lost far in the left tail."""
    mean, std, _ = _pre_activations(network, noise)
    hidden = (
        0.5 * mean
        - 0.5 * mean * torch.erf(-mean / (math.sqrt(2) * std))
        + std / math.sqrt(2 * math.pi) * torch.exp(-(mean**2) / (2 * std**2))
    )
    return matvec(network.B, hidden) + network.c2


def second_moment_zero_mean(network: AffineReluAffine, noise: Gaussian) -> Tensor:
    """Theorem 2, E[g²] for zero input mean and c₁ = 0, with its constant corrected to 2c₂E[B relu] + c₂².

    As printed the theorem adds c₂ alone; see `second_moment_as_printed`.
    """
    _, std, _ = _pre_activations(network, noise)
    expected = matvec(network.B, relu_mean_zero_mean(std))
    return _second_moment_without_offset(network, noise) + 2 * network.c2 * expected + network.c2**2


def second_moment_as_printed(network: AffineReluAffine, noise: Gaussian) -> Tensor:
    """Theorem 2 to the letter: the sums plus c₂. Wrong unless c₂ is 0, or 1 − 2E[B relu]."""
    return _second_moment_without_offset(network, noise) + network.c2


def variance_zero_mean(network: AffineReluAffine, noise: Gaussian) -> Tensor:
    """The paper's old variance: E[g²] − E[g]² from Theorem 2, as if the input mean and c₁ were zero."""
    _, std, _ = _pre_activations(network, noise)
    return _second_moment_without_offset(network, noise) - matvec(network.B, relu_mean_zero_mean(std)) ** 2


def variance_series(network: AffineReluAffine, noise: Gaussian, terms: int = 20) -> Tensor:
    """The paper's new variance: Lemma 4, cut to `terms` terms, in place of Lemma 3 in Theorem 2; then E[g²] − E[g]².

    It stores p×p matrices and subtracts large numbers: in float32 few correct digits are left at small noise.
    """
    expected, second = _moments_by_series(network, noise, terms)
    return _quadratic_form(network.B, second) - matvec(network.B, expected) ** 2


def variance_series_by_pairs(network: AffineReluAffine, noise: Gaussian, terms: int = 5) -> Tensor:
    """The paper's new variance as its authors ran it: diag(B K Bᵀ), with K = E[y₁y₂] − E[y₁]E[y₂] pair by pair.

    It differs from `variance_series` in rounding only: here large numbers are subtracted for every pair of units
    instead of once for each output. The authors ran it in float32 with 5 terms.
    """
    expected, second = _moments_by_series(network, noise, terms)
    return _quadratic_form(network.B, second - expected.unsqueeze(-1) * expected.unsqueeze(-2))


def _moments_by_series(network: AffineReluAffine, noise: Gaussian, terms: int) -> tuple[Tensor, Tensor]:
    """E y, (..., p), and E[y yᵀ], (..., p, p), of the ReLU's output y, pairs by Lemma 4 with so many terms."""
    mean, std, covariance = _pre_activations(network, noise)
    rows, columns = (mean.unsqueeze(-1), std.unsqueeze(-1)), (mean.unsqueeze(-2), std.unsqueeze(-2))
    rho = (covariance / (rows[1] * columns[1])).clamp(-1, 1)
    cross = relu_cross_moment_series(rows[0], columns[0], rows[1], columns[1], rho, terms=terms)
    gate, bell = distribution(mean / std), density(mean / std)
    squares = (mean**2 + std**2) * gate + mean * std * bell
    return mean * gate + std * bell, torch.diagonal_scatter(cross, squares, dim1=-2, dim2=-1)


def pairs_variance_zero_mean(network: AffineReluAffine, noise: Gaussian) -> Tensor:
    """The part of each output's variance from pairs of different units, as if every pre-activation had mean zero.

    It is Lemma 3 less the product of the means of Remark 1, weighted by B, and grows with the noise as a variance does.
    """
    _, std, covariance = _pre_activations(network, noise)
    rows, columns = std.unsqueeze(-1), std.unsqueeze(-2)
    cross = relu_product_zero_mean(covariance, rows, columns) - relu_mean_zero_mean(rows) * relu_mean_zero_mean(columns)
    return _quadratic_form(network.B, torch.diagonal_scatter(cross, torch.zeros_like(std), dim1=-2, dim2=-1))


def variance_zero_mean_pairs(network: AffineReluAffine, noise: Gaussian) -> Tensor:
    """The old variance as the authors ran it: variances of units exactly, covariances of pairs as if for zero means.

    Theorem 2 takes the variances of units for zero means too: see `variance_zero_mean`.
    """
    mean, std, _ = _pre_activations(network, noise)
    of_units = (network.B**2 * relu_variance(mean, std).unsqueeze(-2)).sum(-1)
    return of_units + pairs_variance_zero_mean(network, noise)


def _second_moment_without_offset(network: AffineReluAffine, noise: Gaussian) -> Tensor:
    """The sums of Theorem 2: E (B y)² for the ReLU's outputs y, with zero means."""
    _, std, covariance = _pre_activations(network, noise)
    cross = relu_product_zero_mean(covariance, std.unsqueeze(-1), std.unsqueeze(-2))
    cross = torch.diagonal_scatter(cross, squared_relu_mean(std), dim1=-2, dim2=-1)
    return _quadratic_form(network.B, cross)


def _quadratic_form(weights: Tensor, matrix: Tensor) -> Tensor:
    """The diagonal of B K Bᵀ."""
    return (matmul(weights, matrix) * weights).sum(-1)


def _pre_activations(network: AffineReluAffine, noise: Gaussian) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, standard deviation and p×p covariance of Ax + c₁; the deviations, by which the paper divides, are > 0."""
    hidden = noise.affine(network.A, network.c1)
    covariance = hidden.covariance.dense()
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    if not values_hold(variance > 0):
        raise ValueError(
            "the paper's expressions divide by the standard deviation of every unit, and one is 0: "
            "use AffineReluAffine, which has the limit"
        )
    return hidden.mean, variance.sqrt(), covariance
