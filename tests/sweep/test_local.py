"""Processes on this machine: the same bits, failures that are named, and nothing left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("pyarrow", reason="sweeps keep their results in Parquet files, and pyarrow is not installed")

from netmoments.sweep.local import LocalEngine
from netmoments.sweep.run import run_sweep
from netmoments.sweep.store import Store
from tests.sweeps import Dying, Toy, alive, expected, files, same, until

ROOT = Path(__file__).parent.parent.parent
TWO = LocalEngine(["cpu", "cpu"])


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
    sweep = Toy(items=3000, delay=0.02, log=tmp_path / "log")
    code = (
        "import pathlib, signal, sys\n"
        "from netmoments.sweep import LocalEngine, run_sweep\n"
        "from tests.sweeps import Toy\n"
        "out = pathlib.Path(sys.argv[1])\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs ignore it
        "run_sweep(Toy(items=3000, delay=0.02, log=out / 'log'), out, LocalEngine(['cpu', 'cpu']))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, start_new_session=True) as parent:
        until(lambda: (tmp_path / "log").exists() and len(sweep.computed()) > 20)
        (os.killpg if ending == signal.SIGINT else os.kill)(parent.pid, ending)
        assert parent.wait(120) == -ending
        assert parent.stderr is not None
        said = parent.stderr.read().decode()
    until(lambda: not any(alive(process) for process in sweep.processes()))
    if ending == signal.SIGINT:
        assert said.count("Traceback") == 1
        assert files(tmp_path / "toy") == ["part-0000.parquet"]
    with Store.open(tmp_path, sweep) as kept:
        assert 15 < len(kept.finished) < 3000


@pytest.mark.parametrize("devices", [[], "cpu"])
def test_devices_are_a_list(devices):
    with pytest.raises(ValueError, match="list of devices"):
        LocalEngine(devices)
