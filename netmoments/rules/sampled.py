"""What the samples of a sketch say about a layer: covariances of its windows, and nonlinear covariances of scores.

Curved units give the scores quadratic parts ½ zᵀM z with covariances ½ tr(M_i S M_j S). These are estimated with two
independent sample covariances in the place of S, one from the first samples and one from the last: unbiased, a
U-statistic of fourth moments. All that is needed are the forms zᵀM z' between samples of the two sets, and there are
many more such pairs than samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from netmoments.memory import elements_together

LEAST_SAMPLES = 4
"""The fewest samples that can be divided into two sets of two, each with a sample covariance."""


class SampledUnits(NamedTuple):
    """What samples (N, K, p) of a layer's input show."""

    values: Tensor
    """f of the units at the samples, (N, K, n)."""
    covariance: Tensor
    """The sample covariance S of each window, (N, n, w, w)."""
    samples: Tensor
    """The same samples in the memory layout that is best for reading windows again."""


class UnitMoments(NamedTuple):
    """The moments of n units with w inputs each in a sketch, for N images."""

    mean: Tensor
    """E f, (N, n), differentiable in the means and covariances of the inputs."""
    gain: Tensor
    """E ∇f, (N, n, w), without gradient."""
    curvature: Tensor
    """E ∇²f, (N, n, w, w), without gradient."""


class QuadraticForms(NamedTuple):
    """The quadratic forms zᵀM_i z', M_i = Σ_u a_iu H_u, of r scores at pairs of the K samples of each of N images."""

    own: Tensor
    """Both z and z' the same sample less the mean of all, (N, r, K)."""
    across: Tensor
    """z one of the first k samples and z' one of the last k, (N, r, k, k). They may be taken about any point: the means
    of rows and columns are subtracted later."""


@cache
def paired(count: int) -> int:
    """k, how many of the first K samples are paired with as many of the last: the work grows with its square."""
    return max(count // 2 if count < 8 else 3 * count // 8, 1)


def curved_units(
    windows: Tensor, curvature: Tensor, covariance: Tensor, samples: Tensor
) -> Callable[[Tensor], QuadraticForms] | None:
    """A function from scores' weights (N, r, n) on a layer's units to their quadratic forms; None if no unit is curved.

    It needs windows (n, w), H and S, (N, n, w, w), and samples (N, K, p) of the layer's input. A unit counts as curved
    if Σ|H_ij| s_i s_j, which bounds √(tr HSHS), is above √eps of the largest one in its image.
    """
    s = covariance.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt()
    size = (curvature.abs() * s.unsqueeze(-1) * s.unsqueeze(-2)).sum((-2, -1))
    curved = size > torch.finfo(size.dtype).eps ** 0.5 * size.amax(-1, keepdim=True)
    units = curved.any(0).nonzero().squeeze(-1)
    if not len(units):
        return None
    kept_curvature = (curvature * curved[..., None, None]).index_select(1, units)
    kept_windows = windows[units]
    add_forms = _add_forms_of_single_inputs if windows.shape[1] == 1 else _add_forms_of_windows

    def quadratics(weights: Tensor) -> QuadraticForms:
        """Σ_u a_iu z_uᵀ H_u z_u' for weights a on all units of the layer."""
        images, count = samples.shape[:2]
        k, scores = paired(count), weights.shape[1]
        total = QuadraticForms(weights.new_zeros(images, scores, count), weights.new_zeros(images, scores, k, k))
        add_forms(kept_windows, kept_curvature, samples, weights.index_select(-1, units), total)
        return total

    return quadratics


def _add_forms_of_single_inputs(
    windows: Tensor, curvature: Tensor, samples: Tensor, weights: Tensor, total: QuadraticForms
) -> None:
    """Add zᵀ diag(a H) z' to the totals, by one product of matrices for each score."""
    images, count = samples.shape[:2]
    k = paired(count)
    for units in units_in_parts(samples, images * count, len(windows)):
        picked = samples.flatten(0, 1).index_select(1, windows[units].squeeze(-1)).unflatten(0, (images, count))
        z = picked - picked.mean(1, keepdim=True)
        curved = curvature[:, units].flatten(1).unsqueeze(1) * z
        total.own.add_(weights[..., units] @ (z * curved).mT)
        for across, of_score in zip(total.across.unbind(1), weights[..., units].unbind(1), strict=True):
            across.add_((z[:, :k] * of_score.unsqueeze(1)) @ curved[:, -k:].mT)


def _add_forms_of_windows(
    windows: Tensor, curvature: Tensor, samples: Tensor, weights: Tensor, total: QuadraticForms
) -> None:
    """Add Σ_u a_u zᵀH_u z' to the totals: first the form of each unit, (N, units, k·k), then sums for all scores."""
    count, width = samples.shape[1], windows.shape[1]
    k = paired(count)
    across = total.across.view(*weights.shape[:2], -1)
    for units, sampled in windows_in_parts(windows, laid_out(samples.mT), max(width * count, k * k)):
        z = sampled - sampled.mean(-1, keepdim=True)
        curved = curvature[:, units] @ z
        total.own.add_(weights[..., units] @ (z * curved).sum(2))
        across.add_(weights[..., units] @ (z[..., :k].mT @ curved[..., -k:]).flatten(2))


def remainder_covariance(remainders: Tensor, forms: QuadraticForms | None) -> Tensor:
    """The covariance of r scores less their linear parts, (N, r, r), from remainders at K samples, (N, r, K).

    A remainder is a score less its linear part. Its quadratic part ½ zᵀMz is covered by `quadratic_covariance`, what is
    left by a sample covariance.
    """
    if forms is None or remainders.shape[-1] < LEAST_SAMPLES:
        return sample_covariance(remainders)
    return quadratic_covariance(forms.across) + sample_covariance(remainders - 0.5 * forms.own)


def quadratic_covariance(across: Tensor) -> Tensor:
    """½ tr(M_i S M_j S), (N, r, r), the covariance of ½ zᵀM_i z for Gaussian z, unbiased given M.

    One S is that of the first samples, the other that of the last. With W_i the forms zᵀM_i z' between the two sets,
    (N, r, a, b), less the means of their rows and columns, it is ½ Σ W_i W_j / ((a − 1)(b − 1)), which never has a
    negative eigenvalue.
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
    for part in units_in_parts(samples, images * count, places):
        z = samples[..., part]
        squares.append((z - z.mean(1, keepdim=True)).square().sum(1))
    return joined(squares, -1) / (count - 1)


def laid_out(transposed: Tensor) -> Tensor:
    """A transposed tensor (N, p, K) made contiguous; one image is copied as a matrix, which is faster."""
    return transposed[0].contiguous().unsqueeze(0) if len(transposed) == 1 else transposed.contiguous()


def windows_in_parts(windows: Tensor, columns: Tensor, numbers_each: int) -> Iterator[tuple[slice, Tensor]]:
    """Slices of windows (m, w), each with the inputs of its windows, (N, ·, w, K), from columns (N, p, K).

    The input at place −1 is 0. As many go together as stay in a cache with `numbers_each` numbers per window and image.
    """
    full = bool((windows >= 0).all())
    for part in units_in_parts(columns, len(columns) * numbers_each, len(windows)):
        places = windows[part]
        inputs = columns.index_select(1, places.clamp(min=0).reshape(-1)).unflatten(1, places.shape)
        yield part, inputs if full else inputs * (places >= 0).unsqueeze(-1)


def units_in_parts(like: Tensor, numbers_each: int, count: int) -> Iterator[slice]:
    """Slices of `count` units, as many together as stay in a cache with `numbers_each` numbers per unit."""
    together = elements_together("cache", like, numbers_each)
    for start in range(0, count, together):
        yield slice(start, min(start + together, count))


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """`torch.cat`, without a copy if there is only one part."""
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts), dim)


@cache
def normal_points(dimension: int, count: int, number: int = 0) -> Tensor:
    """One of the fixed sets of quasi-random normal points, (count, dimension): scrambled Sobol, antithetic.

    They are transformed to have exact second moments, unless there are only four points or fewer for each dimension. In
    no dimensions there is one point, (1, 0).
    """
    if dimension == 0:
        return torch.zeros(1, 0, dtype=torch.float64)
    engine = torch.quasirandom.SobolEngine(dimension, scramble=True, seed=number)
    half = torch.special.ndtri(engine.draw(count // 2, dtype=torch.float64).clamp(1e-12, 1 - 1e-12))
    normal = torch.cat([half, -half])
    if dimension >= count // 4:
        return normal
    root = torch.linalg.cholesky(normal.mT @ normal / count)
    return torch.linalg.solve_triangular(root, normal.mT, upper=False).mT
