"""Threads, forked processes, the end of the interpreter, and memory over many calls."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import netmoments as nm
from netmoments.network.model import KEPT_SHAPES
from tests.fuzz.workloads import CALLS, answers, noise_of, small_network

ROOT = Path(__file__).parents[2]
THREADS = 8


def expected() -> list[Tensor]:
    """By a network that no other thread knows."""
    return list(answers(small_network(), noise_of()))


def assert_same(found: list[Tensor], exact: list[Tensor]) -> None:
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)  # float32, another order of sums


@pytest.mark.parametrize("how", ["cold", "warm", "a network"])
def test_threads_share_a_model(how):
    """Eight at once, on a model that was never used, on one that was, and on a network that nobody has looked at."""
    noise = noise_of()
    model: Any = small_network() if how == "a network" else nm.NetworkModel(small_network(), noise.mean)
    if how == "warm":
        list(answers(model, noise))
    together, found = threading.Barrier(THREADS), {}

    def work(number: int) -> None:
        together.wait()
        try:
            found[number] = list(answers(model, noise))
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    exact = expected()
    for one in found.values():
        if isinstance(one, BaseException):
            raise one
        assert_same(one, exact)


def _in_a_child(model: nm.NetworkModel, results: Any) -> None:
    torch.set_num_threads(1)
    results.put([x.double().reshape(-1).tolist() for x in answers(model, noise_of())])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_forked_processes():
    """After torch and the model were used in the parent, with one thread, as torch itself asks for before a fork."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = nm.NetworkModel(small_network(), noise_of().mean)
        exact = list(answers(model, noise_of()))
        context: Any = multiprocessing.get_context("fork")
        results = context.Queue()
        children = [context.Process(target=_in_a_child, args=(model, results)) for _ in range(3)]
        for child in children:
            child.start()
        for _ in children:
            for one, other in zip(results.get(timeout=120), exact, strict=True):
                torch.testing.assert_close(torch.tensor(one), other.double().reshape(-1).float(), rtol=1e-5, atol=1e-7)
        for child in children:
            child.join(60)
            assert child.exitcode == 0
        assert_same(list(answers(model, noise_of())), exact)
    finally:
        torch.set_num_threads(before)


def run_workload(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.fuzz.workloads", *arguments],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        timeout=3000,
    )


@pytest.mark.parametrize("workload", ["end", "end between steps"])
def test_the_interpreter_ends_in_the_middle_of_work(workload):
    """Daemon threads inside a computation: no abort, nothing on the error stream."""
    found = run_workload(workload)
    assert (found.returncode, found.stdout, found.stderr) == (0, "ending\n", "")


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer")
@pytest.mark.parametrize("times", [10, pytest.param(300, marks=pytest.mark.slow)])
def test_interrupts_at_any_moment(times):
    found = run_workload("interrupts", str(times))
    assert (found.returncode, found.stdout) == (0, f"{times} interrupts\n"), found.stderr


MIB = 2**20


def test_memory_is_flat_over_some_calls():
    found = run_workload("few calls", "6")
    assert found.returncode == 0, found.stderr
    for line in found.stdout.splitlines():
        assert int(line.split()[0]) < 2 * MIB, line


@pytest.mark.slow
@pytest.mark.parametrize("kind", CALLS)
def test_memory_is_flat_over_many_calls(kind):
    """Over 2,000, each kind in a process of its own: seconds to four minutes of a processor."""
    found = run_workload("calls", "2000", kind)
    assert found.returncode == 0, found.stderr
    assert int(found.stdout.split()[0]) < 4 * MIB, found.stdout


@pytest.mark.slow
def test_memory_is_flat_over_shapes():
    """Over 200, after more than a model remembers; without the store of convolutions that oneDNN has, up to a thousand.

    The allocator's own ups and downs are up to 6 MiB, however many shapes come.
    """
    assert KEPT_SHAPES < 200
    found = run_workload("shapes", "200", "200", ONEDNN_PRIMITIVE_CACHE_CAPACITY="1")
    assert found.returncode == 0, found.stderr
    assert int(found.stdout.split()[0]) < 8 * MIB, found.stdout
