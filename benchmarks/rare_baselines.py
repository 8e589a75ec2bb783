"""How the field estimates rare flips: adaptive multilevel splitting, the last particle, plain samples.

All of them see a network as its margin at whitened noise ε ~ N(0, I): the label's score less the largest other one.
Noise flips the answer where that is negative. None of them uses gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from netmoments.flips.result import QUANTILE, wilson
from netmoments.precision import full_precision

PARTICLES, MOVES = 1000, 20
KEPT = 0.1
"""ρ of splitting: the share of particles that goes on to the next level."""
ACCEPTED = 0.25
"""The share of moves that should be accepted."""
LEVELS = 60
TOGETHER = 64
"""Of the last particles, one in so many is replaced at a time."""
LEAST = 1e-30
"""Probabilities below are not followed."""
BATCH = 500
"""Samples that go through a network together on a CPU."""
DEVICE_BATCH = 20_000
"""The same on a GPU."""


@dataclass(frozen=True)
class RareEstimate:
    """A probability, its interval of 95 %, its standard error relative to it, and runs of the network."""

    probability: float
    interval: tuple[float, float]
    relative_error: float
    runs: int

    def runs_for(self, relative_error: float) -> float:
        """Runs after which the standard error is this: particles, or repetitions, in proportion to 1/error²."""
        return self.runs * (self.relative_error / relative_error) ** 2


@dataclass(eq=False)
class WhiteMargin:
    """The margin of a label at image + σ ε, for ε (N, n), and how many runs of the network that took."""

    network: Callable[[Tensor], Tensor] | nn.Module
    image: Tensor
    """(*event)."""
    sigma: float
    label: int
    runs: int = field(default=0, init=False)

    @torch.no_grad()
    def __call__(self, white: Tensor) -> Tensor:
        with full_precision():
            found = [self._margin(self.image + self.sigma * part) for part in self._events(white).split(self.batch)]
        self.runs += len(white)
        return torch.cat(found)

    @property
    def batch(self) -> int:
        return BATCH if self.image.device.type == "cpu" else DEVICE_BATCH

    def normal(self, count: int, generator: torch.Generator) -> Tensor:
        """ε (count, n)."""
        shape = (count, self.image.numel())
        return torch.randn(shape, dtype=self.image.dtype, device=self.image.device, generator=generator)

    def _events(self, white: Tensor) -> Tensor:
        return white.reshape(len(white), *self.image.shape)

    def _margin(self, inputs: Tensor) -> Tensor:
        scores = self.network(inputs).double()
        own = scores[:, self.label].clone()
        scores[:, self.label] = -torch.inf
        return own - scores.amax(1)


def log_normal_interval(probability: float, relative_error: float) -> tuple[float, float]:
    """p exp(±1.96 s), at most 1: that of an estimate whose logarithm is Gaussian with standard deviation s."""
    factor = math.exp(min(QUANTILE * relative_error, 700.0))
    return probability / factor, min(1.0, probability * factor)


def plain(margin: WhiteMargin, samples: int, seed: int = 0) -> RareEstimate:
    """The share of flips among samples of the noise; its standard error is √((1 − p)/(p n)) relative to it."""
    generator = torch.Generator(margin.image.device).manual_seed(seed)
    seen = torch.zeros((), dtype=torch.int64, device=margin.image.device)
    for start in range(0, samples, margin.batch):
        seen += (margin(margin.normal(min(margin.batch, samples - start), generator)) < 0).sum()
    flips = int(seen)
    error = math.sqrt((1 - flips / samples) / flips) if flips else math.inf
    return RareEstimate(flips / samples, wilson(flips, samples), error, margin.runs)


def plain_runs(probability: float, relative_error: float) -> float:
    """(1 − p)/(p δ²): what plain sampling needs for a relative standard error δ."""
    return (1 - probability) / (probability * relative_error**2)


def splitting(margin: WhiteMargin, seed: int = 0, particles: int = PARTICLES, moves: int = MOVES) -> RareEstimate:
    """Adaptive multilevel splitting (Webb, Rainforth, Teh & Kumar, "A statistical approach to assessing neural network
    robustness", ICLR 2019, algorithm 1), for Gaussian noise.

    Levels L₁ > L₂ > … are the ρ-quantiles of the particles' margins, at last 0; the particles below a level are drawn
    again with replacement and moved `moves` times by Metropolis–Hastings steps that keep N(0, I) below the level. With
    P_k the share below level k, p = Π P_k. The relative standard error, √(Σ (1 − P_k)/(P_k N)), is what it would be if
    moves made particles independent, and so the least it can be (Cérou & Guyader 2007).
    """
    generator = torch.Generator(margin.image.device).manual_seed(seed)
    white = margin.normal(particles, generator)
    values, step, log, variance = margin(white), 0.5, 0.0, 0.0
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
    """No flip was reached: it is less likely than the last level that was."""
    return RareEstimate(0.0, (0.0, level_probability), math.inf, runs)


def drawn_again(below: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Places of so many particles, drawn with replacement from those that are below a level."""
    places = below.nonzero().squeeze(1)
    return places[torch.randint(len(places), (count,), device=below.device, generator=generator)]


def moved(
    margin: WhiteMargin, white: Tensor, values: Tensor, level: float, step: float, moves: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, float]:  # fmt: skip
    """Particles ε (N, n) with their margins (N,) after some steps below a level, and the step that fits.

    A step goes to √(1 − s²) ε + s ξ, ξ ~ N(0, I), which N(0, I) is invariant under; it is taken if the margin there is
    not above the level (Neal 1998; Cotter, Roberts, Stuart & White 2013).
    """
    taken = 0.0
    for _ in range(moves):
        proposed = math.sqrt(1 - step * step) * white + step * margin.normal(len(white), generator)
        new = margin(proposed)
        accepted = new <= level
        white = torch.where(accepted.unsqueeze(1), proposed, white)
        values = torch.where(accepted, new, values)
        taken += float(accepted.double().mean()) / moves
    return white, values, adapted(step, taken)


def adapted(step: float, accepted: float) -> float:
    """A wider step where more than `ACCEPTED` was accepted, a narrower one where less."""
    return min(0.99, max(0.005, step * math.exp(accepted - ACCEPTED)))
