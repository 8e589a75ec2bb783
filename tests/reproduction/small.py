"""Small settings, networks and images for the experiments, and what their tests say about outcomes."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from torch import nn

from netmoments.sweep.local import LocalEngine
from reproduction.experiment import Outcome, Settings
from reproduction.image_sweeps import StudiedImages


def settings_for(out: Path, **changes) -> Settings:
    """On the CPU, in this process."""
    return Settings(out=out, engine=LocalEngine(["cpu"]), device=torch.device("cpu"), **changes)


def small_images(count: int = 8) -> StudiedImages:
    """A small convolutional network on small random images, in float32 as the experiments run."""
    torch.manual_seed(3)
    network = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 24), nn.ReLU(),
        nn.Linear(24, 5),
    )  # fmt: skip
    images = torch.rand(8, 1, 6, 6, generator=torch.Generator().manual_seed(4))[:count]
    return StudiedImages(network.eval(), images, torch.arange(count) * 11, seed=7)


def small_lenet() -> nn.Module:
    """In place of LeNet, which is large: three ReLUs, two of them behind pooling, and ten scores of a 16×16 image."""
    torch.manual_seed(5)
    network = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(3, 4, 2), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(36, 20), nn.ReLU(), nn.Linear(20, 10),
    )  # fmt: skip
    with torch.no_grad():
        for weight in network.parameters():
            weight *= 3  # scores as large as LeNet's
    return network.eval()


def shown(outcome: Outcome) -> str:
    """All cells of its panels; its drawings can be drawn on another machine."""
    pickle.dumps(outcome.drawings)
    return " ".join(cell for panel in outcome.panels for row in panel.rows for cell in row)


def drawn(figure, folder: Path) -> bool:
    """Whether a drawing has something in it."""
    figure.savefig(folder / "figure.svg")
    return (folder / "figure.svg").stat().st_size > 5000
