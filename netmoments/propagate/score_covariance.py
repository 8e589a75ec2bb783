"""The covariance of the scores, from what every nonlinear layer adds to it: a pass back through the network."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from netmoments.propagate.factors import FactorLayout, inner_product_weights, random_signs
from netmoments.propagate.plan import Plan, Stage
from netmoments.rules.base import Local

SCORE_PAIRED = 128
"""Directions of the noise of which all pairs count in the scores' quadratic part; all of them if it has no more."""
MIXED = 32
"""Random sums of the rows that are not linear, for their part in it."""


class CurvedLayer(NamedTuple):
    """A nonlinear layer that the noise of N images has gone through."""

    stage: Stage
    gain: Tensor
    """(N, n, w)."""
    curvature: Tensor
    """(N, n, w, w)."""
    directions: Tensor
    """Rows of the windows' factors: the first linear ones, and sums of others, (N, n, w, K + `MIXED`)."""
    rest: Tensor
    """The variance of what is neither linear nor quadratic, (N, n)."""
    pairs: Tensor | None
    """The covariances of all that is not linear, (N, n, n), where they are exact."""

    def quadratic(self, weights: Tensor) -> Tensor:
        """M_i[k, l] = Σ_u a_iu H_u[f_k, f_l] for weights a (N, r, n), along the directions: (N, r, K, K)."""
        curved = (self.curvature @ self.directions).flatten(1, 2)
        found = []
        for own in weights.unbind(1):
            found.append((self.directions * own[..., None, None]).flatten(1, 2).mT @ curved)
        return torch.stack(found, 1)


def curved_layer(
    layout: FactorLayout, stage: Stage, local: Local, mean: Tensor, factor: Tensor, covariance: Tensor
) -> CurvedLayer:
    """From the Gaussian moments of a layer's units, and their windows' means, factors and covariances."""
    beyond_linear = local.variance - local.linear_variance(covariance)
    rest = (beyond_linear - local.quadratic_variance(covariance)).clamp(min=0)
    linear = factor[..., : min(layout.rank, SCORE_PAIRED)]
    if factor.shape[-1] == layout.rank:
        directions = torch.nn.functional.pad(linear, (0, MIXED))
    else:
        others = factor[..., layout.rank : layout.covariance.stop]
        directions = torch.cat([linear, others @ random_signs(MIXED, others.shape[-1], 0, others)], -1)
    pairs = None
    if stage.rule.has_pairs:
        alone = factor.squeeze(-2)  # units that look at one number each
        every = alone[..., layout.covariance] @ alone[..., layout.covariance].mT
        if factor.shape[-1] > layout.rank:
            half = alone[..., layout.followed] @ alone[..., layout.turns].mT
            every = every + half + half.mT
        every = torch.diagonal_scatter(every, covariance.flatten(-3), dim1=-2, dim2=-1)
        pairs = stage.rule.pairs(mean.squeeze(-1), every)
        assert pairs is not None
        pairs = torch.diagonal_scatter(pairs, beyond_linear, dim1=-2, dim2=-1)
    return CurvedLayer(stage, local.gain, local.curvature, directions, rest, pairs)


def score_covariance(
    plan: Plan, layers: list[CurvedLayer], layout: FactorLayout, factor: Tensor, outputs: Tensor
) -> Tensor:
    """Cov of chosen scores, (N, k, k), from their factors (N, k, rows) and output indices (N, k).

    With a the weights of a score on a layer's units, by the expected slopes behind it, the score is its linear part, a
    quadratic part ½(M[ε, ε] − tr M) with M = Σ a H[f, f] over all units of all layers, and what is beyond: Cov is the
    sum of FFᵀ (and the turns), ½⟨M, M'⟩, and Σ a a' rest. Layers with exact pairs have those in place of their own part
    of ½⟨M, M'⟩.
    """
    linear = factor[..., : layout.rank]
    total = linear @ linear.mT
    if factor.shape[-1] > layout.rank:
        half = factor[..., layout.followed] @ factor[..., layout.turns].mT
        total = total + half + half.mT
    weights = plan.score_weights(outputs, factor)
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
            total = total if alone else total - _half_products(matrices[-1], layout)
        weights = layer.stage.pull_back(layer.gain, own, weights)
    if matrices:
        total = total + _half_products(torch.stack(matrices).sum(0), layout)
    return 0.5 * (total + total.mT)


def _half_products(matrices: Tensor, layout: FactorLayout) -> Tensor:
    """½⟨M, M'⟩ of matrices (N, k, K + `MIXED`, ·): (N, k, k).

    Sums of other rows, s with E ssᵀ = the rows' products, count as one direction each, but not with themselves: the
    products of a sum with itself are not those of the rows.
    """
    linear = inner_product_weights(layout, matrices.shape[-1] - MIXED, matrices)
    weights = torch.nn.functional.pad(linear, (0, MIXED, 0, MIXED), value=MIXED / (MIXED - 1))
    weights[-MIXED:, -MIXED:].fill_diagonal_(0.0)
    alone = linear[:1, -1:] if layout.leading else linear.diagonal()[:1]
    weights[:-MIXED, -MIXED:] = weights[-MIXED:, :-MIXED] = alone
    if layout.leading:
        weights[: layout.leading, -MIXED:] = weights[-MIXED:, : layout.leading] = 1.0
    return 0.5 * (matrices * weights).flatten(2) @ matrices.flatten(2).mT
