"""Golden outputs: every call but the attacks as it was recorded, and what the comparison notices.

Attacks iterate, with thresholds, and may go another way on another CPU: `python -m benchmarks.golden compare` has them.
"""

from __future__ import annotations

import json
import sys

import pytest
import torch

from benchmarks import golden

CALLS = golden.calls()


@pytest.fixture(scope="module")
def recorded() -> dict:
    return json.loads(golden.RECORD.read_text())


@pytest.mark.parametrize("name", [name for name in CALLS if not name.startswith(golden.ITERATED)])
def test_as_recorded(name, recorded):
    found = golden.difference(name, recorded[name], golden.output_of(CALLS[name]))
    assert not found.beyond


def test_every_call_is_in_the_record(recorded):
    assert CALLS.keys() == recorded.keys()


def test_numbers_are_compared_relative_to_the_largest_of_their_field():
    before = {"mean": [1.0, 1e-12], "variance": [[4.0, 0.0], [0.0, 2.0]]}
    small = {"mean": [1.0, 3e-12], "variance": [[4.0, 1e-9], [0.0, 2.0]]}
    found = golden.difference("cnn", before, small)
    assert found.largest == pytest.approx(1e-9 / 4)
    assert found.beyond == ()
    large = {"mean": [1.0, 3e-9], "variance": [[4.0, 0.0], [0.0, 2.0]]}
    assert golden.difference("cnn", before, large).beyond == ("mean differs by 3.0e-09, allowed 1e-09",)
    for name, field in (("cnn32", "mean"), ("attack", "mean"), ("kernels", "mean32")):
        assert not golden.difference(name, {field: [1.0]}, {field: [1.0 + 3e-9]}).beyond


def test_nan_words_shapes_and_missing_fields_are_differences():
    before = {"mean": [1.0, 2.0], "method": "exact"}
    for now in (
        {"mean": [1.0, float("nan")], "method": "exact"},
        {"mean": [1.0, 2.0], "method": "layerwise"},
        {"mean": [1.0], "method": "exact"},
        {"mean": [1.0, 2.0, 3.0], "method": "exact"},
        {"mean": [1.0, 2.0]},
        {"mean": [1.0, None], "method": "exact"},
    ):
        assert len(golden.difference("cnn", before, now).beyond) == 1
    assert golden.difference("cnn", {"mean": [0.0]}, {"mean": [1e-300]}).beyond


def test_the_command_records_compares_and_says_so_by_its_status(tmp_path, monkeypatch, capsys):
    value = torch.tensor([[1.0, 2.0]])
    monkeypatch.setattr(golden, "calls", lambda: {"one": lambda: {"mean": value}, "two": lambda: {"n": [3]}})
    path = tmp_path / "golden.json"

    def status(*words: object) -> int:
        monkeypatch.setattr(sys, "argv", ["golden", *map(str, words)])
        return golden.main()

    assert status("record", path) == 0
    assert json.loads(path.read_text()) == {"one": {"mean": [1.0, 2.0]}, "two": {"n": [3]}}
    assert status("compare", path) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "all 2 calls are as recorded"
    value += 1
    assert status("compare", path) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 calls differ"
    path.write_text(json.dumps({"gone": {"mean": [1.0]}}))
    assert status("compare", path) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "3 calls differ"
