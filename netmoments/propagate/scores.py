"""The covariance of the scores, from what every nonlinear layer adds to it: a pass back through the network."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from netmoments.network.graph import Node, shape_of
from netmoments.propagate.elementwise import Elementwise
from netmoments.propagate.nonlinearity import Local, Nonlinearity
from netmoments.propagate.piecewise_linear import PiecewiseLinear
from netmoments.propagate.plan import Plan, Stage
from netmoments.propagate.spread import Rows, inner_product_weights, random_signs
from netmoments.propagate.transposed import added, before_gains, before_segment

PAIRED = 128
"""Directions of the noise of which all pairs count in the scores' quadratic part; all of them if it has no more."""
MIXED = 32
"""Random sums of the rows that are not linear, for their part in it."""
EXACT_PAIRS = 2048
"""Layers of at most so many units that look at one number each have the exact covariances of all pairs."""


class BentLayer(NamedTuple):
    """A nonlinear layer that the noise of N images has gone through."""

    stage: Stage
    gain: Tensor
    """(N, n, w)."""
    curvature: Tensor
    """(N, n, w, w)."""
    probes: Tensor
    """Rows of the windows' spreads: the first linear ones, and sums of others, (N, n, w, K + `MIXED`)."""
    rest: Tensor
    """The variance of what is neither linear nor quadratic, (N, n)."""
    pairs: Tensor | None
    """The covariances of all that is not linear, (N, n, n), where they are exact."""

    def quadratic(self, weights: Tensor) -> Tensor:
        """M_i[k, l] = Σ_u a_iu H_u[f_k, f_l] for weights a (N, r, n), along the probes: (N, r, K, K)."""
        bent = (self.curvature @ self.probes).flatten(1, 2)
        probes = self.probes
        found = [(probes * own[..., None, None]).flatten(1, 2).mT @ bent for own in weights.unbind(1)]
        return torch.stack(found, 1)


def has_exact_pairs(rule: Nonlinearity) -> bool:
    """Whether the covariances of all pairs of a layer's units are exact: there is a formula, and it is small enough."""
    return isinstance(rule, PiecewiseLinear | Elementwise) and rule.units <= EXACT_PAIRS


def bent_layer(rows: Rows, stage: Stage, local: Local, mean: Tensor, spread: Tensor, covariance: Tensor) -> BentLayer:
    """From the Gaussian moments of a layer's units, and their windows' means, spreads and covariances."""
    beyond_linear = local.variance - local.linear_variance(covariance)
    rest = (beyond_linear - local.quadratic_variance(covariance)).clamp(min=0)
    probes = _probes(rows, spread)
    pairs = None
    if has_exact_pairs(stage.rule):
        assert isinstance(stage.rule, PiecewiseLinear | Elementwise)
        every = _all_covariances(rows, spread.squeeze(-2), covariance.flatten(-3))
        pairs = stage.rule.pairs(mean.squeeze(-1), every)
        pairs = torch.diagonal_scatter(pairs, beyond_linear, dim1=-2, dim2=-1)
    return BentLayer(stage, local.gain, local.curvature, probes, rest, pairs)


def _probes(rows: Rows, spread: Tensor) -> Tensor:
    """The first linear rows of spreads (..., rows), and random sums of what is not linear: (..., K + `MIXED`)."""
    linear = spread[..., : min(rows.rank, PAIRED)]
    if spread.shape[-1] == rows.rank:
        return torch.nn.functional.pad(linear, (0, MIXED))
    others = spread[..., rows.rank : rows.covariance.stop]
    return torch.cat([linear, others @ random_signs(MIXED, others.shape[-1], 0, others)], -1)


def _all_covariances(rows: Rows, spread: Tensor, variance: Tensor) -> Tensor:
    """Of all pairs of units that look at one number each, (N, n, n), from their spreads (N, n, rows)."""
    products = spread[..., rows.covariance]
    every = products @ products.mT
    if spread.shape[-1] > rows.rank:
        half = spread[..., rows.probes] @ spread[..., rows.turns].mT
        every = every + half + half.mT
    return torch.diagonal_scatter(every, variance, dim1=-2, dim2=-1)


def score_covariance(plan: Plan, layers: list[BentLayer], rows: Rows, spread: Tensor, outputs: Tensor) -> Tensor:
    """Cov of chosen scores, (N, k, k), from their spreads (N, k, rows) and places (N, k).

    With a the weights of a score on a layer's units, by the expected slopes behind it, the score is its linear part, a
    quadratic part ½(M[ε, ε] − tr M) with M = Σ a H[f, f] over all units of all layers, and what is beyond: Cov is the
    sum of FFᵀ (and the turns), ½⟨M, M'⟩, and Σ a a' rest. Layers with exact pairs have those in place of their own part
    of ½⟨M, M'⟩.
    """
    linear = spread[..., : rows.rank]
    total = linear @ linear.mT
    if spread.shape[-1] > rows.rank:
        half = spread[..., rows.probes] @ spread[..., rows.turns].mT
        total = total + half + half.mT
    weights = score_weights(plan, outputs, spread)
    alone = len(layers) == 1 and layers[0].pairs is not None
    matrices: list[Tensor] = []
    for layer in reversed(layers):
        own = weights.pop(layer.stage.output)
        if not alone:
            matrices.append(layer.quadratic(own))
        if layer.pairs is None:
            total = total + (own * layer.rest.unsqueeze(1)) @ own.mT
        else:
            total = total + own @ layer.pairs @ own.mT
            total = total if alone else total - _half_products(matrices[-1], rows)
        weights = added(weights, before_layer(layer.stage, layer.gain, own))
    if matrices:
        total = total + _half_products(torch.stack(matrices).sum(0), rows)
    return 0.5 * (total + total.mT)


def score_weights(plan: Plan, outputs: Tensor, like: Tensor) -> dict[Node, Tensor]:
    """The weights of chosen scores on what the last affine part reads, (N, k, n) each."""
    count = sum(shape_of(node).numel() for node in plan.last.results)
    return before_segment(plan.last, torch.nn.functional.one_hot(outputs, count).to(like))


def before_layer(stage: Stage, gain: Tensor, weights: Tensor) -> dict[Node, Tensor]:
    """Weights (N, k, n) on a layer's output as weights on what its affine part reads, for gains (N, n, w)."""
    inputs = sum(shape_of(node).numel() for node in stage.before.results)
    return before_segment(stage.before, before_gains(stage.rule, gain, weights, inputs=inputs))


def _half_products(matrices: Tensor, rows: Rows) -> Tensor:
    """½⟨M, M'⟩ of matrices (N, k, K + `MIXED`, ·): (N, k, k)."""
    weights = _weights(rows, matrices)
    return 0.5 * (matrices * weights).flatten(2) @ matrices.flatten(2).mT


def _weights(rows: Rows, like: Tensor) -> Tensor:
    """Of all pairs of probes. Sums of other rows, s with E ssᵀ = the rows' products, count as one direction each, but
    not with themselves: the products of a sum with itself are not those of the rows."""
    linear = inner_product_weights(rows, like.shape[-1] - MIXED, like)
    weights = torch.nn.functional.pad(linear, (0, MIXED, 0, MIXED), value=MIXED / (MIXED - 1))
    weights[-MIXED:, -MIXED:].fill_diagonal_(0.0)
    alone = linear[:1, -1:] if rows.leading else linear.diagonal()[:1]
    weights[:-MIXED, -MIXED:] = weights[-MIXED:, :-MIXED] = alone
    if rows.leading:
        weights[: rows.leading, -MIXED:] = weights[-MIXED:, : rows.leading] = 1.0
    return weights
