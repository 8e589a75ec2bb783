"""Run the default method on a gallery of networks: true errors, stated errors, and time beside plain samples.

`python -m benchmarks.sampler GALLERY [--networks NAME …] [--images N] [--together 16] [--seeds N] [--device cuda]
[--record FILE]`. The gallery is a folder with `networks.py` (`NETWORKS`, `load`, `images_for`), reference moments of a
million samples (`reference.npz`), and MNIST is needed. Printed for each network and noise level, averaged over images:

    mean, variance  |m − m*| in standard deviations of the output and |v/v* − 1|, averaged over outputs
    within          share of true errors within twice the stated ones, plus what a million samples cannot resolve
    alone, together time of a call for one image, or for several at once, divided by that of 10,000 plain samples in
                    batches of 500, in the same process

With `--seeds` it tests instead whether the estimates are unbiased: means over so many runs against the reference, in
standard errors.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

import netmoments as nm
from benchmarks.measure import machine
from netmoments.precision import full_precision

SIGMAS = (0.01, 0.05, 0.1, 0.3)
SAMPLES, BATCH = 10_000, 500
PATIENCE = 1.0
UNBIASED = ("mlp", "series", "recurrent", "smooth", "probabilities")
"""Networks that are run with several seeds: cheap ones of different kinds."""


class Gallery:
    """Networks, images and reference moments."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        sys.path.insert(0, str(folder))
        spec = importlib.util.spec_from_file_location("networks", folder / "networks.py")
        assert spec is not None
        assert spec.loader is not None
        self._module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self._module)
        self.names = list(self._module.NETWORKS)
        self.device = device
        self._truth = np.load(folder / "reference.npz")
        self._images = nm.data.load("mnist").images.float()

    def network(self, name: str) -> nn.Module:
        network: nn.Module = self._module.load(name).to(self.device)
        return network

    def images(self, name: str, numbers: list[int]) -> Tensor:
        images: Tensor = self._module.images_for(name, self._images[numbers])
        return images.to(self.device)

    def numbers(self, name: str) -> list[int]:
        """Images that have a reference."""
        found = {int(key.split("/")[1]) for key in self._truth.files if key.startswith(f"{name}/")}
        return sorted(found)

    def truth(self, name: str, number: int, sigma: float) -> tuple[Tensor, Tensor]:
        """Means and variances of all outputs, in one dimension."""
        key = f"{name}/{number}/{sigma}"
        mean = torch.from_numpy(self._truth[f"{key}/mean"]).double()
        if f"{key}/covariance" in self._truth:
            return mean, torch.from_numpy(self._truth[f"{key}/covariance"]).double().diagonal()
        return mean, torch.from_numpy(self._truth[f"{key}/variance"]).double()


class Photographs:
    """The face network and SqueezeNet on real photographs, from a folder with `fer2013`, `natural` and `squeezenet`.

    The reference is sampled here, plainly.
    """

    SIGMAS: ClassVar = {"faces": 0.05, "squeezenet": 0.02}
    SAMPLES: ClassVar = {"faces": 400_000, "squeezenet": 100_000}

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.names, self.device = list(self.SIGMAS), device
        self._networks = {
            "faces": nm.zoo.pretrained("faces").to(device),
            "squeezenet": nm.zoo.pretrained("squeezenet", next((folder / "squeezenet").glob("*.npz"))).to(device),
        }
        natural = nm.data.load(next((folder / "natural").glob("*.npz")), size=227).images
        self._images = {
            "faces": nm.data.load("fer2013", data_dir=folder).images[:64].float().to(device),
            "squeezenet": natural.float().to(device),
        }

    def network(self, name: str) -> nn.Module:
        return self._networks[name]

    def images(self, name: str, numbers: list[int]) -> Tensor:
        return self._images[name][numbers]

    def numbers(self, name: str) -> list[int]:
        return list(range(len(self._images[name])))

    def truth(self, name: str, number: int, sigma: float) -> tuple[Tensor, Tensor]:
        noise = nm.Gaussian(self.images(name, [number])[0], std=sigma)
        found = sampled_plainly_to(self.network(name), noise, self.SAMPLES[name])
        return found


@torch.inference_mode()
def sampled_plainly_to(network: nn.Module, noise: nm.Gaussian, samples: int) -> tuple[Tensor, Tensor]:
    """Mean and variance of all outputs from many plain samples, in float64."""
    generator = torch.Generator(noise.device).manual_seed(10**6)
    first, second, centre = 0.0, 0.0, network(noise.mean.unsqueeze(0)).double()
    with full_precision():
        for _ in range(samples // BATCH):
            off = network(noise.sample(BATCH, generator=generator)).double() - centre
            first, second = first + off.sum(0), second + off.square().sum(0)
    mean = torch.as_tensor(first) / samples
    variance = torch.as_tensor(second) / samples - mean**2
    return (centre.squeeze(0) + mean).cpu(), variance.cpu()


def time_of(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call after a first one: the median of three calls, or a single call if it takes long."""
    taken: list[float] = []
    while len(taken) < 4 and not (len(taken) > 1 and sum(taken) > PATIENCE):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def plain_seconds(network: nn.Module, image: Tensor) -> float:
    """Ten thousand samples of one image, as a user would write it."""

    @torch.inference_mode()
    def plain() -> None:
        for _ in range(SAMPLES // BATCH):
            network(image + 0.1 * torch.randn(BATCH, *image.shape, device=image.device))

    return time_of(plain, image.device)


def figures(
    gallery: Gallery | Photographs, name: str, sigma: float, count: int, together: int, plain: float
) -> dict[str, float]:
    """One row of the table."""
    network = gallery.network(name)
    rows = []
    for number in gallery.numbers(name)[:count]:
        image = gallery.images(name, [number])[0]
        noise = nm.Gaussian(image, std=sigma, event_ndim=image.dim())
        found = nm.output_moments(network, noise)
        mean, variance = gallery.truth(name, number, sigma)
        assert found.error is not None
        own = [x.double().cpu().flatten() for x in (found.mean, found.variance, found.error.mean, found.error.variance)]
        off, spread = (own[0] - mean).abs(), (own[1] - variance).abs()
        within = torch.cat(
            [off <= 2 * own[2] + 2e-3 * variance.sqrt(), spread <= 2 * own[3] + 3e-3 * variance]
        )  # fmt: skip
        taken = time_of(partial(nm.output_moments, network, noise), gallery.device)
        rows.append(
            {
                "mean": float((off / variance.sqrt().clamp(min=1e-12)).mean()),
                "variance": float((spread / variance.clamp(min=1e-24)).mean()),
                "within": float(within.double().mean()),
                "alone": taken / plain,
                "samples": found.samples,
            }
        )
    row = {key: statistics.mean(each[key] for each in rows) for key in rows[0]}
    if together:
        images = gallery.images(
            name, gallery.numbers(name)[:together] if isinstance(gallery, Photographs) else list(range(together))
        )
        noise = nm.Gaussian(images, std=sigma, event_ndim=images.dim() - 1)
        row["together"] = time_of(partial(nm.output_moments, network, noise), gallery.device) / plain / together
    return row


def z_scores(gallery: Gallery, name: str, sigma: float, seeds: int) -> dict[str, float]:
    """Means over seeds against the reference, and the runs' spread against stated errors, worst and on average."""
    network, number = gallery.network(name), gallery.numbers(name)[0]
    image = gallery.images(name, [number])[0]
    noise = nm.Gaussian(image, std=sigma, event_ndim=image.dim())
    mean, variance = gallery.truth(name, number, sigma)
    runs = [nm.output_moments(network, noise, nm.Auto(tolerance=0.03, seed=seed)) for seed in range(seeds)]
    row: dict[str, float] = {"samples": statistics.mean(run.samples for run in runs)}
    for key, true, floor in (("mean", mean, variance.sqrt() / 1e3), ("variance", variance, 1.5e-3 * variance)):
        found = torch.stack([getattr(run, key).double().cpu().flatten() for run in runs])
        stated = torch.stack([getattr(run.error, key).double().cpu().flatten() for run in runs])
        z = (found.mean(0) - true) / (found.var(0) / seeds + floor**2).sqrt()
        row[f"{key} z, worst of {len(true)}"] = float(z.abs().max())
        row[f"{key} stated/true error"] = float((stated.square().mean(0) / found.var(0)).sqrt().mean())
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("gallery", type=Path)
    parser.add_argument("--networks", nargs="+")
    parser.add_argument("--sigmas", nargs="+", type=float, default=list(SIGMAS))
    parser.add_argument("--images", type=int, default=4)
    parser.add_argument("--together", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=0)
    parser.add_argument("--photographs", type=Path, help="the face network and SqueezeNet instead, on this folder's")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--record", type=Path)
    asked = parser.parse_args()
    device = torch.device(asked.device)
    gallery: Gallery | Photographs = Gallery(asked.gallery.resolve(), device)
    if asked.photographs is not None:
        gallery = Photographs(asked.photographs.resolve(), device)
    print(machine())
    kept: dict[str, Any] = {"machine": machine(), "command": " ".join(sys.argv[1:]), "rows": {}}
    for name in asked.networks or (UNBIASED if asked.seeds else gallery.names):
        plain = 0.0 if asked.seeds else plain_seconds(gallery.network(name), gallery.images(name, [0])[0])
        for sigma in [gallery.SIGMAS[name]] if isinstance(gallery, Photographs) else asked.sigmas:
            if asked.seeds and isinstance(gallery, Gallery):
                row = z_scores(gallery, name, sigma, asked.seeds)
            else:
                row = figures(gallery, name, sigma, asked.images, asked.together, plain)
            kept["rows"][f"{name} {sigma}"] = row
            print(
                f"{name:14s}{sigma:6.2f}  " + "  ".join(f"{key} {value:.3g}" for key, value in row.items()), flush=True
            )
    if not asked.seeds:
        summary(kept)
    if device.type == "cuda":
        print(f"memory at most {torch.cuda.max_memory_reserved() / 2**30:.1f} GiB")
    if asked.record is not None:
        asked.record.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


def summary(kept: dict[str, Any]) -> None:
    """The worst and the median of each figure, over all rows and for the smallest noise."""
    rows = list(kept["rows"].values())
    smallest = [row for key, row in kept["rows"].items() if math.isclose(float(key.split()[1]), SIGMAS[0])]
    for key in rows[0]:
        values = [row[key] for row in rows]
        small = f", at σ = {SIGMAS[0]} {statistics.median(row[key] for row in smallest):.3g}" if smallest else ""
        worst = min(values) if key == "within" else max(values)
        print(f"{key:10s} median {statistics.median(values):.3g}{small}; worst {worst:.3g}")


if __name__ == "__main__":
    main()
