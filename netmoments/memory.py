"""How much is worked on at a time: one rule for the size of every piece of work.

Work is cut into pieces by the bytes that one of its entries takes. What a piece may take depends on the kind of work
and on the device only:

| kind       | CPU     | GPU    | what it is                                                                        |
|------------|---------|--------|-----------------------------------------------------------------------------------|
| `inputs`   | 1 MiB   | 64 MiB | inputs of a network that runs on its own: its activations should stay in a cache   |
| `cache`    | 2 MiB   | 1 GiB  | numbers that are looked at several times: what a CPU's cache holds, or fills a GPU |
| `scratch`  | 16 MiB  | 1 GiB  | temporary numbers of a tile of pairs                                              |
| `pass`     | 32 MiB  | 1 GiB  | numbers that pass through an affine part of a network once                        |
| `backward` | 256 MiB | 4 GiB  | activations kept for derivatives                                                  |
| `matrices` | 1 GiB   | 16 GiB | Jacobians that are kept                                                           |
"""

from __future__ import annotations

import os
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["inputs", "cache", "scratch", "pass", "backward", "matrices"]

MIB = 2**20
PIECE: dict[str, dict[Kind, int]] = {
    "cpu": {
        "inputs": MIB, "cache": 2 * MIB, "scratch": 16 * MIB, "pass": 32 * MIB, "backward": 256 * MIB,
        "matrices": 1024 * MIB,
    },
    "cuda": {
        "inputs": 64 * MIB, "cache": 1024 * MIB, "scratch": 1024 * MIB, "pass": 1024 * MIB, "backward": 4096 * MIB,
        "matrices": 16384 * MIB,
    },
}  # fmt: skip
"""Bytes that a piece of work of each kind may take."""

DIRECTIONS = 64
"""Directions of each point that go through the network together, at least, before points are put together."""


def piece_bytes(kind: Kind, device: torch.device) -> int:
    """Bytes that a piece of this kind of work may take on a device."""
    return PIECE.get(device.type, PIECE["cpu"])[kind]


def elements_together(kind: Kind, like: Tensor, each: int, budget: int | None = None) -> int:
    """How many entries, of `each` numbers like those of a tensor, make one piece; at least 1.

    Of a caller's budget of bytes a piece takes half at most: the rest is for what comes of it.
    """
    piece = PIECE.get(like.device.type, PIECE["cpu"])[kind]
    piece = piece if budget is None else min(piece, budget // 2)
    return max(1, piece // max(1, each * like.element_size()))


def scratch_budget(device: torch.device, memory_budget: int | None) -> int:
    """Bytes of scratch memory for tiles of pairs: the caller's, or a piece of that kind."""
    if memory_budget is None:
        return piece_bytes("scratch", device)
    if isinstance(memory_budget, bool) or not isinstance(memory_budget, int) or memory_budget < 2**16:
        raise ValueError(f"memory_budget must be a number of bytes, at least 65536, got {memory_budget!r}")
    return memory_budget


def memory_limit(device: torch.device, budget: int | None) -> int:
    """The bytes that results of intermediate steps may keep: the budget if there is one, else half of what is free."""
    if budget is not None:
        if isinstance(budget, bool) or not isinstance(budget, int) or budget <= 0:
            raise ValueError(f"memory_budget must be a positive number of bytes, got {budget!r}")
        return budget
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 2
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 512
    except OSError:
        pass
    try:  # no such file: half of the half that others have left, say
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    except (ValueError, OSError, AttributeError):
        return 2 * 2**30


def points_together(points: Tensor, each: int, most: int, budget: int | None) -> tuple[int, int]:
    """How many points (N, ...) go through a network at a time, and how many directions of each; both at least 1.

    A direction takes `each` numbers; `most` points go together whatever there is room for.
    """
    directions = elements_together("backward", points, each, budget)
    together = min(max(1, directions // DIRECTIONS), most, len(points))
    return together, max(1, directions // together)


def matrices_together(like: Tensor, each: int, budget: int | None) -> int:
    """How many Jacobians, of `each` numbers like those of a tensor, are held at a time; at least 1."""
    limit = memory_limit(like.device, budget)
    if budget is None:
        limit = min(limit, PIECE.get(like.device.type, PIECE["cpu"])["matrices"])
    return max(1, limit // (each * like.element_size()))


def gigabytes(count: float) -> str:
    """A number of bytes, to be read."""
    if count >= 1e10:
        return f"{count / 1e9:,.0f} GB"
    return f"{count / 1e9:.2g} GB" if count >= 1e8 else f"{count / 1e6:.2g} MB"
