"""Directions of the noise along which quadratic parts are followed, and the layout of a factor's rows.

`rows` carries every tensor as a factor, rows of numbers whose products are its covariances; `FactorLayout` says what
each row stands for. Noise of r directions has r² pairs, too many to follow, so quadratic parts are known along K
`Directions` only: those that the scores depend on most, and sums of all the others with random signs.
"""

from __future__ import annotations

from functools import cache, lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor


class FactorLayout(NamedTuple):
    """What each row of a tensor's factor stands for, for noise ε ~ N(0, I) of r directions.

    To second order in ε a tensor is mean + Fᵀε + ½(Q[ε, ε] − tr Q) + rest. The rest is uncorrelated between the units
    of the layer where it arises, and Cov = FᵀF + ½⟨Q, Q⟩ + Cov rest. The rows are, in this order,

        linear     the r rows of F: this part is exact;
        quadratic  Q for all pairs of the K directions, scaled so that products of rows give ½⟨Q, Q⟩;
        rest       its deviation times random signs, and products of random sums of rows (`mixed_rows`): covariances
                   have the right expectation;
        turns      T, the change of F at a curved layer with skewed input, Σᵢⱼ Hᵢⱼ Qᵢfⱼ, along the K directions. The
                   linear part is F + T: covariances have FᵀT + TᵀF beyond the products of all rows.

    A tensor that is affine in the image has linear rows only.
    """

    rank: int
    """r, the directions of the noise."""
    paired: int
    """K, the directions of which all pairs are followed."""
    signs: int
    """How many rows the rest has."""
    leading: int
    """L, how many of the K directions are those that the scores depend on most; they come first."""
    quadratic: slice
    turns: slice
    total: int
    """How many rows there are in all."""

    @classmethod
    def of(cls, rank: int, paired: int, signs: int, leading: int) -> FactorLayout:
        products = rank + paired * (paired + 1) // 2
        turns = slice(products + signs, products + signs + paired)
        return cls(rank, paired, signs, leading, slice(rank, products), turns, turns.stop)


class Directions(NamedTuple):
    """The K directions of the noise along which quadratic parts are followed, and the S directions of the scores.

    The first L of the K are the leading ones, those that the scores depend on most. The others cover what is orthogonal
    to these: every number of the noise has a *colour*, and a direction is the sum of all numbers of one colour with
    random signs s. Then E Σ_kl Q[k, l] Q'[k, l] = Σ Q_pq Q'_pq over all pairs of numbers p, q. Numbers of one colour
    are far apart in the image (see `colours`): a unit that looks at a small part of it sees each colour once, and its
    own sums have hardly any chance error.

    Where a colour is paired with itself, the two sums have different signs, f_k = Σ s_p f_p and g_k = Σ t_p f_p, and
    Q[k, k] is H f_k g_k. With one set of signs the traces of Q and Q' would be mixed into their inner product.
    """

    layout: FactorLayout
    first: Tensor
    """The L leading directions, then the sums of colours with signs s, made orthogonal to these: (N, r, K)."""
    second: Tensor
    """The same with signs t."""
    scored: Tensor
    """Orthonormal directions for the scores' own quadratic parts, (N, r, S): the leading ones, then random ones."""

    @classmethod
    def of(cls, layout: FactorLayout, leading: Tensor, signs: tuple[Tensor, Tensor], scored: Tensor) -> Directions:
        """From orthonormal leading directions (N, r, L) and both `signs_of_colours`, (r, K − L) each."""
        first, second = (torch.cat([leading, s - leading @ (leading.mT @ s)], -1) for s in signs)
        return cls(layout, first, second, scored)

    def followed(self, linear: Tensor) -> Tensor:
        """Linear rows (N, ..., r) along the K directions with signs s: (N, ..., K)."""
        return _each_image(linear, self.first)

    def with_other_signs(self, linear: Tensor) -> Tensor:
        """Linear rows (N, ..., r) along the K directions with signs t: (N, ..., K)."""
        return _each_image(linear, self.second)

    def for_scores(self, linear: Tensor) -> Tensor:
        """Linear rows (N, ..., r) along the S directions of the scores: (N, ..., S)."""
        return _each_image(linear, self.scored)

    def half_turns(self, factor: Tensor) -> Tensor:
        """FᵀT, half of what turns add to covariances, from factors (N, ..., m, rows): (N, ..., m, m)."""
        return self.followed(factor[..., : self.layout.rank]) @ factor[..., self.layout.turns].mT


def _each_image(linear: Tensor, directions: Tensor) -> Tensor:
    """Products of (N, ..., r) with (N, r, d), image by image: (N, ..., d)."""
    return (linear.flatten(1, -2) @ directions).unflatten(1, linear.shape[1:-1])


@lru_cache(maxsize=32)
def colours(event: tuple[int, ...], rank: int, most: int) -> Tensor:
    """The colour of every number of the noise: (r,), counted from 0, at most `most` different ones.

    Where the noise has one number for each number of an image (C, ...), those of one colour are in one channel, and as
    far apart in every dimension as the number of colours allows: of 48, 6 in an image of one channel, 4 in one of
    three. In other noise the colours take turns.
    """
    if rank <= most or prod(event) != rank:
        return torch.arange(rank) % most
    channels, places = (event[0], event[1:]) if len(event) > 1 else (1, event)
    apart = max(1, int((most / min(channels, most)) ** (1 / len(places)) + 1e-9))
    colour = torch.arange(channels) % most
    for size in places:
        colour = colour.unsqueeze(-1) * apart + torch.arange(size) % apart
    return torch.unique(colour.flatten(), return_inverse=True)[1]


@lru_cache(maxsize=8)
def signs_of_colours(colour: Tensor, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Two sets of random signs, (r, K) each: the sign of every number is in the column of its colour, with 0 elsewhere.

    If each number has a colour of its own nothing is to be random, and all signs are 1.
    """
    with torch.inference_mode(False), torch.no_grad():
        indicator = torch.nn.functional.one_hot(colour).to(torch.float64)
        rank = len(colour)
        signs = torch.ones(2, rank, 1, dtype=torch.float64)
        if indicator.shape[1] < rank:
            signs = 2.0 * torch.randint(0, 2, (2, rank, 1), generator=torch.Generator().manual_seed(rank)) - 1
        first, second = (indicator * signs).to(device, dtype)
        return first, second


def inner_product_weights(rank: int, leading: int, count: int, like: Tensor) -> Tensor:
    """W, (K, K), such that ⟨Q, Q'⟩ ≈ Σ W Q Q' over the first K = `count` directions of an orthonormal basis of r.

    With all directions W = 1. For a random basis the first K directions give

        r(r−1)/(K(K−1)) Σₖ≠ₗ QₖₗQ'ₖₗ + r/K Σₖ QₖₖQ'ₖₖ,

    which is unbiased whatever the traces; its relative error is about √2/K. If the first `leading` directions are not
    random, r and K count the others only: a leading direction with a random one has r/K, two leading ones 1.
    """
    random_rank, random_count = rank - leading, count - leading
    between = random_rank * (random_rank - 1) / (random_count * (random_count - 1)) if random_count > 1 else 1.0
    weights = torch.full((count, count), between, dtype=like.dtype, device=like.device)
    weights.fill_diagonal_(random_rank / random_count)
    weights[:leading] = weights[:, :leading] = random_rank / random_count
    weights[:leading, :leading] = 1.0
    return weights


@cache
def pair_places(paired: int) -> tuple[Tensor, Tensor, Tensor]:
    """The pairs k ≤ l of K directions: k and l of every pair, (pairs,) each, and where each pair stands, (K, K)."""
    first, second = torch.triu_indices(paired, paired)
    number = torch.zeros(paired, paired, dtype=torch.int64)
    number[first, second] = number[second, first] = torch.arange(len(first))
    return first, second, number


def as_rows(matrices: Tensor) -> Tensor:
    """Symmetric matrices Q (..., K, K) as rows (..., pairs) whose products are ½⟨Q, Q'⟩."""
    first, second, _ = pair_places(matrices.shape[-1])
    first, second = first.to(matrices.device), second.to(matrices.device)
    return matrices[..., first, second] * _pair_scales(first, second, 0.5**0.5, matrices)


def as_matrices(quadratic: Tensor, paired: int) -> Tensor:
    """The matrices Q (..., K, K) of quadratic rows (..., pairs): the inverse of `as_rows`."""
    first, second, number = (places.to(quadratic.device) for places in pair_places(paired))
    return (quadratic * _pair_scales(first, second, 2**0.5, quadratic))[..., number]


def _pair_scales(first: Tensor, second: Tensor, alone: float, like: Tensor) -> Tensor:
    """`alone` for a direction paired with itself, 1 for every other pair: (pairs,)."""
    return torch.ones_like(first, dtype=like.dtype).masked_fill(first == second, alone)


def random_signs(rows: int, units: int, seed: int, like: Tensor) -> Tensor:
    """Random numbers ±1/√rows, (units, rows): the same at every call with the same seed."""
    return _signs(rows, units, seed, like.dtype, like.device)


@lru_cache(maxsize=16)
def _signs(rows: int, units: int, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        generator = torch.Generator().manual_seed(seed)
        signs = torch.randint(0, 2, (units, rows), generator=generator, dtype=torch.int8) * 2 - 1
        return signs.to(device).to(dtype) / rows**0.5


@lru_cache(maxsize=4)
def random_normals(rank: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Standard normal numbers, (r, count): the same at every call."""
    with torch.inference_mode(False), torch.no_grad():  # a cached tensor of inference mode would be unusable elsewhere
        normal = torch.randn(rank, count, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
        return normal.to(dtype).to(device)
