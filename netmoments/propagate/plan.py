"""A network's graph cut into stages: an affine part, then one nonlinear layer, and what is still needed after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from netmoments.network.graph import Node, Values, shape_of
from netmoments.propagate.nonlinearity import Nonlinearity


@dataclass(frozen=True, eq=False)
class AffineStep:
    """One affine operation: its value and its linear part, given those of earlier nodes."""

    node: Node
    value: Callable[[Mapping[Node, Any]], Any]
    linear: Callable[[Mapping[Node, Any]], Any]
    inputs: tuple[Node, ...]
    constants: Mapping[Node, Any] | None = None
    """Of an operator, the values of its other arguments; None for a layer with a rule of its own."""


@dataclass(frozen=True, eq=False)
class Segment:
    """An affine map from some sources (the image, outputs of nonlinear layers) to some nodes."""

    steps: tuple[AffineStep, ...]
    sources: tuple[Node, ...]
    results: tuple[Node, ...]

    constants: Mapping[Node, Any]

    def value(self, sources: Mapping[Node, Tensor]) -> Tensor:
        """The map at sources (1, ...): (p,), the results flattened and put end to end."""
        values: Values = {node: sources[node] for node in self.sources}
        values |= {node: self.constants[node] for node in self.results if node in self.constants}
        for step in self.steps:
            values[step.node] = step.value(values)
        return self._flat(values)

    def linear(self, sources: Mapping[Node, Tensor]) -> Tensor:
        """Its linear part, for directions (1, ...): (p,)."""
        values: Values = {node: sources[node] for node in self.sources}
        for step in self.steps:
            values[step.node] = step.linear(values)
        return self._flat(values)

    def _flat(self, values: Values) -> Tensor:
        """The results end to end; one alone is not copied."""
        parts = [values[node].reshape(-1) for node in self.results]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def batched(self, function: str, sources: Mapping[Node, Tensor], together: int) -> Tensor:
        """`value` or `linear` of flat sources (B, n): (B, p), some at a time. Missing sources are zero."""
        given = [node for node in self.sources if node in sources]
        like = next(iter(sources.values()))
        zeros = {node: like.new_zeros(shape_of(node)) for node in self.sources if node not in sources}

        def one(*flat: Tensor) -> Tensor:
            shaped = {node: x.reshape(shape_of(node)) for node, x in zip(given, flat, strict=True)}
            result: Tensor = getattr(self, function)(zeros | shaped)
            return result

        return for_each(one, together)(*(sources[node] for node in given))


def for_each(function: Callable[..., Any], together: int) -> Callable[..., Any]:
    """`torch.func.vmap`, at most so many at a time; not in chunks, which are copied once more, where one would do."""

    def mapped(*batches: Tensor) -> Any:
        return torch.func.vmap(function, chunk_size=together if len(batches[0]) > together else None)(*batches)

    return mapped


@dataclass(frozen=True, eq=False)
class Stage:
    """One nonlinear layer: the affine map that gives its input z, its rule, and its output."""

    name: str
    before: Segment
    rule: Nonlinearity
    output: Node


@dataclass(frozen=True, eq=False)
class Plan:
    """All of a network: stages in order, and the affine map from what they leave to the scores."""

    image: Node
    stages: tuple[Stage, ...]
    last: Segment

    def needed_after(self, place: int) -> tuple[Node, ...]:
        """The sources that stages after this one (or the scores) still use."""
        later = [stage.before for stage in self.stages[place + 1 :]] + [self.last]
        wanted = {node for segment in later for node in segment.sources}
        made = [self.image] + [stage.output for stage in self.stages[: place + 1]]
        return tuple(node for node in made if node in wanted)
