"""Samples of what the units of a layer look at, and the nonlinear covariance of scores that they show.

The quadratic part of a covariance is estimated from pairs of samples, of which there are many more than samples: with M
the matrix of a quadratic form, ½ tr(M S M S) from two sample covariances that know nothing of each other (a U-statistic
of fourth moments).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from netmoments.memory import elements_together

LEAST_SAMPLES = 4
"""Fewer cannot be divided into two sets of two, each with a sample covariance of its own."""


class SampledUnits(NamedTuple):
    """What samples (N, K, p) of the input of a layer show."""

    values: Tensor
    """Of the units, (N, K, n)."""
    covariance: Tensor
    """S of what each unit looks at, (N, n, w, w)."""
    samples: Tensor
    """The same samples, in memory as they are best looked at again: place by place where there are windows."""


class UnitMoments(NamedTuple):
    """The moments of n units with w inputs each in a sketch, for N images."""

    mean: Tensor
    """E f, (N, n), differentiable in the means and covariances of the inputs."""
    gain: Tensor
    """E ∇f, (N, n, w), without gradient."""
    curvature: Tensor
    """E ∇²f, (N, n, w, w), without gradient."""


class QuadraticForms(NamedTuple):
    """The quadratic forms zᵀM_i z', M_i = Σ_u a_iu H_u, of r scores at K samples of N images."""

    own: Tensor
    """At a sample and itself, (N, r, K), samples about their mean."""
    across: Tensor
    """At some of the first samples and as many of the last, (N, r, k, k), about any point: the means of rows and
    columns are not used."""


@cache
def paired(count: int) -> int:
    """How many of K samples, from the first and the last, are paired with each other: the work goes with the square."""
    return max(count // 2 if count < 8 else 3 * count // 8, 1)


def curved_units(
    windows: Tensor, curvature: Tensor, covariance: Tensor, samples: Tensor
) -> Callable[[Tensor], QuadraticForms] | None:
    """The quadratic forms of a layer as a function of scores' weights (N, r, n) on its units; None if none is curved.

    From windows (n, w), H and S, (N, n, w, w), and samples (N, K, p) of the layer's input. A unit counts as curved if
    Σ|H_ij| s_i s_j, which bounds √(tr HSHS), is above √eps of the image's largest one.
    """
    s = covariance.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
    size = (curvature.abs() * s.unsqueeze(-1) * s.unsqueeze(-2)).sum((-2, -1))
    curved = size > torch.finfo(size.dtype).eps ** 0.5 * size.amax(-1, keepdim=True)
    units = curved.any(0).nonzero().squeeze(-1)
    if not len(units):
        return None
    own = (curvature * curved[..., None, None]).index_select(1, units)
    places = windows[units]
    forms = _forms_of_single_inputs if windows.shape[1] == 1 else _forms_of_windows

    def quadratics(weights: Tensor) -> QuadraticForms:
        """Σ_u a_iu z_uᵀ H_u z_u' for weights a on all units of the layer."""
        images, count = samples.shape[:2]
        few, scores = paired(count), weights.shape[1]
        total = QuadraticForms(weights.new_zeros(images, scores, count), weights.new_zeros(images, scores, few, few))
        forms(places, own, samples, weights.index_select(-1, units), total)
        return total

    return quadratics


def _forms_of_single_inputs(
    places: Tensor, curvature: Tensor, samples: Tensor, weights: Tensor, total: QuadraticForms
) -> None:
    """Adds z_kᵀ diag(a H) z_l: a product of matrices for each score."""
    images, count = samples.shape[:2]
    few = paired(count)
    for some in units_in_parts(samples, images * count, len(places)):
        picked = samples.flatten(0, 1).index_select(1, places[some].squeeze(-1)).unflatten(0, (images, count))
        z = picked - picked.mean(1, keepdim=True)
        curved = curvature[:, some].flatten(1).unsqueeze(1) * z
        total.own.add_(weights[..., some] @ (z * curved).mT)
        for across, own in zip(total.across.unbind(1), weights[..., some].unbind(1), strict=True):
            across.add_((z[:, :few] * own.unsqueeze(1)) @ curved[:, -few:].mT)


def _forms_of_windows(
    places: Tensor, curvature: Tensor, samples: Tensor, weights: Tensor, total: QuadraticForms
) -> None:
    """Adds the forms of every unit between first and last samples, (N, some, k·k), summed for all scores."""
    count, width = samples.shape[1], places.shape[1]
    few = paired(count)
    across = total.across.view(*weights.shape[:2], -1)
    for some, sampled in windows_in_parts(places, laid_out(samples.mT), max(width * count, few * few)):
        z = sampled - sampled.mean(-1, keepdim=True)
        curved = curvature[:, some] @ z
        total.own.add_(weights[..., some] @ (z * curved).sum(2))
        across.add_(weights[..., some] @ (z[..., :few].mT @ curved[..., -few:]).flatten(2))


def nonlinear_covariance(remainders: Tensor, forms: QuadraticForms | None) -> Tensor:
    """Cov of r scores, (N, r, r), without their linear parts: what remains of K samples of them, (N, r, K), is known.

    The quadratic part by `quadratic_covariance`; the remainders without their ½ zᵀMz as the samples have them.
    """
    if forms is None or remainders.shape[-1] < LEAST_SAMPLES:
        return sample_covariance(remainders)
    return quadratic_covariance(forms.across) + sample_covariance(remainders - 0.5 * forms.own)


def quadratic_covariance(across: Tensor) -> Tensor:
    """½ tr(M_i S M_j S), (N, r, r), the covariance of ½ zᵀM_i z for Gaussian z, unbiased given M.

    One S is that of the first samples, the other that of the last, each about their own mean: from the forms zᵀM_i z'
    between the two, (N, r, a, b), less the means of their rows and columns, ½ Σ W_i W_j / ((a − 1)(b − 1)). This never
    has a negative eigenvalue.
    """
    first, second = across.shape[-2:]
    forms = across - across.mean(-1, keepdim=True)
    flat = (forms - forms.mean(-2, keepdim=True)).flatten(-2)
    return flat @ flat.mT / (2 * (first - 1) * (second - 1))


def sample_covariance(values: Tensor) -> Tensor:
    """Σ_k (x_k − x̄)(x_k − x̄)ᵀ / (K − 1) of values (..., r, K): (..., r, r)."""
    deviations = values - values.mean(-1, keepdim=True)
    return deviations @ deviations.mT / (values.shape[-1] - 1)


def variances(samples: Tensor) -> Tensor:
    """Σ_k (z_k − z̄)² / (K − 1) of samples (N, K, p): (N, p)."""
    images, count, places = samples.shape
    squares = []
    for some in units_in_parts(samples, images * count, places):
        here = samples[..., some]
        squares.append((here - here.mean(1, keepdim=True)).square().sum(1))
    return joined(squares, -1) / (count - 1)


def laid_out(transposed: Tensor) -> Tensor:
    """A transposed (N, p, K) with its last dimension in one piece; of one image as a matrix, which is copied faster."""
    return transposed[0].contiguous().unsqueeze(0) if len(transposed) == 1 else transposed.contiguous()


def windows_in_parts(windows: Tensor, columns: Tensor, each: int) -> Iterator[tuple[slice, Tensor]]:
    """Some windows (m, w) at a time, and what columns (N, p, K) have at their places, (N, some, w, K): 0 at place −1.

    So many that `each` numbers of every one of them stay in a cache.
    """
    whole = bool((windows >= 0).all())
    for part in units_in_parts(columns, len(columns) * each, len(windows)):
        some = windows[part]
        found = columns.index_select(1, some.clamp(min=0).reshape(-1)).unflatten(1, some.shape)
        yield part, found if whole else found * (some >= 0).unsqueeze(-1)


def units_in_parts(like: Tensor, each: int, count: int) -> Iterator[slice]:
    """`count` units, so many at a time that `each` numbers of every one of them stay in a cache."""
    together = elements_together("cache", like, each)
    for start in range(0, count, together):
        yield slice(start, min(start + together, count))


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Put together; one alone is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim)


@cache
def normal_points(dimension: int, count: int) -> Tensor:
    """A fixed set of standard normal points, (count, dimension): scrambled Sobol, antithetic, second moments exact."""
    engine = torch.quasirandom.SobolEngine(dimension, scramble=True, seed=0)
    half = torch.special.ndtri(engine.draw(count // 2, dtype=torch.float64).clamp(1e-12, 1 - 1e-12))
    normal = torch.cat([half, -half])
    if dimension >= count // 4:
        return normal
    root = torch.linalg.cholesky(normal.mT @ normal / count)
    return torch.linalg.solve_triangular(root, normal.mT, upper=False).mT
