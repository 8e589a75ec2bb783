"""Margins, which an attack brings below 0: what solvers ask of them, and those of the network itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from netmoments.memory import elements_together
from netmoments.precision import full_precision


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


class ClassPairs(NamedTuple):
    """Which class's score must fall below which, (N, R, K) each."""

    larger: Tensor
    smaller: Tensor

    def of_rival(self, chosen: Tensor) -> ClassPairs:
        """One of the R problems of each image, (N,), with R = 1."""
        return ClassPairs(picked(self.larger, chosen), picked(self.smaller, chosen))


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


@dataclass(frozen=True, eq=False)
class NetworkMargins:
    """score(larger) − score(smaller) at images (N, *event) + μ, for classes (N, R, K).

    `free` (N, m) are the coordinates that μ is about; all by default. The noise level is ignored: what noise adds to a
    margin is measured by sampling, and put into γ.
    """

    network: nn.Module
    images: Tensor
    larger: Tensor
    smaller: Tensor
    free: Tensor | None = None

    def entries(self, images: Tensor) -> NetworkMargins:
        """Those of some of the images."""
        free = None if self.free is None else self.free[images]
        return NetworkMargins(self.network, self.images[images], self.larger[images], self.smaller[images], free)

    def at(self, shift: Tensor, sigma: Tensor) -> Tensor:
        with torch.no_grad():
            return contrast(self._scores(self.shifted(shift)), self.larger, self.smaller)

    def with_slopes(self, shift: Tensor, sigma: Tensor) -> NetworkSlopes:
        with torch.enable_grad():
            moved = shift.detach().clone().requires_grad_()
            value = contrast(self._scores(self.shifted(moved)), self.larger, self.smaller)
        return NetworkSlopes(moved, value)

    def shifted(self, shift: Tensor) -> Tensor:
        """The images with shifts (N, R, m) added, (N, R, *event)."""
        flat = self.images.flatten(1).unsqueeze(1)
        if self.free is None:
            moved = flat + shift
        else:
            moved = flat.expand(-1, shift.shape[1], -1).scatter_add(2, self.free.unsqueeze(1).expand_as(shift), shift)
        return moved.unflatten(-1, self.images.shape[1:])

    def _scores(self, inputs: Tensor) -> Tensor:
        flat = inputs.flatten(0, 1)
        with full_precision():
            parts = [self.network(part) for part in flat.split(elements_together("inputs", flat, flat[0].numel()))]
        return torch.cat(parts).unflatten(0, inputs.shape[:2])


@dataclass(frozen=True, eq=False)
class NetworkSlopes:
    """The margins of the network at shifts, with the graph that their derivatives come from."""

    shift: Tensor
    graph: Tensor

    @property
    def value(self) -> Tensor:
        return self.graph.detach()

    def pulled(self, multipliers: Tensor) -> Tensor:
        with full_precision():
            return torch.autograd.grad(self.graph, self.shift, multipliers, retain_graph=True)[0]

    def gradients(self) -> Tensor:
        one = torch.eye(self.graph.shape[-1], dtype=self.graph.dtype, device=self.graph.device)
        rows = [self.pulled(row.expand_as(self.graph).contiguous()) for row in one]
        return torch.stack(rows, 2)

    def by_sigma(self, multipliers: Tensor) -> Tensor:
        """0: there is no noise."""
        return multipliers.new_zeros(multipliers.shape[:2])
