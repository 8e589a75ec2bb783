"""Noise as pictures: the image, |μ|, μ⁺, μ⁻ and a noisy sample with the class that the network gives it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from netmoments.experiments.palette import INK, SMALL, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEADINGS = ("image", "|μ|", "μ⁺", "μ⁻", "noisy sample")
SIDE = 1.35
"""Inches of a picture."""


@dataclass(frozen=True, eq=False)
class PictureRow:
    """One attacked image: (C, H, W) each, in [0, 1] but for μ; what the network calls image and sample."""

    image: Tensor
    mu: Tensor
    noisy: Tensor
    before: str
    after: str
    note: str = ""
    """A line beside the row: success rate, say."""

    def panels(self) -> tuple[Tensor, ...]:
        """The five pictures, each in [0, 1]; the three of μ share one scale."""
        largest = self.mu.abs().amax().clamp(min=1e-12)
        return (
            self.image.clamp(0, 1),
            self.mu.abs() / largest,
            self.mu.clamp(min=0) / largest,
            (-self.mu).clamp(min=0) / largest,
            self.noisy.clamp(0, 1),
        )


def draw_rows(rows: Sequence[PictureRow]) -> Figure:
    """A row of five pictures for each attacked image."""
    figure = new_figure(SIDE * (len(HEADINGS) + 1), (SIDE + 0.22) * len(rows) + 0.25)
    axes = figure.subplots(len(rows), len(HEADINGS), squeeze=False)
    for line, row in zip(axes, rows, strict=True):
        for axis, panel in zip(line, row.panels(), strict=True):
            draw_picture(axis, panel)
        line[0].set_ylabel(row.note, fontsize=SMALL, color=INK, rotation=0, ha="right", va="center", labelpad=6)
        line[0].set_xlabel(row.before, fontsize=SMALL, color=INK)
        line[1].set_xlabel(f"up to {float(row.mu.abs().amax()) * 255:.0f} grey levels", fontsize=SMALL, color=INK)
        line[-1].set_xlabel(row.after, fontsize=SMALL, color=INK)
    for axis, heading in zip(axes[0], HEADINGS, strict=True):
        axis.set_title(heading, fontsize=SMALL, color=INK)
    return figure


def draw_picture(axes: Axes, picture: Tensor) -> None:
    """A (C, H, W) picture in [0, 1], grey or RGB, without ticks."""
    pixels = picture.detach().cpu().double()
    grey = len(pixels) == 1
    array = (pixels[0] if grey else pixels[:3].permute(1, 2, 0)).numpy()
    axes.imshow(array, cmap="gray" if grey else None, vmin=0, vmax=1, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_visible(False)


def a_sample(centre: Tensor, sigma: float, seed: int) -> Tensor:
    """One draw of N(centre, σ²I), on the device of the centre."""
    generator = torch.Generator(centre.device).manual_seed(seed)
    return centre + sigma * torch.randn(centre.shape, generator=generator, dtype=centre.dtype, device=centre.device)
