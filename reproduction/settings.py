"""What every reproduction is told: how much of it, where, from which seed, and by which engine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from netmoments.sweep.item import Engine, Sweep
from netmoments.sweep.run import Results, Unfinished, run_sweep
from netmoments.sweep.store import require_same
from reproduction.runs import Machine, Recorded


@dataclass(frozen=True)
class Settings:
    out: Path
    engine: Engine
    device: torch.device
    images: int = 10_000
    samples: int = 10_000
    seed: int = 0
    data_dir: Path | None = None
    weights: Path | None = None
    """Weights of the network in place of the shipped ones."""
    model: str = "lenet"
    """The network that figure-1 draws: of the zoo, an exported program, or file.py:factory."""
    layer: int | str = -1
    """The ReLU that figure-1 keeps."""
    deadline: float | None = None
    """When to stop, on the clock of `time.monotonic`; what is finished by then is kept."""
    started: float = field(default_factory=time.monotonic)
    used: list[str] = field(default_factory=list)
    """The sweeps that were asked for."""

    @property
    def here(self) -> torch.device:
        """Where this process itself computes: a Ray cluster may have GPUs where this machine has none."""
        return self.device if self.device.type != "cuda" or torch.cuda.is_available() else torch.device("cpu")

    def run(self, sweep: Sweep) -> Results:
        """All results of a sweep: those kept from earlier runs, and what was missing."""
        left = None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
        self.used.append(sweep.name)
        engine = Recorded(self.engine, self.out, Machine.here(self.device))
        return run_sweep(sweep, self.out, engine, seconds=left)

    def check(self, *sweeps: Sweep) -> None:
        """That what is in the output folder of these sweeps is of this configuration, before anything is computed."""
        require_same(self.out, sweeps, self.engine.device_type)

    def require_time(self, name: str, done: int, total: int, unit: str) -> None:
        """Before other long work than a sweep's: that the time is not over."""
        if self.deadline is not None and time.monotonic() >= self.deadline:
            raise Unfinished(name, done, total, unit, time.monotonic() - self.started)
