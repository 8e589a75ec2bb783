"""Which calls are ReLUs, however they are written, and which are smooth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from netmoments.checks import describe

Call = Callable[..., Any]
aten = torch.ops.aten

_RELUS: set[Call] = {functional.relu, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_}
_RELUS |= {aten.relu.default, aten.relu_.default}
_CLAMPS: set[Call] = {torch.clamp, torch.clamp_, torch.clip, torch.clip_, Tensor.clamp, Tensor.clamp_, Tensor.clip}
_CLAMPS |= {Tensor.clip_, aten.clamp.default, aten.clamp_.default}
_LOWER_CLAMPS: set[Call] = {torch.clamp_min, torch.clamp_min_, Tensor.clamp_min, Tensor.clamp_min_}
_LOWER_CLAMPS |= {aten.clamp_min.default, aten.clamp_min_.default}
_THRESHOLD: Call = functional.threshold  # a function of Python, which passes on another name
_THRESHOLDS: set[Call] = {_THRESHOLD, torch.threshold, torch.threshold_}
_THRESHOLDS |= {aten.threshold.default, aten.threshold_.default}

_SMOOTH = {
    "gelu", "sigmoid", "silu", "softmax", "softmin", "softplus", "tanh", "elu", "selu", "celu", "mish",
    "hardswish", "hardsigmoid", "logsigmoid", "log_softmax", "log_sigmoid", "softsign", "tanhshrink", "exp",
    "expm1", "log", "log1p", "erf", "sin", "cos", "sqrt", "rsqrt", "pow", "square", "reciprocal",
    "layer_norm", "group_norm", "instance_norm", "rms_norm", "normalize", "scaled_dot_product_attention",
    "native_layer_norm", "multi_head_attention_forward", "local_response_norm", "cosine_similarity", "bilinear",
    "lstm", "gru", "rnn_tanh", "lstm_cell", "gru_cell", "rnn_tanh_cell", "glu", "logsumexp", "prod", "atan", "erfc",
    "exp2", "log2", "log10", "sinh", "cosh",
}  # fmt: skip


def is_relu(function: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call computes max(x, 0): relu in all its spellings, clamp(min=0), threshold(0, 0)."""
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
    """The name of a smooth nonlinear function, None for everything else."""
    name = _name(function).rstrip("_")
    return name if name in _SMOOTH else None


def _name(function: Call) -> str:
    """`relu` for torch.relu, functional.relu and aten.relu.default alike."""
    name: str = getattr(function, "__name__", "")
    return name.split(".")[0]


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], position: int, name: str) -> Any:
    return args[position] if len(args) > position else kwargs.get(name)


def _is_zero(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.requires_grad and bool((value == 0).all())
    return value is not None and value == 0
