"""Readings of the paper's sparse and smooth attacks: ways to pose the problem, and ways to count the outcome.

The problem is the paper's: the least ‖μ‖₁ + TV(μ) for which the linearized network's expected scores are as asked, with
γ = 0 and no limits on pixels. A `Way` changes one thing in this problem; every solution is counted in every way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from netmoments.affine_relu_affine import AffineReluAffine
from netmoments.attacks.evaluation import noisy_scores
from netmoments.attacks.margins import ClassPairs, ExpectedMargins, Formula, LinearizedScores
from netmoments.attacks.primal_dual import Iterate, Problem, cheapest, descend, finished
from netmoments.checks import random_seed
from netmoments.linearize.two_stage import linearized_at
from netmoments.network.model import NetworkModel
from netmoments.network.zoo import Normalised
from netmoments.precision import full_precision
from netmoments.sweep.item import Columns
from reproduction.faces import Faces
from reproduction.image_sweeps import blocks, same_bits

GREY_LEVELS = 255
RIVALS = 3
"""Without a target, so many of the best other classes are tried, and the cheapest solution is kept."""
TARGETED, FREE = "targeted", "any other class"
ZERO = 1e-3
"""A pixel that changes by at most so many grey levels counts as unchanged, as the paper says."""
NO_TARGET = -1


@dataclass(frozen=True)
class Way:
    """How the problem is posed and solved; the defaults are those of the paper, as far as it states them.

    Args:
        layer: the ReLU that is kept, counted from 0; the paper's l minus 1.
        gamma: how far the expected scores have to be apart.
        sigma: standard deviation of the noise, in the units of the pixels.
        white: the largest value of a pixel, 1 or 255.
        iterations: steps of the solver.
        again: how often the network is linearized again at the last solution, and the problem solved from there.
        scales: multiples βμ that samples are taken around. The norms are homogeneous: with βμ in the constraint and
            samples from N(μ, I) it is the multiple 1/β, and with samples from N(βμ, I) any β gives the same noise.
    """

    layer: int = -1
    gamma: float = 0.0
    sigma: float = 1 / GREY_LEVELS
    white: float = 1.0
    iterations: int = 400
    again: int = 0
    scales: tuple[float, ...] = (1.0,)

    def called(self, name: str, turn: int, scale: float) -> str:
        """The name of a row's reading: that of the way, and which of its solutions it is.

        >>> Way().called("l = 3", 0, 1.0), Way(again=2).called("linearized again", 2, 1.0)
        ('l = 3', 'linearized again, 2 ×')
        """
        turns = f", {turn} ×" if turn else ""
        scales = f", around {scale:g} μ" if scale != 1 else ""
        return f"{name}{turns}{scales}"

    def is_dial(self, scale: float) -> bool:
        """Whether the row is one setting of a dial (a multiple of μ, or γ) that could be turned to give any rate."""
        return scale != 1 or self.gamma > 0

    @property
    def wanted(self) -> list[tuple[int, float]]:
        """The turns and scales that are rows; the first turn is the way without `again`, and so is not one of them."""
        turns = range(1, self.again + 1) if self.again else (0,)
        return [(turn, scale) for turn in turns for scale in self.scales]


class Solution(NamedTuple):
    """The shifts of N cases with one problem each, and the problem and linearized networks that gave them."""

    problem: Problem
    iterate: Iterate
    networks: AffineReluAffine
    of: Tensor
    """The network of each case, (N,)."""

    @property
    def shift(self) -> Tensor:
        """(N, n)."""
        return self.iterate.shift.squeeze(1)


@dataclass(frozen=True, eq=False)
class Cases:
    """Images (N, C, H, W) to be attacked, each with a target, or −1 for any class other than the label."""

    network: nn.Module
    images: Tensor
    labels: Tensor
    targets: Tensor

    @cached_property
    def model(self) -> NetworkModel:
        return NetworkModel.of(self.network, self.images[:1], "readings")

    @property
    def everything(self) -> Tensor:
        """All classes, (N, d)."""
        return torch.arange(self.model.outputs, device=self.images.device).expand(len(self.images), -1)

    def posed(self, way: Way, points: Tensor, pairs: ClassPairs) -> tuple[Problem, AffineReluAffine]:
        """The problems for classes (N, R, K), linearized at some points."""
        networks = linearized_at(self.model, points, way.layer, self.everything)
        scores = LinearizedScores.of(networks, self.images)
        margins = Formula(self.images, self.everything, networks, scores).margins(pairs)
        flat = torch.full_like(self.images.flatten(1), torch.inf)
        sigma = self.images.new_full((len(self.images),), way.sigma)
        gamma = torch.full_like(margins.offset, way.gamma)
        return Problem(margins, sigma, gamma, -flat, flat, self.images.shape[1:]), networks

    def take(self, places: Tensor, targets: Tensor) -> Cases:
        return Cases(self.network, self.images[places], self.labels[places], targets)


def pairs_towards(labels: Tensor, classes: int) -> ClassPairs:
    """Problems with every class but the label as the target, (N, d − 1, d − 1): all other classes below it."""
    larger, smaller = [], []
    for label in labels.tolist():
        targets = [k for k in range(classes) if k != label]
        larger.append([[k for k in range(classes) if k != target] for target in targets])
        smaller.append([[target] * (classes - 1) for target in targets])
    return ClassPairs(*(torch.tensor(part, device=labels.device) for part in (larger, smaller)))


def pairs_away(scores: Tensor, labels: Tensor) -> ClassPairs:
    """Problems that put the label below each of its best rivals, (N, R, 1)."""
    others = scores.scatter(1, labels.unsqueeze(1), -torch.inf)
    smaller = others.topk(min(RIVALS, scores.shape[1] - 1), dim=1).indices.unsqueeze(-1)
    return ClassPairs(labels.reshape(-1, 1, 1).expand_as(smaller), smaller)


def solutions(cases: Cases, way: Way, task: str) -> Iterator[tuple[int, Cases, Solution]]:
    """For each wanted turn, the cases (one for each problem) and their solution; the images come without targets."""
    with torch.no_grad(), full_precision():
        scores = cases.network(cases.images)
    classes = scores.shape[1]
    pairs = pairs_towards(cases.labels, classes) if task == TARGETED else pairs_away(scores, cases.labels)
    problem, networks = cases.posed(way, cases.images, pairs)
    iterate = finished(problem, descend(problem, Iterate.start(problem), way.iterations))
    count, problems, _ = pairs.larger.shape
    everyone = torch.arange(count, device=scores.device)
    if task == TARGETED:
        places = everyone.repeat_interleave(problems)
        chosen = torch.arange(problems, device=scores.device).repeat(count)
        own = cases.take(places, pairs.smaller[places, chosen, 0])
    else:
        places, chosen = everyone, cheapest(problem, iterate)[1].squeeze(1)
        own = cases.take(places, torch.full_like(places, NO_TARGET))
    picked = ClassPairs(*(part[places, chosen].unsqueeze(1) for part in pairs))
    solution = Solution(_one_each(problem, places, chosen), _picked(iterate, places, chosen), networks, places)
    for turn in range(way.again + 1):
        if turn:
            points = own.images + solution.shift.unflatten(1, own.images.shape[1:])
            problem, networks = own.posed(way, points, picked)
            going_on = descend(problem, solution.iterate, way.iterations, smoother=1.0)
            each = torch.arange(len(points), device=points.device)
            solution = Solution(problem, finished(problem, going_on), networks, each)
        if turn in {wanted for wanted, _ in way.wanted}:
            yield turn, own, solution


def _picked(iterate: Iterate, places: Tensor, chosen: Tensor) -> Iterate:
    parts = (iterate.shift, iterate.pair, iterate.multipliers, iterate.kept)
    return Iterate(*(part[places, chosen].unsqueeze(1) for part in parts))


def _one_each(problem: Problem, places: Tensor, chosen: Tensor) -> Problem:
    """Split problems (image, number) into one per case; networks stay shared, so do not ask for the margins' own."""
    return replace(
        problem,
        margins=_Picked(problem.margins, places, chosen),  # type: ignore[arg-type]
        sigma=problem.sigma[places],
        gamma=problem.gamma[places, chosen].unsqueeze(1),
        lower=problem.lower[places],
        upper=problem.upper[places],
    )


@dataclass(frozen=True, eq=False)
class _Picked:
    """Margins of selected problems of selected images, at shifts (cases, 1, n), without copying the networks."""

    margins: ExpectedMargins
    places: Tensor
    chosen: Tensor

    def at(self, shift: Tensor, sigma: Tensor) -> Tensor:
        n, r = self.margins.offset.shape[:2]
        every = shift.new_zeros(n, r, shift.shape[-1])
        every[self.places, self.chosen] = shift.squeeze(1)
        levels = sigma.new_ones(n, r)
        levels[self.places, self.chosen] = sigma.squeeze(1)
        return self.margins.at(every, levels)[self.places, self.chosen].unsqueeze(1)


def counted(cases: Cases, solution: Solution, way: Way, scale: float, samples: int, seed: int) -> dict[str, np.ndarray]:
    """The outcome of `scale` times μ, counted in every way, with a row for each case."""
    shift = scale * solution.shift
    centres = cases.images + shift.unflatten(1, cases.images.shape[1:])
    margin = solution.problem.margins.at(shift.unsqueeze(1), solution.problem.sigma.unsqueeze(1)).amax((1, 2))
    with torch.no_grad(), full_precision():
        still = torch.cat([cases.network(part) for part in centres.split(256)])
    places = torch.arange(len(centres), device=centres.device)
    noise = noisy_scores(cases.network, centres, solution.problem.sigma, places, samples, seed)
    answers = torch.cat([scores.argmax(-1) for scores in noise])
    by_linearized = linearized_answers(solution, centres, way.sigma, samples, seed)
    touched = shift.abs() > ZERO * way.white / GREY_LEVELS
    found = {
        "source": cases.labels.to(torch.int16),
        "target": cases.targets.to(torch.int16),
        "margin": margin.double(),
        "expected": margin <= 0,
        "linearized": _as_asked(cases, by_linearized).double().mean(0),
        "still": _as_asked(cases, still.argmax(-1)),
        "share": _as_asked(cases, answers).double().mean(0),
        "other": (answers != cases.labels).double().mean(0),
        "sparsity": 1 - touched.double().mean(1),
        "length": solution.problem.objective(shift.unsqueeze(1)).squeeze(1).double() * (GREY_LEVELS / way.white),
    }
    return {name: value.cpu().numpy() for name, value in found.items()}


def _as_asked(cases: Cases, answers: Tensor) -> Tensor:
    """Whether answers (..., N) are the target or, where there is none, a class other than the label."""
    return torch.where(cases.targets == NO_TARGET, answers != cases.labels, answers == cases.targets)


def linearized_answers(solution: Solution, centres: Tensor, sigma: float, samples: int, seed: int) -> Tensor:
    """The answers of the linearized networks to samples of the noise, (samples, N)."""
    networks, answers = solution.networks, []
    generator = torch.Generator(centres.device).manual_seed(random_seed(seed, "linearized", 0))
    for centre, number in zip(centres.flatten(1), solution.of.tolist(), strict=True):
        normal = torch.randn(samples, len(centre), dtype=centre.dtype, device=centre.device, generator=generator)
        inputs = centre + sigma * normal
        with full_precision():
            scores = torch.relu(inputs @ networks.A[number].T + networks.c1[number]) @ networks.B[number].T
            scores = scores + networks.c2[number]
            scores = scores if networks.D is None else scores + inputs @ networks.D[number].T
        answers.append(scores.argmax(-1))
    return torch.stack(answers, 1)


@dataclass(frozen=True, eq=False)
class ReadingsSweep:
    """A sweep over images and ways. An item attacks a block of images one way, towards each target and any other class.

    Rows: image, task, reading, and the columns of `counted`. `few` holds the ways that are tried only on so many first
    images, because an early ReLU has a large Jacobian.
    """

    name: str
    faces: Faces
    ways: Mapping[str, Way]
    few: Mapping[str, int]
    block: int
    samples: int
    unit: ClassVar[str] = "images by readings"

    @property
    def configuration(self) -> dict[str, Any]:
        ways = {name: {**asdict(way), "scales": list(way.scales)} for name, way in self.ways.items()}
        return {
            **self.faces.description(), "ways": ways, "few": dict(self.few), "block": self.block,
            "samples": self.samples,
        }  # fmt: skip

    @property
    def _items(self) -> list[tuple[str, range]]:
        images = len(self.faces.images)
        return [
            (name, part) for name in self.ways for part in blocks(min(images, self.few.get(name, images)), self.block)
        ]

    @property
    def counts(self) -> Sequence[int]:
        return [len(part) for _, part in self._items]

    def prepare(self, device: str) -> Callable[[int], Columns]:
        faces, items = self.faces.on(device), self._items
        return lambda item: self.rows_of(faces, *items[item])

    def rows_of(self, faces: Faces, name: str, places: range) -> Columns:
        """The rows of some images by one way; the faces are on the device."""
        way, some = self.ways[name], slice(places.start, places.stop)
        images, labels, numbers = faces.images[some], faces.labels[some], faces.numbers[some]
        network = faces.network
        if way.white != 1:
            channels = images.shape[1]
            first = Normalised([0.0] * channels, [way.white] * channels).to(images.device)
            network, images = nn.Sequential(first, network).eval(), way.white * images
        seed = random_seed(faces.seed, self.name, int(numbers[0]))
        cases = Cases(network, images, labels, torch.full_like(labels, NO_TARGET))
        parts = []
        for task in (TARGETED, FREE):
            with same_bits():
                for turn, own, solution in solutions(cases, way, task):
                    each = len(own.images) // len(images)
                    for scale in way.scales:
                        rows = counted(own, solution, way, scale, self.samples, seed)
                        labelled = {
                            "image": numbers.numpy().astype(np.int32).repeat(each),
                            "task": np.array([task] * len(own.images)),
                            "reading": np.array([way.called(name, turn, scale)] * len(own.images)),
                        }
                        parts.append(labelled | rows)
        return {column: np.concatenate([part[column] for part in parts]) for column in parts[0]}
