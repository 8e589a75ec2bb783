"""Everything a training run needs to go on, as tensors in one file, written whole after every epoch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from netmoments.network.weights import read_tensors, write_tensors


@dataclass
class TrainingState:
    """A network in training: its optimizer, the average of its weights, and the epochs done."""

    network: nn.Module
    average: nn.Module
    optimizer: Optimizer
    epoch: int = 0
    history: list[dict[str, float]] = field(default_factory=list)

    def save(self, path: Path, run: dict[str, str]) -> None:
        """`run` says which run this is (recipe, seed), so that another one never continues it."""
        tensors = {f"network.{name}": x for name, x in self.network.state_dict().items()}
        tensors |= {f"average.{name}": x for name, x in self.average.state_dict().items()}
        for number, entries in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{number}.{name}": torch.as_tensor(x) for name, x in entries.items()}
        progress = {"epoch": str(self.epoch), "history": json.dumps(self.history)}
        write_tensors(path, {name: x.clone() for name, x in tensors.items()}, run | progress)

    def resume(self, path: Path, run: dict[str, str]) -> None:
        """Go on from a saved state of the same run."""
        tensors, saved = read_tensors(path)
        changed = {key: value for key, value in run.items() if saved.get(key) != value}
        different = [f"{key} {saved.get(key)!r} there, {value!r} now" for key, value in changed.items()]
        if different:
            raise ValueError(
                f"{path} is of another run ({'; '.join(different)}); repeat that run's settings, or delete the file"
            )
        self.network.load_state_dict(_under("network.", tensors))
        self.average.load_state_dict(_under("average.", tensors))
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in _under("optimizer.", tensors).items():
            number, key = name.split(".", 1)
            state.setdefault(int(number), {})[key] = value
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": state})
        self.epoch = int(saved["epoch"])
        self.history = json.loads(saved["history"])


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
