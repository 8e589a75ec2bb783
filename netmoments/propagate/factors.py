"""Factors: how the noise of the input spreads over a tensor, as rows of numbers whose products are covariances.

A tensor with the factor F, one row for each of some uncorrelated numbers of variance 1, has the covariance FᵀF. Rows
pass through an affine part of a network like inputs do, without its offset, so no square of a layer is ever formed.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from netmoments.covariances import Covariance

PAIRED = 32
"""Directions of the noise of which all pairs are followed through the network; all of them if it has no more."""
DEPENDENT = 1e-5
"""A direction of which no more than this is left, beside those before it, adds none."""
SIGNS = 64
"""Rows of random signs (Hutchinson 1990) for what is neither linear nor quadratic."""


class FactorLayout(NamedTuple):
    """Which rows of a tensor's factor are what, for noise ε ~ N(0, I) of r directions.

    To second order a tensor is mean + Fᵀε + ½(Q[ε, ε] − tr Q) + rest, the rest uncorrelated between units where it
    arises, with Cov = FᵀF + ½⟨Q, Q⟩ + its own. The rows are

        linear     F, all r of them: this part is exact;
        quadratic  Q of pairs of the first K directions, scaled so that products of rows give ½⟨Q, Q⟩;
        rest       its deviation times random signs: sums of products have the right expectation;
        turns      T, the change of F at a curved layer whose input is skewed, Σᵢⱼ Hᵢⱼ Qᵢfⱼ: of first order in Q, so
                   that covariances have FᵀT + TᵀF of it.

    A tensor that is affine in the image has the linear rows only.

    With K < r the first directions, `leading`, are those the scores depend on most, and the others a random orthonormal
    basis of the rest: see `inner_product_weights` for ⟨Q, Q'⟩ = Σₖₗ Qₖₗ Q'ₖₗ from the first K.
    """

    rank: int
    paired: int
    signs: int
    leading: int
    followed: slice
    """The linear rows of which pairs are followed."""
    quadratic: slice
    covariance: slice
    """The rows whose products are covariances: all but the turns."""
    turns: slice
    total: int
    """Of all rows."""

    @classmethod
    def of(cls, rank: int, paired: int, signs: int, leading: int) -> FactorLayout:
        pairs = paired * (paired + 1) // 2
        products = rank + pairs + signs
        slices = slice(0, paired), slice(rank, rank + pairs), slice(0, products), slice(products, products + paired)
        return cls(rank, paired, signs, leading, *slices, products + paired)


def layout_for(rank: int, scores: int) -> FactorLayout:
    """For noise of so many directions and so many scores."""
    paired = min(rank, PAIRED)
    return FactorLayout.of(rank, paired, SIGNS, min(scores, paired // 2) if paired < rank else 0)


def inner_product_weights(layout: FactorLayout, paired: int, like: Tensor) -> Tensor:
    """W, (K, K), with ⟨Q, Q'⟩ ≈ Σ W Q Q' over the first K directions.

    With all directions W = 1. Of r random orthonormal ones, the first K give

        r(r−1)/(K(K−1)) Σₖ≠ₗ QₖₗQ'ₖₗ + r/K Σₖ QₖₖQ'ₖₖ,

    which is unbiased whatever the traces; its relative error is about √2/K. Pairs of a leading direction and a random
    one have r/K, pairs of leading ones 1, with r and K then counting the random ones only.
    """
    rank, seen = layout.rank - layout.leading, paired - layout.leading
    between = rank * (rank - 1) / (seen * (seen - 1)) if seen > 1 else 1.0
    weights = torch.full((paired, paired), between, dtype=like.dtype, device=like.device)
    weights.fill_diagonal_(rank / seen)
    weights[: layout.leading] = weights[:, : layout.leading] = rank / seen
    weights[: layout.leading, : layout.leading] = 1.0
    return weights


@cache
def pair_places(paired: int) -> tuple[Tensor, Tensor, Tensor]:
    """Both members of every pair k ≤ l, (pairs,), and the number of each pair, (K, K)."""
    first, second = torch.triu_indices(paired, paired)
    number = torch.zeros(paired, paired, dtype=torch.int64)
    number[first, second] = number[second, first] = torch.arange(len(first))
    return first, second, number


def as_factors(matrices: Tensor, layout: FactorLayout) -> Tensor:
    """Q as symmetric matrices (..., K, K) to rows (..., pairs), whose products are ½⟨Q, Q'⟩."""
    paired = matrices.shape[-1]
    places, device = pair_places(paired), matrices.device
    weights = inner_product_weights(layout, paired, matrices).sqrt()
    weights.diagonal().mul_(0.5**0.5)
    return (matrices * weights)[..., places[0].to(device), places[1].to(device)]


def weighted_matrices(quadratic: Tensor, layout: FactorLayout) -> Tensor:
    """W·Q, (..., K, K), from the rows (..., pairs) of Q: for products with other matrices."""
    number = pair_places(layout.paired)[2].to(quadratic.device)
    weights = inner_product_weights(layout, layout.paired, quadratic).sqrt()
    weights.diagonal().mul_(2**0.5)
    return quadratic[..., number] * weights


@lru_cache(maxsize=2)
def random_basis(rank: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A random orthogonal matrix (r, r), the same every time."""
    with torch.inference_mode(False), torch.no_grad():  # else a basis kept from there would be unusable elsewhere
        normal = torch.randn(rank, rank, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
        q, r = torch.linalg.qr(normal)
        return (q * r.diagonal().sign()).to(dtype).to(device)


def image_factors(covariance: Covariance, like: Tensor) -> Tensor:
    """The linear rows of the image, (..., r, n)."""
    if covariance.rank <= PAIRED:
        return covariance.root().mT
    return covariance.turned_root(random_basis(covariance.rank, like.dtype, like.device))


def turned_towards(image: Tensor, directions: Tensor) -> Tensor:
    """The image's rows (N, r, n) in a basis that begins with the span of the given directions, (N, r, d).

    One Householder reflection for each that is not a sum of those before; FᵀF stays as it is.
    """
    directions = directions / torch.linalg.vector_norm(directions, dim=(1, 2), keepdim=True).clamp(min=1e-30)
    for place in range(directions.shape[-1]):
        normal = directions[..., place].clone()
        normal[:, :place] = 0
        length = torch.linalg.vector_norm(normal, dim=1)
        normal[:, place] += torch.where(normal[:, place] >= 0, length, -length)
        normal = normal / torch.linalg.vector_norm(normal, dim=1, keepdim=True).clamp(min=1e-30)
        normal = torch.where(length.unsqueeze(-1) > DEPENDENT, normal, 0.0)
        column, row = normal.unsqueeze(-1), normal.unsqueeze(-2)
        image = image - 2 * column * (row @ image)  # I − 2vvᵀ
        directions = directions - 2 * column * (row @ directions)
    return image


def random_signs(rows: int, units: int, place: int, like: Tensor) -> Tensor:
    """(units, rows) of ±1/√rows, the same every time for a place in the network."""
    return _signs(rows, units, place, like.dtype, like.device)


@lru_cache(maxsize=16)
def _signs(rows: int, units: int, place: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        generator = torch.Generator().manual_seed(place)
        signs = torch.randint(0, 2, (units, rows), generator=generator, dtype=torch.int8) * 2 - 1
        return signs.to(device).to(dtype) / rows**0.5
