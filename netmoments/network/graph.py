"""A network as a graph of elementary operations, recorded while it runs on one image."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call, functionalize
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from netmoments.network.exported import ExportedNetwork
from netmoments.network.inspection import another_image, same_values, structure_of
from netmoments.precision import full_precision

Node = fx.Node
Values = dict[Node, Any]
ROOT = "network"
"""The name of the network itself, among those of its modules."""


@dataclass(frozen=True)
class LayerCall:
    """One call of a module: its name, and the operations it did, from the first to the last by place in the graph."""

    path: str
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class NetworkGraph:
    """What a network does with one image, (1, ...), operation by operation, free of changes in place.

    The nodes call torch's own operators; parameters and buffers are inputs by name, so that what is computed with the
    graph follows the weights and is differentiable in them.
    """

    nodes: tuple[Node, ...]
    image: Node
    """The network's input."""
    output: Node
    parameters: Mapping[str, Node]
    fixed: Mapping[Node, Tensor]
    """Tensors that the network keeps outside its parameters and buffers."""
    calls: tuple[LayerCall, ...]
    noisy: frozenset[Node]
    """Nodes whose value depends on the image."""

    def where(self, node: Node) -> str:
        """The module that a node belongs to, the innermost one."""
        place = self._place[node]
        holding = [call for call in self.calls if call.start <= place < call.stop]
        return min(holding, key=lambda call: call.stop - call.start).path if holding else ROOT

    @property
    def _place(self) -> dict[Node, int]:
        return {node: place for place, node in enumerate(self.nodes)}

    def constants(self, network: nn.Module) -> Values:
        """The values of all nodes that do not depend on the image: weights, and what is computed from them."""
        given = {**dict(network.named_parameters()), **dict(network.named_buffers())}
        values: Values = {node: given[name] for name, node in self.parameters.items()}
        values |= self.fixed
        for node in self.nodes:
            if node not in values and node not in self.noisy and node.op == "call_function":
                values[node] = call(node, values)
        return values


_known: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], NetworkGraph]] = WeakKeyDictionary()


def call(node: Node, values: Mapping[Node, Any]) -> Any:
    """A node's operator applied to the values of its arguments."""
    args, kwargs = filled(node, values)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def filled(node: Node, values: Mapping[Node, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A node's arguments with values in the place of nodes."""
    return fx.node.map_arg((node.args, node.kwargs), lambda argument: values[argument])


def shape_of(node: Node) -> torch.Size:
    """The shape of a node's value for one image, (1, ...)."""
    value = node.meta["val"]
    return value.shape if isinstance(value, Tensor) else value[0].shape


def graph_of(network: nn.Module, image: Tensor, caller: str) -> NetworkGraph:
    """The graph of a network that `inspect` has looked at, for one image (1, ...); recorded once for inputs alike."""
    key = (image.shape, image.dtype, image.device, structure_of(network))
    found = _known.setdefault(network, {})
    if key not in found:
        found[key] = traced_graph(network, image, caller)
    return found[key]


def traced_graph(network: nn.Module, image: Tensor, caller: str) -> NetworkGraph:
    """The same, recorded now."""
    runs = network.program if isinstance(network, ExportedNetwork) else network
    prefix = "program." if isinstance(network, ExportedNetwork) else ""
    given = {**dict(runs.named_parameters()), **dict(runs.named_buffers())}
    calls: list[LayerCall] = []

    def run(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(runs, weights, (x,))

    traced = _traced(run, given, image.detach().clone(), runs, calls, caller)
    _out_of_place(traced.graph)
    nodes = tuple(traced.graph.nodes)
    entrances = [node for node in nodes if node.op == "placeholder"]
    *weights, entrance = entrances
    (result,) = next(node for node in nodes if node.op == "output").all_input_nodes
    found = NetworkGraph(
        nodes=nodes,
        image=entrance,
        output=result,
        parameters={prefix + name: node for name, node in zip(given, weights, strict=True)},
        fixed={node: getattr(traced, str(node.target)) for node in nodes if node.op == "get_attr"},
        calls=tuple(calls),
        noisy=frozenset(_reached(nodes, entrance)),
    )
    _require_same(found, network, image, caller)
    return found


def _traced(
    run: Callable[[dict[str, Tensor], Tensor], Tensor],
    weights: dict[str, Tensor],
    image: Tensor,
    network: nn.Module,
    calls: list[LayerCall],
    caller: str,
) -> fx.GraphModule:
    """The operations of a run; without changes in place, where torch can take them out."""
    with torch.no_grad(), full_precision():
        try:
            with _recorded_calls(network, calls):
                return make_fx(functionalize(run, remove="mutations"))(weights, image)
        except RuntimeError as error:
            if "tracing tensor" in str(error):
                raise ValueError(
                    f"{caller}: the network decides by the values it computes what to do next (an if or a loop on a "
                    f"tensor in forward), so it has no fixed graph; take that out, or use method='two-stage' or "
                    f"'sampling'"
                ) from error
        calls.clear()
        try:  # some of what torch cannot make functional it can still record
            with _recorded_calls(network, calls):
                return make_fx(run)(weights, image)
        except (RuntimeError, NotImplementedError) as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ValueError(
                f"{caller}: the network's operations cannot be recorded: {reason}; use method='two-stage' or 'sampling'"
            ) from error


def _out_of_place(graph: fx.Graph) -> None:
    """Operations in place that are left (`squeeze_` of something new, say) as those that return a new tensor."""
    nodes = list(graph.nodes)
    for place, node in enumerate(nodes):
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
            continue
        name = target.overloadpacket.__name__.removesuffix("_")
        plain = getattr(getattr(torch.ops.aten, name, None), target._overloadname, None)
        if plain is None or not node.all_input_nodes:
            continue
        changed = node.all_input_nodes[0]
        node.target = plain
        later = set(nodes[place + 1 :])
        changed.replace_all_uses_with(node, delete_user_cb=later.__contains__)


def _require_same(graph: NetworkGraph, network: nn.Module, image: Tensor, caller: str) -> None:
    """The graph must give what the network gives, for another image than it was recorded with."""
    other = another_image(image.detach())
    with torch.no_grad(), full_precision():
        values = graph.constants(network)
        values[graph.image] = other.clone()
        try:
            for node in graph.nodes:
                if node in graph.noisy and node is not graph.image:
                    values[node] = call(node, values)
            same = same_values(values[graph.output], network(other.clone()))
        except (RuntimeError, IndexError):
            same = False
    if not same:
        raise ValueError(
            f"{caller}: the network does other operations for other images (shapes or choices that depend on what it "
            f"computes), so it has no fixed graph; take that out, or use method='two-stage' or 'sampling'"
        )


def _reached(nodes: Iterable[Node], start: Node) -> set[Node]:
    """The nodes that a node's value flows into, and itself."""
    found = {start}
    for node in nodes:
        if node.op == "call_function" and any(argument in found for argument in node.all_input_nodes):
            found.add(node)
    return found


@contextmanager
def _recorded_calls(network: nn.Module, calls: list[LayerCall]) -> Iterator[None]:
    """Inside this block a traced run leaves in `calls` which nodes each module's call made."""
    started: list[int] = []

    def count() -> int:
        mode = get_proxy_mode()
        return 0 if mode is None else len(mode.tracer.graph.nodes)

    def entering(*_: Any) -> None:
        started.append(count())

    def leaving(path: str) -> Any:
        def hook(*_: Any) -> None:
            calls.append(LayerCall(path, started.pop(), count()))

        return hook

    handles = []
    for path, module in network.named_modules():
        if not isinstance(module, fx.GraphModule):
            handles.append(module.register_forward_pre_hook(entering))
            handles.append(module.register_forward_hook(leaving(path or ROOT), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
