"""Linear parts of a network run backwards: from weights on what comes out to weights on what goes in."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from netmoments.network.graph import Node, shape_of
from netmoments.propagate.elementwise import Elementwise
from netmoments.propagate.nonlinearity import Nonlinearity
from netmoments.propagate.piecewise_linear import PiecewiseLinear
from netmoments.propagate.plan import Segment, for_each

WEIGHT_ELEMENTS = {"cpu": 2**23, "cuda": 2**28}
"""Numbers in one tensor's weights that go back through an affine part, or a layer's gains, together."""


def before_segment(segment: Segment, weights: Tensor) -> dict[Node, Tensor]:
    """Aᵀ-products: rows of weights (N, k, p) on the output of z = A x + c as weights on each source x, (N, k, n)."""
    zeros = tuple(weights.new_zeros(shape_of(node)) for node in segment.sources)

    def linear(*directions: Tensor) -> Tensor:
        return segment.linear(dict(zip(segment.sources, directions, strict=True)))

    back = torch.func.vjp(linear, *zeros)[1]
    largest = max(shape_of(node).numel() for node in (*segment.sources, *segment.results))
    found = for_each(back, _together(weights, largest))(weights.flatten(0, 1))
    parts = (part.reshape(*weights.shape[:2], -1) for part in found)
    return dict(zip(segment.sources, parts, strict=True))


def before_gains(rule: Nonlinearity, gain: Tensor, weights: Tensor, *, inputs: int) -> Tensor:
    """Weights (N, k, n) on the units y = Σ gain·z as weights (N, k, p) on their inputs z, for gains (N, n, w)."""
    if isinstance(rule, PiecewiseLinear | Elementwise):
        return weights * gain.mT
    places = rule.windows.clamp(min=0).reshape(-1)
    together = _together(weights, len(places) * len(weights))
    parts = []
    for some in weights.split(together, dim=1):
        spread = (some.unsqueeze(-1) * gain.unsqueeze(1)).flatten(2)
        before = some.new_zeros(some.shape[0] * some.shape[1], inputs)
        parts.append(before.index_add_(1, places, spread.flatten(0, 1)).unflatten(0, some.shape[:2]))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _together(like: Tensor, each: int) -> int:
    return max(1, WEIGHT_ELEMENTS.get(like.device.type, WEIGHT_ELEMENTS["cpu"]) // each)


def added(first: Mapping[Node, Tensor], second: Mapping[Node, Tensor]) -> dict[Node, Tensor]:
    """The sum of two sets of weights on tensors."""
    return {**first, **{node: first[node] + part if node in first else part for node, part in second.items()}}
