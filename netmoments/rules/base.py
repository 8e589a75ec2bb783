"""What a rule is: a nonlinear layer with the moments of its units under a Gaussian.

A layer has n units. Each is a function f of w of the layer's p inputs, its window. A rule must define two things:
`values`, which is f itself, and `local`, the moments of each unit under a Gaussian. The other methods of `Nonlinearity`
follow from these; a rule that knows more overrides them: with exact covariances of pairs, faster moments for sketches,
or GPU kernels. Code that uses a rule never asks which kind it is.

The functions after them find what the samples of a sketch show: covariances of windows, and nonlinear covariances of
scores. Curved units give the scores quadratic parts ½ zᵀM z with covariances ½ tr(M_i S M_j S). These are estimated
with two independent sample covariances in the place of S, one from the first samples and one from the last: unbiased, a
U-statistic of fourth moments. All that is needed are the forms zᵀM z' between samples of the two sets, and there are
many more such pairs than samples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from netmoments.memory import elements_together
from netmoments.relu.triton.launch import ENABLED

EXACT_PAIRS = 2048
"""The most units of a layer for which exact covariances of all pairs are computed beside rows."""
LEAST_SAMPLES = 4
"""The fewest samples that can be divided into two sets of two, each with a sample covariance."""


class Local(NamedTuple):
    """The moments of n units y = f(z), z ~ N(m, S) being the w inputs in a unit's window; images come first."""

    mean: Tensor
    """E f, (n,)."""
    variance: Tensor
    """Var f, (n,)."""
    gain: Tensor
    """E ∇f, (n, w): by Stein's identity (1981) Cov(x, f(z)) = Cov(x, z)·gain for every x jointly Gaussian with z."""
    curvature: Tensor
    """E ∇²f, (n, w, w)."""

    def linear_variance(self, covariance: Tensor) -> Tensor:
        """gᵀSg, the variance of the best linear approximation of f: (n,)."""
        return ((covariance @ self.gain.unsqueeze(-1)).squeeze(-1) * self.gain).sum(-1)

    def quadratic_variance(self, covariance: Tensor) -> Tensor:
        """½ tr(HSHS), the variance of the second Hermite term of f: (n,)."""
        product = self.curvature @ covariance
        return 0.5 * (product * product.mT).sum((-2, -1))


class ThirdCumulants(NamedTuple):
    """Third cumulants κ_abc = E[u_a u_b u_c] of units' windows z = m + R u, in coordinates u with Cov u = I.

    To first order in them u has the density φ(u)(1 + κ/6 · the third Hermite polynomials): Edgeworth's correction.
    """

    root: Tensor
    """R, (n, w, w), RRᵀ = S."""
    kappa: Tensor
    """κ of the first q coordinates, (n, q, q, q); the others are taken to be Gaussian."""


class PowerMoments(NamedTuple):
    """E[gᵏ Heᵣ(u)] of g = f(m + su) − f(m), u ~ N(0, 1), Heᵣ the Hermite polynomials, all (N, n).

    Each is sʳ times the r-th derivative of E gᵏ in the mean, with f(m) held fixed. f(m) is subtracted because cumulants
    of units far from 0 would otherwise be differences of large numbers. The tuples run over r = 0, 1, ….
    """

    centre: Tensor
    """f(m)."""
    first: tuple[Tensor, ...]
    """k = 1, up to r = 6."""
    second: tuple[Tensor, ...]
    """k = 2, up to r = 4."""
    third: tuple[Tensor, ...]
    """k = 3, up to r = 4."""
    fourth: Tensor
    """E g⁴."""


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


@dataclass(frozen=True, eq=False)
class SketchedLayer:
    """What a sketch knows of a nonlinear layer, for N images with K samples each."""

    mean: Tensor
    """E f of the units, by formula, (N, n)."""
    values: Tensor
    """f at the samples, (N, K, n)."""
    pull_back: Callable[[Tensor], Tensor]
    """Turns weights (N, k, n) on the output into weights (N, k, p) on the input, through the expected slopes."""
    quadratics: Callable[[Tensor], QuadraticForms] | None
    """The quadratic forms of scores with weights (N, k, n) on its units. None if no unit is curved, or if that is not
    known, as of a black box."""


class Nonlinearity(ABC):
    """A layer of n units, each a function of w of the layer's p inputs."""

    windows: Tensor
    """Which inputs each unit looks at, (n, w): places in the flattened input, −1 where a window has fewer than w."""

    is_exact: ClassVar[bool] = False
    """Whether mean, variances and all covariances of the units are exact for a Gaussian input."""

    @property
    def has_formula(self) -> bool:
        """Whether a sketch has a formula for the moments; without one, as of a black box, they are those of samples."""
        return True

    @abstractmethod
    def local(self, mean: Tensor, covariance: Tensor, cumulants: ThirdCumulants | None = None) -> Local:
        """The units' moments, from means (..., n, w) and covariances (..., n, w, w) of their windows.

        Places beyond a window have mean 0, variance 0 and gain 0. With third cumulants, the results' mean, variance and
        gain are right to first order in them.
        """

    @abstractmethod
    def values(self, z: Tensor) -> Tensor:
        """f itself, from (..., n, w) to (..., n)."""

    def pairs(self, mean: Tensor, covariance: Tensor) -> Tensor:
        """The exact covariances of all pairs of units less their linear parts, (N, n, n), if `has_pair_formula`.

        The units look at one number each, with means (N, n) and covariances (N, n, n).
        """
        raise NotImplementedError(f"{type(self).__name__} has no formula for pairs of units")

    def power_moments(self, mean: Tensor, variance: Tensor) -> PowerMoments | None:
        """The moments of powers of units that look at one number each, from means and variances (N, n).

        None without a formula: the cumulants of a unit are then those of its quadratic approximation.
        """
        return None

    @cached_property
    def has_pairs(self) -> bool:
        """Whether `pairs` has a formula and the layer is small enough to use it beside rows (`EXACT_PAIRS`)."""
        return self.has_pair_formula and self.units <= EXACT_PAIRS

    @cached_property
    def has_pair_formula(self) -> bool:
        """Whether `pairs` is defined."""
        return type(self).pairs is not Nonlinearity.pairs

    @cached_property
    def units(self) -> int:
        return len(self.windows)

    @cached_property
    def width(self) -> int:
        return self.windows.shape[1]

    @cached_property
    def full_windows(self) -> bool:
        """Whether every unit looks at w numbers, so that no place is −1."""
        return bool((self.windows >= 0).all())

    def gathered(self, z: Tensor) -> Tensor:
        """Inputs (..., p) by window: (..., n, w), with zeros beyond a window."""
        picked = z[..., self.windows.clamp(min=0)]
        return picked if self.full_windows else picked * (self.windows >= 0)

    def rows_at_windows(self, rows: Tensor) -> Tensor:
        """Rows (N, r, p) of a factor of the inputs, by window: (N, n, w, r)."""
        picked = rows.mT.contiguous()[:, self.windows.clamp(min=0)]
        return picked if self.full_windows else picked * (self.windows >= 0).unsqueeze(-1)

    def pull_back(self, gain: Tensor, weights: Tensor, inputs: int) -> Tensor:
        """Weights (N, k, n) on units with gains (N, n, w), as weights (N, k, p) on the p inputs."""
        places = self.windows.clamp(min=0).reshape(-1)
        parts: list[Tensor] = []
        for part in weights.split(elements_together("pass", weights, len(places) * len(weights)), dim=1):
            by_window = (part.unsqueeze(-1) * gain.unsqueeze(1)).flatten(2)
            by_input = part.new_zeros(part.shape[0] * part.shape[1], inputs)
            parts.append(by_input.index_add_(1, places, by_window.flatten(0, 1)).unflatten(0, part.shape[:2]))
        return joined(parts, 1)

    @property
    def is_relu(self) -> bool:
        """Whether every unit is max(z, 0)."""
        return False

    @property
    def never_negative(self) -> bool:
        """Whether the units are never negative, so that a ReLU after the layer would change nothing."""
        return False

    def clamped(self) -> Nonlinearity | None:
        """One rule for this layer with a ReLU before or after it, if these are the same function; None otherwise."""
        return None

    def in_sketch(self, mean: Tensor, samples: Tensor) -> SketchedLayer:
        """The layer in a sketch, from the mean (N, p) and samples (N, K, p) of its input."""
        if ENABLED and self.has_kernels(mean, samples):
            return self.by_kernels(mean, samples)
        sampled = self.observed(samples)
        moments = self.sketch_moments(mean, sampled.covariance, samples.shape[1])
        quadratics = curved_units(
            self.windows, moments.curvature, sampled.covariance.detach(), sampled.samples.detach()
        )
        pull_back = partial(self.pull_back, moments.gain, inputs=samples.shape[-1])
        return SketchedLayer(moments.mean, sampled.values, pull_back, quadratics)

    def observed(self, samples: Tensor) -> SampledUnits:
        """What samples (N, K, p) of the input show: the units' values, and the covariance of each window."""
        images, count, _ = samples.shape
        flat = samples.flatten(0, 1)
        together = elements_together("cache", flat, self.units * self.width)
        parts = [self.values(self.gathered(part)) for part in flat.split(together)]
        values = joined(parts, 0).unflatten(0, (images, count))
        if self.width == 1:
            return SampledUnits(values, self.gathered(variances(samples)).unsqueeze(-1), samples)
        columns = laid_out(samples.mT)
        inputs = windows_in_parts(self.windows, columns, self.width * count)
        return SampledUnits(values, joined([sample_covariance(z) for _, z in inputs], 1), columns.mT)

    def sketch_moments(self, mean: Tensor, covariance: Tensor, probes: int) -> UnitMoments:
        """The units' moments in a sketch, from means (N, p) of inputs and covariances (N, n, w, w) of windows."""
        by_image = [self.local(m, s) for m, s in zip(self.gathered(mean), covariance, strict=True)]
        expected, _, gain, curvature = (torch.stack(part) for part in zip(*by_image, strict=True))
        return UnitMoments(expected, gain.detach(), curvature.detach())

    def has_kernels(self, mean: Tensor, samples: Tensor) -> bool:
        """Whether `by_kernels` can take the place of `in_sketch`: on a GPU, and without derivatives."""
        return False

    def by_kernels(self, mean: Tensor, samples: Tensor) -> SketchedLayer:
        """`in_sketch` by GPU kernels, which never make the host wait."""
        raise NotImplementedError


class OneInput(Nonlinearity):
    """A rule whose unit i looks at input i alone."""

    def gathered(self, z: Tensor) -> Tensor:
        return z.unsqueeze(-1)

    def rows_at_windows(self, rows: Tensor) -> Tensor:
        return rows.mT.contiguous().unsqueeze(-2)

    def pull_back(self, gain: Tensor, weights: Tensor, inputs: int) -> Tensor:
        return weights * gain.mT


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
