"""What a solver needs to know of margins, whether they come from a formula or from the network itself."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Slopes(Protocol):
    """Margins at a point, and their derivatives there."""

    @property
    def value(self) -> Tensor:
        """The margins, (N, R, K)."""

    def pulled(self, multipliers: Tensor) -> Tensor:
        """Σₖ multipliers(k) ∇margin(k), (N, R, m), for multipliers (N, R, K)."""

    def gradients(self) -> Tensor:
        """Every ∇margin(k), (N, R, K, m)."""

    def by_sigma(self, multipliers: Tensor) -> Tensor:
        """∂/∂σ of the same sum, (N, R)."""


class Margins(Protocol):
    """Functions of shifts (N, R, m) and noise levels (N, R): K margins for each of R problems of N images."""

    def at(self, shift: Tensor, sigma: Tensor) -> Tensor:
        """The margins, (N, R, K)."""

    def with_slopes(self, shift: Tensor, sigma: Tensor) -> Slopes:
        """The margins with what their derivatives need."""


class Contest(NamedTuple):
    """Which class's score must fall below which, (N, R, K) each."""

    larger: Tensor
    smaller: Tensor

    def problem(self, chosen: Tensor) -> Contest:
        """One of the R problems of each image, (N,), with R = 1."""
        return Contest(picked(self.larger, chosen), picked(self.smaller, chosen))


def contrast(scores: Tensor, larger: Tensor, smaller: Tensor) -> Tensor:
    """scores(larger) − scores(smaller) for scores (N, R, d) and classes (N, R, K)."""
    return scores.gather(-1, larger) - scores.gather(-1, smaller)


def fooled_margin(scores: Tensor, labels: Tensor, targets: Tensor | None) -> Tensor:
    """Below 0 exactly where an answer is what the attacker wants, for scores (..., N, d) and classes (N,).

    Without targets the score of the label less the best other one; with them the best other one less the target's.
    """
    wanted = labels if targets is None else targets
    index = wanted.unsqueeze(-1).expand(*scores.shape[:-1], 1)
    own = scores.gather(-1, index).squeeze(-1)
    others = scores.scatter(-1, index, -torch.inf).amax(-1)
    return own - others if targets is None else others - own


def picked(values: Tensor, chosen: Tensor) -> Tensor:
    """One of R entries of each image: (N, R, ...) → (N, 1, ...)."""
    return values[torch.arange(len(chosen), device=chosen.device), chosen].unsqueeze(1)
