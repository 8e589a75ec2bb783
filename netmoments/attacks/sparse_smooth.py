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

from netmoments.attacks.base import Attack, Sampled, Solved, Subjects, entries
from netmoments.attacks.evaluation import Success, fooled_margin, noisy_scores
from netmoments.attacks.margins import ClassPairs, ExpectedMargins, Formula, Margins, NetworkMargins, contrast
from netmoments.attacks.primal_dual import Iterate, Problem, cheapest, descend, edge, finished, lower_bound, stretched
from netmoments.checks import require_count, require_sigma

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
        """Of the samples that are to be fooled; None where γ was given instead."""
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
        problem, solution, taken = self._for_every_rival(subjects, problem, pairs)
        rival = cheapest(problem, solution)
        pairs, solution = ClassPairs(pairs.larger[rival], pairs.smaller[rival]), entries(solution, rival)
        expected, gamma = formula.margins(pairs), problem.gamma[rival]
        if self.polish:
            own = NetworkMargins(subjects.model.network, subjects.images, *pairs)
            problem = replace(problem, margins=own, gamma=gamma)
            problem, solution, more = self._calibrated(subjects, problem, solution)
        else:
            problem = replace(problem, margins=expected, gamma=gamma)
            problem, solution, more = self._widened(formula, expected, problem, solution)
        return self._gathered(problem, solution, expected, pairs.smaller[:, 0, 0], taken + more)

    def _for_every_rival(self, subjects: Subjects, problem: Problem, pairs: ClassPairs) -> tuple[Problem, Iterate, int]:
        """The problems by the formula, all rivals, solved; and from there those of the network, and the steps on it."""
        solution = finished(problem, descend(problem, Iterate.start(problem), self.iterations))
        if not self.polish:
            return problem, solution, 0
        own, steps = NetworkMargins(subjects.model.network, subjects.images, *pairs), max(1, self.polish // 2)
        problem = replace(problem, margins=own, memory=MEMORY)
        return problem, finished(problem, descend(problem, solution, steps, smoother=1.0)), steps

    def _gathered(
        self, problem: Problem, solution: Iterate, expected: Margins, towards: Tensor, more: Tensor
    ) -> Solved:
        """What was found for the rival that was chosen, R = 1, in `more` steps (N,) after the first on the formula."""
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

    def _as_asked(self, success: Success, sampled: Sampled) -> Tensor:
        """The share of fooled samples is the confidence or above, or the margin of mean scores −γ or below.

        To within two standard errors of both the samples that γ was set by and those that judge.
        """
        if self.share is not None:
            return success.reaches(self.share, 2 * 2**0.5)
        error = sampled.margins.std(0) / len(sampled.margins) ** 0.5
        return sampled.mean_margin - 2 * 2**0.5 * error <= -self._asked_gamma

    def _gamma_for(self, deviations: Tensor) -> Tensor:
        """γ (N, R, K) for margins with these standard deviations: as given, or so many that the share is below 0."""
        if self.share is None:
            return torch.full_like(deviations, self._asked_gamma)
        return torch.special.ndtri(torch.tensor(self.share, dtype=torch.float64)).to(deviations) * deviations

    def _widened(
        self, formula: Formula, margins: ExpectedMargins, problem: Problem, solution: Iterate
    ) -> tuple[Problem, Iterate, Tensor]:
        """By the formula alone: γ from the margin's spread where the noise is now, and the problem solved again."""
        steps = 0 if self.share is None else self.iterations // 2
        taken = torch.full_like(formula.followed[:, 0], steps)
        if not steps:
            return problem, solution, taken
        gamma = self._gamma_for(formula.deviations(margins, problem.sigma, solution.shift))
        problem = replace(problem, gamma=gamma)
        return problem, finished(problem, descend(problem, solution, steps, smoother=1.0)), taken

    def _calibrated(self, subjects: Subjects, problem: Problem, solution: Iterate) -> tuple[Problem, Iterate, Tensor]:
        """On the network: γ from what samples of the noise add to its margins, and the problem solved again with that.

        Once, and again for images of which a margin does not hold; then the shift is scaled until the samples say what
        was asked. And the steps that took, (N,).
        """
        taken, gamma = torch.zeros_like(subjects.labels), problem.gamma
        left = torch.arange(len(gamma), device=gamma.device)
        for turn in range(TURNS):
            mine, here, group = entries(problem, left), entries(solution, left), entries(subjects, left)
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
        noise = (subjects.model.network, centres, problem.sigma, subjects.places, samples, seed)
        scores = torch.cat(list(noisy_scores(*noise)))
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
