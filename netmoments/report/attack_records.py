"""An attack for machines: JSON, CSV, and the noise itself as arrays."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import fields
from typing import Any

import numpy as np

from netmoments.attacks import SparseSmooth
from netmoments.attacks.attack import Attack
from netmoments.attacks.box_attacks import BoxAttack
from netmoments.report.attack_study import AttackStudy, NotAttacked

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
        "unreadable": [{"path": str(item.path), "reason": item.reason} for item in found.images.skipped],
    }


def few_record(found: AttackStudy | NotAttacked | None) -> dict[str, Any] | None:
    """The same inside a report: why there is nothing, or null where nothing was asked for."""
    if found is None:
        return None
    return {"not_attacked": found.reason} if isinstance(found, NotAttacked) else attack_record(found)


def attack_csv(found: AttackStudy) -> str:
    """One line an attacked image."""
    text = io.StringIO()
    records = _image_records(found)
    writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


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
        {"name": found.name(number), **{key: _finite(value) for key, value in record.items()}}
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


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
