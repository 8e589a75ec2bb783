"""Measurements of flip probabilities: runs beside those of other methods, intervals beside the truth.

`python -m benchmarks.flips GALLERY [table|coverage|common] [--networks NAME …] [--images 5] [--first 0] [--seeds N]
[--decades 4 6 …] [--particles 1000] [--faces FOLDER] [--truth SAMPLES] [--device cuda] [--record FILE]`. The gallery is
a folder with `networks.py`, as for `benchmarks.sampler`; `lenet`, `digits` and `faces` come with the library. MNIST is
needed, and FER2013 in the folder of `--faces`. Each image is given the noise at which flips are as rare as wanted.

    table     runs for a standard error of 10 %, everything included, beside those of splitting and the last particle
    coverage  how many intervals of 95 % hold the truth, for networks whose flips are known exactly; with `--truth`, for
              the named networks, where flips are not too rare for so many plain samples
    common    runs for ±0.01 where flips are common, beside those of plain sampling; with `--truth`, how many
              intervals hold the share of so many plain samples
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import netmoments as nm
from benchmarks.measure import machine
from benchmarks.rare_baselines import (
    MOVES,
    PARTICLES,
    RareEstimate,
    WhiteMargin,
    last_particle,
    plain,
    plain_runs,
    splitting,
)
from benchmarks.sampler import Gallery
from netmoments.normal import QUANTILE, distribution, gauss_legendre

RELATIVE, ABSOLUTE = 0.1, 0.01
"""The relative standard error that is asked for, and where flips are common the half-width of the interval."""
NETWORKS = ("lenet", "faces", "resnet20", "vit")
DECADES = (4, 5, 6, 7, 8, 9, 12)
COMMON = (0.01, 0.03, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99)
"""The flip probabilities of `common`."""
KNOWN = (0.5, 0.1, 1e-2, 1e-3, 1e-4, 1e-6, 1e-9, 1e-12, 1e-15)
"""The flip probabilities of networks whose flips are known."""
START = {"lenet": 0.3, "digits": 0.2, "faces": 0.03}
"""The σ at which the search for the wanted σ begins; 0.2 for other networks."""
NEAR = 0.25
"""How near Φ⁻¹ of the flip probability must come to that of the wanted one: about half a decade."""
NEAR_COMMON = 0.1
"""The same for common flips."""
ROUGHLY = 0.3
"""The relative error of the flip probabilities while σ is looked for."""
SEARCHES = 10
"""The most σ that are tried."""
SEARCH_SEED = 10**6
"""The seeds of that search begin here, apart from those of the measurements."""
ENOUGH = 100
"""Plain samples tell the truth if so many flips are expected among them, or more."""
SIZE = 40
"""The number of inputs of the networks whose flips are known."""


# Networks whose flips are known


@dataclass(frozen=True)
class Shape:
    """g(z) = Σ aᵢ relu(uᵢᵀz + bᵢ) of two standard normal numbers z: a network flips where g > c."""

    name: str
    units: tuple[tuple[float, float, float, float], ...]
    """u₁, u₂, b and a of each unit."""

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """u (h, 2), b (h,), a (h,)."""
        units = torch.tensor(self.units, dtype=torch.float64)
        return units[:, :2], units[:, 2], units[:, 3]

    def network(self, threshold: float) -> nn.Module:
        """A network of `SIZE` inputs with the scores (c, g); z are the inputs along two orthonormal directions."""
        u, b, a = self.tensors
        generator = torch.Generator().manual_seed(0)
        frame = torch.linalg.qr(torch.randn(SIZE, 2, dtype=torch.float64, generator=generator))[0]
        first, last = nn.Linear(SIZE, len(a)).double(), nn.Linear(len(a), 2).double()
        with torch.no_grad():
            first.weight.copy_(u @ frame.T)
            first.bias.copy_(b)
            last.weight.copy_(torch.stack([torch.zeros_like(a), a]))
            last.bias.copy_(torch.tensor([threshold, 0.0]))
        return nn.Sequential(first, nn.ReLU(), last).eval()


def random_shape(seed: int, units: int = 12) -> Shape:
    """A shape whose units have random directions, offsets and weights."""
    rows = torch.randn(units, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return Shape(f"random {seed}", tuple(tuple(row) for row in rows.tolist()))


FORWARD, BACK = (1.0, 0.0, 0.0, 1.0), (-1.0, 0.0, 0.0, -1.0)
SHAPES = (
    Shape("linear", (FORWARD, BACK)),
    Shape("both sides", (FORWARD, (-1.0, 0.0, 0.0, 1.0))),
    Shape("both sides, uneven", (FORWARD, (-1.0, 0.0, 0.0, 0.9))),
    Shape("steeper at 3", ((0.2, 0.0, 0.0, 1.0), (-0.2, 0.0, 0.0, -1.0), (1.0, 0.0, -3.0, 1.0))),
    Shape("flatter at 3", (FORWARD, BACK, (1.0, 0.0, -3.0, -0.7))),
    Shape("sum of two", (FORWARD, (0.0, 1.0, 0.0, 1.0))),
    Shape("larger of two", (FORWARD, BACK, (-1.0, 1.0, 0.0, 1.0))),
    Shape("smaller of two", (FORWARD, BACK, (1.0, -1.0, 0.0, -1.0))),
    random_shape(0),
    random_shape(1),
)


def share_above(slope: Tensor, offset: Tensor, weight: Tensor, threshold: float) -> Tensor:
    """P(Σ aᵢ relu(sᵢ z + oᵢ) > c) for one z ~ N(0, 1), (N,), from s and a (h,) and o (N, h): exact.

    The sum is linear between the kinks −oᵢ/sᵢ, where a unit opens, so that each piece is above c on an interval.
    """
    moving = slope != 0
    kinks = (-offset[:, moving] / slope[moving]).sort(1).values
    far = torch.full_like(kinks[:, :1], 1e3)
    ends = torch.cat([-far, kinks.clamp(-1e3, 1e3), far], 1)
    middle = 0.5 * (ends[:, 1:] + ends[:, :-1])
    opened = (middle.unsqueeze(-1) * slope + offset.unsqueeze(1)) > 0
    rise = (opened * (weight * slope)).sum(-1)
    level = (opened * (weight * offset.unsqueeze(1))).sum(-1)
    crossing = torch.where(rise == 0, torch.inf * (threshold - level).sign(), (threshold - level) / rise)
    low = torch.where(rise >= 0, torch.maximum(ends[:, :-1], crossing), ends[:, :-1])
    high = torch.where(rise >= 0, ends[:, 1:], torch.minimum(ends[:, 1:], crossing))
    return torch.where(low < high, mass_between(low, high), 0.0).sum(1)


def mass_between(low: Tensor, high: Tensor) -> Tensor:
    """Φ(b) − Φ(a), without cancellation in either tail."""
    mirrored = low > 0
    a, b = torch.where(mirrored, -high, low), torch.where(mirrored, -low, high)
    return distribution(b) - distribution(a)


@cache
def panels(reach: float = 12.0, count: int = 600) -> tuple[Tensor, Tensor]:
    """Gauss–Legendre nodes and weights of 8 points in each of `count` equal parts of (−reach, reach)."""
    nodes, weights = (torch.tensor(x, dtype=torch.float64) for x in gauss_legendre(8))
    width = 2 * reach / count
    starts = -reach + width * torch.arange(count, dtype=torch.float64)
    return (starts.unsqueeze(1) + width * nodes).flatten(), (width * weights).repeat(count)


def flips_of(shape: Shape, threshold: float) -> float:
    """P(g > c): exact along one direction, by quadrature over the other. No kink is parallel to either of them."""
    u, b, a = shape.tensors
    turn = torch.tensor([[math.cos(1), -math.sin(1)], [math.sin(1), math.cos(1)]], dtype=torch.float64)
    u = u @ turn
    second, weights = panels()
    density = torch.exp(-0.5 * second.square()) / math.sqrt(2 * math.pi)
    return float(weights @ (density * share_above(u[:, 0], second.unsqueeze(1) * u[:, 1] + b, a, threshold)))


def threshold_at(shape: Shape, probability: float) -> float:
    """The c with P(g > c) = p, by bisection."""
    low, high = -200.0, 200.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if flips_of(shape, middle) > probability else (low, middle)
    return 0.5 * (low + high)


# Networks and images


@dataclass(frozen=True, eq=False)
class Case:
    """An image with noise, and the network that is to classify it."""

    network: str
    number: int
    module: nn.Module
    image: Tensor
    sigma: float

    @property
    def name(self) -> str:
        return f"{self.network:9s}{self.number:4d} σ {self.sigma:.4f}"

    @property
    def label(self) -> int:
        with torch.no_grad():
            return int(self.module(self.image.unsqueeze(0)).argmax())

    def estimate(self, seed: int, **options: Any) -> nm.FlipProbability:
        noise = nm.Gaussian(self.image, std=self.sigma, event_ndim=self.image.dim())
        return nm.flip_probability(self.module, noise, self.label, seed=seed, **options)

    def margin(self) -> WhiteMargin:
        return WhiteMargin(self.module, self.image, self.sigma, self.label)


class Subjects:
    """Networks by name, with their images."""

    def __init__(self, gallery: Path, faces: Path | None, device: torch.device) -> None:
        self._folder, self._faces, self.device = gallery, faces, device
        self._gallery: Gallery | None = None

    def cases(self, name: str, first: int, count: int) -> Iterator[Case]:
        """Images of a network, each with the noise at which the search for the wanted noise begins."""
        module, images = self._of(name, list(range(first, first + count)))
        for number, image in enumerate(images, first):
            yield Case(name, number, module, image, START.get(name, 0.2))

    def _of(self, name: str, numbers: list[int]) -> tuple[nn.Module, Tensor]:
        if name not in START:
            if self._gallery is None:
                self._gallery = Gallery(self._folder, self.device)
            return self._gallery.network(name), self._gallery.images(name, numbers)
        source = {"lenet": "mnist", "digits": "digits", "faces": "fer2013"}[name]
        images = nm.data.load(source, data_dir=self._faces if name == "faces" else None).images[numbers]
        return nm.zoo.pretrained(name).float().to(self.device), images.float().to(self.device)


def normal_quantile(probability: float) -> float:
    """Φ⁻¹(p)."""
    return float(torch.special.ndtri(torch.tensor(probability, dtype=torch.float64)))


def with_flips(case: Case, probability: float) -> Case | None:
    """The same image with a σ at which flips are about so probable; None where none was found."""
    wanted, near = normal_quantile(probability), NEAR if probability < ABSOLUTE else NEAR_COMMON
    points: list[tuple[float, float]] = []
    for search in range(SEARCHES):
        estimate = case.estimate(SEARCH_SEED + search, relative_error=ROUGHLY * near / NEAR, runs=100_000)
        p = min(max(float(estimate.probability), 1e-300), 1 - 1e-6)
        here = normal_quantile(p)
        if abs(here - wanted) < near:
            return case
        points.append((1 / case.sigma, here))
        case = replace(case, sigma=1 / next_inverse(points, wanted))
    return None


def next_inverse(points: Sequence[tuple[float, float]], wanted: float) -> float:
    """The 1/σ to try next for Φ⁻¹(p) = `wanted`, after the points (1/σ, Φ⁻¹(p)) so far.

    For a linear network Φ⁻¹(p) is linear in 1/σ, and 0 at 1/σ = 0; for others nearly so. The next 1/σ is where the line
    through the nearest points on both sides meets the wanted value. As long as there is only one side the line goes
    through 0 and the last point, and 1/σ is at most doubled or halved.
    """
    above = [point for point in points if point[1] > wanted]
    below = [point for point in points if point[1] <= wanted]
    if above and below:
        (x, y), (beyond, lower) = min(above, key=lambda point: point[1]), max(below, key=lambda point: point[1])
        share = min(0.9, max(0.1, (y - wanted) / (y - lower)))
        return x + share * (beyond - x)
    x, y = points[-1]
    if wanted < 0 and y < 0:
        return x * min(2.0, max(0.5, 1.05 * wanted / y if y > wanted else wanted / y / 1.05))
    return 2 * x if y > wanted else x / 2


def answers(estimate: Callable[[int], nm.FlipProbability], seeds: int) -> dict[int, nm.FlipProbability]:
    """The estimate with each seed. An error is printed, and its seed left out."""
    by_seed = {}
    for seed in range(seeds):
        try:
            by_seed[seed] = estimate(seed)
        except Exception as error:
            print(f"    seed {seed}: {type(error).__name__}: {error}", flush=True)
    return by_seed


# Ours beside other methods


def table(options: argparse.Namespace, subjects: Subjects) -> Iterator[dict[str, Any] | None]:
    """A row for each network, image and decade."""
    print(
        f"runs for a standard error of 10 %; ours: median of {options.seeds} seeds; splitting and last particle: "
        f"{options.particles:,} particles, {MOVES} moves, as if moves made them independent\n"
        f"{'':24} {'p':>8} {'rel.':>5} {'second':>8} {'runs':>7} {'most':>7}   {'splitting':>17}   "
        f"{'last particle':>17}   {'plain':>7}"
    )
    for name in options.networks or NETWORKS:
        for image in subjects.cases(name, options.first, options.images):
            for decade in options.decades:
                case = with_flips(image, 10.0**-decade)
                if case is None:
                    print(f"{name:9s}{image.number:4d} no σ found for 1e-{decade}", flush=True)
                    continue
                yield table_row(case, options)
                image = case


def table_row(case: Case, options: argparse.Namespace) -> dict[str, Any] | None:
    """One line, printed; None where no seed has an answer."""
    by_seed = answers(partial(case.estimate, relative_error=RELATIVE), options.seeds)
    if not by_seed:
        return None
    estimates = list(by_seed.values())
    runs = [int(estimate.runs) for estimate in estimates]
    median = statistics.median(float(estimate.probability) for estimate in estimates)
    row: dict[str, Any] = {
        "case": case.name,
        "network": case.network,
        "p": median,
        "relative": statistics.median(float(each.standard_error / each.probability) for each in estimates),
        "second": float(estimates[0].agreement),
        "runs": statistics.median(runs),
        "most": max(runs),
        "plain": plain_runs(median, RELATIVE) if median > 0 else math.inf,
    }
    rivals: dict[str, Callable[..., RareEstimate]] = {"splitting": splitting, "last particle": last_particle}
    shown = []
    for name, method in rivals.items():
        rival = method(case.margin(), seed=0, particles=options.particles) if options.particles else None
        row[name] = None if rival is None else {"p": rival.probability, "runs": rival.runs_for(RELATIVE)}
        shown.append("" if rival is None else f"{rival.probability:.2e} {rival.runs_for(RELATIVE):8.0f}")
    print(
        f"{case.name:24} {row['p']:8.2e} {row['relative']:5.3f} {row['second']:8.2e} {row['runs']:7.0f} "
        f"{row['most']:7d}   {shown[0]:>17}   {shown[1]:>17}   {row['plain']:7.1e}",
        flush=True,
    )
    for seed, each in by_seed.items():
        unlike = not 0.5 < float(each.probability) / max(median, 1e-300) < 2
        if unlike or not bool(each.met) or not bool(each.agreed):
            print(f"    seed {seed}: {each!r}, {each.route[0]}, agreed {bool(each.agreed)}, met {bool(each.met)}")
    return row


def table_summary(rows: list[dict[str, Any]]) -> None:
    """Print the median and the most runs of each network, for 1e-4 … 1e-9 and for rarer flips."""
    for name in dict.fromkeys(row["network"] for row in rows):
        for what, low, high in (("1e-4 … 1e-9", 1e-10, 1.0), ("rarer", 0.0, 1e-10)):
            runs = [row["runs"] for row in rows if row["network"] == name and low <= row["p"] < high]
            if runs:
                print(f"{name}, {what}: median {statistics.median(runs):,.0f} runs, most {max(runs):,.0f}")


# Intervals beside the truth


@dataclass(frozen=True, eq=False)
class Truth:
    """A case whose flip probability is known, to a standard error, and how to estimate it with a seed."""

    name: str
    probability: float
    error: float
    estimate: Callable[[int], nm.FlipProbability]

    def in_interval_of(self, estimate: nm.FlipProbability) -> bool:
        """Whether the interval of an estimate holds the truth, or misses it by at most twice the error of the truth."""
        low, high = estimate.interval.tolist()
        return bool(low - 2 * self.error <= self.probability <= high + 2 * self.error)


def known_truths(names: Sequence[str], probabilities: Sequence[float]) -> Iterator[Truth]:
    """The networks of the shapes with these names, at every probability that they can have."""
    noise = nm.Gaussian(torch.zeros(SIZE, dtype=torch.float64), std=1.0)
    for shape in (shape for shape in SHAPES if shape.name in names):
        for wanted in probabilities:
            threshold = threshold_at(shape, wanted)
            truth = flips_of(shape, threshold)
            if abs(truth / wanted - 1) > 0.01:  # g has an atom there, as relu has at 0
                continue
            network = shape.network(threshold)
            yield Truth(f"{shape.name}, {wanted:g}", truth, 0.0, partial(flips_with_seed, network, noise))


def flips_with_seed(network: nn.Module, noise: nm.Gaussian, seed: int) -> nm.FlipProbability:
    return nm.flip_probability(network, noise, 0, RELATIVE, seed=seed)


def sampled_truths(options: argparse.Namespace, subjects: Subjects) -> Iterator[Truth]:
    """Images with noise, where flips are not too rare for the plain samples that tell their probability."""
    for name in options.networks or NETWORKS:
        for image in subjects.cases(name, options.first, options.images):
            for decade in options.decades:
                if options.truth * 10.0**-decade < ENOUGH:
                    continue
                case = with_flips(image, 10.0**-decade)
                if case is None:
                    continue
                true = plain(case.margin(), options.truth, seed=SEARCH_SEED)
                error = true.relative_error * true.probability
                yield Truth(case.name, true.probability, error, partial(case.estimate, relative_error=RELATIVE))


def coverage(options: argparse.Namespace, subjects: Subjects) -> Iterator[dict[str, Any] | None]:
    """A row for each case: how many intervals hold the truth."""
    print(f"{options.seeds} seeds\n{'':32} {'truth':>9} {'hold':>5} {'agree':>5} {'met':>5} {'ratios':>13} {'runs':>7}")
    known = known_truths(options.shapes, options.probabilities)
    for truth in sampled_truths(options, subjects) if options.truth else known:
        yield coverage_row(truth, options.seeds)


def coverage_row(truth: Truth, seeds: int) -> dict[str, Any] | None:
    """One line, printed, with the estimates that missed; None where no seed has an answer."""
    p, by_seed = truth.probability, answers(truth.estimate, seeds)
    if not by_seed:
        return None
    estimates = list(by_seed.values())
    holds = [truth.in_interval_of(estimate) for estimate in estimates]
    ratios = [float(estimate.probability) / p for estimate in estimates]
    row = {
        "case": truth.name,
        "truth": p,
        "seeds": seeds,
        "hold": sum(holds),
        "agree": sum(bool(estimate.agreed) for estimate in estimates),
        "met": sum(bool(estimate.met) for estimate in estimates),
        "least": min(ratios),
        "most": max(ratios),
        "runs": statistics.median(int(estimate.runs) for estimate in estimates),
    }
    print(
        f"{truth.name:32} {p:9.3g} {row['hold']:5d} {row['agree']:5d} {row['met']:5d} "
        f"{row['least']:6.2f} {row['most']:6.2f} {row['runs']:7.0f}",
        flush=True,
    )
    for (seed, each), held, ratio in zip(by_seed.items(), holds, ratios, strict=True):
        if not held or not 0.5 < ratio < 2:
            missed = "" if held else "missed, "
            print(
                f"    seed {seed}: {missed}ratio {ratio:.3g}, {each!r}, second {float(each.agreement):.3g}, "
                f"agreed {bool(each.agreed)}, {each.route[0]}",
                flush=True,
            )
    return row


def coverage_summary(rows: list[dict[str, Any]]) -> None:
    """Print how many intervals hold the truth in all, and the worst cases."""
    total, hold = sum(row["seeds"] for row in rows), sum(row["hold"] for row in rows)
    worst = max(rows, key=lambda row: max(row["most"], 1 / max(row["least"], 1e-300)))
    seldom = min(rows, key=lambda row: row["hold"])
    print(
        f"{hold} of {total} intervals hold the truth ({hold / total:.1%}), least {seldom['hold']} of {seldom['seeds']} "
        f"({seldom['case']}); worst ratios {worst['least']:.2f} to {worst['most']:.2f} ({worst['case']})"
    )


# Common flips


def common(options: argparse.Namespace, subjects: Subjects) -> Iterator[dict[str, Any] | None]:
    """A row for each network, image and probability."""
    heads = f"{'p':>6} {'±':>7} {'runs':>7} {'most':>7} {'plain':>7} {'share':>6} {'hold':>5}"
    print(f"±{ABSOLUTE}; {options.seeds} seeds\n{'':24} {heads}")
    for name in options.networks or ("digits", *NETWORKS):
        for image in subjects.cases(name, options.first, options.images):
            for wanted in COMMON:
                case = with_flips(image, wanted)
                if case is None:
                    print(f"{name:9s}{image.number:4d} no σ found for {wanted}", flush=True)
                    continue
                yield common_row(case, options.seeds, options.truth)
                image = case


def common_row(case: Case, seeds: int, samples: int) -> dict[str, Any] | None:
    """One line, printed; plain sampling needs p(1 − p)(1.96/0.01)² runs. None where no seed has an answer.

    p is the share of so many plain samples, or without any the mean over seeds, each of which may be off by a point.
    """
    estimated = partial(case.estimate, relative_error=1e-9, absolute_error=ABSOLUTE)
    by_seed = answers(estimated, seeds)
    if not by_seed:
        return None
    estimates = list(by_seed.values())
    p, hold = statistics.fmean(float(estimate.probability) for estimate in estimates), None
    if samples:
        true = plain(case.margin(), samples, seed=SEARCH_SEED)
        truth = Truth(case.name, true.probability, true.relative_error * true.probability, estimated)
        p, hold = truth.probability, sum(truth.in_interval_of(estimate) for estimate in estimates)
    runs = [int(estimate.runs) for estimate in estimates]
    needed = p * (1 - p) * (QUANTILE / ABSOLUTE) ** 2
    row = {
        "case": case.name,
        "p": p,
        "width": max(float(each.interval[1] - each.interval[0]) / 2 for each in estimates),
        "runs": statistics.median(runs),
        "most": max(runs),
        "plain": needed,
        "share": statistics.median(runs) / max(needed, 1e-300),
        "seeds": len(estimates),
        "hold": hold,
    }
    print(
        f"{case.name:24} {p:6.3f} {row['width']:7.4f} {row['runs']:7.0f} {row['most']:7d} {needed:7.0f} "
        f"{row['share']:6.2f} {'' if hold is None else hold:>5}",
        flush=True,
    )
    for seed, each in by_seed.items():
        if abs(float(each.probability) - p) > 2 * ABSOLUTE or not bool(each.met):
            print(f"    seed {seed}: {each!r}, met {bool(each.met)}")
    return row


def common_summary(rows: list[dict[str, Any]]) -> None:
    """Print the share of plain sampling's runs, over probabilities from 0.01 to 0.99, and how many intervals hold."""
    rows = [row for row in rows if ABSOLUTE <= row["p"] <= 1 - ABSOLUTE]
    if not rows:
        return
    worst = max(rows, key=lambda row: row["share"])
    middle = statistics.median(row["share"] for row in rows)
    print(f"of plain sampling's runs: median {middle:.2f}, most {worst['share']:.2f} ({worst['case']})")
    known = [row for row in rows if row["hold"] is not None]
    if known:
        hold, seeds = sum(row["hold"] for row in known), sum(row["seeds"] for row in known)
        print(f"{hold} of {seeds} intervals hold the share of plain samples ({hold / seeds:.1%})")


MODES = {"table": (table, table_summary), "coverage": (coverage, coverage_summary), "common": (common, common_summary)}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("gallery", type=Path)
    parser.add_argument("mode", nargs="?", choices=list(MODES), default="table")
    parser.add_argument("--networks", nargs="+")
    parser.add_argument("--images", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="the first image")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--decades", nargs="+", type=int, default=list(DECADES), help="6 for 1e-6")
    parser.add_argument("--probabilities", nargs="+", type=float, default=list(KNOWN), help="of the known networks")
    names = [shape.name for shape in SHAPES]
    parser.add_argument("--shapes", nargs="+", choices=names, default=names, help="of the known networks")
    parser.add_argument("--particles", type=int, default=PARTICLES, help="of the others' methods; 0: without them")
    parser.add_argument("--faces", type=Path, help="the folder of FER2013")
    parser.add_argument("--truth", type=int, default=0, help="plain samples that are the truth")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args(words)
    print(machine())
    rows_of, summary = MODES[options.mode]
    subjects = Subjects(options.gallery.resolve(), options.faces, torch.device(options.device))
    rows = [row for row in rows_of(options, subjects) if row is not None]
    if rows:
        summary(rows)
    if options.record is not None:
        record = {"machine": machine(), "command": " ".join(words or sys.argv[1:]), "rows": rows}
        options.record.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
