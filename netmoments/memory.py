"""How much is worked on at a time: one rule for the size of every piece of work.

Work is cut into pieces that fit into so many bytes, which depend on the kind of work and on the device only:

| kind       | CPU     | GPU    | what it holds                                                                       |
|------------|---------|--------|-------------------------------------------------------------------------------------|
| `inputs`   | 1 MiB   | 64 MiB | inputs of a network that is run plainly: its activations should stay in the cache   |
| `cache`    | 2 MiB   | 1 GiB  | numbers that are read several times: what a CPU's cache holds, or fills a GPU       |
| `scratch`  | 16 MiB  | 1 GiB  | temporary numbers of a tile of pairs                                                |
| `pass`     | 32 MiB  | 1 GiB  | numbers that pass through an affine part of a network once                          |
| `backward` | 256 MiB | 4 GiB  | activations kept for derivatives                                                    |
| `matrices` | 1 GiB   | 16 GiB | Jacobians that are kept                                                             |
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

SUMS_COPIES = 4
"""Sums over samples take up to so many times their own size while they are made and turned into estimates."""
DIRECTIONS = 64
"""Directions of a point that go through the network together; several points go together if there is room for more."""


def piece_bytes(kind: Kind, device: torch.device) -> int:
    """The bytes that a piece of this kind of work may take on a device."""
    return PIECE.get(device.type, PIECE["cpu"])[kind]


def elements_together(kind: Kind, like: Tensor, each: int, budget: int | None = None) -> int:
    """How many entries, each of `each` numbers of the dtype and on the device of `like`, make one piece; at least 1.

    If the caller allows a budget of bytes, a piece takes at most half of it: the rest is for its results.
    """
    limit = piece_bytes(kind, like.device)
    limit = limit if budget is None else min(limit, budget // 2)
    return max(1, limit // max(1, each * like.element_size()))


def scratch_budget(device: torch.device, memory_budget: int | None) -> int:
    """The bytes of scratch memory for tiles of pairs: the caller's budget, or else a piece of that kind."""
    if memory_budget is None:
        return piece_bytes("scratch", device)
    if isinstance(memory_budget, bool) or not isinstance(memory_budget, int) or memory_budget < 2**16:
        raise ValueError(f"memory_budget must be a number of bytes, at least 65536, got {memory_budget!r}")
    return memory_budget


def memory_limit(device: torch.device, budget: int | None) -> int:
    """The bytes that intermediate results may take: the caller's budget, or else half of the free memory."""
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
    try:  # no such file: a quarter of all memory
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    except (ValueError, OSError, AttributeError):
        return 2 * 2**30


def points_together(points: Tensor, each: int, most: int, budget: int | None) -> tuple[int, int]:
    """How many of the points (N, ...) go through a network at a time, and how many directions of each; both at least 1.

    A direction takes `each` numbers. At most `most` points go together.
    """
    directions = elements_together("backward", points, each, budget)
    together = min(max(1, directions // DIRECTIONS), most, len(points))
    return together, max(1, directions // together)


def matrices_together(like: Tensor, each: int, budget: int | None) -> int:
    """How many Jacobians, each of `each` numbers of the dtype of `like`, are held at a time; at least 1."""
    limit = memory_limit(like.device, budget)
    if budget is None:
        limit = min(limit, piece_bytes("matrices", like.device))
    return max(1, limit // (each * like.element_size()))


def inputs_together(mean: Tensor, pairs: int, outputs: int, products: bool, sums: int) -> int:
    """How many inputs, with means (E, ...), are sampled at a time, for d outputs of each.

    Each has both samples of some pairs, inputs and outputs, and so many sums in float64 for every output, or for every
    product of two. If the sums of one input do not fit, that is an error.
    """
    numbers = sums * (outputs**2 if products else outputs)
    needed = SUMS_COPIES * 8 * numbers
    if (
        products
        and needed > piece_bytes("backward", mean.device)
        and needed > (limit := memory_limit(mean.device, None))
    ):
        raise MemoryError(
            f"output_moments: sampling all covariances of {outputs:,} outputs takes {gigabytes(needed)} of the "
            f"{gigabytes(limit)} there are for it; choose some with outputs=, leave out covariance=True, or give a "
            f"formula without its comparison with samples, check=0"
        )
    return elements_together("backward", mean, 2 * pairs * (mean[0].numel() + outputs) + 2 * numbers)


def gigabytes(count: float) -> str:
    """A number of bytes in words, such as "1.2 GB"."""
    if count >= 1e10:
        return f"{count / 1e9:,.0f} GB"
    return f"{count / 1e9:.2g} GB" if count >= 1e8 else f"{count / 1e6:.2g} MB"
