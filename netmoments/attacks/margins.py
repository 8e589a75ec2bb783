"""Margins, which an attack brings below 0: what solvers ask of them, by the formula and of the network itself.

By the formula networks are linearized, one for each image. With z = A(M + μ) + c₁ and s = σ‖rows of A‖, the expected
score k is Σ B(k)·(zΦ(z/s) + sφ(z/s)) + D(k)(M + μ) + c₂(k), and a margin is a difference of two of them: values and
derivatives in closed form. A shift has shape (N, R, m): for each of N images R shifts at once, over the m coordinates
that are free."""

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

    def with_slopes(self, shift: Tensor, sigma: Tensor) -> MarginSlopes:
        """The margins with what their derivatives need."""


class ClassPairs(NamedTuple):
    """Which class's score must fall below which, (N, R, K) each."""

    larger: Tensor
    smaller: Tensor


def contrast(scores: Tensor, larger: Tensor, smaller: Tensor) -> Tensor:
    """scores(larger) − scores(smaller) for scores (N, R, d) and classes (N, R, K)."""
    return scores.gather(-1, larger) - scores.gather(-1, smaller)


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

    def at(self, shift: Tensor, sigma: Tensor) -> Tensor:
        with torch.no_grad():
            return self._at(shift)

    def with_slopes(self, shift: Tensor, sigma: Tensor) -> NetworkSlopes:
        with torch.enable_grad():
            moved = shift.detach().clone().requires_grad_()
            graph = self._at(moved)
        return NetworkSlopes(moved, graph, graph.detach())

    def _at(self, shift: Tensor) -> Tensor:
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
    """The margins of the network at shifts, with the graph that their derivatives come from."""

    shift: Tensor
    graph: Tensor
    value: Tensor

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


class ShiftedUnits(NamedTuple):
    """The units of linearized networks under shifts and noise, (N, R, p)."""

    gates: Tensor
    """Φ(h), how often a unit is open, with h its mean over its deviation."""
    bells: Tensor
    """φ(h)."""
    expected: Tensor
    """E relu(z), to the absolute accuracy of the dtype."""


@dataclass(frozen=True, eq=False)
class LinearizedScores:
    """Linearized networks at their images, ready for many evaluations.

    Args:
        A: (N, p, m), the columns of the free coordinates only.
        transposed: Aᵀ in memory of its own: on a CPU a product with a few rows reads it in order, three times as fast.
        at_rest: z at μ = 0, (N, p).
        reach: the lengths of the rows of the whole A, (N, p): a unit's deviation for σ = 1.
        B: (N, d, p).
        scores: B·0 + D M + c₂, what the scores have beside the ReLUs, at μ = 0, (N, d).
        D: (N, d, m), or None where there is no path around the ReLU.
    """

    A: Tensor
    transposed: Tensor
    at_rest: Tensor
    reach: Tensor
    B: Tensor
    scores: Tensor
    D: Tensor | None

    @classmethod
    def of(cls, network: AffineReluAffine, images: Tensor, free: Tensor | None = None) -> LinearizedScores:
        """From networks linearized anywhere and the images (N, ...) that μ is added to.

        `free` (N, m) are the coordinates that μ may change; all by default. Noise is on all of them.
        """
        flat, A, D = images.flatten(1), network.A, network.D
        at_rest, reach = matvec(A, flat) + network.c1, torch.linalg.vector_norm(A, dim=-1)
        scores = network.c2 if D is None else network.c2 + matvec(D, flat)
        if free is not None:
            A, D = _columns(A, free), None if D is None else _columns(D, free)
        return cls(A, A.mT.contiguous(), at_rest, reach, network.B, scores, D)

    def units(self, shift: Tensor, sigma: Tensor) -> ShiftedUnits:
        """Under shifts (N, R, m) and noise levels (N, R) or broadcastable to that."""
        with full_precision():
            z = self.at_rest.unsqueeze(1) + torch.matmul(shift, self.transposed)
        std = sigma.unsqueeze(-1) * self.reach.unsqueeze(1)
        h = (z / std.clamp(min=torch.finfo(std.dtype).tiny)).clamp(-40, 40)
        gates, bells = distribution(h), density(h)
        return ShiftedUnits(gates, bells, z * gates + std * bells)


def _columns(matrix: Tensor, free: Tensor) -> Tensor:
    """The columns (N, m) of matrices (N, p, n): (N, p, m)."""
    return matrix.gather(-1, free.unsqueeze(1).expand(-1, matrix.shape[1], -1))


@dataclass(frozen=True, eq=False)
class ExpectedMargins:
    """K differences of expected scores for each of R problems of each image; all should become negative.

    `weights` (N, R, K, p), `offset` (N, R, K), `around` (N, R, K, m) or None: margin = weights·E relu(z) + offset +
    around·μ.
    """

    networks: LinearizedScores
    weights: Tensor
    offset: Tensor
    around: Tensor | None

    @classmethod
    def between(cls, networks: LinearizedScores, larger: Tensor, smaller: Tensor) -> ExpectedMargins:
        """E(larger) − E(smaller) for places of scores, both (N, R, K)."""
        scores = networks.scores.unsqueeze(-1)
        direct = scores[..., :0] if networks.D is None else networks.D
        rows = torch.cat([networks.B, scores, direct], -1)
        widths, (n, r, k) = [networks.B.shape[-1], 1, direct.shape[-1]], larger.shape
        index = torch.stack([larger, smaller]).reshape(2, n, r * k, 1).expand(-1, -1, -1, rows.shape[-1])
        picked = rows.expand(2, *rows.shape).gather(2, index)
        contrasts = (picked[0] - picked[1]).reshape(n, r, k, -1).split(widths, -1)
        weights, offset, around = map(torch.Tensor.contiguous, contrasts)
        return cls(networks, weights, offset.squeeze(-1), None if networks.D is None else around)

    def at(self, shift: Tensor, sigma: Tensor) -> Tensor:
        """The margins, (N, R, K)."""
        return self.with_slopes(shift, sigma).value

    def with_slopes(self, shift: Tensor, sigma: Tensor) -> ExpectedSlopes:
        """The margins with what their derivatives need."""
        units = self.networks.units(shift, sigma)
        with full_precision():
            value = torch.matmul(self.weights, units.expected.unsqueeze(-1)).squeeze(-1) + self.offset
            value = value if self.around is None else value + matvec(self.around, shift)
        return ExpectedSlopes(self, units, value)


@dataclass(frozen=True, eq=False)
class ExpectedSlopes:
    """Margins at a point, and their derivatives there."""

    margins: ExpectedMargins
    units: ShiftedUnits
    value: Tensor

    def pulled(self, multipliers: Tensor) -> Tensor:
        """Σₖ multipliers(k) ∇margin(k), (N, R, m), for multipliers (N, R, K): Aᵀ(Φ·weights)."""
        with full_precision():
            onto_units = torch.matmul(multipliers.unsqueeze(-2), self.margins.weights).squeeze(-2)
            slope = torch.matmul(onto_units * self.units.gates, self.margins.networks.A)
            if self.margins.around is None:
                return slope
            return slope + torch.matmul(multipliers.unsqueeze(-2), self.margins.around).squeeze(-2)

    def gradients(self) -> Tensor:
        """Every ∇margin(k), (N, R, K, m)."""
        weighted = self.margins.weights * self.units.gates.unsqueeze(2)
        n, r, k, p = weighted.shape
        with full_precision():
            slope = torch.matmul(weighted.reshape(n, r * k, p), self.margins.networks.A).reshape(n, r, k, -1)
        return slope if self.margins.around is None else slope + self.margins.around

    def least_deviations(self, sigma: Tensor) -> Tensor:
        """σ‖∇margin‖, (N, R, K), for σ (N,): what the best linear approximation has of a margin's standard deviation.

        At most the whole, which `Formula.deviations` has; all coordinates must be free.
        """
        return sigma.reshape(-1, 1, 1) * torch.linalg.vector_norm(self.gradients(), dim=-1)

    def by_sigma(self, multipliers: Tensor) -> Tensor:
        """∂/∂σ of the same sum, (N, R): Σ weights·‖row of A‖·φ(h)."""
        onto_units = torch.matmul(multipliers.unsqueeze(-2), self.margins.weights).squeeze(-2)
        return (onto_units * self.units.bells * self.margins.networks.reach.unsqueeze(1)).sum(-1)


@dataclass(frozen=True, eq=False)
class Formula:
    """The expected scores of a group of images (N, ...), from networks linearized there.

    `followed` (N, F) are the classes that the linearized networks have; `scores` is about the free coordinates.
    """

    images: Tensor
    followed: Tensor
    linearized: AffineReluAffine
    scores: LinearizedScores

    def margins(self, pairs: ClassPairs) -> ExpectedMargins:
        """Those between classes, each at its place among the followed ones."""
        found = torch.stack(pairs).unsqueeze(-1) == self.followed[:, None, None, :]
        larger, smaller = found.to(torch.int64).argmax(-1)
        return ExpectedMargins.between(self.scores, larger, smaller)

    def deviations(self, margins: ExpectedMargins, sigma: Tensor, shift: Tensor) -> Tensor:
        """Standard deviations of margins (N, R, K) under N(M + μ, σ²I) for shifts (N, R, n) of all coordinates."""
        columns = []
        for problem in range(shift.shape[1]):
            around = None if margins.around is None else margins.around[:, problem]
            net = AffineReluAffine.trusted(
                self.linearized.A, self.linearized.c1, margins.weights[:, problem], margins.offset[:, problem], around
            )
            mean = self.images.flatten(1) + shift[:, problem]
            covariance = net.moments(mean, Isotropic(sigma.square(), mean.shape[1]))[1]
            columns.append(covariance.diagonal(dim1=-2, dim2=-1).sqrt())
        return torch.stack(columns, 1)
