"""Directions of the noise: along which the quadratic parts of tensors are followed, and which rows stand for what."""

from __future__ import annotations

from functools import cache, lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor


class FactorLayout(NamedTuple):
    """Which rows of a tensor's factor are what, for noise ε ~ N(0, I) of r directions.

    To second order a tensor is mean + Fᵀε + ½(Q[ε, ε] − tr Q) + rest, the rest uncorrelated between units where it
    arises, with Cov = FᵀF + ½⟨Q, Q⟩ + its own. The rows are

        linear     F, all r of them: this part is exact;
        quadratic  Q of pairs of K directions, scaled so that products of rows give ½⟨Q, Q⟩;
        rest       its deviation times random signs, and products of random sums of rows: sums of products have the
                   right expectation;
        turns      T, the change of F at a curved layer whose input is skewed, Σᵢⱼ Hᵢⱼ Qᵢfⱼ, along the K directions:
                   the linear part is F + T, and covariances have FᵀT + TᵀF beyond the products of all rows.

    A tensor that is affine in the image has the linear rows only. See `Directions` for the K; the first of them,
    `leading`, are those the scores depend on most.
    """

    rank: int
    paired: int
    signs: int
    leading: int
    quadratic: slice
    turns: slice
    total: int
    """Of all rows."""

    @classmethod
    def of(cls, rank: int, paired: int, signs: int, leading: int) -> FactorLayout:
        products = rank + paired * (paired + 1) // 2
        turns = slice(products + signs, products + signs + paired)
        return cls(rank, paired, signs, leading, slice(rank, products), turns, turns.stop)


class Directions(NamedTuple):
    """Along which directions of the noise quadratic parts are followed.

    The first of them, L, are those that the scores depend on most, as they are. For all that is orthogonal to these the
    r numbers of the noise have *colours*, and a direction is the sum of all of one colour with random signs s, so that
    E Σ_kl Q[k, l] Q'[k, l] = Σ Q_pq Q'_pq over all pairs of numbers p, q. Numbers of one colour are far apart in the
    image (see `colours`): what looks at a small part of it sees one of each, and its sums are nearly without chance. A
    colour with itself takes other signs t on one side, f_k = Σ s_p f_p and g_k = Σ t_p f_p: Q[k, k] is H f_k g_k, or
    traces would not stay apart.
    """

    layout: FactorLayout
    first: Tensor
    """The L leading directions, and the signs s of every colour, orthogonal to these: (N, r, K)."""
    second: Tensor
    """The same with the signs t."""
    scored: Tensor
    """Orthonormal ones for the scores' own quadratic parts, (N, r, S): the leading ones, and random ones."""

    @classmethod
    def of(cls, layout: FactorLayout, leading: Tensor, signs: tuple[Tensor, Tensor], scored: Tensor) -> Directions:
        """From orthonormal leading directions (N, r, L) and signs of colours, (r, K − L) each."""
        first, second = (torch.cat([leading, s - leading @ (leading.mT @ s)], -1) for s in signs)
        return cls(layout, first, second, scored)

    def followed(self, linear: Tensor) -> Tensor:
        """Linear rows (N, ..., r) along the K directions."""
        return _each_image(linear, self.first)

    def with_other_signs(self, linear: Tensor) -> Tensor:
        return _each_image(linear, self.second)

    def for_scores(self, linear: Tensor) -> Tensor:
        """Linear rows (N, ..., r) along those of the scores."""
        return _each_image(linear, self.scored)

    def half_turns(self, factor: Tensor) -> Tensor:
        """FᵀT of tensors with factors (N, ..., m, rows): (N, ..., m, m)."""
        return self.followed(factor[..., : self.layout.rank]) @ factor[..., self.layout.turns].mT


def _each_image(linear: Tensor, directions: Tensor) -> Tensor:
    """Products of (N, ..., r) with (N, r, d)."""
    return (linear.flatten(1, -2) @ directions).unflatten(1, linear.shape[1:-1])


@lru_cache(maxsize=32)
def colours(event: tuple[int, ...], rank: int, most: int) -> Tensor:
    """The colour of every number of the noise, (r,): numbers from 0, no more than so many.

    Where there is one number for each of an image (C, ...), numbers of one colour are of one channel, and as far apart
    in every dimension as so many colours allow: 6 in an image of one channel, 4 where there are three. Elsewhere they
    take turns.
    """
    if rank <= most or prod(event) != rank:
        return torch.arange(rank) % most
    channels, places = (event[0], event[1:]) if len(event) > 1 else (1, event)
    apart = max(1, int((most / min(channels, most)) ** (1 / len(places)) + 1e-9))
    found = torch.arange(channels) % most
    for size in places:
        found = found.unsqueeze(-1) * apart + torch.arange(size) % apart
    return torch.unique(found.flatten(), return_inverse=True)[1]


@lru_cache(maxsize=8)
def signs_of_colours(colour: Tensor, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random signs of the noise's numbers in the columns of their colours, (r, K), twice; 1 if each has its own."""
    with torch.inference_mode(False), torch.no_grad():
        one = torch.nn.functional.one_hot(colour).to(torch.float64)
        rank = len(colour)
        signs = torch.ones(2, rank, 1, dtype=torch.float64)
        if one.shape[1] < rank:
            signs = 2.0 * torch.randint(0, 2, (2, rank, 1), generator=torch.Generator().manual_seed(rank)) - 1
        first, second = (one * signs).to(device, dtype)
        return first, second


def inner_product_weights(rank: int, leading: int, paired: int, like: Tensor) -> Tensor:
    """W, (K, K), with ⟨Q, Q'⟩ ≈ Σ W Q Q' over the first K directions of an orthonormal basis of r.

    With all directions W = 1. Of r random orthonormal ones, the first K give

        r(r−1)/(K(K−1)) Σₖ≠ₗ QₖₗQ'ₖₗ + r/K Σₖ QₖₖQ'ₖₖ,

    which is unbiased whatever the traces; its relative error is about √2/K. Pairs of a leading direction and a random
    one have r/K, pairs of leading ones 1, with r and K then counting the random ones only.
    """
    random, seen = rank - leading, paired - leading
    between = random * (random - 1) / (seen * (seen - 1)) if seen > 1 else 1.0
    weights = torch.full((paired, paired), between, dtype=like.dtype, device=like.device)
    weights.fill_diagonal_(random / seen)
    weights[:leading] = weights[:, :leading] = random / seen
    weights[:leading, :leading] = 1.0
    return weights


@cache
def pair_places(paired: int) -> tuple[Tensor, Tensor, Tensor]:
    """Both members of every pair k ≤ l, (pairs,), and the number of each pair, (K, K)."""
    first, second = torch.triu_indices(paired, paired)
    number = torch.zeros(paired, paired, dtype=torch.int64)
    number[first, second] = number[second, first] = torch.arange(len(first))
    return first, second, number


def as_factors(matrices: Tensor) -> Tensor:
    """Q as symmetric matrices (..., K, K) to rows (..., pairs), whose products are ½⟨Q, Q'⟩."""
    first, second, _ = pair_places(matrices.shape[-1])
    first, second = first.to(matrices.device), second.to(matrices.device)
    return matrices[..., first, second] * _pair_scales(first, second, 0.5**0.5, matrices)


def as_matrices(quadratic: Tensor, paired: int) -> Tensor:
    """Q, (..., K, K), from its rows (..., pairs)."""
    first, second, number = (places.to(quadratic.device) for places in pair_places(paired))
    return (quadratic * _pair_scales(first, second, 2**0.5, quadratic))[..., number]


def _pair_scales(first: Tensor, second: Tensor, alone: float, like: Tensor) -> Tensor:
    """1 for pairs of two, `alone` for one with itself: (pairs,)."""
    return torch.ones_like(first, dtype=like.dtype).masked_fill(first == second, alone)


def random_signs(rows: int, units: int, place: int, like: Tensor) -> Tensor:
    """(units, rows) of ±1/√rows, the same every time for a place in the network."""
    return _signs(rows, units, place, like.dtype, like.device)


@lru_cache(maxsize=16)
def _signs(rows: int, units: int, place: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        generator = torch.Generator().manual_seed(place)
        signs = torch.randint(0, 2, (units, rows), generator=generator, dtype=torch.int8) * 2 - 1
        return signs.to(device).to(dtype) / rows**0.5


@lru_cache(maxsize=4)
def random_normals(rank: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(r, count), the same every time."""
    with torch.inference_mode(False), torch.no_grad():  # else what is kept from there would be unusable elsewhere
        normal = torch.randn(rank, count, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
        return normal.to(dtype).to(device)
