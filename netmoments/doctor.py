"""What `netmoments doctor` says: what is installed, which devices there are, and how fast they are."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from netmoments import __version__


def installed_in_words(extras: Mapping[str, tuple[Sequence[str], str]]) -> list[str]:
    """A line with versions, and a line for each extra with its packages and how to install the missing ones."""
    lines = [
        f"netmoments {__version__}, torch {torch.__version__}, numpy {_version('numpy')}, "
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    ]
    for extra, (packages, purpose) in extras.items():
        versions = {package: _version(package) for package in packages}
        missing = [package for package, version in versions.items() if version is None]
        has = ", ".join(f"{package} {version}" for package, version in versions.items() if version is not None)
        lacks = f'missing: {", ".join(missing)} (pip install "netmoments[{extra}]")' if missing else ""
        lines.append(f"{extra}, for {purpose}: {'; '.join(part for part in (has, lacks) if part)}")
    return lines


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine_in_words() -> list[str]:
    """Lines on cores, threads and GPUs, on other load, and on what is missing for speed."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    lines = [f"CPU: {_many(cores, 'core')}, torch uses {_many(torch.get_num_threads(), 'thread')}"]
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > cores:
        lines.append(f"busy: {load:.1f} processes want these cores, so everything waits; the times below include that")
    if not torch.cuda.is_available():
        why = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds none"
        return [*lines, f"GPU: none ({why}), so commands run on the CPU"]
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        lines.append(f"GPU: cuda:{index} {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB; commands use it")
    triton = _version("triton")
    kernels = f"Triton {triton}" if triton else "Triton is missing: exact ReLU covariances run without fused kernels"
    return [*lines, kernels]


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' if count != 1 else ''}"


def speed_in_words() -> list[str]:
    """Lines on what is timed here: a large product and a small convolution, on all threads and one; channels last."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    square = torch.ones(1024, 1024, device=device)
    images, layer = torch.ones(64, 16, 16, 16, device=device), torch.nn.Conv2d(16, 32, 3, padding=1).to(device)
    last = images.contiguous(memory_format=torch.channels_last)
    work = {
        "product of 1,024 × 1,024 matrices": lambda: square @ square,
        "convolution of 64 small images": lambda: layer(images),
    }
    threads, lines = torch.get_num_threads(), []
    with torch.no_grad():
        for name, run in work.items():
            on_all = _seconds(run, device)
            line = f"{name}: {1e3 * on_all:.2g} ms"
            if device.type == "cpu" and threads > 1:
                with _one_thread():
                    line += _threads_in_words(on_all, _seconds(run, device), threads)
            lines.append(line)
        first, second = _seconds(lambda: layer(images), device), _seconds(lambda: layer(last), device)
    ratio = first / max(second, 1e-9)
    how = f"{ratio:.1f} times faster" if ratio > 1.1 else f"{1 / ratio:.1f} times slower" if ratio < 0.9 else "as fast"
    return [*lines, f"channels last: the same convolution is {how}; the library tries both and takes the faster"]


def _threads_in_words(on_all: float, on_one: float, threads: int) -> str:
    """The seconds on one thread beside those on all, with advice where one is faster.

    >>> _threads_in_words(0.084, 0.0017, 2)
    ' with 2 threads, 1.7 ms with one: threads cost more than they save here; OMP_NUM_THREADS=1 is faster'
    """
    both = f" with {threads} threads, {1e3 * on_one:.2g} ms with one"
    return f"{both}: threads cost more than they save here; OMP_NUM_THREADS=1 is faster" if on_all > on_one else both


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _seconds(run: Callable[[], object], device: torch.device, times: int = 7) -> float:
    """The median time of a few runs, after one to warm up."""
    taken = []
    for _ in range(times + 1):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return sorted(taken[1:])[times // 2]
