"""How much memory a linearization may use, and what to say when it would need more."""

from __future__ import annotations

import os

import torch

WORKING_BYTES = {"cpu": 256 * 2**20, "cuda": 4 * 2**30}
COPIES = 6
"""Tensors of the size of the largest activation that a direction's pass holds at a time: values, gradients, scratch."""

DIRECTIONS = 64
"""Directions of each point that go through the network together, at least, before points are put together."""


def memory_limit(device: torch.device, budget: int | None) -> int:
    """The bytes a linearization may keep: the budget if there is one, else half of what is free on the device."""
    if budget is not None:
        if isinstance(budget, bool) or not isinstance(budget, int) or budget <= 0:
            raise ValueError(f"memory_budget must be a positive number of bytes, got {budget!r}")
        return budget
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 2
    return _free_memory() // 2


def points_at_once(device: torch.device, elements: int, itemsize: int, budget: int | None) -> int:
    """How many points are linearized together, so that a good number of directions of each fit."""
    return max(1, directions_at_once(device, elements, itemsize, budget) // DIRECTIONS)


def directions_at_once(device: torch.device, elements: int, itemsize: int, budget: int | None) -> int:
    """How many directions go through a network at a time, each with `elements` numbers in its largest activation."""
    working = WORKING_BYTES.get(device.type, WORKING_BYTES["cpu"])
    working = working if budget is None else min(working, max(1, budget // 2))
    return max(1, working // (COPIES * elements * itemsize))


def gigabytes(count: float) -> str:
    """A number of bytes, to be read."""
    if count >= 1e10:
        return f"{count / 1e9:,.0f} GB"
    return f"{count / 1e9:.2g} GB" if count >= 1e8 else f"{count / 1e6:.2g} MB"


def _free_memory() -> int:
    """What the system says is available, without swapping."""
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (ValueError, OSError, AttributeError):
        return 4 * 2**30
