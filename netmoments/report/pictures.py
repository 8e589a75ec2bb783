"""Pictures in a page or a file: images, rows of an attack, charts as inline SVG."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
if TYPE_CHECKING:
    from matplotlib.figure import Figure


def png_data(image: Tensor) -> str:
    """A (C, H, W) image, cut to [0, 1], as a data URI; one channel is grey, three are RGB."""
    try:
        from PIL import Image
    except ImportError:
        raise ImportError('pictures need Pillow: pip install "netmoments[report]"') from None
    pixels = (image.clamp(0, 1) * 255).round().byte().cpu()
    array = pixels[0].numpy() if len(pixels) == 1 else pixels[:3].permute(1, 2, 0).contiguous().numpy()
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


WIDTH, HEIGHT = 640, 320
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 16, 44


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high` laid along pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self, about: int) -> list[float]:
        """Round numbers, about so many, inside the range."""
        rough = (self.high - self.low) / about
        power = 10.0 ** _floor_log10(rough)
        step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * 0.999)
        first = -(-self.low // step)
        last = int((self.high / step) - first + 1e-9)
        return [(first + i) * step for i in range(last + 1)]


def accuracy_chart(
    curve: Sequence[tuple[float, float]],
    check_curve: Sequence[tuple[float, float]],
    check_dots: Sequence[tuple[float, float, float]],
    chosen: float,
    what: str,
) -> str:
    """Share of answers over sigma: computed for all images; computed and sampled (value ± error) for those checked."""
    x = Axis(0, max(s for s, _ in curve), LEFT, WIDTH - RIGHT)
    y = Axis(0, 1, HEIGHT - BOTTOM, TOP)
    parts = [_frame(x, y, "noise σ, in units of the pixel range")]
    parts.append(f'<line class="chosen" x1="{x.at(chosen)}" x2="{x.at(chosen)}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
    if check_curve:
        parts.append(_line(x, y, check_curve, "line checked"))
    parts.append(_line(x, y, curve, "line computed"))
    for sigma, value, error in check_dots:
        parts.append(
            f'<line class="sampled" x1="{x.at(sigma)}" x2="{x.at(sigma)}" y1="{y.at(max(0, value - error))}" '
            f'y2="{y.at(min(1, value + error))}"/><circle class="sampled" cx="{x.at(sigma)}" cy="{y.at(value)}" r="4">'
            f"<title>sampled: {value:.1%} ± {error:.1%} at σ = {sigma:.3g}</title></circle>"
        )
    return _svg(parts, HEIGHT, f"{what} over noise")


def scores_chart(
    names: Sequence[str],
    answer: str,
    mean: Sequence[float],
    deviation: Sequence[float],
    draws: Sequence[Sequence[float]],
    sampled: Sequence[tuple[float, float]],
) -> str:
    """One row a class: the computed mean ± 2 deviations as a bar, single draws as dots, the sampled mean as a tick."""
    row = 26
    height = TOP + row * len(names) + BOTTOM
    low = min(min(m - 2.2 * s for m, s in zip(mean, deviation, strict=True)), *(min(d) for d in draws))
    high = max(max(m + 2.2 * s for m, s in zip(mean, deviation, strict=True)), *(max(d) for d in draws))
    shown = [name if len(name) <= 20 else name[:19] + "…" for name in names]
    left = max(LEFT, 16 + 8 * max(len(name) for name in shown))
    x = Axis(low, high if high > low else low + 1, left, WIDTH - RIGHT)
    bottom = TOP + row * len(names)
    parts = [
        f'<line class="grid" x1="{x.at(t)}" x2="{x.at(t)}" y1="{TOP}" y2="{bottom}"/>'
        f'<text class="tick" x="{x.at(t)}" y="{bottom + 16}" text-anchor="middle">{t:.3g}</text>'
        for t in x.ticks(6)
    ]
    parts.append(f'<text class="title" x="{WIDTH - RIGHT}" y="{bottom + 36}" text-anchor="end">score</text>')
    for place, name in enumerate(names):
        centre = TOP + row * (place + 0.5)
        m, s = mean[place], deviation[place]
        kind = "name answer" if name == answer else "name"
        parts.append(
            f'<text class="{kind}" x="{left - 8}" y="{centre + 4}" text-anchor="end">{escape(shown[place])}</text>'
        )
        parts += [
            f'<circle class="draw" cx="{x.at(d[place])}" cy="{centre + 5 + (i % 5) - 2}" r="1.6"/>'
            for i, d in enumerate(draws)
        ]
        parts.append(
            f'<line class="bar" x1="{x.at(m - 2 * s)}" x2="{x.at(m + 2 * s)}" y1="{centre - 4}" y2="{centre - 4}">'
            f"<title>{escape(name)}: computed {m:.3g} ± {s:.2g}</title></line>"
            f'<circle class="mean" cx="{x.at(m)}" cy="{centre - 4}" r="3.4"/>'
        )
        sampled_mean, sampled_deviation = sampled[place]
        parts.append(
            f'<path class="sampled-mean" d="M{x.at(sampled_mean)} {centre}v10"><title>sampled {sampled_mean:.3g} ± '
            f"{sampled_deviation:.2g}</title></path>"
        )
    return _svg(parts, height, "scores with error bars")


def _frame(x: Axis, y: Axis, x_title: str) -> str:
    parts = []
    for tick in y.ticks(5):
        parts.append(f'<line class="grid" x1="{x.start}" x2="{x.end}" y1="{y.at(tick)}" y2="{y.at(tick)}"/>')
        parts.append(f'<text class="tick" x="{x.start - 8}" y="{y.at(tick) + 4}" text-anchor="end">{tick:.0%}</text>')
    for tick in x.ticks(6):
        parts.append(f'<text class="tick" x="{x.at(tick)}" y="{y.start + 18}" text-anchor="middle">{tick:.3g}</text>')
    parts.append(f'<text class="title" x="{x.end}" y="{y.start + 36}" text-anchor="end">{escape(x_title)}</text>')
    return "".join(parts)


def _line(x: Axis, y: Axis, points: Sequence[tuple[float, float]], name: str) -> str:
    path = "M" + "L".join(f"{x.at(a)} {y.at(b)}" for a, b in points)
    return f'<path class="{name}" d="{path}"/>'


def _svg(parts: Sequence[str], height: float, title: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'


def _floor_log10(value: float) -> int:
    power = 0
    while 10.0**power > value:
        power -= 1
    while 10.0 ** (power + 1) <= value:
        power += 1
    return power


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


DPI = 200


def figure_png(figure: Figure) -> bytes:
    """A figure as a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    return saved_figure(figure, "png", {"Software": None})


def require_matplotlib() -> None:
    """Said before the work is done, not after."""
    if find_spec("matplotlib") is None:
        raise ImportError('figures need matplotlib: pip install "netmoments[report]"')


def saved_figure(figure: Figure, kind: str, metadata: dict[str, None]) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=DPI, facecolor="white", bbox_inches="tight", metadata=metadata)
    return buffer.getvalue()
