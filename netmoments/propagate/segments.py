"""Affine parts of a network, between its nonlinear layers, as maps that can be applied to many rows at once.

A `Segment` runs the affine operations (`AffineStep`) from some tensors to others: their values, their linear part, and
the transpose of that. A `Passage` is a segment as a map of all live numbers, with those that go along untouched.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from netmoments.memory import elements_together
from netmoments.network.graph import Node, Values, dtype_of, shape_of


@dataclass(frozen=True, eq=False)
class AffineStep:
    """One affine operation, as functions from the values of earlier nodes."""

    node: Node
    inputs: tuple[Node, ...]
    """The noisy nodes among its arguments."""
    value: Callable[[Mapping[Node, Any]], Any]
    linear: Callable[[Mapping[Node, Any]], Any]
    """Its linear part."""
    constants: Mapping[Node, Any] | None = None
    """The values of nodes that are not noisy, for an operator; None for a layer that is registered as affine."""


class Segment:
    """An affine map from sources (the image, outputs of nonlinear layers) to results, flattened and put end to end."""

    def __init__(
        self,
        steps: tuple[AffineStep, ...],
        sources: tuple[Node, ...],
        results: tuple[Node, ...],
        constants: Mapping[Node, Any],
        like: Tensor,
    ) -> None:
        self.steps, self.sources, self.results = steps, sources, results
        self.shapes = {node: shape_of(node) for node in (*sources, *results)}
        self.size = sum(self.shapes[node].numel() for node in results)
        """p, the numbers in all results together, for one image."""
        self._together = elements_together("pass", like, max(shape.numel() for shape in self.shapes.values()))
        """How many entries go through it at a time."""
        self._constant_results = {node: constants[node] for node in results if node in constants}
        self._converted = {node: dtype_of(node) for node in sources if dtype_of(node) != like.dtype}
        """The sources that the network has in another dtype, since it converts tensors on its way."""
        self._converts = any(dtype_of(node) != like.dtype for node in (*sources, *results))
        self._values = [(step.node, step.value) for step in steps]
        self._linears = [(step.node, step.linear) for step in steps]

    def value(self, sources: Mapping[Node, Tensor]) -> Tensor:
        """The map at sources (1, ...): (p,)."""
        return self._run(self._values, self._constant_results, sources)

    def values(self, sources: Mapping[Node, Tensor]) -> Tensor:
        """The map at flat sources (..., n), which share their leading dimensions: (..., p)."""
        return self._mapped(self._values, self._constant_results, sources)

    def linears(self, sources: Mapping[Node, Tensor]) -> Tensor:
        """The linear part of the map, for flat directions (..., n): (..., p). Missing sources are zero."""
        if not self.steps and len(self.results) == 1 and self.results[0] in sources:
            return sources[self.results[0]]
        like = next(iter(sources.values()))
        missing = {node: like.new_zeros(self.shapes[node]) for node in self.sources if node not in sources}
        return self._mapped(self._linears, missing, sources)

    def pull_back(self, weights: Tensor, others: Mapping[Node, Tensor] | None = None) -> dict[Node, Tensor]:
        """Weights (N, k, p) on the results z = A x + c as weights on each source x, (N, k, n): products with Aᵀ.

        They are added to `others`, the weights that tensors have already.
        """
        zeros = {node: weights.new_zeros(self.shapes[node]) for node in self.sources}
        back = torch.func.vjp(partial(self._run, self._linears, {}), zeros)[1]
        rows = weights.flatten(0, 1)
        (pulled,) = torch.func.vmap(back, chunk_size=self._chunk_size(len(rows)))(rows)
        total = dict(others or {})
        for node, part in pulled.items():
            on_source = part.reshape(*weights.shape[:2], -1)
            total[node] = total[node] + on_source if node in total else on_source
        return total

    def _run(
        self, steps: list[tuple[Node, Callable[..., Any]]], known: Mapping[Node, Any], sources: Mapping[Node, Any]
    ) -> Tensor:
        """Run all steps. Several results are put end to end, a single one is not copied; all in the sources' dtype."""
        values: Values = {**known, **sources}
        for node, dtype in self._converted.items():
            values[node] = values[node].to(dtype)
        for node, step in steps:
            values[node] = step(values)
        parts = [values[node].reshape(-1) for node in self.results]
        if self._converts and sources:
            parts = [part.to(next(iter(sources.values())).dtype) for part in parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _mapped(
        self, steps: list[tuple[Node, Callable[..., Any]]], known: Mapping[Node, Any], sources: Mapping[Node, Tensor]
    ) -> Tensor:
        """Run all steps for every entry of the sources' leading dimensions; there may be no entries."""
        like = next(iter(sources.values()))
        if 0 in like.shape[:-1]:
            return like.new_zeros(*like.shape[:-1], self.size)
        shaped = {node: sources[node].reshape(-1, *self.shapes[node]) for node in self.sources if node in sources}
        chunk_size = self._chunk_size(like.shape[:-1].numel())
        results = torch.func.vmap(partial(self._run, steps, known), chunk_size=chunk_size)(shaped)
        return results.unflatten(0, like.shape[:-1])

    def _chunk_size(self, entries: int) -> int | None:
        """How many entries `vmap` takes at a time; None for all at once if they fit, as chunks are copied once more."""
        return self._together if entries > self._together else None


class Passage(NamedTuple):
    """A segment as a map of all live numbers, end to end: to its results, followed by what is kept beside them."""

    segment: Segment
    places: dict[Node, slice]
    """Where the segment's sources are among the numbers before it."""
    kept: tuple[slice, ...]
    """Where the tensors are, among the same numbers, that are needed later and go along."""
    before: int
    """How many numbers it takes."""
    after: int
    """How many numbers it gives."""

    @classmethod
    def of(cls, segment: Segment, live: Mapping[Node, int], kept: tuple[Node, ...]) -> Passage:
        """The passage for `live` tensors in this order, with their sizes, of which `kept` are needed later."""
        ends = list(itertools.accumulate(live.values(), initial=0))
        places = {node: slice(*ends[place : place + 2]) for place, node in enumerate(live)}
        after = segment.size + sum(live[node] for node in kept)
        sources = {node: places[node] for node in segment.sources}
        return cls(segment, sources, tuple(places[node] for node in kept), ends[-1], after)

    def values(self, numbers: Tensor) -> Tensor:
        """The map at numbers (..., before): (..., after)."""
        return self._with_kept(self.segment.values, numbers)

    def linears(self, numbers: Tensor) -> Tensor:
        """The linear part of the map, for directions (..., before): (..., after)."""
        return self._with_kept(self.segment.linears, numbers)

    def _with_kept(self, change: Callable[[Mapping[Node, Tensor]], Tensor], numbers: Tensor) -> Tensor:
        results = change({node: numbers[..., place] for node, place in self.places.items()})
        return torch.cat([results] + [numbers[..., place] for place in self.kept], -1) if self.kept else results
