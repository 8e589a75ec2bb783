"""The engine that computes items on a Ray cluster, an existing one or one that it starts on this machine."""

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
"""How often Ray repeats a task whose worker is lost."""
AHEAD = 2
"""Tasks that are submitted for each one that can run at once."""
PATIENCE = 10.0
"""Seconds that a cluster has to answer."""
_prepared: dict[str, Callable[[int], Columns]] = {}
"""In a worker: the function of the current run that computes items, by the name of the run."""


class RayEngine:
    """`RayEngine("cuda")` gives each task a GPU, `RayEngine("cpu", threads=4)` four cores.

    Without an address it starts a cluster on this machine and ends it afterwards, unless this process is connected to
    one already, which is then used and left running. Items of lost workers are computed again by others.
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
        shared = [ray.put(sweep)]  # inside a list Ray passes the reference on, and a worker fetches the sweep itself
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
        """What Ray reserves for each task."""
        return {"num_gpus": 1, "num_cpus": 0} if self.device_type == "cuda" else {"num_cpus": self._threads}

    def _slots(self, ray: ModuleType) -> int:
        """How many tasks the cluster can run at once."""
        resources = ray.cluster_resources()
        cores, gpus = resources.get("CPU", 0), resources.get("GPU", 0)
        slots = int(gpus) if self.device_type == "cuda" else int(cores) // self._threads
        if slots == 0:
            wanted = "a GPU" if self.device_type == "cuda" else f"{self._threads} cores"
            raise ValueError(
                f"a task needs {wanted}, and the Ray cluster has {cores:g} cores and {gpus:g} GPUs; "
                f"give another device, fewer threads or another cluster"
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
    """Require that something listens at `host:port`, since Ray itself would try for many minutes."""
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
    """Compute an item in a worker, which prepares the sweep at the first item of a run and forgets those of others."""

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
    """Set torch's number of threads, on which the rounding of sums, and so every bit of a result, depends."""
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
