"""A margin as a quadratic function of a few directions of the noise, fitted to values and gradients of the network.

    q(ε) = a + b·z + ½ zᵀH z,   z = Uᵀε,   and   P(f < 0 | z) ≈ h = Φ(−q/s)

with U an orthonormal basis of the directions along which gradients are large or vary, and s the spread of what q
leaves unexplained. It guides where the network is run, and is a control variate: it may be wrong without making an
estimate wrong (see `importance`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

LEAST_SPREAD = 0.02
"""Of the margin's spread under the noise: what a surrogate leaves unexplained, at least."""
MOST_SPREAD = 0.6
"""The same, at most: a surrogate that explains so little would guide nowhere."""
TWO_WAYS = 0.5
"""Of the variance of a rival's gradients: what two ways may leave."""
STEPS = 6
"""Of finding the two."""
FIRST_DIRECTIONS = 32
"""Of the first of two fits."""
NEAR, NEAR_SLOPES = 1.5, 4.0
"""Of the margin's spread: runs within it of the boundary count most in a fit, of values and of slopes. Values say where
the boundary is; a curvature has many more numbers, changes slowly, and needs all runs that there are.
"""
OVERSAMPLED, ITERATIONS = 12, 4
"""Of subspace iteration: directions beyond those that are wanted, and how often."""
RIDGES = tuple(10.0**power for power in (-4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 2, 4))
"""Candidates for the penalty of a ridge regression, relative to the mean square of the regressors."""
LEAST_DEVIATION = 1e-3
"""Of the largest deviation of slopes: what a direction's is taken to be, at least."""
LEAST_FREEDOM = 0.05
"""Of the runs: what a candidate's coefficients must leave."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """Runs of the network: noise ε (N, n), margins (N, d), and gradients (N, n) of the margin of one rival (N,)."""

    white: Tensor
    margins: Tensor
    gradients: Tensor
    rivals: Tensor

    def __len__(self) -> int:
        return len(self.white)

    def joined(self, other: Evidence) -> Evidence:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Evidence(*(torch.cat(pair) for pair in pairs))

    def of_rival(self, rival: int) -> Evidence:
        own = self.rivals == rival
        return Evidence(*(x[own] for x in vars(self).values()))

    def without_rival(self, rival: int) -> Evidence:
        other = self.rivals != rival
        return Evidence(*(x[other] for x in vars(self).values()))


@dataclass(frozen=True, eq=False)
class Quadratic:
    """A rival's surrogate margin, in the eigenvectors of its H; basis (n, k) as the noise, the rest in float64."""

    rival: int
    basis: Tensor
    constant: float
    slope: Tensor
    """b, (k,), on the CPU, as the following."""
    curvature: Tensor
    """The eigenvalues of H, (k,)."""
    spread: float
    """s, of the margin around q."""

    def at(self, z: Tensor) -> Tensor:
        """q (N,) at coordinates z (N, k)."""
        slope, curvature = self.slope.to(z.device), self.curvature.to(z.device)
        return self.constant + z @ slope + 0.5 * z.square() @ curvature

    def coordinates(self, white: Tensor) -> Tensor:
        """z = Uᵀε, (N, k)."""
        return (white @ self.basis).double()

    @cached_property
    def size(self) -> float:
        """The standard deviation of q under the noise: √(|b|² + ½|H|²)."""
        return math.sqrt(float(self.slope.square().sum() + 0.5 * self.curvature.square().sum()))


def ways(own: Evidence, fewest: int) -> list[Evidence]:
    """The runs of one rival, in two parts where its gradients point two ways: two faces of the boundary.

    Two means (Lloyd 1982) of the gradients, which must leave less than `TWO_WAYS` of their variance around them; those
    of one face that bends leave more.
    """
    gradients = own.gradients
    centred = gradients - gradients.mean(0)
    total = float(centred.square().sum())
    if len(own) < 2 * fewest or total <= 1e-6 * float(gradients.square().sum()):
        return [own]
    second = (centred @ principal_directions(centred, 1)[:, 0].to(centred.dtype)) > 0
    for _ in range(STEPS):
        if min(int(second.sum()), int((~second).sum())) < fewest:
            return [own]
        means = [gradients[~second].mean(0), gradients[second].mean(0)]
        away = [(gradients - mean).square().sum(1) for mean in means]
        second = away[1] < away[0]
    if min(int(second.sum()), int((~second).sum())) < fewest:
        return [own]
    if float(torch.minimum(*away).sum()) > TWO_WAYS * total:
        return [own]
    return [Evidence(*(x[part] for x in vars(own).values())) for part in (~second, second)]


def relevance(margin: Tensor, ahead: Tensor, scale: float) -> Tensor:
    """How much a run says about a rival's boundary: where its margin q is near 0, and little ahead of the strongest.

    1/(1 + (q/c)²) · 1/(1 + (d/c)²), with the scale c and the distance d to the strongest margin. q is what a first
    surrogate says: to weigh runs by their own margins would bias a regression of these.
    """
    return 1 / ((1 + (margin / scale) ** 2) * (1 + (ahead / scale) ** 2))


def fitted(evidence: Evidence, rival: int, most: int, beside: Evidence | None = None) -> Quadratic:
    """The surrogate of a rival's margin, in at most so many directions; twice, see `relevance`.

    Curvature and directions are from the gradients of this rival's margin, the place and the tilt of the boundary from
    its values at all runs, and at those `beside`, whatever was differentiated there.
    """
    own = evidence.of_rival(rival)
    every = evidence if beside is None else evidence.joined(beside)
    scale = max(float(own.gradients.double().mean(0).norm()), 1e-30)
    first = _weighted(own, every, rival, None, scale, min(most, FIRST_DIRECTIONS))
    return _weighted(own, every, rival, first, scale, most)


def _weighted(
    own: Evidence, every: Evidence, rival: int, first: Quadratic | None, scale: float, most: int
) -> Quadratic:
    """With runs weighted by a first surrogate. What has the size of an input is worked on where it is, the rest on the
    CPU.
    """
    weight = _weights(own, rival, first, NEAR_SLOPES * scale)
    basis = leading_directions(own.gradients, weight.to(own.gradients.device), most)
    z, slopes = ((x @ basis).double().cpu() for x in (own.white, own.gradients))
    curvature, slope = regressed_slopes(z, slopes, weight)
    z = (every.white @ basis).double().cpu()
    rest = every.margins[:, rival].cpu() - z @ slope - 0.5 * ((z @ curvature) * z).sum(-1)
    constant, extra, spread = regressed_values(z, rest, _weights(every, rival, first, NEAR * scale))
    values, vectors = torch.linalg.eigh(curvature)
    turned = basis @ vectors.to(basis)
    found = Quadratic(rival, turned, constant, vectors.mT @ (slope + extra), values, spread)
    spread = min(max(spread, LEAST_SPREAD * found.size), MOST_SPREAD * found.size)
    return replace(found, spread=max(spread, 1e-30))


def _weights(runs: Evidence, rival: int, first: Quadratic | None, scale: float) -> Tensor:
    """The relevance of runs (N,) by a first surrogate; by their rank alone where there is none."""
    margins = runs.margins.cpu()
    ahead = margins[:, rival] - margins.amin(1)
    margin = torch.zeros_like(ahead) if first is None else first.at(first.coordinates(runs.white).cpu())
    return relevance(margin, ahead, scale)


def leading_directions(gradients: Tensor, weight: Tensor, most: int) -> Tensor:
    """An orthonormal basis (n, k) of the mean gradient and the leading principal directions of gradients (N, n)."""
    share = (weight / weight.sum()).to(gradients.dtype)
    mean = share @ gradients
    spread = (gradients - mean) * share.sqrt().unsqueeze(1)
    wanted = max(0, min(most - 1, len(gradients) - 2, gradients.shape[1] - 1))
    directions = principal_directions(spread, wanted)
    columns = torch.cat([mean.double().unsqueeze(1), directions], 1)
    lengths = columns.norm(dim=0)
    columns = columns[:, lengths > 0] / lengths[lengths > 0]
    if columns.shape[1] == 0:
        return gradients.new_zeros(gradients.shape[1], 1)
    basis, triangle = torch.linalg.qr(columns)
    diagonal = triangle.diagonal().abs()
    return basis[:, diagonal > 1e-6].to(gradients.dtype)


def principal_directions(rows: Tensor, most: int) -> Tensor:
    """Leading right singular vectors (n, ≤ most) of rows (N, n), by subspace iteration where there are many rows."""
    if most == 0 or not bool(rows.any()):
        return rows.new_zeros(rows.shape[1], 0, dtype=torch.float64)
    count = most + OVERSAMPLED
    if min(rows.shape) > 2 * count:
        fixed = torch.Generator(rows.device).manual_seed(0)
        start = torch.randn((rows.shape[1], count), dtype=rows.dtype, device=rows.device, generator=fixed)
        for _ in range(ITERATIONS):
            start = torch.linalg.qr(rows.mT @ (rows @ start)).Q
        _, singular, right = torch.linalg.svd((rows @ start).double(), full_matrices=False)
        vectors = start.double() @ right.mT
    elif rows.shape[0] > rows.shape[1]:
        values, right = torch.linalg.eigh((rows.mT @ rows).double())
        singular, vectors = values.clamp(min=0).sqrt().flip(0), right.flip(1)
    else:
        values, left = torch.linalg.eigh((rows @ rows.mT).double())
        singular = values.clamp(min=0).sqrt().flip(0)
        vectors = rows.mT.double() @ left.flip(1) / singular.clamp(min=1e-150)
    kept = singular[:most] > 1e-3 * singular[0]
    return vectors[:, :most][:, kept]


def regressed_slopes(z: Tensor, slopes: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """H (k, k), symmetric, and b (k,) with slopes ≈ b + H z: a ridge regression, its penalty by cross-validation.

    A direction in which slopes vary much is expected to bend much: row i of H is penalized by 1/d_i², with d_i the
    deviation of slope i, no less than `LEAST_DEVIATION` of the largest.
    """
    share = weight / weight.sum()
    middle, level = share @ z, share @ slopes
    deviation = (share @ (slopes - level).square()).sqrt()
    deviation = deviation.clamp(min=max(LEAST_DEVIATION * float(deviation.max()), 1e-300))
    scaled = deviation / deviation.max()
    curvature = scaled.unsqueeze(1) * ridge((z - middle) * scaled, slopes - level, share)
    curvature = 0.5 * (curvature + curvature.mT)
    return curvature, level - curvature @ middle


def regressed_values(z: Tensor, rest: Tensor, weight: Tensor) -> tuple[float, Tensor, float]:
    """A constant and slopes (k,) for what is left of the values, and the spread around them, as new runs would show."""
    share = weight / weight.sum()
    middle, level = share @ z, share @ rest
    extra, left = ridge_with_error(z - middle, (rest - level).unsqueeze(1), share)
    return float(level - extra[:, 0] @ middle), extra[:, 0], math.sqrt(max(left, 0.0))


def ridge(x: Tensor, y: Tensor, share: Tensor) -> Tensor:
    """B (k, p) with y ≈ x B."""
    return ridge_with_error(x, y, share)[0]


def ridge_with_error(x: Tensor, y: Tensor, share: Tensor) -> tuple[Tensor, float]:
    """B (k, p) with y ≈ x B, its penalty by generalized cross-validation (Golub, Heath & Wahba 1979), and its error.

    The error is the mean square of what is left, summed over p, that cross-validation expects of new data.
    """
    root = share.sqrt().unsqueeze(1)
    target = root * y
    left, singular, right = torch.linalg.svd(root * x, full_matrices=False)
    projected = left.mT @ target
    total = float(target.square().sum())
    energy = projected.square().sum(1)
    square = singular.square()
    effective = 1 / float(share.square().sum())
    penalties = singular.new_tensor(RIDGES).unsqueeze(1) * square.mean()
    shrink = square / (square + penalties + 1e-300)
    residual = (total - (2 * shrink - shrink**2) @ energy).clamp(min=0)
    freedom = 1 - (shrink.sum(1) + 1) / effective
    score = torch.where(freedom > LEAST_FREEDOM, residual / freedom.clamp(min=LEAST_FREEDOM) ** 2, torch.inf)
    best = int(score.argmin())
    if not math.isfinite(float(score[best])):
        return y.new_zeros(x.shape[1], y.shape[1]), total
    found = (right.mT * (shrink[best] / singular.clamp(min=1e-150))) @ projected
    return found, float(score[best])
