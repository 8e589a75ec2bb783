"""Other methods for rare flips, as published: adaptive multilevel splitting, the last particle, plain samples.

All of them see a network as its margin at whitened noise ε ~ N(0, I): the label's score less the largest other one.
Noise flips the answer where the margin is negative. None of them uses gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from netmoments.flips.result import wilson
from netmoments.normal import QUANTILE
from netmoments.precision import full_precision

PARTICLES, MOVES = 1000, 20
"""The number of particles, and the moves of a particle at each level."""
KEPT = 0.1
"""ρ of splitting: the share of particles that goes on to the next level."""
ACCEPTED = 0.25
"""The share of moves that should be accepted."""
LEVELS = 60
"""Splitting has at most so many levels."""
TOGETHER = 64
"""One in so many of the particles is replaced at a time, those with the largest margins."""
LEAST = 1e-30
"""A method stops where the probability falls below this."""
BATCH = 500
"""Samples that go through a network together on a CPU."""
DEVICE_BATCH = 20_000
"""Samples that go through a network together on a GPU."""


@dataclass(frozen=True)
class RareEstimate:
    """A probability, its 95 % interval, its relative standard error, and the runs of the network that it took."""

    probability: float
    interval: tuple[float, float]
    relative_error: float
    runs: int

    def runs_for(self, relative_error: float) -> float:
        """The runs that give this relative error: as many times more particles or repetitions as 1/error² grows."""
        return self.runs * (self.relative_error / relative_error) ** 2


@dataclass(eq=False)
class WhiteMargin:
    """The margin (N,) of a label at image + σ ε, for ε (N, n), with a count of the runs of the network."""

    network: Callable[[Tensor], Tensor] | nn.Module
    image: Tensor
    """(*event)."""
    sigma: float
    label: int
    runs: int = field(default=0, init=False)

    @torch.no_grad()
    def __call__(self, white: Tensor) -> Tensor:
        with full_precision():
            parts = [self._margin(self.image + self.sigma * part) for part in self._events(white).split(self.batch)]
        self.runs += len(white)
        return torch.cat(parts)

    @property
    def batch(self) -> int:
        return BATCH if self.image.device.type == "cpu" else DEVICE_BATCH

    def normal(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw ε (count, n)."""
        shape = (count, self.image.numel())
        return torch.randn(shape, dtype=self.image.dtype, device=self.image.device, generator=generator)

    def _events(self, white: Tensor) -> Tensor:
        return white.reshape(len(white), *self.image.shape)

    def _margin(self, inputs: Tensor) -> Tensor:
        scores = self.network(inputs).double()
        of_label = scores[:, self.label].clone()
        scores[:, self.label] = -torch.inf
        return of_label - scores.amax(1)


def log_normal_interval(probability: float, relative_error: float) -> tuple[float, float]:
    """p exp(±1.96 s), at most 1: the interval of an estimate whose logarithm is Gaussian with standard deviation s."""
    factor = math.exp(min(QUANTILE * relative_error, 700.0))
    return probability / factor, min(1.0, probability * factor)


def plain(margin: WhiteMargin, samples: int, seed: int = 0) -> RareEstimate:
    """The share of flips among samples of the noise; its relative standard error is √((1 − p)/(p n))."""
    generator = torch.Generator(margin.image.device).manual_seed(seed)
    count = torch.zeros((), dtype=torch.int64, device=margin.image.device)
    for start in range(0, samples, margin.batch):
        count += (margin(margin.normal(min(margin.batch, samples - start), generator)) < 0).sum()
    flips = int(count)
    error = math.sqrt((1 - flips / samples) / flips) if flips else math.inf
    return RareEstimate(flips / samples, wilson(flips, samples), error, margin.runs)


def plain_runs(probability: float, relative_error: float) -> float:
    """(1 − p)/(p δ²): the runs that plain sampling needs for a relative standard error δ."""
    return (1 - probability) / (probability * relative_error**2)


def splitting(margin: WhiteMargin, seed: int = 0, particles: int = PARTICLES, moves: int = MOVES) -> RareEstimate:
    """Adaptive multilevel splitting (Webb, Rainforth, Teh & Kumar, "A statistical approach to assessing neural network
    robustness", ICLR 2019, algorithm 1), for Gaussian noise.

    Levels L₁ > L₂ > … are the ρ-quantiles of the particles' margins, at last 0; the particles below a level are drawn
    again with replacement and moved `moves` times by Metropolis–Hastings steps that keep N(0, I) below the level. With
    P_k the share below level k, p = Π P_k. The relative standard error, √(Σ (1 − P_k)/(P_k N)), is that of moves which
    make particles independent, and so the least it can be (Cérou & Guyader 2007).
    """
    generator = torch.Generator(margin.image.device).manual_seed(seed)
    white = margin.normal(particles, generator)
    values, step, log, variance = margin(white), 0.5, 0.0, 0.0  # log is log p
    for _ in range(LEVELS):
        level = max(0.0, float(values.quantile(KEPT)))
        below = values < 0 if level == 0 else values <= level
        share = float(below.double().mean())
        if share == 0:
            return nothing_below(math.exp(log), margin.runs)
        log, variance = log + math.log(share), variance + (1 - share) / (share * particles)
        if level == 0 or log < math.log(LEAST):
            break
        chosen = drawn_again(below, particles, generator)
        white, values, step = moved(margin, white[chosen], values[chosen], level, step, moves, generator)
    if level > 0:
        return nothing_below(math.exp(log), margin.runs)
    probability, error = math.exp(log), math.sqrt(variance)
    return RareEstimate(probability, log_normal_interval(probability, error), error, margin.runs)


def last_particle(
    margin: WhiteMargin, seed: int = 0, particles: int = PARTICLES, moves: int = MOVES, together: int | None = None
) -> RareEstimate:
    """The last particle (Tit, Furon & Rousset, "Efficient statistical assessment of neural network corruption
    robustness", NeurIPS 2021; Guyader, Hengartner & Matzner-Løber 2011).

    Of N particles the one with the largest margin is replaced by a copy of another, moved `moves` times below that
    margin, until all margins are negative: p = (1 − 1/N)ᴹ after M replacements, and log p is nearly Gaussian with
    variance −log p/N. Here the k last are replaced at a time (N/64 of them if not told), by copies of the others moved
    below the margin of the best of the k: each such round has the factor Π (1 − 1/(N − i)) over i < k, which is
    1 − k/N. With k = 1 it is the algorithm as printed.
    """
    generator = torch.Generator(margin.image.device).manual_seed(seed)
    white = margin.normal(particles, generator)
    values, step, log = margin(white), 0.5, 0.0
    most = max(1, particles // TOGETHER) if together is None else together
    while bool((values >= 0).any()) and log > math.log(LEAST):
        order = values.argsort(descending=True)
        count = min(most, int((values >= 0).sum()))
        last, others = order[:count], order[count:]
        if len(others) == 0:
            return nothing_below(math.exp(log), margin.runs)
        level = float(values[last[-1]])
        log += math.log1p(-count / particles)
        chosen = others[torch.randint(len(others), (count,), device=white.device, generator=generator)]
        white[last], values[last], step = moved(margin, white[chosen], values[chosen], level, step, moves, generator)
    if bool((values >= 0).any()):
        return nothing_below(math.exp(log), margin.runs)
    probability, error = math.exp(log), math.sqrt(-log / particles)
    if log == 0:
        return RareEstimate(1.0, wilson(particles, particles), 0.0, margin.runs)
    return RareEstimate(probability, log_normal_interval(probability, error), error, margin.runs)


def nothing_below(level_probability: float, runs: int) -> RareEstimate:
    """The estimate where no flip was reached: it is less probable than the last level that was."""
    return RareEstimate(0.0, (0.0, level_probability), math.inf, runs)


def drawn_again(below: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """The indices of so many particles, drawn with replacement from those `below` a level."""
    indices = below.nonzero().squeeze(1)
    return indices[torch.randint(len(indices), (count,), device=below.device, generator=generator)]


def moved(
    margin: WhiteMargin, white: Tensor, values: Tensor, level: float, step: float, moves: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, float]:  # fmt: skip
    """Particles ε (N, n) with their margins (N,) after some moves below a level, and an adapted size of the step.

    A step of size s goes to √(1 − s²) ε + s ξ with ξ ~ N(0, I), under which N(0, I) is invariant. It is taken if the
    margin there is not above the level (Neal 1998; Cotter, Roberts, Stuart & White 2013).
    """
    share = 0.0
    for _ in range(moves):
        proposed = math.sqrt(1 - step * step) * white + step * margin.normal(len(white), generator)
        new = margin(proposed)
        accepted = new <= level
        white = torch.where(accepted.unsqueeze(1), proposed, white)
        values = torch.where(accepted, new, values)
        share += float(accepted.double().mean()) / moves
    return white, values, adapted(step, share)


def adapted(step: float, accepted: float) -> float:
    """A wider step if more than the share `ACCEPTED` was accepted, a narrower one if less."""
    return min(0.99, max(0.005, step * math.exp(accepted - ACCEPTED)))
