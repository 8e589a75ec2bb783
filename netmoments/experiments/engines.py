"""Which engine carries out the sweeps, and on what."""

from __future__ import annotations

import torch

from netmoments.sweep import Engine, LocalEngine, RayEngine

NAMES = ("local", "ray")


def engine_named(name: str, device: torch.device, address: str | None = None) -> Engine:
    """local: this process, or every GPU here where the device is `cuda` without a number. ray: a Ray cluster."""
    if name not in NAMES:
        raise ValueError(f"no engine {name!r}; there are {' and '.join(NAMES)}")
    if name == "ray":
        return RayEngine(device.type, address, threads=torch.get_num_threads())
    if address is not None:
        raise ValueError(f"an address ({address}) is for the engine ray; give --engine ray too")
    return LocalEngine(_local_devices(device))


def _local_devices(device: torch.device) -> list[str]:
    if device.type == "cuda" and device.index is None and torch.cuda.device_count() > 1:
        return [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    return [str(device)]
