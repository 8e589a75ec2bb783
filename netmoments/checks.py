"""Checks of arguments, whose errors say what was wanted, what came, and how to fix it.

Most take the name of the public function that was called, `caller`, and the name of its argument. `random_seed` makes
the seeds of samples from the one that was checked.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from netmoments.precision import SUPPORTED_DTYPES

LARGEST = 10**30
"""The largest integer whose digits are shown."""


def describe(value: Any) -> str:
    """A value that a user passed, in a few words: `a float32 tensor of shape (3, 4)`, `a str`."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        if value.is_nested:
            return f"a nested {dtype} tensor"
        return f"a {dtype} tensor of shape {tuple(value.shape)}"
    if isinstance(value, int) and abs(value) > LARGEST:
        return f"an integer of {value.bit_length()} bits"  # its digits would fill a page
    return f"{value!r}" if isinstance(value, int | float) else f"a {type(value).__name__}"


def unlike_plain(value: Tensor) -> str | None:
    """Why a tensor is not a plain block of real numbers in memory, and how to fix that; None if it is one."""
    if value.is_nested:
        return "nested; pass its parts one by one, as .unbind() gives them, or pad them to one shape"
    if value.is_quantized:
        return "quantized; convert it with .dequantize()"
    if value.layout is not torch.strided:
        return f"{str(value.layout).removeprefix('torch.')}; convert it with .to_dense()"
    if value.is_complex():
        return "complex; pass its real and imaginary parts as real numbers, e.g. torch.view_as_real(value)"
    return None


def require_values(caller: str, name: str, value: Tensor) -> None:
    """Require a tensor with values, which those on the meta device have not."""
    if value.is_meta:
        raise TypeError(f"{caller}: {name} has no values, as it is on the meta device; load or compute them first")


def require_float_tensor(caller: str, name: str, value: Any) -> Tensor:
    """`value` if it is a float32 or float64 tensor, dense and with values, else a TypeError naming the argument."""
    value = _float_tensor(caller, name, value)
    require_values(caller, name, value)
    return value


def _float_tensor(caller: str, name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{caller}: {name} must be a torch tensor, got {describe(value)}; wrap it in torch.as_tensor(...)"
        )
    unlike = unlike_plain(value)
    if unlike is not None:
        raise TypeError(f"{caller}: {name} must be a plain tensor of real numbers, got one that is {unlike}")
    if value.dtype not in SUPPORTED_DTYPES:
        raise TypeError(
            f"{caller}: {name} must be float32 or float64, got {describe(value)}; convert it with .float() or .double()"
        )
    return value


def require_float_tensors(caller: str, **values: Any) -> tuple[Tensor, ...]:
    """All of `values` as float tensors of one dtype on one device, else a TypeError or ValueError naming them."""
    tensors = {name: _float_tensor(caller, name, value) for name, value in values.items()}
    first_name, first = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if tensor.dtype != first.dtype:
            raise TypeError(
                f"{caller}: {first_name} and {name} must have one dtype, got {first.dtype} and {tensor.dtype}; "
                f"convert one with .to(...)"
            )
        if tensor.device != first.device:
            raise ValueError(
                f"{caller}: {first_name} and {name} must be on one device, got {first.device} and {tensor.device}; "
                f"move one with .to(...)"
            )
    require_values(caller, first_name, first)
    return tuple(tensors.values())


def require_broadcastable(caller: str, **shapes: tuple[int, ...]) -> torch.Size:
    """The shape that the named shapes broadcast to, else a ValueError naming them."""
    listed = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
    try:
        common = torch.broadcast_shapes(*shapes.values())
    except RuntimeError:
        raise ValueError(f"{caller}: shapes must broadcast, got {listed}") from None
    if common.numel() == 0:
        raise ValueError(f"{caller}: shapes must not be empty, got {listed}")
    return common


def require_finite(caller: str, name: str, value: Tensor) -> None:
    """Require finite values, else raise a ValueError that counts the others."""
    finite = torch.isfinite(value)
    if not values_hold(finite):
        bad = int((~finite).sum())
        raise ValueError(f"{caller}: {name} must be finite, got {bad} NaN or infinite values in {describe(value)}")


def values_hold(condition: Tensor) -> bool:
    """Whether a boolean tensor is true everywhere; inside `torch.func.vmap`, where values cannot be read, True."""
    try:
        return bool(condition.all())
    except RuntimeError as error:
        if "vmap" in str(error):
            return True
        raise


def _shown(value: Any) -> str:
    return describe(value) if isinstance(value, int | Tensor) else f"{value!r}"


MOST_COUNTED = 2**53
"""The largest count that a user may ask for: beyond it, float64 does not hold every whole number."""


def require_count(caller: str, name: str, value: Any, *, least: int, most: int | None = MOST_COUNTED) -> None:
    """Require a whole number from `least` to `most`, else raise a ValueError naming the argument."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{caller}: {name} must be an integer of at least {least}, got {_shown(value)}")
    if most is not None and value > most:
        raise ValueError(f"{caller}: {name} must be an integer of at most {most}, got {_shown(value)}")


def require_positive(caller: str, name: str, value: Any, example: str) -> None:
    """Require a number above 0 whose square, and the inverse of that, are within the range of floats."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise ValueError(f"{caller}: {name} must be a number above 0, such as {example}, got {_shown(value)}")
    if not 1e-150 < value < 1e150:
        raise ValueError(f"{caller}: {name} must be between 1e-150 and 1e150, such as {example}, got {_shown(value)}")


def require_seed(caller: str, value: Any) -> int:
    """`value` if it is a whole number of at least 0, of any size, else a ValueError."""
    require_count(caller, "seed", value, least=0, most=None)
    return int(value)


def random_seed(seed: int, purpose: str, item: int) -> int:
    """A seed of 63 bits that depends on these three only, not on the order of the items or on where they are computed.

    A generator may use fewer bits: torch's on a CPU uses the lowest 32.
    """
    digest = hashlib.sha256(json.dumps([seed, purpose, item]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def require_sigma(caller: str, sigma: float | Tensor) -> float | Tensor:
    """`sigma` if it is a number or a tensor of finite numbers above 0, else an error."""
    if isinstance(sigma, bool) or not isinstance(sigma, int | float | Tensor):
        raise TypeError(f"{caller}: sigma must be a number or a tensor, got {sigma!r}")
    try:
        level = torch.as_tensor(sigma if isinstance(sigma, Tensor) else float(sigma))
    except OverflowError:
        level = torch.tensor(torch.inf)
    if not bool((level > 0).all()) or not bool(torch.isfinite(level).all()):
        raise ValueError(f"{caller}: sigma must be a standard deviation above 0, got {describe(sigma)}")
    return sigma


def levels_to_the_user() -> int:
    """The `stacklevel` with which a warning points to the user's line that called this package."""
    package, level, frame = str(Path(__file__).parent), 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        frame, level = frame.f_back, level + 1
    return level
