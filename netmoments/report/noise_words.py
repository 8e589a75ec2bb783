"""What a noise study found, in the same words in the terminal and on the page; and its tables for the terminal."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text
from torch import Tensor

from netmoments.files import printable
from netmoments.report.attack_study import AttackStudy, NotAttacked
from netmoments.report.attack_words import draw_few
from netmoments.report.noise_study import CurvePoint, FlippedImage, Study
from netmoments.report.words import at_most_in_words, in_words, interval_in_words, seconds_in_words

FRAGILE = 0.1
"""How often fragile images flip, at least."""


def answer_share(found: Study) -> str:
    """What the curve shows."""
    return "Answers that are right" if found.labelled else "Answers that stay the same"


def noise_in_words(found: Study) -> str:
    """How much noise was asked about."""
    return f"σ = {found.config.sigma:.3g}" if found.config.covariance is None else "the given covariance"


def level_of(found: Study, point: CurvePoint) -> float:
    """How much noise a point of the curve has: σ, or how many times the deviations of a given covariance."""
    return point.sigma if found.config.covariance is None else point.sigma / found.config.sigma


def level_in_words(found: Study, point: CurvePoint) -> str:
    level = level_of(found, point)
    return f"σ = {level:.3g}" if found.config.covariance is None else f"{level:.3g} × the noise"


def chosen_point(found: Study) -> CurvePoint:
    """The point of the curve at the noise that was asked about."""
    return next(point for point in found.curve if math.isclose(point.sigma, found.config.sigma))


def band_in_words(point: CurvePoint) -> str:
    """The ends of a band of shares, rounded outwards."""
    digits = _digits(point)
    scale = 10.0 ** (digits + 2)
    low, high = math.floor(scale * point.low + 1e-6) / scale, math.ceil(scale * point.high - 1e-6) / scale
    return f"between {low:.{digits}%} and {high:.{digits}%}"


def share_in_words(point: CurvePoint) -> str:
    return f"{point.share:.{_digits(point)}%}" if point.share < 1 else "100%"


def _digits(point: CurvePoint) -> int:
    """After the point of a percentage: one, or two where the band is narrow."""
    return 2 if 0 < point.high - point.low < 0.004 else 1


def flip_in_words(found: Study, number: int) -> tuple[str, str]:
    """How often noise flips an image, and how well that is known."""
    p, (low, high) = float(found.flip[number]), found.interval[number].tolist()
    samples = int(found.samples[number])
    if p == 0:
        return f"below {at_most_in_words(high)}", _nothing_seen(found, number)
    if p == 1 and found.route[number] == "frequencies":
        return f"above {math.floor(1000 * low) / 10:.3g}%", f"flipped in all {samples:,} samples"
    value, at_least, at_most = interval_in_words(p, low, high)
    return value, f"between {at_least} and {at_most}"


def _nothing_seen(found: Study, number: int) -> str:
    samples, runs = int(found.samples[number]), int(found.runs[number])
    by_samples = math.isclose(float(found.interval[number, 1]), min(1.0, 3 / samples), rel_tol=1e-3)
    return f"nothing seen in {samples:,} samples" if by_samples else f"nothing found in {runs:,} runs"


def nearest_in_words(found: Study, nearest: FlippedImage) -> str:
    """How far away the nearest flip is, and what it is."""
    away = in_words(float(f"{nearest.distance:.2g}"))
    return (
        f"The smallest change found that makes it {found.class_name(nearest.becomes)} is {away} standard deviations of "
        f"the noise away, {largest_change_in_words(nearest)}."
    )


def largest_change_in_words(nearest: FlippedImage) -> str:
    return f"at most {math.ceil(255 * float(nearest.change.abs().max()))} of 255 grey levels on a pixel"


def fragile_in_words(interval: Tensor) -> str:
    """How many images flip more than one time in ten: a number, or from and to where intervals (N, 2) leave it open."""
    low, high = (int((end > FRAGILE).sum()) for end in interval.unbind(1))
    return f"{low}" if low == high else f"{low}–{high}"


def bounded_in_words(found: Study) -> str:
    """What is known of the images that were never seen to flip."""
    count, bounds = int(found.bounded.sum()), found.interval[found.bounded, 1]
    if not count:
        return ""
    most, least = at_most_in_words(float(bounds.max())), at_most_in_words(float(bounds.min()))
    each = f"less often than {most}" if most == least else f"less often than bounds from {least} to {most}"
    which = "image was" if count == 1 else "images were"
    return f"{count:,} of {len(found.images):,} {which} never seen to flip: each flips {each}."


def runs_in_words(found: Study) -> str:
    """What it took."""
    return f"{int(found.runs.sum()):,} runs of the network for these flips; {seconds_in_words(found.seconds)} in all"


def method_in_words(found: Study) -> list[str]:
    """How the numbers of a report were found and what they mean, in paragraphs."""
    config = found.config
    said = [
        f"Every image was given fresh noise again and again, and the network asked each time: "
        f"{samples_in_words(found)}. {_rare_in_words(found)}",
        "Intervals and bands are of 95 %: they are estimates with confidence intervals, not certificates. Flips of a "
        "kind that nothing here came across are in no interval. Noise is added to pixels in [0, 1] and not clipped.",
        _scores_in_words(found),
    ]
    wide = int((found.half_width > 1.02 * config.tolerance).sum())
    if wide:
        said.append(
            f"The intervals of {wide:,} of the images are wider than the ±{config.tolerance:g} that was asked for: as "
            f"far as the samples (--samples) and the time (--seconds) went."
        )
    return [*said, *(part for part in (stopped_in_words(found), more_in_words(found)) if part)]


def samples_in_words(found: Study) -> str:
    least, most = int(found.samples.min()), int(found.samples.max())
    if least == most:
        return f"{least:,} samples of each"
    return f"from {least:,} samples of images that never flip to {most:,} of those that flip often"


def _rare_in_words(found: Study) -> str:
    """What was done about flips that samples do not show."""
    routes = [route for route in found.route if route != "frequencies"]
    if not routes:
        return "Flips were counted."
    how = {
        "importance": "samples drawn where the network is about to change its answer, each counted by how likely it is "
        "(importance sampling), and checked by an independent second estimate",
        "splitting": "moving samples step by step towards a flip (splitting)",
    }
    named = [words for route, words in how.items() if route in routes]
    many = "1 image" if len(routes) == 1 else f"{len(routes)} images"
    by = f": by {', or by '.join(named)}" if named else ""
    return f"Flips were counted; those of {many}, too rare for that, were found otherwise{by}."


def _scores_in_words(found: Study) -> str:
    shown, classes = found.scores.outputs.shape[1], found.count
    by = "those samples" if found.scores.method == "sampling" else f"a formula ({found.scores.method})"
    few = f"; of {classes:,} classes, the {shown} with the largest scores are shown" if shown < classes else ""
    return f"Means and standard deviations of scores are from {by}{few}."


def stopped_in_words(found: Study) -> str:
    """What ended the work early, and what is missing."""
    if not found.stopped:
        return ""
    said = (
        f"{found.stopped[0].upper()}{found.stopped[1:]} ended the work early: what is shown is what was known by then"
    )
    return f"{said}; --seconds gives it more time." if "time" in found.stopped else f"{said}."


def more_in_words(found: Study) -> str:
    """How to know more about the images of which only a bound is known."""
    if not bool(found.bounded.any()) or found.config.rare is None:
        return ""
    return (
        f"How rare flips are was looked into for the {min(found.config.rare, len(found.images))} images nearest to "
        f"flipping; --rare all does it for every image."
    )


RANKED = 10
WIDE_ENOUGH = 110
"""Columns of a terminal, to show scores too."""


def draw(found: Study) -> RenderableType:
    """The accuracy over noise, the most fragile images, noise made to fool the network, and what it took."""
    parts: list[RenderableType] = [_curve(found), Text(), Ranking(found)]
    parts += [Text(said) for said in (bounded_in_words(found), more_in_words(found)) if said]
    if found.attacks is not None:
        parts += [Text(), Text("Noise made to fool it", style="bold"), _attacks(found.attacks)]
    if found.images.skipped:
        count = len(found.images.skipped)
        parts.append(Text(f"\n{count} file{'s' if count > 1 else ''} could not be read:", style="yellow"))
        parts += [Text(printable(f"  {item.path}: {item.reason}")) for item in found.images.skipped[:5]]
    parts += [Text(), Text(f"{runs_in_words(found)}.")]
    if found.stopped:
        parts.append(Text(stopped_in_words(found), style="yellow"))
    return Group(*parts)


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False)


def _curve(found: Study) -> Group:
    """A column a level, with the ends of its band."""
    table = _table()
    table.add_column("noise σ" if found.config.covariance is None else "× the noise", no_wrap=True)
    for point in found.curve:
        style = "bold" if point == chosen_point(found) else None
        table.add_column(f"{level_of(found, point):.3g}", justify="right", style=style, no_wrap=True)
    table.add_row("right" if found.labelled else "the same", *(f"{point.share:.1%}" for point in found.curve))
    table.add_row("95 % from", "", *(f"{math.floor(1000 * point.low) / 1000:.1%}" for point in found.curve[1:]))
    table.add_row("to", "", *(f"{math.ceil(1000 * point.high) / 1000:.1%}" for point in found.curve[1:]))
    return Group(Text(f"{answer_share(found)}, {len(found.images):,} images", style="bold"), table)


@dataclass(frozen=True, eq=False)
class Ranking:
    """The most fragile images as a table, with their scores where a terminal is wide enough for them."""

    found: Study

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(f"The most fragile images at {noise_in_words(self.found)}: how often the answer flips", style="bold")
        yield self.table(scores=options.max_width >= WIDE_ENOUGH)

    def table(self, scores: bool) -> Table:
        found, table, labels = self.found, _table(), self.found.images.labels
        table.add_column("image", min_width=10)
        for name in ("label", "answer") if found.labelled else ("answer",):
            table.add_column(name, justify="right", min_width=len(name))
        table.add_column("flips", justify="right", no_wrap=True)
        table.add_column("95 % interval", no_wrap=True)
        table.add_column("to", justify="right", min_width=2)
        for name in ("score of the answer", "of the other") if scores else ():
            table.add_column(name, justify="right", no_wrap=True)
        for number in found.order[:RANKED].tolist():
            predicted, rival = int(found.predicted[number]), int(found.rivals[number])
            flip, known = flip_in_words(found, number)
            cells = [
                found.images.names[number],
                *([] if labels is None else [found.class_name(int(labels[number]))]),
                found.class_name(predicted),
                flip,
                known.removeprefix("between ").replace(" and ", " to "),
                found.class_name(rival),
                *([_score(found, number, predicted), _score(found, number, rival)] if scores else []),
            ]
            table.add_row(*(Text(printable(cell), overflow="ellipsis") for cell in cells))
        return table


def _attacks(attacks: AttackStudy | NotAttacked) -> RenderableType:
    return Text(printable(attacks.reason)) if isinstance(attacks, NotAttacked) else draw_few(attacks)


def _score(found: Study, number: int, label: int) -> str:
    """Mean and standard deviation, if that score was followed."""
    place = found.scores.place(number, label)
    if place is None:
        return ""
    mean, deviation = float(found.scores.mean[number, place]), float(found.scores.deviation[number, place])
    return f"{in_words(mean)} ± {deviation:.2g}"
