"""Reports of many images whose workers or own process are killed: nothing lost, nothing twice, the same results."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from netmoments.report.noise_sweep import PART, study_in_parts
from netmoments.sweep.local import LocalEngine
from netmoments.sweep.on_ray import RayEngine
from tests.report.test_noise_sweep import CONFIG, SUBJECT, assert_same, whole  # noqa: F401

ROOT = Path(__file__).parent.parent.parent
WAIT = 240.0


def first_item(folder: Path, seconds: float = WAIT) -> bool:
    """Whether a result lies in the folder, within so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if list(folder.glob("*/*.parquet")):
            return True
        time.sleep(0.02)
    return False


def workers(of: int) -> list[int]:
    """Processes below this one that compute: Ray's, or those of `multiprocessing`."""
    parents, names = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                names[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except (OSError, ValueError):
                continue
    below, found = {of}, []
    while more := {pid for pid, parent in parents.items() if parent in below} - below:
        below |= more
    for pid in sorted(below - {of}):
        name = names.get(pid, "")
        of_ray = name.startswith("ray::") and "IDLE" not in name and "Agent" not in name
        if of_ray or "spawn_main" in name:
            found.append(pid)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("engine", [LocalEngine(["cpu", "cpu"]), RayEngine("cpu")], ids=["local", "ray"])
def test_a_killed_worker_changes_nothing(whole, tmp_path, engine):  # noqa: F811
    pytest.importorskip("ray")
    killed: list[int] = []

    def kill_one() -> None:
        end = time.monotonic() + WAIT
        first_item(tmp_path)
        while not killed and time.monotonic() < end:
            for pid in workers(os.getpid())[:1]:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
            time.sleep(0.02)

    helper = threading.Thread(target=kill_one)
    helper.start()
    try:
        found = study_in_parts(SUBJECT, CONFIG, (), tmp_path, engine)
    finally:
        helper.join()
    assert killed
    assert_same(found, whole)


def report(out: Path, engine: str) -> list[str]:
    return [
        *(sys.executable, "-m", "netmoments", "report", "digits", "digits", "--images", str(PART + 10)),
        *("--sigma", "0.1", "--tolerance", "0.1", "--samples", "400", "--rare", "3"),
        *("--engine", engine, "--out", str(out)),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["local", "ray"])
def test_a_killed_report_goes_on_where_it_was(tmp_path, engine):
    """Killed with SIGKILL once, as soon as something is done; what was done is not computed again."""
    pytest.importorskip("ray")
    out = tmp_path / "report"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        report(out, engine), cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, start_new_session=True
    ) as child:
        assert first_item(out)
        os.killpg(child.pid, signal.SIGKILL)
    assert not (out / "index.html").exists()
    kept = {path: path.stat().st_mtime_ns for path in out.glob("survey/item-*.parquet")}
    again = subprocess.run(report(out, engine), cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert all(not path.exists() or path.stat().st_mtime_ns == when for path, when in kept.items())
    with next(out.glob("*.csv")).open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == PART + 10
