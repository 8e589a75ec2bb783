"""The plan of a network: its graph as stages, each an affine segment and then one nonlinear layer, up to the scores.

`plan_of` makes it. Every operation that the scores depend on is affine, has a rule, or is refused by name. Affine
operations are collected into segments, maps from sources (the image, outputs of nonlinear layers) to the input of a
layer or to the scores. A `Plan` also knows which outputs are still needed at each stage. Layerwise methods and sketches
take their input's distribution through its stages, one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, fx, nn

from netmoments.checks import describe
from netmoments.network.exported import ExportedNetwork
from netmoments.network.graph import LayerCall, NetworkGraph, Node, family, shape_of
from netmoments.network.model import NetworkModel
from netmoments.network.validate import another_image
from netmoments.precision import full_precision, value_and_slope
from netmoments.propagate.operators import (
    IN_ORDER,
    SHAPE_ONLY,
    AffineOperator,
    Chain,
    affine_operator,
    chain_of,
    is_never_negative,
    linear_arguments,
)
from netmoments.propagate.segments import AffineStep, Passage, Segment
from netmoments.rules.base import Nonlinearity
from netmoments.rules.black_box import is_real_tensor
from netmoments.rules.registry import (
    LAYER_RULES,
    RULES,
    OperatorCall,
    RuledCall,
    layer_rule,
    operator_name,
)

Result = TypeVar("Result")
aten = torch.ops.aten
INFINITE, EXCLUDED = 1e30, 1e5
"""Added constants beyond ±1e30 are replaced by ±1e5. They are masks of attention: the softmax leaves out the same
places, and means and deviations stay finite."""


@dataclass(frozen=True, eq=False)
class Stage:
    """One nonlinear layer: its rule, its output, and the affine segment before it, which gives its input z."""

    name: str
    before: Segment
    rule: Nonlinearity
    output: Node

    def pull_back(self, gain: Tensor, weights: Tensor, others: Mapping[Node, Tensor]) -> dict[Node, Tensor]:
        """Weights (N, k, n) on the layer's output as weights on the sources of its segment, for gains (N, n, w).

        They are added to `others`, the weights that tensors have already.
        """
        return self.before.pull_back(self.rule.pull_back(gain, weights, self.before.size), others)


class LayerSizes(NamedTuple):
    """How many numbers the nonlinear layers of a network work on, for one image."""

    inputs: int
    """In the inputs of all layers together."""
    outputs: int
    """In the largest output."""
    windows: int
    """In all windows of a layer, for the layer that has the most; windows of one input do not count."""
    largest: int
    """In the largest input or output, or in the image."""


@dataclass(frozen=True, eq=False)
class Plan:
    """A whole network: its stages in order, and the last affine segment, which gives the scores."""

    image: Node
    stages: tuple[Stage, ...]
    last: Segment
    holds_network: bool = False
    """Whether the network as a whole has a rule, which holds a reference to it."""
    recordings: dict[Any, Any] = field(default_factory=dict)
    """Work on a GPU that was recorded to be replayed (`replay`); it lives as long as the plan."""
    _results: dict[Any, Any] = field(default_factory=dict)

    def once(self, function: Callable[[Plan], Result]) -> Result:
        """function(plan), computed at the first call and kept."""
        if function not in self._results:
            self._results[function] = function(self)
        result: Result = self._results[function]
        return result

    @cached_property
    def sizes(self) -> dict[Node, int]:
        """How many numbers there are in the image, and in the output of every stage."""
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
        """For each stage, the live tensors before it, which it or something later uses; last, what the scores use."""
        live = []
        for place in range(len(self.stages) + 1):
            later = [stage.before for stage in self.stages[place:]] + [self.last]
            wanted = {node for segment in later for node in segment.sources}
            made = [self.image] + [stage.output for stage in self.stages[:place]]
            live.append(tuple(node for node in made if node in wanted))
        return live

    @cached_property
    def passages(self) -> tuple[Passage, ...]:
        """The segments as maps of all live numbers: the one before each stage, and last the one to the scores."""
        passages: list[Passage] = []
        live: tuple[Node, ...] = (self.image,)
        for place, stage in enumerate(self.stages):
            kept = tuple(node for node in self.needed[place + 1] if node is not stage.output)
            passages.append(Passage.of(stage.before, {node: self.sizes[node] for node in live}, kept))
            live = (stage.output, *kept)
        return (*passages, Passage.of(self.last, {node: self.sizes[node] for node in live}, ()))

    def score_weights(self, outputs: Tensor, like: Tensor) -> dict[Node, Tensor]:
        """The weights of scores with indices (N, k) on the sources of the last segment, (N, k, n) each."""
        chosen = like.new_zeros(*outputs.shape, self.last.size)  # one_hot would make the host wait for a GPU
        return self.last.pull_back(chosen.scatter_(-1, outputs.unsqueeze(-1), 1.0))


class NoRule(ValueError):
    """A network does something for which there is no rule."""


Fallback = Callable[[Sequence[Node], Mapping[Node, Any], frozenset[Node], Tensor, str], RuledCall | None]
"""Gives a rule to operations that have none, or None: from nodes in order, constants, noisy nodes, an image, a name."""


def plan_of(model: NetworkModel, fallback: Fallback | None = None) -> Plan:
    """The plan of a network with its present weights.

    An operation without a rule gets the one that `fallback` gives it; if there is none, that is a `NoRule`. A sketch's
    fallback is `black_box`, which knows such operations from samples.
    """

    def made() -> Plan:
        model.require_derivatives()
        return _Planner(model, fallback).plan()

    return model.kept((fallback, *LAYER_RULES.items()), made, unless=lambda plan: plan.holds_network)


class _Planner:
    """Sorts the operations of a graph into affine steps and nonlinear layers with rules, and refuses the others."""

    def __init__(self, model: NetworkModel, fallback: Fallback | None) -> None:
        self.graph, self.like, self.caller, self.fallback = model.graph, model.image, model.caller, fallback
        network = model.network
        self.constants = self.graph.constants(network)
        with torch.no_grad(), full_precision():
            images = self.like, another_image(self.like)
            # values of all nodes at two images, between which affine operations must change by their linear part
            self.first, self.second = (self.graph.values(self.constants, image) for image in images)
        traced = network.program if isinstance(network, ExportedNetwork) else network
        self.modules = dict(traced.named_modules())
        self.affine: dict[Node, AffineStep] = {}
        self.nonlinear: dict[Node, RuledCall] = {}
        self.chains: dict[Node, Chain] = {}
        self.never_negative: set[Node] = set()
        self.names: dict[Node, str] = {}
        self.with_several_results: set[Node] = set()
        self.inside: set[Node] = set()
        """Nodes without a rule whose values no rule could take, and which are parts of what comes after them."""

    def plan(self) -> Plan:
        layers = [call for call in self.graph.calls if layer_rule(self._module(call)) is not None]
        used, inside_layers = self._used(), set[Node]()
        for place, node in enumerate(self.graph.nodes):
            for layer in layers:
                if layer.start == place:
                    inside_layers |= self._sort_layer(layer)
            if node in used and node not in inside_layers:
                self._sort_operation(node)
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
        return Plan(self.graph.image, tuple(stages), last, holds_network=any(layer.path == "" for layer in layers))

    def _module(self, call: LayerCall) -> nn.Module:
        return self.modules[call.path]

    def _used(self) -> set[Node]:
        """The noisy operations that the scores depend on."""
        used: set[Node] = set()
        pending = [self.graph.output]
        while pending:
            node = pending.pop()
            if node not in used and node in self.graph.noisy and node.op == "call_function":
                used.add(node)
                pending.extend(node.all_input_nodes)
        return used

    def _sort_operation(self, node: Node) -> None:
        """Add an operation to the affine steps or to the nonlinear layers."""
        if node in self.nonlinear:
            return
        if any(argument in self.inside for argument in node.all_input_nodes):
            self._add_without_rule(node)
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
        if entry is None and (ruled := self._rule_for(node)) is not None:
            self._add_nonlinear(node, ruled)
            return
        if entry is None:
            self._add_without_rule(node)
            return
        if any(argument in self.with_several_results for argument in node.all_input_nodes):
            raise self._refusal(node)  # indices, say: only the first of several results is a function with a rule
        self.affine[node] = self._affine_step(node, entry)

    def _trivial_step(self, node: Node) -> AffineStep | None:
        """A step that does nothing: the ReLU or absolute value of what is never negative; its sign is 1. Else None."""
        kind, inputs = family(node.target), _noisy_inputs(node, self.graph)
        if not (kind in (aten.abs, aten.relu, aten.sign) and inputs[0] in self.never_negative):
            return None
        if kind is aten.sign:
            ones = aten.ones_like.default, inputs, dict[str, Any]()
            return AffineStep(node, inputs, partial(_called, *ones), partial(_zeros, *ones), self.constants)
        if inputs[0] in self.nonlinear:  # the two may be one layer, see `_merged`
            return None
        same = partial(_called, aten.alias.default, inputs, {})
        return AffineStep(node, inputs, same, same, self.constants)

    def _rule_for(self, node: Node) -> RuledCall | None:
        """The rule of a node's operator, or of the chain of functions that the node ends."""
        rule, chain = RULES.get(family(node.target)), self.chains.get(node)
        by_operator = None if rule is None else rule(self._call(node))
        if chain is None or (chain.curved < 2 and len(_noisy_inputs(node, self.graph)) < 2):
            return by_operator
        if by_operator is not None and self._merged(by_operator) is not by_operator:
            return by_operator
        return RuledCall(chain.rule(self.graph, self.constants, self.like), (chain.root,))

    def _affine_step(self, node: Node, entry: AffineOperator) -> AffineStep:
        """An affine operator with its constants put in; in the linear part, constants that are added are zero."""
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
        """Whether the result changes from one image to another as the linear part says."""
        if family(node.target) in SHAPE_ONLY:
            return True
        step = self._affine_step(node, entry)
        moved = {argument: _difference(self.second[argument], self.first[argument]) for argument in step.inputs}
        with torch.no_grad(), full_precision():
            expected = step.linear(moved)
        first, second = self.first[node], self.second[node]
        return _near(_difference(second, first), expected, first, second)

    def _add_nonlinear(self, node: Node, ruled: RuledCall) -> None:
        """Add a nonlinear operation; if it returns several results (values and indices), the first of them."""
        results = [node]
        if not isinstance(node.meta["val"], Tensor):
            self.with_several_results.add(node)
            results = [pick for pick in node.users if pick.args[1] == 0]
        for result in results:
            self.nonlinear[result] = self._merged(ruled)
            self.names[result] = self.graph.where(result)

    def _add_without_rule(self, node: Node) -> None:
        """Leave an operation to the fallback, with those before it whose values no rule could take.

        If its own value is no real tensor either (complex numbers, say, or several results), it waits for what follows.
        """
        nodes = [*self._inside_before(node), node]
        if self.fallback is None:
            raise self._refusal(nodes[0])
        if not is_real_tensor(node):
            self.inside.add(node)
            return
        name = f"{operator_name(nodes[0])} in {self.graph.where(nodes[0])}"
        ruled = self.fallback(nodes, self.constants, self.graph.noisy, self.like, name)
        if ruled is None:
            raise self._refusal(nodes[0])
        self._add_nonlinear(node, ruled)

    def _inside_before(self, node: Node) -> list[Node]:
        """The nodes `inside` from which a node is computed, in order."""
        found, pending = set[Node](), [node]
        while pending:
            earlier = [x for x in pending.pop().all_input_nodes if x in self.inside and x not in found]
            found.update(earlier)
            pending.extend(earlier)
        return sorted(found, key=self.graph.place.__getitem__)

    def _sort_layer(self, call: LayerCall) -> set[Node]:
        """Add a call of a module with a rule of its own; returns the nodes inside, which it replaces."""
        module = self._module(call)
        inside = [node for node in self.graph.nodes[call.start : call.stop] if node in self.graph.noisy]
        entering = {x for node in inside for x in node.all_input_nodes if x in self.graph.noisy and x not in inside}
        leaving = [node for node in inside if any(user not in inside for user in node.users)]
        if len(entering) != 1 or len(leaving) != 1:
            raise ValueError(
                f"{self.caller}: {call.name} ({type(module).__name__}) has a rule of its own, for which it must "
                f"take one tensor and return one; it takes {len(entering)} and returns {len(leaving)}"
            )
        (source,), (result,) = entering, leaving
        make_rule = layer_rule(module)
        assert make_rule is not None
        example = self.like.new_zeros(shape_of(source))
        rule = make_rule(module, example)
        if rule is not None and not isinstance(getattr(rule, "windows", None), Tensor):
            raise TypeError(
                f"{self.caller}: the rule registered for {call.name} must return a netmoments.rules.Nonlinearity whose "
                f"windows are set, or None for an affine layer, got {describe(rule)}"
            )
        if rule is None:
            self.affine[result] = _affine_layer(call.name, module, source, result, example, self.caller)
        else:
            self._require_same_values(call.name, module, rule, source, result)
            self.nonlinear[result] = self._merged(RuledCall(rule, (source,)))
            self.names[result] = call.name
        return set(inside)

    def _require_same_values(
        self, path: str, module: nn.Module, rule: Nonlinearity, source: Node, result: Node
    ) -> None:
        """Refuse a rule that is not for the function which the layer computes, including hooks on it."""
        for of_nodes in (self.first, self.second):
            with torch.no_grad():
                values = rule.values(rule.gathered(of_nodes[source].reshape(1, -1)))
            wanted = of_nodes[result].reshape(1, -1)
            if values.shape != wanted.shape or not _near(values, wanted, wanted):
                raise ValueError(
                    f"{self.caller}: the rule registered for {path} ({type(module).__name__}) gives other values than "
                    f"the layer; its `values` must be what the layer computes, with a forward hook if it has one"
                )

    def _merged(self, ruled: RuledCall) -> RuledCall:
        """A pool of ReLUs, or a ReLU of a pool, as one rule for the window; anything else as it is."""
        (source, *others) = ruled.inputs
        while source in self.affine and family(source.target) in IN_ORDER:
            source = self.affine[source].inputs[0]
        earlier = self.nonlinear.get(source)
        if others or earlier is None:
            return ruled
        if ruled.rule.is_relu and (earlier.rule.is_relu or earlier.rule.never_negative):
            return earlier
        pool = earlier.rule if ruled.rule.is_relu else ruled.rule if earlier.rule.is_relu else None
        clamped = None if pool is None else pool.clamped()
        return ruled if clamped is None else RuledCall(clamped, earlier.inputs)

    def _call(self, node: Node) -> OperatorCall:
        noisy, constants = self.graph.noisy, self.constants
        args = fx.node.map_arg(node.args, lambda argument: argument if argument in noisy else constants[argument])
        return OperatorCall(node, args, self.like)

    def _segment(self, results: tuple[Node, ...]) -> Segment:
        """The affine steps that lead to `results`, from the nearest nonlinear layers or the image."""
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

    def _in_order(self, by_node: Mapping[Node, Any]) -> Iterable[tuple[Node, Any]]:
        """The items of a mapping, in the order of the graph."""
        return ((node, by_node[node]) for node in self.graph.nodes if node in by_node)

    def _refusal(self, node: Node) -> NoRule:
        others = "" if self.fallback is not None else 'method="sketch" (which knows smooth ones from samples) or '
        return NoRule(
            f"{self.caller}: no rule for {operator_name(node)} in {self.graph.where(node)} as it is called there; use "
            f'{others}method="sampling", or register a rule for your layer with netmoments.register_rule '
            f"(docs/propagation.md lists the rules there are)"
        )


def _noisy_inputs(node: Node, graph: NetworkGraph) -> tuple[Node, ...]:
    return tuple(argument for argument in node.all_input_nodes if argument in graph.noisy)


def _finite(value: Any) -> Any:
    """A constant with ±`EXCLUDED` in place of what is infinite in it, or as good as infinite: masks of attention."""
    if isinstance(value, Tensor) and value.is_floating_point() and bool((value.abs() > INFINITE).any()):
        return torch.where(value.abs() > INFINITE, EXCLUDED * value.sign(), value)
    return math.copysign(EXCLUDED, value) if isinstance(value, float) and abs(value) > INFINITE else value


def _called(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], values: Mapping[Node, Any]) -> Any:
    """Call an operator with the values of its noisy arguments; all others are constants in `args` and `kwargs`."""
    positional, named = fx.node.map_arg((args, kwargs), values.__getitem__)
    return target(*positional, **named)


def _zeros(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], values: Mapping[Node, Any]) -> Tensor:
    """The linear part of an operator whose value depends on the shape of its argument only."""
    return torch.zeros_like(_called(target, args, kwargs, values))


def _difference(value: Any, other: Any) -> Any:
    """value − other, of tensors or of lists of them."""
    if isinstance(value, Tensor):
        return _finite(value) - _finite(other) if value.is_floating_point() else value
    return [_difference(one, another) for one, another in zip(value, other, strict=True)]


def _near(value: Any, expected: Any, *sizes: Any) -> bool:
    """Whether two tensors, or the first of two lists, agree to 1000 units of rounding of values as large as `sizes`."""
    if not isinstance(value, Tensor):
        first = next(iter(value))
        return _near(first, next(iter(expected)), *(next(iter(size)) for size in sizes))
    if not value.is_floating_point() or not value.numel():
        return True
    counts = torch.stack([size.abs() < INFINITE for size in sizes]).all(0)  # what a mask leaves out does not
    scale = max(float(torch.where(counts, size, 0.0).abs().max()) for size in (value, *sizes))
    error = torch.where(counts, value - expected, 0.0).abs().max()
    return float(error) <= 1e3 * torch.finfo(value.dtype).eps * scale


def _affine_layer(path: str, module: nn.Module, source: Node, result: Node, example: Tensor, caller: str) -> AffineStep:
    """A module that is registered as affine, as one step whose linear part is its derivative; this is checked."""
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        first, second = (torch.randn(example.shape, generator=generator).to(example) for _ in range(2))
        error = module(first + second) - module(first) - module(second) + module(example)
        scale = module(first).abs().max() + module(second).abs().max() + 1
    if float(error.abs().max()) > 1e3 * torch.finfo(example.dtype).eps * float(scale):
        raise ValueError(f"{caller}: {path} ({type(module).__name__}) is registered as affine (by None), but is not")

    def linear(values: Mapping[Node, Any]) -> Any:
        return value_and_slope(module, (example,), (values[source],))[1]

    return AffineStep(result, (source,), lambda values: module(values[source]), linear)
