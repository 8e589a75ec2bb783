"""The expected scores of linearized networks, one for each image, as a function of the noise's mean μ and σ.

With z = A(M + μ) + c₁ and s = σ‖rows of A‖, the expected score k is Σ B(k)·(zΦ(z/s) + sφ(z/s)) + D(k)(M + μ) + c₂(k).
A margin is a difference of two of them. Values and derivatives in closed form; a shift has shape (N, R, m): for each of
N images R shifts at once, over the m coordinates that are free."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from netmoments.affine_relu_affine import AffineReluAffine
from netmoments.attacks.base import Subjects
from netmoments.attacks.margins import ClassPairs
from netmoments.covariances import Isotropic
from netmoments.gaussian import Gaussian
from netmoments.normal import density, distribution
from netmoments.precision import full_precision, matvec


@dataclass(frozen=True, eq=False)
class LinearizedScores:
    """Linearized networks at their images, ready for many evaluations.

    Args:
        A: (N, p, m), the columns of the free coordinates only.
        at_rest: z at μ = 0, (N, p).
        reach: the lengths of the rows of the whole A, (N, p): a unit's deviation for σ = 1.
        B: (N, d, p).
        scores: B·0 + D M + c₂, what the scores have beside the ReLUs, at μ = 0, (N, d).
        D: (N, d, m), or None where there is no path around the ReLU.
    """

    A: Tensor
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
        flat = images.flatten(1)
        with full_precision():
            offset = network.c2 if network.D is None else network.c2 + matvec(network.D, flat)
        return cls(
            _columns(network.A, free),
            matvec(network.A, flat) + network.c1,
            torch.linalg.vector_norm(network.A, dim=-1),
            network.B,
            offset,
            None if network.D is None else _columns(network.D, free),
        )

    @cached_property
    def transposed(self) -> Tensor:
        """Aᵀ in memory of its own: on a CPU a product with a few rows then reads it in order, three times as fast."""
        return self.A.mT.contiguous()

    def units(self, shift: Tensor, sigma: Tensor) -> ShiftedUnits:
        """The pre-activations under shifts (N, R, m) and noise levels (N, R) or broadcastable to that."""
        with full_precision():
            z = self.at_rest.unsqueeze(1) + torch.matmul(shift, self.transposed)
        std = sigma.unsqueeze(-1) * self.reach.unsqueeze(1)
        tiny = torch.finfo(std.dtype).tiny
        return ShiftedUnits(z, std, (z / std.clamp(min=tiny)).clamp(-40, 40))


@dataclass(frozen=True, eq=False)
class ShiftedUnits:
    """Pre-activations (N, R, p): mean, deviation, and their ratio."""

    mean: Tensor
    std: Tensor
    h: Tensor

    @cached_property
    def gates(self) -> Tensor:
        """Φ(h), how often a unit is open."""
        return distribution(self.h)

    @cached_property
    def bells(self) -> Tensor:
        """φ(h)."""
        return density(self.h)

    @cached_property
    def expected(self) -> Tensor:
        """E relu(z), to the absolute accuracy of the dtype."""
        return self.mean * self.gates + self.std * self.bells


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

        def contrast(rows: Tensor) -> Tensor:
            """(N, d, x) → (N, R, K, x)."""
            n, r, k = larger.shape
            index = torch.stack([larger, smaller]).reshape(2, n, r * k, 1).expand(-1, -1, -1, rows.shape[-1])
            picked = rows.unsqueeze(0).expand(2, -1, -1, -1).gather(2, index)
            return (picked[0] - picked[1]).reshape(n, r, k, -1)

        return cls(
            networks,
            contrast(networks.B),
            contrast(networks.scores.unsqueeze(-1)).squeeze(-1),
            None if networks.D is None else contrast(networks.D),
        )

    def at(self, shift: Tensor, sigma: Tensor) -> Tensor:
        """The margins, (N, R, K)."""
        return self._from(self.networks.units(shift, sigma), shift)

    def _from(self, units: ShiftedUnits, shift: Tensor) -> Tensor:
        with full_precision():
            value = torch.matmul(self.weights, units.expected.unsqueeze(-1)).squeeze(-1) + self.offset
            return value if self.around is None else value + matvec(self.around, shift)

    def with_slopes(self, shift: Tensor, sigma: Tensor) -> ExpectedSlopes:
        """The margins with what their derivatives need."""
        units = self.networks.units(shift, sigma)
        return ExpectedSlopes(self, units, self._from(units, shift))


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

    def by_sigma(self, multipliers: Tensor) -> Tensor:
        """∂/∂σ of the same sum, (N, R): Σ weights·‖row of A‖·φ(h)."""
        onto_units = torch.matmul(multipliers.unsqueeze(-2), self.margins.weights).squeeze(-2)
        return (onto_units * self.units.bells * self.margins.networks.reach.unsqueeze(1)).sum(-1)


def _columns(matrix: Tensor, free: Tensor | None) -> Tensor:
    if free is None:
        return matrix
    return matrix.gather(-1, free.unsqueeze(1).expand(-1, matrix.shape[1], -1))


@dataclass(frozen=True, eq=False)
class Formula:
    """The expected scores of a group of images.

    `followed` (N, F) are the classes that the linearized networks have; `free` (N, m) the coordinates that shifts are
    about, all if None.
    """

    linearized: AffineReluAffine
    subjects: Subjects
    followed: Tensor
    free: Tensor | None = None

    def margins(self, pairs: ClassPairs) -> ExpectedMargins:
        larger, smaller = (places_of(classes, self.followed) for classes in pairs)
        return ExpectedMargins.between(self._scores, larger, smaller)

    @cached_property
    def _scores(self) -> LinearizedScores:
        return LinearizedScores.of(self.linearized, self.subjects.images, self.free)

    def deviations(self, pairs: ClassPairs, sigma: Tensor, shift: Tensor) -> Tensor:
        """Standard deviations of the margins (N, R, K) under N(M + μ, σ²I) for shifts (N, R, n) of all coordinates."""
        margins = self.margins(pairs)
        columns = []
        for problem in range(shift.shape[1]):
            around = None if margins.around is None else margins.around[:, problem]
            net = AffineReluAffine.trusted(
                self.linearized.A, self.linearized.c1, margins.weights[:, problem], margins.offset[:, problem], around
            )
            mean = self.subjects.images.flatten(1) + shift[:, problem]
            noise = Gaussian._trusted(mean, Isotropic(sigma.square(), mean.shape[1]), event_ndim=1)
            covariance = net.moments(noise)[1]
            columns.append(covariance.diagonal(dim1=-2, dim2=-1).sqrt())
        return torch.stack(columns, 1)


def places_of(classes: Tensor, followed: Tensor) -> Tensor:
    """Where classes (N, R, K) are among the followed ones (N, F)."""
    found = classes.unsqueeze(-1) == followed[:, None, None, :]
    return found.to(torch.int64).argmax(-1)
