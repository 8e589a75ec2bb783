"""How many intervals of flip probabilities hold the truth, measured run by run, with a file that keeps every result.

`python -m benchmarks.coverage GALLERY STORE [--seconds 500] [--runs 200] [--networks digits mlp known] [--images 5]
[--decades 2 3 4] [--truth 10000000] [--truths FILE] [--device cpu]`. What is in the store is not computed again.
Each call goes on for `--seconds` and prints a table of what is known so far; call it until it says that nothing is
missing.

A case is an image with noise at which flips are as rare as wanted. Its truth is the share of flips among plain samples,
which are drawn until `ENOUGH` have flipped. With `--truths` truths come from a file instead, found with more samples
than a CPU can take (such as `records/flips-truths.json`). `known` are networks whose flips are known exactly, from 0.5
to 1e-12 (`benchmarks.flips`). Every network gets `--runs` runs in all, which its cases take in turn.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import netmoments as nm
from benchmarks.flips import (
    RELATIVE,
    SHAPES,
    SIZE,
    Case,
    Shape,
    Subjects,
    Truth,
    flips_of,
    flips_with_seed,
    threshold_at,
    with_flips,
)
from benchmarks.measure import machine
from benchmarks.rare_baselines import plain

KNOWN = "known"
"""Stands among the networks for all those whose flips are known exactly."""
PROBABILITIES = (0.5, 0.1, 1e-2, 1e-4, 1e-6, 1e-9, 1e-12)
ENOUGH = 2500
"""The flips among the plain samples of a truth: they give an error of 2 %, where intervals are ±20 %."""
PIECE = 50_000
"""Plain samples that are drawn at a time."""
FACTOR = 3.0
"""An estimate is far off if it is wrong by more than this factor."""


@dataclass(eq=False)
class Store:
    """A file with a line of JSON for each piece of work that was done, by the name of the work."""

    path: Path
    lines: dict[str, dict[str, Any]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.path.exists():
            for line in self.path.read_text().splitlines():
                try:
                    entry = json.loads(line)
                except json.JSONDecodeError:  # the last one, if the process was killed
                    continue
                self.lines[entry["work"]] = entry

    def once(self, work: str, compute: Callable[[], dict[str, Any]], clock: Clock) -> dict[str, Any]:
        """The result of a piece of work, from the file or computed and kept now; raises where the time is over."""
        if work not in self.lines:
            clock.require_time()
            line = {"work": work, **compute()}
            with self.path.open("a") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
            self.lines[work] = line
        return self.lines[work]


class TimeIsOver(Exception):
    """The seconds of this call are over."""


@dataclass(frozen=True)
class Clock:
    end: float

    def require_time(self) -> None:
        if time.monotonic() > self.end:
            raise TimeIsOver


def sampled_truth(store: Store, name: str, case: Case, most: int, clock: Clock) -> Truth:
    """The truth of a case from at most so many plain samples, drawn piece by piece."""
    samples = flips = 0
    while samples < most and flips < ENOUGH:

        def piece(seed: int = samples // PIECE) -> dict[str, Any]:
            return {"flips": round(plain(case.margin(), PIECE, seed=seed).probability * PIECE)}

        flips += store.once(f"{name}, plain samples from {samples}", piece, clock)["flips"]
        samples += PIECE
    p = flips / samples
    error = math.sqrt(p * (1 - p) / samples)
    return Truth(name, p, error, lambda seed: case.estimate(seed, relative_error=RELATIVE))


def sampled_truths(store: Store, network: str, options: argparse.Namespace, clock: Clock) -> Iterator[Truth]:
    """Images of a network with noise at which flips are as rare as wanted, where plain samples show any."""
    subjects = Subjects(options.gallery.resolve(), None, torch.device(options.device))
    for image in subjects.cases(network, 0, options.images):
        for decade in options.decades:
            name = f"{network} {image.number}, 1e-{decade}"

            def noise(image: Case = image, decade: int = decade) -> dict[str, Any]:
                case = with_flips(image, 10.0**-decade)
                return {"sigma": None if case is None else case.sigma}

            sigma = store.once(f"{name}, noise", noise, clock)["sigma"]
            if sigma is None:
                continue
            truth = sampled_truth(store, name, replace(image, sigma=sigma), options.truth, clock)
            if truth.probability > 0:
                yield truth


def truths_of_file(path: Path, network: str, options: argparse.Namespace) -> Iterator[Truth]:
    """The truths of a network in a file: a list of {"network", "image", "sigma", "p", "samples"}."""
    subjects = Subjects(options.gallery.resolve(), None, torch.device(options.device))
    for row in (row for row in json.loads(path.read_text()) if row["network"] == network):
        case = replace(next(subjects.cases(network, row["image"], 1)), sigma=row["sigma"])
        error = math.sqrt(row["p"] * (1 - row["p"]) / row["samples"])
        yield Truth(case.name, row["p"], error, partial(case.estimate, relative_error=RELATIVE))


def known_truths(store: Store, clock: Clock) -> Iterator[Truth]:
    """Every shape of `benchmarks.flips` at every probability that it can have."""
    noise = nm.Gaussian(torch.zeros(SIZE, dtype=torch.float64), std=1.0)
    for shape in SHAPES:
        for wanted in PROBABILITIES:

            def exact(shape: Shape = shape, wanted: float = wanted) -> dict[str, Any]:
                threshold = threshold_at(shape, wanted)
                return {"threshold": threshold, "p": flips_of(shape, threshold)}

            name = f"{shape.name}, {wanted:g}"
            known = store.once(f"{name}, threshold", exact, clock)
            if abs(known["p"] / wanted - 1) < 0.01:  # else g has an atom there, as relu has at 0
                network = shape.network(known["threshold"])
                yield Truth(name, known["p"], 0.0, partial(flips_with_seed, network, noise))


def truths(store: Store, network: str, options: argparse.Namespace, clock: Clock) -> list[Truth]:
    if options.truths is not None:
        return list(truths_of_file(options.truths, network, options))
    return list(known_truths(store, clock) if network == KNOWN else sampled_truths(store, network, options, clock))


def answer(truth: Truth, seed: int) -> dict[str, Any]:
    """One run: the estimate with this seed, and whether its interval holds the truth."""
    estimate: nm.FlipProbability = truth.estimate(seed)
    low, high = estimate.interval.tolist()
    return {
        "p": float(estimate.probability),
        "interval": [low, high],
        "holds": truth.in_interval_of(estimate),
        "runs": int(estimate.runs),
        "agreed": bool(estimate.agreed),
        "met": bool(estimate.met),
        "route": estimate.route[0],
    }


def answers(store: Store, cases: Sequence[Truth], runs: int, clock: Clock) -> dict[str, list[dict[str, Any]]]:
    """The runs of all cases, by name. Cases take turns, so that all have about as many whenever the time is over."""
    by_name: dict[str, list[dict[str, Any]]] = {truth.name: [] for truth in cases}
    for run in range(runs if cases else 0):
        seed, truth = run // len(cases), cases[run % len(cases)]
        try:
            by_name[truth.name].append(store.once(f"{truth.name}, seed {seed}", partial(answer, truth, seed), clock))
        except TimeIsOver:
            continue  # some of the later ones may be kept
    return by_name


def printed(network: str, cases: Sequence[Truth], by_name: dict[str, list[dict[str, Any]]]) -> tuple[int, int]:
    """Print a line for each case and one for all; return how many runs there are, and how many hold the truth."""
    print(f"{network:32} {'truth':>9} {'±':>6} {'runs':>5} {'hold':>5} {'ratios':>13} {'of the network':>15}")
    ratios, total, hold = list[float](), 0, 0
    for truth in cases:
        rows = by_name[truth.name]
        if not rows:
            continue
        case_ratios = [row["p"] / truth.probability for row in rows]
        held = sum(row["holds"] for row in rows)
        total, hold, ratios = total + len(rows), hold + held, ratios + case_ratios
        print(
            f"{truth.name:32} {truth.probability:9.3g} {truth.error / truth.probability:6.1%} {len(rows):5d} {held:5d} "
            f"{min(case_ratios):6.2f} {max(case_ratios):6.2f} {statistics.median(row['runs'] for row in rows):15,.0f}",
            flush=True,
        )
    if total:
        far = sum(not 1 / FACTOR < ratio < FACTOR for ratio in ratios)
        print(
            f"{network}: {hold} of {total} intervals of 95 % hold the truth ({hold / total:.1%}); ratios "
            f"{min(ratios):.2f} to {max(ratios):.2f}, {far} off by more than a factor {FACTOR:g}\n"
        )
    return total, hold


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("gallery", type=Path)
    parser.add_argument("store", type=Path)
    parser.add_argument("--seconds", type=float, default=500.0)
    parser.add_argument("--runs", type=int, default=200, help="of each network")
    parser.add_argument("--networks", nargs="+", default=["digits", "mlp", KNOWN])
    parser.add_argument("--images", type=int, default=5)
    parser.add_argument("--decades", nargs="+", type=int, default=[2, 3, 4], help="3 for 1e-3")
    parser.add_argument("--truth", type=int, default=10_000_000, help="plain samples, at most")
    parser.add_argument("--truths", type=Path, help="a file of them, in place of samples")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(words)
    print(machine())
    store, clock = Store(options.store), Clock(time.monotonic() + options.seconds)
    missing = False
    for network in options.networks:
        try:
            cases = truths(store, network, options, clock)
        except TimeIsOver:
            print(f"{network}: the truth is not known yet; call it again\n")
            missing = True
            continue
        total, _ = printed(network, cases, answers(store, cases, options.runs, clock))
        missing = missing or total < options.runs
    print("runs are missing: call it again" if missing else "nothing is missing")


if __name__ == "__main__":
    main()
