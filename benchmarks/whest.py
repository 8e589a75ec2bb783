"""Mean activations of random networks, error against cost: the task of the Whitebox Estimation Challenge (WhestBench).

`python -m benchmarks.whest [--size 256x8 ...] [--device cuda] [--cumulants CHECKOUT] [--chart FILE.png]`

A network has ReLU layers of one width, He initialisation and no biases. Its input is N(0, I), and the means of its
last activations are wanted. For every method this shows the mean squared error over the units, the time of a call
(the median of several), and the floating-point operations of its matrix products. The reference is sampled, or read
from `--reference FILE.npz` (`random-256x8/mean` and so on); its own error is subtracted.

Cumulant propagation (arXiv 2605.05179) runs from a checkout of alignment-research-center/mlp_cumulant_propagation that
you name, whose requirements must be installed.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import netmoments as nm
from benchmarks.measure import machine, seconds

SIZES = ("256x3", "256x8", "1024x4")
SAMPLES = (1_000, 10_000, 100_000)
TRUTH = 20_000_000
"""Samples of the reference."""
TOGETHER = 2**24
"""Numbers of a layer's samples that are held at a time."""


class Measured(NamedTuple):
    """One method's means of a network, measured."""

    name: str
    error: float
    """The mean squared error over the units."""
    seconds: float
    operations: float
    """Floating-point operations of the matrix products."""


class Truth(NamedTuple):
    mean: Tensor
    """(n,), in float64."""
    error: float
    """Its own mean squared error."""


def random_mlp(width: int, depth: int) -> nn.Sequential:
    """A network with He initialisation, no biases, and a ReLU after every layer."""
    generator = torch.Generator().manual_seed(1)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layer = nn.Linear(width, width, bias=False)
        layer.weight.data = torch.randn(width, width, generator=generator) * math.sqrt(2 / width)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers).eval()


@torch.no_grad()
def sampled_means(network: nn.Sequential, samples: int, seed: int) -> Truth:
    """Means by plain samples, summed in float64, with the error that follows from their spread."""
    weight: Tensor = network[0].weight  # type: ignore[assignment]
    width, device = weight.shape[1], weight.device
    generator = torch.Generator(device).manual_seed(seed)
    total = torch.zeros(2, width, dtype=torch.float64, device=device)
    for start in range(0, samples, max(1, TOGETHER // width)):
        count = min(max(1, TOGETHER // width), samples - start)
        y = network(torch.randn(count, width, device=device, generator=generator))
        total += torch.stack([y.sum(0, dtype=torch.float64), y.square().sum(0, dtype=torch.float64)])
    mean, square = total / samples
    return Truth(mean, float((square - mean.square()).mean()) / samples)


def truth_of(network: nn.Sequential, size: str, reference: Path | None, samples: int) -> Truth:
    """The reference from a file, if that has the size, else from samples with their own seed."""
    if reference is not None:
        with np.load(reference) as file:
            if f"random-{size}/mean" in file:
                mean = torch.from_numpy(file[f"random-{size}/mean"])
                return Truth(mean.to(network[0].weight.device), 0.0)  # type: ignore[arg-type]
    return sampled_means(network, samples, seed=12345)


def _means_by(model: nm.NetworkModel, noise: nm.Gaussian, method: Any) -> Tensor:
    return nm.output_moments(model, noise, method, check=0, covariance=False).mean


def _means_of(network: nn.Sequential, samples: int) -> Tensor:
    return sampled_means(network, samples, seed=0).mean


def ways(network: nn.Sequential, cumulants: Path | None) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """The methods: their names, and calls that give the means (n,)."""
    weight: Tensor = network[0].weight  # type: ignore[assignment]
    noise = nm.Gaussian(torch.zeros(weight.shape[1], device=weight.device), std=1.0)
    model = nm.NetworkModel(network, noise.mean)
    for method in (nm.Layerwise(), nm.Sketch()):
        yield method.name, partial(_means_by, model, noise, method)
    yield "covariances alone", lambda: covariances_alone(network)
    for samples in SAMPLES:
        yield f"{samples:,} samples", partial(_means_of, network, samples)
    if cumulants is not None:
        yield from cumulant_propagation(network, cumulants)


@torch.no_grad()
def covariances_alone(network: nn.Sequential) -> Tensor:
    """Treat every layer's input as Gaussian, by `relu_mean` and `relu_covariance`: the loop that anyone would write."""
    weights = [layer.weight for layer in network if isinstance(layer, nn.Linear)]
    mean, covariance = torch.zeros_like(weights[0][0]), torch.eye(len(weights[0].T)).to(weights[0])
    for weight in weights:
        mean, covariance = weight @ mean, weight @ covariance @ weight.T
        std = covariance.diagonal().clamp(min=0).sqrt()
        mean, covariance = nm.relu_mean(mean, std), nm.relu_covariance(mean, covariance)
    return mean


def cumulant_propagation(network: nn.Sequential, checkout: Path) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Cumulant propagation of orders 2 and 3 by the authors' own code, from a checkout.

    Raises:
        ValueError: there is no such checkout, or something that it needs is missing.
    """
    source = checkout / "src"
    if not (source / "mlp_kprop").is_dir():
        raise ValueError(f"whest: --cumulants must be a checkout with src/mlp_kprop, got {checkout}")
    sys.path.insert(0, str(source))
    try:
        theirs, steps = (importlib.import_module(f"mlp_kprop.{name}") for name in ("mlp", "kprop_harmonic"))
    except ImportError as error:
        raise ValueError(
            f"whest: the checkout {checkout} needs {error.name}; install what its pyproject.toml lists"
        ) from error
    weights = [layer.weight for layer in network if isinstance(layer, nn.Linear)]
    width, depth = len(weights[0]), len(weights)
    twin = theirs.MLP(input_dim=width, hidden_dim=width, output_dim=width, num_layers=depth + 1).to(weights[0].device)
    with torch.no_grad():
        for layer, weight in zip(twin.Ws, weights, strict=False):
            layer.weight.copy_(weight)
    given = {1: torch.zeros_like(weights[0][0]), 2: torch.eye(width).to(weights[0])}

    def means(order: int, **options: Any) -> Tensor:
        with torch.no_grad():
            found = steps.mlp_kprop(twin, given, k_max=order, up_to_layer=f"act{depth - 1}", **options)
        return found[1].to_tensor()

    yield "cumulant propagation, order 2", lambda: means(2)
    yield "cumulant propagation, order 3", lambda: means(3, factor=True)


def measured(name: str, call: Callable[[], Tensor], truth: Truth) -> Measured:
    """The error minus the reference's own, the time, and the operations of a first call."""
    with FlopCounterMode(display=False) as counter:
        mean = call()
    error = float((mean.double().flatten() - truth.mean).square().mean())

    def complete() -> None:
        call()
        if truth.mean.is_cuda:
            torch.cuda.synchronize()

    return Measured(name, max(error - truth.error, 0.0), seconds(complete), counter.get_total_flops())


def table_of(size: str, rows: list[Measured], truth: Truth) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=f"{size} (the truth's own error: {truth.error:.0e})")
    for heading in ("", "mean squared error", "ms", "10⁹ operations"):
        table.add_column(heading, justify="left" if not heading else "right")
    for row in rows:
        table.add_row(row.name, f"{row.error:.1e}", f"{1e3 * row.seconds:.2f}", f"{row.operations / 1e9:.3g}")
    return table


def draw(found: dict[str, list[Measured]], path: Path) -> None:
    """Draw error against time and against operations, with a row of axes for each size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.5 * len(found)), layout="constrained")
    axes = figure.subplots(len(found), 2, squeeze=False)
    for (size, rows), pair in zip(found.items(), axes, strict=True):
        for axis, label, cost in ((pair[0], "seconds", "seconds"), (pair[1], "operations", "operations")):
            for row in rows:
                if row.error > 0 and getattr(row, cost) > 0:
                    axis.loglog(getattr(row, cost), row.error, "o", label=row.name)
            axis.set(title=size, xlabel=label, ylabel="mean squared error")
        pair[1].legend(fontsize="small")
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", default=list(SIZES), help="width x depth, 256x8 say")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--truth", type=int, default=TRUTH, help="samples of the truth")
    parser.add_argument("--reference", type=Path, help="a .npz file with the truth")
    parser.add_argument("--cumulants", type=Path, help="a checkout of mlp_cumulant_propagation")
    parser.add_argument("--chart", type=Path, help="where to draw the chart")
    asked = parser.parse_args(arguments)
    console = Console(width=120)
    console.print(f"{machine()}, {asked.device}\n")
    found: dict[str, list[Measured]] = {}
    for size in asked.size:
        width, depth = (int(part) for part in size.split("x"))
        network = random_mlp(width, depth).to(asked.device)
        truth = truth_of(network, size, asked.reference, asked.truth)
        found[size] = [measured(name, call, truth) for name, call in ways(network, asked.cumulants)]
        console.print(table_of(size, found[size], truth))
    if asked.chart is not None:
        draw(found, asked.chart)


if __name__ == "__main__":
    main()
