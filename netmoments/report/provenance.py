"""Where a result came from: the command, the versions, the seed, the machine, the time."""

from __future__ import annotations

import platform
import shlex
import sys
from dataclasses import dataclass
from datetime import UTC, datetime

import torch as pytorch

from netmoments import __version__


@dataclass(frozen=True)
class Provenance:
    command: str
    date: str
    netmoments: str
    torch: str
    python: str
    device: str
    seed: int

    @classmethod
    def of_this_run(cls, device: pytorch.device, seed: int, command: str | None = None) -> Provenance:
        """Now, here; the command is the one that was typed unless another is given."""
        name = (
            pytorch.cuda.get_device_name(device)
            if device.type == "cuda"
            else f"CPU, {pytorch.get_num_threads()} threads"
        )
        if command is None:
            command = shlex.join(["netmoments", *sys.argv[1:]])
        date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        return cls(command, date, __version__, pytorch.__version__, platform.python_version(), name, seed)
