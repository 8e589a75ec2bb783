"""Run every method on a gallery of networks: errors against a million samples, and time beside plain samples.

`python -m benchmarks.gallery GALLERY [--methods auto layerwise …] [--networks NAME …] [--images N] [--sigmas 0.05 …]`.
The gallery is that of `python -m benchmarks.sampler`, and MNIST is needed. For each network, noise level and
method it prints, averaged over images:

    mean, variance  |m − m*| in standard deviations of the output and |v/v* − 1|, averaged over outputs
    time            processor seconds of a call (of a formula, without the check of its error), divided by those of
                    10,000 plain samples in batches of 500: a fifth of these are timed before and after each call

or why there is no answer. Processor seconds of one thread can be compared even on a machine with other work.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import netmoments as nm
from benchmarks.measure import machine
from benchmarks.sampler import BATCH, SAMPLES, Gallery

METHODS = ("auto", "layerwise", "sketch")
SIGMAS = (0.01, 0.05, 0.3)
SHARE = 5
"""One in so many of the ten thousand samples is timed at a time."""


def processor_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


@torch.inference_mode()
def some_samples(network: nn.Module, image: Tensor, sigma: float) -> None:
    """A fifth of ten thousand samples of one image, as a user would write it."""
    for _ in range(SAMPLES // BATCH // SHARE):
        network(image + sigma * torch.randn(BATCH, *image.shape))


def figures(gallery: Gallery, name: str, sigma: float, method: str, images: int) -> dict[str, float]:
    """One row of the table."""
    network, rows = gallery.network(name), []
    for number in gallery.numbers(name)[:images]:
        image = gallery.images(name, [number])[0]
        noise = nm.Gaussian(image, std=sigma, event_ndim=image.dim())
        answer = partial(nm.output_moments, network, noise, method, check=0)
        sampling = partial(some_samples, network, image, sigma)
        with torch.no_grad():
            found = answer()  # the network is looked at
            before, own, after = (processor_seconds(work) for work in (sampling, answer, sampling))
        mean, variance = gallery.truth(name, number, sigma)
        off, spread = found.mean.double().flatten() - mean, found.variance.double().flatten() - variance
        rows.append(
            {
                "mean": float((off.abs() / variance.sqrt().clamp(min=1e-12)).mean()),
                "variance": float((spread.abs() / variance.clamp(min=1e-24)).mean()),
                "time": 2 * own / (SHARE * (before + after)),
            }
        )
    return {key: statistics.mean(row[key] for row in rows) for key in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("gallery", type=Path)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--networks", nargs="+")
    parser.add_argument("--sigmas", nargs="+", type=float, default=list(SIGMAS))
    parser.add_argument("--images", type=int, default=2)
    asked = parser.parse_args()
    gallery = Gallery(asked.gallery.resolve(), torch.device("cpu"))
    print(machine(), flush=True)
    for name in asked.networks or gallery.names:
        for sigma in asked.sigmas:
            for method in asked.methods:
                try:
                    row = figures(gallery, name, sigma, method, asked.images)
                    said = "  ".join(f"{key} {value:.3g}" for key, value in row.items())
                except ValueError as refusal:
                    said = f"refused: {str(refusal).splitlines()[0]}"
                print(f"{name:14s}{sigma:6.2f}  {method:10s}  {said}", flush=True)


if __name__ == "__main__":
    main()
