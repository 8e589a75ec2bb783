"""A network's graph cut into stages: an affine part, then one nonlinear layer, and what is still needed after it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, fx, nn

from netmoments.memory import elements_together
from netmoments.network.exported import ExportedNetwork
from netmoments.network.graph import LayerCall, NetworkGraph, Node, Values, family, shape_of
from netmoments.network.model import NetworkModel
from netmoments.network.validate import another_image
from netmoments.precision import full_precision, value_and_slope
from netmoments.propagate.affine import OPERATORS, SHAPE_ONLY, AffineOperator, affine_operator, linear_arguments
from netmoments.propagate.chains import Chain, chain_of, is_never_negative
from netmoments.rules.base import Nonlinearity
from netmoments.rules.registry import (
    LAYER_RULES,
    RULES,
    OperatorCall,
    RuledCall,
    known_rules,
    layer_rule,
    operator_name,
)

Found = TypeVar("Found")
aten = torch.ops.aten
IN_ORDER = {
    aten.view, aten._unsafe_view, aten.reshape, aten.flatten, aten.unflatten, aten.squeeze, aten.unsqueeze, aten.clone,
    aten.contiguous, aten.alias, aten.detach,
}  # fmt: skip
"""Operators whose result has the same numbers in the same order."""
BEYOND, EXCLUDED = 1e30, 1e5
"""Added constants beyond the one are taken as the other: what a softmax is to leave out it leaves out all the same,
and means and deviations stay finite."""


@dataclass(frozen=True, eq=False)
class AffineStep:
    """One affine operation: its value and its linear part, given those of earlier nodes."""

    node: Node
    inputs: tuple[Node, ...]
    """The noisy nodes it takes."""
    value: Callable[[Mapping[Node, Any]], Any]
    linear: Callable[[Mapping[Node, Any]], Any]
    constants: Mapping[Node, Any] | None = None
    """Of an operator, the values of its other arguments; None for a layer with a rule of its own."""


class Segment:
    """An affine map from some sources (the image, outputs of nonlinear layers) to some nodes, flattened, end to end."""

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
        """Numbers in the results, for one image."""
        self._together = elements_together("pass", like, max(shape.numel() for shape in self.shapes.values()))
        """Entries that go through it at a time, of numbers like those of the image."""
        self._fixed = {node: constants[node] for node in results if node in constants}
        self._values = [(step.node, step.value) for step in steps]
        self._linears = [(step.node, step.linear) for step in steps]

    def value(self, sources: Mapping[Node, Tensor]) -> Tensor:
        """The map at sources (1, ...): (p,)."""
        return self._run(self._values, self._fixed, sources)

    def linear(self, sources: Mapping[Node, Tensor]) -> Tensor:
        """Its linear part, for directions (1, ...): (p,)."""
        return self._run(self._linears, {}, sources)

    def values(self, sources: Mapping[Node, Tensor]) -> Tensor:
        """The map at flat sources (..., n) with the same leading dimensions: (..., p)."""
        return self._mapped(self._values, self._fixed, sources)

    def linears(self, sources: Mapping[Node, Tensor]) -> Tensor:
        """Its linear part for flat directions (..., n) likewise: (..., p). Missing sources are zero."""
        if not self.steps and len(self.results) == 1 and self.results[0] in sources:
            return sources[self.results[0]]
        like = next(iter(sources.values()))
        missing = {node: like.new_zeros(self.shapes[node]) for node in self.sources if node not in sources}
        return self._mapped(self._linears, missing, sources)

    def pull_back(self, weights: Tensor, others: Mapping[Node, Tensor] | None = None) -> dict[Node, Tensor]:
        """Weights (N, k, p) on z = A x + c as weights on each source x, (N, k, n): products with Aᵀ.

        They are added to `others`, those that tensors have already.
        """
        nothing = {node: weights.new_zeros(self.shapes[node]) for node in self.sources}
        back = torch.func.vjp(partial(self._run, self._linears, {}), nothing)[1]
        rows = weights.flatten(0, 1)
        (found,) = torch.func.vmap(back, chunk_size=self._chunks(len(rows)))(rows)
        total = dict(others or {})
        for node, part in found.items():
            own = part.reshape(*weights.shape[:2], -1)
            total[node] = total[node] + own if node in total else own
        return total

    def _run(
        self, steps: list[tuple[Node, Callable[..., Any]]], fixed: Mapping[Node, Any], sources: Mapping[Node, Any]
    ) -> Tensor:
        """All steps; the results flattened and put end to end, one alone not copied."""
        values: Values = {**fixed, **sources}
        for node, step in steps:
            values[node] = step(values)
        parts = [values[node].reshape(-1) for node in self.results]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _mapped(
        self, steps: list[tuple[Node, Callable[..., Any]]], fixed: Mapping[Node, Any], sources: Mapping[Node, Tensor]
    ) -> Tensor:
        """The steps for every entry of the sources' leading dimensions, of which there may be none."""
        like = next(iter(sources.values()))
        if 0 in like.shape[:-1]:
            return like.new_zeros(*like.shape[:-1], self.size)
        given = {node: sources[node].reshape(-1, *self.shapes[node]) for node in self.sources if node in sources}
        chunks = self._chunks(like.shape[:-1].numel())
        found = torch.func.vmap(partial(self._run, steps, fixed), chunk_size=chunks)(given)
        return found.unflatten(0, like.shape[:-1])

    def _chunks(self, entries: int) -> int | None:
        """So many at a time; all at once where they fit, as chunks are copied once more."""
        return self._together if entries > self._together else None


class Passage(NamedTuple):
    """A segment as a map of all live numbers, end to end: to its results, and then what is kept beside them."""

    segment: Segment
    places: dict[Node, slice]
    """Of the segment's sources, among the numbers before it."""
    kept: tuple[slice, ...]
    """Of what is needed later, among the same."""
    before: int
    """How many numbers it takes."""
    after: int
    """How many it gives."""

    @classmethod
    def of(cls, segment: Segment, live: Mapping[Node, int], kept: tuple[Node, ...]) -> Passage:
        """Of live tensors in their order, with so many numbers each."""
        ends = list(itertools.accumulate(live.values(), initial=0))
        places = {node: slice(*ends[place : place + 2]) for place, node in enumerate(live)}
        after = segment.size + sum(live[node] for node in kept)
        sources = {node: places[node] for node in segment.sources}
        return cls(segment, sources, tuple(places[node] for node in kept), ends[-1], after)

    def values(self, numbers: Tensor) -> Tensor:
        """The map at numbers (..., before): (..., after)."""
        return self._with_kept(self.segment.values, numbers)

    def linears(self, numbers: Tensor) -> Tensor:
        """Its linear part, for directions likewise."""
        return self._with_kept(self.segment.linears, numbers)

    def _with_kept(self, change: Callable[[Mapping[Node, Tensor]], Tensor], numbers: Tensor) -> Tensor:
        results = change({node: numbers[..., place] for node, place in self.places.items()})
        return torch.cat([results] + [numbers[..., place] for place in self.kept], -1) if self.kept else results


@dataclass(frozen=True, eq=False)
class Stage:
    """One nonlinear layer: the affine map that gives its input z, its rule, and its output."""

    name: str
    before: Segment
    rule: Nonlinearity
    output: Node

    def pull_back(self, gain: Tensor, weights: Tensor, others: Mapping[Node, Tensor]) -> dict[Node, Tensor]:
        """Weights (N, k, n) on the layer's output as weights on what its affine part reads, for gains (N, n, w).

        They are added to `others`.
        """
        return self.before.pull_back(self.rule.pull_back(gain, weights, self.before.size), others)


class LayerSizes(NamedTuple):
    """How many numbers the nonlinear layers of a network work on, for one image."""

    inputs: int
    """In the inputs of all of them."""
    outputs: int
    """In the largest output."""
    windows: int
    """In the windows of the layer that has the most, where they have more than one input."""
    largest: int
    """In the largest input or output, or in the image."""


@dataclass(frozen=True, eq=False)
class Plan:
    """All of a network: stages in order, and the affine map from what they leave to the scores."""

    image: Node
    stages: tuple[Stage, ...]
    last: Segment
    holds_network: bool = False
    """Whether a rule is that of the network as a whole, and holds it."""
    recordings: dict[Any, Any] = field(default_factory=dict)
    """Work on a GPU that was recorded, to be replayed; it lives as long as the plan."""
    _found: dict[Any, Any] = field(default_factory=dict)

    def once(self, find: Callable[[Plan], Found]) -> Found:
        """What a function finds of this plan, asked once."""
        if find not in self._found:
            self._found[find] = find(self)
        found: Found = self._found[find]
        return found

    @cached_property
    def sizes(self) -> dict[Node, int]:
        """Numbers in the image and in the output of every stage."""
        return {node: shape_of(node).numel() for node in (self.image, *(stage.output for stage in self.stages))}

    @cached_property
    def has_formulas(self) -> bool:
        """Whether no layer is a black box, known from samples only."""
        return all(stage.rule.has_formula for stage in self.stages)

    @cached_property
    def layer_sizes(self) -> LayerSizes:
        inputs, outputs = [0], [0]
        for stage in self.stages:
            inputs.append(stage.before.size)
            outputs.append(stage.rule.units)
        windows = max((stage.rule.windows.numel() for stage in self.stages if stage.rule.width > 1), default=0)
        return LayerSizes(sum(inputs), max(outputs), windows, max(*inputs, *outputs, self.sizes[self.image]))

    @cached_property
    def needed(self) -> list[tuple[Node, ...]]:
        """The sources that stages from this one on (or the scores) still use; last, what the scores alone do."""
        found = []
        for place in range(len(self.stages) + 1):
            later = [stage.before for stage in self.stages[place:]] + [self.last]
            wanted = {node for segment in later for node in segment.sources}
            made = [self.image] + [stage.output for stage in self.stages[:place]]
            found.append(tuple(node for node in made if node in wanted))
        return found

    @cached_property
    def passages(self) -> tuple[Passage, ...]:
        """Of every stage the way to its input, and last that to the scores, all live numbers going along."""
        found: list[Passage] = []
        live: tuple[Node, ...] = (self.image,)
        for place, stage in enumerate(self.stages):
            kept = tuple(node for node in self.needed[place + 1] if node is not stage.output)
            found.append(Passage.of(stage.before, {node: self.sizes[node] for node in live}, kept))
            live = (stage.output, *kept)
        return (*found, Passage.of(self.last, {node: self.sizes[node] for node in live}, ()))

    def score_weights(self, outputs: Tensor, like: Tensor) -> dict[Node, Tensor]:
        """The weights of chosen scores (N, k) on what the last affine part reads, (N, k, n) each."""
        chosen = torch.nn.functional.one_hot(outputs, self.last.size).to(like)
        return self.last.pull_back(chosen)


class NoRule(ValueError):
    """A network does something for which there is no rule."""


Otherwise = Callable[[Node, Mapping[Node, Any], frozenset[Node], Tensor, str], RuledCall | None]
"""Asked about an operation without a rule."""


def plan_of(model: NetworkModel, caller: str, otherwise: Otherwise | None = None) -> Plan:
    """The plan of a network with its present weights.

    An operation without a rule is what `otherwise` makes of it, or an error, `NoRule`. A sketch gives `black_box`,
    which knows such operations from samples.
    """

    def made() -> Plan:
        model.require_derivatives()
        return _Planner(model.graph, model.network, model.image, caller, otherwise).plan()

    return model.kept((otherwise, *LAYER_RULES.items()), made, unless=lambda plan: plan.holds_network)


class _Planner:
    """Every operation of a graph gets its rule, or is refused by name."""

    def __init__(
        self, graph: NetworkGraph, network: nn.Module, like: Tensor, caller: str, otherwise: Otherwise | None
    ) -> None:
        self.graph, self.like, self.caller, self.otherwise = graph, like, caller, otherwise
        self.constants = graph.constants(network)
        with torch.no_grad(), full_precision():
            images = like, another_image(like)
            self.first, self.second = (graph.values(self.constants, image) for image in images)
        runs = network.program if isinstance(network, ExportedNetwork) else network
        self.modules = dict(runs.named_modules())
        self.affine: dict[Node, AffineStep] = {}
        self.nonlinear: dict[Node, RuledCall] = {}
        self.chains: dict[Node, Chain] = {}
        self.never_negative: set[Node] = set()
        self.names: dict[Node, str] = {}
        self.several: set[Node] = set()

    def plan(self) -> Plan:
        layers = [call for call in self.graph.calls if layer_rule(self._module(call)) is not None]
        used, skipped = self._used(), set[Node]()
        for place, node in enumerate(self.graph.nodes):
            for own in layers:
                if own.start == place:
                    skipped |= self._rule_layer(own)
            if node in used and node not in skipped:
                self._rule_operation(node)
        last = self._segment((self.graph.output,))
        stages = []
        pending, done = list(last.sources), set()
        while pending:
            node = pending.pop()
            if node in done or node not in self.nonlinear:
                continue
            done.add(node)
            rule, inputs = self.nonlinear[node]
            before = self._segment(inputs)
            stages.append(Stage(self.names[node], before, rule, node))
            pending.extend(before.sources)
        place_of = {node: place for place, node in enumerate(self.graph.nodes)}
        stages.sort(key=lambda stage: place_of[stage.output])
        return Plan(self.graph.image, tuple(stages), last, holds_network=any(own.path == "" for own in layers))

    def _module(self, call: LayerCall) -> nn.Module:
        return self.modules[call.path]

    def _used(self) -> set[Node]:
        """The noisy operations that the scores depend on."""
        found: set[Node] = set()
        pending = [self.graph.output]
        while pending:
            node = pending.pop()
            if node not in found and node in self.graph.noisy and node.op == "call_function":
                found.add(node)
                pending.extend(node.all_input_nodes)
        return found

    def _rule_operation(self, node: Node) -> None:
        if node in self.nonlinear:
            return
        if is_never_negative(node, self.never_negative):
            self.never_negative.add(node)
        if (trivial := self._trivial_step(node)) is not None:
            self.affine[node] = trivial
            return
        entry = affine_operator(node, self.graph.noisy)
        if entry is not None and not self._is_affine(node, entry):
            entry = None
        chain = chain_of(
            node, entry is not None, self.chains, self.never_negative, self.graph, self.constants, self.first
        )
        if chain is not None:
            self.chains[node] = chain
        if entry is None:
            self._add(node, self._ruled(node) or self._ruled_otherwise(node))
            return
        if any(argument in self.several for argument in node.all_input_nodes):
            raise self._refusal(node)  # indices, say: only the first of several results is a function with a rule
        self.affine[node] = self._affine_step(node, entry)

    def _trivial_step(self, node: Node) -> AffineStep | None:
        """Of what is never negative, its absolute value and its ReLU are itself, and its sign is 1."""
        kind, inputs = family(node.target), _noisy_inputs(node, self.graph)
        if not (kind in (aten.abs, aten.relu, aten.sign) and inputs[0] in self.never_negative):
            return None
        if kind is aten.sign:
            ones = aten.ones_like.default, inputs, dict[str, Any]()
            return AffineStep(node, inputs, partial(_called, *ones), partial(_zeros, *ones), self.constants)
        if inputs[0] in self.nonlinear:  # which it may make one with
            return None
        same = partial(_called, aten.alias.default, inputs, {})
        return AffineStep(node, inputs, same, same, self.constants)

    def _ruled(self, node: Node) -> RuledCall | None:
        """By its operator's rule, or with the functions before it that it makes one with."""
        rule, chain = RULES.get(family(node.target)), self.chains.get(node)
        found = None if rule is None else rule(self._call(node))
        if chain is None or (chain.curved < 2 and len(_noisy_inputs(node, self.graph)) < 2):
            return found
        if found is not None and self._merged(found) is not found:
            return found
        return RuledCall(chain.rule(self.graph, self.constants, self.like), (chain.root,))

    def _affine_step(self, node: Node, entry: AffineOperator) -> AffineStep:
        """An operator with its constants put in; in its linear part, those that are added are zero."""
        noisy, constants = self.graph.noisy, self.constants
        whole = fx.node.map_arg((node.args, node.kwargs), lambda x: x if x in noisy else constants[x])
        whole = fx.node.map_aggregate(whole, _finite) if entry.offsets else whole
        inputs = _noisy_inputs(node, self.graph)
        linear: Callable[[Mapping[Node, Any]], Any]
        if family(node.target) in SHAPE_ONLY:
            linear = partial(_zeros, node.target, *whole)
        else:
            linear = partial(_called, node.target, linear_arguments(node, entry, whole[0], noisy), whole[1])
        return AffineStep(node, inputs, partial(_called, node.target, *whole), linear, constants)

    def _is_affine(self, node: Node, entry: AffineOperator) -> bool:
        """Whether, from one image to another, the result changes as the linear part says."""
        if family(node.target) in SHAPE_ONLY:
            return True
        step = self._affine_step(node, entry)
        moved = {argument: _difference(self.second[argument], self.first[argument]) for argument in step.inputs}
        with torch.no_grad(), full_precision():
            expected = step.linear(moved)
        first, second = self.first[node], self.second[node]
        return _near(_difference(second, first), expected, first, second)

    def _add(self, node: Node, found: RuledCall) -> None:
        """A nonlinear operation; of one that returns several results (values and indices), the first."""
        if isinstance(node.meta["val"], Tensor):
            self._add_nonlinear(node, self._merged(found))
            return
        self.several.add(node)
        for pick in node.users:
            if pick.args[1] == 0:
                self._add_nonlinear(pick, self._merged(found))

    def _ruled_otherwise(self, node: Node) -> RuledCall:
        name = f"{operator_name(node)} in {self.graph.where(node)}"
        found = None
        if self.otherwise is not None:
            found = self.otherwise(node, self.constants, self.graph.noisy, self.like, name)
        if found is None:
            raise self._refusal(node)
        return found

    def _rule_layer(self, own: LayerCall) -> set[Node]:
        """A call of a module with a rule of its own, as one node: the nodes it replaces."""
        module = self._module(own)
        inside = [node for node in self.graph.nodes[own.start : own.stop] if node in self.graph.noisy]
        entering = {x for node in inside for x in node.all_input_nodes if x in self.graph.noisy and x not in inside}
        leaving = [node for node in inside if any(user not in inside for user in node.users)]
        if len(entering) != 1 or len(leaving) != 1:
            raise ValueError(
                f"{self.caller}: {own.name} ({type(module).__name__}) has a rule of its own, for which it must "
                f"take one tensor and return one; it takes {len(entering)} and returns {len(leaving)}"
            )
        (source,), (result,) = entering, leaving
        rule = layer_rule(module)
        assert rule is not None
        example = self.like.new_zeros(shape_of(source))
        found = rule(module, example)
        if found is None:
            self.affine[result] = _affine_layer(own.name, module, source, result, example, self.caller)
        else:
            self._require_same_values(own.name, module, found, source, result)
            self.nonlinear[result] = self._merged(RuledCall(found, (source,)))
            self.names[result] = own.name
        return set(inside)

    def _require_same_values(
        self, path: str, module: nn.Module, rule: Nonlinearity, source: Node, result: Node
    ) -> None:
        """A rule must be that of the function which the layer computes, a hook on it included."""
        for seen in (self.first, self.second):
            with torch.no_grad():
                values = rule.values(rule.gathered(seen[source].reshape(1, -1)))
            wanted = seen[result].reshape(1, -1)
            if values.shape != wanted.shape or not _near(values, wanted, wanted):
                raise ValueError(
                    f"{self.caller}: the rule registered for {path} ({type(module).__name__}) gives other values than "
                    f"the layer; its `values` must be what the layer computes, with a forward hook if it has one"
                )

    def _add_nonlinear(self, node: Node, found: RuledCall) -> None:
        self.nonlinear[node] = found
        self.names[node] = self.graph.where(node)

    def _merged(self, found: RuledCall) -> RuledCall:
        """A pool of ReLUs, or a ReLU of a pool, as one rule for the window."""
        (source, *others) = found.inputs
        while source in self.affine and family(source.target) in IN_ORDER:
            source = self.affine[source].inputs[0]
        earlier = self.nonlinear.get(source)
        if others or earlier is None:
            return found
        if found.rule.is_relu and (earlier.rule.is_relu or earlier.rule.never_negative):
            return earlier
        pool = earlier.rule if found.rule.is_relu else found.rule if earlier.rule.is_relu else None
        clamped = None if pool is None else pool.clamped()
        return found if clamped is None else RuledCall(clamped, earlier.inputs)

    def _call(self, node: Node) -> OperatorCall:
        noisy, constants = self.graph.noisy, self.constants
        args = fx.node.map_arg(node.args, lambda argument: argument if argument in noisy else constants[argument])
        return OperatorCall(node, args, self.like)

    def _segment(self, results: tuple[Node, ...]) -> Segment:
        """The affine steps that lead to some nodes, back to the sources."""
        wanted: set[Node] = set()
        sources: dict[Node, None] = {}
        pending = list(results)
        while pending:
            node = pending.pop()
            if node in wanted or node in sources:
                continue
            if node in self.affine:
                wanted.add(node)
                pending.extend(self.affine[node].inputs)
            elif node in self.graph.noisy:
                sources[node] = None
        steps = tuple(step for node, step in self._in_order(self.affine) if node in wanted)
        return Segment(steps, tuple(node for node, _ in self._in_order(sources)), results, self.constants, self.like)

    def _in_order(self, found: Mapping[Node, Any]) -> Iterable[tuple[Node, Any]]:
        return ((node, found[node]) for node in self.graph.nodes if node in found)

    def _refusal(self, node: Node) -> NoRule:
        others = "" if self.otherwise is not None else 'method="sketch" (which then knows it from samples) or '
        return NoRule(
            f"{self.caller}: no rule for {operator_name(node)} in {self.graph.where(node)} as it is called there; "
            f"there are rules for affine parts ({len(OPERATORS)} operators), {known_rules()}. Register one for your "
            f"layer with netmoments.register_rule, or use "
            f'{others}method="sampling"'
        )


def _noisy_inputs(node: Node, graph: NetworkGraph) -> tuple[Node, ...]:
    return tuple(argument for argument in node.all_input_nodes if argument in graph.noisy)


def _finite(value: Any) -> Any:
    """A constant with ±`EXCLUDED` for what is infinite in it, or as good as: masks of attention."""
    if isinstance(value, Tensor) and value.is_floating_point() and bool((value.abs() > BEYOND).any()):
        return torch.where(value.abs() > BEYOND, EXCLUDED * value.sign(), value)
    return math.copysign(EXCLUDED, value) if isinstance(value, float) and abs(value) > BEYOND else value


def _called(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], values: Mapping[Node, Any]) -> Any:
    """An operator at the values of its noisy arguments; the others have been put in."""
    given, named = fx.node.map_arg((args, kwargs), values.__getitem__)
    return target(*given, **named)


def _zeros(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], values: Mapping[Node, Any]) -> Tensor:
    """The linear part of an operator whose value depends on the shape of its argument only."""
    return torch.zeros_like(_called(target, args, kwargs, values))


def _difference(value: Any, other: Any) -> Any:
    """Of tensors, or of lists of them."""
    if isinstance(value, Tensor):
        return _finite(value) - _finite(other) if value.is_floating_point() else value
    return [_difference(one, another) for one, another in zip(value, other, strict=True)]


def _near(found: Any, expected: Any, *sizes: Any) -> bool:
    """Equal but for the rounding of values of these sizes, of the same shape, of which a thousand units are allowed."""
    if not isinstance(found, Tensor):
        first = next(iter(found))
        return _near(first, next(iter(expected)), *(next(iter(size)) for size in sizes))
    if not found.is_floating_point() or not found.numel():
        return True
    counts = torch.stack([size.abs() < BEYOND for size in sizes]).all(0)  # what a mask leaves out does not
    scale = max(float(torch.where(counts, size, 0.0).abs().max()) for size in (found, *sizes))
    away = torch.where(counts, found - expected, 0.0).abs().max()
    return float(away) <= 1e3 * torch.finfo(found.dtype).eps * scale


def _affine_layer(path: str, module: nn.Module, source: Node, result: Node, example: Tensor, caller: str) -> AffineStep:
    """A module that is said to be affine, checked to be, as one step; its linear part is its derivative."""
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        first, second = (torch.randn(example.shape, generator=generator).to(example) for _ in range(2))
        away = module(first + second) - module(first) - module(second) + module(example)
        scale = module(first).abs().max() + module(second).abs().max() + 1
    if float(away.abs().max()) > 1e3 * torch.finfo(example.dtype).eps * float(scale):
        raise ValueError(f"{caller}: {path} ({type(module).__name__}) is registered as affine, but is not")

    def linear(values: Mapping[Node, Any]) -> Any:
        return value_and_slope(module, (example,), (values[source],))[1]

    return AffineStep(result, (source,), lambda values: module(values[source]), linear)
