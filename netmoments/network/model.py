"""A network as this library knows it: looked at once, its graph and what is made of it kept, checked at every use.

`NetworkModel` is the one way from a user's network to anything that is computed about it, and the only place where
something is kept between calls.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter, is_not
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from netmoments.checks import describe, require_float_tensor
from netmoments.network.exported import ExportedNetwork, exported_network
from netmoments.network.graph import NetworkGraph, traced_graph
from netmoments.network.interface import HALVES, Arguments, FlatNetwork, OutputPart, needs_flattening, output_parts
from netmoments.network.relu_calls import Cut, Relu, Trace, find_relu
from netmoments.network.validate import REFUSALS, examined, first_line, require_plain_weights
from netmoments.precision import full_precision, one_at_a_time

Found = TypeVar("Found")


class _Made(NamedTuple):
    """Something made from the graph and the weights, which it is good for as long as these stay."""

    value: Any
    weights: list[Tensor]
    addresses: list[int]
    """The addresses of the weights in memory."""
    versions: list[int]
    """How often torch knows them to have changed: not by way of `.data`, nor in inference mode."""


@dataclass(eq=False)
class _Knowledge:
    """What is known of a network for inputs of one shape, dtype and device. It does not hold the network."""

    trace: Trace
    operations: list[tuple[Any, ...]]
    """What a run of the network did when it was looked at."""
    parts: tuple[OutputPart, ...] | None = None
    """What its outputs are, if they are not scores (N, d) as they come."""
    graph: NetworkGraph | None = None
    graph_addresses: list[int] | None = None
    """Where the weights lay when the graph was recorded, if it holds some of them itself (see `graph`)."""
    made: dict[Any, _Made] = field(default_factory=dict)
    warned: bool = False


COPIES = 6
"""Tensors of the size of the largest activation that a pass with derivatives holds: values, gradients, scratch."""
KEPT_SHAPES = 32
"""Shapes of inputs of which something is remembered of a network: those that came last."""
_known: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], _Knowledge]] = WeakKeyDictionary()
"""What is known, by network and kind of input, as long as the network lives."""


def network_of(network: Any, caller: str) -> nn.Module:
    """The module that a user's argument means, in eval mode: as given, unwrapped if compiled, an exported program made
    callable with any batch, or a model's network.
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
        _refuse_training(network, caller)
    if any(map(is_lazy, network.parameters())):
        raise ValueError(f"{caller}: the network has weights that are not made yet (lazy modules); run it once first")
    return network


_programs: Any = WeakIdKeyDictionary()
"""Exported programs as networks, with the tensors that these were made with, as long as the programs live."""


def _network_of_program(program: torch.export.ExportedProgram) -> ExportedNetwork:
    """Made once, since what is known is known of the network, and anew if the program has other tensors by now."""
    tensors = [*program.state_dict.values(), *program.constants.values()]
    network, before = _programs.get(program, (None, ()))
    if network is None or len(before) != len(tensors) or any(map(is_not, before, tensors)):
        network = exported_network(program)
        _programs[program] = network, tensors
    return network


_training = attrgetter("training")


def _refuse_training(network: nn.Module, caller: str) -> None:
    """An error that names what is in training mode, unless it is inside an exported program, which has no modes."""
    if isinstance(network, ExportedNetwork):
        return
    if network.training:
        raise ValueError(
            f"{caller}: the network is in training mode, where dropout and batch normalisation are random; call "
            f"network.eval() first"
        )
    exported = {id(x) for module in network.modules() if isinstance(module, ExportedNetwork) for x in module.modules()}
    left_on = [
        name
        for name, module in network.named_modules()
        if module.training and id(module) not in exported and not any(child.training for child in module.children())
    ]
    if left_on:
        raise ValueError(f"{caller}: {', '.join(left_on[:4])} left in training mode; call network.eval()")


class NetworkModel:
    """A network, looked at with an example of its input; it can be passed wherever a network can.

    The first use with inputs of a shape looks at the network (is it a function of each image by itself? which ReLUs
    does it call?), and, for methods that go layer by layer, records its graph. Both are kept as long as the network
    lives, so passing the network itself costs no more; a `NetworkModel` shows what was found.

    The network is run, and never changed by this library. What is known is checked at every use against what the
    network does now, since weights, attributes, replaced modules and flags may change between calls: `answer` compares
    the operations of a run, and learns anew if they differ; then the weights, and drops what was made from others.

    Args:
        network: a module in eval mode, or an exported program.
        example: an input, or a batch (N, ...) of inputs: what the network can take.
        key: which output, for a network that returns several in a tuple or a dictionary; all by default.

    >>> model = NetworkModel(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval(), torch.zeros(1, 3))
    >>> model.outputs, [relu.name for relu in model.relus]
    (2, ['1'])
    """

    network: nn.Module
    """What is computed with: inputs (N, ...) in, scores (N, d) out."""
    given: nn.Module
    """The user's network; the same, unless its inputs or outputs are of another form."""
    parts: tuple[OutputPart, ...]
    """What the d outputs are, by name and shape."""
    image: Tensor
    """An example of the input, (1, ...)."""
    relus: tuple[Relu, ...]
    """Every ReLU call in order, with its name, shape and size."""
    outputs: int
    """How many scores the network has."""
    largest: int
    """Elements of the largest tensor that any call returns, for one image."""
    pass_size: int
    """Numbers that a pass with derivatives holds at a time, for one image and direction."""
    smooth: tuple[str, ...]
    """The smooth functions it calls, with the modules that do."""
    has_gradient: bool
    """Whether a gradient of the scores in the input can be asked for, and is not zero everywhere."""
    most_images: int
    """How many images the network takes at a time; some exported programs have a bound."""
    _caller: str
    _form: tuple[Arguments | None, str | int | None] | None
    """How the network is called, and which of its outputs is meant; None if it must return scores (N, d) itself."""
    _knowledge: _Knowledge
    _unseen = False
    """Whether `answer` still has to check what is known."""
    _changed = False
    """Whether a check in the midst of an answer found that something was out of date."""

    def __init__(self, network: Any, example: Tensor, *, key: str | int | None = None) -> None:
        caller = "NetworkModel"
        example = require_float_tensor(caller, "example", example)
        one, batch = example.unsqueeze(0), example
        readings = {1: [one], 2: [batch, one], 3: [one, batch]}.get(example.dim(), [batch])
        refusals = []
        for reading in readings:  # the network's first run says how the example is meant
            try:
                vars(self).update(vars(NetworkModel.of_any(network, reading, caller, key=key)))
                return
            except ValueError as error:
                refusals.append(error)
        raise next((error for error in refusals if "cannot take an input" not in str(error)), refusals[0])

    @classmethod
    def of(cls, network: Any, inputs: Tensor, caller: str) -> NetworkModel:
        """The model of a network, or of a model's network, for a batch (N, ...) of inputs; errors name the caller.

        What is known has been checked against what the network does now.
        """
        model = cls.__new__(cls)
        model.given = model.network = network_of(network, caller)
        model._form = None
        model._require_fitting(inputs, caller)
        model.image, model._caller = inputs[:1].detach(), caller
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
        """The same for a network of any arguments and outputs, as a function of rows; `answer` checks what is known."""
        model = cls.__new__(cls)
        if isinstance(network, NetworkModel) and network._form is not None and key is None:
            key = network._form[1]
        model.given = model.network = network_of(network, caller)
        model._form = arguments, key
        model._require_fitting(inputs, caller)
        model.image, model._caller = inputs[:1].detach(), caller
        model._learn()
        return model

    def _require_fitting(self, inputs: Tensor, caller: str) -> None:
        """An error unless there is a batch of inputs with the network's dtype and device."""
        if inputs.dim() < 2 or inputs.numel() == 0:
            raise ValueError(
                f"{caller}: the input must be a batch (N, ...) of at least one image, got {describe(inputs)}"
            )
        allowed = (inputs.dtype, *(() if self._form is None else HALVES))
        for name, parameter in self.given.named_parameters():
            if parameter.layout is not torch.strided:
                require_plain_weights(self.given, caller)
            if parameter.is_floating_point() and parameter.dtype not in allowed:
                raise TypeError(
                    f"{caller}: the network is {parameter.dtype} ({name}) but the input {inputs.dtype}; convert one, "
                    f"e.g. network.to({inputs.dtype})"
                )
            if parameter.device != inputs.device:
                raise ValueError(
                    f"{caller}: the network is on {parameter.device} ({name}) but the input on {inputs.device}; move "
                    f"one, e.g. input.to({str(parameter.device)!r})"
                )

    def _learn(self) -> None:
        """What is known of the network for such inputs, or is found now."""
        arguments, chosen = self._form or (None, None)
        form = None if arguments is None else arguments.key, chosen
        key = self.image.shape, self.image.dtype, self.image.device, form
        with one_at_a_time:
            every = _known.setdefault(self.given, {})
            while key not in every:
                before = [x._version for x in self._tensors() if not x.is_inference()]
                try:
                    parts = self._parts()
                    trace = examined(self.network, self.image, self._caller)
                    every[key] = _Knowledge(trace, operations_of(self.network, self.image), parts)
                except ValueError:  # while others train it, two runs may well differ
                    if before == [x._version for x in self._tensors() if not x.is_inference()]:
                        raise
            self._knowledge, self.network = every.pop(key), self.given
            every[key] = self._knowledge  # the latest last
            if len(every) > KEPT_SHAPES:
                del every[next(iter(every))]
            if self._knowledge.parts is not None and self._form is None:
                examined(self.given, self.image, self._caller)  # says that its outputs are no scores
            elif self._knowledge.parts is not None:
                self.network = FlatNetwork(self.given, arguments, chosen)
        trace = self._knowledge.trace
        self.relus, self.outputs, self.largest = trace.relus, trace.output.shape[1], trace.largest
        self.pass_size, self.has_gradient, self.smooth = COPIES * trace.largest, trace.has_gradient, trace.smooth
        whole = OutputPart("", trace.output.shape[1:], 0)
        self.parts = (whole,) if self._knowledge.parts is None else self._knowledge.parts
        bound = self.given.largest if isinstance(self.given, ExportedNetwork) else None
        self.most_images = 2**31 if bound is None else bound

    def _parts(self) -> tuple[OutputPart, ...] | None:
        """What the outputs are; None, and the network as it was given, if they are scores (N, d) as they come."""
        self.network = self.given
        if self._form is None:
            return None
        flat = FlatNetwork(self.given, *self._form)
        try:
            with full_precision():
                parts = output_parts(flat, self.image, self._caller)
        except REFUSALS as error:
            if str(error).startswith(f"{self._caller}: "):
                raise
            raise ValueError(
                f"{self._caller}: the network cannot take an input of shape {tuple(self.image.shape[1:])}: "
                f"{first_line(error)}"
            ) from error
        if not needs_flattening(parts, flat):
            return None
        self.network = flat
        return parts

    def relu(self, layer: int | str) -> Relu:
        """The ReLU that `layer` names: a number counted from either end, or a name."""
        if type(layer) is int and -len(self.relus) <= layer < len(self.relus):
            return self.relus[layer]
        try:
            return find_relu(self.relus, layer)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{self._caller}: {error}") from None

    def cut(self, layer: int | str) -> Cut:
        """The network as what is before and after that ReLU, to be linearized; see `require_linearizable`."""
        cut = Cut(self.network, self.relu(layer))
        self.require_linearizable()
        return cut

    def require_derivatives(self) -> None:
        """An error if the weights were made in a mode that derivatives cannot go through."""
        for parameter in self.network.parameters():
            if parameter.is_inference():
                raise ValueError(
                    f"{self._caller}: the network was made under torch.inference_mode(), so that it has no "
                    f"derivatives; make it outside, or use method='sampling'"
                )

    def require_differentiable(self) -> None:
        """An error if the network changes with its input but has no derivative there."""
        self.require_derivatives()
        if not self._knowledge.trace.differentiable:
            raise ValueError(
                f"{self._caller}: the network's scores change with the input but their derivative is zero or missing: "
                f"forward is under torch.no_grad(), detaches the input, rounds or only compares it, hands it to numpy, "
                f"or changes in place what a derivative needs; take that out, or use sampling"
            )

    def require_linearizable(self) -> None:
        """The same, and a warning of smooth functions that are linearized at a point, once a network."""
        self.require_differentiable()
        trace = self._knowledge.trace
        with one_at_a_time:
            new = trace.smooth and not any(known.warned for known in _known[self.given].values())
            self._knowledge.warned |= bool(new)
        if new:
            warnings.warn(
                f"{self._caller}: the network calls {', '.join(trace.smooth)}, which is smooth and not piecewise "
                f"linear; it is linearized at the given point like everything but the chosen ReLU",
                stacklevel=_levels_to_the_user(),
            )

    @property
    def graph(self) -> NetworkGraph:
        """The network's operations, recorded when first asked for; an error where it has no fixed graph."""
        with one_at_a_time:
            known, addresses = self._knowledge, [x.data_ptr() for x in self._tensors()]
            moved = known.graph_addresses is not None and known.graph_addresses != addresses
            if known.graph is None or moved:
                known.graph = traced_graph(self.network, self.image, self._caller)
                # a module that is reached through an object of the user's has its weights in the graph as they are
                held = {x.data_ptr() for x in known.graph.fixed.values()} & set(addresses)
                known.graph_addresses = addresses if held else None
            return known.graph

    def kept(self, key: Any, make: Callable[[], Found], unless: Callable[[Found], bool] | None = None) -> Found:
        """What `make` gives, kept for the next time if no derivative in the weights is wanted.

        `unless` says of what it gives whether it holds the network itself, which it would keep alive if it were kept.

        It may hold numbers that were computed from the weights: it is made anew where torch counts that these were
        changed and they differ, or where they lie elsewhere. What torch does not count, `answer` notices.
        """
        if torch.is_grad_enabled():
            return make()
        tensors = [*self.network.parameters(), *self.network.buffers()]
        addresses = [x.data_ptr() for x in tensors]
        versions = [0 if x.is_inference() else x._version for x in tensors]
        with one_at_a_time:
            every = self._knowledge.made
            found = every.get(key)
            if found is not None and (found.addresses, found.versions) != (addresses, versions):
                weights = self._weights()
                if found.addresses == addresses and _equal(found.weights, weights):
                    found = _Made(found.value, weights, addresses, versions)
                else:  # out of date, as is whatever was made before
                    found = None
                    for name, made in list(every.items()):
                        if (made.addresses, made.versions) != (addresses, versions):
                            del every[name]
            if found is None:
                value = make()
                if unless is not None and unless(value):
                    return value
                found = _Made(value, self._weights(), addresses, versions)
                self._finish()
            every[key] = found
        kept: Found = found.value
        return kept

    def _finish(self) -> None:
        """On a GPU, wait for what was asked of it: the next to use this may be on another stream, which would not."""
        if self.image.is_cuda and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(self.image.device).synchronize()

    def answer(self, compute: Callable[[], Found]) -> Found:
        """`compute()` from what is known, and once more if the network turns out to have changed since.

        The check comes last, or when `compute` calls `look`: on a GPU the host is free for it while the device works.
        """
        self._unseen, self._changed = True, False
        try:
            found = compute()
            changed = self.renewed() if self._unseen else self._changed
        except Exception:
            if not (self._changed or self.renewed()):
                raise
            changed = True
        finally:
            self._unseen = False
        return compute() if changed else found

    def look(self) -> None:
        """Check now what is known, instead of at the end of `answer`, if that is waiting for it."""
        if self._unseen:
            self._unseen, self._changed = False, self.renewed()

    def renewed(self) -> bool:
        """Whether something that is known was out of date; it is found anew then."""
        known = self._knowledge
        if known.operations != operations_of(self.network, self.image):
            with one_at_a_time:
                every = _known[self.given]
                for key in [key for key, value in every.items() if value is known]:
                    del every[key]
            self._learn()
            return True
        if known.made:
            weights = self._weights()
            with one_at_a_time:
                for made in known.made.values():
                    if not all(map(torch.equal, made.weights, weights)) and not _equal(made.weights, weights):
                        known.made.clear()
                        return True
        return False

    def _weights(self) -> list[Tensor]:
        """A copy of all parameters and buffers, end to end, for each dtype and device."""
        every: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for x in (*self.network.parameters(), *self.network.buffers()):
            every.setdefault((x.dtype, x.device), []).append(x.detach().flatten())
        return list(map(torch.cat, every.values()))

    def _tensors(self) -> list[Tensor]:
        return [*self.network.parameters(), *self.network.buffers()]

    def __call__(self, inputs: Tensor) -> Tensor:
        """The network itself."""
        scores: Tensor = self.network(inputs)
        return scores

    def __repr__(self) -> str:
        return (
            f"NetworkModel({type(self.network).__name__}, inputs {tuple(self.image.shape[1:])}, {self.outputs} scores, "
            f"{len(self.relus)} ReLUs)"
        )


def _equal(first: list[Tensor], second: list[Tensor]) -> bool:
    """Whether all tensors are the same, NaN being the same as NaN."""
    if len(first) != len(second):
        return False
    for x, y in zip(first, second, strict=True):
        if not torch.equal(x, y) and not (x.shape == y.shape and bool(((x == y) | (x.isnan() & y.isnan())).all())):
            return False
    return True


def _levels_to_the_user() -> int:
    """How many calls up the first one outside this package is, for a warning that points there."""
    package, level, frame = str(Path(__file__).parent.parent), 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        frame, level = frame.f_back, level + 1
    return level


def relus(network: Any, example: Tensor) -> tuple[Relu, ...]:
    """Every ReLU call of a network in order, with its name, shape and size; `example` is a batch (N, ...) of inputs.

    >>> network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    >>> relus(network, torch.zeros(1, 3))
    (Relu(index=0, name='1', shape=torch.Size([4])),)
    """
    example = require_float_tensor("relus", "example", example)
    return NetworkModel.of(network, example, "relus").relus


class _Constant:
    """A tensor that a run used but neither made nor found among the network's parameters and buffers."""

    def __init__(self, value: Tensor) -> None:
        self.value = value.detach().clone()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Constant) or self.value.shape != other.value.shape:
            return False
        same = self.value.dtype == other.value.dtype and self.value.device == other.value.device
        return same and _equal([self.value], [other.value])

    def __hash__(self) -> int:
        return hash(self.value.shape)


class _Recorder(TorchDispatchMode):
    """Every operation of a run with its arguments: numbers as they are, tensors by where they come from."""

    operations: list[tuple[Any, ...]]
    known: WeakIdKeyDictionary
    """Tensors of the network by their place, the input, and what operations have made by their number."""
    random = False
    """Whether an operation drew random numbers."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        self.operations.append((func, self._described(args), self._described(kwargs)))
        result = func(*args, **kwargs)
        for made in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(made, Tensor) and made not in self.known:
                self.known[made] = len(self.operations)
        return result

    def _described(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            known = self.known.get(value)
            return _Constant(value) if known is None else (known, value.shape)
        if isinstance(value, float) and value != value:  # NaN differs from itself
            return "nan"
        if isinstance(value, list | tuple):
            return list(map(self._described, value))
        if isinstance(value, dict):
            return dict(zip(value, map(self._described, value.values()), strict=True))
        if isinstance(value, torch.ScriptObject):  # packed weights, a profiler's record: not to be compared
            return type(value)
        return value


def operations_of(network: nn.Module, image: Tensor) -> list[tuple[Any, ...]]:
    """What a run on one image does, operation by operation: two lists are equal if the network is the same function.

    The values of parameters and buffers do not count, which of them are used does; so do all numbers and other tensors
    that enter, wherever the network keeps them.
    """
    with torch.inference_mode(False), torch.no_grad(), full_precision():
        x, before = image.detach().clone(), torch.get_rng_state()
        recorder = _Recorder()
        recorder.operations, recorder.known = [], WeakIdKeyDictionary()
        for place, tensor in enumerate((x, *network.parameters(), *network.buffers())):
            recorder.known[tensor] = -place
        with recorder:
            network(x)
        if recorder.random:  # only then: the state is that of all threads
            torch.set_rng_state(before)
    return recorder.operations
