"""The page of verdicts: from summaries to a line for each table and figure."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from reproduction.experiment import NAMES
from reproduction.published import TABLE_2
from reproduction.verdicts import (
    BEYOND,
    CLAIMS,
    Claim,
    Tried,
    by_counting,
    by_recipe,
    pairs_of,
    read_records,
    readme,
    runs_page,
    verdict,
)

ROOT = Path(__file__).parents[2]


def record(*comparisons: tuple[str, float, float | None], **numbers) -> dict:
    made = [{"what": what, "ours": ours, "paper": paper} for what, ours, paper in comparisons]
    return {"comparisons": made, "numbers": numbers}


CLAIM = Claim("table-x", "Table X", "Something.", "rate")


@pytest.mark.parametrize(
    ("ours", "said"), [(0.95, "reproduces"), (0.5, "does not: ours is 0.5 times the published")]
)  # fmt: skip
def test_within_the_tolerance_or_not(ours, said):
    assert (
        verdict(CLAIM, {"table-x": record(("rate", ours, 1.0), ("other", 9.0, 1.0), ("rate of us", 3.0, None))}) == said
    )


def test_counts_must_be_reached():
    claim = replace(CLAIM, tolerance=0)
    assert verdict(claim, {"table-x": record(("rate", 5, 5))}) == "reproduces"
    assert verdict(claim, {"table-x": record(("rate", 4, 5))}).startswith("does not")


def test_readings_are_counted_and_those_not_run_named():
    def tried(records, tolerance):
        return [Tried("first", False), Tried("second", True)] if "r" in records else []

    claim = replace(CLAIM, readings=tried, made_by=("r",))
    found = {"table-x": record(("rate", 0.5, 1.0))}
    assert verdict(claim, found) == "does not: ours is 0.5 times the published; r not run yet"
    assert verdict(claim, {**found, "r": {}}) == "reproduces under 1 of 2 readings tried: second"
    none = replace(claim, readings=lambda *_: [Tried("first", False)])
    assert (
        verdict(none, {**found, "r": {}})
        == "does not, nor under any of 1 readings tried: ours is 0.5 times the published"
    )


def test_readings_of_recipes_and_counts():
    paper = [TABLE_2[sigma, "avg"].mean_error.mean for sigma in (0.001, 0.01, 0.05, 0.1)]
    trials = [{"recipe": "a", "mean": [1.1 * x for x in paper]}, {"recipe": "b", "mean": [3 * x for x in paper]}]
    found = by_recipe("mean", "mean_error")({"seeds": {"numbers": {"trials": trials}}}, 0.25)
    assert found == [Tried("a (seeds)", True), Tried("b (seeds)", False)]
    rates = dict.fromkeys(("expected", "linearized", "still", "most", "share", "other"), 0.1)
    one = {
        "title": "the face network",
        "published": {"targeted": 0.914},
        "readings": {
            "plain": {"targeted": rates | {"expected": 0.9}, "dial": False},
            "turned": {"targeted": dict.fromkeys(rates, 0.914), "dial": True},
        },
    }
    tried = by_counting("face", "targeted")({"readings-5": {"numbers": {"studied": [one]}}}, 0.03)
    assert [reading.words for reading in tried if reading.holds] == ["problem solved, plain (0.900)"]
    assert len(tried) == 6
    assert by_counting("face", "targeted")({}, 0.03) == []


def test_every_experiment_has_a_line():
    assert {claim.name for claim in CLAIMS} | set(BEYOND) == set(NAMES)


def test_every_claim_finds_its_numbers_in_the_results():
    records = read_records(ROOT / "results")
    for claim in CLAIMS:
        if claim.name in records and claim.pattern:
            assert pairs_of(records[claim.name], claim.pattern), claim.what


def test_the_page_is_what_the_results_say():
    """`python -m reproduction verdicts` writes it."""
    records = read_records(ROOT / "results")
    assert (ROOT / "reproduction" / "README.md").read_text(encoding="utf-8") == readme(records)
    assert (ROOT / "results" / "README.md").read_text(encoding="utf-8") == runs_page(records)


def test_every_run_is_named_with_its_commit():
    origin = {"command": "python -m reproduction table-1 | tee", "date": "2026-11-16 10:00 UTC", "netmoments": "0.2.0",
              "torch": "2", "python": "3", "device": "CPU, 2 threads", "seed": 0}  # fmt: skip
    old = {**record(images=12_000), "provenance": origin, "seconds": 61.0}
    new = {**old, "provenance": {**origin, "commit": f"{'0123456789' * 4} with changes"}, "numbers": {"images": [1]}}
    lines = runs_page({"another": new, "table-1": old}).splitlines()
    rows = [line for line in lines if line.startswith("| [")]
    assert rows[0] == (
        "| [table-1](table-1/table.md) | `python -m reproduction table-1 \\| tee` | 12,000 | 0.2.0, unknown "
        "| 2026-11-16 | CPU, 2 threads | 1 min 1 s |"
    )
    assert "|  | 0.2.0, 0123456 with changes |" in rows[1]


def test_a_folder_without_summaries_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no \*/summary\.json"):
        read_records(tmp_path)
    (tmp_path / "table-1").mkdir()
    (tmp_path / "table-1" / "summary.json").write_text("{")
    with pytest.raises(ValueError, match="reproduce table-1 again"):
        read_records(tmp_path)
    (tmp_path / "table-1" / "summary.json").write_text(json.dumps(record(("ℓ2 difference, l = 1", 1.0, 1.1))))
    assert "| **reproduces** |" in readme(read_records(tmp_path))
