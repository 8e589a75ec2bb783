"""Float32 products at float32 precision, whatever the caller allowed globally."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

SUPPORTED_DTYPES = (torch.float32, torch.float64)


_lock = threading.Lock()
_inside = 0
_replaced: list[tuple[Any, str]] = []


@contextmanager
def full_precision() -> Iterator[None]:
    """Inside this block no backend rounds float32 inputs to TF32 or bfloat16.

    cuDNN convolutions use TF32 by default; its 10-bit mantissa is noise far above sigma = 0.001. The settings are
    global to the process: they are changed when the first thread enters, only those that need it, and put back when the
    last one leaves.
    """
    global _inside
    with _lock:
        _inside += 1
        if _inside == 1:
            for backend in _backends():
                if backend.fp32_precision not in ("ieee", "none"):
                    _replaced.append((backend, backend.fp32_precision))
                    backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            while _inside == 0 and _replaced:
                backend, precision = _replaced.pop()
                backend.fp32_precision = precision


def _backends() -> list[Any]:
    """The float32 settings of the backends that can be in use."""
    cudnn: Any = torch.backends.cudnn
    mkldnn: Any = torch.backends.mkldnn
    found: list[Any] = [mkldnn.matmul, mkldnn.conv, mkldnn.rnn]
    return [torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn, *found] if torch.cuda.is_available() else found


class _Matmul(Function):
    """`a @ b` whose backward keeps full precision too (autograd would run it under the caller's settings)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        with full_precision():
            return a @ b

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        needs_a, needs_b = ctx.needs_input_grad
        grad_a = matmul(grad, b.mT).sum_to_size(a.shape) if needs_a else None
        grad_b = matmul(a.mT, grad).sum_to_size(b.shape) if needs_b else None
        return grad_a, grad_b

    @staticmethod
    def jvp(ctx: Any, tangent_a: Tensor | None, tangent_b: Tensor | None) -> Tensor:
        a, b = ctx.saved_tensors
        parts = []
        if tangent_a is not None:
            parts.append(matmul(tangent_a, b))
        if tangent_b is not None:
            parts.append(matmul(a, tangent_b))
        return sum(parts[1:], parts[0])


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Matrix product of (..., i, j) and (..., j, k) without TF32, forward and backward."""
    return _Matmul.apply(a, b)


def matvec(matrix: Tensor, vector: Tensor) -> Tensor:
    """Product of (..., i, j) and (..., j), with broadcast batch dimensions."""
    if matrix.dim() == 2 and vector.dim() > 1:
        return matmul(vector, matrix.mT)
    return matmul(matrix, vector.unsqueeze(-1)).squeeze(-1)


class _RowProducts(Function):
    """Σⱼ aᵢⱼbᵢⱼ as batched products, which need no temporary of the size of a and b."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        with full_precision():
            return torch.einsum("...ij,...ij->...i", a, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        needs_a, needs_b = ctx.needs_input_grad
        grad_a = (grad.unsqueeze(-1) * b).sum_to_size(a.shape) if needs_a else None
        grad_b = (grad.unsqueeze(-1) * a).sum_to_size(b.shape) if needs_b else None
        return grad_a, grad_b

    @staticmethod
    def jvp(ctx: Any, tangent_a: Tensor | None, tangent_b: Tensor | None) -> Tensor:
        a, b = ctx.saved_tensors
        parts = []
        if tangent_a is not None:
            parts.append(row_products(tangent_a, b))
        if tangent_b is not None:
            parts.append(row_products(a, tangent_b))
        return sum(parts[1:], parts[0])


def row_products(a: Tensor, b: Tensor) -> Tensor:
    """The scalar products of corresponding rows of (..., i, j) and (..., i, j): (..., i), the diagonal of a bᵀ."""
    return _RowProducts.apply(a, b)
