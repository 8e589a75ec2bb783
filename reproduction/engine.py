"""Show the engine at work: the exact moments of a random (Affine, ReLU, Affine) network beside sampled ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from rich import box
from rich.table import Table
from torch import Tensor

from netmoments.affine_relu_affine import AffineReluAffine
from netmoments.gaussian import Gaussian
from netmoments.sampling.monte_carlo import SampledMoments, monte_carlo

Result = TypeVar("Result")


@dataclass(frozen=True)
class EngineConfig:
    inputs: int = 64
    units: int = 256
    outputs: int = 5
    std: float = 0.5
    samples: int = 10_000
    seed: int = 0


@dataclass(frozen=True, eq=False)
class EngineRun:
    config: EngineConfig
    mean: Tensor
    variance: Tensor
    sampled: SampledMoments
    exact_seconds: float
    sampling_seconds: float


def random_network(
    inputs: int, units: int, outputs: int, seed: int, dtype: torch.dtype = torch.float64
) -> AffineReluAffine:
    """Independent normal weights, scaled so that pre-activations and outputs have variance about 1."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, generator=generator)

    return AffineReluAffine(
        normal(units, inputs) / inputs**0.5, normal(units), normal(outputs, units) / units**0.5, normal(outputs)
    )


def run(config: EngineConfig) -> EngineRun:
    """Exact mean and variance, then the same by sampling; each timed as the fastest of three."""
    network = random_network(config.inputs, config.units, config.outputs, config.seed)
    generator = torch.Generator().manual_seed(config.seed + 1)
    noise = Gaussian(torch.randn(config.inputs, dtype=torch.float64, generator=generator), std=config.std)
    exact_seconds, (mean, variance) = _fastest(lambda: (network.mean(noise), network.variance(noise)))
    sampling_seconds, sampled = _fastest(lambda: monte_carlo(network, noise, config.samples, seed=config.seed))
    return EngineRun(config, mean, variance, sampled, exact_seconds, sampling_seconds)


def draw(result: EngineRun) -> Table:
    """Both side by side as a table for the terminal; differences in units of the sampling's standard error."""
    config, sampled = result.config, result.sampled
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title=f"A random network of {config.inputs} inputs, {config.units} ReLUs and {config.outputs} outputs "
        f"under noise of std {config.std}",
        caption=f"off: difference in standard errors (s.e.) of the sampling.  Time: exact "
        f"{1e3 * result.exact_seconds:.1f} ms, {config.samples:,} samples {1e3 * result.sampling_seconds:.1f} ms, "
        f"{result.sampling_seconds / result.exact_seconds:.1f} times as long "
        f"({torch.get_num_threads()} CPU threads, float64)",
    )
    for heading in ("", "exact mean", "sampled ± s.e.", "off", "exact std", "sampled ± s.e.", "off"):
        table.add_column(heading, justify="right")
    sampled_std = sampled.variance.sqrt()
    std_error = sampled.variance_standard_error / (2 * sampled_std)
    for i in range(config.outputs):
        mean, std = float(result.mean[i]), float(result.variance[i]) ** 0.5
        table.add_row(
            str(i),
            f"{mean:+.5f}",
            f"{sampled.mean[i]:+.4f} ± {sampled.mean_standard_error[i]:.4f}",
            f"{(sampled.mean[i] - mean) / sampled.mean_standard_error[i]:+.1f}",
            f"{std:.5f}",
            f"{sampled_std[i]:.4f} ± {std_error[i]:.4f}",
            f"{(sampled_std[i] - std) / std_error[i]:+.1f}",
        )
    return table


def _fastest(work: Callable[[], Result]) -> tuple[float, Result]:
    best, result = float("inf"), work()
    for _ in range(3):
        start = time.perf_counter()
        result = work()
        best = min(best, time.perf_counter() - start)
    return best, result
