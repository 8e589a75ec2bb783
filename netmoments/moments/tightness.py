"""All methods beside a Monte Carlo run: how far off each is, and how long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from netmoments.gaussian import Gaussian
from netmoments.moments.methods import Auto, Layerwise, Linear, Method, Sampling, Sketch, TwoStage, method_named
from netmoments.moments.output_moments import output_moments
from netmoments.moments.request import Request, WhichOutputs
from netmoments.moments.result import OutputMoments
from netmoments.progress import progress_bar
from netmoments.sampling.monte_carlo import relative_difference

CALLER = "tightness"

Rival = Callable[[nn.Module, Gaussian, Tensor], tuple[Tensor, Tensor]]
"""Someone else's method: from a network, a flat batch of noise and indices (N, k) to means and variances (N, k)."""


@dataclass(frozen=True)
class TightnessRow:
    """One method: its errors 2|x−y|/(|x|+|y|) against the reference, averaged over scores and images, and its time."""

    method: str
    mean_error: float | None
    variance_error: float | None
    seconds: float | None
    note: str = ""
    """Why there are no numbers, where there are none."""


@dataclass(frozen=True)
class Tightness:
    """What `tightness` gives, and prints as a table: rows by name, and the reference they are against.

    >>> row = TightnessRow("linear", 0.02, 0.1, 0.001)
    >>> print(Tightness((row,), samples=1000, mean_floor=0.01, variance_floor=0.03))
    method                  mean error  variance error  seconds
    linear                  0.02        0.1             0.001
    floor of 1,000 samples  0.01        0.03
    """

    rows: tuple[TightnessRow, ...]
    samples: int
    mean_floor: float
    """The error that exact values would show: what the reference's own standard errors amount to."""
    variance_floor: float

    def __getitem__(self, method: str) -> TightnessRow:
        for row in self.rows:
            if row.method == method:
                return row
        raise KeyError(f"{method!r} is not among {', '.join(row.method for row in self.rows)}")

    def __str__(self) -> str:
        head = ("method", "mean error", "variance error", "seconds")
        lines = [head, *(_cells(row) for row in self.rows)]
        lines.append((f"floor of {self.samples:,} samples", f"{self.mean_floor:.2g}", f"{self.variance_floor:.2g}", ""))
        counted = [line for line in lines if line[2]]
        widths = [max(len(line[column]) for line in counted) for column in range(len(head))]
        padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
        return "\n".join("  ".join(line).rstrip() for line in padded)


def _cells(row: TightnessRow) -> tuple[str, ...]:
    if row.variance_error is None:
        return row.method, row.note, "", ""
    return row.method, f"{row.mean_error:.2g}", f"{row.variance_error:.2g}", f"{row.seconds:.2g}"


def our_methods(seed: int = 0) -> dict[str, Method]:
    """Every method of this library by name, with the options that a table shows."""
    controls = (Sketch(seed=seed), TwoStage(), Linear())
    return {
        "auto": Auto(seed=seed),
        "layerwise": Layerwise(),
        "sketch": Sketch(seed=seed),
        "two-stage": TwoStage(),
        "sampling, 10,000": Sampling(10_000, seed=seed),
        "sampling, 1,000": Sampling(1_000, seed=seed),
        **{f"sampling, 1,000, control {one.name}": Sampling(1_000, control=one, seed=seed) for one in controls},
        "linear (delta method)": Linear(),
    }


def tightness(
    network: Any,
    noise: Gaussian,
    outputs: WhichOutputs = None,
    *,
    methods: Mapping[str, Method | Rival | str] | Sequence[Method | str] | None = None,
    samples: int = 100_000,
    seed: int = 0,
    memory_budget: int | None = None,
) -> Tightness:
    """Methods against `samples` Monte Carlo samples of the same network and noise.

    Args:
        network, noise, outputs, memory_budget: as for `output_moments`; the noise may have a batch, over which errors
            are averaged and times added.
        methods: a list of methods, or methods by the name of their row; by default all of this library. A row may also
            be a function of your own, from the network, a flat batch of noise and indices (N, k) of scores to their
            means and variances.
        samples: of the reference. Its own error is the floor below which no method can be told from exact.
        seed: of all random numbers; the default methods use others than the reference.

    A method that does not fit or has no rule for an operation has a note in place of numbers. Print the result for a
    table.

    >>> network = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    >>> tightness(network, Gaussian(torch.ones(2), std=0.1), samples=1000)["layerwise"].note
    ''
    """
    request = Request.read(network, noise, outputs, memory_budget, CALLER)
    request.model.renewed()
    flat, indices = request.flat, request.indices()
    reference = output_moments(request.model, flat, Sampling(samples, seed=seed), indices)
    chosen = _named(methods, seed + 1)
    found: list[TightnessRow] = []
    with progress_bar("methods", len(chosen)) as show:
        for name, method in chosen.items():
            show(len(found))
            found.append(_row(name, method, request, indices, reference))
    assert reference.mean_standard_error is not None
    assert reference.variance_standard_error is not None
    return Tightness(
        tuple(found),
        samples,
        _floor(reference.mean, reference.mean_standard_error),
        _floor(reference.variance, reference.variance_standard_error),
    )


def _named(
    methods: Mapping[str, Method | Rival | str] | Sequence[Method | str] | None, seed: int
) -> dict[str, Method | Rival]:
    if methods is None:
        return {**our_methods(seed)}
    if isinstance(methods, Mapping):
        return {
            name: method_named(method, CALLER) if isinstance(method, str) else method
            for name, method in methods.items()
        }
    values = [method_named(method, CALLER) for method in ([methods] if isinstance(methods, str) else methods)]
    return {method.name if method == type(method)() else repr(method): method for method in values}


def _row(
    name: str, method: Method | Rival, request: Request, indices: Tensor, reference: OutputMoments
) -> TightnessRow:
    start = time.perf_counter()
    try:
        with torch.no_grad():
            if isinstance(method, Method):
                budget = request.model.memory_budget
                moments = output_moments(request.model, request.flat, method, indices, check=0, memory_budget=budget)
                mean, variance = moments.mean, moments.variance
            else:
                mean, variance = method(request.model.network, request.flat, indices)
            mean_error, variance_error = _error(mean, reference.mean), _error(variance, reference.variance)
    except (ValueError, MemoryError, torch.OutOfMemoryError) as error:
        return TightnessRow(name, None, None, None, str(error).split("; ")[0].removeprefix("output_moments: "))
    return TightnessRow(name, mean_error, variance_error, time.perf_counter() - start)


def _error(found: Tensor, reference: Tensor) -> float:
    return float(relative_difference(found.double(), reference.double()).mean())


def _floor(value: Tensor, standard_error: Tensor) -> float:
    """E|N(0, error)| relative to the value, averaged."""
    expected = (2 / torch.pi) ** 0.5 * standard_error
    return float(relative_difference(value + expected, value).mean())
