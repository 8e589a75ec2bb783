"""Items computed on a Ray cluster, or on one that is started on this machine for the purpose."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import islice
from types import ModuleType
from typing import Any
from uuid import uuid4

from netmoments.sweep.item import Columns, Failure, Finished, Sweep, attempt, compute_item, unwrap

RETRIES = 5
AHEAD = 2  # tasks in flight for each one that can run
PATIENCE = 10.0  # seconds for a cluster to answer
_prepared: dict[str, Callable[[int], Columns]] = {}


class RayEngine:
    """`RayEngine("cuda")` gives each task a GPU, `RayEngine("cpu", threads=4)` that many cores.

    Without an address it starts a Ray of its own and ends it afterwards; one that this process is connected to already
    is used and left running. Items of lost workers are computed again by others.
    """

    def __init__(self, device: str, address: str | None = None, threads: int = 1) -> None:
        if device.startswith("cuda:"):
            raise ValueError(f'Ray chooses the GPU of each task: give "cuda", not {device!r}')
        if threads < 1:
            raise ValueError(f"a task needs at least one thread: {threads}")
        self.device_type = device
        self._address = address
        self._threads = threads

    def results(self, sweep: Sweep, items: Sequence[int]) -> Generator[Finished, None, None]:
        ray = _ray()
        with self._connected(ray):
            yield from self._results(ray, sweep, items)

    def _results(self, ray: ModuleType, sweep: Sweep, items: Sequence[int]) -> Generator[Finished, None, None]:
        task = ray.remote(_compute).options(max_retries=RETRIES, **self._resources())
        shared = [ray.put(sweep)]  # in a list Ray hands on the reference, and a worker fetches the sweep once
        start = partial(task.remote, uuid4().hex, shared, self.device_type, self._threads)
        waiting = iter(items)
        running: dict[Any, int] = {start(item): item for item in islice(waiting, AHEAD * self._slots(ray))}
        try:
            while running:
                (ready,), _ = ray.wait(list(running), num_returns=1)
                item = running.pop(ready)
                running.update((start(following), following) for following in islice(waiting, 1))
                yield unwrap(_answer(ray, ready, f"item {item} of {sweep.name}"))
        finally:
            for unfinished in running:
                ray.cancel(unfinished, force=True)

    def _resources(self) -> dict[str, int]:
        return {"num_gpus": 1, "num_cpus": 0} if self.device_type == "cuda" else {"num_cpus": self._threads}

    def _slots(self, ray: ModuleType) -> int:
        """How many tasks the cluster can run at once."""
        there = ray.cluster_resources()
        slots = int(there.get("GPU", 0)) if self.device_type == "cuda" else int(there.get("CPU", 0)) // self._threads
        if slots == 0:
            wanted = "a GPU" if self.device_type == "cuda" else f"{self._threads} cores"
            raise ValueError(
                f"a task needs {wanted}, and the Ray cluster has {there.get('CPU', 0):g} cores and "
                f"{there.get('GPU', 0):g} GPUs; give another device, fewer threads or another cluster"
            )
        return slots

    @contextmanager
    def _connected(self, ray: ModuleType) -> Iterator[None]:
        if ray.is_initialized():
            yield
            return
        try:
            _reach(self._address or "local")
            ray.init(
                address=self._address or "local", include_dashboard=False, log_to_driver=False, logging_level="error"
            )
        except Exception as error:  # Ray raises several kinds, some of them RuntimeError
            where = f"no Ray at {self._address}" if self._address else "Ray did not start on this machine"
            raise ConnectionError(f"{where}: {error}; `ray start --head` starts one") from error
        try:
            yield
        finally:
            ray.shutdown()


def _reach(address: str) -> None:
    """That somebody listens at `host:port`; Ray itself tries for many minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), PATIENCE).close()


def _answer(ray: ModuleType, task: Any, work: str) -> Finished | Failure:
    try:
        return ray.get(task)
    except ray.exceptions.RayError as error:
        raise ChildProcessError(
            f"{work} was lost with its worker, {RETRIES} retries included ({error}); "
            "finished items are kept, run the same command again to go on"
        ) from error


def _compute(run: str, shared: list[Any], device: str, threads: int, item: int) -> Finished | Failure:
    """In a worker: the sweep is prepared at the first item of a run, and forgotten at the first of another."""

    def work() -> Finished:
        import ray

        sweep: Sweep = ray.get(shared[0])
        if run not in _prepared:
            _prepared.clear()
            _use_threads(threads)
            _prepared[run] = sweep.prepare(device)
        return compute_item(sweep, _prepared[run], item)

    return attempt(work)


def _use_threads(threads: int) -> None:
    """Sums of several threads are rounded in another order: the number is part of what gives the same bits."""
    if find_spec("torch"):
        import torch

        torch.set_num_threads(threads)


def _ray() -> ModuleType:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise ImportError('Ray is not installed: pip install "netmoments[sweeps]"') from error
    return ray
