"""Measure the probabilities that each score is the largest: how exact they are, and how long they take.

`python -m benchmarks.winners`. Random dense covariances of 10 scores; the reference is the same method with 2¹⁵ points.
"""

from __future__ import annotations

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.measure import machine, seconds
from netmoments.moments.contests import winning_probabilities

IMAGES = 120
SCORES = 10


def scores(spread: float, rank: int, count: int = SCORES, images: int = IMAGES) -> tuple[Tensor, Tensor]:
    """Means of standard deviation `spread`, and covariances of this rank with variances of order 1."""
    generator = torch.Generator().manual_seed(0)
    factor = torch.randn(images, count, rank, dtype=torch.float64, generator=generator) / rank**0.5
    return spread * torch.randn(images, count, dtype=torch.float64, generator=generator), factor @ factor.mT


def main() -> None:
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("spread of the means", "rank", "points", "largest error", "relative, median", "99 %"):
        table.add_column(heading, justify="right")
    for spread, rank in ((0.3, SCORES), (1.0, SCORES), (3.0, SCORES), (1.0, 3)):
        mean, covariance = scores(spread, rank)
        exact = winning_probabilities(mean, covariance, points=2**15)
        for points in (512, 2048, 8192):
            found = winning_probabilities(mean, covariance, points=points)
            error = (found - exact).abs()
            relative = (error / exact)[exact > 1e-30].sort().values
            row = (error.max(), relative[len(relative) // 2], relative[99 * len(relative) // 100])
            table.add_row(f"{spread}", f"{rank}", f"{points}", *(f"{float(x):.1e}" for x in row))
    console = Console(width=120)
    console.print(f"{machine()}\n")
    console.print(table)
    mean, covariance = scores(1.0, SCORES)
    each = seconds(lambda: winning_probabilities(mean, covariance), repeats=3) / IMAGES
    console.print(f"10 scores: {1e3 * each:.1f} ms an image")
    mean, covariance = scores(10.0, 1000, count=1000, images=1)
    console.print(f"1000 scores: {seconds(lambda: winning_probabilities(mean, covariance), repeats=1):.1f} s an image")


if __name__ == "__main__":
    main()
