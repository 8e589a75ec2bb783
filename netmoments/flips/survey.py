"""Many inputs together, sampled plainly: how often each class wins, and the scores, until every share is known well.

Most inputs of a set never flip, and a few hundred samples say so; the others get as many as they need. So a survey of
hundreds of inputs takes little more than its first round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from netmoments.flips.margins import Clock, own_seed
from netmoments.flips.result import QUANTILE, shares_interval
from netmoments.gaussian import Gaussian
from netmoments.memory import elements_together
from netmoments.network.model import NetworkModel
from netmoments.precision import full_precision
from netmoments.progress import progress_bar
from netmoments.sampling.fast_network import FastNetwork, fast_network

GROWTH = 4
"""A round has at most so many times the samples of all before."""
ENOUGH = 1.05
"""More samples than the shares so far ask for, so that another round is seldom needed."""


@dataclass(frozen=True)
class SurveyGoal:
    """How well shares are to be known, and how many samples of each input that may take."""

    half_width: float
    """Of the 95 % intervals."""
    least: int
    """Samples of the first round, and of a lot: what an input gets at a time."""
    most: int


@dataclass(frozen=True, eq=False)
class Survey:
    """What plain samples of E inputs say; k scores of each were followed."""

    samples: Tensor
    """(E,)"""
    wins: Tensor
    """How often each class was the largest, (E, classes)."""
    mean: Tensor
    """Of the followed scores, (E, k), in float64, with standard errors."""
    deviation: Tensor
    mean_error: Tensor
    deviation_error: Tensor
    lead: Tensor
    """How far the label is ahead of the best other class, in standard deviations of that, (E,)."""

    def share(self, classes: Tensor) -> Tensor:
        """How often a class (E,) of each input won, (E,)."""
        return self.wins.gather(1, classes.unsqueeze(1)).squeeze(1) / self.samples


def samples_needed(count: Tensor, samples: Tensor, half_width: float) -> Tensor:
    """How many samples in all make an interval of that half-width, if the share is what it seems, (E,)."""
    n = samples.double()
    p = (count.double() + 1) / (n + 2)
    bounds = shares_interval(count, samples)
    known = (bounds[..., 1] - bounds[..., 0]) / 2 <= half_width
    seldom = (count == 0) | (count == samples)
    wanted = torch.where(seldom, 1.5 / half_width, p * (1 - p) * (QUANTILE / half_width) ** 2)
    return torch.where(known, n, torch.maximum(ENOUGH * wanted, n + 1)).ceil().long()


def surveyed(
    model: NetworkModel,
    noise: Gaussian,
    labels: Tensor,
    followed: Tensor,
    goal: SurveyGoal,
    *,
    seed: int,
    clock: Clock | None = None,
    description: str = "sampling",
) -> Survey:
    """Samples of E inputs (noise with one batch dimension) until the share of each label (E,) is known as asked.

    Scores with the indices `followed` (E, k) are summed on the way. The first round is always done; the clock is asked
    before every other piece of work. Every input has random numbers of its own, by `seed` and its mean: what is found
    of one depends on the others by rounding only.
    """
    work = _Sums(model, noise, labels, followed, seed, goal)
    clock = Clock(None) if clock is None else clock
    with torch.inference_mode(False), torch.no_grad(), full_precision(), progress_bar(description, len(labels)) as show:
        every = torch.arange(len(labels), device=noise.device)
        work.add(every, torch.full_like(every, goal.least))
        while not clock.over:
            own = work.wins.gather(1, labels.unsqueeze(1)).squeeze(1)
            missing = samples_needed(own, work.samples, goal.half_width).clamp(max=goal.most) - work.samples
            active = (missing > 0).nonzero().squeeze(1)
            show(len(labels) - len(active))
            if len(active) == 0:
                break
            more = torch.minimum(missing[active], GROWTH * work.samples[active])
            work.add(active, more, clock)
    return work.result()


class _Sums:
    """Sums over samples of each input, in float64, about the scores without noise."""

    def __init__(
        self, model: NetworkModel, noise: Gaussian, labels: Tensor, followed: Tensor, seed: int, goal: SurveyGoal
    ) -> None:
        self.noise, self.labels, self.followed, self.goal = noise, labels, followed, goal
        self.fast: FastNetwork = fast_network(model)
        self.generators = [
            torch.Generator(noise.device).manual_seed(own_seed(seed, "survey", mean)) for mean in noise.flat_mean.cpu()
        ]
        entries, kept = followed.shape
        with full_precision():
            self.centre = self.fast.values(noise.mean.detach()).double()
        self.samples = torch.zeros(entries, dtype=torch.int64, device=noise.device)
        self.wins = torch.zeros(entries, model.outputs, dtype=torch.int64, device=noise.device)
        self.powers = self.centre.new_zeros(entries, 4, kept + 1)

    def add(self, entries: Tensor, counts: Tensor, clock: Clock | None = None) -> None:
        """So many samples more of each of these inputs, or a few more than that; fewer if the time is over."""
        for number, places in self._lots(entries, counts).items():
            together = max(1, elements_together("pass", self.noise.mean, 2 * self.noise.size) // number)
            for start in range(0, len(places), together):
                if clock is not None and clock.over:
                    return
                self._run(places[start : start + together], number)

    def _lots(self, entries: Tensor, counts: Tensor) -> dict[int, list[int]]:
        """Inputs by the samples of a lot: as many as the first round has, but for the last one before the most.

        What an input draws at a time must not depend on the others, nor on what fits into memory.
        """
        lots: dict[int, list[int]] = {}
        before = self.samples[entries].tolist()
        for place, count, done in zip(entries.tolist(), counts.tolist(), before, strict=True):
            for start in range(done, done + count, self.goal.least):
                lots.setdefault(min(self.goal.least, self.goal.most - start), []).append(place)
        return lots

    def _run(self, places: list[int], number: int) -> None:
        """So many samples of each of these inputs, of which some may come more than once."""
        some = torch.tensor(places, device=self.noise.device)
        covariance, mean = self.noise.covariance.entries(some), self.noise.flat_mean[some]
        shape = (number, self.noise.covariance.normals)
        white = torch.empty(number, len(places), shape[1], dtype=mean.dtype, device=mean.device)
        for column, place in enumerate(places):
            white[:, column] = torch.randn(
                shape, dtype=mean.dtype, device=mean.device, generator=self.generators[place]
            )
        drawn = mean + covariance.coloured(white)
        values = self.fast.values(drawn.reshape(-1, *self.noise.event_shape))
        self._count(some, values.reshape(number, len(some), -1))

    def _count(self, entries: Tensor, values: Tensor) -> None:
        if not bool(torch.isfinite(values).all()):
            bad = int((~torch.isfinite(values)).any(-1).sum())
            raise ValueError(
                f"{bad} of {values.shape[0] * values.shape[1]} samples gave NaN or infinite scores, so that no class "
                f"is the largest; use less noise, or clamp the network's input"
            )
        winners = values.argmax(-1).mT
        wins = torch.zeros(len(entries), values.shape[-1], dtype=torch.int64, device=values.device)
        wins.scatter_add_(1, winners, torch.ones_like(winners))
        self.wins.index_add_(0, entries, wins)
        self.samples.index_add_(0, entries, torch.full_like(entries, len(values)))
        off = values.double() - self.centre[entries]
        kept = off.gather(2, self.followed[entries].expand(len(values), -1, -1))
        own = self.labels[entries].unsqueeze(1)
        label = values.gather(2, own.expand(len(values), -1, -1))
        others = values.scatter(2, own.expand(len(values), -1, -1), -torch.inf).amax(2, keepdim=True)
        each = torch.cat([kept, (label - others).double()], 2)
        self.powers.index_add_(0, entries, torch.stack([(each**power).sum(0) for power in range(1, 5)], 1))

    def result(self) -> Survey:
        n = self.samples.double().unsqueeze(1)
        first, second, third, fourth = (self.powers / n.unsqueeze(1)).unbind(1)
        variance = (second - first**2).clamp(min=0)
        about = (fourth - 4 * first * third + 6 * first**2 * second - 3 * first**4).clamp(min=0)
        deviation = (variance * n / (n - 1).clamp(min=1)).sqrt()
        spread = ((about - variance**2).clamp(min=0) / n).sqrt() / (2 * deviation).clamp(min=1e-300)
        lead = first[:, -1] / deviation[:, -1].clamp(min=1e-300)
        centre = self.centre.gather(1, self.followed)
        return Survey(
            self.samples, self.wins, centre + first[:, :-1], deviation[:, :-1], (deviation / n.sqrt())[:, :-1],
            torch.where(deviation > 0, spread, 0.0)[:, :-1], lead,
        )  # fmt: skip


def expected_share_error(count: Tensor, samples: Tensor) -> float:
    """The standard error of the mean of shares (E,), with one sample of each kind more, so that it is never 0."""
    n = samples.double()
    p = (count.double() + 1) / (n + 2)
    return math.sqrt(float((p * (1 - p) / n).sum())) / len(p)
