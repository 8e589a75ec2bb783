"""Ratios of times, each with its reference in the same process, against the record of an earlier run. `make test-slow`.

Seconds depend on the machine and what else it does; ratios of the same work less so. What is checked is that no method
has become much slower beside ten thousand samples, or beside an exponential, than the record says.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.speed import Bench, Figure, engine_figures, growth_exponent, lenet_figures
from netmoments import data, zoo

RECORDS = Path(__file__).parents[1] / "benchmarks" / "records"
SLOWER = 2.0
"""How much a ratio may differ from its record: repeated runs on a busy machine differ by up to 1.6."""


def recorded(device: str) -> dict[str, float]:
    return json.loads((RECORDS / f"speed-{device}.json").read_text())["ratios"]


def worse(figure: Figure, record: dict[str, float]) -> float:
    """By what factor a ratio is worse than its record."""
    before = record[figure.name.strip()]
    return figure.ratio / before if figure.at_most else before / figure.ratio


@pytest.mark.slow
def test_no_slower_than_the_record(mnist):
    record, bench = recorded("cpu"), Bench("cpu")
    network, images = zoo.pretrained("lenet"), data.load(mnist).images[:4]
    found = [*engine_figures(bench), *lenet_figures(bench, network, images)]
    slower = {figure.name.strip(): round(worse(figure, record), 2) for figure in found}
    assert max(slower.values()) < SLOWER, slower


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_record_says_what_was_measured_where(device):
    record = json.loads((RECORDS / f"speed-{device}.json").read_text())
    assert "torch" in record["machine"]
    assert len(record["ratios"]) >= 6
    assert all(ratio > 0 for ratio in record["ratios"].values())


def test_growth_exponents():
    assert growth_exponent((1, 2, 4, 8), [3.0, 12.0, 48.0, 192.0]) == pytest.approx(2.0)
    assert Figure("ours / theirs", 0.5, 1.0, at_most=True).reached
    assert not Figure("theirs / ours", 0.5, 1.0, at_most=False).reached
