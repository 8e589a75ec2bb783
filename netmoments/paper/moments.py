"""Theorem 1, Theorem 2 and the general variance of (Affine, ReLU, Affine), evaluated as the paper writes them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from netmoments.affine_relu_affine import AffineReluAffine
from netmoments.checks import values_hold
from netmoments.gaussian import Gaussian
from netmoments.normal import density, distribution
from netmoments.paper.densities import relu_mean_zero_mean, squared_relu_mean
from netmoments.paper.series import relu_cross_moment_series, relu_product_zero_mean
from netmoments.precision import matmul, matvec
from netmoments.relu.marginal import relu_variance


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

    It stores p×p matrices and subtracts large numbers: in float32 little is left of it at small noise.
    """
    mean, std, covariance = _pre_activations(network, noise)
    rows, columns = (mean.unsqueeze(-1), std.unsqueeze(-1)), (mean.unsqueeze(-2), std.unsqueeze(-2))
    rho = (covariance / (rows[1] * columns[1])).clamp(-1, 1)
    cross = relu_cross_moment_series(rows[0], columns[0], rows[1], columns[1], rho, terms=terms)
    gate, bell = distribution(mean / std), density(mean / std)
    own = (mean**2 + std**2) * gate + mean * std * bell
    second = _quadratic_form(network.B, torch.diagonal_scatter(cross, own, dim1=-2, dim2=-1))
    return second - matvec(network.B, mean * gate + std * bell) ** 2


def variance_series_by_pairs(network: AffineReluAffine, noise: Gaussian, terms: int = 5) -> Tensor:
    """The paper's new variance as its authors ran it: diag(B K Bᵀ), with K = E[y₁y₂] − E[y₁]E[y₂] pair by pair.

    The same as `variance_series` but for rounding: here large numbers are subtracted for every pair of units instead of
    once for each output. The authors ran it in float32 with 5 terms.
    """
    mean, std, covariance = _pre_activations(network, noise)
    rows, columns = (mean.unsqueeze(-1), std.unsqueeze(-1)), (mean.unsqueeze(-2), std.unsqueeze(-2))
    rho = (covariance / (rows[1] * columns[1])).clamp(-1, 1)
    cross = relu_cross_moment_series(rows[0], columns[0], rows[1], columns[1], rho, terms=terms)
    gate, bell = distribution(mean / std), density(mean / std)
    expected = mean * gate + std * bell
    own = (mean**2 + std**2) * gate + mean * std * bell
    cross = torch.diagonal_scatter(cross, own, dim1=-2, dim2=-1)
    return _quadratic_form(network.B, cross - expected.unsqueeze(-1) * expected.unsqueeze(-2))


def pairs_variance_zero_mean(network: AffineReluAffine, noise: Gaussian) -> Tensor:
    """What pairs of different units add to the variance of each output, as if every pre-activation had mean zero.

    Lemma 3 less the product of the means of Remark 1, weighted by B. It grows with the noise as a variance does.
    """
    _, std, covariance = _pre_activations(network, noise)
    rows, columns = std.unsqueeze(-1), std.unsqueeze(-2)
    cross = relu_product_zero_mean(covariance, rows, columns) - relu_mean_zero_mean(rows) * relu_mean_zero_mean(columns)
    return _quadratic_form(network.B, torch.diagonal_scatter(cross, torch.zeros_like(std), dim1=-2, dim2=-1))


def variance_zero_mean_pairs(network: AffineReluAffine, noise: Gaussian) -> Tensor:
    """The old variance as the authors ran it: every unit's own variance exactly, pairs as if their means were zero.

    Not what Theorem 2 says, which takes the units' own variances for zero means too: see `variance_zero_mean`.
    """
    mean, std, _ = _pre_activations(network, noise)
    own = (network.B**2 * relu_variance(mean, std).unsqueeze(-2)).sum(-1)
    return own + pairs_variance_zero_mean(network, noise)


def _second_moment_without_offset(network: AffineReluAffine, noise: Gaussian) -> Tensor:
    _, std, covariance = _pre_activations(network, noise)
    cross = relu_product_zero_mean(covariance, std.unsqueeze(-1), std.unsqueeze(-2))
    cross = torch.diagonal_scatter(cross, squared_relu_mean(std), dim1=-2, dim2=-1)
    return _quadratic_form(network.B, cross)


def _quadratic_form(weights: Tensor, matrix: Tensor) -> Tensor:
    return (matmul(weights, matrix) * weights).sum(-1)


def _pre_activations(network: AffineReluAffine, noise: Gaussian) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, standard deviation and covariance of Ax + c₁, the last one p×p. The paper divides by the deviations."""
    image = noise.affine(network.A, network.c1)
    covariance = image.covariance.dense()
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    if not values_hold(variance > 0):
        raise ValueError(
            "the paper's expressions divide by the standard deviation of every unit, and one is 0: "
            "use AffineReluAffine, which has the limit"
        )
    return image.mean, variance.sqrt(), covariance
