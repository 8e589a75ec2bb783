"""Noise whose mean is sparse and smooth: least ‖μ‖₁ + TV(μ) that fools the network, in expectation or with confidence.

The paper's problem (its equation for sparse and smooth pixel support, and the targeted one): the margins are those of
the expected scores, linearized at the image. Because the linearization errs where μ is large, the network itself is
followed for some steps afterwards, from that solution, with the same method. What noise adds to its margins is measured
there by sampling, so that the share of fooled samples is the one asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from netmoments.attacks.base import Attack, Sampled, Solved, Subjects
from netmoments.attacks.evaluation import Success, noisy_scores
from netmoments.attacks.expected_logits import require_sigma
from netmoments.attacks.expected_margins import Formula
from netmoments.attacks.margins import ClassPairs, Margins, NetworkMargins, contrast, fooled_margin, picked
from netmoments.attacks.primal_dual import Iterate, Problem, descend, edge, finished, lower_bound, stretched

CONFIDENCE = 0.95
TURNS = 4
"""Rounds at most: what noise adds to the margins is measured, and the problem solved again with that as γ."""
SCALINGS = 3
"""Multiples of the final shift at which samples are taken, to find the smallest that is enough."""
BEYOND = 0.05
"""Share by which γ is overshot while no multiple of the shift has been enough yet, so that one will be."""
CAUTION = 0.5
"""Standard errors of the samples' share that the share aimed at is above the one asked for."""
MEMORY = 0.8
"""Of the network's gradients, from step to step."""


@dataclass(frozen=True, kw_only=True)
class SparseSmooth(Attack):
    """N(μ, σ²I) with the least ‖μ‖₁ + TV(μ) for which the network is fooled.

    Args:
        sigma: the noise level, in the units of the images; one grey level by default, as in the paper (Σ = I).
        confidence: the share of samples to be fooled, 0.95 unless `gamma` is given.
        gamma: instead: how far below 0 the expected margin has to be. 0 fools about half of the samples.
        iterations: of the primal–dual method on the formula.

    See `Attack` for the rest. With `gamma` and `polish=0` it is the paper's attack.

    >>> SparseSmooth(gamma=0.0, polish=0, bounds=None).noise_level * 255
    1.0
    """

    sigma: float | None = None
    confidence: float | None = None
    gamma: float | None = None
    iterations: int = 400

    def __post_init__(self) -> None:
        super().__post_init__()
        require_sigma(self._name, self.noise_level)
        if self.confidence is not None and self.gamma is not None:
            raise ValueError(f"{self._name}: give confidence= (a share of samples) or gamma= (a margin), got both")
        share, gamma = self.share, self.gamma
        if share is not None and (isinstance(share, bool | str) or not 0 < share < 1):
            raise ValueError(f"{self._name}: confidence must be between 0 and 1, got {share!r}")
        if gamma is not None and (isinstance(gamma, bool | str) or not 0 <= gamma < torch.inf):
            raise ValueError(f"{self._name}: gamma must be a margin of at least 0, got {gamma!r}")
        self._require_count("iterations", 1)

    @property
    def noise_level(self) -> float:
        """σ."""
        return self.grey_level if self.sigma is None else self.sigma

    @property
    def share(self) -> float | None:
        """Of the samples that are to be fooled; None where γ was given instead."""
        if self.gamma is not None:
            return None
        return CONFIDENCE if self.confidence is None else self.confidence

    @property
    def _steps_each(self) -> int:
        """On the network for every rival, before the cheapest is chosen."""
        return max(1, self.polish // 2)

    @property
    def _asked_gamma(self) -> float:
        return 0.0 if self.gamma is None else float(self.gamma)

    def _solved(self, subjects: Subjects) -> Solved:
        pairs = subjects.class_pairs(self.rivals)
        formula = Formula(self._linearized(subjects), subjects, subjects.followed(self.rivals))
        problem, solution = self._for_every_rival(formula, pairs)
        chosen = cheapest(problem, solution)
        pairs, solution = pairs.of_rival(chosen), solution.of_rival(chosen)
        problem = replace(problem, gamma=picked(problem.gamma, chosen))
        if self.polish:
            own = NetworkMargins(subjects.network, subjects.images, *pairs)
            problem, solution, more = self._calibrated(subjects, replace(problem, margins=own), solution)
        else:
            problem = replace(problem, margins=formula.margins(pairs))
            problem, solution, more = self._widened(formula, pairs, problem, solution)
        return self._gathered(problem, solution, formula.margins(pairs), pairs.smaller[:, 0, 0], more)

    def _for_every_rival(self, formula: Formula, pairs: ClassPairs) -> tuple[Problem, Iterate]:
        """The problems by the formula, all rivals, solved; and from there those of the network."""
        subjects = formula.subjects
        sigma = subjects.images.new_full((len(subjects),), self.noise_level)
        lower, upper = self._box(subjects)
        gamma = self._expected_gamma(formula, pairs, sigma, lower.new_zeros(len(lower), pairs.larger.shape[1], 1))
        problem = Problem(formula.margins(pairs), sigma, gamma, lower, upper, subjects.shape)
        solution = finished(problem, descend(problem, Iterate.start(problem), self.iterations))
        if not self.polish:
            return problem, solution
        own = NetworkMargins(subjects.network, subjects.images, *pairs)
        problem = replace(problem, margins=own, memory=MEMORY)
        return problem, finished(problem, descend(problem, solution, self._steps_each, smoother=1.0))

    def _gathered(
        self, problem: Problem, solution: Iterate, expected: Margins, towards: Tensor, more: Tensor
    ) -> Solved:
        """What was found for the rival that was chosen, R = 1, after `more` steps with it alone."""
        shift, sigma = solution.shift, problem.sigma
        objective = problem.objective(shift).squeeze(1)
        bound = lower_bound(problem, solution).squeeze(1)
        feasible = problem.excess(shift).squeeze(1) <= 0
        gap = ((objective - bound) / objective.clamp(min=torch.finfo(objective.dtype).tiny)).clamp(min=0)
        own_steps = self._steps_each + more if self.polish else torch.zeros_like(more)
        return Solved(
            mu=shift.squeeze(1).unflatten(1, problem.shape),
            sigma=sigma,
            towards=towards,
            gamma=problem.gamma.amax((1, 2)),
            margin=expected.at(shift, sigma.unsqueeze(1)).amax(-1).squeeze(1),
            feasible=feasible,
            polished=own_steps,
            iterations=self.iterations + (own_steps if self.polish else more),
            gap=torch.where(feasible, gap, 1.0),
        )

    def _as_asked(self, success: Success, sampled: Sampled) -> Tensor:
        """The share of fooled samples is the confidence or above, or the margin of mean scores −γ or below.

        To within two standard errors of both the samples that γ was set by and those that judge.
        """
        if self.share is not None:
            return self._near_enough(success, self.share, 2 * 2**0.5)
        error = sampled.margins.std(0) / len(sampled.margins) ** 0.5
        return sampled.mean_margin - 2 * 2**0.5 * error <= -self._asked_gamma

    def _expected_gamma(self, formula: Formula, pairs: ClassPairs, sigma: Tensor, shift: Tensor) -> Tensor:
        """γ (N, R, K): as given, or so many deviations of each margin, at shifts, that the share is below 0."""
        if self.share is None:
            return torch.full_like(pairs.larger, self._asked_gamma, dtype=shift.dtype)
        deviations = torch.special.ndtri(torch.tensor(self.share, dtype=torch.float64)).to(shift)
        return deviations * formula.deviations(pairs, sigma, shift)

    def _widened(
        self, formula: Formula, pairs: ClassPairs, problem: Problem, solution: Iterate
    ) -> tuple[Problem, Iterate, Tensor]:
        """By the formula alone: γ from the margin's spread where the noise is now, and the problem solved again."""
        steps = 0 if self.share is None else self.iterations // 2
        taken = torch.full_like(formula.subjects.labels, steps)
        if not steps:
            return problem, solution, taken
        gamma = self._expected_gamma(formula, pairs, problem.sigma, solution.shift)
        problem = replace(problem, gamma=gamma)
        return problem, finished(problem, descend(problem, solution, steps, smoother=1.0)), taken

    def _calibrated(self, subjects: Subjects, problem: Problem, solution: Iterate) -> tuple[Problem, Iterate, Tensor]:
        """On the network: γ from what samples of the noise add to its margins, and the problem solved again with that.

        Once, and again for images of which a margin does not hold; then the shift is scaled until the samples say what
        was asked. And the steps that took, (N,).
        """
        taken, gamma = torch.zeros_like(subjects.labels), problem.gamma
        left = torch.arange(len(subjects), device=gamma.device)
        for turn in range(TURNS):
            mine, here, group = _of_images(problem, left), solution.entries(left), subjects.take(left)
            seen = self._under_noise(group, mine, here.shift, self.seed + 1 + turn, max(2, self.samples // 2))
            mine = replace(mine, gamma=seen.gamma)
            here = finished(mine, descend(mine, here, self.polish, smoother=1.0))
            solution, gamma = solution.updated(left, here), gamma.index_copy(0, left, seen.gamma)
            taken[left] += self.polish
            left = left[mine.excess(here.shift).squeeze(1) > 0]
            if not len(left):
                break
        problem, shift = self._scaled_by_samples(subjects, replace(problem, gamma=gamma), solution.shift)
        return problem, replace(solution, shift=shift), taken

    def _scaled_by_samples(self, subjects: Subjects, problem: Problem, shift: Tensor) -> tuple[Problem, Tensor]:
        """The smallest of a few multiples tμ at which the samples, always the same, say what was asked; and γ there.

        The next t is where the noise-free margins would hold if noise added what it adds at the last one, or, between
        one that holds and one that does not, by the secant.
        """
        t = torch.ones_like(shift[..., 0])
        low, high = torch.zeros_like(t), torch.full_like(t, torch.inf)
        short, over, gamma = torch.ones_like(t), -torch.ones_like(t), problem.gamma
        for _ in range(SCALINGS):
            there = stretched(problem, shift, t)
            seen = self._under_noise(subjects, problem, there, self.seed + 1 + TURNS, self.samples)
            excess = seen.excess.unsqueeze(1)
            better, worse = (excess <= 0) & (t < high), (excess > 0) & (t > low)
            high, over = torch.where(better, t, high), torch.where(better, excess, over)
            low, short = torch.where(worse, t, low), torch.where(worse, excess, short)
            gamma = torch.where((better | torch.isinf(high)).unsqueeze(-1), seen.gamma, gamma)
            secant = low + (high - low) * (short / (short - over)).clamp(0.1, 0.9)
            between = (low > 0) & torch.isfinite(high)
            beyond = seen.gamma + BEYOND * seen.gamma.abs()
            t = torch.where(between, secant, edge(replace(problem, gamma=beyond), shift))
        t = torch.where(torch.isfinite(high), high, t)
        return replace(problem, gamma=gamma), stretched(problem, shift, t)

    def _under_noise(self, subjects: Subjects, problem: Problem, shift: Tensor, seed: int, samples: int) -> UnderNoise:
        """What samples of the noise at a shift say of the network.

        What was asked is that a quantile of the margin is at most 0, or that the expected margins are at most −γ.
        """
        own = problem.margins
        assert isinstance(own, NetworkMargins)
        quiet = own.at(shift, problem.sigma.unsqueeze(1))
        centres = own.shifted(shift).squeeze(1)
        scores = torch.cat(list(noisy_scores(subjects.network, centres, problem.sigma, subjects.places, samples, seed)))
        if self.share is not None:
            above = CAUTION * (self.share * (1 - self.share) / samples) ** 0.5
            level = min(self.share + above, 1 - 0.5 / samples)
            noisy = torch.quantile(fooled_margin(scores, subjects.labels, subjects.targets), level, dim=0)
            added = noisy.reshape(-1, 1, 1) - quiet.amax(-1, keepdim=True)
            return UnderNoise(noisy, added.expand_as(quiet))
        expected = contrast(scores.mean(0).unsqueeze(1), own.larger, own.smaller) + self._asked_gamma
        return UnderNoise(expected.amax((1, 2)), expected - quiet)


class UnderNoise(NamedTuple):
    """How far the network is from what was asked, (N,), at most 0 where that is reached; and γ (N, 1, K) for which the
    noise-free margins say the same at this place."""

    excess: Tensor
    gamma: Tensor


def _of_images(problem: Problem, images: Tensor) -> Problem:
    """The network's problems of some of the images."""
    assert isinstance(problem.margins, NetworkMargins)
    sigma, gamma, lower, upper = (x[images] for x in (problem.sigma, problem.gamma, problem.lower, problem.upper))
    own = problem.margins.entries(images)
    return replace(problem, margins=own, sigma=sigma, gamma=gamma, lower=lower, upper=upper)


def cheapest(problem: Problem, solution: Iterate) -> Tensor:
    """Which of the R problems of each image has the least objective of those that hold; the nearest to it if none."""
    excess = problem.excess(solution.shift)
    holds = excess <= 0
    objective = torch.where(holds, problem.objective(solution.shift), torch.inf)
    return torch.where(holds.any(1), objective.argmin(1), excess.argmin(1))
