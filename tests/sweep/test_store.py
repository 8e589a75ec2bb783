"""The folder of a sweep: files are whole and checked, results are never mixed, lost or counted twice."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="sweeps keep their results in Parquet files, and pyarrow is not installed")

import netmoments
from netmoments.sweep import store
from netmoments.sweep.local import LocalEngine
from netmoments.sweep.run import run_sweep
from netmoments.sweep.store import Rows, Store, only_writer
from tests.sweeps import Toy, expected, files, filled, same

ROOT = Path(__file__).parent.parent.parent
HERE = LocalEngine(["cpu"])


def test_rows_come_back_bit_for_bit(tmp_path):
    sweep = Toy(items=2)
    odd = {
        "double": np.array([np.nan, -0.0, 5e-324, np.inf, 0.1, -np.inf]),
        "single": np.array([np.nan, -0.0, 1e-45, np.inf, 0.1, 3.0], np.float32),
        "byte": np.array([0, 255, 1, 2, 3, 4], np.uint8),
        "long": np.array([-(2**63), 2**63 - 1, 0, 1, 2, 3]),
        "positive": np.array([2**64 - 1, 0, 0, 0, 0, 1], np.uint64),
        "word": np.array(["", "naïve", "a,b\n", "日本", "x" * 50, '"']),
        "every other": np.arange(12.0)[::2],
        "is": np.array([True, False] * 3),
    }
    with Store.open(tmp_path, sweep) as kept:
        kept.add(1, odd, 2.25)
    for _ in range(2):  # from a file of its own, and from a part
        with Store.open(tmp_path, sweep) as kept:
            assert same(kept.columns(), {"item": np.ones(6, np.int64), **odd})
            assert kept.finished == {1}
            assert kept.seconds == 2.25
            kept.merge()
    assert files(tmp_path / "toy") == ["part-0000.parquet"]


def test_items_added_in_any_order_come_in_theirs(tmp_path):
    sweep = Toy(items=9)
    with Store.open(tmp_path, sweep) as kept:
        for item in (4, 0, 8, 3, 1):
            kept.add(item, sweep._values(item), 1.0)
        kept.merge()
        for item in (7, 2, 6, 5):
            kept.add(item, sweep._values(item), 1.0)
        assert same(kept.columns(), expected(sweep))
        kept.merge()
        assert same(kept.columns(), expected(sweep))
    assert files(tmp_path / "toy") == ["part-0000.parquet", "part-0001.parquet"]


def test_parts_are_no_larger_than_said(tmp_path, monkeypatch):
    sweep = Toy(items=40)
    monkeypatch.setattr(store, "PART_BYTES", 400)
    run_sweep(sweep, tmp_path, HERE)
    parts = sorted((tmp_path / "toy").glob("part-*.parquet"))
    assert len(parts) > 5
    with Store.open(tmp_path, sweep) as kept:
        held = [[rows.item for rows in store.read_rows(path, kept._fingerprint)] for path in parts]
        assert all(sum(Rows(item, sweep._values(item), 0.0).bytes for item in items) <= 400 for items in held)
        assert same(kept.columns(), expected(sweep))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "no columns"),
        ({"value": np.zeros((2, 2))}, r"1-D numpy array, not shape \(2, 2\)"),
        ({"value": [1.0]}, "1-D numpy array, not list"),
        ({"value": np.zeros(2), "other": np.zeros(3)}, "one length"),
        ({"value": np.zeros(0)}, "at least 1"),
        ({"value": np.zeros(2, np.float16)}, "float16; wanted integers"),
        ({"value": np.zeros(2, ">f8")}, "byte order"),
        ({"value": np.array([{}, {}])}, "object"),
        ({"item": np.zeros(2)}, "another name"),
        ({"value": np.zeros(2, np.float32)}, "'value': 'float32'.*'value': 'float64'"),
        ({"values": np.zeros(2)}, "'values'.*'value'"),
    ],
)
def test_rows_that_cannot_be_stored_are_refused(tmp_path, columns, message):
    with Store.open(tmp_path, Toy()) as kept:
        kept.add(0, {"value": np.zeros(2)}, 1.0)
        with pytest.raises(ValueError, match=message) as caught:
            kept.add(3, columns, 1.0)
        assert "item 3 of toy" in str(caught.value)
        assert kept.finished == {0}


@pytest.mark.parametrize("item", [-1, 12, 0])
def test_items_that_are_not_to_do_are_refused(tmp_path, item):
    with Store.open(tmp_path, Toy()) as kept:
        kept.add(0, Toy()._values(0), 1.0)
        with pytest.raises(ValueError, match=f"item {item} of toy is not one of those still to do"):
            kept.add(item, Toy()._values(0), 1.0)


def test_another_configuration_is_refused(tmp_path):
    filled(tmp_path, Toy(), range(3))
    with pytest.raises(ValueError, match="give another --out, or remove the folder") as caught:
        run_sweep(Toy(seed=2), tmp_path, HERE)
    assert str(tmp_path / "toy" / "_configuration.json") in str(caught.value)
    assert "seed: wanted 2, there 1" in str(caught.value)
    assert "levels" not in str(caught.value)


def test_a_number_of_another_type_is_another_configuration(tmp_path):
    filled(tmp_path, Toy(), range(3))
    with pytest.raises(ValueError, match=r"seed: wanted 1\.0, there 1"):
        run_sweep(Toy(seed=1.0), tmp_path, HERE)


def test_another_division_into_items_is_refused(tmp_path):
    class Other(Toy):
        @property
        def counts(self) -> list[int]:
            return [2] * self.items

    filled(tmp_path, Toy(items=3), range(3))
    with pytest.raises(ValueError, match=r"work items: wanted .3 of 2 rows., there .1 of 1 rows, 1 of 2 rows"):
        run_sweep(Other(items=3), tmp_path, HERE)


@pytest.mark.parametrize("text", ["{", "[1]", "", "\xff"])
def test_a_damaged_configuration_is_an_error(tmp_path, text):
    path = filled(tmp_path, Toy(), range(3)) / "_configuration.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"configuration\.json is damaged"):
        run_sweep(Toy(), tmp_path, HERE)


def test_a_missing_configuration_is_an_error(tmp_path):
    (filled(tmp_path, Toy(), range(3)) / "_configuration.json").unlink()
    with pytest.raises(ValueError, match=r"toy has results but no _configuration\.json"):
        run_sweep(Toy(), tmp_path, HERE)


def test_a_configuration_that_is_not_json_is_refused(tmp_path):
    with pytest.raises(TypeError, match="configuration of toy must be plain JSON"):
        run_sweep(Toy(seed=np.float32(1)), tmp_path, HERE)
    with pytest.raises(TypeError, match="configuration of toy must be plain JSON"):
        run_sweep(Toy(seed=float("nan")), tmp_path, HERE)


@pytest.mark.parametrize("name", ["", "..", "a/b", "."])
def test_a_name_that_is_no_folder_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="name of its folder"):
        run_sweep(Toy(name=name), tmp_path, HERE)


@pytest.mark.parametrize("merged", [False, True], ids=["shard", "part"])
def test_every_flipped_byte_is_seen_or_harmless(tmp_path, merged):
    sweep = Toy(items=4)
    folder = filled(tmp_path, sweep, range(4))
    if merged:
        with Store.open(tmp_path, sweep) as kept:
            kept.merge()
    with Store.open(tmp_path, sweep) as kept:
        whole = kept.columns()
    path = folder / ("part-0000.parquet" if merged else "item-000002.parquet")
    content = path.read_bytes()
    places = range(random.Random(5).randrange(13), len(content), 13)
    seen = 0
    for place in places:
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :])
        try:
            with Store.open(tmp_path, sweep) as kept:
                found, seconds, message = kept.columns(), kept.seconds, None
        except ValueError as error:
            message = str(error)
        if message is None:
            assert same(found, whole), place
            assert seconds == 2.0, place
        else:
            assert str(path) in message, place
            assert "remove it and run again, only its items are computed again" in message, place
            seen += 1
    assert seen > len(places) / 2


@pytest.mark.parametrize("length", [0, 3, 100, -1])
def test_a_truncated_file_is_an_error_and_its_removal_the_cure(tmp_path, length):
    sweep = Toy(items=4, log=tmp_path / "log")
    path = filled(tmp_path, Toy(items=4), range(4)) / "item-000002.parquet"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ValueError, match=r"item-000002.parquet is damaged .*remove it and run again"):
        run_sweep(sweep, tmp_path, HERE)
    path.unlink()
    assert same(run_sweep(sweep, tmp_path, HERE).columns, expected(sweep))
    assert sweep.computed() == [2]


def test_a_file_of_another_configuration_is_an_error(tmp_path):
    folder = filled(tmp_path / "one", Toy(), range(3))
    other = filled(tmp_path / "two", Toy(seed=2), range(5))
    shutil.copy(other / "item-000004.parquet", folder)
    with pytest.raises(ValueError, match=r"item-000004.parquet is of another configuration .*remove it"):
        run_sweep(Toy(), tmp_path / "one", HERE)


def test_a_file_with_another_files_name_is_an_error(tmp_path):
    folder = filled(tmp_path, Toy(), range(3))
    (folder / "item-000002.parquet").rename(folder / "item-000007.parquet")
    with pytest.raises(ValueError, match=r"item-000007.parquet holds item 2, not what its name says"):
        run_sweep(Toy(), tmp_path, HERE)
    (folder / "item-000007.parquet").rename(folder / "item-two.parquet")
    with pytest.raises(ValueError, match=r"item-two.parquet is not a name that a sweep gives"):
        run_sweep(Toy(), tmp_path, HERE)


def test_an_item_out_of_range_is_an_error(tmp_path):
    folder = filled(tmp_path, Toy(items=3), range(3))
    with Store.open(tmp_path, Toy(items=3)) as kept:
        rows = Rows(3, Toy()._values(3), 1.0)
        store.write_rows(folder / "item-000003.parquet", kept._fingerprint, [rows])
    with pytest.raises(ValueError, match=r"item-000003.parquet has an item 3, of 3 items from 0"):
        run_sweep(Toy(items=3), tmp_path, HERE)


def test_files_with_other_columns_are_an_error(tmp_path):
    folder = filled(tmp_path, Toy(), range(3))
    with Store.open(tmp_path, Toy()) as kept:
        store.write_rows(folder / "item-000003.parquet", kept._fingerprint, [Rows(3, {"value": np.ones(2)}, 1.0)])
    with pytest.raises(ValueError, match=r"item-000003.parquet has the columns .*where other items have"):
        run_sweep(Toy(), tmp_path, HERE)


def test_leftovers_of_a_kill_are_removed(tmp_path):
    folder = filled(tmp_path, Toy(), range(3))
    (folder / ".item-000003.parquet.4242.tmp").write_bytes(b"PAR1half")
    assert same(run_sweep(Toy(), tmp_path, HERE).columns, expected(Toy()))
    assert files(folder) == ["part-0000.parquet"]


def half_merged(out: Path) -> Path:
    """The folder as a kill leaves it after a part was written and before all its shards are deleted."""
    folder = filled(out, Toy(), range(5))
    shutil.copytree(folder, out / "before")
    with Store.open(out, Toy()) as kept:
        kept.merge()
    for name in ("item-000001.parquet", "item-000004.parquet"):
        shutil.copy(out / "before" / name, folder)
    return folder


def test_after_an_interrupted_merge_nothing_counts_twice(tmp_path):
    folder = half_merged(tmp_path)
    with Store.open(tmp_path, Toy()) as kept:
        assert kept.finished == set(range(5))
        assert kept.seconds == 2.5
        assert len(kept.columns()["item"]) == sum(Toy().counts[:5])
    assert files(folder) == ["part-0000.parquet"]


def test_a_file_that_disagrees_with_its_part_is_an_error(tmp_path):
    folder = half_merged(tmp_path)
    with Store.open(tmp_path, Toy()) as kept:
        other = Rows(4, Toy(seed=2)._values(4), 0.5)
        store.write_rows(folder / "item-000004.parquet", kept._fingerprint, [other])
    with pytest.raises(ValueError, match=r"item 4 is in .*part-0000.parquet and in .*item-000004.parquet, with other"):
        run_sweep(Toy(), tmp_path, HERE)


def test_an_item_in_two_parts_is_an_error(tmp_path):
    folder = half_merged(tmp_path)
    shutil.copy(folder / "part-0000.parquet", folder / "part-0003.parquet")
    with pytest.raises(ValueError, match=r"item 0 is in .*part-0000.parquet and in .*part-0003.parquet"):
        run_sweep(Toy(), tmp_path, HERE)


def test_a_full_disk_keeps_what_is_finished(tmp_path, monkeypatch):
    sweep = Toy(log=tmp_path / "log")
    whole = Path.write_bytes

    def full(path: Path, content: bytes) -> None:
        if "item-000006" in path.name or "part" in path.name:
            whole(path, bytes(content)[: len(content) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        whole(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match=r"item-000006.parquet could not be written: No space left") as caught:
            run_sweep(sweep, tmp_path, HERE)
    assert caught.value.errno == errno.ENOSPC
    assert files(tmp_path / "toy") == [f"item-{item:06d}.parquet" for item in range(6)]
    assert same(run_sweep(sweep, tmp_path, HERE).columns, expected(sweep))
    assert sorted(sweep.computed()) == sorted([*range(12), 6])


def test_one_process_writes_at_a_time(tmp_path):
    with (
        Store.open(tmp_path, Toy()),
        pytest.raises(BlockingIOError, match=f"another process is writing to {tmp_path / 'toy'}"),
    ):
        run_sweep(Toy(), tmp_path, HERE)
    assert same(run_sweep(Toy(), tmp_path, HERE).columns, expected(Toy()))


def test_a_killed_process_leaves_no_lock(tmp_path):
    code = (
        "import sys, time, pathlib; from netmoments.sweep.store import only_writer\n"
        "with only_writer(pathlib.Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT)
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        with pytest.raises(BlockingIOError), only_writer(tmp_path):
            pass
        child.kill()
        child.wait()
    with only_writer(tmp_path):
        pass


def test_the_configuration_can_be_read_by_people(tmp_path):
    there = json.loads((filled(tmp_path, Toy(items=4), range(1)) / "_configuration.json").read_text())
    assert there == {
        "seed": 1, "levels": [0.1, 1], "items": 4, "device": "cpu", "netmoments": netmoments.__version__,
        "work items": "1 of 1 rows, 1 of 2 rows, 1 of 3 rows, 1 of 1 rows",
    }  # fmt: skip


def test_results_of_two_kinds_of_devices_are_not_mixed(tmp_path):
    filled(tmp_path, Toy(), range(3))
    with pytest.raises(ValueError, match='device: wanted "cuda", there "cpu"'):
        run_sweep(Toy(), tmp_path, LocalEngine(["cuda:0", "cuda:1"]))
    with pytest.raises(ValueError, match="cpu and cuda"):
        LocalEngine(["cuda:0", "cpu"])
