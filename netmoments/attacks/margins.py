"""Margins that an attack brings below 0, with their derivatives: by the formula, or of the network itself.

A solver asks for the margins at shifts μ and noise levels σ (`Margins`), and for their slopes there (`MarginSlopes`).
Shifts have shape (N, R, m): R problems for each of N images, over the m coordinates that are free.

`ExpectedMargins` is the formula. The network is linearized, usually at each image M itself. With z = A(M + μ) + c₁ and
s = σ‖rows of A‖, the expected score k is Σ B(k)·(zΦ(z/s) + sφ(z/s)) + D(k)·(M + μ) + c₂(k). A margin is the difference
of two expected scores, so values and derivatives are closed forms. `NetworkMargins` are differences of the network's
own scores at M + μ, without noise, and autograd gives their derivatives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from netmoments.affine_relu_affine import AffineReluAffine
from netmoments.attacks.evaluation import scores_of
from netmoments.covariances import Isotropic
from netmoments.normal import density, distribution
from netmoments.precision import full_precision, matvec


class MarginSlopes(Protocol):
    """The margins at a point, and their derivatives there."""

    @property
    def value(self) -> Tensor:
        """The margins, (N, R, K)."""

    def weighted_gradient(self, multipliers: Tensor) -> Tensor:
        """Σₖ multipliers(k) ∇margin(k), (N, R, m), for multipliers (N, R, K)."""

    def gradients(self) -> Tensor:
        """Every ∇margin(k), (N, R, K, m)."""

    def weighted_sigma_slope(self, multipliers: Tensor) -> Tensor:
        """Σₖ multipliers(k) ∂margin(k)/∂σ, (N, R)."""


class Margins(Protocol):
    """K margins for each of R problems of N images, as functions of shifts (N, R, m) and noise levels (N, R)."""

    def at(self, shift: Tensor, sigma: Tensor) -> Tensor:
        """The margins, (N, R, K)."""

    def with_slopes(self, shift: Tensor, sigma: Tensor) -> MarginSlopes:
        """The margins, ready to be differentiated."""


class ClassPairs(NamedTuple):
    """For every margin the class whose score must fall below another's, and that other class: (N, R, K) each."""

    larger: Tensor
    smaller: Tensor


def contrast(scores: Tensor, larger: Tensor, smaller: Tensor) -> Tensor:
    """scores(larger) − scores(smaller) for scores (N, R, d) and classes (N, R, K)."""
    return scores.gather(-1, larger) - scores.gather(-1, smaller)


@dataclass(frozen=True, eq=False)
class NetworkMargins:
    """score(larger) − score(smaller) at images (N, *event) + μ, for classes (N, R, K).

    `free` (N, m) are the coordinates that μ may change; all by default. The noise level is ignored:
    `SparseSmooth` measures what noise adds to a margin by sampling, and sets γ to it.
    """

    network: nn.Module
    images: Tensor
    larger: Tensor
    smaller: Tensor
    free: Tensor | None = None

    def at(self, shift: Tensor, sigma: Tensor) -> Tensor:
        with torch.no_grad():
            return self._values(shift)

    def with_slopes(self, shift: Tensor, sigma: Tensor) -> NetworkSlopes:
        with torch.enable_grad():
            leaf = shift.detach().clone().requires_grad_()
            graph = self._values(leaf)
        return NetworkSlopes(leaf, graph, graph.detach())

    def _values(self, shift: Tensor) -> Tensor:
        scores = scores_of(self.network, self.shifted(shift).flatten(0, 1))
        return contrast(scores.unflatten(0, shift.shape[:2]), self.larger, self.smaller)

    def shifted(self, shift: Tensor) -> Tensor:
        """The images with shifts (N, R, m) added, (N, R, *event)."""
        flat = self.images.flatten(1).unsqueeze(1)
        if self.free is None:
            moved = flat + shift
        else:
            moved = flat.expand(-1, shift.shape[1], -1).scatter_add(2, self.free.unsqueeze(1).expand_as(shift), shift)
        return moved.unflatten(-1, self.images.shape[1:])


@dataclass(frozen=True, eq=False)
class NetworkSlopes:
    """The network's margins at shifts, with the autograd graph that their derivatives come from."""

    shift: Tensor
    """The leaf of the graph."""
    graph: Tensor
    """The margins, attached to the graph."""
    value: Tensor
    """The margins, detached."""

    def weighted_gradient(self, multipliers: Tensor) -> Tensor:
        with full_precision():
            return torch.autograd.grad(self.graph, self.shift, multipliers, retain_graph=True)[0]

    def gradients(self) -> Tensor:
        units = torch.eye(self.graph.shape[-1], dtype=self.graph.dtype, device=self.graph.device)
        rows = [self.weighted_gradient(unit.expand_as(self.graph).contiguous()) for unit in units]
        return torch.stack(rows, 2)

    def weighted_sigma_slope(self, multipliers: Tensor) -> Tensor:
        """0, because these margins are without noise."""
        return multipliers.new_zeros(multipliers.shape[:2])


class ShiftedUnits(NamedTuple):
    """The units of linearized networks under shifts and noise, (N, R, p) each, with h = mean/deviation of a unit."""

    gates: Tensor
    """Φ(h), the probability that a unit is open."""
    densities: Tensor
    """φ(h)."""
    expected: Tensor
    """E relu(z), to the absolute accuracy of the dtype."""


@dataclass(frozen=True, eq=False)
class LinearizedScores:
    """Expected scores of networks linearized at their images, ready for many evaluations.

    Args:
        A: (N, p, m), the columns of the free coordinates only.
        transposed: Aᵀ, contiguous: on a CPU a product with a few rows then reads memory in order, three times as fast.
        at_rest: z at μ = 0, (N, p).
        row_lengths: the lengths of the rows of the whole A, (N, p): a unit's deviation for σ = 1.
        B: (N, d, p).
        offset: D M + c₂, the scores at μ = 0 without the ReLUs' part, (N, d).
        D: (N, d, m), the columns of the free coordinates; None where there is no path around the ReLU.
    """

    A: Tensor
    transposed: Tensor
    at_rest: Tensor
    row_lengths: Tensor
    B: Tensor
    offset: Tensor
    D: Tensor | None

    @classmethod
    def of(cls, network: AffineReluAffine, images: Tensor, free: Tensor | None = None) -> LinearizedScores:
        """From linearized networks and the images (N, ...) that μ is added to, which may be elsewhere.

        `free` (N, m) are the coordinates that μ may change; all by default. Noise is on every coordinate.
        """
        flat, A, D = images.flatten(1), network.A, network.D
        at_rest, row_lengths = matvec(A, flat) + network.c1, torch.linalg.vector_norm(A, dim=-1)
        offset = network.c2 if D is None else network.c2 + matvec(D, flat)
        if free is not None:
            A, D = _columns(A, free), None if D is None else _columns(D, free)
        return cls(A, A.mT.contiguous(), at_rest, row_lengths, network.B, offset, D)

    def units(self, shift: Tensor, sigma: Tensor) -> ShiftedUnits:
        """The units under shifts (N, R, m) and noise levels that broadcast to (N, R)."""
        with full_precision():
            z = self.at_rest.unsqueeze(1) + torch.matmul(shift, self.transposed)
        std = sigma.unsqueeze(-1) * self.row_lengths.unsqueeze(1)
        h = (z / std.clamp(min=torch.finfo(std.dtype).tiny)).clamp(-40, 40)
        gates, densities = distribution(h), density(h)
        return ShiftedUnits(gates, densities, z * gates + std * densities)


def _columns(matrix: Tensor, free: Tensor) -> Tensor:
    """The columns of matrices (N, p, n) with indices (N, m), as (N, p, m)."""
    return matrix.gather(-1, free.unsqueeze(1).expand(-1, matrix.shape[1], -1))


@dataclass(frozen=True, eq=False)
class ExpectedMargins:
    """K differences of expected scores for each of R problems of each image; all are to become negative.

    margin = weights·E relu(z) + offset + direct·μ, with `weights` (N, R, K, p), `offset` (N, R, K), and `direct`
    (N, R, K, m), or None where there is no path around the ReLU.
    """

    scores: LinearizedScores
    weights: Tensor
    offset: Tensor
    direct: Tensor | None

    @classmethod
    def between(cls, scores: LinearizedScores, larger: Tensor, smaller: Tensor) -> ExpectedMargins:
        """E score(larger) − E score(smaller), for indices (N, R, K) of the linearized networks' scores."""
        offset = scores.offset.unsqueeze(-1)
        D = offset[..., :0] if scores.D is None else scores.D
        rows = torch.cat([scores.B, offset, D], -1)
        widths, (n, r, k) = [scores.B.shape[-1], 1, D.shape[-1]], larger.shape
        index = torch.stack([larger, smaller]).reshape(2, n, r * k, 1).expand(-1, -1, -1, rows.shape[-1])
        picked = rows.expand(2, *rows.shape).gather(2, index)
        contrasts = (picked[0] - picked[1]).reshape(n, r, k, -1).split(widths, -1)
        weights, offset, direct = map(torch.Tensor.contiguous, contrasts)
        return cls(scores, weights, offset.squeeze(-1), None if scores.D is None else direct)

    def at(self, shift: Tensor, sigma: Tensor) -> Tensor:
        """The margins, (N, R, K)."""
        return self.with_slopes(shift, sigma).value

    def with_slopes(self, shift: Tensor, sigma: Tensor) -> ExpectedSlopes:
        """The margins, ready to be differentiated."""
        units = self.scores.units(shift, sigma)
        with full_precision():
            value = torch.matmul(self.weights, units.expected.unsqueeze(-1)).squeeze(-1) + self.offset
            value = value if self.direct is None else value + matvec(self.direct, shift)
        return ExpectedSlopes(self, units, value)


@dataclass(frozen=True, eq=False)
class ExpectedSlopes:
    """Expected margins at a point, and their derivatives there."""

    margins: ExpectedMargins
    units: ShiftedUnits
    value: Tensor

    def weighted_gradient(self, multipliers: Tensor) -> Tensor:
        """Σₖ multipliers(k) ∇margin(k), (N, R, m), for multipliers (N, R, K); ∇margin = Aᵀ(Φ(h)·weights) + direct."""
        with full_precision():
            onto_units = torch.matmul(multipliers.unsqueeze(-2), self.margins.weights).squeeze(-2)
            slope = torch.matmul(onto_units * self.units.gates, self.margins.scores.A)
            if self.margins.direct is None:
                return slope
            return slope + torch.matmul(multipliers.unsqueeze(-2), self.margins.direct).squeeze(-2)

    def gradients(self) -> Tensor:
        """Every ∇margin(k), (N, R, K, m)."""
        weighted = self.margins.weights * self.units.gates.unsqueeze(2)
        n, r, k, p = weighted.shape
        with full_precision():
            slope = torch.matmul(weighted.reshape(n, r * k, p), self.margins.scores.A).reshape(n, r, k, -1)
        return slope if self.margins.direct is None else slope + self.margins.direct

    def least_deviations(self, sigma: Tensor) -> Tensor:
        """σ‖∇margin‖, (N, R, K), for σ (N,): the standard deviation of a margin's best linear approximation.

        It is at most the whole deviation, which `Formula.deviations` computes. All coordinates must be free.
        """
        return sigma.reshape(-1, 1, 1) * torch.linalg.vector_norm(self.gradients(), dim=-1)

    def weighted_sigma_slope(self, multipliers: Tensor) -> Tensor:
        """Σₖ multipliers(k) ∂margin(k)/∂σ, (N, R); ∂margin/∂σ = Σ weights·‖row of A‖·φ(h) over the units."""
        onto_units = torch.matmul(multipliers.unsqueeze(-2), self.margins.weights).squeeze(-2)
        return (onto_units * self.units.densities * self.margins.scores.row_lengths.unsqueeze(1)).sum(-1)


@dataclass(frozen=True, eq=False)
class Formula:
    """The expected scores of a group of images (N, ...), by linearized networks.

    `followed` (N, F) are the classes that the linearized networks have scores for; `scores` are functions of the free
    coordinates.
    """

    images: Tensor
    followed: Tensor
    linearized: AffineReluAffine
    scores: LinearizedScores

    def margins(self, pairs: ClassPairs) -> ExpectedMargins:
        """The margins between pairs of classes, all of which must be followed."""
        matches = torch.stack(pairs).unsqueeze(-1) == self.followed[:, None, None, :]
        larger, smaller = matches.to(torch.int64).argmax(-1)
        return ExpectedMargins.between(self.scores, larger, smaller)

    def deviations(self, margins: ExpectedMargins, sigma: Tensor, shift: Tensor) -> Tensor:
        """Standard deviations of margins (N, R, K) under N(M + μ, σ²I) for shifts (N, R, n) of all coordinates."""
        deviations = []
        for problem in range(shift.shape[1]):
            direct = None if margins.direct is None else margins.direct[:, problem]
            network = AffineReluAffine.trusted(
                self.linearized.A, self.linearized.c1, margins.weights[:, problem], margins.offset[:, problem], direct
            )
            mean = self.images.flatten(1) + shift[:, problem]
            covariance = network.moments(mean, Isotropic(sigma.square(), mean.shape[1]))[1]
            deviations.append(covariance.diagonal(dim1=-2, dim2=-1).sqrt())
        return torch.stack(deviations, 1)
