"""Float32 products at float32 precision, whatever the caller allowed globally."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
    """Inside this block nothing rounds float32 inputs to TF32 or bfloat16: not a backend, not autocast.

    cuDNN convolutions use TF32 by default; its 10-bit mantissa is noise far above sigma = 0.001. The backends' settings
    are global to the process: those that need it are changed when a thread enters, put back when the last one leaves.
    """
    global _inside
    with _lock:
        _inside += 1
        for backend in _backends():
            if backend.fp32_precision not in ("ieee", "none"):
                _replaced.append((backend, backend.fp32_precision))
                backend.fp32_precision = "ieee"
    try:
        with ExitStack() as stack:
            for device in ("cpu", "cuda"):
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
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
    """Product of (..., i, j) and (..., j), with broadcast batch dimensions.

    Dimensions that only the vector has (samples, say) become columns of one product: the matrix is never copied.
    """
    extra = vector.dim() - (matrix.dim() - 1)
    if extra <= 0:
        return matmul(matrix, vector.unsqueeze(-1)).squeeze(-1)
    columns = vector.flatten(0, extra - 1).movedim(0, -2)
    return matmul(columns, matrix.mT).movedim(-2, 0).unflatten(0, vector.shape[:extra])


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
