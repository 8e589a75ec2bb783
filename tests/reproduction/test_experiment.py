"""What experiments add to sweeps: an end of the time."""

from __future__ import annotations

import pickle
import time

import pytest

pytest.importorskip("pyarrow", reason="sweeps keep their results in Parquet files, and pyarrow is not installed")

from netmoments.sweep.local import LocalEngine
from netmoments.sweep.run import run_sweep
from reproduction.experiment import Unfinished, Until
from tests.sweeps import Toy, expected, files, filled, same

HERE = LocalEngine(["cpu"])


def test_when_the_time_is_over_the_next_run_goes_on(tmp_path):
    sweep = Toy(delay=0.02, log=tmp_path / "log")
    with pytest.raises(
        Unfinished, match=r"^toy: [\d]+ of 24 rows done, stopped after 0\.\d seconds; run the same"
    ) as at:
        run_sweep(sweep, tmp_path, Until(HERE, time.monotonic() + 0.07))
    kept = len(sweep.computed())
    assert 1 <= kept < 12
    assert at.value.done == sum(sweep.counts[:kept])
    assert files(tmp_path / "toy") == ["part-0000.parquet"]
    assert same(run_sweep(sweep, tmp_path, Until(HERE, time.monotonic() + 60)).columns, expected(sweep))
    assert sweep.computed() == list(range(12))


def test_a_run_without_time_gets_on_all_the_same(tmp_path):
    for done in range(1, 4):
        with pytest.raises(Unfinished, match=f"^toy: {sum(Toy().counts[:done])} of 24"):
            run_sweep(Toy(), tmp_path, Until(HERE, 0.0))


def test_a_run_that_ends_with_its_time_is_finished(tmp_path):
    filled(tmp_path, Toy(), range(11))
    assert same(run_sweep(Toy(), tmp_path, Until(HERE, 0.0)).columns, expected(Toy()))


def test_the_message_about_time_counts_minutes_and_can_be_sent():
    error = pickle.loads(pickle.dumps(Unfinished("monte-carlo", 6200, 10000, "images", 480.0)))
    assert str(error) == (
        "monte-carlo: 6,200 of 10,000 images done, stopped after 8.0 minutes; run the same command again to go on"
    )
