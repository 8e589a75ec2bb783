"""Time every method beside ten thousand samples in the same process, and show how time and memory grow.

`python -m benchmarks.speed [--device cuda] [--data-dir DIR] [--against FILE] [--record FILE]`; needs MNIST, and
SqueezeNet's weights and the natural images for its row. Ratios, not seconds, are what to compare between machines:
`--record` keeps them, and `--against` says how much worse or better each is than in a record.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import netmoments as nm
from benchmarks.measure import machine, measured, seconds
from benchmarks.memory import METHODS
from benchmarks.problems import photograph, random_factor, random_layer, random_problem, squeezenet

SIGMAS = (0.001, 0.01, 0.05, 0.1)
SAMPLES = 10_000


@dataclass(frozen=True)
class Figure:
    """A ratio of two times measured in one process, and the value that it must reach."""

    name: str
    ratio: float
    must: float | None
    at_most: bool
    """Whether the ratio must not exceed `must`; otherwise it must not fall below it."""
    detail: str = ""

    @property
    def reached(self) -> bool:
        return self.must is None or (self.ratio <= self.must if self.at_most else self.ratio >= self.must)

    def line(self) -> str:
        wanted = "" if self.must is None else f"{'≤' if self.at_most else '≥'} {self.must:.3g}"
        verdict = "" if self.must is None else "reached" if self.reached else "missed"
        return f"{self.name:<78} {wanted:>8} {self.ratio:>8.3g}  {verdict:<8} {self.detail}"

    def beside(self, earlier: float) -> str:
        """Describe how much worse or better it is than the ratio of an earlier run."""
        factor = self.ratio / earlier if self.at_most else earlier / self.ratio
        return f"then {earlier:.3g}, now {abs(factor - 1):.0%} {'worse' if factor > 1 else 'better'}"


class Bench:
    """Times on one device."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)

    def time(self, work: Callable[[], object], patience: float = 6.0) -> float:
        def finished() -> None:
            work()
            if self.device.type == "cuda":
                torch.cuda.synchronize()

        return seconds(finished, repeats=7, patience=patience)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"


def lenet_figures(bench: Bench, network: nn.Module, images: Tensor) -> Iterator[Figure]:
    """Two-stage, sketch and layerwise on the paper's LeNet, random covariances, per image, over 10⁴ samples."""
    count = 256 if bench.on_gpu else 4
    generator = torch.Generator(bench.device).manual_seed(0)
    factor = torch.stack([random_factor(784, generator).float() for _ in range(min(count, 32))])
    factor = factor.repeat(math.ceil(count / len(factor)), 1, 1)[:count]

    def noise(images_used: int, sigma: float = 0.05) -> nm.Gaussian:
        return nm.Gaussian(images[:images_used], nm.LowRank(sigma * factor[:images_used]), event_ndim=3)

    def at_levels(levels: int) -> nm.Gaussian:
        """Noise σ²I for every image at so many levels: (levels, images)."""
        sigma = torch.tensor(SIGMAS[:levels], device=bench.device).unsqueeze(1).expand(levels, count)
        return nm.Gaussian(images[:count].expand(levels, -1, -1, -1, -1), nm.Isotropic(sigma**2, 784), event_ndim=3)

    few = 4
    sampling = bench.time(lambda: nm.monte_carlo(network, noise(few), SAMPLES)) / few
    at_once = f"{count} images together, 10⁴ samples {1e3 * sampling:.1f} ms an image"

    def each(method: str, given: nm.Gaussian) -> float:
        return bench.time(lambda: nm.output_moments(network, given, method, check=0), patience=10.0) / len(given.mean)

    two_stage = each("two-stage", noise(count))
    must = (0.25, 0.05, 1.0) if bench.on_gpu else (1 / 5, 1 / 50, 1.0)
    yield Figure("LeNet two-stage l = 3, all moments / 10⁴ samples", two_stage / sampling, must[0], True, at_once)
    one, four = (
        bench.time(lambda: nm.output_moments(network, given, "two-stage", check=0), patience=10.0) / count  # noqa: B023
        for given in map(at_levels, (1, len(SIGMAS)))
    )
    further = (four - one) / (len(SIGMAS) - 1)
    detail = f"{1e3 * further:.3f} ms an image and level" + (" (must be ≤ 0.1)" if bench.on_gpu else "")
    yield Figure("    each further σ of σ²I / 10⁴ samples", further / sampling, None, True, detail)
    sketch = each("sketch", noise(count))
    yield Figure("LeNet sketch, K = 64 / 10⁴ samples", sketch / sampling, must[1], True, f"{1e3 * sketch:.2f} ms")
    deep = min(count, 64)
    layerwise = each("layerwise", noise(deep))
    detail = f"{1e3 * layerwise:.2f} ms, {deep} images together"
    yield Figure("LeNet layerwise / 10⁴ samples", layerwise / sampling, must[2], True, detail)
    alone = each("layerwise", noise(1))
    yield Figure("    one image alone / 10⁴ samples", alone / sampling, None, True, f"{1e3 * alone:.1f} ms")


def squeezenet_figures(bench: Bench, data_dir: str | None) -> Iterator[Figure]:
    """Time of the sketch of five scores of a network for 227×227 images, over that of 200 plain samples."""
    network = squeezenet(data_dir).to(bench.device)
    noise = nm.Gaussian(photograph(data_dir).to(bench.device), std=0.05)
    plain = bench.time(lambda: nm.monte_carlo(network, noise, 200), patience=20.0)
    sketch = bench.time(lambda: nm.output_moments(network, noise, "sketch", 5, check=0), patience=20.0)
    must = 1.0 if bench.on_gpu else None
    yield Figure("SqueezeNet 227×227 sketch, 5 scores / 200 samples", sketch / plain, must, True, f"{sketch:.2f} s")


def engine_figures(bench: Bench, units: int = 1024) -> Iterator[Figure]:
    """Time of the exact variance, with every unit active, over that of torch.exp of all pairs and of the paper's
    series.
    """
    x, out = torch.randn(units, units, device=bench.device), torch.empty(units, units, device=bench.device)
    exponential = bench.time(lambda: torch.exp(x, out=out))
    for inputs in (100, 784):
        network, noise = random_problem(units, inputs, 1, torch.float32)
        network, noise = network.to(bench.device), noise.to(bench.device)
        exact, series = (bench.time(partial(METHODS[name], network, noise)) for name in ("exact", "series"))
        detail = f"{1e3 * exact:.2f} ms, the series {1e3 * series:.0f} ms"
        name = f"exact variance, p = {units}, {inputs} inputs"
        yield Figure(f"{name} / exp of p×p", exact / exponential, None if bench.on_gpu else 20, True, detail)
        yield Figure(f"Lemma 4, 5 terms / {name}", series / exact, None if bench.on_gpu else 20, False)
    product = bench.time(lambda: network.A @ network.A.mT)
    yield Figure(f"    A Aᵀ alone, {inputs} inputs / exp of p×p", product / exponential, None, True)


def growth(bench: Bench, network: nn.Module, images: Tensor) -> Iterator[str]:
    """Time and peak memory as layers, batches and images grow, with the exponent of the last doublings."""
    sizes = (512, 1024, 2048, 4096, 8192) if bench.on_gpu else (256, 512, 1024, 2048, 4096)
    yield from _table(bench, "relu_covariance, p units, float32", "p", sizes, lambda p: _covariance(bench, p))
    batches = (4, 16, 64, 256) if bench.on_gpu else (1, 2, 4, 8)
    for method in ("two-stage", "sketch", "layerwise"):
        chosen = batches[:3] if method == "layerwise" else batches

        def of_batch(count: int, method: str = method) -> Callable[[], object]:
            return lambda: nm.output_moments(network, nm.Gaussian(images[:count], std=0.05), method, check=0)

        yield from _table(bench, f"LeNet {method}, a batch of images", "images", chosen, of_batch)
    sides = (16, 24, 32, 48) if bench.on_gpu else (12, 16, 24, 32)
    for method in ("two-stage", "sketch", "layerwise"):

        def of_side(side: int, method: str = method) -> Callable[[], object]:
            torch.manual_seed(0)
            larger = nm.zoo.LeNet(side).to(bench.device).eval()
            image = torch.rand(1, 1, side, side, device=bench.device)
            return lambda: nm.output_moments(larger, nm.Gaussian(image, std=0.05), method, check=0)

        yield from _table(bench, f"LeNet {method}, images of side × side", "side", sides, of_side)


def _covariance(bench: Bench, units: int) -> Callable[[], object]:
    mean, covariance = (x.to(bench.device) for x in random_layer(units, 784))
    return lambda: nm.relu_covariance(mean, covariance)


def _table(
    bench: Bench, title: str, what: str, sizes: tuple[int, ...], work_of: Callable[[int], Callable[[], object]]
) -> Iterator[str]:
    times, peaks = [], []
    for size in sizes:
        work = work_of(size)
        peaks.append(measured(work, bench.device)[1].bytes or 0)  # the first call: later ones find memory to use again
        times.append(bench.time(work, patience=3.0))
    by_time, by_memory = growth_exponent(sizes, times), growth_exponent(sizes, peaks)
    known = f", memory ~ {what}^{by_memory:.1f}" if min(peaks) > 2**20 else ""
    yield f"{title}: time ~ {what}^{by_time:.1f}{known}"
    for size, time, peak in zip(sizes, times, peaks, strict=True):
        yield f"    {size:>6} {1e3 * time:>10.2f} ms {peak / 2**20:>10.0f} MiB"


def growth_exponent(sizes: tuple[int, ...], values: list[float] | list[int]) -> float:
    """The slope of log value over log size, by least squares over the larger half."""
    pairs = [(math.log(s), math.log(max(v, 1e-9))) for s, v in zip(sizes, values, strict=True)][len(sizes) // 2 - 1 :]
    x, y = (sum(part) / len(pairs) for part in zip(*pairs, strict=True))
    return sum((a - x) * (b - y) for a, b in pairs) / sum((a - x) ** 2 for a, _ in pairs)


def figures(bench: Bench, data_dir: str | None) -> Iterator[Figure]:
    network = nm.zoo.pretrained("lenet").to(bench.device)
    images = nm.data.load("mnist", data_dir=data_dir).images[:256].to(bench.device)
    yield from engine_figures(bench)
    yield from lenet_figures(bench, network, images)
    try:
        yield from squeezenet_figures(bench, data_dir)
    except FileNotFoundError as error:
        print(f"without SqueezeNet: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir")
    parser.add_argument("--record", type=Path, help="write the ratios here, as JSON")
    parser.add_argument("--against", type=Path, help="a record to compare the ratios with")
    parser.add_argument("--without-growth", action="store_true")
    chosen = parser.parse_args()
    bench = Bench(chosen.device)
    before = {} if chosen.against is None else json.loads(chosen.against.read_text())["ratios"]
    name = f"{torch.cuda.get_device_name()}, " if bench.on_gpu else ""
    where = f"{name}{machine()}"
    print(where, flush=True)
    print(f"{'what':<78} {'must':>8} {'ratio':>8}")
    found: list[Figure] = []
    for figure in figures(bench, chosen.data_dir):
        found.append(figure)
        earlier = before.get(figure.name.strip())
        print(figure.line() if earlier is None else f"{figure.line()} ({figure.beside(earlier)})", flush=True)
    if chosen.record is not None:
        record: dict[str, Any] = {"machine": where, "ratios": {one.name.strip(): round(one.ratio, 5) for one in found}}
        chosen.record.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    if not chosen.without_growth:
        network = nm.zoo.pretrained("lenet").to(bench.device)
        images = nm.data.load("mnist", data_dir=chosen.data_dir).images[:256].to(bench.device)
        for line in growth(bench, network, images):
            print(line, flush=True)


if __name__ == "__main__":
    main()
