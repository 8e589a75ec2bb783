"""Figures: rows of pictures of attacked images, and PNG files; and the noise that a page draws itself."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from netmoments.files import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE = "#0072B2", "#D55E00"
"""Two of Okabe and Ito's colours."""
INK = "#222222"
"""The colour of text."""
SMALL = 8.0
"""The smallest type in a figure of column width, in points."""
HEADINGS = ("image", "|μ|", "μ⁺", "μ⁻", "noisy sample")
"""What the five pictures of an attacked image are."""
SIDE = 1.35
"""Inches of a side of such a picture."""
DPI = 200
"""Dots per inch of a figure in a PNG file."""
SMALL_SIDE = 96
"""A small picture on a page has at most so many pixels a side."""
DRAWN = 20_000
"""A page draws noisy copies of images with at most so many numbers."""


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches that lays itself out; no global state of matplotlib is touched."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


@dataclass(frozen=True, eq=False)
class PictureRow:
    """One attacked image, μ and a noisy sample, (C, H, W) each; and what the network takes image and sample for."""

    image: Tensor
    mu: Tensor
    noisy: Tensor
    before: str
    after: str
    note: str = ""
    """A line beside the row: a success rate, say."""

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
        line[0].set_xlabel(printable(row.before), fontsize=SMALL, color=INK, parse_math=False)
        line[1].set_xlabel(f"up to {float(row.mu.abs().amax()) * 255:.0f} grey levels", fontsize=SMALL, color=INK)
        line[-1].set_xlabel(printable(row.after), fontsize=SMALL, color=INK, parse_math=False)
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


def drawable(image: Tensor) -> bool:
    """Whether a page has every pixel of an image (C, H, W), so that it can draw noisy copies of it."""
    return image.dim() == 3 and len(image) in (1, 3) and max(image.shape) <= SMALL_SIDE and image.numel() <= DRAWN


def drawn_noise(number: int, copies: int, shape: Sequence[int]) -> Tensor:
    """Standard normal numbers (copies, *shape) for the image with this number: those of `noise.js`, to 1e-12.

    With them a page shows the noisy copies that the network was asked about without having pictures of them. Uniform
    numbers are hashes of their indices (the finalizer of MurmurHash3, twice), normal ones √(−2 ln u) cos 2πv of two.
    """
    size = math.prod(shape)
    stream = _hash32(np.arange(number * copies, (number + 1) * copies, dtype=np.uint32))[:, None]
    first, second = (_hash32(np.arange(start, 2 * size, 2, dtype=np.uint32) ^ stream) for start in (0, 1))
    radius = np.sqrt(-2 * np.log((first + 0.5) / 2**32))
    return torch.from_numpy(radius * np.cos(2 * np.pi * (second + 0.5) / 2**32)).reshape(copies, *shape)


def _hash32(x: np.ndarray) -> np.ndarray:
    x = x + np.uint32(0x9E3779B9)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def over_the_image(image: Tensor, mu: Tensor) -> Tensor:
    """A pale grey image with μ over it, (3, H, W): orange where μ makes the image brighter, blue where darker."""
    pale = 0.35 + 0.4 * image.clamp(0, 1).mean(0)
    change = mu.mean(0)
    strength = (change.abs() / change.abs().amax().clamp(min=1e-12)).sqrt()
    rgb = [torch.tensor([int(code[at : at + 2], 16) / 255 for at in (1, 3, 5)]) for code in (ORANGE, BLUE)]
    colour = torch.where(change > 0, rgb[0][:, None, None], rgb[1][:, None, None]).to(pale)
    return pale + strength * (colour - pale)


def figure_png(figure: Figure) -> bytes:
    """A figure as a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    return saved_figure(figure, "png", {"Software": None})


def saved_figure(figure: Figure, kind: str, metadata: dict[str, None]) -> bytes:
    """A figure as a file of a kind that matplotlib writes, with the given metadata left out."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=DPI, facecolor="white", bbox_inches="tight", metadata=metadata)
    return buffer.getvalue()
