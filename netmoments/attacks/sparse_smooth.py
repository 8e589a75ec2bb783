"""Noise whose mean is sparse and smooth: least ‖μ‖₁ + TV(μ) that fools the network, in expectation or with confidence.

The problem is the paper's (its equation for sparse and smooth pixel support, and the targeted one), with the margins of
the expected scores, linearized at the image; `primal_dual` solves it. Because the linearization errs where μ is large,
the same solver then goes on from that solution on the network itself. What noise adds to the network's margins is
measured by sampling and becomes γ, so that the share of fooled samples is the one asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from netmoments.attacks.base import Attack, Sampled, Solved, Subjects, entries
from netmoments.attacks.evaluation import Success, fooled_margin, noisy_scores
from netmoments.attacks.margins import ClassPairs, ExpectedMargins, Formula, Margins, NetworkMargins, contrast
from netmoments.attacks.primal_dual import Iterate, Problem, cheapest, descend, edge, finished, lower_bound, stretched
from netmoments.checks import require_count, require_sigma

CONFIDENCE = 0.95
"""The share of samples to be fooled where neither a share nor a margin is asked for."""
TURNS = 4
"""At most so many times is it measured what noise adds to the margins, and the problem solved again with that as γ."""
SCALINGS = 3
"""So many multiples of the final shift are sampled to find the smallest that is enough."""
BEYOND = 0.05
"""As long as the least multiple of the shift is not bracketed, γ is overshot by this share, to have the next one do."""
INSIDE = 0.01
"""The secant between a multiple that is enough and one that is not aims this share of the way beyond the boundary.
Where the network is affine it would hit the boundary itself, and rounding would decide on which side."""
CAUTION = 0.5
"""The share aimed at is above the one asked for by so many standard errors of a sampled share."""
MEMORY = 0.8
"""The weight of earlier steps in the average of the network's gradients: see `Problem`."""


@dataclass(frozen=True, kw_only=True)
class SparseSmooth(Attack):
    """N(μ, σ²I) with the least ‖μ‖₁ + TV(μ) for which the network is fooled.

    Args:
        sigma: the noise level, in the units of the images; one grey level by default, as in the paper (Σ = I).
        confidence: the share of samples to be fooled, 0.95 unless `gamma` is given.
        gamma: instead of `confidence`: how far below 0 the expected margin has to be. 0 fools about half the samples.
        iterations: steps of the primal–dual method on the formula.

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
        caller, share, gamma = type(self).__name__, self.confidence, self.gamma
        if self.sigma is not None:
            require_sigma(caller, self.sigma)
        if share is not None and gamma is not None:
            raise ValueError(f"{caller}: give confidence= (a share of samples) or gamma= (a margin), got both")
        if share is not None and (isinstance(share, bool | str) or not 0 < share < 1):
            raise ValueError(f"{caller}: confidence must be between 0 and 1, got {share!r}")
        if gamma is not None and (isinstance(gamma, bool | str) or not 0 <= gamma < torch.inf):
            raise ValueError(f"{caller}: gamma must be a margin of at least 0, got {gamma!r}")
        require_count(caller, "iterations", self.iterations, least=1)

    @property
    def noise_level(self) -> float:
        """σ."""
        return self.grey_level if self.sigma is None else self.sigma

    @property
    def share(self) -> float | None:
        """The share of samples to be fooled; None where γ was given instead."""
        if self.gamma is not None:
            return None
        return CONFIDENCE if self.confidence is None else self.confidence

    @property
    def _asked_gamma(self) -> float:
        return 0.0 if self.gamma is None else float(self.gamma)

    def _solved(self, subjects: Subjects) -> Solved:
        sigma = subjects.images.new_full((len(subjects.images),), self.noise_level)
        pairs, formula = subjects.class_pairs(self.rivals), self._formula(subjects)
        margins = formula.margins(pairs)
        at_rest = margins.with_slopes(torch.zeros_like(subjects.lower).unsqueeze(1), sigma.unsqueeze(1))
        gamma = self._gamma_for(at_rest.least_deviations(sigma))
        problem = Problem(margins, sigma, gamma, subjects.lower, subjects.upper, subjects.images.shape[1:])
        problem, solution, steps = self._for_every_rival(subjects, problem, pairs)
        best = cheapest(problem, solution)
        pairs, solution = ClassPairs(pairs.larger[best], pairs.smaller[best]), entries(solution, best)
        expected, gamma = formula.margins(pairs), problem.gamma[best]
        if self.polish:
            network = subjects.model.network
            problem = replace(problem, margins=NetworkMargins(network, subjects.images, *pairs), gamma=gamma)
            problem, solution, more = self._calibrated(subjects, problem, solution)
        else:
            problem = replace(problem, margins=expected, gamma=gamma)
            problem, solution, more = self._widened(formula, expected, problem, solution)
        return self._gathered(problem, solution, expected, pairs.smaller[:, 0, 0], steps + more)

    def _for_every_rival(self, subjects: Subjects, problem: Problem, pairs: ClassPairs) -> tuple[Problem, Iterate, int]:
        """Solve the problems of all rivals by the formula, and from there on the network if that is to be followed.

        Returns the problems that were solved last, their solutions, and the steps on the network.
        """
        solution = finished(problem, descend(problem, Iterate.start(problem), self.iterations))
        if not self.polish:
            return problem, solution, 0
        margins, steps = NetworkMargins(subjects.model.network, subjects.images, *pairs), max(1, self.polish // 2)
        problem = replace(problem, margins=margins, memory=MEMORY)
        return problem, finished(problem, descend(problem, solution, steps, smoother=1.0)), steps

    def _gathered(
        self, problem: Problem, solution: Iterate, expected: Margins, towards: Tensor, more: Tensor
    ) -> Solved:
        """The solution for the chosen rival, R = 1, found in `more` steps (N,) after the first ones on the formula."""
        shift, sigma = solution.shift, problem.sigma
        objective = problem.objective(shift).squeeze(1)
        bound = lower_bound(problem, solution).squeeze(1)
        feasible = problem.excess(shift).squeeze(1) <= 0
        gap = ((objective - bound) / objective.clamp(min=torch.finfo(objective.dtype).tiny)).clamp(min=0)
        return Solved(
            mu=shift.squeeze(1).unflatten(1, problem.shape),
            sigma=sigma,
            towards=towards,
            gamma=problem.gamma.amax((1, 2)),
            margin=expected.at(shift, sigma.unsqueeze(1)).amax(-1).squeeze(1),
            feasible=feasible,
            polished=more if self.polish else torch.zeros_like(more),
            iterations=self.iterations + more,
            gap=torch.where(feasible, gap, 1.0),
        )

    def _fooled_as_asked(self, success: Success, sampled: Sampled) -> Tensor:
        """Whether the share of fooled samples is at least the confidence, or the margin of mean scores at most −γ.

        It may miss that by two standard errors of a difference: between the samples that set γ and those that judge.
        """
        if self.share is not None:
            return success.reaches(self.share, 2 * 2**0.5)
        error = sampled.margins.std(0) / len(sampled.margins) ** 0.5
        return sampled.mean_margin - 2 * 2**0.5 * error <= -self._asked_gamma

    def _gamma_for(self, deviations: Tensor) -> Tensor:
        """γ (N, R, K): as given, or with which the share asked for of margins with these deviations is below 0."""
        if self.share is None:
            return torch.full_like(deviations, self._asked_gamma)
        return torch.special.ndtri(torch.tensor(self.share, dtype=torch.float64)).to(deviations) * deviations

    def _widened(
        self, formula: Formula, margins: ExpectedMargins, problem: Problem, solution: Iterate
    ) -> tuple[Problem, Iterate, Tensor]:
        """By the formula alone, set γ from the margins' deviations at the solution, and solve the problem again.

        Returns the new problem and solution, and the steps that took, (N,).
        """
        steps = 0 if self.share is None else self.iterations // 2
        more = torch.full_like(formula.followed[:, 0], steps)
        if not steps:
            return problem, solution, more
        gamma = self._gamma_for(formula.deviations(margins, problem.sigma, solution.shift))
        problem = replace(problem, gamma=gamma)
        return problem, finished(problem, descend(problem, solution, steps, smoother=1.0)), more

    def _calibrated(self, subjects: Subjects, problem: Problem, solution: Iterate) -> tuple[Problem, Iterate, Tensor]:
        """On the network, set γ to what samples show that noise adds to its margins, and solve the problem again.

        This is repeated for images whose solution is not feasible. Then the shift is scaled until the samples show what
        is asked for. Returns the new problem and solution, and the steps that took, (N,).
        """
        steps, gamma = torch.zeros_like(subjects.labels), problem.gamma
        left = torch.arange(len(gamma), device=gamma.device)
        for turn in range(TURNS):
            part, iterate, group = entries(problem, left), entries(solution, left), entries(subjects, left)
            seen = self._under_noise(group, part, iterate.shift, self.seed + 1 + turn, max(2, self.samples // 2))
            part = replace(part, gamma=seen.gamma)
            iterate = finished(part, descend(part, iterate, self.polish, smoother=1.0))
            solution, gamma = solution.updated(left, iterate), gamma.index_copy(0, left, seen.gamma)
            steps[left] += self.polish
            left = left[part.excess(iterate.shift).squeeze(1) > 0]
            if not len(left):
                break
        problem, shift = self._scaled_by_samples(subjects, replace(problem, gamma=gamma), solution.shift)
        return problem, replace(solution, shift=shift), steps

    def _scaled_by_samples(self, subjects: Subjects, problem: Problem, shift: Tensor) -> tuple[Problem, Tensor]:
        """The smallest of a few multiples tμ at which samples show what is asked for; and the problem with γ from it.

        All multiples get the same samples. As long as none is enough or all are, the next t is where the noise-free
        margins would be low enough if noise added what it adds at the last t. Once t is bracketed, the secant gives it.
        """
        t = torch.ones_like(shift[..., 0])
        low, high = torch.zeros_like(t), torch.full_like(t, torch.inf)
        low_excess, high_excess, gamma = torch.ones_like(t), -torch.ones_like(t), problem.gamma
        for _ in range(SCALINGS):
            scaled = stretched(problem, shift, t)
            seen = self._under_noise(subjects, problem, scaled, self.seed + 1 + TURNS, self.samples)
            excess = seen.excess.unsqueeze(1)
            new_high, new_low = (excess <= 0) & (t < high), (excess > 0) & (t > low)
            high, high_excess = torch.where(new_high, t, high), torch.where(new_high, excess, high_excess)
            low, low_excess = torch.where(new_low, t, low), torch.where(new_low, excess, low_excess)
            gamma = torch.where((new_high | torch.isinf(high)).unsqueeze(-1), seen.gamma, gamma)
            share = (low_excess - INSIDE * high_excess) / (low_excess - high_excess)
            secant = low + (high - low) * share.clamp(0.1, 0.9)
            bracketed = (low > 0) & torch.isfinite(high)
            beyond = seen.gamma + BEYOND * seen.gamma.abs()
            t = torch.where(bracketed, secant, edge(replace(problem, gamma=beyond), shift))
        t = torch.where(torch.isfinite(high), high, t)
        return replace(problem, gamma=gamma), stretched(problem, shift, t)

    def _under_noise(self, subjects: Subjects, problem: Problem, shift: Tensor, seed: int, samples: int) -> UnderNoise:
        """What samples of the noise at a shift say of the network.

        What is asked for is that a quantile of the margin is at most 0, or that the expected margins are at most −γ.
        """
        margins = problem.margins
        assert isinstance(margins, NetworkMargins)
        noise_free = margins.at(shift, problem.sigma.unsqueeze(1))
        centres = margins.shifted(shift).squeeze(1)
        noise = (subjects.model.network, centres, problem.sigma, subjects.places, samples, seed)
        scores = torch.cat(list(noisy_scores(*noise)))
        if self.share is not None:
            above = CAUTION * (self.share * (1 - self.share) / samples) ** 0.5
            level = min(self.share + above, 1 - 0.5 / samples)
            quantile = torch.quantile(fooled_margin(scores, subjects.labels, subjects.targets), level, dim=0)
            added = quantile.reshape(-1, 1, 1) - noise_free.amax(-1, keepdim=True)
            return UnderNoise(quantile, added.expand_as(noise_free))
        excess = contrast(scores.mean(0).unsqueeze(1), margins.larger, margins.smaller) + self._asked_gamma
        return UnderNoise(excess.amax((1, 2)), excess - noise_free)


class UnderNoise(NamedTuple):
    """What samples of the noise at one shift say of the network."""

    excess: Tensor
    """How far the network is from what is asked for, (N,): at most 0 where that is reached."""
    gamma: Tensor
    """The γ (N, 1, K) with which the noise-free margins have the same excess at this shift."""
