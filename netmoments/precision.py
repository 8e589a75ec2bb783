"""Settings of the whole process, changed so that threads do not disturb each other; and products in full precision.

torch and Python keep some things once for all threads: the precision of float32 products, the use of cuDNN, the levels
of forward-mode derivatives, the random state, the filters of warnings. Each has a block here that changes it safely.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd import Function
from torch.func import jvp
from torch.utils._python_dispatch import TorchDispatchMode

SUPPORTED_DTYPES = (torch.float32, torch.float64)

one_at_a_time = threading.RLock()
"""Held while a network is looked at and during forward-mode derivatives, where threads would disturb each other. One
lock serves both, since each may happen inside the other."""

_settings_lock = threading.Lock()
"""Held while the settings of torch, and the counts of threads below, are changed."""
_filters_lock = threading.RLock()
"""Held while warnings are filtered."""
_inside = 0
"""How many `full_precision` blocks are open, in all threads."""
_without_cudnn = 0
"""How many `without_cudnn` blocks are open, in all threads."""
_cudnn_before = True
"""Whether cuDNN was enabled before the first of these."""
_replaced: list[tuple[Any, str]] = []
"""Float32 settings that `full_precision` has changed, with their values before."""
_backends: list[Any] = []
"""The float32 settings of the backends that can be in use, found when first needed."""


@contextmanager
def full_precision() -> Iterator[None]:
    """Inside this block, neither a backend nor autocast rounds float32 inputs to TF32 or bfloat16.

    cuDNN convolutions use TF32 by default; its 10-bit mantissa is noise far above sigma = 0.001. The backends' settings
    belong to the process: they are changed when a thread enters, and put back when the last one leaves.
    """
    global _inside
    thread = threading.current_thread()
    if _ending and thread is not threading.main_thread():
        raise SystemExit  # a daemon thread ends here, silently, instead of somewhere inside torch
    with _settings_lock:
        _inside += 1
        if thread.daemon:
            _daemons.add(thread)
        if not _backends:
            cudnn: Any = torch.backends.cudnn
            mkldnn: Any = torch.backends.mkldnn
            _backends.extend([mkldnn.matmul, mkldnn.conv, mkldnn.rnn])
            if torch.cuda.is_available():
                _backends.extend([torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn])
        for backend in _backends:
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
        with _settings_lock:
            _inside = max(0, _inside - 1)
            while _inside == 0 and _replaced:
                backend, precision = _replaced.pop()
                backend.fp32_precision = precision


_ending = False
"""Whether the interpreter is about to end."""
_daemons: WeakSet[threading.Thread] = WeakSet()
"""Daemon threads that have been inside `full_precision`."""
LAST_SECONDS, GRACE = 5.0, 0.5
"""Seconds that the end of the interpreter waits at most for daemon threads: in all, and after none is inside
`full_precision` any more, since between two such blocks they may be in torch too."""


@atexit.register
def _let_threads_leave() -> None:
    """Wait for daemon threads: one that returns from torch when the interpreter is gone would abort the process."""
    global _ending
    _ending = True
    now = time.monotonic()
    deadline, patience = now + LAST_SECONDS, now + GRACE
    while now < deadline and any(thread.is_alive() for thread in list(_daemons)):
        if not _inside and now > patience:
            break
        patience = now + GRACE if _inside else patience
        time.sleep(0.005)
        now = time.monotonic()


def _forget_threads() -> None:
    """In a forked process, release what other threads held: these are gone, and would never do so."""
    global _settings_lock, _filters_lock, _inside, _without_cudnn
    if _without_cudnn:
        torch.backends.cudnn.enabled = _cudnn_before
    _settings_lock, _filters_lock, _inside, _without_cudnn = threading.Lock(), threading.RLock(), 0, 0
    one_at_a_time._at_fork_reinit()  # type: ignore[attr-defined]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Inside this block, cuDNN is off: its recurrent layers have no derivatives in eval mode, while torch's own have.

    The first thread to enter turns it off for all, and the last one to leave restores the setting.
    """
    global _without_cudnn, _cudnn_before
    cudnn: Any = torch.backends.cudnn
    with _settings_lock:
        _cudnn_before = cudnn.enabled if _without_cudnn == 0 else _cudnn_before
        _without_cudnn += 1
        cudnn.enabled = False
    try:
        yield
    finally:
        with _settings_lock:
            _without_cudnn = max(0, _without_cudnn - 1)
            if _without_cudnn == 0:
                cudnn.enabled = _cudnn_before


@contextmanager
def quietly(beginning: str = "") -> Iterator[None]:
    """Inside this block, warnings that begin with `beginning` (by default all) are not shown; one thread at a time.

    If two threads changed Python's filters at once, the last one to leave would restore those of the other.
    """
    with _filters_lock, warnings.catch_warnings():
        warnings.filterwarnings("ignore", beginning)
        yield


class RandomOperations(TorchDispatchMode):
    """Notices operations that draw random numbers.

    Modes for torch's functions do not see the operations again here: what C++ or a scripted module calls, they could
    not see in other runs.
    """

    seen = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen |= torch.Tag.nondeterministic_seeded in func.tags
        with torch._C.DisableTorchFunction():
            return func(*args, **(kwargs or {}))


@contextmanager
def random_state_kept(device: torch.device, operations: RandomOperations | None = None) -> Iterator[None]:
    """A block after which torch's random state is as before, also where a network in it drew random numbers.

    `operations` notices whether it did, and may do more than that.
    """
    on_gpu = device.type == "cuda"
    state, gpu_state = torch.get_rng_state(), torch.cuda.get_rng_state(device) if on_gpu else None
    operations = RandomOperations() if operations is None else operations
    try:
        with operations:
            yield
    finally:
        if operations.seen:  # only then, since all threads share this state
            torch.set_rng_state(state)
            if gpu_state is not None:
                torch.cuda.set_rng_state(gpu_state, device)


def value_and_slope(
    function: Callable[..., Tensor], at: tuple[Tensor, ...], direction: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """The value of a function at a point, and its derivative along a direction, in forward mode; one thread at a time.

    torch counts the levels of forward mode for all threads together: if two threads used it at once, one would lose its
    derivatives when the other ends.
    """
    with one_at_a_time:
        value, slope = jvp(function, at, direction)[:2]
    return value, slope


Product = Callable[[Tensor, Tensor], Tensor]


def _bilinear(product: Product, by_first: Product, by_second: Product) -> Product:
    """`product(a, b)` in full precision, backward too, which autograd alone would run under the user's settings.

    `by_first(grad, b)` and `by_second(grad, a)` are its gradients before broadcast dimensions are summed.
    """

    class Bilinear(Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(a: Tensor, b: Tensor) -> Tensor:
            with full_precision():
                return product(a, b)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
            a, b = ctx.saved_tensors
            needs_a, needs_b = ctx.needs_input_grad
            return (
                by_first(grad, b).sum_to_size(a.shape) if needs_a else None,
                by_second(grad, a).sum_to_size(b.shape) if needs_b else None,
            )

        @staticmethod
        def jvp(ctx: Any, tangent_a: Tensor | None, tangent_b: Tensor | None) -> Tensor:
            a, b = ctx.saved_tensors
            pairs = [(tangent_a, b), (a, tangent_b)]
            terms = [Bilinear.apply(x, y) for x, y in pairs if x is not None and y is not None]
            return sum(terms[1:], terms[0])

    return Bilinear.apply


_matmul = _bilinear(torch.matmul, lambda grad, b: matmul(grad, b.mT), lambda grad, a: matmul(a.mT, grad))
_row_products = _bilinear(
    lambda a, b: torch.einsum("...ij,...ij->...i", a, b),  # batched products, without a temporary of the size of a
    lambda grad, b: grad.unsqueeze(-1) * b,
    lambda grad, a: grad.unsqueeze(-1) * a,
)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """The matrix product of (..., i, j) and (..., j, k) without TF32, forward and backward."""
    return _matmul(a, b)


def matvec(matrix: Tensor, vector: Tensor) -> Tensor:
    """The product of (..., i, j) and (..., j), with broadcast batch dimensions.

    Dimensions that only the vector has (samples, say) become columns of one product, so that the matrix is not copied.
    """
    extra = vector.dim() - (matrix.dim() - 1)
    if extra <= 0:
        return matmul(matrix, vector.unsqueeze(-1)).squeeze(-1)
    columns = vector.flatten(0, extra - 1).movedim(0, -2)
    return matmul(columns, matrix.mT).movedim(-2, 0).unflatten(0, vector.shape[:extra])


def row_products(a: Tensor, b: Tensor) -> Tensor:
    """The scalar products of corresponding rows of (..., i, j) and (..., i, j): (..., i), the diagonals of a bᵀ."""
    return _row_products(a, b)
