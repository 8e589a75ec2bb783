"""The ReLUs that a network calls, found while it runs, and the network cut at one of them.

ReLUs are recognized as calls of torch functions, not as modules: `trace` runs a network under a `TorchFunctionMode`
that sees every call. `Cut` runs it again, and stops at the chosen call or replaces its output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import vmap
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from netmoments.checks import describe
from netmoments.network.exported import ExportedNetwork
from netmoments.network.interface import FlatNetwork

Call = Callable[..., Any]
aten = torch.ops.aten


@dataclass(frozen=True)
class Relu:
    """One call of a ReLU: its number in the order of calls, its name, and the shape of one image's pre-activations."""

    index: int
    name: str
    shape: torch.Size
    batched: bool = field(default=True, repr=False)
    """Whether the first dimension of its input counts images; if not, images are run one at a time."""

    @property
    def size(self) -> int:
        return self.shape.numel()


@dataclass(frozen=True)
class Trace:
    """What a network called and returned in a run on a batch."""

    relus: tuple[Relu, ...]
    smooth: tuple[str, ...]
    """The smooth functions it called, each with the module that called it: "tanh in body.2"."""
    output: Tensor
    largest: int
    """Elements of the largest tensor that any call returned, for one image."""
    shapes: tuple[torch.Size, ...]
    """Shapes of the ReLUs' inputs, with the whole batch."""
    differentiable: bool = True
    """False if the scores change with the input but have no derivative in it; set by `validate.examined`."""
    has_gradient: bool = True
    """Whether the scores have a gradient in the input, which a constant or a mere decision has not; set there too."""
    reads_values: bool = False
    """Whether Python gets to see values of tensors, by which it may decide what to do next."""
    changes_buffers: bool = False
    """Whether a run changes buffers of the network, as a counter of runs does; set by `validate.examined`."""


def trace(network: nn.Module, inputs: Tensor) -> Trace:
    """Run the network on a batch of inputs (N, ...) and record what it calls."""
    watcher = _Watcher(inputs.shape[0])
    with torch.no_grad(), _module_names(network, watcher.modules), watcher:
        output = network(inputs.clone())  # a copy, since the first call may be in place
    names = _exported_names(network.program) if isinstance(network, ExportedNetwork) else watcher.names
    numbered = zip(_numbered(names), watcher.shapes, strict=True)
    relus = tuple(Relu(index, name, shape[1:]) for index, (name, shape) in enumerate(numbered))
    return Trace(
        relus, tuple(dict.fromkeys(watcher.smooth)), output, watcher.largest, tuple(watcher.shapes),
        reads_values=watcher.reads_values,
    )  # fmt: skip


def with_batch_known(alone: Trace, pair: Trace) -> Trace:
    """The trace of one image, with `Relu.batched` set by comparison with the trace of two images.

    A ReLU is batched if its input grows from (1, ...) to (2, ...). Others see images folded into another dimension,
    (N·T, C) say, or are called once for each image.
    """
    same_calls = len(alone.shapes) == len(pair.shapes)

    def with_batched(relu: Relu) -> Relu:
        shape = alone.shapes[relu.index]
        if same_calls and shape[:1] == (1,) and pair.shapes[relu.index] == (2, *shape[1:]):
            return relu
        return replace(relu, shape=shape[1:] if shape[:1] == (1,) else shape, batched=False)

    return replace(alone, relus=tuple(with_batched(relu) for relu in alone.relus))


@dataclass(frozen=True, eq=False)
class Cut:
    """A network split at one ReLU: network(x) = head(x, relu(stem(x))).

    The head depends on x itself only through paths around the cut (skip connections).
    """

    network: nn.Module
    relu: Relu
    caller: str = "two_stage"
    """The public function that error messages name."""

    def stem(self, x: Tensor) -> Tensor:
        """The pre-activations z of the chosen ReLU, (N, *relu.shape), for inputs x, (N, ...)."""
        if self.relu.batched:
            return self._run(x, None)
        return vmap(lambda image: self._run(image.unsqueeze(0), None).reshape(self.relu.shape))(x)

    def head(self, x: Tensor, y: Tensor) -> Tensor:
        """The scores (N, d) of a run on x with y, (N, *relu.shape), in place of that ReLU's output."""
        if self.relu.batched:
            return self._run(x, y)
        return vmap(lambda image, output: self._run(image.unsqueeze(0), output).squeeze(0))(x, y)

    def _run(self, x: Tensor, y: Tensor | None) -> Tensor:
        """Run the network up to the ReLU for its input; or, with y in place of the ReLU's output, to the end."""
        network = self.network.program if isinstance(self.network, ExportedNetwork) else self.network
        try:
            with _AtRelu(self.relu.index, y):
                out: Tensor = network(x.clone())  # a copy, since the first call may be in place
        except _Reached as reached:
            return reached.value.to(x.dtype)  # it differs inside autocast, or with weights in half precision
        if y is None:
            raise RuntimeError(
                f"the network never reached its ReLU {self.relu.name!r}: it does not always do the same calls"
            )
        return out


def find_relu(relus: Sequence[Relu], layer: int | str) -> Relu:
    """The ReLU that `layer` names: a number counted from either end, or a name."""
    if isinstance(layer, int) and not isinstance(layer, bool) and -len(relus) <= layer < len(relus):
        return relus[layer]
    listed = ", ".join(f"{relu.index} {relu.name!r}" for relu in relus)
    if not relus:
        raise ValueError(
            "the network has no ReLU (nn.ReLU, relu(), clamp(min=0) were looked for; scripted modules cannot be looked "
            "into); without one, use method='linear' or method='sampling'"
        )
    if isinstance(layer, bool) or not isinstance(layer, int | str):
        raise TypeError(f"layer must be a number or a name, got {layer!r}; the ReLUs are: {listed}")
    if isinstance(layer, int):
        raise ValueError(f"layer {layer} is not one of the network's {len(relus)} ReLUs: {listed}")
    for relu in relus:
        if relu.name == layer:
            return relu
    calls = [relu.name for relu in relus if relu.name.rsplit("#", 1)[0] == layer]
    if calls:
        raise ValueError(f"{layer!r} calls a ReLU {len(calls)} times; choose one of {', '.join(calls)}")
    raise ValueError(f"no ReLU is named {layer!r}; the ReLUs are: {listed}")


class _Watcher(TorchFunctionMode):
    """Records the ReLUs and smooth functions that are called inside it, and the size of the largest result."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.modules: list[str] = []
        """The modules that are running, innermost last."""
        self.names: list[str] = []
        """The module that called each ReLU."""
        self.shapes: list[torch.Size] = []
        self.smooth: list[str] = []
        self.reads_values = False
        self.largest = 0
        self._batch = batch

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        module = self.modules[-1] if self.modules else "network"
        if is_relu(func, args, kwargs):
            self.names.append(module)
            self.shapes.append(pre_activations(args, kwargs).shape)
        elif (smooth := smooth_name(func)) is not None:
            self.smooth.append(f"{smooth} in {module}")
        self.reads_values |= _name(func) in _READS
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            self.largest = max(self.largest, -(-result.numel() // self._batch))
        return result


@contextmanager
def _module_names(network: nn.Module, stack: list[str]) -> Iterator[None]:
    """Inside this block, `stack` holds the names of the modules that are running, innermost last."""

    def entering(name: str) -> Callable[..., None]:
        return lambda *_: stack.append(name)

    def leaving(*_: Any) -> None:
        stack.pop()

    with ExitStack() as hooks:
        for name, module in network.named_modules():
            if isinstance(network, FlatNetwork):
                name = name.removeprefix("network").removeprefix(".")
            if not isinstance(module, torch.jit.ScriptModule | fx.GraphModule):
                hooks.enter_context(module.register_forward_pre_hook(entering(name or "network")))
                hooks.enter_context(module.register_forward_hook(leaving, always_call=True))
        yield


def _exported_names(network: fx.GraphModule) -> list[str]:
    """The module that each ReLU of an exported program came from, in the order of calls."""
    names = []
    for node in network.graph.nodes:
        if node.op == "call_function" and is_relu(node.target, node.args, node.kwargs):
            modules = node.meta.get("nn_module_stack") or {}
            path = next(reversed(modules.values()))[0] if modules else ""
            names.append(path or "network")
    return names


def _numbered(names: list[str]) -> list[str]:
    """The names with those that occur several times numbered: name#0, name#1, …"""
    times = Counter(names)
    seen: Counter[str] = Counter()
    unique = []
    for name in names:
        unique.append(name if times[name] == 1 else f"{name}#{seen[name]}")
        seen[name] += 1
    return unique


class _Reached(BaseException):
    """Carries a ReLU's input out of a run. It is no Exception, so that a network that catches those lets it through."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class _AtRelu(TorchFunctionMode):
    """Counts ReLU calls; call number `index` stops the run, or returns `instead` if that is given."""

    def __init__(self, index: int, instead: Tensor | None) -> None:
        super().__init__()
        self._left, self._instead = index, instead

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_relu(func, args, kwargs):
            self._left -= 1
            if self._left == -1:
                z = pre_activations(args, kwargs)
                if self._instead is None:
                    raise _Reached(z)
                value = self._instead.reshape(z.shape).to(z.dtype)
                if is_in_place(func, args, kwargs):  # later code may use z itself
                    return z.copy_(value)
                return value.clone()  # later code may change it
        return func(*args, **kwargs)


_RELUS: set[Call] = {functional.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_}
_RELUS |= {aten.relu.default, aten.relu_.default}
_CLAMPS: set[Call] = {torch.clamp, torch.clamp_, torch.clip, torch.clip_, Tensor.clamp, Tensor.clamp_, Tensor.clip}
_CLAMPS |= {Tensor.clip_, aten.clamp.default, aten.clamp_.default}
_LOWER_CLAMPS: set[Call] = {torch.clamp_min, torch.clamp_min_, Tensor.clamp_min, Tensor.clamp_min_}
_LOWER_CLAMPS |= {aten.clamp_min.default, aten.clamp_min_.default}
_THRESHOLD: Call = functional.threshold  # a Python function, which torch itself calls _threshold
_THRESHOLDS: set[Call] = {_THRESHOLD, torch.threshold, torch.threshold_}
_THRESHOLDS |= {aten.threshold.default, aten.threshold_.default}

_READS = {
    "item", "tolist", "numpy", "equal", "allclose", "is_nonzero", "__array__", "__bool__", "__contains__",
    "__complex__", "__float__", "__index__", "__int__",
}  # fmt: skip
"""Names of functions that give values of tensors to Python."""
_SMOOTH = {
    "gelu", "sigmoid", "silu", "softmax", "softmin", "softplus", "tanh", "elu", "selu", "celu", "mish",
    "hardswish", "hardsigmoid", "logsigmoid", "log_softmax", "log_sigmoid", "softsign", "tanhshrink", "exp",
    "expm1", "log", "log1p", "erf", "sin", "cos", "sqrt", "rsqrt", "pow", "square", "reciprocal",
    "layer_norm", "group_norm", "instance_norm", "rms_norm", "normalize", "scaled_dot_product_attention",
    "native_layer_norm", "multi_head_attention_forward", "local_response_norm", "cosine_similarity", "bilinear",
    "lstm", "gru", "rnn_tanh", "lstm_cell", "gru_cell", "rnn_tanh_cell", "glu", "logsumexp", "prod", "atan", "erfc",
    "exp2", "log2", "log10", "sinh", "cosh", "asinh", "acosh", "asin", "acos", "tan", "atanh", "atan2",
}  # fmt: skip
"""Names of torch functions that are smooth and not affine, so that they are linearized at a point."""


def is_relu(function: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call computes max(x, 0): relu in all its spellings, clamp(min=0), or threshold(0, 0)."""
    if function in _RELUS:
        return True
    if function in _CLAMPS:
        lower, upper = _argument(args, kwargs, 1, "min"), _argument(args, kwargs, 2, "max")
        return _is_zero(lower) and upper is None
    if function in _LOWER_CLAMPS:
        return _is_zero(_argument(args, kwargs, 1, "min"))
    if function in _THRESHOLDS:
        return _is_zero(_argument(args, kwargs, 1, "threshold")) and _is_zero(_argument(args, kwargs, 2, "value"))
    return False


def is_in_place(function: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a ReLU call overwrites its input."""
    position = {functional.relu: 1, _THRESHOLD: 3}.get(function)
    if position is not None:
        return bool(_argument(args, kwargs, position, "inplace"))
    return _name(function).endswith("_")


def pre_activations(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """The input of a ReLU call."""
    value = args[0] if args else kwargs.get("input", kwargs.get("self"))
    if not isinstance(value, Tensor):
        raise TypeError(f"a ReLU was called with {describe(value)} for its input")
    return value


def smooth_name(function: Call) -> str | None:
    """The name of a smooth nonlinear function; None for everything else."""
    name = _name(function).rstrip("_")
    return name if name in _SMOOTH else None


def _name(function: Call) -> str:
    """The name of a function without its overload: `relu` for torch.relu, functional.relu and aten.relu.default."""
    name: str = getattr(function, "__name__", "")
    return name.split(".")[0]


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], position: int, name: str) -> Any:
    return args[position] if len(args) > position else kwargs.get(name)


def _is_zero(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.requires_grad and bool((value == 0).all())
    return value is not None and value == 0
