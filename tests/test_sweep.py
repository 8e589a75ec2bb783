"""Sweeps: the same results whoever computes them and however often they are killed, and errors that say what to do."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="sweeps keep their results in Parquet files, and pyarrow is not installed")

import netmoments
from netmoments import progress
from netmoments.progress import Progress
from netmoments.sampling.evaluation import random_seed
from netmoments.sweep import run as running
from netmoments.sweep import run as watch
from netmoments.sweep import store
from netmoments.sweep import store as shards
from netmoments.sweep.local import LocalEngine
from netmoments.sweep.on_ray import RayEngine
from netmoments.sweep.run import Unfinished, Watch, run_sweep
from netmoments.sweep.store import Rows, Store, only_writer
from tests.sweeps import Dying, Failing, FailingStubbornly, Toy

ROOT = Path(__file__).parent.parent
HERE = LocalEngine(["cpu"])
TWO = LocalEngine(["cpu", "cpu"])
SEEDS = [4862794602643682422, 6242148033895693001, 6734197056050198910]


def same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> bool:
    """Bit for bit, names and types included; the type of a text is its width."""
    return list(found) == list(wanted) and all(
        found[name].dtype == wanted[name].dtype and found[name].tobytes() == wanted[name].tobytes() for name in wanted
    )


def expected(sweep: Toy) -> dict[str, np.ndarray]:
    """The rows of a sweep without any of the machinery."""
    plain = Toy(items=sweep.items, seed=sweep.seed)
    items = [plain._values(item) for item in range(sweep.items)]
    numbers = np.repeat(np.arange(sweep.items), sweep.counts)
    return {"item": numbers, **{name: np.concatenate([rows[name] for rows in items]) for name in items[0]}}


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name not in (".lock", "_configuration.json"))


def filled(out: Path, sweep: Toy, items: range) -> Path:
    """A folder with the files of these items, each its own; the path of the folder."""
    with Store.open(out, sweep) as kept:
        for item in items:
            kept.add(item, sweep._values(item), 0.5)
    return out / sweep.name


# seeds


def test_seeds_are_what_they_always_were():
    assert random_seed(0, "monte-carlo", 0) == SEEDS[0]
    assert random_seed(20261115, "monte-carlo", 7) == SEEDS[1]
    assert random_seed(1, "1", 1) == SEEDS[2]


def test_seeds_depend_on_all_three():
    seeds = {random_seed(seed, name, item) for seed in range(5) for name in ("a", "b", "1") for item in range(200)}
    assert len(seeds) == 5 * 3 * 200
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62


# the store


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
        held = [[rows.item for rows in shards.read_rows(path, kept._fingerprint)] for path in parts]
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


def test_a_sweep_without_items_is_refused(tmp_path):
    with pytest.raises(ValueError, match="toy has no items"):
        run_sweep(Toy(items=0), tmp_path, HERE)


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
        shards.write_rows(folder / "item-000003.parquet", kept._fingerprint, [rows])
    with pytest.raises(ValueError, match=r"item-000003.parquet has an item 3, of 3 items from 0"):
        run_sweep(Toy(items=3), tmp_path, HERE)


def test_files_with_other_columns_are_an_error(tmp_path):
    folder = filled(tmp_path, Toy(), range(3))
    with Store.open(tmp_path, Toy()) as kept:
        shards.write_rows(folder / "item-000003.parquet", kept._fingerprint, [Rows(3, {"value": np.ones(2)}, 1.0)])
    with pytest.raises(ValueError, match=r"item-000003.parquet has the columns .*where other items have"):
        run_sweep(Toy(), tmp_path, HERE)


def test_leftovers_of_a_kill_are_removed(tmp_path):
    folder = filled(tmp_path, Toy(), range(3))
    (folder / ".item-000003.parquet.4242.tmp").write_bytes(b"PAR1half")
    assert same(run_sweep(Toy(), tmp_path, HERE).columns, expected(Toy()))
    assert files(folder) == ["part-0000.parquet"]


def half_merged(out: Path) -> Path:
    """The folder as a kill leaves it between the writing of a part and the deletion of its items' files."""
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
        shards.write_rows(folder / "item-000004.parquet", kept._fingerprint, [other])
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
        "import sys, time, pathlib; from netmoments.sweep.lock import only_writer\n"
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


# runs


def test_a_run_gives_all_rows_and_keeps_them_in_parts(tmp_path):
    sweep = Toy(delay=0.002)
    found = run_sweep(sweep, tmp_path, HERE)
    assert same(found.columns, expected(sweep))
    assert found.seconds >= 12 * 0.002
    assert files(tmp_path / "toy") == ["part-0000.parquet"]


def test_only_what_is_missing_is_computed(tmp_path):
    sweep = Toy(log=tmp_path / "log")
    filled(tmp_path, sweep, range(2, 9))
    assert same(run_sweep(sweep, tmp_path, HERE).columns, expected(sweep))
    assert sweep.computed() == [0, 1, 9, 10, 11]


def test_what_is_finished_starts_no_engine(tmp_path):
    class Broken:
        device_type = "cpu"

        def results(self, sweep, items):
            raise AssertionError("started")

    first = run_sweep(Toy(), tmp_path, HERE)
    again = run_sweep(Toy(), tmp_path, Broken())
    assert same(again.columns, first.columns)
    assert again.seconds == first.seconds


def test_many_items_are_merged_on_the_way(tmp_path, monkeypatch):
    most = 0
    add = Store.add

    def counted(self, *arguments):
        nonlocal most
        add(self, *arguments)
        most = max(most, self.loose)

    monkeypatch.setattr(running, "MERGE_EVERY", 5)
    monkeypatch.setattr(Store, "add", counted)
    assert same(run_sweep(Toy(), tmp_path, HERE).columns, expected(Toy()))
    assert most == 5
    assert files(tmp_path / "toy") == [f"part-{number:04d}.parquet" for number in range(3)]


def test_when_the_time_is_over_the_next_run_goes_on(tmp_path):
    sweep = Toy(delay=0.02, log=tmp_path / "log")
    with pytest.raises(
        Unfinished, match=r"^toy: [\d]+ of 24 rows done, stopped after 0\.\d seconds; run the same"
    ) as at:
        run_sweep(sweep, tmp_path, HERE, seconds=0.07)
    kept = len(sweep.computed())
    assert 1 <= kept < 12
    assert at.value.done == sum(sweep.counts[:kept])
    assert files(tmp_path / "toy") == ["part-0000.parquet"]
    assert same(run_sweep(sweep, tmp_path, HERE, seconds=60).columns, expected(sweep))
    assert sweep.computed() == list(range(12))


def test_a_run_without_time_gets_on_all_the_same(tmp_path):
    for done in range(1, 4):
        with pytest.raises(Unfinished, match=f"^toy: {sum(Toy().counts[:done])} of 24"):
            run_sweep(Toy(), tmp_path, HERE, seconds=0.0)


def test_a_run_that_ends_with_its_time_is_finished(tmp_path):
    filled(tmp_path, Toy(), range(11))
    assert same(run_sweep(Toy(), tmp_path, HERE, seconds=0.0).columns, expected(Toy()))


def test_the_message_about_time_counts_minutes_and_can_be_sent():
    error = pickle.loads(pickle.dumps(Unfinished("monte-carlo", 6200, 10000, "images", 480.0)))
    assert str(error) == (
        "monte-carlo: 6,200 of 10,000 images done, stopped after 8.0 minutes; run the same command again to go on"
    )


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("no such pixel")], ids=["interrupt", "error"])
def test_an_interrupted_run_keeps_what_is_finished(tmp_path, error):
    sweep = Failing(error=error, log=tmp_path / "log")
    with pytest.raises(type(error)):
        run_sweep(sweep, tmp_path, HERE)
    assert files(tmp_path / "toy") == ["part-0000.parquet"]
    well = Toy(log=tmp_path / "log")
    assert same(run_sweep(well, tmp_path, HERE).columns, expected(well))
    assert sorted(well.computed()) == sorted([*range(12), 5])


@pytest.mark.parametrize("after", ["item-000007.parquet", "part-0000.parquet"])
def test_an_interrupt_between_a_file_and_its_entry_loses_and_doubles_nothing(tmp_path, monkeypatch, after):
    """Ctrl-C when the file has its name already, but the store has not heard of it."""
    write = store.write_rows

    def interrupted(path: Path, *arguments) -> None:
        write(path, *arguments)
        if path.name == after:
            raise KeyboardInterrupt

    monkeypatch.setattr(running, "MERGE_EVERY", 5)
    sweep = Toy(log=tmp_path / "log")
    with monkeypatch.context() as patch:
        patch.setattr(store, "write_rows", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_sweep(sweep, tmp_path, HERE)
    assert all(name.startswith("part-") for name in files(tmp_path / "toy"))
    assert same(run_sweep(sweep, tmp_path, HERE).columns, expected(sweep))
    assert sweep.computed() == list(range(12))


def test_a_merge_that_fails_does_not_hide_the_error(tmp_path, monkeypatch):
    def broken(self):
        raise OSError("merge failed")

    monkeypatch.setattr(Store, "merge", broken)
    with pytest.raises(ValueError, match="item 5 of toy: no such pixel"):
        run_sweep(Failing(), tmp_path, HERE)
    with pytest.raises(OSError, match="merge failed"):
        run_sweep(Toy(), tmp_path, HERE)


def test_an_engine_that_ends_early_is_an_error(tmp_path):
    class Lazy:
        device_type = "cpu"

        def results(self, sweep, items):
            yield from HERE.results(sweep, items[:3])

    with pytest.raises(RuntimeError, match="gave 3 of 12 items"):
        run_sweep(Toy(), tmp_path, Lazy())


# processes on this machine


def test_two_processes_give_the_same_bits(tmp_path):
    sweep = Toy(log=tmp_path / "log", delay=0.05)
    assert same(run_sweep(sweep, tmp_path, TWO).columns, expected(sweep))
    assert sorted(sweep.computed()) == list(range(12))
    assert len(sweep.processes()) == 2
    assert os.getpid() not in sweep.processes()


def test_closing_the_results_stops_the_processes(tmp_path):
    sweep = Toy(items=500, delay=0.01, log=tmp_path / "log")
    with closing(TWO.results(sweep, range(500))) as results:
        next(results)
    assert not any(alive(process) for process in sweep.processes())
    assert len(sweep.computed()) < 500


def alive(process: int) -> bool:
    """Whether it runs; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


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


def test_a_killed_process_is_replaced(tmp_path):
    sweep = Dying(log=tmp_path / "log", times=2)
    assert same(run_sweep(sweep, tmp_path, TWO).columns, expected(sweep))
    assert sweep.computed().count(5) == 3
    assert len(sweep.processes(5)) == 3


def test_an_interrupt_is_not_for_the_processes(tmp_path):
    sweep = Dying(log=tmp_path / "log", by=signal.SIGINT)
    assert same(run_sweep(sweep, tmp_path, TWO).columns, expected(sweep))
    assert sweep.computed().count(5) == 1


def test_an_item_that_kills_every_process_is_given_up(tmp_path):
    sweep = Dying(log=tmp_path / "log", times=100)
    with pytest.raises(ChildProcessError, match=r"item 5 of toy: its process on cpu was lost 3 times.*SIGKILL.*kept"):
        run_sweep(sweep, tmp_path, TWO)
    assert sweep.computed().count(5) == 3
    assert not any(alive(process) for process in sweep.processes())


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_processes_end_with_the_one_that_started_them(tmp_path, ending):
    """Ctrl-C goes to all of them and keeps what is finished; a kill goes to the parent alone."""
    sweep = Toy(items=400, delay=0.02, log=tmp_path / "log")
    code = (
        "import sys, pathlib; from netmoments.sweep import LocalEngine, run_sweep; from tests.sweeps import Toy\n"
        "out = pathlib.Path(sys.argv[1])\n"
        "run_sweep(Toy(items=400, delay=0.02, log=out / 'log'), out, LocalEngine(['cpu', 'cpu']))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, start_new_session=True) as parent:
        until(lambda: (tmp_path / "log").exists() and len(sweep.computed()) > 20)
        (os.killpg if ending == signal.SIGINT else os.kill)(parent.pid, ending)
        assert parent.wait(20) == -ending
        assert parent.stderr is not None
        said = parent.stderr.read().decode()
    until(lambda: not any(alive(process) for process in sweep.processes()))
    if ending == signal.SIGINT:
        assert said.count("Traceback") == 1
        assert files(tmp_path / "toy") == ["part-0000.parquet"]
    with Store.open(tmp_path, sweep) as kept:
        assert 15 < len(kept.finished) < 400


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("devices", [[], "cpu"])
def test_devices_are_a_list(devices):
    with pytest.raises(ValueError, match="list of devices"):
        LocalEngine(devices)


# kills


def test_twenty_kills_lose_and_double_nothing(tmp_path):
    """Most kills must find the run unfinished, and some of them a merge that is not over."""
    items, chance = 300, random.Random(20261115)
    sweep = Toy(items=items)
    folder = tmp_path / "toy"
    finished: set[int] = set()
    unfinished = in_merge = gained = 0
    for _ in range(20):
        if run_until_killed(tmp_path, items, chance.uniform(0.0, 0.2)):
            unfinished += 1
        in_merge += merge_was_on(folder)
        now = finished_in(tmp_path, sweep)
        assert finished <= now
        gained += now > finished
        finished = now
    assert unfinished >= 15
    assert gained >= 10
    assert in_merge >= 1
    assert same(run_sweep(sweep, tmp_path, HERE).columns, expected(sweep))
    assert not [name for name in files(folder) if not name.startswith("part-")]


def run_until_killed(out: Path, items: int, delay: float) -> bool:
    """Whether it was still at work when it was killed."""
    command = [sys.executable, "-m", "tests.sweeps", str(out), str(items)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        with suppress(subprocess.TimeoutExpired):
            child.wait(delay)
        child.kill()
        return child.wait() == -9


def merge_was_on(folder: Path) -> bool:
    """Whether half a part is there, or an item both in a part and in a file of its own."""
    parts = len(list(folder.glob(".part-*.tmp")))
    loose = {int(path.stem.removeprefix("item-")) for path in folder.glob("item-*.parquet")}
    merged = [shards._pyarrow().parquet.read_table(path)["item"].to_pylist() for path in folder.glob("part-*.parquet")]
    return bool(parts or loose & {item for part in merged for item in part})


def finished_in(out: Path, sweep: Toy) -> set[int]:
    """What a copy of the folder says, so that the next run has to clean up itself."""
    shutil.copytree(out, copy := out.with_name(out.name + "-copy"))
    try:
        with Store.open(copy, sweep) as kept:
            rows = kept.columns()["item"]
            assert np.array_equal(rows, np.repeat(np.arange(sweep.items), np.bincount(rows, minlength=sweep.items)))
            for item, count in zip(*np.unique(rows, return_counts=True), strict=True):
                assert count == sweep.counts[item]
            return kept.finished
    finally:
        shutil.rmtree(copy)


# Ray


def test_ray_gives_the_same_bits_though_a_worker_is_killed(tmp_path, two_workers):
    sweep = Dying(items=40, delay=0.02, log=tmp_path / "log")
    found = run_sweep(sweep, tmp_path / "ray", RayEngine("cpu"))
    assert sweep.computed().count(5) == 2
    assert len(sweep.processes(5)) == 2
    assert len(sweep.processes()) >= 2
    assert os.getpid() not in sweep.processes()
    here = run_sweep(Toy(items=40), tmp_path / "here", HERE)
    assert same(found.columns, here.columns)
    assert two_workers.is_initialized()


def test_ray_at_an_address_and_a_ray_of_its_own(tmp_path, two_workers):
    """In another process, which is connected to none: both give the same bits and both are left or ended as told."""
    code = (
        "import sys, pathlib, ray\n"
        "from netmoments.sweep import RayEngine, run_sweep\n"
        "from tests.sweeps import Toy\n"
        "for name, address in (('theirs', sys.argv[2]), ('own', None)):\n"
        "    run_sweep(Toy(), pathlib.Path(sys.argv[1]) / name, RayEngine('cpu', address))\n"
        "    assert not ray.is_initialized()\n"
    )
    address = two_workers.get_runtime_context().gcs_address
    command = [sys.executable, "-W", "error", "-c", code, str(tmp_path), address]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    for name in ("theirs", "own"):
        with Store.open(tmp_path / name, Toy()) as kept:
            assert same(kept.columns(), expected(Toy()))
    assert two_workers.cluster_resources()["CPU"] == 2


def test_ray_at_an_address_where_nobody_listens(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray", reason="ray is not installed")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    for address in ("127.0.0.1:1", "ray://127.0.0.1:1"):
        with pytest.raises(ConnectionError, match=f"no Ray at {address}: .*refused; `ray start --head` starts one"):
            run_sweep(Toy(), tmp_path, RayEngine("cpu", address))
    with Store.open(tmp_path, Toy()) as kept:
        assert not kept.finished


def test_ray_names_a_failing_item(tmp_path, two_workers):
    with pytest.raises(ValueError, match="no such pixel") as caught:
        run_sweep(Failing(), tmp_path, RayEngine("cpu"))
    assert str(caught.value) == "item 5 of toy: no such pixel"
    assert "raise copy(self.error)" in "".join(caught.value.__notes__)


def test_ray_keeps_few_tasks_in_flight(tmp_path, two_workers):
    sweep = Toy(items=200, delay=0.01, log=tmp_path / "log")
    with closing(RayEngine("cpu").results(sweep, range(200))) as results:
        for _ in range(3):
            next(results)
        time.sleep(0.5)
        assert 3 < len(sweep.computed()) <= 3 + 4


def test_closing_the_results_of_ray_ends_what_is_at_work(tmp_path, two_workers):
    sweep = Toy(items=200, delay=0.5, log=tmp_path / "log")
    with closing(RayEngine("cpu").results(sweep, range(200))) as results:
        next(results)
        until(lambda: len(sweep.computed()) > 2)
    until(lambda: any(not alive(process) for process in sweep.processes()))
    assert len(sweep.computed()) <= 1 + 4


@pytest.mark.parametrize(("engine", "wanted"), [(RayEngine("cuda"), "a GPU"), (RayEngine("cpu", threads=3), "3 cores")])
def test_ray_says_when_a_task_can_never_run(tmp_path, two_workers, engine, wanted):
    with pytest.raises(ValueError, match=f"a task needs {wanted}, and the Ray cluster has 2 cores"):
        run_sweep(Toy(), tmp_path, engine)


def test_ray_chooses_the_gpu():
    with pytest.raises(ValueError, match=r'give "cuda", not .cuda:1.'):
        RayEngine("cuda:1")
    with pytest.raises(ValueError, match="at least one thread"):
        RayEngine("cpu", threads=0)


# progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_a_line_now_and_then(monkeypatch):
    now = 100.0
    monkeypatch.setattr(watch.time, "monotonic", lambda: now)
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    with Watch("monte-carlo", "images", 10000, 1000) as bar:
        for now in (100.5, 101.25, 120.0, 131.5):  # noqa: B007 the clock reads it
            bar.advance(200)
    assert stream.getvalue().splitlines() == [
        "monte-carlo: 1,400 of 10,000 images, 320/s, 27s left",
        "monte-carlo: 1,800 of 10,000 images, 25.4/s, 5m23s left",
    ]


def test_long_times_are_told_in_hours():
    assert [watch._duration(seconds) for seconds in (0.4, 59.7, 410, 7530)] == ["0s", "1m00s", "6m50s", "2h05m"]


def test_a_terminal_gets_a_bar_before_the_first_item_is_done(monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with Watch("monte-carlo", "images", 10, 3) as bar:
        bar._timer.join()
        assert "monte-carlo: 3 of 10 images" in terminal.getvalue()
        with Progress("sampling", 10) as inner:
            inner.advance(10)
        bar.advance(7)
    assert "10 of 10 images" in terminal.getvalue()
    assert "sampling" not in terminal.getvalue()
    assert not bar._bar.live.is_started


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()], ids=["terminal", "log"])
def test_a_short_sweep_is_silent(monkeypatch, tmp_path, stream):
    monkeypatch.setattr(sys, "stderr", stream)
    run_sweep(Toy(), tmp_path, HERE)
    assert stream.getvalue() == ""


def test_importing_sweeps_loads_nothing_heavy():
    code = "import sys, netmoments.sweep; print({'torch', 'pyarrow', 'ray', 'rich'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"set()\n"


def test_a_missing_package_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r'pip install "netmoments\[sweeps\]"'):
        run_sweep(Toy(), tmp_path, HERE)
    with pytest.raises(ImportError, match=r'pip install "netmoments\[sweeps\]"'):
        next(RayEngine("cpu").results(Toy(), [0]))


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
