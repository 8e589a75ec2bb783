"""Rare flips along lines: two runs of the network tell how probable they are on a whole line of the noise.

A line goes through a point across the boundary that a surrogate expects. On it ε = e + tα, with t ~ N(0, 1) and e
across α, and the probability of a flip is p = E_e[P(e)], P(e) = ∫ φ(t) 1{flip at e + tα} dt (line sampling,
Koutsourelakis, Pradlwarter & Schuëller 2004). What a surrogate leaves unexplained hardly varies along a line. So a
first run tells how wrong the surrogate is on this line, and a second one is made where flips then begin, at a t drawn
from a density π: 1{flip} φ(t)/π(t) is an unbiased estimate of P(e), whatever the network does on the line, and nearly
exact where the first run was right. Single points have to be spread over all that surrogates leave open; lines need
not, and vary about four times less.

Where surrogates have several faces, each has a direction α_j of its own, and ω_j ≥ 0 with Σ_j ω_j = 1 says which face
a point belongs to. A point of a guide with the density φ ρ gives a line of the face j with probability ω_j. The lines
of a face have the density of e times ρ_j(e) = ∫ φ(t) (ω_j ρ)(e + tα_j) dt, and

    p = E[1{flip} φ(t) ω_j/(π(t) ρ_j(e))].

A tenth of π is φ ω_j ρ/ρ_j itself, so that no term is more than ten times that of a single point, 1/ρ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from netmoments.flips.guide import AS_FITTED, DOUBT, Guide, Tilts, joint_flip_chance, saddlepoint
from netmoments.flips.surrogate import Quadratic
from netmoments.normal import density

REACH, STEP = 12.0, 0.05
"""Lines are followed to so many standard deviations on both sides, beyond which is 4e-33, in cells of this width."""
BELONGING = 3.0
"""A point belongs to the face of which −q/s is largest, the more clearly the larger this number."""
RUNS_EACH = 2
"""Runs of the network on a line."""
KNOWN, FORGOTTEN = 0.1, 0.2
"""The spread of margins about the prediction of a first run, at its place and for each standard deviation away from it,
over the spread s of the surrogate.
"""
DEFENSIVE = 0.1
"""This share of the density of second runs is that of single points."""
OWN_VARIANCE, SHARE_OF_POINTS = 1.5, 0.25
"""The variance of a line is about 1.5, as its second run may miss, and a quarter of that of a single point: 0.21 to
0.28 of it from 1e-4 to 1e-8, where a surrogate leaves Gaussian residuals with 5 to 35 % of the variance, and points
have the best density there is.
"""
WORTH = 30.0
"""Lines pay where the variance of a single point is larger than this."""


def line_variance(point_variance: float) -> float:
    """The variance of a line over the square of the probability, by that of a single point."""
    return OWN_VARIANCE + SHARE_OF_POINTS * point_variance


def runs_for_unit_error(point_variance: float) -> float:
    """The runs that an estimate takes to a relative error of 1, on single points or on lines, by which is cheaper."""
    return point_variance if point_variance <= WORTH else RUNS_EACH * line_variance(point_variance)


def direction(surrogate: Quadratic) -> Tensor:
    """α (n,): against the mean slope of a surrogate where it is tilted to have mean 0, of length 1, in float64."""
    tilt = Tilts.at(surrogate, torch.tensor([saddlepoint(surrogate)], dtype=torch.float64))
    slope = surrogate.slope + surrogate.curvature * tilt.means[0]
    across = surrogate.basis.double() @ slope.to(surrogate.basis.device)
    return -across / across.norm().clamp(min=1e-300)


@dataclass(frozen=True, eq=False)
class Faces:
    """The J faces of the boundary that the surrogates of a guide know, one of each surrogate, and lines across them.

    N lines are given by points ε (N, n) on them and the number of the face (N,) of each. A line is cut into T cells.
    """

    surrogates: tuple[Quadratic, ...]
    spreads: tuple[float, ...]
    """s of each surrogate."""
    directions: Tensor
    """α of each face, (J, n), with the dtype of the noise."""

    @classmethod
    def of(cls, guide: Guide) -> Faces:
        directions = torch.stack([direction(surrogate) for surrogate in guide.surrogates])
        spreads = tuple(spreads[AS_FITTED] for spreads in guide.spreads)
        return cls(guide.surrogates, spreads, directions.to(guide.surrogates[0].basis))

    @cached_property
    def places(self) -> Tensor:
        """t in the middle of each cell, (T,)."""
        count = round(2 * REACH / STEP)
        return STEP * (torch.arange(count, dtype=torch.float64, device=self.directions.device) + 0.5) - REACH

    def belonging(self, margins: Tensor) -> Tensor:
        """ω (..., J), from the surrogates' margins q (..., J)."""
        return (-BELONGING * margins / margins.new_tensor(self.spreads)).softmax(-1)

    def surrogate_margins(self, white: Tensor) -> Tensor:
        """q (N, J) at ε (N, n)."""
        return torch.stack([each.at(each.coordinates(white)) for each in self.surrogates], 1)

    def chosen(self, white: Tensor, generator: torch.Generator) -> Tensor:
        """A face (N,) for the line through each ε (N, n), with probability ω."""
        return torch.multinomial(self.belonging(self.surrogate_margins(white)), 1, generator=generator).squeeze(1)

    def starts(self, white: Tensor, face: Tensor) -> Tensor:
        """e (N, n): the points at t = 0."""
        alpha = self.directions[face]
        return white - (white * alpha).sum(1, keepdim=True) * alpha

    def at(self, starts: Tensor, face: Tensor, t: Tensor) -> Tensor:
        """ε (N, n) at t (N,)."""
        return starts + t.unsqueeze(1).to(starts.dtype) * self.directions[face]

    def surrogate_margins_along(
        self, surrogates: Sequence[Quadratic], starts: Tensor, face: Tensor, t: Tensor
    ) -> Tensor:
        """q (N, T, J) of some surrogates at t (T,) or (N, T): q(e) + t v·(b + Hz) + ½ t² vᵀHv with v = Uᵀα."""
        t = t.expand(len(starts), t.shape[-1])
        columns = []
        for surrogate in surrogates:
            z, v = surrogate.coordinates(starts), surrogate.coordinates(self.directions)[face]
            slope, curvature = surrogate.slope.to(z.device), surrogate.curvature.to(z.device)
            rise, bend = (v * (slope + z * curvature)).sum(1, keepdim=True), v.square() @ curvature
            columns.append(surrogate.at(z).unsqueeze(1) + t * rise + 0.5 * t.square() * bend.unsqueeze(1))
        return torch.stack(columns, -1)

    def ratios_along(self, guide: Guide, starts: Tensor, face: Tensor) -> Tensor:
        """ρ (N, T) of a guide along lines."""
        margins = self.surrogate_margins_along(guide.surrogates, starts, face, self.places)
        squares = self.squares_along(guide, starts, face)
        return guide.ratio_of_margins(margins.flatten(0, 1), squares.flatten()).unflatten(0, margins.shape[:2])

    def squares_along(self, guide: Guide, starts: Tensor, face: Tensor) -> Tensor:
        """|Dᵀz|² (N, T) along lines, for the widened directions D of a guide."""
        z, step = (guide.coordinates(x) @ guide.widened.directions for x in (starts, self.directions))
        step = step[face]
        constant, slope, bend = (x.sum(1, keepdim=True) for x in (z.square(), 2 * z * step, step.square()))
        return constant + self.places * slope + self.places.square() * bend

    def weights(self, margins: Tensor, face: Tensor) -> Tensor:
        """φ(t) ω_j times the width of a cell, (N, T), for the face j (N,) of each line, from q (N, T, J)."""
        own = self.belonging(margins).gather(-1, face.view(-1, 1, 1).expand(*margins.shape[:2], 1)).squeeze(-1)
        return STEP * density(self.places) * own

    def line_ratio(self, guide: Guide, white: Tensor, face: Tensor) -> Tensor:
        """ρ_j (N,) of a guide, of the lines through ε (N, n)."""
        starts = self.starts(white, face)
        weights = self.weights(self.surrogate_margins_along(self.surrogates, starts, face, self.places), face)
        return (weights * self.ratios_along(guide, starts, face)).sum(1)

    def lines(self, guides: Sequence[Guide], shares: Sequence[float], white: Tensor, face: Tensor) -> Lines:
        """The lines of these faces through ε (N, n), which are drawn from guides with these shares."""
        starts = self.starts(white, face)
        margins = self.surrogate_margins_along(self.surrogates, starts, face, self.places)
        weights = self.weights(margins, face)
        each, mixture = [], torch.zeros_like(weights)
        for guide, share in zip(guides, shares, strict=True):
            ratio = weights * self.ratios_along(guide, starts, face)
            each.append(ratio.sum(1))
            mixture = mixture + share * ratio
        return Lines(self, starts, face, margins, weights, mixture, torch.stack(each, 1))


@dataclass(frozen=True, eq=False)
class Lines:
    """Some lines, with what surrogates and guides say of them."""

    faces: Faces
    starts: Tensor
    """e (N, n)."""
    face: Tensor
    """j, (N,)."""
    surrogate_margins: Tensor
    """q (N, T, J)."""
    weights: Tensor
    """φ ω_j times the width of a cell, in each cell, (N, T)."""
    mixture: Tensor
    """The same times ρ of the mixture of guides, (N, T)."""
    ratios: Tensor
    """ρ_j (N, G) of each guide."""

    def first_places(self) -> Tensor:
        """The cell (N,) of the first run: where √h φ ω_j is largest, about where flips are expected to begin."""
        chance = joint_flip_chance(
            self.surrogate_margins.flatten(0, 1), self.surrogate_margins.new_tensor(self.faces.spreads)
        )
        return (self.weights * (chance.unflatten(0, self.weights.shape) + 1e-200).sqrt()).argmax(1)

    def second_chances(self, cell: Tensor, margins: Tensor) -> Tensor:
        """π in each cell, (N, T), after margins (N, d) of the network at the first runs, in the cells (N,).

        Each surrogate is shifted by how wrong it was there. Its spread is small there and grows with the distance, but
        is never less than its change from cell to cell. Of two faces of one rival the first run shows the nearer one.
        """
        t, faces = self.faces.places, self.faces
        q = self.surrogate_margins
        here = q.gather(1, cell.view(-1, 1, 1).expand(-1, 1, q.shape[2])).squeeze(1)
        rivals = cell.new_tensor([surrogate.rival for surrogate in faces.surrogates])
        same = rivals.unsqueeze(0) == rivals.unsqueeze(1)
        seen = here <= torch.where(same, here.unsqueeze(1), torch.inf).amin(2)
        moved = torch.where(seen, margins[:, rivals] - here, 0.0).unsqueeze(1)
        away = (t - t[cell].unsqueeze(1)).abs()
        unsure = torch.where(seen.unsqueeze(1), (KNOWN + FORGOTTEN * away).unsqueeze(-1), 1.0)
        spread = unsure * q.new_tensor(faces.spreads)
        spread = torch.maximum(spread, q.diff(dim=1, append=q[:, -1:]).abs()).clamp(min=1e-300)
        scaled = ((q + moved) / spread).flatten(0, 1)
        chance = joint_flip_chance(scaled, torch.ones_like(scaled[0])).unflatten(0, away.shape)
        informed = self.weights * (chance * (1 - chance) + DOUBT * chance).clamp(min=0).sqrt()
        plain = self.mixture / self.mixture.sum(1, keepdim=True).clamp(min=1e-300)
        total = informed.sum(1, keepdim=True)
        share = torch.where(total > 1e-250, 1 - DEFENSIVE, 0.0)
        return share * informed / total.clamp(min=1e-300) + (1 - share) * plain

    def drawn(self, chances: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """A place t (N,) on each line, and φ(t) ω_j/π(t) there, (N,)."""
        cell = torch.multinomial(chances, 1, generator=generator)
        inside = torch.rand(cell.shape, dtype=torch.float64, device=cell.device, generator=generator) - 0.5
        t = self.faces.places[cell] + STEP * inside
        margins = self.faces.surrogate_margins_along(self.faces.surrogates, self.starts, self.face, t)
        own = self.faces.belonging(margins).squeeze(1).gather(1, self.face.unsqueeze(1))
        weight = density(t) * own * STEP * chances.sum(1, keepdim=True) / chances.gather(1, cell)
        return t.squeeze(1), weight.squeeze(1)

    def at(self, t: Tensor) -> Tensor:
        """ε (N, n) at t (N,)."""
        return self.faces.at(self.starts, self.face, t)


def numbers_of_line(guides: Sequence[Guide]) -> int:
    """How many numbers a line takes: in each cell some for every surrogate, and some for every tilt of a guide."""
    tilts = max(sum(len(tilts.thetas) for tilts in guide.tilts) for guide in guides)
    surrogates = max(len(guide.surrogates) for guide in guides)
    return round(2 * REACH / STEP) * (16 * surrogates + 4 * tilts)
