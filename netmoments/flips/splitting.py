"""Rare flips without gradients: multilevel splitting, which asks nothing of a network but to run.

Particles of the noise are kept where the margin is below a level that falls until it is 0; each level keeps a share of
them, and the product of the shares is the probability (subset simulation, Au & Beck 2001; for networks Webb et al.
2019). Several small populations that know nothing of each other say how far the estimate may be off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from netmoments.flips.margins import NoisyMargins, OutOfTime
from netmoments.flips.result import FlipEstimate, Found, Target, agree

PARTICLES = 400
"""Of a population."""
KEPT = 0.25
"""The share that goes on to the next level."""
MOVES = 8
"""Steps of every particle at a level."""
ACCEPTED = 0.3
"""The share of moves that should be accepted."""
LEVELS = 60
"""At most: 0.25⁶⁰ is 1e-36."""
STUCK = 3
"""Levels that are no lower than the one before, after which a population is given up."""
LEAST_POPULATIONS = 4
MOST_POPULATIONS = 400


@dataclass(frozen=True)
class Population:
    """The probability that one population found, and the winners of its flips (d,)."""

    probability: float
    wins: Tensor


async def by_splitting(margins: NoisyMargins, target: Target, limit: int) -> Found:
    """Populations until their mean is as exact as asked, or a limit is reached: half of it where none found a flip, so
    that plain samples can say how rare flips are at most.
    """
    found: list[Population] = []
    start = margins.runs
    met = False
    try:
        while len(found) < MOST_POPULATIONS:
            found.append(await population(margins))
            each = (margins.runs - start) / len(found)
            if len(found) >= LEAST_POPULATIONS:
                now = averaged(found)
                met = target.needed(now.probability, now.error) <= 1
                if met or now.probability == 0:
                    break
            if margins.runs + each > (limit if any(one.probability > 0 for one in found) else (start + limit) / 2):
                break
    except OutOfTime:
        if len(found) < 2:
            raise
    first, second = found[: len(found) // 2], found[len(found) // 2 :]
    agreed = len(found) < 2 * 2 or agree(averaged(first), averaged(second))
    wins = torch.stack([one.wins for one in found]).mean(0)
    return Found(averaged(found), averaged(second), agreed, "splitting", wins, met and agreed)


def averaged(populations: list[Population]) -> FlipEstimate:
    """The mean over populations, with its standard error; of one alone the error is the whole."""
    values = torch.tensor([one.probability for one in populations], dtype=torch.float64)
    mean = float(values.mean())
    error = float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else mean
    return FlipEstimate(mean, error, len(values), freedom=max(1, len(values) - 1))


async def population(margins: NoisyMargins) -> Population:
    """One population of particles, from the noise to the flips."""
    white = margins.normal(PARTICLES)
    found = await margins.of(white)
    if bool((found.amin(1) == found.amin()).all()) and float(found.amin()) > 0:  # answers that jump: no level leads on
        return Population(0.0, found.new_zeros(margins.rivals))
    level, log, step, stuck = math.inf, 0.0, 0.5, 0
    for _ in range(LEVELS):
        strongest = found.amin(1)
        before, level = level, next_level(strongest, level)
        stuck = stuck + 1 if level >= before else 0
        if stuck == STUCK:
            return Population(0.0, found.new_zeros(margins.rivals))
        kept = strongest < 0 if level <= 0 else strongest <= level
        log += math.log(max(int(kept.sum()), 1e-300) / PARTICLES)
        if level <= 0 or not bool(kept.any()):
            break
        again = torch.randint(int(kept.sum()), (PARTICLES,), device=white.device, generator=margins.generator)
        white, found = white[kept][again], found[kept][again]
        white, found, step = await moved(margins, white, found, level, step)
    else:
        return Population(0.0, found.new_zeros(margins.rivals))
    flips = found.amin(1) < 0
    share = found.argmin(1)[flips].bincount(minlength=margins.rivals).double() / PARTICLES
    probability = math.exp(log) if bool(flips.any()) else 0.0
    return Population(probability, share * probability / max(float(share.sum()), 1e-300))


def next_level(strongest: Tensor, before: float) -> float:
    """The margin below which the kept share lies, or 0 where that is below it; never above the level before."""
    level = float(strongest.quantile(KEPT))
    return max(0.0, min(level, before))


async def moved(
    margins: NoisyMargins, white: Tensor, found: Tensor, level: float, step: float
) -> tuple[Tensor, Tensor, float]:
    """Particles after some steps that keep N(0, I) below the level, and the step that fits.

    A step proposes √(1 − β²) ε + β ξ with fresh noise ξ, which is accepted if its margin is below the level (Neal 1998;
    Cotter et al. 2013, "preconditioned Crank–Nicolson").
    """
    for _ in range(MOVES):
        proposed = math.sqrt(1 - step * step) * white + step * margins.normal(len(white))
        new = await margins.of(proposed)
        accepted = new.amin(1) <= level
        white = torch.where(accepted.unsqueeze(1), proposed, white)
        found = torch.where(accepted.unsqueeze(1), new, found)
        step = adapted(step, float(accepted.double().mean()))
    return white, found, step


def adapted(step: float, accepted: float) -> float:
    """A larger step where more is accepted than should be, a smaller one where less is."""
    return min(0.98, max(0.01, step * math.exp(accepted - ACCEPTED)))
