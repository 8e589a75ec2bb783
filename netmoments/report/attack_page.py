"""An attack study as files: a page to look at, JSON, CSV, pictures, and the noise itself as arrays.

They are written whole, all of them or none.
"""

from __future__ import annotations

import io
import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from netmoments.attacks.base import Attack
from netmoments.attacks.box import BoxAttack
from netmoments.attacks.sparse_smooth import SparseSmooth
from netmoments.files import write_files_whole
from netmoments.report.attack_study import AttackStudy, NotAttacked
from netmoments.report.attack_words import (
    answers_in_words,
    asked_in_words,
    clipped_in_words,
    followed_in_words,
    gap_in_words,
    headline_in_words,
    in_grey_levels,
    method_in_words,
    size_in_words,
    success_in_words,
    verdict_in_words,
)
from netmoments.report.page import csv_text, finite, png_data, render
from netmoments.report.pictures import HEADINGS, draw_rows, figure_png
from netmoments.report.words import Provenance

NO_SETTING = {"preprocessing", "mask", "memory_budget"}
"""Fields of an attack that the command line does not set, and a record leaves out."""
ROWS = 12
"""At most so many images are in `pictures.png`."""


def attack_record(study: AttackStudy) -> dict[str, Any]:
    """The settings and results of an attack for JSON; infinite numbers and NaN become null."""
    return {
        "attack": study.result.attack,
        "settings": _settings(study.attack),
        "relu": study.relu,
        "classes": list(study.classes),
        "labels": "the network's answers" if study.labels_are_answers else "of the data",
        "fooled": study.fooled,
        "images": _image_records(study),
        "skipped": [{"name": study.images.names[item.place], **item._asdict()} for item in study.result.skipped],
        "of_the_target": list(study.of_the_target),
        "unreadable": [item._asdict() for item in study.images.skipped],
    }


def few_record(study: AttackStudy | NotAttacked | None) -> dict[str, Any] | None:
    """The record of the attacks inside a report: why there are none, or None where none were asked for."""
    if study is None:
        return None
    return {"not_attacked": study.reason} if isinstance(study, NotAttacked) else attack_record(study)


def attack_csv(study: AttackStudy) -> str:
    """A line for each attacked image."""
    records = _image_records(study)
    return csv_text(list(records[0]), [list(record.values()) for record in records])


def noise_npz(study: AttackStudy) -> bytes:
    """mu (N, C, H, W), sigma, places (indices in the chosen images), labels and names, as the bytes of an .npz file."""
    result, buffer = study.result, io.BytesIO()
    np.savez(
        buffer,
        mu=result.mu.numpy(),
        sigma=result.sigma.numpy(),
        places=result.places.numpy(),
        labels=result.labels.numpy(),
        names=np.array([study.name(number) for number in range(len(study))]),
    )
    return buffer.getvalue()


def _image_records(study: AttackStudy) -> list[dict[str, Any]]:
    return [
        {"name": study.name(number), **{key: finite(value) for key, value in record.items()}}
        for number, record in enumerate(study.result.records())
    ]


def _settings(attack: Attack) -> dict[str, Any]:
    """The settings of an attack, with its defaults in place of None."""
    settings = {field.name: getattr(attack, field.name) for field in fields(attack) if field.name not in NO_SETTING}
    if isinstance(attack, SparseSmooth):
        settings |= {"sigma": attack.noise_level, "confidence": attack.share}
    if isinstance(attack, BoxAttack):
        settings |= {"beta": attack.reach, "largest_sigma": attack.most_noise}
    return settings


def render_attack_page(study: AttackStudy, provenance: Provenance, model: str, data: str) -> str:
    """The page as text."""
    return render(
        "attack.html",
        title=f"Noise made to fool {model}",
        headline=f"{headline_in_words(study.attack)} {model}",
        subtitle=f"{len(study)} images of {data}, {provenance.date}",
        answers=answers_in_words(study),
        facts=_facts(study),
        cases=attacked_cases(study),
        left_out=[*study.left_out, *((item.path, item.reason) for item in study.images.skipped)],
        method=method_in_words(study),
        provenance=list(asdict(provenance).items()),
    )


def attacked_cases(study: AttackStudy) -> list[dict[str, Any]]:
    """What `attacked.html` shows of each attacked image."""
    return [_case(study, number) for number in range(len(study))]


def _facts(study: AttackStudy) -> list[dict[str, str]]:
    """The attack in four numbers."""
    result = study.result
    return [
        {
            "value": f"{study.fooled} of {len(study)}",
            "meaning": f"images fooled as asked: {asked_in_words(study.attack)}",
        },
        {"value": f"{float(result.success.rate.mean()):.1%}", "meaning": "of all noisy copies fooled the network"},
        {"value": f"{float(result.sparsity.mean()):.0%}", "meaning": "of the pixels not changed by μ, on average"},
        {
            "value": in_grey_levels(float(result.linf.median())),
            "meaning": "grey levels, the largest |μ| of the median image",
        },
    ]


def _case(study: AttackStudy, number: int) -> dict[str, Any]:
    result = study.result
    label, sampled = study.class_name(result.labels[number]), study.class_name(study.noisy_classes[number])
    row = study.row(number)
    captions = (label, f"up to {in_grey_levels(float(result.linf[number]))} grey levels", "brighter", "darker", sampled)
    pictures = [
        {"data": png_data(panel), "heading": heading, "caption": caption}
        for panel, heading, caption in zip(row.panels(), HEADINGS, captions, strict=True)
    ]
    return {
        "name": study.name(number),
        "label": label,
        "changed": int(study.noisy_classes[number]) != int(result.labels[number]),
        "fooled": bool(result.fooled[number]),
        "verdict": verdict_in_words(study, number),
        "pictures": pictures,
        "facts": _case_facts(study, number),
    }


def _case_facts(study: AttackStudy, number: int) -> list[tuple[str, str]]:
    result = study.result
    return [
        ("samples fooled", success_in_words(study, number)),
        ("clipped to [0, 1]", clipped_in_words(study, number)),
        ("most often taken for", study.class_name(result.answers[number])),
        ("made towards", study.class_name(result.towards[number])),
        ("pixels not changed", f"{float(result.sparsity[number]):.0%}"),
        ("‖μ‖₁ + TV, grey levels", size_in_words(study, number)),
        ("σ, grey levels", in_grey_levels(float(result.sigma[number]))),
        ("SSIM", f"{float(result.ssim[number]):.3f}"),
        ("better by at most", gap_in_words(study, number)),
        ("steps on the network itself", followed_in_words(study, number)),
    ]


def write_attack(study: AttackStudy, provenance: Provenance, folder: Path, model: str, data: str) -> dict[str, Path]:
    """Write `attack.html`, `attack.json`, `images.csv`, `pictures.png` and `noise.npz` to a folder, made if needed."""
    record = {"model": model, "data": data, "provenance": asdict(provenance), **attack_record(study)}
    contents = {
        "attack.html": render_attack_page(study, provenance, model, data).encode(),
        "attack.json": (json.dumps(record, indent=1, allow_nan=False) + "\n").encode(),
        "images.csv": attack_csv(study).encode(),
        "pictures.png": _pictures(study),
        "noise.npz": noise_npz(study),
    }
    return write_files_whole(folder, contents)


def _pictures(study: AttackStudy) -> bytes:
    shown = range(min(ROWS, len(study)))
    return figure_png(draw_rows([study.row(number, success_in_words(study, number)) for number in shown]))
