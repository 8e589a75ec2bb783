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
        if command is None:
            command = shlex.join(["netmoments", *sys.argv[1:]])
        date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        return cls(command, date, __version__, pytorch.__version__, platform.python_version(), _name_of(device), seed)


def _name_of(device: pytorch.device) -> str:
    if device.type == "cuda":
        return pytorch.cuda.get_device_name(device) if pytorch.cuda.is_available() else "GPUs elsewhere"
    threads = pytorch.get_num_threads()
    return f"CPU, {threads} thread{'s' if threads > 1 else ''}"
