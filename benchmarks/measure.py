"""Time as medians in one process, memory as the peak of a process of its own."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.peak_memory import measured

SETTLED = 0.5
"""Seconds of repeats at least: the first few of short work wait for threads and clocks."""


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


def extra_mebibytes(work: Callable[[], object]) -> float:
    """How far `work` raises the resident memory of this process at its highest."""
    extra = measured(work, torch.device("cpu"))[1].bytes
    if extra is None:
        raise RuntimeError("peak memory is read from /proc/self/status, which is there on Linux only")
    return extra / 2**20


def in_a_process_of_its_own(module: str, *arguments: object) -> Any:
    """The JSON that `python -m module arguments…` prints last."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    environment = os.environ | {"MALLOC_TRIM_THRESHOLD_": "131072"}  # memory given back counts as given back
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def machine() -> str:
    """Processor, threads and versions, for the head of a record."""
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
