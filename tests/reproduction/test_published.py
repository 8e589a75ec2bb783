"""The paper's numbers are those of the paper."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from reproduction import published

ROOT = Path(__file__).parents[2]


def test_the_published_numbers_are_those_of_the_paper():
    path = ROOT.parent / "shared" / "paper" / "tables.json"
    if not path.exists():
        pytest.skip(f"no {path}")
    tables = json.loads(path.read_text())
    assert list(published.TABLE_1_NOISE) == tables["table1"]["noise"]
    assert {str(layer): list(row) for layer, row in published.TABLE_1.items()} == tables["table1"]["layers"]
    two = {(row["sigma"], row["class"]): _row(row) for row in tables["table2"]}
    assert two == published.TABLE_2
    four = {(row["sigma"], row["k"], row["farthest_baseline"]): _row(row) for row in tables["table4"]}
    assert four == published.TABLE_4
    assert list(published.FIGURE_2_TERMS) == tables["figure2"]["terms"]
    assert abs(published.FIGURE_2_ERROR_20_TERMS - tables["figure2"]["max_abs_error_20_terms"]) < 1e-15


def _row(row: dict) -> tuple:
    return tuple(tuple(row[name]) for name in published.Published._fields)
