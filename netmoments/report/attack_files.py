"""An attack as files: a page, JSON, CSV, pictures and the noise, each written whole or not at all."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from netmoments.experiments.attack_pictures import draw_rows
from netmoments.files import require_writable_folder, whole_file
from netmoments.report.attack_page import render_attack_page
from netmoments.report.attack_records import attack_csv, attack_record, noise_npz
from netmoments.report.attack_study import AttackStudy
from netmoments.report.attack_wording import success_in_words
from netmoments.report.figures import figure_png
from netmoments.report.provenance import Provenance

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
    require_writable_folder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        with whole_file(folder / name) as temporary:
            temporary.write_bytes(content)
    return {name: folder / name for name in contents}


def _pictures(found: AttackStudy) -> bytes:
    shown = range(min(ROWS, len(found)))
    return figure_png(draw_rows([found.row(number, success_in_words(found, number)) for number in shown]))
