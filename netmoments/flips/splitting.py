"""Rare flips without gradients: multilevel splitting, which asks nothing of a network but to run.

A population of particles, samples of the noise, is kept where the margin is below a level. The level falls until it is
0. At each level a share of the particles is kept, and the product of these shares is the probability (subset
simulation, Au & Beck 2001; for networks Webb et al. 2019). Several small populations that know nothing of each other
show how far off the estimate may be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from netmoments.flips.noisy_network import NoisyNetwork, OutOfTime
from netmoments.flips.result import EntryResult, FlipEstimate, Tolerance, agree

PARTICLES = 400
"""Particles of a population."""
KEPT = 0.25
"""The share of the particles that goes on to the next level."""
MOVES = 8
"""Steps of every particle at a level."""
ACCEPTED = 0.3
"""The share of steps that should be accepted."""
LEVELS = 60
"""A population has at most so many levels: 0.25⁶⁰ is 1e-36."""
STUCK = 3
"""A population is given up after so many levels in a row that are no lower than the one before."""
LEAST_POPULATIONS = 4
"""So many populations are run before their spread says anything of the error."""
MOST_POPULATIONS = 400
"""At most so many populations are run."""


@dataclass(frozen=True)
class Population:
    """The probability of a flip that one population found, and of each other class to win, (d,)."""

    probability: float
    wins: Tensor


async def by_splitting(network: NoisyNetwork, tolerance: Tolerance, limit: int) -> EntryResult:
    """Run populations until their mean is as exact as asked, the limit is reached, or the first ones found no flip.

    `limit` is the most runs of the network. As long as no population has found a flip only half of them are used, so
    that plain samples can bound how rare flips are.
    """
    populations: list[Population] = []
    start = network.runs
    met = False
    try:
        while len(populations) < MOST_POPULATIONS:
            populations.append(await population(network, limit if populations else (start + limit) // 2))
            runs_each = (network.runs - start) / len(populations)
            if len(populations) >= LEAST_POPULATIONS:
                now = averaged(populations)
                met = tolerance.times_needed(now.probability, now.error) <= 1
                if met or now.probability == 0:
                    break
            flips_found = any(each.probability > 0 for each in populations)
            if network.runs + runs_each > (limit if flips_found else (start + limit) / 2):
                break
    except OutOfTime:
        if len(populations) < 2:
            raise
    first, second = populations[: len(populations) // 2], populations[len(populations) // 2 :]
    agreed = len(populations) < 4 or agree(averaged(first), averaged(second))
    wins = torch.stack([each.wins for each in populations]).mean(0)
    return EntryResult(averaged(populations), averaged(second), agreed, "splitting", wins, met and agreed)


def averaged(populations: list[Population]) -> FlipEstimate:
    """The mean over populations with its standard error; for a single one, that is taken to be the mean itself."""
    values = torch.tensor([each.probability for each in populations], dtype=torch.float64)
    mean = float(values.mean())
    error = float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else mean
    return FlipEstimate(mean, error, len(values), freedom=max(1, len(values) - 1))


async def population(network: NoisyNetwork, limit: int) -> Population:
    """Run one population of particles, from the noise to the flips; it found none if the network's runs reach a limit
    on the way.
    """
    white = network.normal(PARTICLES)
    values = await network.margins_at(white)
    nothing = Population(0.0, values.new_zeros(network.classes))
    strongest = values.amin(1)
    if bool((strongest == strongest.min()).all()) and float(strongest.min()) > 0:  # no level leads on from here
        return nothing
    level, log_probability, step, stuck = math.inf, 0.0, 0.5, 0
    for _ in range(LEVELS):
        strongest = values.amin(1)
        before, level = level, next_level(strongest, level)
        stuck = stuck + 1 if level >= before else 0
        if stuck == STUCK or network.runs + MOVES * PARTICLES > limit:
            return nothing
        kept = strongest < 0 if level <= 0 else strongest <= level
        log_probability += math.log(max(int(kept.sum()), 1e-300) / PARTICLES)
        if level <= 0 or not bool(kept.any()):
            break
        drawn = torch.randint(int(kept.sum()), (PARTICLES,), device=white.device, generator=network.generator)
        white, values, step = await moved(network, white[kept][drawn], values[kept][drawn], level, step)
    else:
        return nothing
    flips = values.amin(1) < 0
    shares = values.argmin(1)[flips].bincount(minlength=network.classes).double() / PARTICLES
    probability = math.exp(log_probability) if bool(flips.any()) else 0.0
    return Population(probability, shares * probability / max(float(shares.sum()), 1e-300))


def next_level(strongest: Tensor, before: float) -> float:
    """The margin below which the kept share of particles lies: at least 0, at most the level before."""
    level = float(strongest.quantile(KEPT))
    return max(0.0, min(level, before))


async def moved(
    network: NoisyNetwork, white: Tensor, values: Tensor, level: float, step: float
) -> tuple[Tensor, Tensor, float]:
    """Particles ε (N, n) and their margins (N, d) after `MOVES` steps below the level, and an adapted size of the step.

    A step of size β proposes √(1 − β²) ε + β ξ with fresh noise ξ, which is accepted if its margin is below the level:
    that keeps the distribution N(0, I) below it (Neal 1998; Cotter et al. 2013, "preconditioned Crank–Nicolson").
    """
    for _ in range(MOVES):
        proposed = math.sqrt(1 - step * step) * white + step * network.normal(len(white))
        new = await network.margins_at(proposed)
        accepted = new.amin(1) <= level
        white = torch.where(accepted.unsqueeze(1), proposed, white)
        values = torch.where(accepted.unsqueeze(1), new, values)
        step = adapted(step, float(accepted.double().mean()))
    return white, values, step


def adapted(step: float, accepted: float) -> float:
    """A larger step if more are accepted than should be, a smaller one if fewer are."""
    return min(0.98, max(0.01, step * math.exp(accepted - ACCEPTED)))
