"""Measure the engine as ratios, each with its reference in the same process: `make bench`."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

import netmoments as nm
from benchmarks.measure import machine, seconds
from benchmarks.memory import METHODS, in_a_process_of_its_own
from benchmarks.problems import random_layer, random_network, random_problem

SIZES = (64, 256, 1024, 4096)
INPUTS = 784
REFERENCE = Path(__file__).parents[1] / "tests" / "reference" / "relu_covariance.csv"


def exponential_seconds(size: int) -> float:
    """Seconds of one torch.exp over a size×size matrix, into memory that is already allocated."""
    x, out = torch.randn(size, size), torch.empty(size, size)
    return seconds(lambda: torch.exp(x, out=out), repeats=50)


def covariance_seconds(units: int, rank: int) -> tuple[float, float]:
    """Seconds of `relu_covariance` alone, and with its backward pass."""
    mean, covariance = random_layer(units, rank)
    forward = seconds(lambda: nm.relu_covariance(mean, covariance), repeats=25)
    upstream = torch.randn(units, units)
    mean, covariance = mean.requires_grad_(), covariance.requires_grad_()
    both = seconds(
        lambda: torch.autograd.grad(nm.relu_covariance(mean, covariance), (mean, covariance), upstream), repeats=25
    )
    return forward, both


def growth(console: Console) -> None:
    """Time and memory as the layer grows, in float32: the exact kernel, the paper's series with 5 terms, and 10⁴
    samples.
    """
    table = Table(title="float32, every unit active, 784 inputs, 10 outputs, isotropic noise", box=box.SIMPLE_HEAD)
    for heading in ("p", "exp of p×p", "covariance", "with backward", "variance", "series", "10⁴ samples"):
        table.add_column(heading, justify="right")
    for heading in ("exact MiB", "series MiB", "samples MiB"):
        table.add_column(heading, justify="right")
    for units in SIZES:
        exponential = exponential_seconds(units)
        forward, both = covariance_seconds(units, INPUTS)
        network, noise = random_problem(units, INPUTS, 1, torch.float32)
        variance, series, sampling = (seconds(partial(method, network, noise)) for method in METHODS.values())
        memory = [in_a_process_of_its_own(method, units, INPUTS, 1, "float32") for method in METHODS]
        table.add_row(
            str(units),
            f"{1e3 * exponential:.2f} ms",
            f"{forward / exponential:.0f} exp",
            f"{both / forward:.1f} × forward",
            f"{1e3 * variance:.1f} ms",
            f"{series / variance:.1f} ×",
            f"{sampling / variance:.1f} ×",
            *(f"{x:.0f}" for x in memory),
        )
    console.print(table)


def numbers(console: Console) -> None:
    """Values that the engine must reach, beside those that it reaches here."""
    table = Table(title="what must hold", box=box.SIMPLE_HEAD)
    for heading, justify in (("what", "left"), ("must reach", "right"), ("measured", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for row in (*accuracy(), *series_agreement(), *small_noise(), *memory(), *time()):
        table.add_row(*row)
    console.print(table)


Row = tuple[str, str, str]


def accuracy() -> list[Row]:
    """Accuracy against the 25-digit values that the tests use."""
    with REFERENCE.open() as file:
        rows = list(csv.DictReader(file))
    h, k, rho = (
        torch.tensor([float.fromhex(row[name]) for row in rows], dtype=torch.float64)
        for name in ("h_hex", "k_hex", "rho_hex")
    )
    exact, orthant = (
        torch.tensor([float(row[name]) for row in rows], dtype=torch.float64)
        for name in ("covariance", "orthant_probability")
    )
    mean, matrix = torch.stack([h, k], -1), correlated_pairs(rho)
    double = (nm.relu_covariance(mean, matrix)[:, 0, 1] - exact).abs().max()
    single = (nm.relu_covariance(mean.float(), matrix.float())[:, 0, 1] - exact).abs().max()
    probability = (nm.orthant_probability(mean, matrix)[:, 0, 1] - orthant).abs().max()
    return [
        (f"covariance, float64, {len(rows)} reference points", "1e-14", f"{double:.1e}"),
        ("orthant probability, float64", "1e-13", f"{probability:.1e}"),
        ("covariance, float32", "5e-7", f"{single:.1e}"),
    ]


def correlated_pairs(rho: Tensor) -> Tensor:
    """The matrices ((1, ρ), (ρ, 1)), (..., 2, 2)."""
    one = torch.eye(2, dtype=rho.dtype)
    return one + rho[..., None, None] * (1 - one)


def cross_moment(mu1: Tensor, mu2: Tensor, sigma1: Tensor, sigma2: Tensor, rho: Tensor) -> Tensor:
    """E[max(x₁, 0) max(x₂, 0)] by the exact kernel, for tensors of one shape."""
    covariance = nm.relu_covariance(torch.stack([mu1 / sigma1, mu2 / sigma2], -1), correlated_pairs(rho))[..., 0, 1]
    return sigma1 * sigma2 * covariance + nm.relu_mean(mu1, sigma1) * nm.relu_mean(mu2, sigma2)


def series_agreement() -> list[Row]:
    """Compare the paper's series with many terms, where it converges, with the exact kernel."""
    generator = torch.Generator().manual_seed(0)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(20_000, dtype=torch.float64, generator=generator)

    worst = 0.0
    for low, high in ((-0.6, 0.6), (0.8, 1.0), (-1.0, -0.8)):
        pairs = (uniform(-2, 2), uniform(-2, 2), uniform(0.2, 2), uniform(0.2, 2), uniform(low, high))
        difference = nm.paper.relu_cross_moment_series(*pairs, terms=50) - cross_moment(*pairs)
        worst = max(worst, float(difference.abs().max()))
    return [("Lemma 4, 50 terms, |ρ| ≤ 0.6 or ≥ 0.8, against the kernel", "1e-9", f"{worst:.1e}")]


def small_noise() -> list[Row]:
    network = random_network(100, 1024, 10, seed=8, dtype=torch.float32)
    noise = nm.Gaussian(torch.randn(100, generator=torch.Generator().manual_seed(1)), std=0.01)
    exact = network.to(torch.float64).variance(noise.to(torch.float64))
    ours = (network.variance(noise) / exact - 1).abs().max()
    series = (nm.paper.variance_series(network, noise, terms=5) / exact - 1).abs().max()
    return [
        ("variance at noise 0.01, p = 1024, float32, relative", "1e-5", f"{ours:.1e}"),
        ("    the same by the series, 5 terms, float32", "", f"{series:.1e}"),
    ]


def memory() -> list[Row]:
    batch = in_a_process_of_its_own("exact", 2000, INPUTS, 8, "float64")
    large = in_a_process_of_its_own("exact", 20_000, INPUTS, 1, "float64")
    return [
        ("extra memory, variance, p = 2000, batch 8, float64", "200 MiB", f"{batch:.0f} MiB"),
        ("extra memory, variance, p = 20,000, n = 784, float64", "1024 MiB", f"{large:.0f} MiB"),
    ]


def time() -> list[Row]:
    rows: list[Row] = []
    exponential = exponential_seconds(1024)
    for name, rank in (("weakly correlated (n = 784)", INPUTS), ("strongly correlated (n = 8)", 8)):
        forward, both = covariance_seconds(1024, rank)
        rows += [
            (f"covariance, p = 1024, float32, {name}", "40 × exp of p×p", f"{forward / exponential:.0f} ×"),
            ("    with backward", "5 × forward", f"{both / forward:.1f} ×"),
        ]
    return rows


def main() -> None:
    torch.set_num_threads(2)
    console = Console(width=140)
    console.print(machine())
    console.print()
    numbers(console)
    growth(console)


if __name__ == "__main__":
    main()
