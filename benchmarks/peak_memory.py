"""How much memory a piece of work takes at its highest, and how long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

Result = TypeVar("Result")


class Cost(NamedTuple):
    seconds: float
    bytes: int | None
    """None where the system does not tell."""


def measured(work: Callable[[], Result], device: torch.device) -> tuple[Result, Cost]:
    """What `work` returns, its wall time, and the memory it took beyond what was in use.

    On a GPU that is what torch allocated; on a CPU the growth of the resident memory, which pieces that were freed and
    are used again do not show: a lower bound.
    """
    before = _start(device)
    start = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    peak = _peak(device)
    return result, Cost(seconds, None if before is None or peak is None else max(0, peak - before))


def _start(device: torch.device) -> int | None:
    """Forget earlier peaks; what is in use now."""
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
