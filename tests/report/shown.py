"""Settings that are quick, and what readers of a terminal or of a file see."""

from __future__ import annotations

import io
import json

from netmoments.attacks.sparse_smooth import SparseSmooth
from netmoments.report.noise_study import StudyConfig

CHECKED = StudyConfig(0.1, samples=4000, check=4)
PLAIN = StudyConfig(0.1, check=0)
FAST = SparseSmooth(iterations=60, polish=20, samples=40)


def in_a_terminal(drawn) -> str:
    from rich.console import Console

    console = Console(width=110, record=True, file=io.StringIO())
    console.print(drawn)
    return " ".join(console.export_text().split())


def strict_json(text: str) -> dict:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)
