"""A network as a graph of elementary operations, recorded while it runs on one image."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from netmoments.network.elementary import WRITTEN_OUT
from netmoments.network.exported import ExportedNetwork
from netmoments.network.replica import TensorSlots, named_tensors, replica
from netmoments.network.validate import another_image, same_values
from netmoments.precision import full_precision, without_cudnn

Node = fx.Node
Values = dict[Node, Any]
aten = torch.ops.aten
_SLICES = {aten.slice.Tensor: 3, aten.slice_scatter.default: 4}
"""Where their argument `end` is, two places after the dimension."""
ROOT = "network"
"""The name of the network itself, among those of its modules."""


@dataclass(frozen=True)
class LayerCall:
    """One call of a module, and the operations it did, from the first to the last by place in the graph."""

    path: str
    """Of the module, as `named_modules` has it: empty for the network itself."""
    start: int
    stop: int

    @property
    def name(self) -> str:
        """The path, to be read."""
        return self.path or ROOT


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
        place = self.place[node]
        holding = [call for call in self.calls if call.start <= place < call.stop]
        return min(holding, key=lambda call: call.stop - call.start).name if holding else ROOT

    @cached_property
    def place(self) -> dict[Node, int]:
        """Each node's number in the order of the run."""
        return {node: place for place, node in enumerate(self.nodes)}

    def constants(self, network: nn.Module) -> Values:
        """The values of all nodes that do not depend on the image: weights, and what is computed from them."""
        given = named_tensors(network)
        values: Values = {node: given[name] for name, node in self.parameters.items()}
        values |= self.fixed
        for node in self.nodes:
            if node not in values and node not in self.noisy and node.op == "call_function":
                values[node] = call(node, values)
        return values

    def values(self, constants: Mapping[Node, Any], image: Tensor) -> Values:
        """The values of all nodes for one image, (1, ...), given those of the constant ones."""
        values: Values = {**constants, self.image: image.clone()}
        for node in self.nodes:
            if node in self.noisy and node is not self.image:
                values[node] = call(node, values)
        return values


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


def holds(graph: NetworkGraph, network: nn.Module, image: Tensor) -> bool:
    """Whether what was recorded gives what the network gives."""
    with torch.no_grad(), full_precision():
        try:
            values = graph.values(graph.constants(network), image.detach())
        except (RuntimeError, IndexError, KeyError):
            return False
        return same_values(values[graph.output], network(image.detach().clone()))


def traced_graph(network: nn.Module, image: Tensor, caller: str) -> NetworkGraph:
    """The graph of a network for one image (1, ...), recorded on a twin of the network."""
    runs = network.program if isinstance(network, ExportedNetwork) else network
    prefix = "program." if isinstance(network, ExportedNetwork) else ""
    twin, calls = replica(runs), list[LayerCall]()
    slots = TensorSlots(twin)
    own = slots.tensors

    def run(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        slots.fill(weights)
        return twin(x)

    with torch.inference_mode(False):
        traced = _traced(run, own, image.detach().clone(), twin, calls, caller)
    _out_of_place(traced.graph)
    _expanded_last(traced.graph)
    nodes = tuple(traced.graph.nodes)
    entrances = [node for node in nodes if node.op == "placeholder"]
    *weights, entrance = entrances
    (result,) = next(node for node in nodes if node.op == "output").all_input_nodes
    found = NetworkGraph(
        nodes=nodes,
        image=entrance,
        output=result,
        parameters={prefix + name: node for name, node in zip(own, weights, strict=True)},
        fixed={node: getattr(traced, str(node.target)) for node in nodes if node.op == "get_attr"},
        calls=tuple(calls),
        noisy=frozenset(_reached(nodes, entrance)),
    )
    if not holds(found, network, another_image(image.detach())):
        raise ValueError(
            f"{caller}: the network does other operations for other images (shapes or choices that depend on what it "
            f"computes), or changes tensors in place in a way that cannot be recorded, so it has no fixed graph; take "
            f"that out, or use method='auto' or 'sampling'"
        )
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
    with torch.no_grad(), full_precision(), _in_small_steps():
        try:
            with _recorded_calls(network, calls):
                return _without_source(make_fx(functionalize(run, remove="mutations"), WRITTEN_OUT)(weights, image))
        except RuntimeError as error:
            if "tracing tensor" in str(error):
                raise ValueError(
                    f"{caller}: the network decides by the values it computes what to do next (an if or a loop on a "
                    f"tensor in forward), so it has no fixed graph; take that out, or use method='auto' or "
                    f"'sampling'"
                ) from error
        calls.clear()
        try:  # some of what torch cannot make functional it can still record
            with _recorded_calls(network, calls):
                return _without_source(make_fx(run, WRITTEN_OUT)(weights, image))
        except (RuntimeError, NotImplementedError) as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise ValueError(
                f"{caller}: the network's operations cannot be recorded: {reason}; use method='auto' or 'sampling'"
            ) from error


def _without_source(recorded: fx.GraphModule) -> fx.GraphModule:
    """Torch keeps the Python source of every graph for ever, to show it in errors; that of this one is never run."""
    name = recorded.forward.__code__.co_filename
    linecache.cache.pop(name, None)
    getattr(getattr(fx.graph_module, "_loader", None), "eval_cache", {}).pop(name, None)
    return recorded


@contextmanager
def _in_small_steps() -> Iterator[None]:
    """Inside this block attention and recurrent layers run as the operations they are made of, not as one kernel."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # like cuDNN it has kernels for whole LSTMs
    try:
        with sdpa_kernel(SDPBackend.MATH), without_cudnn():
            yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def _out_of_place(graph: fx.Graph) -> None:
    """Operations in place that are left (`squeeze_` of something new, say) as those that return a new tensor.

    What changes a slice of a tensor changes the tensor: the new slice is put back. Ends of slices are made finite, and
    a view is taken of tensors however they lie in memory.
    """
    for node in list(graph.nodes):
        target = node.target
        if target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
            continue
        if target in _SLICES:
            place, source = _SLICES[target], node.args[0]
            size = shape_of(source)[node.args[place - 2] if len(node.args) > place - 2 else 0]
            if len(node.args) > place and isinstance(node.args[place], int) and node.args[place] > size:
                node.args = (*node.args[:place], size, *node.args[place + 1 :])
        if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
            _copy_as_expansion(node)
            continue
        plain = _not_in_place(target)
        if plain is None or not isinstance(node.args[0], Node):
            continue
        changed = node.args[0]
        node.target = plain
        _copy_as_expansion(node)
        _replace_later(graph, changed, node)


def _not_in_place(target: torch._ops.OpOverload) -> Any:
    """The operator that returns what another changes in place, of the same arguments, whatever its overload's name."""
    packet = getattr(aten, target.overloadpacket.__name__.removesuffix("_"), None)
    if packet is None or hasattr(packet, target._overloadname):
        return getattr(packet, target._overloadname, None)
    wanted = [(argument.name, str(argument.type)) for argument in target._schema.arguments]
    every = [getattr(packet, name) for name in packet.overloads()]
    return next((x for x in every if [(a.name, str(a.type)) for a in x._schema.arguments] == wanted), None)


def _expanded_last(graph: fx.Graph) -> None:
    """Reciprocals of what was expanded are expanded reciprocals: x/|x|, say, then has one for each |x|."""
    for node in graph.nodes:
        source = node.args[0] if node.target is aten.reciprocal.default else None
        if isinstance(source, Node) and source.target is aten.expand.default and len(source.users) == 1:
            (before,), sizes = source.all_input_nodes, source.args[1:]
            source.meta["val"] = before.meta["val"]
            source.target, source.args = node.target, (before,)
            node.target, node.args = aten.expand.default, (source, *sizes)


def _copy_as_expansion(node: Node) -> None:
    """What `copy` returns is its source in the shape of the other: an operation that has derivatives."""
    if node.target is aten.copy.default and isinstance(node.args[1], Node):
        node.target, node.args = aten.expand.default, (node.args[1], list(shape_of(node)))
        node.kwargs = {}


def _replace_later(graph: fx.Graph, old: Node, new: Node) -> None:
    """All uses of a node after another by that one; where it was a slice of a tensor, those of the tensor too."""
    nodes = list(graph.nodes)
    later = set(nodes[nodes.index(new) + 1 :])
    old.replace_all_uses_with(new, delete_user_cb=later.__contains__)
    scatter = {aten.slice.Tensor: aten.slice_scatter.default, aten.select.int: aten.select_scatter.default}
    if old.target in scatter and isinstance(old.args[0], Node):
        base = old.args[0]
        with graph.inserting_after(new):
            back = graph.call_function(scatter[old.target], (base, new, *old.args[1:]))
        back.meta["val"] = base.meta["val"]
        _replace_later(graph, base, back)


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
            handles.append(module.register_forward_hook(leaving(path), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def family(target: Any) -> Any:
    """The operator of an overload: aten.add for aten.add.Tensor."""
    return target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target
