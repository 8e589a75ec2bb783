"""The results of a noise study in words, the same in the terminal and on the page; and its tables."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text
from torch import Tensor

from netmoments.files import printable
from netmoments.report.attack_study import AttackStudy, NotAttacked
from netmoments.report.attack_words import draw_few, empty_table
from netmoments.report.noise_study import CurvePoint, FlippedImage, Study
from netmoments.report.words import at_most_in_words, in_words, interval_in_words, seconds_in_words

FRAGILE = 0.1
"""Images that flip more often than this are called fragile."""


def answer_share(study: Study) -> str:
    """What the curve shows, as a title."""
    return "Answers that are right" if study.labelled else "Answers that stay the same"


def noise_in_words(study: Study) -> str:
    """The noise that the study is about."""
    return f"σ = {study.config.sigma:.3g}" if study.config.covariance is None else "the given covariance"


def level_of(study: Study, point: CurvePoint) -> float:
    """The noise at a point of the curve: σ, or a multiple of the deviations of a given covariance."""
    return point.sigma if study.config.covariance is None else point.sigma / study.config.sigma


def level_in_words(study: Study, point: CurvePoint) -> str:
    level = level_of(study, point)
    return f"σ = {level:.3g}" if study.config.covariance is None else f"{level:.3g} × the noise"


def chosen_point(study: Study) -> CurvePoint:
    """The point of the curve at the noise that the study is about."""
    return next(point for point in study.curve if math.isclose(point.sigma, study.config.sigma))


def band_in_words(point: CurvePoint) -> str:
    """The ends of the band at a point of the curve, rounded outwards."""
    digits = _digits(point)
    scale = 10.0 ** (digits + 2)
    low, high = math.floor(scale * point.low + 1e-6) / scale, math.ceil(scale * point.high - 1e-6) / scale
    return f"between {low:.{digits}%} and {high:.{digits}%}"


def share_in_words(point: CurvePoint) -> str:
    return f"{point.share:.{_digits(point)}%}" if point.share < 1 else "100%"


def _digits(point: CurvePoint) -> int:
    """Digits after the point of a percentage: one, or two where the band is narrow."""
    return 2 if 0 < point.high - point.low < 0.004 else 1


def flip_in_words(study: Study, number: int) -> tuple[str, str]:
    """How often noise flips an image; and how well that is known."""
    p, (low, high) = float(study.flip[number]), study.interval[number].tolist()
    samples = int(study.samples[number])
    if p == 0:
        return f"below {at_most_in_words(high)}", _nothing_seen(study, number)
    if p == 1 and study.route[number] == "frequencies":
        return f"above {math.floor(1000 * low) / 10:.3g}%", f"flipped in all {samples:,} samples"
    value, at_least, at_most = interval_in_words(p, low, high)
    return value, f"between {at_least} and {at_most}"


def _nothing_seen(study: Study, number: int) -> str:
    samples, runs = int(study.samples[number]), int(study.runs[number])
    by_samples = math.isclose(float(study.interval[number, 1]), min(1.0, 3 / samples), rel_tol=1e-3)
    return f"nothing seen in {samples:,} samples" if by_samples else f"nothing found in {runs:,} runs"


def nearest_in_words(study: Study, nearest: FlippedImage) -> str:
    """How far away an image's nearest flip is, and which class it leads to."""
    away = in_words(float(f"{nearest.distance:.2g}"))
    return (
        f"The smallest change found that makes it {study.class_name(nearest.becomes)} is {away} standard deviations of "
        f"the noise away, {largest_change_in_words(nearest)}."
    )


def largest_change_in_words(nearest: FlippedImage) -> str:
    return f"at most {math.ceil(255 * float(nearest.change.abs().max()))} of 255 grey levels on a pixel"


def fragile_in_words(interval: Tensor) -> str:
    """How many images flip more than one time in ten: one number, or a range where intervals (N, 2) leave it open."""
    low, high = (int((end > FRAGILE).sum()) for end in interval.unbind(1))
    return f"{low}" if low == high else f"{low}–{high}"


def bounded_in_words(study: Study) -> str:
    """What is known of the images that were never seen to flip."""
    count, bounds = int(study.bounded.sum()), study.interval[study.bounded, 1]
    if not count:
        return ""
    most, least = at_most_in_words(float(bounds.max())), at_most_in_words(float(bounds.min()))
    rate = most if most == least else f"bounds from {least} to {most}"
    which = "image was" if count == 1 else "images were"
    return f"{count:,} of {len(study.images):,} {which} never seen to flip: each flips less often than {rate}."


def runs_in_words(study: Study) -> str:
    """How many runs of the network and how long the study took."""
    return f"{int(study.runs.sum()):,} runs of the network for these flips; {seconds_in_words(study.seconds)} in all"


def method_in_words(study: Study) -> list[str]:
    """How the numbers of a report were found and what they mean, in paragraphs."""
    config = study.config
    paragraphs = [
        f"Every image was given fresh noise again and again, and the network was asked each time: "
        f"{samples_in_words(study)}. {_rare_in_words(study)}",
        "Intervals and bands are of 95 %: they are estimates with confidence intervals, not certificates. No interval "
        "covers flips of a kind that nothing here came across. Noise is added to pixels in [0, 1] and not clipped.",
        _scores_in_words(study),
    ]
    wide = int((study.half_width > 1.02 * config.tolerance).sum())
    if wide:
        paragraphs.append(
            f"The intervals of {wide:,} images are wider than the ±{config.tolerance:g} that was asked for: the "
            f"samples (--samples) or the time (--seconds) ran out."
        )
    return [*paragraphs, *(part for part in (stopped_in_words(study), more_in_words(study)) if part)]


def samples_in_words(study: Study) -> str:
    """How many samples the images had."""
    least, most = int(study.samples.min()), int(study.samples.max())
    if least == most:
        return f"{least:,} samples of each"
    return f"from {least:,} samples of images that never flip to {most:,} of those that flip often"


def _rare_in_words(study: Study) -> str:
    """How the flips were found that are too rare to be counted."""
    routes = [route for route in study.route if route != "frequencies"]
    if not routes:
        return "Flips were counted."
    routes_in_words = {
        "importance": "samples drawn where the network is about to change its answer, each counted by how likely it is "
        "(importance sampling), and checked by a second estimate",
        "splitting": "moving samples step by step towards a flip (splitting)",
    }
    taken = [words for route, words in routes_in_words.items() if route in routes]
    many = "1 image" if len(routes) == 1 else f"{len(routes)} images"
    how = f" by {', or by '.join(taken)}" if taken else " otherwise"
    return f"Flips were counted; those of {many}, too rare for that, were found{how}."


def _scores_in_words(study: Study) -> str:
    """Where the scores are from, and which of them are shown."""
    shown, classes = study.scores.outputs.shape[1], study.count
    source = "those samples" if study.scores.method == "sampling" else f"a formula ({study.scores.method})"
    few = f"; of {classes:,} classes, the {shown} with the largest scores are shown" if shown < classes else ""
    return f"Means and standard deviations of scores are from {source}{few}."


def stopped_in_words(study: Study) -> str:
    """What ended the work early, and what that means for the results."""
    if not study.stopped:
        return ""
    sentence = (
        f"{study.stopped[0].upper()}{study.stopped[1:]} ended the work early: what is shown is what was known by then"
    )
    return f"{sentence}; --seconds gives it more time." if "time" in study.stopped else f"{sentence}."


def more_in_words(study: Study) -> str:
    """How to know more about the images of which only a bound is known."""
    rare = study.config.rare
    if not bool(study.bounded.any()) or rare is None or rare >= len(study.images):
        return ""
    investigated = f"only for the {rare} images nearest to flipping" if rare else "for no image"
    return f"How rare flips are was investigated {investigated}; --rare all does it for every image."


RANKED = 10
"""Images in the terminal's table of the most fragile ones."""
WIDE_ENOUGH = 110
"""A terminal of so many columns has room for scores in that table."""


def draw(study: Study) -> RenderableType:
    """The accuracy over noise, the most fragile images, noise made to fool the network, and what it took."""
    parts: list[RenderableType] = [_curve(study), Text(), Ranking(study)]
    parts += [Text(sentence) for sentence in (bounded_in_words(study), more_in_words(study)) if sentence]
    if study.attacks is not None:
        parts += [Text(), Text("Noise made to fool it", style="bold"), _attacks(study.attacks)]
    if study.images.skipped:
        count = len(study.images.skipped)
        parts.append(Text(f"\n{count} file{'s' if count > 1 else ''} could not be read:", style="yellow"))
        parts += [Text(printable(f"  {item.path}: {item.reason}")) for item in study.images.skipped[:5]]
    parts += [Text(), Text(f"{runs_in_words(study)}.")]
    if study.stopped:
        parts.append(Text(stopped_in_words(study), style="yellow"))
    return Group(*parts)


def _curve(study: Study) -> Group:
    """The accuracy curve as a table with a column for each level, 80 wide unless σ has many digits."""
    table = empty_table()
    table.padding = (0, 1, 0, 0)
    table.add_column("noise σ" if study.config.covariance is None else "× the noise", no_wrap=True)
    for point in study.curve:
        style = "bold" if point == chosen_point(study) else None
        table.add_column(f"{level_of(study, point):.3g}", justify="right", style=style, no_wrap=True)
    table.add_row("right" if study.labelled else "the same", *(f"{point.share:.1%}" for point in study.curve))
    table.add_row("95 % from", "", *(f"{math.floor(1000 * point.low) / 1000:.1%}" for point in study.curve[1:]))
    table.add_row("to", "", *(f"{math.ceil(1000 * point.high) / 1000:.1%}" for point in study.curve[1:]))
    return Group(Text(f"{answer_share(study)}, {len(study.images):,} images", style="bold"), table)


@dataclass(frozen=True, eq=False)
class Ranking:
    """The most fragile images as a table, with their scores where a terminal is wide enough for them."""

    study: Study

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(f"The most fragile images at {noise_in_words(self.study)}: how often the answer flips", style="bold")
        yield self.table(scores=options.max_width >= WIDE_ENOUGH)

    def table(self, scores: bool) -> Table:
        study, table, labels = self.study, empty_table(), self.study.images.labels
        table.add_column("image", min_width=10)
        for name in ("label", "answer") if study.labelled else ("answer",):
            table.add_column(name, justify="right", min_width=len(name))
        table.add_column("flips", justify="right", no_wrap=True)
        table.add_column("95 % interval", no_wrap=True)
        table.add_column("to", justify="right", min_width=2)
        for name in ("score of the answer", "of the other") if scores else ():
            table.add_column(name, justify="right", no_wrap=True)
        for number in study.order[:RANKED].tolist():
            predicted, rival = int(study.predicted[number]), int(study.rivals[number])
            flip, known = flip_in_words(study, number)
            cells = [
                study.images.names[number],
                *([] if labels is None else [study.class_name(int(labels[number]))]),
                study.class_name(predicted),
                flip,
                known.removeprefix("between ").replace(" and ", " to "),
                study.class_name(rival),
                *([_score(study, number, predicted), _score(study, number, rival)] if scores else []),
            ]
            table.add_row(*(Text(printable(cell), overflow="ellipsis") for cell in cells))
        return table


def _attacks(attacks: AttackStudy | NotAttacked) -> RenderableType:
    return Text(printable(attacks.reason)) if isinstance(attacks, NotAttacked) else draw_few(attacks)


def _score(study: Study, number: int, label: int) -> str:
    """Mean and standard deviation of a class's score; empty if that score was not followed."""
    place = study.scores.place(number, label)
    if place is None:
        return ""
    mean, deviation = float(study.scores.mean[number, place]), float(study.scores.deviation[number, place])
    return f"{in_words(mean)} ± {deviation:.2g}"
