"""Settings that are quick, and what readers of a terminal or of a file see."""

from __future__ import annotations

import html
import io
import json
import re

from netmoments.attacks.sparse_smooth import SparseSmooth
from netmoments.report.arguments import StudyConfig

STUDIED = StudyConfig(0.1, tolerance=0.02, samples=4000, rare=4, seconds=300, examples=4, attacks=2)
"""Everything a report has; there is time enough wherever this runs."""
PLAIN = StudyConfig(0.1, tolerance=0.05, samples=400, rare=0, seconds=300, examples=2)
"""Samples alone, and attacks."""
STRANGE = "=\x1b[31mred\x07\u202e[bold]$\udcff"
"""A name that would colour a terminal, ring it, turn its letters round, be a formula, and break what is drawn."""
SPELT_OUT = r"=\x1b[31mred\x07\u202e[bold]$\udcff"
FAST = SparseSmooth(iterations=60, polish=20, samples=40)


def in_a_terminal(drawn) -> str:
    from rich.console import Console

    console = Console(width=120, record=True, file=io.StringIO())
    console.print(drawn)
    return " ".join(console.export_text().split())


def read_on_the_page(page: str) -> str:
    """The words of a page, without markup, style, scripts and pictures."""
    bare = re.sub(r"<style>.*?</style>|<script.*?</script>|<[^>]*>", " ", page, flags=re.S)
    return " ".join(html.unescape(bare).split())


def strict_json(text: str) -> dict:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)
