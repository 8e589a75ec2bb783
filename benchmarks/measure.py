"""Measure time (medians), peak memory and how often classes win, and describe the machine."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

import netmoments as nm

Result = TypeVar("Result")
SETTLED = 0.5
"""The least seconds of repeats, since the first few runs of short work wait for threads and clocks."""


def seconds(work: Callable[[], object], repeats: int = 9, patience: float = 4.0) -> float:
    """Median time of `work` after two warm-up calls; fewer repeats (at least three) once `patience` is used up."""
    begun = time.perf_counter()
    work()
    work()
    taken: list[float] = []
    while (len(taken) < repeats or sum(taken) < SETTLED) and (len(taken) < 3 or time.perf_counter() - begun < patience):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return sorted(taken)[len(taken) // 2]


class Cost(NamedTuple):
    seconds: float
    bytes: int | None
    """None where the system does not report it."""


def measured(work: Callable[[], Result], device: torch.device) -> tuple[Result, Cost]:
    """The result of `work`, its wall time, and the memory it took beyond what was in use.

    On a GPU that is what torch allocated. On a CPU it is the growth of resident memory, a lower bound: pieces that were
    freed and reused do not show.
    """
    before = _start(device)
    start = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    peak = _peak(device)
    return result, Cost(seconds, None if before is None or peak is None else max(0, peak - before))


def class_frequencies(
    network: Callable[[Tensor], Tensor], noise: nm.Gaussian, samples: int, *, seed: int = 0
) -> Tensor:
    """How often each class has the largest score under noise, (*batch_shape, classes), in float64, from plain samples.

    A frequency f has the standard error √(f(1−f)/samples).
    """

    def winner(x: Tensor) -> Tensor:
        scores = network(x)
        return torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).to(x.dtype)

    return nm.monte_carlo(winner, noise, samples, seed=seed).mean


def _start(device: torch.device) -> int | None:
    """Reset earlier peaks, and return the memory in use now."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return _resident("VmRSS")


def _peak(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _resident("VmHWM")


def _resident(field: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), None)


def extra_mebibytes(work: Callable[[], object]) -> float:
    """How far `work` raises the peak resident memory of this process."""
    extra = measured(work, torch.device("cpu"))[1].bytes
    if extra is None:
        raise RuntimeError("peak memory is read from /proc/self/status, which is there on Linux only")
    return extra / 2**20


def machine() -> str:
    """Describe processor, threads and versions, for the head of a record."""
    processor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        processor = names[0] if names else processor
    return (
        f"{processor}, {torch.get_num_threads()} threads, Python {platform.python_version()}, torch {torch.__version__}"
    )
