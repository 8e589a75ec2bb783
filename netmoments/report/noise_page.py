"""A noise study as files: one self-contained HTML page that fetches nothing, JSON and CSV.

The page has all facts without scripts. Its one script (`templates/noise.js`) draws them at any noise level and for any
class, and shows an image that is clicked on; the numbers and words for that are `playable`.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from netmoments.files import write_files_whole
from netmoments.report.attack_page import attacked_cases, few_record
from netmoments.report.attack_study import AttackStudy, NotAttacked, attackable
from netmoments.report.attack_words import few_in_words
from netmoments.report.noise_study import ALL_SCORES, COPIES, CurvePoint, Example, FlippedImage, Study
from netmoments.report.noise_words import (
    answer_share,
    band_in_words,
    bounded_in_words,
    chosen_point,
    flip_in_words,
    fragile_in_words,
    largest_change_in_words,
    level_in_words,
    level_of,
    method_in_words,
    more_in_words,
    nearest_in_words,
    noise_in_words,
    share_in_words,
    stopped_in_words,
)
from netmoments.report.page import (
    SCORES_WIDE,
    CurveMark,
    FlipMark,
    ScoreBar,
    accuracy_chart,
    csv_text,
    data_block,
    finite,
    flip_strip,
    for_any_screen,
    images_a_mark,
    render,
    scores_chart,
    script,
    share_limits,
    small_picture,
)
from netmoments.report.pictures import over_the_image
from netmoments.report.words import Provenance, at_most_in_words, in_words, interval_in_words, seconds_in_words

RANKED = 18
PLAYED = 600
"""Images that a page holds one by one, the most fragile of them."""
NO_BREAK = "\u00a0"
LONG_NAME = 8
"""Letters of a class's name that fit below a small picture."""
LEFT_OUT = 50
"""Files that could not be read, by name."""
FACTS_OF_ATTACKS = ("samples fooled", "most often taken for", "pixels not changed", "σ, grey levels")
"""What a report says of an attacked image; the page of `netmoments attack` says more."""


def render_page(found: Study, provenance: Provenance, model: str, data: str) -> str:
    """The page as text."""
    noise = noise_in_words(found)
    code, allowed = script("noise.js")
    return render(
        "noise.html",
        title=f"{model} under noise",
        headline=f"What noise of {noise.replace(' ', NO_BREAK)} does to {model}",
        subtitle=f"{len(found.images):,} images of {data}, {provenance.date}",
        facts=_facts(found),
        labelled=found.labelled,
        noise=noise,
        curve=_curve(found),
        strip=_strip(found),
        ranking=[_about(found, number) for number in found.order[:RANKED].tolist()],
        more=len(found.images) > RANKED,
        images=len(found.images),
        examples=[_example(found, example) for example in found.examples],
        attacks=_attacks(found),
        skipped=[item._asdict() for item in found.images.skipped],
        left_out=LEFT_OUT,
        method=method_in_words(found),
        provenance=list(asdict(provenance).items()),
        table=_table(found),
        data=data_block(playable(found)),
        script=code,
        allowed=allowed,
    )


def _facts(found: Study) -> list[dict[str, str]]:
    """The whole in a few numbers."""
    clean, chosen = share_in_words(found.curve[0]), chosen_point(found)
    at_noise = f"{_kept(found)} at {noise_in_words(found)}, {band_in_words(chosen)}"
    took = f"{int(found.runs.sum()):,} runs of the network to find how often each image flips"
    facts = [
        ("clean", clean, "of the answers are right without noise"),
        ("share", share_in_words(chosen), at_noise),
        ("fragile", fragile_in_words(found.interval), "images flip more than one time in ten"),
        ("robust", *_most_robust(found)),
        ("took", seconds_in_words(found.seconds), f"it took in all; {took}"),
    ]
    shown = facts if found.labelled else facts[1:]
    return [{"name": name, "value": value, "meaning": meaning} for name, value, meaning in shown]


def _kept(found: Study) -> str:
    return "are right" if found.labelled else "stay the same"


def _most_robust(found: Study) -> tuple[str, str]:
    """What can be said of the images that are farthest from flipping."""
    bounded = found.bounded
    if bool(bounded.any()):
        most = at_most_in_words(float(found.interval[bounded, 1].max()))
        return f"{int(bounded.sum()):,}", f"images were never seen to flip: each below {most}"
    last = int(found.order[-1])
    value, at_least, at_most = interval_in_words(float(found.flip[last]), *found.interval[last].tolist())
    return value, f"how often the most robust image flips, between {at_least} and {at_most}"


def _curve(found: Study) -> dict[str, Any]:
    marks = {point: _curve_mark(found, point) for point in found.curve}
    curve, chosen = list(marks.values()), marks[chosen_point(found)]
    low, high = share_limits(curve)
    return {
        "chart": for_any_screen(partial(accuracy_chart, curve, chosen, answer_share(found), _axis_of(found))),
        "begins": "" if low == 0 else f"{100 * low:.3g}%",
        "ends": f"{100 * high:.3g}%",
    }


def _curve_mark(found: Study, point: CurvePoint) -> CurveMark:
    return CurveMark(level_of(found, point), point.share, point.low, point.high, level_in_words(found, point))


def _wrong(found: Study, number: int) -> bool:
    return found.label(number) not in (None, int(found.predicted[number]))


def _strip(found: Study) -> dict[str, Any]:
    """How far each image is from flipping, and what its marks mean."""
    marks = [_flip_mark(found, number) for number in found.order.tolist()]
    return {
        "chart": for_any_screen(partial(flip_strip, marks)),
        "found": not bool(found.bounded.all()),
        "bounded": bounded_in_words(found),
        "more": more_in_words(found) or stopped_in_words(found),
        "wrong": any(mark.wrong for mark in marks),
        "each": images_a_mark(len(marks)),
    }


def _flip_mark(found: Study, number: int) -> FlipMark:
    low, high = found.interval[number].tolist()
    said = ", ".join(flip_in_words(found, number))
    return FlipMark(
        found.images.names[number], float(found.flip[number]), low, high, said, _wrong(found, number)
    )  # fmt: skip


def _about(found: Study, number: int) -> dict[str, Any]:
    """An image, what it is taken for, and how often that changes."""
    return {**_answers(found, number), "picture": small_picture(found.images.images[number])}


def _answers(found: Study, number: int) -> dict[str, Any]:
    label, seen = found.label(number), float(found.flip[number]) > 0
    flip, known = flip_in_words(found, number)
    return {
        "name": found.images.names[number],
        "flip": flip,
        "known": known,
        "answer": found.class_name(int(found.predicted[number])),
        "label": None if label is None else found.class_name(label),
        "wrong": _wrong(found, number),
        "to": f"flips to {found.class_name(int(found.rivals[number]))}" if seen else "no flip seen",
    }


def _example(found: Study, example: Example) -> dict[str, Any]:
    number, predicted = example.image, int(found.predicted[example.image])
    bars = _score_bars(found, number)
    copies: list[dict[str, Any]] = [
        {"picture": small_picture(image), "answer": found.class_name(int(k)), "flipped": int(k) != predicted}
        for image, k in zip(example.noisy, example.noisy_classes, strict=True)
    ]
    nearest = found.nearest_flip(number)
    return {
        **_about(found, number),
        "nearest": None if nearest is None else nearest_in_words(found, nearest),
        "copies": copies,
        "long": max(len(copy["answer"]) for copy in copies) > LONG_NAME,
        "chart": for_any_screen(partial(scores_chart, bars), SCORES_WIDE),
        "mean_error": in_words(float(f"{max(bar.mean_error for bar in bars):.1g}")),
        "deviation_error": in_words(float(f"{max(bar.deviation_error for bar in bars):.1g}")),
    }


def _score_bars(found: Study, number: int) -> list[ScoreBar]:
    """The followed classes of an image, with how often each won among its samples."""
    scores = found.scores
    return [
        ScoreBar(
            found.class_name(k), float(scores.mean[number, place]), float(scores.deviation[number, place]),
            float(scores.mean_error[number, place]), float(scores.deviation_error[number, place]),
            _won_in_words(float(found.shares[number, place])), k == int(found.predicted[number]),
        )
        for place, k in enumerate(scores.outputs[number].tolist())
    ]  # fmt: skip


def _won_in_words(share: float) -> str:
    """A share of samples, short."""
    if share == 0:
        return "—"
    return f"{share:.1%}" if 0.001 <= share < 0.9995 else "< 0.1%" if share < 0.5 else f"{share:.0%}"


def _table(found: Study) -> dict[str, Any]:
    """The images as rows, the most fragile first, with how often each flips at every level."""
    levels = range(1, len(found.levels))
    at_levels = [found.at(place) for place in levels]
    rows = [
        {**_answers(found, number), "levels": [flip_in_words(each, number)[0] for each in at_levels]}
        for number in found.order[:PLAYED].tolist()
    ]
    return {"levels": [_level_name(found, place) for place in levels], "rows": rows}


def _level_name(found: Study, place: int) -> str:
    return level_in_words(found, found.levels[place].point())


def playable(found: Study) -> dict[str, Any]:
    """What `noise.js` draws from: levels, classes with their curves, rankings, and image by image."""
    numbers = found.order[:PLAYED].sort().values
    at_levels = [found.at(place) for place in range(len(found.levels))]
    groups = sorted(set(found.kinds.tolist()))
    places = torch.full((len(found.images),), -1).scatter(0, numbers, torch.arange(len(numbers)))
    group_of = {k: place for place, k in enumerate(groups, start=1)}
    images = [_played(found, at_levels, number, group_of[int(found.kinds[number])]) for number in numbers.tolist()]
    nearest = {each.image: _flipped(found, each) for each in found.nearest}
    for name, some in (("attack", _attacks_by_image(found)), ("nearest", nearest)):
        for number, shown in some.items():
            if int(places[number]) >= 0:
                images[int(places[number])][name] = shown
    event = found.images.images[0]
    return {
        "levels": [
            {"said": _level_name(found, place), "x": _digits(level_of(found, level.point())), "sigma": level.sigma}
            for place, level in enumerate(found.levels)
        ],
        "chosen": next(place for place, each in enumerate(at_levels) if each is found),
        "noise": _axis_of(found),
        "answers": answer_share(found),
        "kept": _kept(found),
        "classes": {k: found.class_name(k) for k in _classes_shown(found, at_levels)},
        "groups": [
            _group(found, at_levels, "all images", slice(None)),
            *(_group(found, at_levels, found.class_name(k), found.kinds == k) for k in groups),
        ],
        "ranking": [[place for place in places[each.order].tolist() if place >= 0] for each in at_levels],
        "images": images,
        "first": RANKED,
        "drawn": found.config.covariance is None,
        "copies": COPIES,
        "channels": len(event),
    }


def _axis_of(found: Study) -> str:
    return "noise σ; pixels are in [0, 1]" if found.config.covariance is None else "times the given noise"


def _classes_shown(found: Study, at_levels: list[Study]) -> list[int]:
    """Those that the page may have to name."""
    if found.count <= ALL_SCORES:
        return list(range(found.count))
    named = [found.predicted, found.scores.outputs.flatten(), *(each.rivals for each in at_levels)]
    named += [each.noisy_classes for each in found.examples]
    named += [torch.tensor([each.becomes for each in found.nearest], dtype=torch.int64)]
    for more in (found.images.labels, None if found.copies is None else found.copies.flatten()):
        named += [] if more is None else [more]
    return torch.cat(named).unique().tolist()


def _group(found: Study, at_levels: list[Study], name: str, which: Tensor | slice) -> dict[str, Any]:
    """The images of one class, or all of them: the curve, and how many are fragile."""
    return {
        "name": name,
        "count": len(found.predicted[which]),
        "points": [
            _group_point(level.point(which), each, which) for level, each in zip(found.levels, at_levels, strict=True)
        ],
    }


def _group_point(point: CurvePoint, each: Study, which: Tensor | slice) -> dict[str, Any]:
    interval, bounded = each.interval[which], each.bounded[which]
    return {
        **{name: _digits(getattr(point, name)) for name in ("share", "low", "high")},
        "said": share_in_words(point),
        "band": band_in_words(point),
        "fragile": fragile_in_words(interval),
        "never": int(bounded.sum()),
        "below": at_most_in_words(float(interval[bounded, 1].max())) if bool(bounded.any()) else "",
    }


def _played(found: Study, at_levels: list[Study], number: int, group: int) -> dict[str, Any]:
    """An image at every level."""
    copies = found.copies
    examples = {} if copies is not None else {example.image: example for example in found.examples}
    example = examples.get(number)
    return {
        "number": number,
        "name": found.images.names[number],
        "group": group,
        "picture": small_picture(found.images.images[number]),
        "answer": int(found.predicted[number]),
        "label": found.label(number),
        "wrong": _wrong(found, number),
        "outputs": found.scores.outputs[number].tolist(),
        "levels": [_played_level(each, place, number) for place, each in enumerate(at_levels)],
        "copies": None if copies is None else copies[:, number].tolist(),
        "stored": None if example is None else [
            [small_picture(noisy), int(k)] for noisy, k in zip(example.noisy, example.noisy_classes, strict=True)
        ],
    }  # fmt: skip


def _flipped(found: Study, nearest: FlippedImage) -> dict[str, Any]:
    """The smallest change that was found to flip an image: the image with it, and where it is."""
    image = found.images.images[nearest.image]
    return {
        "picture": small_picture(image + nearest.change),
        "over": small_picture(over_the_image(image, nearest.change)),
        "to": nearest.becomes,
        "distance": _digits(nearest.distance),
        "largest": largest_change_in_words(nearest),
    }


def _played_level(each: Study, place: int, number: int) -> dict[str, Any]:
    said, known = flip_in_words(each, number) if place else ("never", "without noise")
    low, high = each.interval[number].tolist()
    return {
        "flip": _digits(float(each.flip[number])),
        "low": _digits(low),
        "high": _digits(high),
        "said": said,
        "known": known,
        "to": int(each.rivals[number]),
        "lead": _digits(float(each.lead[number])),
        "mean": [_digits(value) for value in each.scores.mean[number].tolist()],
        "deviation": [_digits(value) for value in each.scores.deviation[number].tolist()],
        "won": [_digits(value) for value in each.shares[number].tolist()],
    }


def _digits(value: float) -> float | int | None:
    """As many as a picture shows."""
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.4g}")
    return int(rounded) if rounded == int(rounded) else rounded


def _attacks_by_image(found: Study) -> dict[int, dict[str, Any]]:
    """What is shown of the images that noise was made for."""
    attacks = found.attacks
    if not isinstance(attacks, AttackStudy):
        return {}
    places = attackable(found.predicted, found.images.labels, found.config.attacks)
    shown = {}
    for row, case in enumerate(_attacks(found)["cases"]):  # type: ignore[index]
        result, sample = attacks.result, attacks.row(row)
        shown[int(places[int(result.places[row])])] = {
            "over": small_picture(over_the_image(sample.image, sample.mu)),
            "noisy": small_picture(sample.noisy),
            "taken": attacks.class_name(attacks.noisy_classes[row]),
            "verdict": case["verdict"],
            "facts": [list(fact) for fact in case["facts"]],
        }
    return shown


def _attacks(found: Study) -> dict[str, Any] | None:
    """The section of noise that was made to fool the network, None where none was asked for."""
    attacks = found.attacks
    if attacks is None:
        return None
    if isinstance(attacks, NotAttacked):
        return {"says": attacks.reason, "cases": []}
    cases = attacked_cases(attacks)
    for case in cases:
        case["facts"] = [fact for fact in case["facts"] if fact[0] in FACTS_OF_ATTACKS]
    return {"says": few_in_words(attacks), "cases": cases}


def write_report(found: Study, provenance: Provenance, folder: Path, model: str, data: str) -> dict[str, Path]:
    """`report.html`, `report.json` and `images.csv` in a folder, which is made if need be."""
    record = as_record(found, provenance, model, data)
    contents = {
        "report.html": render_page(found, provenance, model, data),
        "report.json": json.dumps(record, indent=1, allow_nan=False) + "\n",
        "images.csv": _as_csv(record["images"]),
    }
    return write_files_whole(folder, {name: text.encode() for name, text in contents.items()})


def as_record(found: Study, provenance: Provenance, model: str, data: str) -> dict[str, Any]:
    """Everything that was found, for machines."""
    config = found.config
    return {
        "model": model,
        "data": data,
        "provenance": asdict(provenance),
        "sigma": config.sigma,
        "covariance": None if config.covariance is None else list(config.covariance.shape),
        "tolerance": config.tolerance,
        "rare": "all" if config.rare is None else config.rare,
        "clean_accuracy": found.clean_accuracy,
        "curve_of": "right" if found.labelled else "unchanged",
        "curve": [asdict(point) for point in found.curve],
        "scores_by": found.scores.method,
        "images": [_image_record(found, number) for number in range(len(found.images))],
        "stopped": found.stopped,
        "seconds": found.seconds,
        "attacks": few_record(found.attacks),
        "skipped": [item._asdict() for item in found.images.skipped],
    }


def _image_record(found: Study, number: int) -> dict[str, Any]:
    scores, nearest = found.scores, found.nearest_flip(number)
    low, high = found.interval[number].tolist()
    return {
        "name": found.images.names[number],
        "label": found.label(number),
        "predicted": int(found.predicted[number]),
        "flip_probability": float(found.flip[number]),
        "flip_low": low,
        "flip_high": high,
        "flip_runs": int(found.runs[number]),
        "flip_route": found.route[number],
        "rival": int(found.rivals[number]),
        "nearest_flip": None
        if nearest is None
        else {
            "standard_deviations": nearest.distance,
            "class": nearest.becomes,
            "largest_change": float(nearest.change.abs().max()),
        },
        "classes": scores.outputs[number].tolist(),
        "mean": _numbers(scores.mean[number].tolist()),
        "mean_error": _numbers(scores.mean_error[number].tolist()),
        "standard_deviation": _numbers(scores.deviation[number].tolist()),
        "standard_deviation_error": _numbers(scores.deviation_error[number].tolist()),
        "class_probabilities": _numbers(found.shares[number].tolist()),
        "levels": [_level_record(found, place, number) for place in range(1, len(found.levels))],
    }


def _level_record(found: Study, place: int, number: int) -> dict[str, Any]:
    """How often an image flips at another noise level, from samples alone."""
    level = found.levels[place]
    low, high = level.interval[number].tolist()
    return {
        "sigma": level.sigma,
        "samples": int(level.samples[number]),
        "flip_probability": float(level.flip[number]),
        "flip_low": low,
        "flip_high": high,
        "rival": int(level.rivals[number]),
    }


def _numbers(values: list[float]) -> list[float | None]:
    return [finite(value) for value in values]


CSV = ("name", "label", "predicted", "flip_probability", "flip_low", "flip_high", "rival")


def _as_csv(images: list[dict[str, Any]]) -> str:
    """One line an image, of its record."""
    rows = []
    for record in images:
        place = record["classes"].index(record["predicted"])
        rows.append([*(record[key] for key in CSV), record["mean"][place], record["standard_deviation"][place]])
    return csv_text([*CSV, "score", "score_standard_deviation"], rows)
