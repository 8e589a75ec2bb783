"""Every method on a small network, again and again: what threads, forked processes and long runs are tried with."""

from __future__ import annotations

import copy
import itertools
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random

import torch
from torch import Tensor, nn

import netmoments as nm
from netmoments.precision import full_precision

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


CALLS: dict[str, Callable[[nn.Module, nm.Gaussian], object]] = {
    **{name: partial(nm.output_moments, method=method()) for name, method in METHODS.items()},
    "auto": partial(nm.output_moments, samples=300),
    "flips": partial(nm.flip_probability, absolute_error=0.1, runs=400),
    "class probabilities": partial(nm.class_probabilities, absolute_error=0.3, runs=100),
    "plain sampling": partial(nm.monte_carlo, samples=50),
    "expected scores": lambda network, noise: nm.attacks.ExpectedLogits(network, 0.2)(noise.mean.unsqueeze(0)),
    "a new network": lambda _, noise: nm.output_moments(small_network(), noise, "layerwise", check=20),
    "a refusal": lambda network, noise: _refused(network, nm.Gaussian(noise.mean[..., :-1], std=0.2)),
}
"""What a long-running service may call again and again, with a network and noise."""


def _refused(network: nn.Module, noise: nm.Gaussian) -> None:
    """Errors hold on to what they were raised in as long as someone holds them."""
    try:
        nm.output_moments(network, noise, nm.TwoStage("no such ReLU"))
    except ValueError:
        return
    raise AssertionError("not refused")


def resident_bytes() -> int:
    """Memory of this process that is in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def growth(work: Callable[[], object], calls: int, before: int) -> int:
    """Bytes by which this process has grown after `calls` more calls, those `before` not counted."""
    for _ in range(before):
        work()
    start = resident_bytes()
    for _ in range(calls):
        work()
    return resident_bytes() - start


def over_calls(calls: str, *names: str) -> None:
    """A line for each kind of call, of all or those named: how much the process grew over so many of them."""
    network, noise, many = small_network(), noise_of(), int(calls)
    for name in names or CALLS:
        print(f"{growth(partial(CALLS[name], network, noise), many, min(500, many))} {name}", flush=True)


def over_few_calls(calls: str) -> None:
    """The same, the least growth of four rounds: what is lost is lost in each, the allocator takes a page in some."""
    network, noise, many = small_network(), noise_of(), int(calls)
    for name, call in CALLS.items():
        work = partial(call, network, noise)
        print(f"{min(growth(work, many, before) for before in (many, 0, 0, 0))} {name}", flush=True)


def over_shapes(shapes: str, before: str) -> None:
    """The same over inputs of so many shapes of about one size, each new to the network, after some others."""
    network = small_network()
    every = iter(sorted(itertools.product(range(4, 24), repeat=2), key=lambda shape: -shape[0] * shape[1]))

    def next_shape() -> None:
        nm.output_moments(network, noise_of(*next(every)), "two-stage")

    print(f"{growth(next_shape, int(shapes), int(before))} shapes", flush=True)


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


def until_the_end_between_two_steps() -> None:
    """Threads that are in torch, but nowhere inside the library, most of the time."""
    matrix = torch.ones(1000, 1000)

    def forever() -> None:
        while True:
            with full_precision():
                pass
            torch.mm(matrix, matrix)

    for _ in range(2):
        threading.Thread(target=forever, daemon=True).start()
    time.sleep(0.3)
    print("ending", flush=True)


def settings() -> tuple[object, ...]:
    """Of torch, that the library changes while it works."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch._C._get_mkldnn_enabled(),
        torch.backends.cudnn.enabled,
        torch.backends.cuda.matmul.fp32_precision,
        torch.get_num_threads(),
        torch.get_rng_state().tolist(),
    )


def interrupted(count: str) -> None:
    """Ctrl-C at random moments: the network and torch's settings are as they were, and the next answers are right."""
    noise, random, times = noise_of(), Random(0), int(count)
    exact, before = list(answers(small_network(), noise)), settings()
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    for _ in range(times):
        network = small_network()
        weights = copy.deepcopy(network.state_dict())
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.001, 0.2))
        try:
            while True:
                list(answers(network, noise))
        except KeyboardInterrupt:
            pass
        assert settings() == before
        assert not network.training
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in network.modules())
        torch.testing.assert_close(network.state_dict(), weights, rtol=0, atol=0)
    for one, other in zip(answers(network, noise), exact, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    print(f"{times} interrupts", flush=True)


WORK: dict[str, Callable[..., None]] = {
    "calls": over_calls,
    "few calls": over_few_calls,
    "shapes": over_shapes,
    "end": until_the_end,
    "end between steps": until_the_end_between_two_steps,
    "interrupts": interrupted,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    what, *arguments = sys.argv[1:]
    WORK[what](*arguments)
