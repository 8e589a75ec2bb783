"""Figures as files: their style, and rows of pictures of attacked images."""

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

BLUE, ORANGE, GREEN, PURPLE, SKY, AMBER = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00"
"""Okabe and Ito's colours."""
INK, GREY, PALE = "#222222", "#767676", "#E6E6E6"
SMALL = 8.0
"""Points: the smallest type in a figure of column width."""


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches that lays itself out; nothing global is touched."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def dress(axes: Axes, title: str, x: str, y: str) -> None:
    """Titles, a light grid behind the data, and no frame where there is no scale."""
    axes.set_title(title, fontsize=SMALL + 1, color=INK, loc="left")
    axes.set_xlabel(x, fontsize=SMALL + 0.5, color=INK)
    axes.set_ylabel(y, fontsize=SMALL + 0.5, color=INK)
    axes.tick_params(labelsize=SMALL, colors=INK, length=3)
    axes.grid(True, color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GREY)


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


SMALL_SIDE = 96
"""Pixels of a small picture on a page, at most."""
DRAWN = 20_000
"""Numbers of an image whose noisy copies a page draws, at most."""


def drawable(image: Tensor) -> bool:
    """Whether a page has every pixel of an image (C, H, W), to draw noisy copies of it."""
    return image.dim() == 3 and len(image) in (1, 3) and max(image.shape) <= SMALL_SIDE and image.numel() <= DRAWN


def drawn_noise(number: int, copies: int, shape: Sequence[int]) -> Tensor:
    """Standard normal numbers (copies, *shape) for the image with a number: those of `noise.js`, to 1e-12.

    So a page needs no pictures of noisy copies to show the ones that the network was asked about. Uniform numbers are
    hashes of their places (the finalizer of MurmurHash3, twice), normal ones √(−2 ln u) cos 2πv of two each.
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
    """A pale grey image with μ over it, (3, H, W): orange where it makes the image brighter, blue where darker."""
    pale = 0.35 + 0.4 * image.clamp(0, 1).mean(0)
    change = mu.mean(0)
    strength = (change.abs() / change.abs().amax().clamp(min=1e-12)).sqrt()
    ink = [torch.tensor([int(ink[place : place + 2], 16) / 255 for place in (1, 3, 5)]) for ink in (ORANGE, BLUE)]
    colour = torch.where(change > 0, ink[0][:, None, None], ink[1][:, None, None]).to(pale)
    return pale + strength * (colour - pale)


DPI = 200


def figure_png(figure: Figure) -> bytes:
    """A figure as a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    return saved_figure(figure, "png", {"Software": None})


def saved_figure(figure: Figure, kind: str, metadata: dict[str, None]) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=DPI, facecolor="white", bbox_inches="tight", metadata=metadata)
    return buffer.getvalue()
