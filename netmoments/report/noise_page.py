"""A noise study as files: one self-contained HTML page (no scripts, nothing fetched), JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from netmoments.files import require_writable_folder, write_text_whole
from netmoments.report.attack_page import attacked_cases, few_record
from netmoments.report.attack_study import NotAttacked
from netmoments.report.attack_words import few_in_words
from netmoments.report.noise_study import Check, Study
from netmoments.report.noise_words import (
    answer_share,
    checked_in_words,
    frequency_in_words,
    method_in_words,
    probability_in_words,
    verdict_in_words,
)
from netmoments.report.pictures import accuracy_chart, png_data, scores_chart
from netmoments.report.templating import render
from netmoments.report.words import Provenance

RANKED = 18


def render_page(found: Study, provenance: Provenance, model: str, data: str) -> str:
    """The page as text."""
    what = answer_share(found)
    sigma = f"{found.config.sigma:.3g}"
    return render(
        "noise.html",
        title=f"{model} under noise",
        headline=f"What noise of σ = {sigma} does to {model}",
        subtitle=f"{len(found.images)} images of {data}, {provenance.date}",
        facts=_facts(found),
        curve_title=what,
        curve=_curve(found),
        count=len(found.images),
        samples=f"{found.config.samples:,}",
        sigma=sigma,
        ranking=[_ranked(found, number) for number in found.ranking[:RANKED].tolist()],
        checks=[_case(found, check) for check in found.checks],
        attacks=_attacks(found),
        skipped=[{"path": str(item.path), "reason": item.reason} for item in found.images.skipped],
        method=method_in_words(found),
        checked=checked_in_words(found),
        verdict=verdict_in_words(found),
        provenance=list(asdict(provenance).items()),
    )


def _facts(found: Study) -> list[dict[str, str]]:
    curve = dict(found.curve)
    facts = []
    if found.clean_accuracy is not None:
        facts.append({"value": f"{found.clean_accuracy:.1%}", "meaning": "right without noise"})
    kept = curve[found.config.sigma * 1.0]
    facts.append({"value": f"{kept:.1%}", "meaning": f"{answer_share(found).lower()} at σ = {found.config.sigma:.3g}"})
    fragile = int((found.flip > 0.1).sum())
    facts.append({"value": f"{fragile}", "meaning": "images flip more than one time in ten"})
    if found.largest_check_error is not None:
        facts.append(
            {"value": f"{found.largest_check_error:.3f}", "meaning": "largest gap to the sampled flip probability"}
        )
    return facts


def _attacks(found: Study) -> dict[str, Any] | None:
    """The section of noise that was made to fool the network, None where none was asked for."""
    attacks = found.attacks
    if attacks is None:
        return None
    if isinstance(attacks, NotAttacked):
        return {"says": attacks.reason, "cases": []}
    return {"says": few_in_words(attacks), "cases": attacked_cases(attacks)}


def _curve(found: Study) -> str:
    """Computed for all; for the checked images computed and sampled, the mean over them ± two standard errors."""
    if not found.checks:
        return accuracy_chart(found.curve, (), (), found.config.sigma, answer_share(found))
    dots = [(sigma, share, 2 * error) for sigma, share, error in found.sampled_curve]
    return accuracy_chart(found.curve, found.checked_curve, dots, found.config.sigma, answer_share(found))


def _ranked(found: Study, number: int) -> dict[str, Any]:
    labels = found.images.labels
    predicted = int(found.predicted[number])
    label = None if labels is None else int(labels[number])
    return {
        "picture": png_data(found.images.images[number]),
        "name": found.images.names[number],
        "flip": probability_in_words(float(found.flip[number])),
        "width": round(100 * float(found.flip[number]), 1),
        "rival": found.class_name(found.rival(number)),
        "predicted": found.class_name(predicted),
        "label": None if label is None else found.class_name(label),
        "wrong": label is not None and label != predicted,
    }


def _case(found: Study, check: Check) -> dict[str, Any]:
    number = check.image
    predicted = int(found.predicted[number])
    assert found.moments.outputs is not None
    names = [found.class_name(int(k)) for k in found.moments.outputs[number]]
    chart = scores_chart(
        names,
        found.class_name(predicted),
        found.moments.mean[number].tolist(),
        found.moments.variance[number].sqrt().tolist(),
        check.draws.tolist(),
        list(zip(check.mean.tolist(), check.deviation.tolist(), strict=True)),
    )
    copies = [
        {"picture": png_data(image), "answer": found.class_name(int(k)), "flipped": int(k) != predicted}
        for image, k in zip(check.noisy, check.noisy_classes, strict=True)
    ]
    return {
        "name": found.images.names[number],
        "picture": png_data(found.images.images[number]),
        "copies": copies,
        "computed": probability_in_words(float(found.flip[number])),
        "sampled": frequency_in_words(float(check.flips[found.chosen_level]), found.config.samples),
        "answer": found.class_name(predicted),
        "label": None if found.images.labels is None else found.class_name(int(found.images.labels[number])),
        "chart": chart,
    }


def write_report(found: Study, provenance: Provenance, folder: Path, model: str, data: str) -> dict[str, Path]:
    """`report.html`, `report.json` and `images.csv` in a folder, which is made if need be."""
    contents = {
        "report.html": render_page(found, provenance, model, data),
        "report.json": json.dumps(as_record(found, provenance, model, data), indent=1, allow_nan=False) + "\n",
        "images.csv": _as_csv(found),
    }
    require_writable_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        write_text_whole(folder / name, text)
    return {name: folder / name for name in contents}


def as_record(found: Study, provenance: Provenance, model: str, data: str) -> dict[str, Any]:
    """Everything that was computed, for machines."""
    return {
        "model": model,
        "data": data,
        "provenance": asdict(provenance),
        "sigma": found.config.sigma,
        "method": found.moments.method,
        "layer": found.moments.cut,
        "clean_accuracy": found.clean_accuracy,
        "scores_followed": found.followed,
        "curve_of": "unchanged" if found.right is None else "right",
        "curve": [{"sigma": sigma, "share": share} for sigma, share in found.curve],
        "images": [_image_record(found, number) for number in range(len(found.images))],
        "checks": [
            {
                "name": found.images.names[check.image],
                "samples": found.config.samples,
                "sigmas": list(found.config.levels),
                "flip_computed": found.flips[check.image].double().tolist(),
                "flip_sampled": check.flips.tolist(),
            }
            for check in found.checks
        ],
        "attacks": few_record(found.attacks),
        "skipped": [{"path": str(item.path), "reason": item.reason} for item in found.images.skipped],
    }


def _image_record(found: Study, number: int) -> dict[str, Any]:
    labels = found.images.labels
    assert found.moments.outputs is not None
    return {
        "name": found.images.names[number],
        "label": None if labels is None else int(labels[number]),
        "predicted": int(found.predicted[number]),
        "flip_probability": float(found.flip[number]),
        "rival": found.rival(number),
        "classes": found.moments.outputs[number].tolist(),
        "mean": found.moments.mean[number].double().tolist(),
        "standard_deviation": found.moments.variance[number].double().sqrt().tolist(),
        "class_probabilities": found.probabilities[number].double().tolist(),
    }


def _as_csv(found: Study) -> str:
    """One line an image."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["name", "label", "predicted", "flip_probability", "rival", "score", "score_standard_deviation"])
    for number in range(len(found.images)):
        record = _image_record(found, number)
        place = record["classes"].index(record["predicted"])
        row = [record[key] for key in ("name", "label", "predicted", "flip_probability", "rival")]
        writer.writerow([*row, record["mean"][place], record["standard_deviation"][place]])
    return text.getvalue()
