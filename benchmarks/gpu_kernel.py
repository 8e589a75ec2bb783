"""The GPU's kernels as ratios to a copy of the matrix, accuracy checked in the same run: `make bench-gpu`.

    python -m benchmarks.gpu_kernel                                  # the table
    python -m benchmarks.gpu_kernel --sweep float32:64,8,128         # other tiles: side, warps, registers

Needs a CUDA device, torch, numpy and triton only.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from importlib import import_module
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from netmoments.relu import fused, kernels
from netmoments.relu.covariance import relu_covariance
from netmoments.relu.form import layer_form, layer_form_diagonal

UNITS = 8192
OUTPUTS = 10
LAYERS = {"weak": 784, "strong": 8}
PROMISED = {torch.float32: 5e-7, torch.float64: 1e-14}
FORWARD_LIMIT = {torch.float32: 2, torch.float64: 12}
"""Copies of the matrix that the covariance may cost."""


def layer(rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Means of order 1, a covariance of unit variances and correlations of order 1/√rank, and weights."""
    generator = torch.Generator("cuda").manual_seed(rank)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, device="cuda", generator=generator)

    factor = torch.nn.functional.normalize(normal(UNITS, rank), dim=1)
    covariance = factor @ factor.T
    weights = normal(OUTPUTS, UNITS) / UNITS**0.5
    return normal(UNITS).to(dtype), covariance.to(dtype), weights.to(dtype)


def milliseconds(call: Callable[[], object], repeats: int = 20) -> float:
    """Median time on the device of one call, launches and waiting for the host included."""
    started = perf_counter()
    while perf_counter() - started < 0.2:  # until the device's clocks are up
        call()
        torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000)  # the host runs ahead, as it does in a network: what is timed is the device
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def plain(call: Callable[[], Any]) -> Any:
    """A call with Triton kept out of it."""
    present, kernels.PRESENT = kernels.PRESENT, False
    try:
        return call()
    finally:
        kernels.PRESENT = present


def copy_milliseconds(dtype: torch.dtype) -> float:
    source = torch.rand(UNITS, UNITS, dtype=dtype, device="cuda")
    target = torch.empty_like(source)
    return milliseconds(lambda: target.copy_(source))


def exponential_milliseconds(dtype: torch.dtype) -> float:
    source = torch.rand(UNITS, UNITS, dtype=dtype, device="cuda")
    return milliseconds(lambda: torch.exp(source, out=source))


def sweep(candidate: str) -> None:
    """Times of the covariance and of the form's diagonal with the tiles that the text names."""
    name, numbers = candidate.split(":")
    dtype = getattr(torch, name)
    fused.TILES[dtype] = fused.Shape(*map(int, numbers.split(",")))
    fused._weak.cache_clear()
    fused._strong.cache_clear()
    row = []
    for rank in LAYERS.values():
        mean, covariance, weights = layer(rank, dtype)
        row.append(milliseconds(partial(relu_covariance, mean, covariance), 8))
        row.append(milliseconds(partial(layer_form_diagonal, mean, covariance, weights), 8))
    weak, weak_form, strong, strong_form = (f"{x:.3f}" for x in row)
    print(f"{candidate:22} ms: covariance {weak} weak {strong} strong, diagonal {weak_form}, {strong_form}", flush=True)
    for name, rank in LAYERS.items():
        mean, covariance, weights = layer(rank, dtype)
        calls = (partial(relu_covariance, mean, covariance), partial(layer_form_diagonal, mean, covariance, weights))
        print(f"    {name}: {', '.join(kernel_microseconds(calls))}", flush=True)


def kernel_microseconds(calls: tuple[Callable[[], object], ...]) -> list[str]:
    """The average time of each kernel on the device."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for call in calls * 3:
            call()
        torch.cuda.synchronize()
    return [f"{x.key[:28]} {x.device_time:.0f}" for x in profile.key_averages() if x.device_time >= 1]


def rows(dtype: torch.dtype, name: str, rank: int, copy: float) -> None:
    """The covariance of one layer and its forms, forward and backward."""
    mean, covariance, weights = layer(rank, dtype)
    exact = plain(partial(relu_covariance, mean.double(), covariance.double()))
    call = partial(relu_covariance, mean, covariance)
    error = float((call().double() - exact).abs().max())  # the variances are 1
    time = show(dtype, name, "covariance", call, copy, f"error {error:.1e} (promised {PROMISED[dtype]:.0e})")
    reached = error <= PROMISED[dtype] and time <= FORWARD_LIMIT[dtype] * copy
    print(f"    at most {FORWARD_LIMIT[dtype]} copies: {'reached' if reached else 'NOT REACHED'}")
    wide = weights.double() @ exact
    for label, form, value in (
        ("diag(B K Bᵀ)", layer_form_diagonal, (wide * weights).sum(1)),
        ("B K Bᵀ", layer_form, wide @ weights.double().T),
    ):
        call = partial(form, mean, covariance, weights)
        error = float((call() - value).abs().max() / value.abs().max())
        show(dtype, name, label, call, copy, f"relative error {error:.1e}")
    del exact, wide
    upstream = torch.randn_like(covariance) / UNITS
    inputs = [x.requires_grad_() for x in (mean, covariance, weights)]
    show(dtype, name, "covariance, backward", partial(differentiate, relu_covariance, inputs[:2], upstream), copy)
    for label, form, grad in (
        ("diag(B K Bᵀ), backward", layer_form_diagonal, upstream[0, :OUTPUTS]),
        ("B K Bᵀ, backward", layer_form, upstream[:OUTPUTS, :OUTPUTS]),
    ):
        show(dtype, name, label, partial(differentiate, form, inputs, grad), copy)


def differentiate(function: Callable[..., Tensor], inputs: list[Tensor], upstream: Tensor) -> object:
    return torch.autograd.grad(function(*inputs), inputs, upstream)


def show(dtype: torch.dtype, name: str, what: str, call: Callable[[], object], copy: float, remark: str = "") -> float:
    """Print a line; the time in milliseconds."""
    time, slow = milliseconds(call), milliseconds(partial(plain, call), 3)
    print(
        f"{str(dtype)[6:]}  {name:6}  {what:22} {time:8.3f} ms = {time / copy:5.1f} copies, "
        f"plain version {slow / time:5.1f} × as long  {remark}",
        flush=True,
    )
    return time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", nargs="*", default=[], help="tiles to try: dtype:side,warps,registers")
    chosen = parser.parse_args()
    triton = import_module("triton")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    for candidate in chosen.sweep:
        sweep(candidate)
    if chosen.sweep:
        return
    for dtype in PROMISED:
        copy, exponential = copy_milliseconds(dtype), exponential_milliseconds(dtype)
        print(f"{str(dtype)[6:]}, p = {UNITS}: copy {copy:.3f} ms, exp {exponential / copy:.1f} copies")
        for name, rank in LAYERS.items():
            rows(dtype, name, rank, copy)


if __name__ == "__main__":
    main()
