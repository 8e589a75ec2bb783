"""A network as a graph of elementary operations, recorded while it runs on one image.

`traced_graph` records a replica of the network with torch's `make_fx`, in operators that are written out where
`elementary` says so. It then removes changes in place and checks the graph against the network on another image.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, get_proxy_slot, make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from netmoments.files import first_line
from netmoments.network.elementary import WRITTEN_OUT
from netmoments.network.exported import ExportedNetwork
from netmoments.network.replica import TensorSlots, named_tensors, replica
from netmoments.network.validate import another_image, same_values
from netmoments.precision import full_precision, without_cudnn

Node = fx.Node
Values = dict[Node, Any]
aten = torch.ops.aten
_SLICES = {aten.slice.Tensor: 3, aten.slice_scatter.default: 4}
"""The place of the argument `end`, two after that of the dimension."""
ROOT = "network"
"""What the network itself is called among its modules."""


@dataclass(frozen=True)
class LayerCall:
    """One call of a module, which recorded the nodes `start` to `stop` − 1 of the graph."""

    path: str
    """The module's path as in `named_modules`: empty for the network itself."""
    start: int
    stop: int

    @property
    def name(self) -> str:
        """The path as it is shown."""
        return self.path or ROOT


@dataclass(frozen=True, eq=False)
class NetworkGraph:
    """The operations of a network on one image, (1, ...), without changes in place.

    The nodes call torch's own operators. Parameters and buffers are inputs by name, so that results follow the weights
    and are differentiable in them.
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
        """The name of the innermost module that a node belongs to."""
        place = self.place[node]
        around = [call for call in self.calls if call.start <= place < call.stop]
        return min(around, key=lambda call: call.stop - call.start).name if around else ROOT

    @cached_property
    def place(self) -> dict[Node, int]:
        """The number of each node in the order of the run."""
        return {node: place for place, node in enumerate(self.nodes)}

    def constants(self, network: nn.Module) -> Values:
        """The values of all nodes that do not depend on the image: weights, and what is computed from them."""
        tensors = named_tensors(network)
        values: Values = {node: tensors[name] for name, node in self.parameters.items()}
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
    """The result of a node's operator, given the values of the nodes that are its arguments."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda argument: values[argument])
    return node.target(*args, **kwargs)  # type: ignore[operator]


def shape_of(node: Node) -> torch.Size:
    """The shape of a node's value for one image, (1, ...)."""
    return _first_value(node).shape


def dtype_of(node: Node) -> torch.dtype:
    """The dtype of a node's value."""
    return _first_value(node).dtype


def _first_value(node: Node) -> Tensor:
    """The value of a node in the recorded run, or the first of several."""
    value = node.meta["val"]
    first: Tensor = value if isinstance(value, Tensor) else value[0]
    return first


def family(target: Any) -> Any:
    """The operator that an overload belongs to: aten.add for aten.add.Tensor."""
    return target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target


def traced_graph(network: nn.Module, image: Tensor, caller: str) -> NetworkGraph:
    """The graph of a network for one image (1, ...), recorded on a replica of the network."""
    module = network.program if isinstance(network, ExportedNetwork) else network
    prefix = "program." if isinstance(network, ExportedNetwork) else ""
    twin, calls = replica(module), list[LayerCall]()
    slots = TensorSlots(twin)

    def run(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        slots.fill(weights)
        return twin(x)

    with torch.inference_mode(False):
        traced = _traced(run, slots.tensors, image.detach().clone(), twin, calls, caller)
    recorded = tuple(traced.graph.nodes)
    _remove_changes_in_place(traced.graph)
    _expand_after_reciprocals(traced.graph)
    nodes = tuple(traced.graph.nodes)
    places = {node: place for place, node in enumerate(nodes)}  # nodes were put between those that were recorded
    moved = [*(places[node] for node in recorded), len(nodes)]
    *weights, image_node = (node for node in nodes if node.op == "placeholder")
    (output,) = next(node for node in nodes if node.op == "output").all_input_nodes
    graph = NetworkGraph(
        nodes=nodes,
        image=image_node,
        output=output,
        parameters={prefix + name: node for name, node in zip(slots.tensors, weights, strict=True)},
        fixed={node: getattr(traced, str(node.target)) for node in nodes if node.op == "get_attr"},
        calls=tuple(LayerCall(call.path, moved[call.start], moved[call.stop]) for call in calls),
        noisy=frozenset(_depending_on(image_node, nodes)),
    )
    if not _agrees(graph, network, another_image(image.detach())):
        raise ValueError(
            f"{caller}: the network does other operations for other images (shapes or choices that depend on what it "
            f"computes), or changes tensors in place in a way that cannot be recorded, so it has no fixed graph; take "
            f"that out, or use method='auto' or 'sampling'"
        )
    return graph


def _agrees(graph: NetworkGraph, network: nn.Module, image: Tensor) -> bool:
    """Whether the graph and the network give the same scores for an image, (1, ...)."""
    with torch.no_grad(), full_precision():
        try:
            values = graph.values(graph.constants(network), image.detach())
        except (RuntimeError, IndexError, KeyError):
            return False
        return same_values(values[graph.output], network(image.detach().clone()))


def _traced(
    run: Callable[[dict[str, Tensor], Tensor], Tensor],
    weights: dict[str, Tensor],
    image: Tensor,
    network: nn.Module,
    calls: list[LayerCall],
    caller: str,
) -> fx.GraphModule:
    """Record a run, without changes in place if torch can take them out, and the modules' calls in `calls`."""
    with torch.no_grad(), full_precision(), _in_elementary_operations():
        try:
            with _recorded_calls(network, calls):
                functional = functionalize(run, remove="mutations")
                return _without_source(make_fx(functional, {**WRITTEN_OUT, **_READ})(weights, image))
        except RuntimeError as error:
            if "tracing tensor" in str(error):
                raise ValueError(
                    f"{caller}: the network decides by what it computes from its input what to do next (an if or a "
                    f"loop on a tensor in forward), so it has no fixed graph; take that out, or use method='auto' or "
                    f"'sampling'"
                ) from error
        calls.clear()
        try:  # torch can record some networks that it cannot make functional
            with _recorded_calls(network, calls):
                return _without_source(make_fx(run, WRITTEN_OUT)(weights, image))
        except (RuntimeError, NotImplementedError) as error:
            raise ValueError(
                f"{caller}: the network's operations cannot be recorded: {first_line(error)}; use method='auto' or "
                f"'sampling'"
            ) from error


def _read_constant(x: Tensor) -> Any:
    """The number in a tensor that does not depend on the image, so that every run reads it; torch refuses others.

    It may be read from a mask, a length or a weight: if another number is read later, the operations of a run differ,
    and the network is recorded anew.
    """
    mode = get_proxy_mode()
    made = None if mode is None else get_proxy_slot(x, mode.tracer, None)
    if made is not None and _depends_on_image(made.proxy.node):
        return NotImplemented
    with disable_proxy_modes_tracing():
        return x.item()


def _depends_on_image(node: Node) -> bool:
    """Whether a node of a graph that is being recorded depends on the image, which is the last placeholder."""
    *_, image = (known for known in node.graph.nodes if known.op == "placeholder")
    pending, seen = [node], {node}
    while pending:
        earlier = [x for x in pending.pop().all_input_nodes if x not in seen]
        seen.update(earlier)
        pending.extend(earlier)
    return image in seen


_READ = {aten._local_scalar_dense.default: _read_constant}
"""How values of tensors are read while a network is recorded without changes in place."""


def _without_source(recorded: fx.GraphModule) -> fx.GraphModule:
    """The graph without its Python source, which is never run but which torch keeps for ever to show it in errors."""
    name = recorded.forward.__code__.co_filename
    linecache.cache.pop(name, None)
    getattr(getattr(fx.graph_module, "_loader", None), "eval_cache", {}).pop(name, None)
    return recorded


@contextmanager
def _in_elementary_operations() -> Iterator[None]:
    """Inside this block, attention and recurrent layers run as the operations they are made of, not as one kernel."""
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # like cuDNN, it has kernels for whole LSTMs
    try:
        with sdpa_kernel(SDPBackend.MATH), without_cudnn():
            yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def _remove_changes_in_place(graph: fx.Graph) -> None:
    """Replace the operations in place that are left (`squeeze_`, say) by those that return a new tensor.

    An operation that changes a slice of a tensor changes the tensor, so the new slice is scattered back into it. Also,
    ends of slices are cut to the tensor's size, and views become `reshape`, which takes any layout in memory.
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
        functional = _functional(target)
        if functional is None or not isinstance(node.args[0], Node):
            continue
        changed = node.args[0]
        node.target = functional
        _copy_as_expansion(node)
        _replace_later_uses(graph, changed, node)


def _functional(in_place: torch._ops.OpOverload) -> Any:
    """The operator that returns what another computes in place: its overload of the same name, or same arguments."""
    packet = getattr(aten, in_place.overloadpacket.__name__.removesuffix("_"), None)
    if packet is None or hasattr(packet, in_place._overloadname):
        return getattr(packet, in_place._overloadname, None)
    wanted = [(argument.name, str(argument.type)) for argument in in_place._schema.arguments]
    overloads = [getattr(packet, name) for name in packet.overloads()]
    return next((x for x in overloads if [(a.name, str(a.type)) for a in x._schema.arguments] == wanted), None)


def _expand_after_reciprocals(graph: fx.Graph) -> None:
    """Move the reciprocal of an expanded tensor before the expansion: x/|x|, say, then takes one for each |x|."""
    for node in graph.nodes:
        source = node.args[0] if node.target is aten.reciprocal.default else None
        if isinstance(source, Node) and source.target is aten.expand.default and len(source.users) == 1:
            (before,), sizes = source.all_input_nodes, source.args[1:]
            source.meta["val"] = before.meta["val"]
            source.target, source.args = node.target, (before,)
            node.target, node.args = aten.expand.default, (source, *sizes)


def _copy_as_expansion(node: Node) -> None:
    """Turn a `copy` of one tensor into another into an expansion to the other's shape, which has derivatives."""
    if node.target is aten.copy.default and isinstance(node.args[1], Node):
        node.target, node.args = aten.expand.default, (node.args[1], list(shape_of(node)))
        node.kwargs = {}


def _replace_later_uses(graph: fx.Graph, old: Node, new: Node) -> None:
    """Use `new` instead of `old` in all nodes after `new`; if `old` is a slice of a tensor, update the tensor too."""
    nodes = list(graph.nodes)
    later = set(nodes[nodes.index(new) + 1 :])
    old.replace_all_uses_with(new, delete_user_cb=later.__contains__)
    scatter = {aten.slice.Tensor: aten.slice_scatter.default, aten.select.int: aten.select_scatter.default}
    if old.target in scatter and isinstance(old.args[0], Node):
        base = old.args[0]
        with graph.inserting_after(new):
            updated = graph.call_function(scatter[old.target], (base, new, *old.args[1:]))
        updated.meta["val"] = base.meta["val"]
        _replace_later_uses(graph, base, updated)


def _depending_on(start: Node, nodes: Iterable[Node]) -> set[Node]:
    """The nodes whose values depend on that of `start`, which is one of them."""
    dependent = {start}
    for node in nodes:
        if node.op == "call_function" and any(argument in dependent for argument in node.all_input_nodes):
            dependent.add(node)
    return dependent


@contextmanager
def _recorded_calls(network: nn.Module, calls: list[LayerCall]) -> Iterator[None]:
    """Inside this block, a traced run appends each call of a module to `calls`, with the nodes that it made."""
    starts: list[int] = []

    def nodes_so_far() -> int:
        mode = get_proxy_mode()
        return 0 if mode is None else len(mode.tracer.graph.nodes)

    def entering(*_: Any) -> None:
        starts.append(nodes_so_far())

    def leaving(path: str) -> Any:
        def hook(*_: Any) -> None:
            calls.append(LayerCall(path, starts.pop(), nodes_so_far()))

        return hook

    with ExitStack() as hooks:
        for path, module in network.named_modules():
            if not isinstance(module, torch.jit.ScriptModule | fx.GraphModule):
                hooks.enter_context(module.register_forward_pre_hook(entering))
                hooks.enter_context(module.register_forward_hook(leaving(path), always_call=True))
        yield
