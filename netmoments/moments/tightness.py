"""All methods beside a Monte Carlo run: how far off each is, how long it takes, how much memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from netmoments.checks import describe
from netmoments.gaussian import Gaussian
from netmoments.gaussian.covariance import Covariance
from netmoments.linearize.memory import gigabytes
from netmoments.moments.baselines import by_series, unscented
from netmoments.moments.front_door import Choice, output_moments
from netmoments.moments.peak import measured
from netmoments.moments.propagated import plan_of, require_fitting
from netmoments.moments.result import OutputMoments
from netmoments.network.inspection import as_network, inspect
from netmoments.progress import Progress
from netmoments.propagate.diagonal import diagonal
from netmoments.propagate.plan import Plan
from netmoments.sampling import relative_difference

CALLER = "tightness"
MOST_POINTS = 100_000
"""The unscented transform is left out where it would need more."""


@dataclass(frozen=True)
class TightnessRow:
    """One method: its errors 2|x−y|/(|x|+|y|) against the reference, averaged over scores and images, and its cost."""

    method: str
    mean_error: float | None
    variance_error: float | None
    seconds: float | None
    bytes: int | None
    note: str = ""
    """Why there are no numbers, where there are none."""


@dataclass(frozen=True)
class Tightness:
    """The table: rows, and the reference it is against."""

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
        head = ("method", "mean error", "variance error", "seconds", "memory")
        lines = [head, *(_cells(row) for row in self.rows)]
        floor = f"{self.mean_floor:.2g}", f"{self.variance_floor:.2g}"
        lines.append((f"floor of {self.samples:,} samples", *floor, "", ""))
        counted = [line for line in lines if line[2]]
        widths = [max(len(line[column]) for line in counted) for column in range(len(head))]
        padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
        return "\n".join("  ".join(line).rstrip() for line in padded)


def _cells(row: TightnessRow) -> tuple[str, ...]:
    if row.variance_error is None:
        return row.method, row.note, "", "", ""
    memory = "" if row.bytes is None else gigabytes(row.bytes)
    return row.method, f"{row.mean_error:.2g}", f"{row.variance_error:.2g}", f"{row.seconds:.2g}", memory


def tightness(
    network: Any,
    noise: Gaussian,
    outputs: Choice = None,
    *,
    samples: int = 100_000,
    probes: int = 64,
    seed: int = 0,
    memory_budget: int | None = None,
) -> Tightness:
    """Every method, and the field's baselines, against `samples` Monte Carlo samples of the same network and noise.

    Args:
        network, noise, outputs, memory_budget: as for `output_moments`; the noise may have a batch, over which errors
            are averaged and times added.
        samples: of the reference. Its own error is the floor below which no method can be told from exact.
        probes: of the sketch.
        seed: of all random numbers; methods that sample use others than the reference.

    Baselines: the delta method ("linear"), diagonal moment propagation ("ADF"), the unscented transform, and layer by
    layer with four terms of the covariance series. A method that does not fit or has no rule for an operation has a
    note in place of numbers. `method="auto"` is not a row: it is one of these. Print the result for a table.

    >>> network = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    >>> tightness(network, Gaussian(torch.ones(2), std=0.1), samples=1000)["layerwise"].note
    ''
    """
    if not isinstance(noise, Gaussian):
        raise TypeError(f"{CALLER}: noise must be a netmoments.Gaussian, got {describe(noise)}")
    network = as_network(network, CALLER)
    flat = noise.flattened()
    count = inspect(network, flat.mean, CALLER).output.shape[1]
    first = output_moments(network, flat, "sampling", outputs, samples=2, seed=seed)
    every = torch.arange(count, device=flat.device).expand(len(flat.mean), -1)
    rows = every if first.outputs is None else first.outputs
    reference = output_moments(network, flat, "sampling", rows, samples=samples, seed=seed)
    found = []
    methods = dict(_methods(network, flat, rows, probes, seed + 1, memory_budget))
    with Progress("methods", len(methods)) as progress:
        for name, method in methods.items():
            found.append(_row(name, method, reference, flat.device))
            progress.advance(1)
    assert reference.mean_standard_error is not None
    assert reference.variance_standard_error is not None
    return Tightness(
        tuple(found),
        samples,
        _floor(reference.mean, reference.mean_standard_error),
        _floor(reference.variance, reference.variance_standard_error),
    )


Answer = tuple[Tensor, Tensor]
"""Means and variances, (N, k)."""
OneImage = Callable[[Tensor, Covariance, Tensor], tuple[Tensor, Tensor]]
"""From a mean (1, ...), a covariance and the wanted scores (k,) to their means and covariance (or variances)."""


def _methods(
    network: nn.Module, noise: Gaussian, rows: Tensor, probes: int, seed: int, memory_budget: int | None
) -> Iterator[tuple[str, Callable[[], Answer]]]:
    """Every method by name, as something to call."""

    def ours(method: str, **options: Any) -> Callable[[], Answer]:
        def answer() -> Answer:
            moments = output_moments(
                network, noise, method, rows, probes=probes, seed=seed, memory_budget=memory_budget, **options
            )
            return moments.mean, moments.variance

        return answer

    def theirs(prepare: Callable[[], OneImage]) -> Callable[[], Answer]:
        def answer() -> Answer:
            method = prepare()
            each = [
                method(noise.mean[place : place + 1], noise.covariance.entries(place), row)
                for place, row in enumerate(rows)
            ]
            means, spreads = (torch.stack(part) for part in zip(*each, strict=True))
            return means, spreads if spreads.dim() == 2 else spreads.diagonal(dim1=-2, dim2=-1)

        return answer

    yield "layerwise", ours("layerwise")
    yield "sketch", ours("sketch")
    yield "two-stage", ours("two-stage")
    yield "sampling, 10,000", ours("sampling", samples=10_000)
    yield "sampling, 1,000", ours("sampling", samples=1_000)
    for control in ("sketch", "two-stage", "linear"):
        yield f"sampling, 1,000, control {control}", ours("sampling", samples=1_000, control=control)
    yield "linear (delta method)", ours("linear")
    yield "ADF (diagonal)", theirs(lambda: partial(diagonal, plan_of(network, noise.mean, CALLER)))
    yield "unscented", theirs(lambda: partial(_unscented, network))
    yield "series, 4 terms", theirs(lambda: partial(by_series, _fitting_plan(network, noise, memory_budget)))


def _unscented(network: nn.Module, mean: Tensor, covariance: Covariance, row: Tensor) -> tuple[Tensor, Tensor]:
    if 2 * covariance.rank > MOST_POINTS:
        raise ValueError(f"{2 * covariance.rank:,} points")
    return unscented(network, mean, covariance, row)


def _fitting_plan(network: nn.Module, noise: Gaussian, memory_budget: int | None) -> Plan:
    """The plan, if carrying whole covariances through it fits."""
    plan = plan_of(network, noise.mean, CALLER)
    require_fitting(plan, noise, memory_budget, CALLER)
    return plan


def _row(name: str, method: Callable[[], Answer], reference: OutputMoments, device: torch.device) -> TightnessRow:
    try:
        with torch.no_grad():
            (mean, variance), cost = measured(method, device)
    except (ValueError, torch.OutOfMemoryError) as error:
        return TightnessRow(name, None, None, None, None, str(error).split("; ")[0].removeprefix("output_moments: "))
    return TightnessRow(name, _error(mean, reference.mean), _error(variance, reference.variance), *cost)


def _error(found: Tensor, reference: Tensor) -> float:
    return float(relative_difference(found.double(), reference.double()).mean())


def _floor(value: Tensor, standard_error: Tensor) -> float:
    """E|N(0, error)| relative to the value, averaged."""
    expected = (2 / torch.pi) ** 0.5 * standard_error
    return float(relative_difference(value + expected, value).mean())
