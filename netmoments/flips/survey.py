"""Surveys: plain samples of many inputs together, until it is known well how often each keeps its label.

Most inputs of a set never flip, and a few hundred samples say so. The others get as many as they need, so a survey of
hundreds of inputs takes little more than its first round. Moments of the scores come with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from netmoments.flips.noisy_network import Clock, seed_of_input
from netmoments.flips.result import shares_interval
from netmoments.gaussian import Gaussian
from netmoments.memory import elements_together
from netmoments.network.model import NetworkModel
from netmoments.normal import QUANTILE
from netmoments.precision import full_precision
from netmoments.progress import progress_bar
from netmoments.sampling.fast_network import FastNetwork, fast_network

GROWTH = 4
"""A round has at most so many times the samples of all before."""
RESERVE = 1.05
"""A round has so many times the samples that the shares so far ask for, so that another round is seldom needed."""


@dataclass(frozen=True)
class SurveyGoal:
    """How well shares are to be known, and how many samples of each input that may take."""

    half_width: float
    """Half the width of the 95 % intervals."""
    least: int
    """Samples of each input in the first round, and in a lot, which is what an input gets at a time later."""
    most: int
    """The most samples of each input."""


@dataclass(frozen=True, eq=False)
class Survey:
    """What plain samples say of E inputs, of each of which k scores were followed."""

    samples: Tensor
    """(E,)"""
    wins: Tensor
    """How often each class was the largest, (E, classes)."""
    mean: Tensor
    """The means of the followed scores, (E, k), in float64, as the following."""
    deviation: Tensor
    """Their standard deviations."""
    mean_error: Tensor
    """The standard errors of the means."""
    deviation_error: Tensor
    """The standard errors of the deviations."""
    lead: Tensor
    """The mean lead of the label over the best other class, over the standard deviation of that lead, (E,)."""


def samples_needed(count: Tensor, samples: Tensor, half_width: float) -> Tensor:
    """How many samples in all (E,) give an interval of that half-width, if the share is count/samples as so far."""
    n = samples.double()
    p = (count.double() + 1) / (n + 2)
    bounds = shares_interval(count, samples)
    known = (bounds[..., 1] - bounds[..., 0]) / 2 <= half_width
    none_or_all = (count == 0) | (count == samples)
    wanted = torch.where(none_or_all, 1.5 / half_width, p * (1 - p) * (QUANTILE / half_width) ** 2)
    return torch.where(known, n, torch.maximum(RESERVE * wanted, n + 1)).ceil().long()


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
    """Sample E inputs (noise with one batch dimension) until the share of each label (E,) is known as asked.

    Moments of the scores with the indices `followed` (E, k) are taken on the way. The first round is always done; the
    clock is asked before every other piece of work. Every input has random numbers of its own, by `seed` and its mean:
    its results depend on the other inputs by rounding only.
    """
    sums = _Sums(model, noise, labels, followed, seed, goal)
    clock = Clock(None) if clock is None else clock
    with torch.inference_mode(False), torch.no_grad(), full_precision(), progress_bar(description, len(labels)) as show:
        all_inputs = torch.arange(len(labels), device=noise.device)
        sums.add(all_inputs, torch.full_like(all_inputs, goal.least))
        while not clock.over:
            kept = sums.wins.gather(1, labels.unsqueeze(1)).squeeze(1)
            missing = samples_needed(kept, sums.samples, goal.half_width).clamp(max=goal.most) - sums.samples
            active = (missing > 0).nonzero().squeeze(1)
            show(len(labels) - len(active))
            if len(active) == 0:
                break
            more = torch.minimum(missing[active], GROWTH * sums.samples[active])
            sums.add(active, more, clock)
    return sums.result()


class _Sums:
    """Sums over the samples of each input: wins, and in float64 powers of the label's lead and of the followed scores,
    the latter less those without noise.
    """

    def __init__(
        self, model: NetworkModel, noise: Gaussian, labels: Tensor, followed: Tensor, seed: int, goal: SurveyGoal
    ) -> None:
        self.noise, self.labels, self.followed, self.goal = noise, labels, followed, goal
        self.fast: FastNetwork = fast_network(model)
        self.generators = [
            torch.Generator(noise.device).manual_seed(seed_of_input(seed, "survey", mean))
            for mean in noise.flat_mean.cpu()
        ]
        entries, scores = followed.shape
        with full_precision():
            self.centre = self.fast.values(noise.mean.detach()).double()
        self.samples = torch.zeros(entries, dtype=torch.int64, device=noise.device)
        self.wins = torch.zeros(entries, model.outputs, dtype=torch.int64, device=noise.device)
        self.powers = self.centre.new_zeros(entries, 4, scores + 1)
        """Sums of the first four powers of the followed scores and of the label's lead, (E, 4, k + 1)."""

    def add(self, entries: Tensor, counts: Tensor, clock: Clock | None = None) -> None:
        """Add so many samples of each of these inputs, or a few more, in whole lots; fewer if the time is over."""
        for size, inputs in self._lots(entries, counts).items():
            together = max(1, elements_together("pass", self.noise.mean, 2 * self.noise.size) // size)
            for start in range(0, len(inputs), together):
                if clock is not None and clock.over:
                    return
                self._run(inputs[start : start + together], size)

    def _lots(self, entries: Tensor, counts: Tensor) -> dict[int, list[int]]:
        """The inputs that need a lot, by its size: that of the first round, or what is left of the most samples.

        An input is listed once for every lot that it needs. What it draws at a time must not depend on the other
        inputs, nor on what fits into memory.
        """
        lots: dict[int, list[int]] = {}
        before = self.samples[entries].tolist()
        for place, count, done in zip(entries.tolist(), counts.tolist(), before, strict=True):
            for start in range(done, done + count, self.goal.least):
                lots.setdefault(min(self.goal.least, self.goal.most - start), []).append(place)
        return lots

    def _run(self, inputs: list[int], size: int) -> None:
        """Run a lot of samples for each of these inputs, which may be listed more than once."""
        entries = torch.tensor(inputs, device=self.noise.device)
        covariance, mean = self.noise.covariance.entries(entries), self.noise.flat_mean[entries]
        shape = (size, self.noise.covariance.normals)
        white = torch.empty(size, len(inputs), shape[1], dtype=mean.dtype, device=mean.device)
        for column, place in enumerate(inputs):
            white[:, column] = torch.randn(
                shape, dtype=mean.dtype, device=mean.device, generator=self.generators[place]
            )
        drawn = mean + covariance.coloured(white)
        scores = self.fast.values(drawn.reshape(-1, *self.noise.event_shape))
        self._count(entries, scores.reshape(size, len(inputs), -1))

    def _count(self, entries: Tensor, scores: Tensor) -> None:
        """Add the scores (samples, A, d) of the inputs with indices (A,)."""
        if not bool(torch.isfinite(scores).all()):
            bad = int((~torch.isfinite(scores)).any(-1).sum())
            raise ValueError(
                f"{bad} of {scores.shape[0] * scores.shape[1]} samples gave NaN or infinite scores, so that no class "
                f"is the largest; use less noise, or clamp the network's input"
            )
        winners = scores.argmax(-1).mT
        wins = torch.zeros(len(entries), scores.shape[-1], dtype=torch.int64, device=scores.device)
        wins.scatter_add_(1, winners, torch.ones_like(winners))
        self.wins.index_add_(0, entries, wins)
        self.samples.index_add_(0, entries, torch.full_like(entries, len(scores)))
        deviations = scores.double() - self.centre[entries]
        followed = deviations.gather(2, self.followed[entries].expand(len(scores), -1, -1))
        labels = self.labels[entries].unsqueeze(1).expand(len(scores), -1, -1)
        lead = scores.gather(2, labels) - scores.scatter(2, labels, -torch.inf).amax(2, keepdim=True)
        numbers = torch.cat([followed, lead.double()], 2)
        powers = torch.stack([(numbers**power).sum(0) for power in range(1, 5)], 1)
        self.powers.index_add_(0, entries, powers)

    def result(self) -> Survey:
        n = self.samples.double().unsqueeze(1)
        first, second, third, fourth = (self.powers / n.unsqueeze(1)).unbind(1)
        variance = (second - first**2).clamp(min=0)
        fourth_central = (fourth - 4 * first * third + 6 * first**2 * second - 3 * first**4).clamp(min=0)
        deviation = (variance * n / (n - 1).clamp(min=1)).sqrt()
        error = ((fourth_central - variance**2).clamp(min=0) / n).sqrt() / (2 * deviation).clamp(min=1e-300)
        lead = first[:, -1] / deviation[:, -1].clamp(min=1e-300)
        centre = self.centre.gather(1, self.followed)
        return Survey(
            self.samples, self.wins, centre + first[:, :-1], deviation[:, :-1], (deviation / n.sqrt())[:, :-1],
            torch.where(deviation > 0, error, 0.0)[:, :-1], lead,
        )  # fmt: skip


def expected_share_error(count: Tensor, samples: Tensor) -> float:
    """The standard error of the mean share count/samples (E,), with one sample more of each kind: it is never 0."""
    n = samples.double()
    p = (count.double() + 1) / (n + 2)
    return math.sqrt(float((p * (1 - p) / n).sum())) / len(p)
