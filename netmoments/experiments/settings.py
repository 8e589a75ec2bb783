"""What every reproduction is told: how much of it, where, from which seed, and by which engine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from netmoments.sweep import Engine, Results, Sweep, run_sweep


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

    @property
    def here(self) -> torch.device:
        """Where this process itself computes: a Ray cluster may have GPUs where this machine has none."""
        return self.device if self.device.type != "cuda" or torch.cuda.is_available() else torch.device("cpu")

    def run(self, sweep: Sweep) -> Results:
        """All results of a sweep: those kept from earlier runs, and what was missing."""
        left = None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
        return run_sweep(sweep, self.out, self.engine, seconds=left)
