"""The model of a network: what a run of it showed, kept between calls and checked at every use.

Everything that is computed about a user's network starts from a `NetworkModel`. The first use with inputs of some
shape, dtype and device runs a replica of the network, to see whether it is a function of each image by itself and
which ReLUs it calls. Later uses run the network once and compare the operations. This module is the only place where
anything is kept between calls: traces, graphs, and what other rooms make from a graph and weights (`kept`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter, is_not
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from netmoments.checks import describe, levels_to_the_user, require_float_tensor
from netmoments.files import first_line
from netmoments.network.exported import ExportedNetwork
from netmoments.network.graph import NetworkGraph, traced_graph
from netmoments.network.interface import HALVES, Arguments, FlatNetwork, OutputPart, needs_flattening, output_parts
from netmoments.network.relu_calls import Cut, Relu, Trace, find_relu
from netmoments.network.replica import replica
from netmoments.network.validate import (
    REFUSALS,
    attributes_of,
    equal_tensors,
    examined,
    refuse_training,
    require_plain_weights,
)
from netmoments.precision import RandomOperations, full_precision, one_at_a_time, random_state_kept

Result = TypeVar("Result")

ACTIVATIONS_HELD = 6
"""Tensors of the size of the largest activation that a pass with derivatives holds: values, gradients, scratch."""
KEPT_SHAPES = 32
"""Kinds of inputs (shape, dtype, device, arguments) for which a network is remembered: the latest ones."""


class NetworkModel:
    """What is known of a network from runs on an example of its input; it can be passed wherever a network can.

    The first use with inputs of some shape looks at the network (is it a function of each image by itself? which ReLUs
    does it call?). Methods that go layer by layer also record its graph. Both are kept as long as the network lives, so
    passing the network itself costs no more than passing its model.

    The network is run, and never changed by this library. Its weights, attributes, modules and flags may change between
    calls, so every use checks what is known: `answer` compares the operations of a run and learns anew if they differ,
    then compares the weights and drops what was made from others.

    Args:
        network: a module in eval mode, or an exported program.
        example: one input, or a batch (N, ...) of inputs, whichever of the two the network can take.
        key: the output to use of a network that returns several in a tuple or a dictionary; by default all.

    >>> model = NetworkModel(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval(), torch.zeros(1, 3))
    >>> model.outputs, [relu.name for relu in model.relus]
    (2, ['1'])
    """

    network: nn.Module
    """The network as a function of a batch: inputs (N, ...) in, scores (N, d) out. This is what is computed with."""
    given: nn.Module
    """The user's network: `network` itself, if that takes one tensor and returns scores (N, d) in the input's dtype."""
    parts: tuple[OutputPart, ...]
    """The tensors that the d outputs are made of, by name and shape."""
    image: Tensor
    """An example of the input, (1, ...)."""
    relus: tuple[Relu, ...]
    """Every ReLU call in order, with its name, shape and size."""
    outputs: int
    """How many scores the network has."""
    largest: int
    """Elements of the largest tensor that any call in the network returns, for one image."""
    pass_size: int
    """Numbers that a pass with derivatives holds at a time, for one image and one direction."""
    smooth: tuple[str, ...]
    """The smooth functions that the network calls, each with the module that calls it."""
    has_gradient: bool
    """Whether the scores have a gradient in the input, which a constant or a mere decision has not."""
    reads_values: bool
    """Whether Python sees values of tensors in a run, by which the network may do something else for other inputs."""
    most_images: int
    """The largest batch that the network takes; only some exported programs have a bound."""
    memory_budget: int | None = None
    """Bytes that work on it may take at a time, if the call for which this model was made has a limit."""
    caller: str
    """The public function that error messages name."""
    _form: tuple[Arguments | None, str | int | None] | None
    """The arguments and the key of the output; None if the network must take one tensor and return scores (N, d)."""
    _knowledge: _Knowledge
    _unchecked = False
    """Whether the `answer` that is being computed still has to check what is known."""
    _outdated = False
    """Whether `look` found, while an answer was being computed, that something was out of date."""

    def __init__(self, network: Any, example: Tensor, *, key: str | int | None = None) -> None:
        caller = "NetworkModel"
        example = require_float_tensor(caller, "example", example)
        as_one, as_batch = example.unsqueeze(0), example
        batches = {1: [as_one], 2: [as_batch, as_one], 3: [as_one, as_batch]}.get(example.dim(), [as_batch])
        refusals = []
        for batch in batches:  # one input or a batch? the first that the network can take
            try:
                vars(self).update(vars(NetworkModel.of_any(network, batch, caller, key=key)))
                return
            except ValueError as error:
                refusals.append(error)
        raise next((error for error in refusals if "cannot take an input" not in str(error)), refusals[0])

    @classmethod
    def of(cls, network: Any, inputs: Tensor, caller: str) -> NetworkModel:
        """The model of a network that takes a batch (N, ...) and returns scores (N, d), checked against it right now.

        `network` may be a model itself. Errors name the caller.
        """
        model = cls.__new__(cls)
        model.given = model.network = network_of(network, caller)
        model._form = None
        model._require_fitting(inputs, caller)
        model.image, model.caller = inputs[:1].detach(), caller
        model._learn()
        model.renewed()
        return model

    @classmethod
    def of_any(
        cls,
        network: Any,
        inputs: Tensor,
        caller: str,
        *,
        arguments: Arguments | None = None,
        key: str | int | None = None,
    ) -> NetworkModel:
        """The model of a network with any arguments and outputs, as a function of rows.

        Unlike `of`, this does not check yet that what is known still holds: `answer` does.
        """
        model = cls.__new__(cls)
        if isinstance(network, NetworkModel) and network._form is not None and key is None:
            key = network._form[1]
        model.given = model.network = network_of(network, caller)
        model._form = arguments, key
        model._require_fitting(inputs, caller)
        model.image, model.caller = inputs[:1].detach(), caller
        model._learn()
        return model

    def _require_fitting(self, inputs: Tensor, caller: str) -> None:
        """Raise an error unless the inputs are a batch on the network's device and of a dtype it may take."""
        if inputs.dim() < 2 or inputs.numel() == 0:
            raise ValueError(
                f"{caller}: the input must be a batch (N, ...) of at least one image, got {describe(inputs)}"
            )
        allowed = (inputs.dtype, *(() if self._form is None else HALVES))
        for name, parameter in self.given.named_parameters():
            if parameter.layout is not torch.strided:
                require_plain_weights(self.given, caller)
            if parameter.is_floating_point() and parameter.dtype not in allowed:
                if not self._converts(inputs[:1]):
                    raise TypeError(
                        f"{caller}: the network is {parameter.dtype} ({name}) but the input {inputs.dtype}; convert "
                        f"one, e.g. network.to({inputs.dtype})"
                    )
                allowed = (*allowed, parameter.dtype)
            if parameter.device != inputs.device:
                raise ValueError(
                    f"{caller}: the network is on {parameter.device} ({name}) but the input on {inputs.device}; move "
                    f"one, e.g. input.to({str(parameter.device)!r})"
                )

    def _converts(self, image: Tensor) -> bool:
        """Whether the network takes an image (1, ...) of another dtype than some of its parameters have."""
        if self._form is None or (flat := FlatNetwork(self.given, *self._form)).dtype is not None:
            return False
        try:
            with torch.inference_mode(False), torch.no_grad(), full_precision(), random_state_kept(image.device):
                replica(flat)(image.detach().clone())
        except REFUSALS:
            return False
        return True

    def _learn(self) -> None:
        """Take up what is known of the network for inputs like the image, or look at the network if nothing is."""
        arguments, output_key = self._form or (None, None)
        form = None if arguments is None else arguments.key, output_key
        kind = self.image.shape, self.image.dtype, self.image.device, form
        with one_at_a_time:
            by_kind = _known.setdefault(self.given, {})
            if kind in by_kind and by_kind[kind].may_be_outdated(self.given):
                del by_kind[kind]
            if kind not in by_kind:
                by_kind[kind] = self._steadily(self._looked_at)
            self._knowledge = by_kind.pop(kind)
            self.network = replica(self.given) if self._knowledge.trace.changes_buffers else self.given
            by_kind[kind] = self._knowledge  # the latest last
            if len(by_kind) > KEPT_SHAPES:
                del by_kind[next(iter(by_kind))]
            if self._knowledge.parts is not None and self._form is None:
                examined(self.given, self.image, self.caller)  # raises the error that the outputs are no scores
            elif self._knowledge.parts is not None:
                self.network = FlatNetwork(self.network, arguments, output_key)
        trace = self._knowledge.trace
        self.relus, self.outputs, self.largest = trace.relus, trace.output.shape[1], trace.largest
        self.has_gradient, self.smooth, self.reads_values = trace.has_gradient, trace.smooth, trace.reads_values
        self.pass_size = ACTIVATIONS_HELD * trace.largest
        whole = OutputPart("", trace.output.shape[1:], 0)
        self.parts = (whole,) if self._knowledge.parts is None else self._knowledge.parts
        bound = self.given.largest if isinstance(self.given, ExportedNetwork) else None
        self.most_images = 2**31 if bound is None else bound

    def _looked_at(self) -> _Knowledge:
        """What runs of the network show now."""
        parts = self._set_network()
        trace = examined(self.network, self.image, self.caller)
        if trace.changes_buffers:
            self.network = replica(self.network)
        return _Knowledge(trace, operations_of(self.network, self.image), attributes_of(self.given), parts)

    def _steadily(self, make: Callable[[], Result]) -> Result:
        """`make()`, again as long as it fails while another thread changes the weights, since runs then differ."""
        while True:
            versions = self._versions()
            try:
                return make()
            except ValueError:
                if versions == self._versions():
                    raise

    def _set_network(self) -> tuple[OutputPart, ...] | None:
        """Set `network` to the given one, or to a `FlatNetwork` around it, and return the parts of the latter."""
        self.network = self.given
        if self._form is None:
            return None
        flat = FlatNetwork(self.given, *self._form)
        try:
            with full_precision(), random_state_kept(self.image.device):
                parts = output_parts(flat, self.image, self.caller)
        except REFUSALS as error:
            if str(error).startswith(f"{self.caller}: "):
                raise
            raise ValueError(
                f"{self.caller}: the network cannot take an input of shape {tuple(self.image.shape[1:])}: "
                f"{first_line(error)}"
            ) from error
        if not needs_flattening(parts, flat):
            return None
        self.network = flat
        return parts

    def relu(self, layer: int | str) -> Relu:
        """The ReLU that `layer` names: a number counted from either end, or a name."""
        try:
            return find_relu(self.relus, layer)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{self.caller}: {error}") from None

    def cut(self, layer: int | str) -> Cut:
        """The network cut at that ReLU, once it is known that both sides can be linearized."""
        cut = Cut(self.network, self.relu(layer), self.caller)
        self.require_linearizable()
        return cut

    def require_derivatives(self) -> None:
        """Raise an error if the weights were made in inference mode, through which no derivatives go."""
        for parameter in self.network.parameters():
            if parameter.is_inference():
                raise ValueError(
                    f"{self.caller}: the network was made under torch.inference_mode(), so that it has no "
                    f"derivatives; make it outside, or use method='sampling'"
                )

    def require_differentiable(self) -> None:
        """Raise an error if the scores change with the input but have no derivative in it."""
        self.require_derivatives()
        if not self._knowledge.trace.differentiable:
            raise ValueError(
                f"{self.caller}: the network's scores change with the input but their derivative is zero or missing: "
                f"forward is under torch.no_grad(), detaches the input, rounds or only compares it, hands it to numpy, "
                f"or changes in place what a derivative needs; take that out (only sampling does without derivatives)"
            )

    def require_linearizable(self) -> None:
        """Require derivatives, and warn once for each network of smooth functions, which are linearized at a point."""
        self.require_differentiable()
        trace = self._knowledge.trace
        with one_at_a_time:
            must_warn = trace.smooth and not any(known.warned for known in _known[self.given].values())
            self._knowledge.warned |= bool(must_warn)
        if must_warn:
            warnings.warn(
                f"{self.caller}: the network calls {', '.join(trace.smooth)}, which is smooth and not piecewise "
                f"linear; it is linearized at the given point like everything but the chosen ReLU",
                stacklevel=levels_to_the_user(),
            )

    @property
    def graph(self) -> NetworkGraph:
        """The network's operations, recorded when first needed; an error if the network has no fixed graph."""
        with one_at_a_time:
            known, addresses = self._knowledge, [x.data_ptr() for x in self._tensors()]
            moved = known.graph_addresses is not None and known.graph_addresses != addresses
            if known.graph is None or moved:
                known.graph = self._steadily(lambda: traced_graph(self.network, self.image, self.caller))
                # a module reached only through an object of the user's keeps its weights inside the graph
                inside_graph = {x.data_ptr() for x in known.graph.fixed.values()} & set(addresses)
                known.graph_addresses = addresses if inside_graph else None
            return known.graph

    def kept(self, key: Any, make: Callable[[], Result], unless: Callable[[Result], bool] | None = None) -> Result:
        """The result of `make()`, kept for later calls with this key unless derivatives are enabled.

        A result for which `unless(result)` is true is not kept: it holds the network itself, which would then never be
        freed; nor is one during which another thread changed the weights. A result may hold numbers computed from the
        weights. It is made anew if the weights lie elsewhere in memory, or if torch has counted changes of them and
        their values differ; `answer` notices other changes.
        """
        if torch.is_grad_enabled():
            return self._steadily(make)
        addresses, versions = [x.data_ptr() for x in self._tensors()], self._versions()
        with one_at_a_time:
            cached = self._knowledge.cached
            entry = cached.get(key)
            if entry is not None and (entry.addresses, entry.versions) != (addresses, versions):
                weights = self._weights()
                if entry.addresses == addresses and equal_tensors(entry.weights, weights):
                    entry = _Cached(entry.value, weights, addresses, versions)
                else:
                    entry = None
                    for name, other in list(cached.items()):
                        if (other.addresses, other.versions) != (addresses, versions):
                            del cached[name]
            if entry is None:
                weights = self._weights()
                value = self._steadily(make)
                if (unless is not None and unless(value)) or self._versions() != versions:
                    return value
                entry = _Cached(value, weights, addresses, versions)
                self._await_device()
            cached[key] = entry
        result: Result = entry.value
        return result

    def _await_device(self) -> None:
        """Wait for a GPU to finish its work, since a kept result may be used next on a stream that would not wait."""
        if self.image.is_cuda and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(self.image.device).synchronize()

    def answer(self, compute: Callable[[], Result]) -> Result:
        """`compute()` from what is known, and once more if the network turns out to have changed.

        The check comes after `compute`, or when that calls `look`: on a GPU the host can do it while the device works.
        """
        self._unchecked, self._outdated = True, False
        try:
            result = compute()
            outdated = self.renewed() if self._unchecked else self._outdated
        except Exception:
            if not (self._outdated or self.renewed()):
                raise
            outdated = True
        finally:
            self._unchecked = False
        return compute() if outdated else result

    def look(self) -> None:
        """Check what is known now instead of at the end of `answer`; without effect outside one."""
        if self._unchecked:
            self._unchecked, self._outdated = False, self.renewed()

    def renewed(self) -> bool:
        """Check what is known, bring it up to date, and say whether anything was out of date."""
        known = self._knowledge
        if known.operations != operations_of(self.network, self.image):
            with one_at_a_time:
                by_kind = _known[self.given]
                for kind in [kind for kind, value in by_kind.items() if value is known]:
                    del by_kind[kind]
            self._learn()
            return True
        if known.cached:
            weights = self._weights()
            with one_at_a_time:
                for entry in known.cached.values():
                    if not all(map(torch.equal, entry.weights, weights)) and not equal_tensors(entry.weights, weights):
                        known.cached.clear()
                        return True
        return False

    def _weights(self) -> list[Tensor]:
        """A copy of all parameters and buffers: one long vector for each dtype and device."""
        by_place: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for x in self._tensors():
            by_place.setdefault((x.dtype, x.device), []).append(x.detach().flatten())
        return list(map(torch.cat, by_place.values()))

    def _tensors(self) -> list[Tensor]:
        return [*self.network.parameters(), *self.network.buffers()]

    def _versions(self) -> list[int]:
        """torch's count of the changes of each of the user's weights, which misses those through `.data`."""
        tensors = *self.given.parameters(), *self.given.buffers()
        return [0 if x.is_inference() else x._version for x in tensors]

    def __call__(self, inputs: Tensor) -> Tensor:
        """The scores (N, d) of inputs (N, ...)."""
        scores: Tensor = self.network(inputs)
        return scores

    def __repr__(self) -> str:
        return (
            f"NetworkModel({type(self.network).__name__}, inputs {tuple(self.image.shape[1:])}, {self.outputs} scores, "
            f"{len(self.relus)} ReLUs)"
        )


def relus(network: Any, example: Tensor) -> tuple[Relu, ...]:
    """Every ReLU call of a network in order, with its name, shape and size; `example` is a batch (N, ...) of inputs.

    >>> network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    >>> relus(network, torch.zeros(1, 3))
    (Relu(index=0, name='1', shape=torch.Size([4])),)
    """
    example = require_float_tensor("relus", "example", example)
    return NetworkModel.of(network, example, "relus").relus


def network_of(network: Any, caller: str) -> nn.Module:
    """The module that a user's argument stands for, in eval mode.

    A model stands for its network, a compiled module for the one it was made from, and an exported program for an
    `ExportedNetwork`, which takes any batch. Any other module stands for itself.
    """
    if isinstance(network, NetworkModel):
        network = network.given
    if isinstance(network, torch.export.ExportedProgram):
        network = _network_of_program(network)
    if isinstance(network, fx.GraphModule) and hasattr(network, "_guards_fn"):
        network = ExportedNetwork(network)
    if type(network).__name__ == "OptimizedModule" and isinstance(network, nn.Module):
        network = network._modules.get("_orig_mod", network)  # what torch.compile was given
    if not isinstance(network, nn.Module):
        raise TypeError(f"{caller}: network must be a torch.nn.Module or an exported program, got {describe(network)}")
    if isinstance(network, torch.jit.ScriptModule):
        raise TypeError(
            f"{caller}: a scripted or traced network cannot be looked into; pass the module it was made from, export "
            f"that with torch.export, or sample it with netmoments.monte_carlo, which takes any function"
        )
    if any(map(_training, network.modules())):
        refuse_training(network, caller)
    if any(map(is_lazy, network.parameters())):
        raise ValueError(f"{caller}: the network has weights that are not made yet (lazy modules); run it once first")
    return network


_programs: Any = WeakIdKeyDictionary()
"""The network of each exported program, and the tensors it was made with, as long as the program lives."""


def _network_of_program(program: torch.export.ExportedProgram) -> ExportedNetwork:
    """The network of an exported program, the same at each call unless the program's tensors were replaced.

    It must be the same because knowledge is kept by network.
    """
    tensors = [*program.state_dict.values(), *program.constants.values()]
    network, tensors_then = _programs.get(program, (None, ()))
    if network is None or len(tensors_then) != len(tensors) or any(map(is_not, tensors_then, tensors)):
        network = ExportedNetwork(program.module())
        _programs[program] = network, tensors
    return network


_training = attrgetter("training")


@dataclass(eq=False)
class _Knowledge:
    """What is known of a network for inputs of one shape, dtype and device. It does not hold the network."""

    trace: Trace
    operations: list[tuple[Any, ...]]
    """What the network did when it was looked at, from `operations_of`."""
    attributes: list[Any]
    """What it had in its modules then, from `attributes_of`."""
    parts: tuple[OutputPart, ...] | None = None
    """What its outputs are; None if it returns scores (N, d) itself."""
    graph: NetworkGraph | None = None
    graph_addresses: list[int] | None = None
    """Where the weights lay when the graph was recorded, if the graph holds some of them itself (see `graph`)."""
    cached: dict[Any, _Cached] = field(default_factory=dict)
    """What `kept` has made, by its key."""
    warned: bool = False
    """Whether the user was warned of smooth functions."""

    def may_be_outdated(self, network: nn.Module) -> bool:
        """Whether something may have changed that the operations of a run do not show.

        Python may decide by an attribute, a threshold say, in inputs that were not tried. What a run changes is private
        to a copy, which would not have the attributes of now.
        """
        if self.trace.changes_buffers:
            return True
        return self.trace.reads_values and self.attributes != attributes_of(network)


class _Cached(NamedTuple):
    """A value made from the graph and the weights, and the weights as they were then."""

    value: Any
    weights: list[Tensor]
    addresses: list[int]
    """Where each weight lay in memory."""
    versions: list[int]
    """torch's count of the changes of each weight, which misses those through `.data` or in inference mode."""


_known: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], _Knowledge]] = WeakKeyDictionary()
"""What is known, by network and kind of input, as long as the network lives."""


class _Constant:
    """A tensor that a run used but did not make, and that is no parameter or buffer; compared by its values."""

    def __init__(self, value: Tensor) -> None:
        self.value = value.detach().clone()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Constant) or self.value.shape != other.value.shape:
            return False
        same = self.value.dtype == other.value.dtype and self.value.device == other.value.device
        return same and equal_tensors([self.value], [other.value])

    def __hash__(self) -> int:
        return hash(self.value.shape)


class _Recorder(RandomOperations):
    """Records every operation of a run with its arguments: numbers as they are, tensors by where they come from."""

    operations: list[tuple[Any, ...]]
    origins: WeakIdKeyDictionary
    """Where a tensor comes from: 0 for the input, −k for tensor k of the network, n for the result of operation n."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.operations.append((func, self._described(args), self._described(kwargs)))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for made in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(made, Tensor) and made not in self.origins:
                self.origins[made] = len(self.operations)
        return result

    def _described(self, value: Any) -> Any:
        """An argument in a form that can be compared with that of another run."""
        if isinstance(value, Tensor):
            origin = self.origins.get(value)
            if origin is not None:
                return origin, None if value.is_nested else value.shape  # of a padded sequence, say: it has no shape
            return _Constant(value)
        if isinstance(value, float) and value != value:  # NaN differs from itself
            return "nan"
        if isinstance(value, list | tuple):
            return list(map(self._described, value))
        if isinstance(value, dict):
            return dict(zip(value, map(self._described, value.values()), strict=True))
        if isinstance(value, torch.ScriptObject):  # packed weights, a profiler's record: cannot be compared
            return type(value)
        return value


def operations_of(network: nn.Module, image: Tensor) -> list[tuple[Any, ...]]:
    """Every operation of a run on one image: two runs with equal lists compute the same function of the weights.

    The values of parameters and buffers do not count, only which of them are used. All numbers and other tensors that
    enter do count, wherever the network keeps them.
    """
    with torch.inference_mode(False), torch.no_grad(), full_precision():
        x, recorder = image.detach().clone(), _Recorder()
        recorder.operations, recorder.origins = [], WeakIdKeyDictionary()
        for place, tensor in enumerate((x, *network.parameters(), *network.buffers())):
            recorder.origins[tensor] = -place
        with random_state_kept(x.device, recorder):
            network(x)
    return recorder.operations
