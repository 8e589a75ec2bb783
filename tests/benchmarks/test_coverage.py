"""Coverage with a file that keeps results: these are not computed again, and the table says what is known."""

from __future__ import annotations

import json
import time

import pytest

from benchmarks import coverage
from benchmarks.coverage import Clock, Store, TimeIsOver, answers, printed, sampled_truth
from benchmarks.flips import Truth
from tests.benchmarks.test_flips import OneSubject, linear_case, tail

ENDLESS, OVER = Clock(time.monotonic() + 1e6), Clock(time.monotonic() - 1.0)


def test_what_is_kept_is_not_computed_again(tmp_path):
    path = tmp_path / "store.jsonl"
    assert Store(path).once("one", lambda: {"value": 1}, ENDLESS)["value"] == 1
    with path.open("a") as file:
        file.write('{"work": "two", "val')  # killed while it wrote
    again = Store(path)
    assert again.once("one", pytest.fail, OVER)["value"] == 1
    with pytest.raises(TimeIsOver):
        again.once("two", pytest.fail, OVER)


def test_a_truth_is_sampled_piece_by_piece(tmp_path, monkeypatch):
    """Flips of Φ(−1/0.5) = 0.023, in pieces of 2,000 until 100 have flipped, within five standard errors."""
    monkeypatch.setattr(coverage, "PIECE", 2000)
    monkeypatch.setattr(coverage, "ENOUGH", 100)
    store = Store(tmp_path / "store.jsonl")
    truth = sampled_truth(store, "linear", linear_case(0.5), 10**6, ENDLESS)
    assert 2 <= len(store.lines) <= 5
    assert abs(truth.probability - tail(2)) < 5 * truth.error
    seeds = {line["flips"] for line in store.lines.values()}
    assert len(seeds) > 1  # other samples in every piece
    again = sampled_truth(Store(tmp_path / "store.jsonl"), "linear", linear_case(0.5), 10**6, OVER)
    assert again.probability == truth.probability


def test_seeds_take_turns_and_a_table_is_printed(tmp_path, capsys):
    case = linear_case(0.5)
    cases = [Truth(name, tail(2), 0.0, lambda seed: case.estimate(seed)) for name in ("first", "second")]
    store = Store(tmp_path / "store.jsonl")
    found = answers(store, cases, 3, ENDLESS)
    assert [len(found[truth.name]) for truth in cases] == [2, 1]
    assert printed("linear", cases, found)[0] == 3
    assert "of 3 intervals of 95 % hold the truth" in capsys.readouterr().out
    assert [len(rows) for rows in answers(store, cases, 10, OVER).values()] == [2, 1]


def test_it_goes_on_where_it_was_stopped(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(coverage, "Subjects", OneSubject)
    monkeypatch.setattr(coverage, "PIECE", 5000)
    words = [str(tmp_path), str(tmp_path / "store.jsonl"), "--networks", "linear", "--decades", "1", "--runs", "2"]
    coverage.main([*words, "--seconds", "-1"])
    assert "the truth is not known yet" in capsys.readouterr().out
    coverage.main([*words, "--truth", "5000"])
    shown = capsys.readouterr().out
    assert "of 2 intervals of 95 % hold the truth" in shown
    assert "nothing is missing" in shown
    kept = [json.loads(line)["work"] for line in (tmp_path / "store.jsonl").read_text().splitlines()]
    assert kept == [
        "linear 0, 1e-1, noise",
        "linear 0, 1e-1, plain samples from 0",
        "linear 0, 1e-1, seed 0",
        "linear 0, 1e-1, seed 1",
    ]


def test_truths_come_from_a_file(tmp_path, monkeypatch, capsys):
    """Φ(−1/0.5), as if known from 10⁶ samples; truths of other networks are passed over."""
    monkeypatch.setattr(coverage, "Subjects", OneSubject)
    one = {"network": "linear", "image": 0, "sigma": 0.5, "p": tail(2), "samples": 10**6}
    (tmp_path / "truths.json").write_text(json.dumps([one, {**one, "network": "other", "p": 0.5}]))
    files = [str(tmp_path), str(tmp_path / "store.jsonl"), "--truths", str(tmp_path / "truths.json")]
    coverage.main([*files, "--networks", "linear", "--runs", "2"])
    assert "of 2 intervals of 95 % hold the truth" in capsys.readouterr().out
    kept = [json.loads(line)["work"] for line in (tmp_path / "store.jsonl").read_text().splitlines()]
    assert len(kept) == 2
    assert all("0.5000" in work for work in kept)
