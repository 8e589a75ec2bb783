"""Attack LeNet: time beside ten thousand samples, and whether the confidence asked for is reached.

`python -m benchmarks.attacks [cpu|cuda] [DATA_DIR]`
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

from benchmarks.measure import machine
from netmoments import Gaussian, data, monte_carlo
from netmoments.attacks.result import AttackResult
from netmoments.attacks.sparse_smooth import SparseSmooth
from netmoments.data.images import LabelledImages, evenly_spread
from netmoments.network import zoo

TIMED, JUDGED, SAMPLES = 64, 100, 1000


def seconds(work: Callable[[], AttackResult], device: torch.device) -> tuple[float, AttackResult]:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start, result


def spread(images: LabelledImages, count: int) -> LabelledImages:
    return images.take(evenly_spread(len(images), count))


def main(device: torch.device, data_dir: str | None) -> None:
    network = zoo.pretrained("lenet").float().to(device)
    everything = data.load("mnist", data_dir=data_dir)
    few, many = spread(everything, TIMED), spread(everything, JUDGED)
    where = f"{torch.cuda.get_device_name(device)}, " if device.type == "cuda" else ""
    print(f"{where}{machine()}")
    images, labels = few.images.to(device), few.labels
    SparseSmooth(iterations=4, polish=4, samples=10)(network, images, labels)  # the first call pays for start-up
    noise = Gaussian(images[0], std=1 / 255)
    monte_carlo(network, noise, 100)
    start = time.perf_counter()
    monte_carlo(network, noise, 10_000)
    sampling = time.perf_counter() - start
    print(f"10,000 samples of one image: {sampling:.3f} s")
    attacks = {
        "sparse and smooth by the formula, γ = 0": SparseSmooth(gamma=0.0, polish=0),
        "sparse and smooth, confidence 0.95, network followed": SparseSmooth(),
    }
    for name, attack in attacks.items():
        taken, result = seconds(lambda attack=attack: attack(network, images, labels), device)  # type: ignore[misc]
        each = taken / TIMED / sampling
        print(f"{name}, {TIMED} images: {taken:.2f} s, {each:.2f} × 10,000 samples an image; {result}")
    images, labels = many.images.to(device), many.labels
    taken, result = seconds(lambda: SparseSmooth(samples=SAMPLES)(network, images, labels), device)
    rate = result.success.rate
    inside = ((rate >= 0.90) & (rate <= 0.99)).double().mean()
    print(
        f"confidence 0.95, {len(result)} images, {SAMPLES:,} samples each: average {float(rate.mean()):.4f}, from "
        f"{float(rate.min()):.3f} to {float(rate.max()):.3f}, {float(inside):.0%} between 0.90 and 0.99; "
        f"feasible {int(result.feasible.sum())}, fooled as asked {int(result.fooled.sum())}, clipped "
        f"{float(result.success_clipped.rate.mean()) if result.success_clipped else 0:.3f}; {taken:.1f} s"
    )


if __name__ == "__main__":
    where = sys.argv[1] if len(sys.argv) > 1 else "cuda" if torch.cuda.is_available() else "cpu"
    main(torch.device(where), sys.argv[2] if len(sys.argv) > 2 else None)
