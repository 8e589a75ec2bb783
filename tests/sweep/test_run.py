"""Runs of sweeps: resumed, interrupted, killed, watched; always the same rows."""

from __future__ import annotations

import errno
import io
import random
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="sweeps keep their results in Parquet files, and pyarrow is not installed")

from netmoments import progress
from netmoments.progress import progress_bar
from netmoments.sweep import run as running
from netmoments.sweep import store
from netmoments.sweep.local import LocalEngine
from netmoments.sweep.on_ray import RayEngine
from netmoments.sweep.run import Watch, run_sweep
from netmoments.sweep.store import Store
from tests.sweeps import Failing, Toy, expected, files, filled, same

ROOT = Path(__file__).parent.parent.parent
HERE = LocalEngine(["cpu"])


def test_a_sweep_without_items_is_refused(tmp_path):
    with pytest.raises(ValueError, match="toy has no items"):
        run_sweep(Toy(items=0), tmp_path, HERE)


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


@pytest.mark.parametrize("where", ["item", "part"])
def test_a_full_disk_keeps_what_is_done(tmp_path, monkeypatch, where):
    """Full while an item is written, or while items are merged: the next run, with room, gives the same rows."""
    sweep, plain, written = Toy(log=tmp_path / "log"), Path.write_bytes, []

    def until_full(self: Path, content: bytes) -> int:
        written.append(self.name)
        if (where == "item" and len(written) == 6) or self.name.startswith(".part"):
            plain(self, bytes(content)[:100])
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(self, content)

    monkeypatch.setattr(Path, "write_bytes", until_full)
    with pytest.raises(OSError, match=rf"{where}-0\d+\.parquet could not be written: No space left on device"):
        run_sweep(sweep, tmp_path, HERE)
    assert len(files(tmp_path / "toy")) == (5 if where == "item" else 12)
    assert not list((tmp_path / "toy").glob(".*.tmp"))
    monkeypatch.undo()
    before = len(sweep.computed())
    assert same(run_sweep(sweep, tmp_path, HERE).columns, expected(sweep))
    assert len(sweep.computed()) - before == (7 if where == "item" else 0)


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
        most = max(most, self.unmerged)

    monkeypatch.setattr(running, "MERGE_EVERY", 5)
    monkeypatch.setattr(Store, "add", counted)
    assert same(run_sweep(Toy(), tmp_path, HERE).columns, expected(Toy()))
    assert most == 5
    assert files(tmp_path / "toy") == [f"part-{number:04d}.parquet" for number in range(3)]


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
    """Ctrl-C comes when the file has its name already, but the store has not noted it."""
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


def test_kills_lose_and_double_nothing(tmp_path):
    """Kills at random moments, some of them during a merge."""
    killed_again_and_again(tmp_path, items=60, kills=6)


@pytest.mark.slow
def test_many_kills_lose_and_double_nothing(tmp_path):
    killed_again_and_again(tmp_path, items=300, kills=40)


def killed_again_and_again(out: Path, items: int, kills: int) -> None:
    chance, sweep, finished = random.Random(20261115), Toy(items=items), set()
    in_merge = gained = 0
    for _ in range(kills):
        assert run_until_killed(out, items, moment=chance.randrange(1, 60), delay=120)
        in_merge += merge_was_on(out / "toy")
        now = finished_in(out, sweep)
        assert finished <= now
        gained += now > finished
        finished = now
    assert len(finished) < items
    assert gained >= kills / 2
    assert in_merge >= 1
    assert same(run_sweep(sweep, out, HERE).columns, expected(sweep))
    assert not [name for name in files(out / "toy") if not name.startswith("part-")]


@pytest.mark.slow
def test_kills_from_outside_lose_and_double_nothing(tmp_path):
    """Kills at random times, by the process that started it."""
    items, chance = 1000, random.Random(20261115)
    sweep, finished = Toy(items=items), set()
    for _ in range(20):
        assert run_until_killed(tmp_path, items, moment=0, delay=chance.uniform(0.0, 0.2))
        now = finished_in(tmp_path, sweep)
        assert finished <= now
        finished = now
    assert same(run_sweep(sweep, tmp_path, HERE).columns, expected(sweep))
    assert not [name for name in files(tmp_path / "toy") if not name.startswith("part-")]


def run_until_killed(out: Path, items: int, moment: int, delay: float) -> bool:
    """Run a sweep in a process that kills itself at a moment, or is killed after a delay: was it still at work?"""
    command = [sys.executable, "-m", "tests.sweeps", str(out), str(items), str(moment)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        with suppress(subprocess.TimeoutExpired):
            child.wait(delay)
        child.kill()
        return child.wait() == -signal.SIGKILL


def merge_was_on(folder: Path) -> bool:
    """Whether there is half a part, or an item both in a part and in a file of its own."""
    parts = len(list(folder.glob(".part-*.tmp")))
    loose = {int(path.stem.removeprefix("item-")) for path in folder.glob("item-*.parquet")}
    merged = [store._pyarrow().parquet.read_table(path)["item"].to_pylist() for path in folder.glob("part-*.parquet")]
    return bool(parts or loose & {item for part in merged for item in part})


def finished_in(out: Path, sweep: Toy) -> set[int]:
    """The finished items in a copy of the folder, so that the next run has to clean up by itself."""
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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_a_line_now_and_then(monkeypatch):
    now = 100.0
    monkeypatch.setattr(running.time, "monotonic", lambda: now)
    monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
    with Watch("monte-carlo", "images", 10000, 1000) as bar:
        for now in (100.5, 101.25, 120.0, 131.5):  # noqa: B007 the clock reads it
            bar.advance(200)
    assert stream.getvalue().splitlines() == [
        "monte-carlo: 1,400 of 10,000 images, 320/s, 27s left",
        "monte-carlo: 1,800 of 10,000 images, 25.4/s, 5m23s left",
    ]


def test_long_times_are_told_in_hours():
    assert [running._duration(seconds) for seconds in (0.4, 59.7, 410, 7530)] == ["0s", "1m00s", "6m50s", "2h05m"]


def test_a_terminal_gets_a_bar_before_the_first_item_is_done(monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with Watch("monte-carlo", "images", 10, 3) as bar:
        bar._timer.join()
        assert "monte-carlo: 3 of 10 images" in terminal.getvalue()
        with progress_bar("sampling", 10) as show:
            show(10)
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
