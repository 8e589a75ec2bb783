"""A noise study as files: one self-contained HTML page (no scripts, nothing fetched), JSON and CSV."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from netmoments.files import write_files_whole
from netmoments.report.attack_page import attacked_cases, few_record
from netmoments.report.attack_study import NotAttacked
from netmoments.report.attack_words import few_in_words
from netmoments.report.noise_study import CurvePoint, Example, Study
from netmoments.report.noise_words import (
    answer_share,
    band_in_words,
    bounded_in_words,
    chosen_point,
    flip_in_words,
    fragile_in_words,
    level_in_words,
    level_of,
    method_in_words,
    more_in_words,
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
    finite,
    flip_strip,
    for_any_screen,
    images_a_mark,
    png_data,
    render,
    scores_chart,
    share_limits,
)
from netmoments.report.words import Provenance, at_most_in_words, in_words, interval_in_words, seconds_in_words

RANKED = 18
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
        ranking=[_ranked(found, number) for number in found.order[:RANKED].tolist()],
        more=len(found.images) > RANKED,
        examples=[_example(found, example) for example in found.examples],
        attacks=_attacks(found),
        skipped=[{"path": str(item.path), "reason": item.reason} for item in found.images.skipped],
        left_out=LEFT_OUT,
        method=method_in_words(found),
        provenance=list(asdict(provenance).items()),
    )


def _facts(found: Study) -> list[dict[str, str]]:
    """The whole in a few numbers."""
    facts = []
    if found.clean_accuracy is not None:
        facts.append({"value": share_in_words(found.curve[0]), "meaning": "of the answers are right without noise"})
    chosen = chosen_point(found)
    kept = "are right" if found.labelled else "stay the same"
    facts.append(
        {"value": share_in_words(chosen), "meaning": f"{kept} at {noise_in_words(found)}, {band_in_words(chosen)}"}
    )
    facts.append({"value": fragile_in_words(found), "meaning": "images flip more than one time in ten"})
    runs = int(found.runs.sum())
    took = f"{runs:,} runs of the network to find how often each image flips"
    return [
        *facts,
        _most_robust(found),
        {"value": seconds_in_words(found.seconds), "meaning": f"it took in all; {took}"},
    ]


def _most_robust(found: Study) -> dict[str, str]:
    """What can be said of the images that are farthest from flipping."""
    bounded = found.bounded
    if bool(bounded.any()):
        most = at_most_in_words(float(found.interval[bounded, 1].max()))
        return {"value": f"{int(bounded.sum()):,}", "meaning": f"images were never seen to flip: each below {most}"}
    last = int(found.order[-1])
    value, at_least, at_most = interval_in_words(float(found.flip[last]), *found.interval[last].tolist())
    return {"value": value, "meaning": f"how often the most robust image flips, between {at_least} and {at_most}"}


def _curve(found: Study) -> dict[str, Any]:
    marks = {point: _curve_mark(found, point) for point in found.curve}
    title = "noise σ; pixels are in [0, 1]" if found.config.covariance is None else "times the given noise"
    curve, chosen = list(marks.values()), marks[chosen_point(found)]
    low, high = share_limits(curve)
    return {
        "chart": for_any_screen(partial(accuracy_chart, curve, chosen, answer_share(found), title)),
        "begins": "" if low == 0 else f"{100 * low:.3g}%",
        "ends": f"{100 * high:.3g}%",
    }


def _curve_mark(found: Study, point: CurvePoint) -> CurveMark:
    return CurveMark(level_of(found, point), point.share, point.low, point.high, level_in_words(found, point))


def _wrong(found: Study, number: int) -> bool:
    labels = found.images.labels
    return labels is not None and int(labels[number]) != int(found.predicted[number])


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
    labels = found.images.labels
    flip, known = flip_in_words(found, number)
    return {
        "picture": png_data(found.images.images[number]),
        "name": found.images.names[number],
        "flip": flip,
        "known": known,
        "answer": found.class_name(int(found.predicted[number])),
        "label": None if labels is None else found.class_name(int(labels[number])),
        "wrong": _wrong(found, number),
    }


def _ranked(found: Study, number: int) -> dict[str, Any]:
    seen = float(found.flip[number]) > 0
    to = f"flips to {found.class_name(int(found.rivals[number]))}" if seen else "no flip seen"
    return {**_about(found, number), "to": to}


def _example(found: Study, example: Example) -> dict[str, Any]:
    number, predicted = example.image, int(found.predicted[example.image])
    bars = _score_bars(found, number)
    copies: list[dict[str, Any]] = [
        {"picture": png_data(image), "answer": found.class_name(int(k)), "flipped": int(k) != predicted}
        for image, k in zip(example.noisy, example.noisy_classes, strict=True)
    ]
    return {
        **_about(found, number),
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
    record = json.dumps(as_record(found, provenance, model, data), indent=1, allow_nan=False)
    contents = {
        "report.html": render_page(found, provenance, model, data),
        "report.json": record + "\n",
        "images.csv": _as_csv(found),
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
        "skipped": [{"path": str(item.path), "reason": item.reason} for item in found.images.skipped],
    }


def _image_record(found: Study, number: int) -> dict[str, Any]:
    labels, scores = found.images.labels, found.scores
    low, high = found.interval[number].tolist()
    outputs = scores.outputs[number]
    return {
        "name": found.images.names[number],
        "label": None if labels is None else int(labels[number]),
        "predicted": int(found.predicted[number]),
        "flip_probability": float(found.flip[number]),
        "flip_low": low,
        "flip_high": high,
        "flip_runs": int(found.runs[number]),
        "flip_route": found.route[number],
        "rival": int(found.rivals[number]),
        "classes": outputs.tolist(),
        "mean": _numbers(scores.mean[number].tolist()),
        "mean_error": _numbers(scores.mean_error[number].tolist()),
        "standard_deviation": _numbers(scores.deviation[number].tolist()),
        "standard_deviation_error": _numbers(scores.deviation_error[number].tolist()),
        "class_probabilities": _numbers(found.shares[number].tolist()),
    }


def _numbers(values: list[float]) -> list[float | None]:
    return [finite(value) for value in values]


CSV = ("name", "label", "predicted", "flip_probability", "flip_low", "flip_high", "rival")


def _as_csv(found: Study) -> str:
    """One line an image."""
    rows = []
    for number in range(len(found.images)):
        record = _image_record(found, number)
        place = record["classes"].index(record["predicted"])
        rows.append([*(record[key] for key in CSV), record["mean"][place], record["standard_deviation"][place]])
    return csv_text([*CSV, "score", "score_standard_deviation"], rows)
