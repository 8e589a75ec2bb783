"""The error of an item that fails names the item, wherever it was computed."""

from __future__ import annotations

import errno

import pytest

pytest.importorskip("pyarrow", reason="sweeps keep their results in Parquet files, and pyarrow is not installed")

from netmoments.sweep.local import LocalEngine
from netmoments.sweep.run import run_sweep
from netmoments.sweep.store import Store
from tests.sweeps import Failing, FailingStubbornly, Toy

HERE = LocalEngine(["cpu"])
TWO = LocalEngine(["cpu", "cpu"])


@pytest.mark.parametrize("engine", [HERE, TWO], ids=["here", "processes"])
def test_a_failing_item_is_named(tmp_path, engine):
    with pytest.raises(ValueError, match="no such pixel") as caught:
        run_sweep(Failing(), tmp_path, engine)
    assert str(caught.value) == "item 5 of toy: no such pixel"
    if engine is TWO:
        assert "raise copy(self.error)" in "".join(caught.value.__notes__)
    with Store.open(tmp_path, Toy()) as kept:
        assert 5 not in kept.finished
        assert len(kept.finished) >= 4  # of items 0 to 4, given out before, at most one was still at work


def test_an_error_that_cannot_be_sent_is_told_all_the_same(tmp_path):
    with pytest.raises(RuntimeError, match=r"^Stubborn: item 5 of toy: 1 and 2\n") as caught:
        run_sweep(FailingStubbornly(), tmp_path, TWO)
    assert "raise Stubborn(1, 2)" in "".join(caught.value.__notes__)


def test_an_error_with_several_arguments_is_named_in_a_note(tmp_path):
    with pytest.raises(OSError, match="broken") as caught:
        run_sweep(Failing(error=OSError(errno.EIO, "broken")), tmp_path, HERE)
    assert caught.value.errno == errno.EIO
    assert caught.value.__notes__ == ["in item 5 of toy"]
