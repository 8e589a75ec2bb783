"""Measure the two-stage linearization of trained networks: accuracy and speed beside sampling in the same process.

`python -m benchmarks.networks [--device cuda] [--data-dir DIR]`; needs MNIST.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import netmoments as nm
from benchmarks.measure import class_frequencies, machine, seconds
from benchmarks.problems import random_covariance
from netmoments.moments.contests import winning_probabilities
from netmoments.precision import full_precision

Row = tuple[str, str, str]


def reproduction(network: nn.Module, images: Tensor) -> list[Row]:
    """The largest relative difference between the network and its linearization, at the point."""
    rows = []
    with torch.no_grad(), full_precision():
        exact = network(images)
    for relu in nm.relus(network, images):
        value = nm.two_stage(network, images, relu.index)(images)
        error = float(((value - exact).abs().amax(1) / exact.abs().amax(1)).max())
        rows.append((f"two-stage at the point, {relu.name}, {relu.size} units", "1e-5", f"{error:.1e}"))
    return rows


def tightness(network: nn.Module, images: Tensor, samples: int) -> list[Row]:
    """Errors against many samples at the paper's noise levels with its random covariances, averaged as in Table 2."""
    rows = []
    for sigma, few in ((0.001, images), (0.01, images[::4]), (0.05, images[::4]), (0.1, images[::4])):
        errors = []
        for number, image in enumerate(few):
            generator = torch.Generator(images.device).manual_seed(number)
            covariance = random_covariance(image.numel(), sigma, generator).to(image.dtype)
            noise = nm.Gaussian(image, covariance)
            sampled = nm.monte_carlo(network, noise, samples, seed=number)
            found = [nm.output_moments(network, noise, method, check=0) for method in ("two-stage", "linear")]
            errors.append(
                [
                    float(nm.relative_difference(getattr(moments, name).double(), getattr(sampled, name)).mean())
                    for moments in found
                    for name in ("mean", "variance")
                ]
            )
        table = torch.tensor(errors)
        mean, variance, linear_mean, linear_variance = table.mean(0).tolist()
        spread = float(table[:, 0].std()) / len(few) ** 0.5
        wanted = "0.003, 0.03" if sigma == 0.001 else ""
        rows.append(
            (
                f"errors of mean and variance, l = 3, σ = {sigma}, {len(few)} images",
                wanted,
                f"{mean:.4f} ± {spread:.4f}, {variance:.4f}",
            )
        )
        rows.append(("    the delta method", "", f"{linear_mean:.4f}, {linear_variance:.4f}"))
    return rows


def speed(network: nn.Module, image: Tensor, device: str) -> list[Row]:
    """Time for one image, l = 3, of linearization and moments, and of further noise once linearized, beside 10⁴
    samples.
    """
    generator = torch.Generator(image.device).manual_seed(0)
    dense = [
        nm.Gaussian(image, random_covariance(image.numel(), s, generator).to(image.dtype)) for s in (0.01, 0.05, 0.1)
    ]
    plain = [nm.Gaussian(image, std=s) for s in (0.01, 0.05, 0.1)]
    g = nm.two_stage(network, image)
    sampling = timed(lambda: nm.monte_carlo(network, plain[1], 10_000), device)
    whole = timed(lambda: nm.output_moments(network, plain[1], "two-stage", check=0), device)

    def moments(noise: nm.Gaussian) -> tuple[Tensor, Tensor]:
        return g.mean(noise), g.variance(noise)

    further_dense = max(timed(partial(moments, noise), device) for noise in dense)
    further = max(timed(partial(moments, noise), device) for noise in plain)
    first = timed(lambda: nm.two_stage(network, image, 0), device)
    wanted = ("3 ×", "30 ×", "100 ×") if device == "cpu" else ("", "", "")
    return [
        (
            f"10⁴ samples, one image ({1e3 * sampling:.0f} ms), over linearization and moments",
            wanted[0],
            ratio(sampling, whole),
        ),
        ("    over mean and variance for a further dense covariance", wanted[1], ratio(sampling, further_dense)),
        ("    over mean and variance for a further isotropic σ", wanted[2], ratio(sampling, further)),
        ("    over the linearization at l = 1 (6272 units)", "", ratio(sampling, first)),
    ]


def batching(network: nn.Module, images: Tensor, device: str) -> list[Row]:
    """Time of linearization and all moments for 64 images together, and one at a time."""
    together = timed(lambda: nm.output_moments(network, nm.Gaussian(images, std=0.05), "two-stage", check=0), device)
    apart = timed(
        lambda: [nm.output_moments(network, nm.Gaussian(x, std=0.05), "two-stage", check=0) for x in images], device
    )
    sampling = timed(lambda: nm.monte_carlo(network, nm.Gaussian(images[:4], std=0.05), 10_000), device) / 4
    wanted = "5 ×" if device == "cuda" else ""
    each = together / len(images)
    return [
        (
            f"batch of {len(images)}: one at a time over together ({1e3 * each:.2f} ms an image)",
            wanted,
            ratio(apart, together),
        ),
        ("    10⁴ samples over an image of the batch", "", ratio(sampling, each)),
    ]


def winners(network: nn.Module, images: Tensor) -> list[Row]:
    """Class probabilities against 10⁵ samples, for images that noise sometimes flips: raise σ until there are 50."""
    given: list[float] = []
    ours: list[float] = []
    sigma = 0.1
    while len(given) < 50:
        for number, image in enumerate(images):
            noise = nm.Gaussian(image, std=sigma)
            won = class_frequencies(network, noise, 2000, seed=number).cpu()
            if not 0.01 <= 1 - float(won.max()) <= 0.99 or len(given) == 50:
                continue
            won = class_frequencies(network, noise, 100_000, seed=number).cpu()
            sampled = nm.monte_carlo(network, noise, 100_000, seed=number + 1)
            given.append(variation(winning_probabilities(sampled.mean, sampled.covariance).cpu(), won))
            moments = nm.output_moments(network, noise, "two-stage", check=0)
            ours.append(variation(moments.class_probabilities().double().cpu(), won))
        sigma *= 1.5
    average, worst = sum(ours) / len(ours), max(ours)
    return [
        (
            f"class probabilities from sampled moments, worst total variation of {len(given)}",
            "0.05",
            f"{max(given):.3f}",
        ),
        ("    on average", "", f"{sum(given) / len(given):.3f}"),
        (f"    from two-stage moments, σ up to {sigma / 1.5:.2g}: average, worst", "", f"{average:.3f}, {worst:.3f}"),
    ]


def variation(p: Tensor, q: Tensor) -> float:
    return float(0.5 * (p - q).abs().sum())


def timed(work: Callable[[], object], device: str) -> float:
    def finished() -> None:
        work()
        if device == "cuda":
            torch.cuda.synchronize()

    return seconds(finished, repeats=5, patience=8.0)


def ratio(reference: float, ours: float) -> str:
    return f"{reference / ours:.1f} ×" if reference < 10 * ours else f"{reference / ours:.0f} ×"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir")
    chosen = parser.parse_args()
    device = chosen.device
    large = device == "cuda"
    network = nm.zoo.pretrained("lenet").to(device)
    try:
        images = nm.data.load("mnist", data_dir=chosen.data_dir).images.to(device)
    except FileNotFoundError as error:
        raise SystemExit(f"the networks need MNIST: {error}") from None
    table = Table("what", "must reach", "measured", box=box.SIMPLE_HEAD)
    parts: list[list[Row]] = [
        speed(network, images[0], device),
        batching(network, images[: 64 if large else 16], device),
        reproduction(network, images[:4]),
        tightness(network, images[::100], 1_000_000) if large else [],
        winners(network, images[:1000]) if large else [],
    ]
    for rows in parts:
        for row in rows:
            table.add_row(*row)
        table.add_section()
    console = Console(width=140)
    name = f"{torch.cuda.get_device_name()}, " if large else ""
    console.print(f"{name}{machine()}\n")
    console.print(table)


if __name__ == "__main__":
    main()
