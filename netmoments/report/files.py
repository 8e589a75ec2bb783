"""The study as files: a page, JSON and CSV, each written whole or not at all."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from netmoments.files import require_writable_folder, write_text_whole
from netmoments.report.attack_records import few_record
from netmoments.report.page import render_page
from netmoments.report.provenance import Provenance
from netmoments.report.study import Study


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
