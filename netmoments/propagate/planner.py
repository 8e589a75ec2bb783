"""How a network's recorded graph becomes a plan: every operation gets its rule, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from netmoments.network.exported import ExportedNetwork
from netmoments.network.graph import ROOT, LayerCall, NetworkGraph, Node, call, shape_of
from netmoments.network.inspection import another_image
from netmoments.precision import full_precision
from netmoments.propagate.affine import SHAPE_ONLY, AffineOperator, affine_operator, family, linear_call
from netmoments.propagate.largest import Largest
from netmoments.propagate.nonlinearity import Nonlinearity
from netmoments.propagate.piecewise_linear import PiecewiseLinear
from netmoments.propagate.plan import AffineStep, Plan, Segment, Stage
from netmoments.propagate.rules import RULES, Call, Treated, known_rules, layer_rule, operator_name


class NoRule(ValueError):
    """A network does something for which there is no rule."""


def planned(graph: NetworkGraph, network: nn.Module, like: Tensor, caller: str) -> Plan:
    """The plan of a traced network with its present weights; an operation without a rule is an error, `NoRule`."""
    return _Planner(graph, network, like, caller, None).plan()


Otherwise = Callable[[Node, Mapping[Node, Any], frozenset[Node], Tensor, str], Treated | None]


def planned_with(graph: NetworkGraph, network: nn.Module, like: Tensor, caller: str, otherwise: Otherwise) -> Plan:
    """The same with `otherwise` asked about an operation without a rule."""
    return _Planner(graph, network, like, caller, otherwise).plan()


class _Planner:
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
        self.nonlinear: dict[Node, Treated] = {}
        self.names: dict[Node, str] = {}
        self.several: set[Node] = set()

    def plan(self) -> Plan:
        layers = [call for call in self.graph.calls if layer_rule(self._module(call)) is not None]
        used, skipped = self._used(), set[Node]()
        for place, node in enumerate(self.graph.nodes):
            for own in layers:
                if own.start == place:
                    skipped |= self._treat_layer(own)
            if node in used and node not in skipped:
                self._treat(node)
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
        return Plan(self.graph.image, tuple(stages), last)

    def _module(self, call: LayerCall) -> nn.Module:
        return self.modules["" if call.path == ROOT else call.path]

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

    def _treat(self, node: Node) -> None:
        if node in self.nonlinear:
            return
        kind = family(node.target)
        if kind in RULES:
            self._add(node, RULES[kind](self._call(node)) or self._treated_otherwise(node))
            return
        noisy = self.graph.noisy
        entry = affine_operator(node, noisy)
        if entry is None or not self._is_affine(node, entry):
            self._add(node, self._treated_otherwise(node))
            return
        if any(argument in self.several for argument in node.all_input_nodes):
            raise self._refusal(node)  # indices, say: only the first of several results is a function with a rule
        constants = self.constants
        self.affine[node] = AffineStep(
            node,
            lambda values: call(node, constants | dict(values)),
            lambda values: linear_call(node, entry, constants | dict(values), noisy),
            tuple(argument for argument in node.all_input_nodes if argument in noisy),
            constants,
        )

    def _is_affine(self, node: Node, entry: AffineOperator) -> bool:
        """Whether, from one image to another, the result changes as the linear part says."""
        if family(node.target) in SHAPE_ONLY:
            return True
        moved = {
            argument: _difference(self.second[argument], self.first[argument])
            for argument in node.all_input_nodes
            if argument in self.graph.noisy
        }
        with torch.no_grad(), full_precision():
            expected = linear_call(node, entry, {**self.constants, **moved}, self.graph.noisy)
        return _near(_difference(self.second[node], self.first[node]), expected, self.first[node], self.second[node])

    def _add(self, node: Node, found: Treated) -> None:
        """A nonlinear operation; of one that returns several results (values and indices), the first."""
        if isinstance(node.meta["val"], Tensor):
            self._add_nonlinear(node, self._fused(found))
            return
        self.several.add(node)
        for pick in node.users:
            if pick.args[1] == 0:
                self._add_nonlinear(pick, self._fused(found))

    def _treated_otherwise(self, node: Node) -> Treated:
        name = f"{operator_name(node)} in {self.graph.where(node)}"
        found = None
        if self.otherwise is not None:
            found = self.otherwise(node, self.constants, self.graph.noisy, self.like, name)
        if found is None:
            raise self._refusal(node)
        return found

    def _treat_layer(self, own: LayerCall) -> set[Node]:
        """A call of a module with a rule of its own, as one node: the nodes it replaces."""
        module = self._module(own)
        inside = [node for node in self.graph.nodes[own.start : own.stop] if node in self.graph.noisy]
        entering = {x for node in inside for x in node.all_input_nodes if x in self.graph.noisy and x not in inside}
        leaving = [node for node in inside if any(user not in inside for user in node.users)]
        if len(entering) != 1 or len(leaving) != 1:
            raise ValueError(
                f"{self.caller}: {own.path} ({type(module).__name__}) has a rule of its own, for which it must "
                f"take one tensor and return one; it takes {len(entering)} and returns {len(leaving)}"
            )
        (source,), (result,) = entering, leaving
        rule = layer_rule(module)
        assert rule is not None
        example = self.like.new_zeros(shape_of(source))
        found = rule(module, example)
        if found is None:
            self.affine[result] = _affine_layer(own.path, module, source, result, example, self.caller)
        else:
            self.nonlinear[result] = Treated(found, (source,))
            self.names[result] = own.path
        return set(inside)

    def _add_nonlinear(self, node: Node, found: Treated) -> None:
        self.nonlinear[node] = found
        self.names[node] = self.graph.where(node)

    def _fused(self, found: Treated) -> Treated:
        """A pool of ReLUs, or a ReLU of a pool, as one function of the window."""
        (source, *others) = found.inputs
        earlier = self.nonlinear.get(source)
        if others or earlier is None:
            return found
        if _is_relu(found.rule) and (_is_relu(earlier.rule) or _never_negative(earlier.rule)):
            return earlier
        if isinstance(found.rule, Largest) and found.rule.sign > 0 and _is_relu(earlier.rule):
            return Treated(found.rule.clamped(), earlier.inputs)
        if isinstance(earlier.rule, Largest) and earlier.rule.sign > 0 and _is_relu(found.rule):
            return Treated(earlier.rule.clamped(), earlier.inputs)
        return found

    def _call(self, node: Node) -> Call:
        def known(argument: Node) -> Any:
            return argument if argument in self.graph.noisy else self.constants[argument]

        args = fx.node.map_arg(node.args, known)
        return Call(node, args, self.like)

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
        return Segment(steps, tuple(node for node, _ in self._in_order(sources)), results, self.constants)

    def _in_order(self, found: Mapping[Node, Any]) -> Iterable[tuple[Node, Any]]:
        return ((node, found[node]) for node in self.graph.nodes if node in found)

    def _refusal(self, node: Node) -> NoRule:
        others = "" if self.otherwise is not None else 'method="sketch" (which then knows it from samples) or '
        return NoRule(
            f"{self.caller}: no rule for {operator_name(node)} in {self.graph.where(node)} as it is called there; "
            f"there are rules for {known_rules()}. Register one for your layer with netmoments.register_rule, or use "
            f'{others}method="sampling"'
        )


def _difference(value: Any, other: Any) -> Any:
    """Of tensors, or of lists of them."""
    if isinstance(value, Tensor):
        return value - other if value.is_floating_point() else value
    return [_difference(one, another) for one, another in zip(value, other, strict=True)]


def _near(found: Any, expected: Any, *sizes: Any) -> bool:
    """Equal but for the rounding of values of these sizes, of which a thousand units are allowed."""
    if not isinstance(found, Tensor):
        first = next(iter(found))
        return _near(first, next(iter(expected)), *(next(iter(size)) for size in sizes))
    if not found.is_floating_point() or not found.numel():
        return True
    scale = max(float(size.abs().max()) for size in (found, *sizes))
    return float((found - expected).abs().max()) <= 1e3 * torch.finfo(found.dtype).eps * scale


def _is_relu(rule: Nonlinearity) -> bool:
    """Whether a rule is max(z, 0) of every unit."""
    return (
        isinstance(rule, PiecewiseLinear)
        and len(rule.kinks) == 1
        and not bool(rule.slope.any() or rule.offset.any() or rule.kinks.any())
        and bool((rule.bends == 1).all())
    )


def _never_negative(rule: Nonlinearity) -> bool:
    """Whether a ReLU after it would change nothing."""
    return isinstance(rule, Largest) and rule.with_zero and rule.sign > 0


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
        return torch.func.jvp(module, (example,), (values[source],))[1]

    return AffineStep(result, lambda values: module(values[source]), linear, (source,))
