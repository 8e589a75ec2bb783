"""A network as this library knows it: looked at once, its graph and what is made of it kept, checked at every use.

`NetworkModel` is the one way from a user's network to anything that is computed about it, and the only place where
something is kept between calls.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from netmoments.checks import describe, require_float_tensor
from netmoments.network.graph import NetworkGraph, traced_graph
from netmoments.network.relu_calls import Relu, Trace, find_relu
from netmoments.network.replica import operations_of
from netmoments.network.validate import as_network, examined, require_inputs

Found = TypeVar("Found")
Versions = tuple[tuple[int, int], ...]

_lock = threading.RLock()
"""Held while a network is looked at or traced, so that threads with one network do it once."""


class _Made(NamedTuple):
    """Something made from the graph and the weights, which it is good for as long as these stay."""

    value: Any
    weights: Tensor
    versions: Versions


@dataclass(eq=False)
class _Knowledge:
    """What is known of a network for inputs of one shape, dtype and device. It does not hold the network."""

    trace: Trace
    operations: list[tuple[Any, ...]]
    """What a run of the network did when it was looked at."""
    graph: NetworkGraph | None = None
    made: dict[Any, _Made] = field(default_factory=dict)
    warned: bool = False


_known: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], _Knowledge]] = WeakKeyDictionary()
"""What is known, by network and kind of input, as long as the network lives."""


def network_of(network: Any, caller: str) -> nn.Module:
    """The module that a user's argument means: a module in eval mode, an exported program, or a model's network."""
    return as_network(network.network if isinstance(network, NetworkModel) else network, caller)


class NetworkModel:
    """A network, looked at with an example of its input; it can be passed wherever a network can.

    The first use with inputs of a shape looks at the network (is it a function of each image by itself? which ReLUs does
    it call?), and, for methods that go layer by layer, records its graph. Both are kept as long as the network lives, so
    passing the network itself costs no more; a `NetworkModel` says so in the code, and shows what was found.

    The network is never changed. What is known is checked at every use against what the network does now: weights,
    attributes, replaced modules, flags may change between calls.

    Args:
        network: a module in eval mode, or an exported program.
        example: an input, or a batch (N, ...) of inputs: what the network can take.

    >>> model = NetworkModel(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval(), torch.zeros(1, 3))
    >>> model.outputs, [relu.name for relu in model.relus]
    (2, ['1'])
    """

    def __init__(self, network: Any, example: Tensor) -> None:
        caller = "NetworkModel"
        example = require_float_tensor(caller, "example", example)
        one, batch = example.unsqueeze(0), example
        readings = {1: [one], 2: [batch, one], 3: [one, batch]}.get(example.dim(), [batch])
        for reading in readings:
            try:
                return self._look_at(network_of(network, caller), reading, caller)
            except ValueError:  # the network's first run says how the example is meant
                if reading is readings[-1]:
                    raise

    @classmethod
    def of(cls, network: Any, inputs: Tensor, caller: str) -> NetworkModel:
        """The model of a network, or of a model's network, for a batch (N, ...) of inputs; errors name the caller."""
        model = cls.__new__(cls)
        model._look_at(network_of(network, caller), inputs, caller)
        return model

    def _look_at(self, network: nn.Module, inputs: Tensor, caller: str) -> None:
        require_inputs(network, inputs, caller)
        self.network = network
        self.image = inputs[:1].detach()
        """An example of the input, (1, ...)."""
        self._caller = caller
        self._knowledge = self._known_or_found()

    @property
    def relus(self) -> tuple[Relu, ...]:
        """Every ReLU call in order, with its name, shape and size."""
        return self._knowledge.trace.relus

    @property
    def outputs(self) -> int:
        """How many scores the network has."""
        return self._knowledge.trace.output.shape[1]

    @property
    def largest(self) -> int:
        """Elements of the largest tensor that any call returns, for one image."""
        return self._knowledge.trace.largest

    def relu(self, layer: int | str) -> Relu:
        """The ReLU that `layer` names: a number counted from either end, or a name."""
        return find_relu(self.relus, layer)

    def require_derivatives(self) -> None:
        """A network that changes with its input but has no derivative there cannot be linearized."""
        if not self._knowledge.trace.differentiable:
            raise ValueError(
                f"{self._caller}: the network's scores change with the input but their derivative is zero or missing: "
                f"forward is under torch.no_grad(), detaches the input, or rounds it; take that out, or use sampling"
            )

    def warn_of_smooth(self) -> None:
        """A warning that names the smooth functions that will be linearized, once a network."""
        smooth = self._knowledge.trace.smooth
        if smooth and not any(known.warned for known in _known.get(self.network, {}).values()):
            self._knowledge.warned = True
            warnings.warn(
                f"{self._caller}: the network calls {', '.join(smooth)}, which is smooth and not piecewise "
                f"linear; it is linearized at the given point like everything but the chosen ReLU",
                stacklevel=4,
            )

    @property
    def graph(self) -> NetworkGraph:
        """The network's operations, recorded when first asked for; an error where it has no fixed graph."""
        with _lock:
            if self._knowledge.graph is None:
                self._knowledge.graph = traced_graph(self.network, self.image, self._caller)
            return self._knowledge.graph

    def kept(self, key: Any, make: Callable[[], Found]) -> Found:
        """What `make` gives, kept for the next time if no derivative in the weights is wanted.

        It may hold numbers that were computed from the weights: it is made anew where torch counts that these were
        changed and they differ, or where they lie elsewhere. What torch does not count, `answer` notices.
        """
        if torch.is_grad_enabled():
            return make()
        with _lock:
            found, versions = self._knowledge.made.get(key), self._versions()
            if found is None or [place for place, _ in found.versions] != [place for place, _ in versions]:
                found = _Made(make(), self._weights(), versions)
            elif found.versions != versions:
                weights = self._weights()
                same = torch.equal(found.weights, weights)
                found = _Made(found.value if same else make(), weights, versions)
            self._knowledge.made[key] = found
            value: Found = found.value
            return value

    def answer(self, compute: Callable[[], Found]) -> Found:
        """`compute()` from what is known, and once more if the network turns out to have changed since.

        The check comes last: on a GPU the host is then free for it while the answer is computed.
        """
        try:
            found = compute()
        except Exception:
            if not self._renewed():
                raise
        else:
            if not self._renewed():
                return found
        return compute()

    def refreshed(self) -> NetworkModel:
        """Itself, once what is known has been checked: for what does not go through `answer`."""
        self._renewed()
        return self

    def _renewed(self) -> bool:
        """Whether something that is known was out of date; it is found anew then."""
        known = self._knowledge
        if known.operations != operations_of(self.network, self.image):
            with _lock:
                _known.get(self.network, {}).pop(self._key(), None)
            self._knowledge = self._known_or_found()
            return True
        if known.made:
            weights = self._weights()
            if not all(torch.equal(made.weights, weights) for made in known.made.values()):
                known.made.clear()
                return True
        return False

    def _known_or_found(self) -> _Knowledge:
        with _lock:
            every, key = _known.setdefault(self.network, {}), self._key()
            if key not in every:
                trace = examined(self.network, self.image, self._caller)
                every[key] = _Knowledge(trace, operations_of(self.network, self.image))
            return every[key]

    def _key(self) -> tuple[Any, ...]:
        return self.image.shape, self.image.dtype, self.image.device

    def _tensors(self) -> tuple[Tensor, ...]:
        return (*self.network.parameters(), *self.network.buffers())

    def _weights(self) -> Tensor:
        """A copy of all parameters and buffers, end to end."""
        given = [x.detach().flatten() for x in self._tensors()]
        return torch.cat(given) if given else torch.zeros(0)

    def _versions(self) -> Versions:
        """Where they lie, and how often torch knows them to have changed: not by way of `.data`, nor in inference mode."""
        return tuple((x.data_ptr(), 0 if x.is_inference() else x._version) for x in self._tensors())

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
    if not isinstance(example, Tensor):
        raise TypeError(f"relus: example must be a batch (N, ...) of inputs, got {describe(example)}")
    return NetworkModel.of(network, example, "relus").refreshed().relus
