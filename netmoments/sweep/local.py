"""The engine that computes items on this machine: in this process, or in one process for each device."""

from __future__ import annotations

import signal
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from netmoments.progress import silence
from netmoments.sweep.item import Columns, Failure, Finished, Sweep, attempt, compute_item, unwrap

TRIES = 3
"""How often an item is begun whose process dies."""


class LocalEngine:
    """With one device, items are computed one after the other in this process; with several, in a process for each.

    An item whose process dies is given to a fresh one, up to three times in all. Each process has a pipe of its own, so
    that one that is killed cannot leave a lock behind that the others wait for.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        if isinstance(devices, str) or not devices:
            raise ValueError(
                f'LocalEngine needs a list of devices, such as ["cpu"] or ["cuda:0", "cuda:1"]: {devices!r}'
            )
        types = sorted({device.partition(":")[0] for device in devices})
        if len(types) > 1:
            raise ValueError(f"LocalEngine: devices of one type are needed, got {' and '.join(types)}")
        self.device_type = types[0]
        self._devices = tuple(devices)

    def results(self, sweep: Sweep, items: Sequence[int]) -> Generator[Finished, None, None]:
        if len(self._devices) == 1:
            return _here(sweep, items, self._devices[0])
        return _in_processes(sweep, items, self._devices)


def _here(sweep: Sweep, items: Sequence[int], device: str) -> Generator[Finished, None, None]:
    compute = sweep.prepare(device)
    for item in items:
        yield compute_item(sweep, compute, item)


def _in_processes(sweep: Sweep, items: Sequence[int], devices: Sequence[str]) -> Generator[Finished, None, None]:
    waiting = deque(items)
    losses: Counter[int] = Counter()
    workers: dict[Connection, _Worker] = {}

    def start(device: str, item: int) -> None:
        worker = _Worker(sweep, device)
        workers[worker.connection] = worker
        worker.give(item)

    try:
        for device in devices[: len(items)]:
            start(device, waiting.popleft())
        while busy := [connection for connection, worker in workers.items() if worker.item is not None]:
            for connection in wait(busy):
                assert isinstance(connection, Connection)
                worker = workers[connection]
                answer, item = worker.answer(), worker.item
                assert item is not None
                if answer is None:
                    losses[item] += 1
                    code = workers.pop(connection).stop(patience=5.0)
                    if losses[item] == TRIES:
                        raise ChildProcessError(_lost_message(sweep, item, worker.device, code))
                    start(worker.device, item)
                    continue
                worker.give(waiting.popleft() if waiting else None)
                yield unwrap(answer)
    finally:
        for worker in workers.values():
            worker.stop()


def _lost_message(sweep: Sweep, item: int, device: str, code: int | None) -> str:
    how = f"killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with exit code {code}"
    return (
        f"item {item} of {sweep.name}: its process on {device} was lost {TRIES} times, the last time {how} "
        "(for want of memory?); finished items are kept, run the same command again to go on"
    )


class _Worker:
    """A process that computes items on one device, one at a time; `item` is the one it is at work on."""

    def __init__(self, sweep: Sweep, device: str) -> None:
        context = get_context("spawn")
        self.device = device
        self.item: int | None = None
        self.connection, its_connection = context.Pipe()
        self._process: SpawnProcess = context.Process(target=_serve, args=(its_connection, sweep, device), daemon=True)
        self._process.start()
        its_connection.close()  # only the worker holds that end now, so that our end notices when it dies

    def give(self, item: int | None) -> None:
        """Have the process compute this item; None leaves it idle."""
        self.item = item
        if item is not None:
            with suppress(OSError):  # the process has died, which `answer` will notice
                self.connection.send(item)

    def answer(self) -> Finished | Failure | None:
        """Wait for the item's result; None if the process has died."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            return None

    def stop(self, patience: float = 0.0) -> int | None:
        """End the process, after so many seconds at most in which it may end by itself, and return its exit code."""
        self.connection.close()
        self._process.join(patience)
        self._process.kill()
        self._process.join()
        return self._process.exitcode


def _serve(connection: Connection, sweep: Sweep, device: str) -> None:
    """Answer items with their results until the pipe is closed. Ctrl-C is left to the parent process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    prepared: list[Callable[[int], Columns]] = []

    def work(item: int) -> Finished:
        if not prepared:
            prepared.append(sweep.prepare(device))
        return compute_item(sweep, prepared[0], item)

    with silence(), suppress(EOFError, OSError):
        while True:
            connection.send(attempt(partial(work, connection.recv())))
