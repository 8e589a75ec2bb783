"""A noise study as files: one self-contained HTML page that fetches nothing, JSON and CSV.

The page shows its main results without scripts. Its one script (`templates/noise.js`) draws them at any noise level and
for any class, and shows an image that is clicked on; `playable` gives it the numbers and words.
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
"""The ranking shows so many images at first, the most fragile ones."""
PLAYED = 600
"""Of a larger study, the page has only this many images one by one, the most fragile ones."""
NO_BREAK = "\u00a0"
LONG_NAME = 8
"""A class's name of so many letters fits below a small picture."""
LEFT_OUT = 50
"""At most so many of the files that could not be read are named."""
FACTS_OF_ATTACKS = ("samples fooled", "most often taken for", "pixels not changed", "σ, grey levels")
"""The facts on an attacked image in a report; the page of `netmoments attack` has more."""
CSV = ("name", "label", "predicted", "flip_probability", "flip_low", "flip_high", "rival")
"""Fields of an image's record that are columns of `images.csv`."""


def render_page(study: Study, provenance: Provenance, model: str, data: str) -> str:
    """The page as text."""
    noise, attacks = noise_in_words(study), _attacks(study)
    code, allowed = script("noise.js")
    return render(
        "noise.html",
        title=f"{model} under noise",
        headline=f"What noise of {noise.replace(' ', NO_BREAK)} does to {model}",
        subtitle=f"{len(study.images):,} images of {data}, {provenance.date}",
        facts=_facts(study),
        labelled=study.labelled,
        noise=noise,
        curve=_curve(study),
        strip=_strip(study),
        ranking=[_with_picture(study, number) for number in study.order[:RANKED].tolist()],
        more=len(study.images) > RANKED,
        images=len(study.images),
        examples=[_example(study, example) for example in study.examples],
        attacks=attacks,
        skipped=[item._asdict() for item in study.images.skipped],
        left_out=LEFT_OUT,
        method=method_in_words(study),
        provenance=list(asdict(provenance).items()),
        table=_table(study),
        data=data_block(playable(study, [] if attacks is None else attacks["cases"])),
        script=code,
        allowed=allowed,
    )


def _facts(study: Study) -> list[dict[str, str]]:
    """The study in a few numbers."""
    clean, chosen = share_in_words(study.curve[0]), chosen_point(study)
    at_noise = f"{_kept(study)} at {noise_in_words(study)}, {band_in_words(chosen)}"
    runs = f"{int(study.runs.sum()):,} runs of the network to find how often each image flips"
    facts = [
        ("clean", clean, "of the answers are right without noise"),
        ("share", share_in_words(chosen), at_noise),
        ("fragile", fragile_in_words(study.interval), "images flip more than one time in ten"),
        ("robust", *_most_robust(study)),
        ("took", seconds_in_words(study.seconds), f"it took in all; {runs}"),
    ]
    shown = facts if study.labelled else facts[1:]
    return [{"name": name, "value": value, "meaning": meaning} for name, value, meaning in shown]


def _kept(study: Study) -> str:
    """What the answers do that the curve counts, as the end of a sentence."""
    return "are right" if study.labelled else "stay the same"


def _most_robust(study: Study) -> tuple[str, str]:
    """What can be said of the images that are farthest from flipping."""
    bounded = study.bounded
    if bool(bounded.any()):
        most = at_most_in_words(float(study.interval[bounded, 1].max()))
        return f"{int(bounded.sum()):,}", f"images were never seen to flip: each below {most}"
    last = int(study.order[-1])
    value, at_least, at_most = interval_in_words(float(study.flip[last]), *study.interval[last].tolist())
    return value, f"how often the most robust image flips, between {at_least} and {at_most}"


def _curve(study: Study) -> dict[str, Any]:
    """The accuracy curve, and where its axis begins and ends."""
    marks = {point: _curve_mark(study, point) for point in study.curve}
    curve, chosen = list(marks.values()), marks[chosen_point(study)]
    low, high = share_limits(curve)
    return {
        "chart": for_any_screen(partial(accuracy_chart, curve, chosen, answer_share(study), _axis_of(study))),
        "begins": "" if low == 0 else f"{100 * low:.3g}%",
        "ends": f"{100 * high:.3g}%",
    }


def _curve_mark(study: Study, point: CurvePoint) -> CurveMark:
    return CurveMark(level_of(study, point), point.share, point.low, point.high, level_in_words(study, point))


def _wrong(study: Study, number: int) -> bool:
    """Whether an image's answer without noise is not its label."""
    return study.label(number) not in (None, int(study.predicted[number]))


def _strip(study: Study) -> dict[str, Any]:
    """How far each image is from flipping: the chart, and what its legend needs."""
    marks = [_flip_mark(study, number) for number in study.order.tolist()]
    return {
        "chart": for_any_screen(partial(flip_strip, marks)),
        "found": not bool(study.bounded.all()),
        "bounded": bounded_in_words(study),
        "more": more_in_words(study) or stopped_in_words(study),
        "wrong": any(mark.wrong for mark in marks),
        "each": images_a_mark(len(marks)),
    }


def _flip_mark(study: Study, number: int) -> FlipMark:
    low, high = study.interval[number].tolist()
    name, flip = study.images.names[number], float(study.flip[number])
    return FlipMark(name, flip, low, high, ", ".join(flip_in_words(study, number)), _wrong(study, number))


def _with_picture(study: Study, number: int) -> dict[str, Any]:
    """An image, what it is taken for, and how often that changes."""
    return {**_answers(study, number), "picture": small_picture(study.images.images[number])}


def _answers(study: Study, number: int) -> dict[str, Any]:
    """The name of an image, what it is taken for, and how often that changes."""
    label, seen = study.label(number), float(study.flip[number]) > 0
    flip, known = flip_in_words(study, number)
    return {
        "name": study.images.names[number],
        "flip": flip,
        "known": known,
        "answer": study.class_name(int(study.predicted[number])),
        "label": None if label is None else study.class_name(label),
        "wrong": _wrong(study, number),
        "to": f"flips to {study.class_name(int(study.rivals[number]))}" if seen else "no flip seen",
    }


def _example(study: Study, example: Example) -> dict[str, Any]:
    """An image with its noisy copies and scores."""
    number, predicted = example.image, int(study.predicted[example.image])
    bars = _score_bars(study, number)
    copies: list[dict[str, Any]] = [
        {"picture": small_picture(image), "answer": study.class_name(int(k)), "flipped": int(k) != predicted}
        for image, k in zip(example.noisy, example.noisy_classes, strict=True)
    ]
    nearest = study.nearest_flip(number)
    return {
        **_with_picture(study, number),
        "nearest": None if nearest is None else nearest_in_words(study, nearest),
        "copies": copies,
        "long": max(len(copy["answer"]) for copy in copies) > LONG_NAME,
        "chart": for_any_screen(partial(scores_chart, bars), SCORES_WIDE),
        "mean_error": in_words(float(f"{max(bar.mean_error for bar in bars):.1g}")),
        "deviation_error": in_words(float(f"{max(bar.deviation_error for bar in bars):.1g}")),
    }


def _score_bars(study: Study, number: int) -> list[ScoreBar]:
    """The followed classes of an image, with how often each won among its samples."""
    scores = study.scores
    return [
        ScoreBar(
            study.class_name(k), float(scores.mean[number, place]), float(scores.deviation[number, place]),
            float(scores.mean_error[number, place]), float(scores.deviation_error[number, place]),
            _won_in_words(float(study.shares[number, place])), k == int(study.predicted[number]),
        )
        for place, k in enumerate(scores.outputs[number].tolist())
    ]  # fmt: skip


def _won_in_words(share: float) -> str:
    """A share of samples in a few characters."""
    if share == 0:
        return "—"
    return f"{share:.1%}" if 0.001 <= share < 0.9995 else "< 0.1%" if share < 0.5 else f"{share:.0%}"


def _table(study: Study) -> dict[str, Any]:
    """The images as rows, the most fragile first, with how often each flips at every level."""
    levels = range(1, len(study.levels))
    at_levels = [study.at(place) for place in levels]
    rows = [
        {**_answers(study, number), "levels": [flip_in_words(at_level, number)[0] for at_level in at_levels]}
        for number in study.order[:PLAYED].tolist()
    ]
    return {"levels": [_level_name(study, place) for place in levels], "rows": rows}


def _level_name(study: Study, place: int) -> str:
    return level_in_words(study, study.levels[place].point())


def playable(study: Study, attacked: list[dict[str, Any]]) -> dict[str, Any]:
    """What `noise.js` draws from: levels, classes with their curves, rankings, and the images one by one.

    `attacked` are the cases that the page shows of the images that were attacked.
    """
    numbers = study.order[:PLAYED].sort().values
    at_levels = [study.at(place) for place in range(len(study.levels))]
    groups = sorted(set(study.kinds.tolist()))
    places = torch.full((len(study.images),), -1).scatter(0, numbers, torch.arange(len(numbers)))
    group_of = {k: place for place, k in enumerate(groups, start=1)}
    images = [_played(study, at_levels, number, group_of[int(study.kinds[number])]) for number in numbers.tolist()]
    nearest = {flipped.image: _flipped(study, flipped) for flipped in study.nearest}
    for name, by_image in (("attack", _attacks_by_image(study, attacked)), ("nearest", nearest)):
        for number, shown in by_image.items():
            if int(places[number]) >= 0:
                images[int(places[number])][name] = shown
    event = study.images.images[0]
    return {
        "levels": [
            {"said": _level_name(study, place), "x": _digits(level_of(study, level.point())), "sigma": level.sigma}
            for place, level in enumerate(study.levels)
        ],
        "chosen": next(place for place, at_level in enumerate(at_levels) if at_level is study),
        "noise": _axis_of(study),
        "answers": answer_share(study),
        "kept": _kept(study),
        "classes": {k: study.class_name(k) for k in _classes_shown(study, at_levels)},
        "groups": [
            _group(study, at_levels, "all images", slice(None)),
            *(_group(study, at_levels, study.class_name(k), study.kinds == k) for k in groups),
        ],
        "ranking": [[place for place in places[at_level.order].tolist() if place >= 0] for at_level in at_levels],
        "images": images,
        "first": RANKED,
        "drawn": study.config.covariance is None,
        "copies": COPIES,
        "channels": len(event),
    }


def _axis_of(study: Study) -> str:
    return "noise σ; pixels are in [0, 1]" if study.config.covariance is None else "times the given noise"


def _classes_shown(study: Study, at_levels: list[Study]) -> list[int]:
    """The classes that the page may have to name."""
    if study.count <= ALL_SCORES:
        return list(range(study.count))
    named = [study.predicted, study.scores.outputs.flatten(), *(at_level.rivals for at_level in at_levels)]
    named += [example.noisy_classes for example in study.examples]
    named += [torch.tensor([flipped.becomes for flipped in study.nearest], dtype=torch.int64)]
    named += [] if study.images.labels is None else [study.images.labels]
    named += [] if study.copies is None else [study.copies.flatten()]
    return torch.cat(named).unique().tolist()


def _group(study: Study, at_levels: list[Study], name: str, which: Tensor | slice) -> dict[str, Any]:
    """The images of one class, or all of them: the curve, and how many are fragile."""
    return {
        "name": name,
        "count": len(study.predicted[which]),
        "points": [
            _group_point(level.point(which), at_level, which)
            for level, at_level in zip(study.levels, at_levels, strict=True)
        ],
    }


def _group_point(point: CurvePoint, at_level: Study, which: Tensor | slice) -> dict[str, Any]:
    interval, bounded = at_level.interval[which], at_level.bounded[which]
    return {
        **{name: _digits(getattr(point, name)) for name in ("share", "low", "high")},
        "said": share_in_words(point),
        "band": band_in_words(point),
        "fragile": fragile_in_words(interval),
        "never": int(bounded.sum()),
        "below": at_most_in_words(float(interval[bounded, 1].max())) if bool(bounded.any()) else "",
    }


def _played(study: Study, at_levels: list[Study], number: int, group: int) -> dict[str, Any]:
    """An image at every level, as `noise.js` draws it."""
    copies = study.copies
    examples = {} if copies is not None else {example.image: example for example in study.examples}
    example = examples.get(number)
    return {
        "number": number,
        "name": study.images.names[number],
        "group": group,
        "picture": small_picture(study.images.images[number]),
        "answer": int(study.predicted[number]),
        "label": study.label(number),
        "wrong": _wrong(study, number),
        "outputs": study.scores.outputs[number].tolist(),
        "levels": [_played_level(at_level, place, number) for place, at_level in enumerate(at_levels)],
        "copies": None if copies is None else copies[:, number].tolist(),
        "stored": None if example is None else [
            [small_picture(noisy), int(k)] for noisy, k in zip(example.noisy, example.noisy_classes, strict=True)
        ],
    }  # fmt: skip


def _flipped(study: Study, nearest: FlippedImage) -> dict[str, Any]:
    """The smallest change that was found to flip an image: the changed image, and the change drawn over the image."""
    image = study.images.images[nearest.image]
    return {
        "picture": small_picture(image + nearest.change),
        "over": small_picture(over_the_image(image, nearest.change)),
        "to": nearest.becomes,
        "distance": _digits(nearest.distance),
        "largest": largest_change_in_words(nearest),
    }


def _played_level(at_level: Study, place: int, number: int) -> dict[str, Any]:
    """An image at one level; the level at place 0 is without noise."""
    said, known = flip_in_words(at_level, number) if place else ("never", "without noise")
    low, high = at_level.interval[number].tolist()
    return {
        "flip": _digits(float(at_level.flip[number])),
        "low": _digits(low),
        "high": _digits(high),
        "said": said,
        "known": known,
        "to": int(at_level.rivals[number]),
        "lead": _digits(float(at_level.lead[number])),
        "mean": [_digits(value) for value in at_level.scores.mean[number].tolist()],
        "deviation": [_digits(value) for value in at_level.scores.deviation[number].tolist()],
        "won": [_digits(value) for value in at_level.shares[number].tolist()],
    }


def _digits(value: float) -> float | int | None:
    """A number with as many digits as a picture shows; None where it is not finite."""
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.4g}")
    return int(rounded) if rounded == int(rounded) else rounded


def _attacks_by_image(study: Study, attacked: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The attacked images, as `noise.js` shows them: by their number among all images."""
    attacks = study.attacks
    if not isinstance(attacks, AttackStudy):
        return {}
    places = attackable(study.predicted, study.images.labels, study.config.attacks)
    shown = {}
    for row, case in enumerate(attacked):
        result, sample = attacks.result, attacks.row(row)
        shown[int(places[int(result.places[row])])] = {
            "over": small_picture(over_the_image(sample.image, sample.mu)),
            "noisy": small_picture(sample.noisy),
            "taken": attacks.class_name(attacks.noisy_classes[row]),
            "verdict": case["verdict"],
            "facts": [list(fact) for fact in case["facts"]],
        }
    return shown


def _attacks(study: Study) -> dict[str, Any] | None:
    """The section on noise that was made to fool the network; None where none was asked for."""
    attacks = study.attacks
    if attacks is None:
        return None
    if isinstance(attacks, NotAttacked):
        return {"says": attacks.reason, "cases": []}
    cases = attacked_cases(attacks)
    for case in cases:
        case["facts"] = [fact for fact in case["facts"] if fact[0] in FACTS_OF_ATTACKS]
    return {"says": few_in_words(attacks), "cases": cases}


def write_report(study: Study, provenance: Provenance, folder: Path, model: str, data: str) -> dict[str, Path]:
    """Write `report.html`, `report.json` and `images.csv` to a folder, which is made if needed."""
    record = as_record(study, provenance, model, data)
    contents = {
        "report.html": render_page(study, provenance, model, data),
        "report.json": json.dumps(record, indent=1, allow_nan=False) + "\n",
        "images.csv": _as_csv(record["images"]),
    }
    return write_files_whole(folder, {name: text.encode() for name, text in contents.items()})


def as_record(study: Study, provenance: Provenance, model: str, data: str) -> dict[str, Any]:
    """The whole study for JSON."""
    config = study.config
    return {
        "model": model,
        "data": data,
        "provenance": asdict(provenance),
        "sigma": config.sigma,
        "covariance": None if config.covariance is None else list(config.covariance.shape),
        "tolerance": config.tolerance,
        "rare": "all" if config.rare is None else config.rare,
        "clean_accuracy": study.clean_accuracy,
        "curve_of": "right" if study.labelled else "unchanged",
        "curve": [asdict(point) for point in study.curve],
        "scores_by": study.scores.method,
        "images": [_image_record(study, number) for number in range(len(study.images))],
        "stopped": study.stopped,
        "seconds": study.seconds,
        "attacks": few_record(study.attacks),
        "skipped": [item._asdict() for item in study.images.skipped],
    }


def _image_record(study: Study, number: int) -> dict[str, Any]:
    scores, nearest = study.scores, study.nearest_flip(number)
    low, high = study.interval[number].tolist()
    return {
        "name": study.images.names[number],
        "label": study.label(number),
        "predicted": int(study.predicted[number]),
        "flip_probability": float(study.flip[number]),
        "flip_low": low,
        "flip_high": high,
        "flip_runs": int(study.runs[number]),
        "flip_route": study.route[number],
        "rival": int(study.rivals[number]),
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
        "class_probabilities": _numbers(study.shares[number].tolist()),
        "levels": [_level_record(study, place, number) for place in range(1, len(study.levels))],
    }


def _level_record(study: Study, place: int, number: int) -> dict[str, Any]:
    """How often an image flips at one noise level of the curve, from samples alone."""
    level = study.levels[place]
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


def _as_csv(images: list[dict[str, Any]]) -> str:
    """A line for each image, from its record."""
    rows = []
    for record in images:
        place = record["classes"].index(record["predicted"])
        rows.append([*(record[key] for key in CSV), record["mean"][place], record["standard_deviation"][place]])
    return csv_text([*CSV, "score", "score_standard_deviation"], rows)
