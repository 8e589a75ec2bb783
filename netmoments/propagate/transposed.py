"""Linear parts of a network run backwards: from weights on what comes out to weights on what goes in."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from netmoments.network.graph import Node, shape_of
from netmoments.propagate.nonlinearity import Nonlinearity
from netmoments.propagate.plan import Segment

WEIGHT_ELEMENTS = {"cpu": 2**23, "cuda": 2**28}
"""Numbers in one tensor's weights that go back through an affine part together."""


def before_segment(segment: Segment, weights: Tensor) -> dict[Node, Tensor]:
    """Aᵀ-products: rows of weights (k, p) on the output of z = A x + c as weights on each source x, (k, n)."""
    zeros = tuple(weights.new_zeros(shape_of(node)) for node in segment.sources)

    def linear(*directions: Tensor) -> Tensor:
        return segment.linear(dict(zip(segment.sources, directions, strict=True)))

    back = torch.func.vjp(linear, *zeros)[1]
    largest = max(shape_of(node).numel() for node in (*segment.sources, *segment.results))
    together = max(1, WEIGHT_ELEMENTS.get(weights.device.type, WEIGHT_ELEMENTS["cpu"]) // largest)
    found = torch.func.vmap(back, chunk_size=together)(weights)
    return {node: part.reshape(len(weights), -1) for node, part in zip(segment.sources, found, strict=True)}


def before_gains(rule: Nonlinearity, gain: Tensor, weights: Tensor, *, inputs: int) -> Tensor:
    """Weights (k, n) on the units y = Σ gain·z as weights (k, p) on their inputs z, for gains (n, w)."""
    spread = (weights.unsqueeze(-1) * gain).flatten(1)
    return weights.new_zeros(len(weights), inputs).index_add_(1, rule.windows.clamp(min=0).reshape(-1), spread)


def added(first: Mapping[Node, Tensor], second: Mapping[Node, Tensor]) -> dict[Node, Tensor]:
    """The sum of two sets of weights on tensors."""
    return {**first, **{node: first[node] + part if node in first else part for node, part in second.items()}}
