"""How often noise flips the answer: ours beside the field's, intervals beside the truth, runs beside plain sampling.

`python -m benchmarks.flips GALLERY [table|coverage|common] [--networks NAME …] [--images 5] [--first 0] [--seeds N]
[--decades 4 6 …] [--particles 1000] [--faces FOLDER] [--truth SAMPLES] [--device cuda] [--record FILE]`. The gallery is
a folder with `networks.py`, as for `benchmarks.sampler`; `lenet`, `digits` and `faces` come with the library, MNIST is
needed, and FER2013 in the folder of `--faces`. Images are given noise at which flips are as rare as wanted.

    table     runs for a standard error of 10 %, everything included, with splitting and the last particle beside it
    coverage  how many intervals of 95 % hold the truth: networks whose flips are known exactly; with `--truth`, the
              networks named, as rare as so many plain samples can tell
    common    runs for ±0.01 where flips are common, by those of plain samples; with `--truth`, how many intervals hold
              the share of so many plain samples
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
from netmoments.normal import distribution, gauss_legendre

RELATIVE, ABSOLUTE = 0.1, 0.01
QUANTILE = 1.959964
NETWORKS = ("lenet", "faces", "resnet20", "vit")
DECADES = (4, 5, 6, 7, 8, 9, 12)
COMMON = (0.01, 0.03, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99)
KNOWN = (0.5, 0.1, 1e-2, 1e-3, 1e-4, 1e-6, 1e-9, 1e-12, 1e-15)
START = {"lenet": 0.3, "digits": 0.2, "faces": 0.03}
"""Noise to begin with, where σ is looked for; 0.2 for others."""
NEAR = 0.25
"""How near Φ⁻¹(p) must come to what is wanted: about half a decade."""
NEAR_COMMON = 0.1
"""The same for common flips."""
ROUGHLY = 0.3
"""The relative error with which σ is looked for."""
SEARCHES = 10
SEARCH_SEED = 10**6
ENOUGH = 100
"""Flips among the plain samples that are the truth, at least."""
SIZE = 40
"""Inputs of networks with known flips."""


# Networks whose flips are known


@dataclass(frozen=True)
class Shape:
    """g(z) = Σ aᵢ relu(uᵢᵀz + bᵢ) of two standard normal numbers z: a network flips where g > c."""

    name: str
    units: tuple[tuple[float, float, float, float], ...]
    """u₁, u₂, b and a of each."""

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """u (h, 2), b (h,), a (h,)."""
        every = torch.tensor(self.units, dtype=torch.float64)
        return every[:, :2], every[:, 2], every[:, 3]

    def network(self, threshold: float) -> nn.Module:
        """Scores (c, g) of `SIZE` inputs, z being two orthonormal directions of them."""
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
    """Units of random directions and places, all about as steep."""
    made = torch.randn(units, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return Shape(f"random {seed}", tuple(tuple(row) for row in made.tolist()))


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
    """P(Σ aᵢ relu(sᵢ z + oᵢ) > c) for one z ~ N(0, 1), (N,), from sᵢ, aᵢ (h,) and oᵢ (N, h): exact.

    The sum is linear between the places −o/s where a unit opens, so that each piece is above c on an interval.
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
    """Gauss–Legendre nodes and weights of 8 points in each of so many parts of (−12, 12)."""
    nodes, weights = (torch.tensor(x, dtype=torch.float64) for x in gauss_legendre(8))
    width = 2 * reach / count
    starts = -reach + width * torch.arange(count, dtype=torch.float64)
    return (starts.unsqueeze(1) + width * nodes).flatten(), (width * weights).repeat(count)


def flips_of(shape: Shape, threshold: float) -> float:
    """P(g > c): along one direction exact, over the other by quadrature, neither of which any kink is parallel to."""
    u, b, a = shape.tensors
    turn = torch.tensor([[math.cos(1), -math.sin(1)], [math.sin(1), math.cos(1)]], dtype=torch.float64)
    u = u @ turn
    second, weights = panels()
    density = torch.exp(-0.5 * second.square()) / math.sqrt(2 * math.pi)
    return float(weights @ (density * share_above(u[:, 0], second.unsqueeze(1) * u[:, 1] + b, a, threshold)))


def threshold_at(shape: Shape, probability: float) -> float:
    """c with P(g > c) = p, by bisection."""
    low, high = -200.0, 200.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if flips_of(shape, middle) > probability else (low, middle)
    return 0.5 * (low + high)


# Networks and images


@dataclass(frozen=True, eq=False)
class Case:
    """One image of a network with noise."""

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

    def found(self, seed: int, **options: Any) -> nm.FlipProbability:
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
        """Images of a network, each with the noise to begin with."""
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
    """The same image with σ at which flips are about so likely; None where none was found."""
    wanted, near = normal_quantile(probability), NEAR if probability < ABSOLUTE else NEAR_COMMON
    points: list[tuple[float, float]] = []
    for search in range(SEARCHES):
        found = case.found(SEARCH_SEED + search, relative_error=ROUGHLY * near / NEAR, runs=100_000)
        p = min(max(float(found.probability), 1e-300), 1 - 1e-6)
        here = normal_quantile(p)
        if abs(here - wanted) < near:
            return case
        points.append((1 / case.sigma, here))
        case = replace(case, sigma=1 / next_inverse(points, wanted))
    return None


def next_inverse(points: Sequence[tuple[float, float]], wanted: float) -> float:
    """1/σ at which to look next for Φ⁻¹(p) = `wanted`, after points (1/σ, Φ⁻¹(p)).

    Φ⁻¹(p) is linear in 1/σ for a linear network, 0 at 1/σ = 0, and nearly so for others: on the line through the points
    on both sides of what is wanted; before there are both, through 0 and the last point, at most twice or half as far.
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


def answers(found: Callable[[int], nm.FlipProbability], seeds: int) -> dict[int, nm.FlipProbability]:
    """What is found with each seed; an error is printed, and the seed left out."""
    kept = {}
    for seed in range(seeds):
        try:
            kept[seed] = found(seed)
        except Exception as error:
            print(f"    seed {seed}: {type(error).__name__}: {error}", flush=True)
    return kept


# Ours beside the field


def table(asked: argparse.Namespace, subjects: Subjects) -> Iterator[dict[str, Any] | None]:
    """A row for each network, image and decade."""
    print(
        f"runs for a standard error of 10 %; ours: median of {asked.seeds} seeds; splitting and last particle: "
        f"{asked.particles:,} particles, {MOVES} moves, as if moves made them independent\n"
        f"{'':24} {'p':>8} {'rel.':>5} {'second':>8} {'runs':>7} {'most':>7}   {'splitting':>17}   "
        f"{'last particle':>17}   {'plain':>7}"
    )
    for name in asked.networks or NETWORKS:
        for image in subjects.cases(name, asked.first, asked.images):
            for decade in asked.decades:
                case = with_flips(image, 10.0**-decade)
                if case is None:
                    print(f"{name:9s}{image.number:4d} no σ found for 1e-{decade}", flush=True)
                    continue
                yield table_row(case, asked)
                image = case


def table_row(case: Case, asked: argparse.Namespace) -> dict[str, Any] | None:
    """One line, printed; None where no seed has an answer."""
    by_seed = answers(partial(case.found, relative_error=RELATIVE), asked.seeds)
    if not by_seed:
        return None
    found = list(by_seed.values())
    p = [float(one.probability) for one in found]
    runs = [int(one.runs) for one in found]
    middle = statistics.median(p)
    row: dict[str, Any] = {
        "case": case.name,
        "network": case.network,
        "p": middle,
        "relative": statistics.median(float(one.standard_error / one.probability) for one in found),
        "second": float(found[0].agreement),
        "runs": statistics.median(runs),
        "most": max(runs),
        "plain": plain_runs(middle, RELATIVE) if middle > 0 else math.inf,
    }
    rivals: dict[str, Callable[..., RareEstimate]] = {"splitting": splitting, "last particle": last_particle}
    shown = []
    for name, rival in rivals.items():
        other = rival(case.margin(), seed=0, particles=asked.particles) if asked.particles else None
        row[name] = None if other is None else {"p": other.probability, "runs": other.runs_for(RELATIVE)}
        shown.append("" if other is None else f"{other.probability:.2e} {other.runs_for(RELATIVE):8.0f}")
    print(
        f"{case.name:24} {row['p']:8.2e} {row['relative']:5.3f} {row['second']:8.2e} {row['runs']:7.0f} "
        f"{row['most']:7d}   {shown[0]:>17}   {shown[1]:>17}   {row['plain']:7.1e}",
        flush=True,
    )
    for seed, one in by_seed.items():
        unlike = not 0.5 < float(one.probability) / max(middle, 1e-300) < 2
        if unlike or not bool(one.met) or not bool(one.agreed):
            print(f"    seed {seed}: {one!r}, {one.route[0]}, agreed {bool(one.agreed)}, met {bool(one.met)}")
    return row


def table_summary(rows: list[dict[str, Any]]) -> None:
    """Medians and the most, for 1e-4 … 1e-9 and beyond."""
    for name in dict.fromkeys(row["network"] for row in rows):
        for what, low, high in (("1e-4 … 1e-9", 1e-10, 1.0), ("rarer", 0.0, 1e-10)):
            runs = [row["runs"] for row in rows if row["network"] == name and low <= row["p"] < high]
            if runs:
                print(f"{name}, {what}: median {statistics.median(runs):,.0f} runs, most {max(runs):,.0f}")


# Intervals beside the truth


@dataclass(frozen=True, eq=False)
class Truth:
    """A case whose flip probability is known, with a standard error of that."""

    name: str
    probability: float
    error: float
    found: Callable[[int], nm.FlipProbability]

    def in_interval_of(self, one: nm.FlipProbability) -> bool:
        """Whether the interval holds the truth, within twice its own error."""
        low, high = one.interval.tolist()
        return bool(low - 2 * self.error <= self.probability <= high + 2 * self.error)


def known_truths(names: Sequence[str], probabilities: Sequence[float]) -> Iterator[Truth]:
    """Shapes of these names, at every probability that they have."""
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


def sampled_truths(asked: argparse.Namespace, subjects: Subjects) -> Iterator[Truth]:
    """Images with noise, as rare as so many plain samples can tell."""
    for name in asked.networks or NETWORKS:
        for image in subjects.cases(name, asked.first, asked.images):
            for decade in asked.decades:
                if asked.truth * 10.0**-decade < ENOUGH:
                    continue
                case = with_flips(image, 10.0**-decade)
                if case is None:
                    continue
                true = plain(case.margin(), asked.truth, seed=SEARCH_SEED)
                error = true.relative_error * true.probability
                yield Truth(case.name, true.probability, error, partial(case.found, relative_error=RELATIVE))


def coverage(asked: argparse.Namespace, subjects: Subjects) -> Iterator[dict[str, Any] | None]:
    """A row for each case: how many intervals hold the truth."""
    print(f"{asked.seeds} seeds\n{'':32} {'truth':>9} {'hold':>5} {'agree':>5} {'met':>5} {'ratios':>13} {'runs':>7}")
    for truth in sampled_truths(asked, subjects) if asked.truth else known_truths(asked.shapes, asked.probabilities):
        yield coverage_row(truth, asked.seeds)


def coverage_row(truth: Truth, seeds: int) -> dict[str, Any] | None:
    """One line, printed, with what missed; None where no seed has an answer."""
    p, by_seed = truth.probability, answers(truth.found, seeds)
    if not by_seed:
        return None
    found = list(by_seed.values())
    holds = [truth.in_interval_of(one) for one in found]
    ratios = [float(one.probability) / p for one in found]
    row = {
        "case": truth.name,
        "truth": p,
        "seeds": seeds,
        "hold": sum(holds),
        "agree": sum(bool(one.agreed) for one in found),
        "met": sum(bool(one.met) for one in found),
        "least": min(ratios),
        "most": max(ratios),
        "runs": statistics.median(int(one.runs) for one in found),
    }
    print(
        f"{truth.name:32} {p:9.3g} {row['hold']:5d} {row['agree']:5d} {row['met']:5d} "
        f"{row['least']:6.2f} {row['most']:6.2f} {row['runs']:7.0f}",
        flush=True,
    )
    for (seed, one), held, ratio in zip(by_seed.items(), holds, ratios, strict=True):
        if not held or not 0.5 < ratio < 2:
            missed = "" if held else "missed, "
            print(
                f"    seed {seed}: {missed}ratio {ratio:.3g}, {one!r}, second {float(one.agreement):.3g}, "
                f"agreed {bool(one.agreed)}, {one.route[0]}",
                flush=True,
            )
    return row


def coverage_summary(rows: list[dict[str, Any]]) -> None:
    total, hold = sum(row["seeds"] for row in rows), sum(row["hold"] for row in rows)
    worst = max(rows, key=lambda row: max(row["most"], 1 / max(row["least"], 1e-300)))
    seldom = min(rows, key=lambda row: row["hold"])
    print(
        f"{hold} of {total} intervals hold the truth ({hold / total:.1%}), least {seldom['hold']} of {seldom['seeds']} "
        f"({seldom['case']}); worst ratios {worst['least']:.2f} to {worst['most']:.2f} ({worst['case']})"
    )


# Common flips


def common(asked: argparse.Namespace, subjects: Subjects) -> Iterator[dict[str, Any] | None]:
    """A row for each network, image and probability."""
    heads = f"{'p':>6} {'±':>7} {'runs':>7} {'most':>7} {'plain':>7} {'share':>6} {'hold':>5}"
    print(f"±{ABSOLUTE}; {asked.seeds} seeds\n{'':24} {heads}")
    for name in asked.networks or ("digits", *NETWORKS):
        for image in subjects.cases(name, asked.first, asked.images):
            for wanted in COMMON:
                case = with_flips(image, wanted)
                if case is None:
                    print(f"{name:9s}{image.number:4d} no σ found for {wanted}", flush=True)
                    continue
                yield common_row(case, asked.seeds, asked.truth)
                image = case


def common_row(case: Case, seeds: int, samples: int) -> dict[str, Any] | None:
    """One line, printed; plain sampling needs p(1 − p)(1.96/0.01)² runs. None where no seed has an answer.

    p is the share of so many plain samples; without any, the mean over seeds, each of which may be off by a point.
    """
    found_with = partial(case.found, relative_error=1e-9, absolute_error=ABSOLUTE)
    by_seed = answers(found_with, seeds)
    if not by_seed:
        return None
    found = list(by_seed.values())
    p, hold = statistics.fmean(float(one.probability) for one in found), None
    if samples:
        true = plain(case.margin(), samples, seed=SEARCH_SEED)
        truth = Truth(case.name, true.probability, true.relative_error * true.probability, found_with)
        p, hold = truth.probability, sum(truth.in_interval_of(one) for one in found)
    runs = [int(one.runs) for one in found]
    needed = p * (1 - p) * (QUANTILE / ABSOLUTE) ** 2
    row = {
        "case": case.name,
        "p": p,
        "width": max(float(one.interval[1] - one.interval[0]) / 2 for one in found),
        "runs": statistics.median(runs),
        "most": max(runs),
        "plain": needed,
        "share": statistics.median(runs) / max(needed, 1e-300),
        "seeds": len(found),
        "hold": hold,
    }
    print(
        f"{case.name:24} {p:6.3f} {row['width']:7.4f} {row['runs']:7.0f} {row['most']:7d} {needed:7.0f} "
        f"{row['share']:6.2f} {'' if hold is None else hold:>5}",
        flush=True,
    )
    for seed, one in by_seed.items():
        if abs(float(one.probability) - p) > 2 * ABSOLUTE or not bool(one.met):
            print(f"    seed {seed}: {one!r}, met {bool(one.met)}")
    return row


def common_summary(rows: list[dict[str, Any]]) -> None:
    """Of flips that are common, from 0.01 to 0.99."""
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
    asked = parser.parse_args(words)
    print(machine())
    rows_of, summary = MODES[asked.mode]
    subjects = Subjects(asked.gallery.resolve(), asked.faces, torch.device(asked.device))
    rows = [row for row in rows_of(asked, subjects) if row is not None]
    if rows:
        summary(rows)
    if asked.record is not None:
        kept = {"machine": machine(), "command": " ".join(words or sys.argv[1:]), "rows": rows}
        asked.record.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
