"""What pages are made of: templates, and the images, charts and data inside them; and CSV files.

Charts are inline SVG. Because type in a chart shrinks with it, every chart is drawn twice, for wide screens and for
narrow ones, and the page shows the one that fits (`for_any_screen`).
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape as escape_html
from pathlib import Path
from typing import Any

from torch import Tensor

from netmoments.files import printable
from netmoments.report.pictures import SMALL_SIDE
from netmoments.report.words import at_most_in_words

TEMPLATES = Path(__file__).parent / "templates"


def escape(text: str) -> str:
    """Text as it may stand in a page: neither tags nor control characters in names from elsewhere take effect."""
    return escape_html(printable(text))


def shown(value: Any) -> Any:
    """A value as a template puts it into a page, before it is escaped; markup stays as it is."""
    return printable(value) if type(value) is str else value


def render(template: str, **values: Any) -> str:
    """A template of this package, filled in: values are escaped, and a missing one is an error."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(TEMPLATES, encoding="utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, loader=loader, finalize=shown
    )
    environment.filters["whole_options"] = whole_options
    return environment.get_template(template).render(**values)


def whole_options(text: str) -> Any:
    """Text in which options of a command (such as --rare) are not broken over lines."""
    from markupsafe import Markup, escape  # comes with jinja2

    return Markup(re.sub(r"--[a-z]+", r'<span class="option">\g<0></span>', str(escape(shown(text)))))


def png_data(image: Tensor) -> str:
    """A (C, H, W) image, cut to [0, 1], as a data URI; one channel is grey, three are RGB."""
    buffer = io.BytesIO()
    _picture(image).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def _picture(image: Tensor) -> Any:
    from PIL import Image

    pixels = (image.clamp(0, 1) * 255).round().byte().cpu()
    array = pixels[0].numpy() if len(pixels) == 1 else pixels[:3].permute(1, 2, 0).contiguous().numpy()
    return Image.fromarray(array)


FEW_NUMBERS = 3072
"""An image with so many numbers or fewer is on a page as it is; a larger one as a small JPEG."""


def small_picture(image: Tensor) -> str:
    """A (C, H, W) image as a data URI of a few kilobytes at most: averages over squares of pixels, as a JPEG."""
    if image.numel() <= FEW_NUMBERS:
        return png_data(image)
    squares = math.ceil(max(image.shape[1:]) / SMALL_SIDE)
    buffer = io.BytesIO()
    _picture(image).reduce(squares).save(buffer, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def script(name: str) -> tuple[Any, str]:
    """A script of this package as it stands in a page, and the name by which a content security policy allows it."""
    from markupsafe import Markup  # comes with jinja2

    text = (TEMPLATES / name).read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return Markup(text), f"sha256-{digest}"


def data_block(value: Any) -> Any:
    """JSON inside a page's <script type="application/json">: no text in it ends the element or steers anything."""
    from markupsafe import Markup

    text = json.dumps(_printable(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _printable(value: Any) -> Any:
    """The same value with control characters spelt out in every text."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {key: _printable(item) for key, item in value.items()}
    return [_printable(item) for item in value] if isinstance(value, list | tuple) else finite(value)


def finite(value: Any) -> Any:
    """A value that JSON can hold: NaN and infinite numbers become None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


BEGINS_A_FORMULA = ("=", "+", "-", "@")
"""A spreadsheet takes texts that begin so for formulas."""


def csv_text(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table as CSV; texts that a spreadsheet would take for a formula get an apostrophe in front."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_csv_cell(value) for value in row] for row in rows)
    return text.getvalue()


def _csv_cell(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text.startswith(BEGINS_A_FORMULA) else text


WIDE, NARROW = 860, 360
"""Widths of charts in units of their own, which are about pixels."""
TOP, BOTTOM = 14, 48
"""Space above and below a chart; the numbers and the title of its axis are below."""


def for_any_screen(chart: Callable[[int], str], wide: int = WIDE) -> str:
    """A chart at both widths; the page shows one of them."""
    return f'<div class="wide">{chart(wide)}</div><div class="narrow">{chart(NARROW)}</div>'


@dataclass(frozen=True)
class Axis:
    """The map of values from `low` to `high` to pixels from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self, about: int) -> list[float]:
        """About so many round numbers inside the range."""
        step = round_step((self.high - self.low) / about)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [place * step for place in range(first, last + 1)]


def round_step(least: float) -> float:
    """The smallest of 1, 2, 2.5 or 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= least * 0.999)


@dataclass(frozen=True)
class CurveMark:
    """A point of a curve with the ends of its band, and where it is, in words."""

    x: float
    share: float
    low: float
    high: float
    place: str


LEAST_RANGE = 0.01
"""An axis of shares covers at least this range."""
FROM_ZERO = 0.3
"""An axis of shares begins at 0 if the lower end of any band is below this."""


def share_limits(curve: Sequence[CurveMark]) -> tuple[float, float]:
    """The ends of an axis for all bands of a curve, inside [0, 1] and rounded to about a fifth of the range."""
    low, high = min(point.low for point in curve), max(point.high for point in curve)
    if low < FROM_ZERO:
        low = 0.0
    step = round_step(max(high - low, LEAST_RANGE) / 5)
    top = max(LEAST_RANGE, min(1.0, step * math.ceil(high / step - 1e-9)))
    bottom = max(0.0, step * math.floor(low / step + 1e-9))
    return min(bottom, max(0.0, top - LEAST_RANGE)), top


def accuracy_chart(curve: Sequence[CurveMark], chosen: CurveMark, what: str, x_title: str, width: int) -> str:
    """Shares of answers over noise: a line with its band, and a mark at the chosen noise."""
    left, height = 54, round(120 + 0.26 * width)
    x = Axis(0, max(point.x for point in curve), left, width - 14)
    y = Axis(*share_limits(curve), height - BOTTOM, TOP)
    about = 6 if width > 500 else 4
    edge = [(point.x, point.high) for point in curve] + [(point.x, point.low) for point in reversed(curve)]
    at = x.at(chosen.x)
    parts = [
        _share_grid(x, y),
        *(_tick(x.at(tick), y.start, f"{tick:.3g}") for tick in x.ticks(about)),
        _axis_title(x.end, height, x_title),
        _upright("chosen", at, TOP, y.start),
        f'<text class="note" x="{at + 6}" y="{y.start - 8}">{escape(chosen.place)}</text>',
        f'<path class="band" d="{_path(x, y, edge)}Z"/>',
        f'<path class="line" d="{_path(x, y, [(point.x, point.share) for point in curve])}"/>',
        *(_curve_dot(x, y, point) for point in curve),
    ]
    return _svg(parts, width, height, f"{what} over noise")


def _share_grid(x: Axis, y: Axis) -> str:
    parts, ticks = [], y.ticks(5)
    decimals = max(0, math.ceil(-math.log10(ticks[1] - ticks[0]) - 2 - 1e-9))
    decimals += not math.isclose(100 * ticks[0], round(100 * ticks[0], decimals), abs_tol=1e-9)
    for tick in ticks:
        parts.append(f'<line class="grid" x1="{x.start}" x2="{x.end}" y1="{y.at(tick)}" y2="{y.at(tick)}"/>')
        label = f"{tick:.{decimals}%}"
        parts.append(f'<text x="{x.start - 8}" y="{y.at(tick) + 4}" text-anchor="end">{label}</text>')
    return "".join(parts)


def _curve_dot(x: Axis, y: Axis, point: CurveMark) -> str:
    title = f"{point.share:.2%} at {point.place}, between {point.low:.2%} and {point.high:.2%}"
    return _dot("dot", x.at(point.x), y.at(point.share), 3.5, title)


@dataclass(frozen=True)
class FlipMark:
    """How often one image flips, with its interval; the probability is 0 where only an upper bound is known."""

    name: str
    probability: float
    low: float
    high: float
    in_words: str
    """The flip probability in words."""
    wrong: bool
    """Whether the answer without noise is wrong."""


RAREST = -12
"""The strip of flips ends at this power of ten."""
MOST_MARKS = 600
"""At most so many marks are drawn; of more images, a mark stands for several."""
TALLEST = 220
"""Stacked marks are at most so many pixels high."""
GROUPS = 4
"""Images with an upper bound alone are shown in at most about so many groups, by their bounds."""
SCORES_WIDE = 600
"""Width of the chart of scores on a wide screen."""
NAMED = {0: "always", -3: "1 in 1,000", -6: "1 in a million", -9: "1 in a billion", -12: "1 in a trillion"}
"""Some powers of ten in words."""


def images_a_mark(count: int) -> int:
    """How many images a mark of `flip_strip` stands for."""
    return max(1, math.ceil(count / MOST_MARKS))


def flip_strip(marks: Sequence[FlipMark], width: int) -> str:
    """Flip probabilities on a log scale: stacked dots with intervals, and below them images with only a bound."""
    x = Axis(RAREST, 0, 14, width - 14)
    each = images_a_mark(len(marks))
    seen = sorted((mark for mark in marks if mark.probability > 0), key=lambda mark: mark.probability)[::each]
    dots, base = _stacked_dots(x, seen, 3.2 if width > 500 else 2.8)
    lanes = []
    for bound, group in bound_groups(marks):
        lane, base = _lane(x, bound, group, each, base)
        lanes.append(lane)
    grid = [_upright("grid", x.at(power), TOP, base) for power in range(RAREST, 1, 1 if width > 500 else 3)]
    return _svg([*grid, *lanes, *dots, *_powers(x, base)], width, base + BOTTOM, "how often each image flips")


def _powers(x: Axis, base: float) -> list[str]:
    """The numbers below the strip, and in words those for which there is room."""
    roomy = x.end > 500
    parts = []
    for power in range(RAREST, 1, 1 if roomy else 3):
        label = f"1e{power}" if power < -3 else f"{10.0**power:g}"
        parts.append(_tick(x.at(power), base, label, _anchor(power)))
    for power, label in NAMED.items():
        if roomy or power % 6 == 0:
            parts.append(_tick(x.at(power), base + 18, label, _anchor(power)))
    return parts


def _anchor(power: int) -> str:
    return "end" if power == 0 else "start" if power == RAREST else "middle"


def _log(value: float) -> float:
    return max(float(RAREST), math.log10(value)) if value > 0 else float(RAREST)


def _stacked_dots(x: Axis, marks: Sequence[FlipMark], radius: float) -> tuple[list[str], float]:
    """Dots, each as low as those to its left leave room for; and where the stack ends."""
    places, slots = [], []
    free: list[float] = []
    for mark in marks:
        place = x.at(_log(mark.probability))
        slot = next((k for k, end in enumerate(free) if end <= place), len(free))
        free[slot : slot + 1] = [place + 2 * radius]
        places.append(place)
        slots.append(slot)
    pitch = min(2 * radius + 1, TALLEST / max(len(free), 1))
    base = TOP + radius + pitch * max(len(free), 1)
    parts = []
    for mark, place, slot in zip(marks, places, slots, strict=True):
        y = round(base - radius - pitch * slot, 1)
        wrong = " wrong" if mark.wrong else ""
        ends = f'x1="{x.at(_log(mark.low))}" x2="{x.at(_log(mark.high))}"'
        parts.append(f'<line class="interval{wrong}" {ends} y1="{y}" y2="{y}"/>')
        parts.append(_dot(f"dot{wrong}", place, y, radius, f"{mark.name}: {mark.in_words}"))
    return parts, base + 10


def bound_groups(marks: Sequence[FlipMark]) -> list[tuple[float, list[FlipMark]]]:
    """Images with only an upper bound in groups of similar bounds, the largest first: each group's bound and marks."""
    bounded = [mark for mark in marks if mark.probability == 0]
    for key in (lambda bound: at_most_in_words(bound), lambda bound: str(math.ceil(math.log10(bound)))):
        groups: dict[str, list[FlipMark]] = {}
        for mark in bounded:
            groups.setdefault(key(max(mark.high, 1e-300)), []).append(mark)
        if len(groups) <= GROUPS:
            break
    with_bounds = [(max(mark.high for mark in group), group) for group in groups.values()]
    return sorted(with_bounds, key=lambda item: -item[0])


def _lane(x: Axis, bound: float, group: Sequence[FlipMark], each: int, top: float) -> tuple[str, float]:
    """Open marks to the left of a bound, with an arrow towards where the images may be; and where the lane ends."""
    edge, pitch = x.at(_log(bound)), 7.0
    columns = max(1, min(24, int((edge - x.start) / (2 * pitch))))
    shown = group[::each]
    rows = math.ceil(len(shown) / columns)
    head, end = top + 18, top + 24 + pitch * rows
    note = f"{len(group):,} image{'s' if len(group) > 1 else ''}: below {at_most_in_words(bound)}"
    note_fits = edge - x.start > 7.5 * len(note)
    parts = [
        f'<text class="note" x="{edge if note_fits else x.start}" y="{top + 12}" '
        f'text-anchor="{"end" if note_fits else "start"}">{note}</text>',
        _upright("bound", edge, head, end - 4),
    ]
    for place, mark in enumerate(shown):
        right, y = edge - 2 - pitch * (place % columns), head + pitch * (place // columns + 0.5)
        wrong = " wrong" if mark.wrong else ""
        parts.append(
            f'<path class="below{wrong}" d="M{right:.1f} {y - 2.6:.1f}v5.2l-4.6 -2.6z">'
            f"<title>{escape(mark.name)}: {escape(mark.in_words)}</title></path>"
        )
    tail = edge - 8 - pitch * min(columns, len(shown))
    if tail > x.start + 24:
        middle = head + pitch * rows / 2
        parts.append(f'<path class="arrow" d="M{tail:.1f} {middle:.1f}H{x.start}m6 -4l-6 4l6 4"/>')
    return "".join(parts), end


@dataclass(frozen=True)
class ScoreBar:
    """One class of one image: its score under noise, with standard errors, and how often it won."""

    name: str
    mean: float
    deviation: float
    mean_error: float
    deviation_error: float
    won: str
    answer: bool
    """Whether it is the answer without noise."""

    def __str__(self) -> str:
        return (
            f"{self.name}: mean {self.mean:.3g} ± {self.mean_error:.1g}, standard deviation {self.deviation:.3g} "
            f"± {self.deviation_error:.1g}"
        )


def scores_chart(bars: Sequence[ScoreBar], width: int) -> str:
    """A row for each class: the mean ± 2 standard deviations as a bar, and how often it won; the answer is bold."""
    row, longest = 26, 20 if width > 500 else 15
    names = [bar.name if len(bar.name) <= longest else bar.name[: longest - 1] + "…" for bar in bars]
    low = min(bar.mean - 2.2 * bar.deviation for bar in bars)
    high = max(bar.mean + 2.2 * bar.deviation for bar in bars)
    left, right = max(28, 16 + 8 * max(map(len, names))), 56
    x = Axis(low, high if high > low else low + 1, left, width - right)
    head = 26
    bottom = head + row * len(bars)
    parts = [
        _upright("grid", x.at(t), head, bottom) + _tick(x.at(t), bottom, f"{t:.3g}")
        for t in x.ticks(6 if width > 500 else 4)
    ]
    parts.append(_axis_title(x.end, bottom + BOTTOM, "score"))
    parts.append(f'<text x="{width - 2}" y="16" text-anchor="end">won</text>')
    for place, bar in enumerate(bars):
        centre = head + row * (place + 0.5)
        kind = "name answer" if bar.answer else "name"
        ends = f'x1="{x.at(bar.mean - 2 * bar.deviation)}" x2="{x.at(bar.mean + 2 * bar.deviation)}"'
        parts += [
            f'<text class="{kind}" x="{left - 8}" y="{centre + 4}" text-anchor="end">{escape(names[place])}</text>',
            f'<line class="bar" {ends} y1="{centre}" y2="{centre}"><title>{escape(str(bar))}</title></line>',
            _dot("dot", x.at(bar.mean), centre, 3.5, str(bar)),
            f'<text class="{kind}" x="{width - 2}" y="{centre + 4}" text-anchor="end">{bar.won}</text>',
        ]
    return _svg(parts, width, bottom + BOTTOM, "scores with their standard deviations")


def _dot(kind: str, x: float, y: float, radius: float, title: str) -> str:
    return f'<circle class="{kind}" cx="{x}" cy="{y}" r="{radius}"><title>{escape(title)}</title></circle>'


def _upright(kind: str, x: float, top: float, bottom: float) -> str:
    return f'<line class="{kind}" x1="{x}" x2="{x}" y1="{top:g}" y2="{bottom:g}"/>'


def _tick(x: float, base: float, label: str, anchor: str = "middle") -> str:
    return f'<text x="{x}" y="{base + 17}" text-anchor="{anchor}">{label}</text>'


def _axis_title(x: float, height: float, title: str) -> str:
    return f'<text x="{x}" y="{height - 12}" text-anchor="end">{escape(title)}</text>'


def _path(x: Axis, y: Axis, points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x.at(a)} {y.at(b)}" for a, b in points)


def _svg(parts: Sequence[str], width: float, height: float, title: str) -> str:
    return f'<svg viewBox="0 0 {width} {height:.0f}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
