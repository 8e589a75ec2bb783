"""Where a result came from: the command, the versions, the seed, the machine, the time."""

from __future__ import annotations

import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from datetime import UTC, datetime

import torch as pytorch

from netmoments import __version__
from netmoments.experiments.runs import Machine


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
    def of_this_run(
        cls, device: pytorch.device, seed: int, command: str | None = None, machines: Sequence[Machine] = ()
    ) -> Provenance:
        """Now; on these machines, or here; the command is the one that was typed unless another is given."""
        if command is None:
            command = shlex.join(["netmoments", *sys.argv[1:]])
        date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        machines = machines or [Machine.here(device)]
        devices, torches = (" and ".join(dict.fromkeys(names)) for names in zip(*map(astuple, machines), strict=True))
        return cls(command, date, __version__, torches, platform.python_version(), devices, seed)
