"""An attack as files: a page to look at, and JSON, CSV, pictures and the noise itself as arrays.

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
"""Fields of an attack that the command line does not set."""


def attack_record(found: AttackStudy) -> dict[str, Any]:
    """What was asked and what came out; what is not a number is null."""
    return {
        "attack": found.result.attack,
        "settings": _settings(found.attack),
        "relu": found.relu,
        "classes": list(found.classes),
        "labels": "the network's answers" if found.labels_are_answers else "of the data",
        "fooled": found.fooled,
        "images": _image_records(found),
        "skipped": [{"name": found.images.names[item.place], **item._asdict()} for item in found.result.skipped],
        "of_the_target": list(found.of_the_target),
        "unreadable": [item._asdict() for item in found.images.skipped],
    }


def few_record(found: AttackStudy | NotAttacked | None) -> dict[str, Any] | None:
    """The same inside a report: why there is nothing, or null where nothing was asked for."""
    if found is None:
        return None
    return {"not_attacked": found.reason} if isinstance(found, NotAttacked) else attack_record(found)


def attack_csv(found: AttackStudy) -> str:
    """One line an attacked image."""
    records = _image_records(found)
    return csv_text(list(records[0]), [list(record.values()) for record in records])


def noise_npz(found: AttackStudy) -> bytes:
    """mu (N, C, H, W), sigma, places (among the chosen images), labels and names, as the bytes of an .npz file."""
    result, buffer = found.result, io.BytesIO()
    np.savez(
        buffer,
        mu=result.mu.numpy(),
        sigma=result.sigma.numpy(),
        places=result.places.numpy(),
        labels=result.labels.numpy(),
        names=np.array([found.name(number) for number in range(len(found))]),
    )
    return buffer.getvalue()


def _image_records(found: AttackStudy) -> list[dict[str, Any]]:
    return [
        {"name": found.name(number), **{key: finite(value) for key, value in record.items()}}
        for number, record in enumerate(found.result.records())
    ]


def _settings(attack: Attack) -> dict[str, Any]:
    """The fields, with the values that stand for None."""
    given = {item.name: getattr(attack, item.name) for item in fields(attack) if item.name not in NO_SETTING}
    if isinstance(attack, SparseSmooth):
        given |= {"sigma": attack.noise_level, "confidence": attack.share}
    if isinstance(attack, BoxAttack):
        given |= {"beta": attack.reach, "largest_sigma": attack.most_noise}
    return given


def render_attack_page(found: AttackStudy, provenance: Provenance, model: str, data: str) -> str:
    """The page as text."""
    return render(
        "attack.html",
        title=f"Noise made to fool {model}",
        headline=f"{headline_in_words(found.attack)} {model}",
        subtitle=f"{len(found)} images of {data}, {provenance.date}",
        answers=answers_in_words(found),
        facts=_facts(found),
        cases=attacked_cases(found),
        left_out=[*found.left_out, *((item.path, item.reason) for item in found.images.skipped)],
        method=method_in_words(found),
        provenance=list(asdict(provenance).items()),
    )


def attacked_cases(found: AttackStudy) -> list[dict[str, Any]]:
    """What `attacked.html` shows of each image."""
    return [_case(found, number) for number in range(len(found))]


def _facts(found: AttackStudy) -> list[dict[str, str]]:
    """The whole in four numbers."""
    result = found.result
    return [
        {
            "value": f"{found.fooled} of {len(found)}",
            "meaning": f"images fooled as asked: {asked_in_words(found.attack)}",
        },
        {"value": f"{float(result.success.rate.mean()):.1%}", "meaning": "of all noisy copies fooled the network"},
        {"value": f"{float(result.sparsity.mean()):.0%}", "meaning": "of the pixels not changed by μ, on average"},
        {
            "value": in_grey_levels(float(result.linf.median())),
            "meaning": "grey levels, the largest |μ| of the median image",
        },
    ]


def _case(found: AttackStudy, number: int) -> dict[str, Any]:
    result = found.result
    label, sampled = found.class_name(result.labels[number]), found.class_name(found.noisy_classes[number])
    row = found.row(number)
    captions = (label, f"up to {in_grey_levels(float(result.linf[number]))} grey levels", "brighter", "darker", sampled)
    pictures = [
        {"data": png_data(panel), "heading": heading, "caption": caption}
        for panel, heading, caption in zip(row.panels(), HEADINGS, captions, strict=True)
    ]
    return {
        "name": found.name(number),
        "label": label,
        "changed": int(found.noisy_classes[number]) != int(result.labels[number]),
        "fooled": bool(result.fooled[number]),
        "verdict": verdict_in_words(found, number),
        "pictures": pictures,
        "facts": _case_facts(found, number),
    }


def _case_facts(found: AttackStudy, number: int) -> list[tuple[str, str]]:
    result = found.result
    return [
        ("samples fooled", success_in_words(found, number)),
        ("clipped to [0, 1]", clipped_in_words(found, number)),
        ("most often taken for", found.class_name(result.answers[number])),
        ("made towards", found.class_name(result.towards[number])),
        ("pixels not changed", f"{float(result.sparsity[number]):.0%}"),
        ("‖μ‖₁ + TV, grey levels", size_in_words(found, number)),
        ("σ, grey levels", in_grey_levels(float(result.sigma[number]))),
        ("SSIM", f"{float(result.ssim[number]):.3f}"),
        ("better by at most", gap_in_words(found, number)),
        ("steps on the network itself", followed_in_words(found, number)),
    ]


ROWS = 12
"""Images in `pictures.png`, at most."""


def write_attack(found: AttackStudy, provenance: Provenance, folder: Path, model: str, data: str) -> dict[str, Path]:
    """`attack.html`, `attack.json`, `images.csv`, `pictures.png` and `noise.npz` in a folder, made if need be."""
    record = {"model": model, "data": data, "provenance": asdict(provenance), **attack_record(found)}
    contents = {
        "attack.html": render_attack_page(found, provenance, model, data).encode(),
        "attack.json": (json.dumps(record, indent=1, allow_nan=False) + "\n").encode(),
        "images.csv": attack_csv(found).encode(),
        "pictures.png": _pictures(found),
        "noise.npz": noise_npz(found),
    }
    return write_files_whole(folder, contents)


def _pictures(found: AttackStudy) -> bytes:
    shown = range(min(ROWS, len(found)))
    return figure_png(draw_rows([found.row(number, success_in_words(found, number)) for number in shown]))
