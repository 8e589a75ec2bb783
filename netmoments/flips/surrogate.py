"""Surrogates: a margin as a quadratic function of a few directions of the noise, fitted to values and gradients.

    q(ε) = a + b·z + ½ zᵀH z,   z = Uᵀε,   and   P(f < 0 | z) ≈ h = Φ(−q/s)

Here f is the margin, U (n, k) an orthonormal basis of the directions along which its gradients are large or vary, and s
the spread of f about q. A surrogate guides where the network is run, and is a control variate: it may be wrong without
making an estimate wrong (see `importance`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

LEAST_SPREAD = 0.02
"""The least spread s of a surrogate, over the standard deviation of q under the noise."""
MOST_SPREAD = 0.6
"""The largest s, over the same: a surrogate that explains so little would guide nowhere."""
FEWEST = 8
"""A surrogate is fitted to at least so many gradients of a rival's margin."""
MOST_DIRECTIONS = 384
"""A surrogate has at most so many directions."""
GRADIENTS_EACH = 2
"""A surrogate has at most one direction for so many gradients."""
LEFT_BY_TWO, LEFT_BY_PLANES = 0.5, 0.05
"""A rival may have two faces if two means leave at most the first share of the variance of its gradients, and with each
further one if they leave half of that, down to the second share, which means that all faces are nearly planes.
"""
MOST_FACES = 32
"""A rival has at most so many faces."""
FEWEST_OF_PLANE = 3
"""A face that is nearly a plane has at least so many gradients; any other as many as a surrogate."""
LLOYD_STEPS = 6
"""Steps of the algorithm that finds the means."""
FIRST_DIRECTIONS = 32
"""The first of the two fits of a surrogate has at most so many directions."""
NEAR, NEAR_SLOPES = 1.5, 8.0
"""Runs whose margins are within so many standard deviations of the boundary count most in fits of values and of slopes.
Values say where the boundary is. A curvature has many more numbers and changes slowly, and needs all the runs there
are.
"""
CAUTION = 1.25
"""The mean square that was left of new runs near the boundary was 0.74 to 1.34 times what the runs of a fit had, for
surrogates of LeNet, ResNet-20 and a ViT.
"""
OVERSAMPLED, ITERATIONS = 12, 4
"""Subspace iteration has so many directions more than are wanted, and so many steps."""
RIDGES = tuple(10.0**power for power in (-4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 2, 4))
"""Candidates for the penalty of a ridge regression, relative to the mean square of the regressors."""
LEAST_DEVIATION = 1e-3
"""The deviation of the slope along any direction is taken to be at least this share of the largest."""
LEAST_FREEDOM = 0.05
"""A penalty is a candidate only if its coefficients leave this share of the runs as degrees of freedom."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """Runs of the network: noise ε (N, n), margins (N, d), and gradients (N, n) of the margins of some rivals (N,)."""

    white: Tensor
    margins: Tensor
    gradients: Tensor
    rivals: Tensor

    def __len__(self) -> int:
        return len(self.white)

    def joined(self, other: Evidence) -> Evidence:
        both = zip(vars(self).values(), vars(other).values(), strict=True)
        return Evidence(*map(torch.cat, both))

    def chosen(self, which: Tensor) -> Evidence:
        """The runs for which `which` (N,) is True."""
        return Evidence(*(x[which] for x in vars(self).values()))

    def of_rival(self, rival: int) -> Evidence:
        return self.chosen(self.rivals == rival)

    def without_rival(self, rival: int) -> Evidence:
        return self.chosen(self.rivals != rival)


@dataclass(frozen=True, eq=False)
class Quadratic:
    """The surrogate of a rival's margin, with the eigenvectors of H as its directions."""

    rival: int
    basis: Tensor
    """U, (n, k), with the dtype and device of the noise."""
    constant: float
    """a."""
    slope: Tensor
    """b, (k,), in float64 on the CPU."""
    curvature: Tensor
    """The eigenvalues of H, (k,), in float64 on the CPU."""
    spread: float
    """s, the standard deviation of the margin about q."""

    def at(self, z: Tensor) -> Tensor:
        """q (N,) at coordinates z (N, k)."""
        slope, curvature = self.slope.to(z.device), self.curvature.to(z.device)
        return self.constant + z @ slope + 0.5 * z.square() @ curvature

    def coordinates(self, white: Tensor) -> Tensor:
        """z = Uᵀε, (N, k)."""
        return (white @ self.basis).double()

    @cached_property
    def deviation(self) -> float:
        """The standard deviation of q under the noise: √(|b|² + ½|H|²)."""
        return math.sqrt(float(self.slope.square().sum() + 0.5 * self.curvature.square().sum()))


def surrogates_of(evidence: Evidence, rival: int) -> tuple[Quadratic, ...]:
    """The surrogate of a rival's margin; or several, of the faces of its boundary, if the smallest of these tells the
    values of the margin better than a single one does.
    """
    own = evidence.of_rival(rival)
    single = (fitted(own, rival, directions_for(own), evidence.without_rival(rival)),)
    faces = split_by_face(own)
    if len(faces) == 1:
        return single
    # of which face would other values be?
    several = tuple(fitted(face, rival, directions_for(face)) for face in faces)
    white, values = evidence.white, evidence.margins[:, rival]
    by_single, by_several = (
        torch.stack([each.at(each.coordinates(white)) for each in some]).amin(0) for some in (single, several)
    )
    scale = NEAR * float(own.gradients.double().square().sum(1).mean().sqrt())
    weight = relevance(torch.minimum(by_single, by_several), values - evidence.margins.amin(1), max(scale, 1e-30))
    left_by_single, left_by_several = (
        float(weight @ (values - by).double().square()) for by in (by_single, by_several)
    )
    return several if left_by_several < left_by_single else single


def directions_for(runs: Evidence) -> int:
    """How many directions a surrogate that is fitted to the gradients of these runs may have."""
    return max(2, min(MOST_DIRECTIONS, len(runs) // GRADIENTS_EACH))


def fitted(evidence: Evidence, rival: int, most: int, others: Evidence | None = None) -> Quadratic:
    """The surrogate of a rival's margin, in at most so many directions.

    Directions and curvature follow from the gradients of this rival's margin. Place and slope of the boundary follow
    from its values at all runs, those of `others` included, whatever was differentiated there. The fit is done twice:
    the first surrogate weighs the runs of the second, see `relevance`.
    """
    rival_runs = evidence.of_rival(rival)
    all_runs = evidence if others is None else evidence.joined(others)
    scale = max(float(rival_runs.gradients.double().mean(0).norm()), 1e-30)
    first = _weighted_fit(rival_runs, all_runs, rival, None, scale, min(most, FIRST_DIRECTIONS))
    return _weighted_fit(rival_runs, all_runs, rival, first, scale, most)


def _weighted_fit(
    rival_runs: Evidence, all_runs: Evidence, rival: int, first: Quadratic | None, scale: float, most: int
) -> Quadratic:
    """A surrogate from runs weighted by a first one.

    What has the size of an input is computed on the device of the runs, the rest on the CPU.
    """
    weight = _weights(rival_runs, rival, first, NEAR_SLOPES * scale)
    basis = leading_directions(rival_runs.gradients, weight.to(rival_runs.gradients.device), most)
    z, slopes = ((x @ basis).double().cpu() for x in (rival_runs.white, rival_runs.gradients))
    curvature, slope = regressed_slopes(z, slopes, weight)
    z = (all_runs.white @ basis).double().cpu()
    rest = all_runs.margins[:, rival].cpu() - z @ slope - 0.5 * ((z @ curvature) * z).sum(-1)
    constant, extra_slope, spread = regressed_values(z, rest, _weights(all_runs, rival, first, NEAR * scale))
    values, vectors = torch.linalg.eigh(curvature)
    turned = basis @ vectors.to(basis)
    quadratic = Quadratic(rival, turned, constant, vectors.mT @ (slope + extra_slope), values, spread)
    spread = min(max(spread, LEAST_SPREAD * quadratic.deviation), MOST_SPREAD * quadratic.deviation)
    return replace(quadratic, spread=max(spread, 1e-30))


def _weights(runs: Evidence, rival: int, first: Quadratic | None, scale: float) -> Tensor:
    """The relevance (N,) of runs by a first surrogate, or without one by their distance to the strongest margin."""
    margins = runs.margins.cpu()
    ahead = margins[:, rival] - margins.amin(1)
    margin = torch.zeros_like(ahead) if first is None else first.at(first.coordinates(runs.white).cpu())
    return relevance(margin, ahead, scale)


def relevance(margin: Tensor, ahead: Tensor, scale: float) -> Tensor:
    """How much a run says about a rival's boundary: 1/(1 + (q/c)²) · 1/(1 + (d/c)²), with the scale c.

    It says most where the rival's margin q is near 0 and hardly above the strongest margin, which is d below. q is the
    value of a first surrogate: weights by the margins themselves would bias a regression of these margins.
    """
    return 1 / ((1 + (margin / scale) ** 2) * (1 + (ahead / scale) ** 2))


def split_by_face(runs: Evidence) -> list[Evidence]:
    """The runs of one rival, in several parts if its gradients point several ways: faces of the boundary.

    The fewest means (Lloyd 1982) that leave little of the gradients' variance make the parts, where one face that bends
    leaves more; or those that leave hardly anything, if more of them do.
    """
    gradients = runs.gradients
    centred = gradients - gradients.mean(0)
    total = float(centred.double().square().sum())
    if len(runs) < 2 * FEWEST_OF_PLANE or total <= 1e-6 * float(gradients.double().square().sum()):
        return [runs]
    along = (centred @ principal_directions(centred, MOST_FACES).to(centred.dtype)).double()
    beyond = total - float(along.square().sum())
    parts: list[Evidence] = []
    for count in range(2, min(MOST_FACES, len(runs) // FEWEST_OF_PLANE) + 1):
        allowed = LEFT_BY_PLANES if parts else max(LEFT_BY_PLANES, LEFT_BY_TWO ** (count - 1))
        if beyond > allowed * total:
            break
        part, within = means_of(along, count)
        left = max(beyond + within, 0.0) / total
        fewest = FEWEST_OF_PLANE if left <= LEFT_BY_PLANES else FEWEST
        if left <= allowed and int(part.bincount(minlength=count).min()) >= fewest:
            parts = [runs.chosen(part == number) for number in range(count)]
        if left <= LEFT_BY_PLANES:
            break
    return parts or [runs]


def means_of(rows: Tensor, count: int) -> tuple[Tensor, float]:
    """Which of so many means each of some rows (N, k) is nearest to, (N,), and the squares that the means leave.

    The means begin as the row farthest from 0 and those farthest from the ones before.
    """
    means = rows[:0]
    away = rows.square().sum(1)
    for _ in range(count):
        means = torch.cat([means, rows[int(away.argmax())].unsqueeze(0)])
        away = (rows.unsqueeze(1) - means).square().sum(2).amin(1)
    for _ in range(LLOYD_STEPS):
        nearest = (rows.unsqueeze(1) - means).square().sum(2).argmin(1)
        sizes = nearest.bincount(minlength=count).unsqueeze(1)
        sums = torch.zeros_like(means).index_add(0, nearest, rows)
        means = torch.where(sizes > 0, sums / sizes.clamp(min=1), means)
    squares, nearest = (rows.unsqueeze(1) - means).square().sum(2).min(1)
    return nearest, float(squares.sum())


def leading_directions(gradients: Tensor, weight: Tensor, most: int) -> Tensor:
    """An orthonormal basis (n, k) of the mean and the leading principal directions of gradients (N, n)."""
    share = (weight / weight.sum()).to(gradients.dtype)
    mean = share @ gradients
    centred = (gradients - mean) * share.sqrt().unsqueeze(1)
    wanted = max(0, min(most - 1, len(gradients) - 2, gradients.shape[1] - 1))
    directions = principal_directions(centred, wanted)
    columns = torch.cat([mean.double().unsqueeze(1), directions], 1)
    lengths = columns.norm(dim=0)
    columns = columns[:, lengths > 0] / lengths[lengths > 0]
    if columns.shape[1] == 0:
        return gradients.new_zeros(gradients.shape[1], 1)
    basis, triangle = torch.linalg.qr(columns)
    diagonal = triangle.diagonal().abs()
    return basis[:, diagonal > 1e-6].to(gradients.dtype)


def principal_directions(rows: Tensor, most: int) -> Tensor:
    """The leading right singular vectors (n, at most `most`) of rows (N, n).

    They are found by subspace iteration if N and n are large.
    """
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
    """H (k, k), symmetric, and b (k,) with slopes ≈ b + H z at z (N, k), by ridge regression.

    A direction along which the slope varies much is expected to bend much: H_ij = d_i d_j W_ij, where d_i is the
    deviation of slope i, no less than `LEAST_DEVIATION` of the largest. Of all symmetric W, the one that makes the mean
    of |y − W x|² + λ|W|² least is found, with x = d z and y = slopes/d less their means (`symmetric_ridge`): what z
    shows of one direction then counts for all others, even for those that z hardly has.
    """
    share = weight / weight.sum()
    mean_z, mean_slope = share @ z, share @ slopes
    deviation = (share @ (slopes - mean_slope).square()).sqrt()
    deviation = deviation.clamp(min=max(LEAST_DEVIATION * float(deviation.max()), 1e-300))
    bent = symmetric_ridge((z - mean_z) * deviation, (slopes - mean_slope) / deviation, share)
    curvature = deviation.unsqueeze(1) * bent * deviation
    return curvature, mean_slope - curvature @ mean_z


def symmetric_ridge(x: Tensor, y: Tensor, share: Tensor) -> Tensor:
    """The symmetric W (k, k) with y ≈ W x by ridge regression; rows (N, k) of both have weights (N,) that sum to 1.

    In the eigenvectors of C = Σ xxᵀ, with eigenvalues c, and with R = Σ xyᵀ, the solution of CW + WC + 2λW = R + Rᵀ is
    W_ij = (R + Rᵀ)_ij/(c_i + c_j + 2λ). Its trace of influence, by which generalized cross-validation chooses λ, is
    Σ_ij c_j/(c_i + c_j + 2λ) + ½ Σ_i c_i/(c_i + λ) over k outputs.
    """
    root = share.sqrt().unsqueeze(1)
    x, y = root * x, root * y
    square, vectors = torch.linalg.eigh(x.mT @ x)
    square = square.clamp(min=0)
    product = vectors.mT @ (x.mT @ y) @ vectors
    total, both, effective = float(y.square().sum()), product + product.mT, 1 / float(share.square().sum())
    best, least = torch.zeros_like(product), math.inf
    for penalty in (square.mean() * relative for relative in RIDGES):
        bottom = square.unsqueeze(1) + square + 2 * penalty + 1e-300
        solution = both / bottom
        residual = total - 2 * float((solution * product).sum()) + float((square @ solution.square()).sum())
        influence = float((square / bottom).sum() + 0.5 * (square / (square + penalty + 1e-300)).sum()) / len(square)
        freedom = 1 - (influence + 1) / effective
        score = max(residual, 0.0) / freedom**2 if freedom > LEAST_FREEDOM else math.inf
        if score < least:
            best, least = solution, score
    return vectors @ best @ vectors.mT


def regressed_values(z: Tensor, rest: Tensor, weight: Tensor) -> tuple[float, Tensor, float]:
    """A constant and slopes (k,) fitted to what is left of values (N,), and the spread of new runs about this fit.

    The mean square of what is left, which cross-validation expects to be larger for new runs by some factor, is that of
    all runs; or, if it is smaller, that of those near the boundary, with the squares of the weights and `CAUTION`: far
    away a quadratic may be far off, which costs nothing.
    """
    share = weight / weight.sum()
    middle, level = share @ z, share @ rest
    slopes, error = ridge(z - middle, rest - level, share)
    constant = float(level - slopes @ middle)
    left = (rest - constant - z @ slopes).square()
    near = CAUTION * float(share.square() @ left / share.square().sum())
    factor = max(error, 0.0) / max(float(share @ left), 1e-300)
    return constant, slopes, math.sqrt(min(max(error, 0.0), factor * near))


def ridge(x: Tensor, y: Tensor, share: Tensor) -> tuple[Tensor, float]:
    """b (k,) with y ≈ x b by ridge regression, and its error; rows (N, k) and (N,) have weights (N,) that sum to 1.

    The penalty is chosen by generalized cross-validation (Golub, Heath & Wahba 1979). The error is the mean square of
    what is left that cross-validation expects of new data.
    """
    root = share.sqrt()
    target = root * y
    left, singular, right = torch.linalg.svd(root.unsqueeze(1) * x, full_matrices=False)
    projected = left.mT @ target
    total, square = float(target.square().sum()), singular.square()
    effective = 1 / float(share.square().sum())
    penalties = singular.new_tensor(RIDGES).unsqueeze(1) * square.mean()
    shrink = square / (square + penalties + 1e-300)
    residual = (total - (2 * shrink - shrink**2) @ projected.square()).clamp(min=0)
    freedom = 1 - (shrink.sum(1) + 1) / effective
    score = torch.where(freedom > LEAST_FREEDOM, residual / freedom.clamp(min=LEAST_FREEDOM) ** 2, torch.inf)
    best = int(score.argmin())
    if not math.isfinite(float(score[best])):
        return y.new_zeros(x.shape[1]), total
    return (right.mT * (shrink[best] / singular.clamp(min=1e-150))) @ projected, float(score[best])
