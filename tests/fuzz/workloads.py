"""Every method on a small network, again and again: what threads, forked processes and long runs are tried with."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import netmoments as nm

METHODS: dict[str, Callable[[], nm.Method | str]] = {
    "two-stage": lambda: "two-stage",
    "linear": lambda: "linear",
    "layerwise": lambda: "layerwise",
    "sketch": lambda: nm.Sketch(probes=16, seed=1),
    "sampling": lambda: nm.Sampling(200, seed=1),
    "sampling with a control": lambda: nm.Sampling(200, seed=1, control=nm.Sketch(probes=16)),
}


def small_network() -> nn.Module:
    """A convolution, a pooling, two ReLUs, in float32; of images of any size from 4×4 on."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        features = [nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
        return nn.Sequential(*features, nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


def noise_of(height: int = 4, width: int = 4) -> nm.Gaussian:
    return nm.Gaussian(torch.linspace(-1, 1, height * width).reshape(1, height, width), std=0.2)


def answers(network: nn.Module | nm.NetworkModel, noise: nm.Gaussian) -> Iterator[Tensor]:
    """Mean and variance by every method, one after the other."""
    for method in METHODS.values():
        moments = nm.output_moments(network, noise, method())
        yield moments.mean
        yield moments.variance
    yield nm.flip_probability(network, noise, 0, absolute_error=0.05).probability


def resident_bytes() -> int:
    """Memory of this process that is in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def growth(work: Callable[[], object], calls: int, before: int = 20) -> int:
    """Bytes by which this process has grown after `calls` more calls, the first ones not counted."""
    for _ in range(before):
        work()
    start = resident_bytes()
    for _ in range(calls):
        work()
    return resident_bytes() - start


def over_methods(calls: int) -> None:
    """A line for each method: how much the process grew over so many calls."""
    network, noise = small_network(), noise_of()
    for name, method in METHODS.items():
        print(f"{growth(lambda method=method: nm.output_moments(network, noise, method()), calls)} {name}", flush=True)


def over_shapes(shapes: int) -> None:
    """The same over inputs of so many shapes of about one size, each new to the network."""
    network = small_network()
    every = iter(sorted(itertools.product(range(4, 24), repeat=2), key=lambda shape: -shape[0] * shape[1]))

    def next_shape() -> None:
        nm.output_moments(network, noise_of(*next(every)), "two-stage")

    print(f"{growth(next_shape, shapes, before=100)} shapes", flush=True)  # more than a model remembers


def until_the_end() -> None:
    """Threads that are at work when the interpreter shuts down."""
    network, noise = nm.NetworkModel(small_network(), noise_of().mean), noise_of()

    def forever() -> None:
        while True:
            for _ in answers(network, noise):
                pass

    for _ in range(2):
        threading.Thread(target=forever, daemon=True).start()
    time.sleep(1.5)
    print("ending", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, *count = sys.argv[1:]
    {"methods": over_methods, "shapes": over_shapes, "end": until_the_end}[what](*map(int, count))
