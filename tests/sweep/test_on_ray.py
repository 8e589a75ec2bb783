"""Sweeps on Ray: the same bits, failures that are named, and clusters left as they were."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip("pyarrow", reason="sweeps keep their results in Parquet files, and pyarrow is not installed")

from netmoments.sweep.local import LocalEngine
from netmoments.sweep.on_ray import RayEngine
from netmoments.sweep.run import run_sweep
from netmoments.sweep.store import Store
from tests.sweeps import Dying, Failing, Toy, alive, expected, same, until

ROOT = Path(__file__).parent.parent.parent
HERE = LocalEngine(["cpu"])


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


def in_another_process(out: Path, address: str | None) -> None:
    """Run a sweep in a process that is connected to no Ray, neither before nor afterwards."""
    code = (
        "import sys, pathlib, ray\n"
        "from netmoments.sweep import RayEngine, run_sweep\n"
        "from tests.sweeps import Toy\n"
        "run_sweep(Toy(), pathlib.Path(sys.argv[1]), RayEngine('cpu', sys.argv[2] or None))\n"
        "assert not ray.is_initialized()\n"
    )
    command = [sys.executable, "-W", "error", "-c", code, str(out), address or ""]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    with Store.open(out, Toy()) as kept:
        assert same(kept.columns(), expected(Toy()))


@pytest.mark.slow
def test_ray_at_an_address(tmp_path, two_workers):
    """The cluster at the address is left running."""
    in_another_process(tmp_path, two_workers.get_runtime_context().gcs_address)
    assert two_workers.cluster_resources()["CPU"] == 2


@pytest.mark.slow
def test_a_ray_of_its_own(tmp_path):
    pytest.importorskip("ray", reason="ray is not installed")
    in_another_process(tmp_path, None)


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
        until(lambda: len(sweep.computed()) == 3 + 4)
        time.sleep(0.1)
        assert len(sweep.computed()) == 3 + 4


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
