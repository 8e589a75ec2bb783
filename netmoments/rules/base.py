"""What a rule for a nonlinear layer is: the moments of each unit, and what every method asks of a layer beyond them.

A layer has n units, each a function f of w of the p numbers that go in: its window. A rule must say two things,
`values` (f itself) and `local` (the moments of each unit under a Gaussian). Everything else follows from these, in the
methods of `Nonlinearity`, and a rule that knows better overrides them: exact covariances of pairs, faster moments for
sketches, GPU kernels. No method asks what kind of rule it has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from netmoments.memory import elements_together
from netmoments.relu.triton.launch import ENABLED
from netmoments.rules.sampled import (
    QuadraticForms,
    SampledUnits,
    UnitMoments,
    curved_units,
    joined,
    laid_out,
    sample_covariance,
    variances,
    windows_in_parts,
)

FLOOR = {torch.float32: 1e-6, torch.float64: 1e-12}
"""Added to the variances of a window, relative to the largest, so that tied inputs have a Cholesky factor."""
EXACT_PAIRS = 2048
"""Layers of at most so many units have the exact covariances of all pairs, where their rule has a formula for them."""


class Local(NamedTuple):
    """One unit y = f(z) for z ~ N(m, S) over the w inputs it looks at, for each of n units; images come first."""

    mean: Tensor
    """E f, (n,)."""
    variance: Tensor
    """Var f, (n,)."""
    gain: Tensor
    """E ∇f, (n, w): by Stein's identity (1981) Cov(x, f(z)) = Cov(x, z)·gain for every x jointly Gaussian with z."""
    curvature: Tensor
    """E ∇²f, (n, w, w)."""

    def linear_variance(self, covariance: Tensor) -> Tensor:
        """gᵀSg, what the best linear approximation of f has: (n,)."""
        return ((covariance @ self.gain.unsqueeze(-1)).squeeze(-1) * self.gain).sum(-1)

    def quadratic_variance(self, covariance: Tensor) -> Tensor:
        """½ tr(HSHS), what the second Hermite term adds: (n,)."""
        curved = self.curvature @ covariance
        return 0.5 * (curved * curved.mT).sum((-2, -1))


class ThirdCumulants(NamedTuple):
    """Third cumulants κ_abc = E[u_a u_b u_c] of what units look at, in coordinates u with z = m + R u and Cov u = I.

    To first order in them u has the density φ(u)(1 + κ/6 · the third Hermite polynomials): Edgeworth's correction.
    """

    root: Tensor
    """R, (n, w, w), RRᵀ = S."""
    kappa: Tensor
    """κ, (n, q, q, q), of the first q coordinates; the others are Gaussian."""


class PowerMoments(NamedTuple):
    """E[gᵏ Heᵣ(u)] of g = f(m + su) − f(m), u ~ N(0, 1), Heᵣ the Hermite polynomials, all (N, n).

    It is sʳ times the r-th derivative in the mean of E gᵏ, f(m) being held. Without f(m) taken off, cumulants of units
    that are far from 0 would be differences of large numbers. Each is a tuple over r = 0, 1, ….
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


@dataclass(frozen=True, eq=False)
class SketchedLayer:
    """A nonlinear layer of a sketch, for N images with K samples each."""

    mean: Tensor
    """E f of its units by formula, (N, n)."""
    values: Tensor
    """f at the samples, (N, K, n)."""
    pull_back: Callable[[Tensor], Tensor]
    """Weights (N, k, n) on its output as weights (N, k, p) on its input, by the expected slopes."""
    quadratics: Callable[[Tensor], QuadraticForms] | None
    """The quadratic forms of scores with weights (N, k, n) on its units; None if no unit is curved."""


class Nonlinearity(ABC):
    """A layer of n units, each a function of w of the p numbers that go in."""

    windows: Tensor
    """Which inputs each unit looks at, (n, w), as places in the flattened input; −1 where a window has fewer."""

    is_exact: ClassVar[bool] = False
    """Whether mean, variances and all covariances of the units are exact for a Gaussian input."""
    has_formula: ClassVar[bool] = True
    """Whether there are moments by formula; a black box is known from samples only."""

    @abstractmethod
    def local(self, mean: Tensor, covariance: Tensor, cumulants: ThirdCumulants | None = None) -> Local:
        """The units' moments, from means (..., n, w) and covariances (..., n, w, w) of what they look at.

        Places beyond a window have mean 0, variance 0 and gain 0. With third cumulants, the mean, the variance and the
        gain E ∇f are right to first order in them.
        """

    @abstractmethod
    def values(self, z: Tensor) -> Tensor:
        """f itself, from (..., n, w) to (..., n)."""

    def pairs(self, mean: Tensor, covariance: Tensor) -> Tensor | None:
        """The exact covariances of all pairs of units less their linear parts, (N, n, n), or None without a formula.

        For units that look at one number each: means (N, n), covariances (N, n, n).
        """
        return None

    def power_moments(self, mean: Tensor, variance: Tensor) -> PowerMoments | None:
        """The moments of powers of units that look at one number each, of means and variances (N, n).

        None where they are not known: then a unit's own cumulants are those of its quadratic approximation.
        """
        return None

    @cached_property
    def has_pairs(self) -> bool:
        """Whether `pairs` has a formula, and the layer is small enough for it beside rows."""
        return self.has_pair_formula and self.units <= EXACT_PAIRS

    @cached_property
    def has_pair_formula(self) -> bool:
        return type(self).pairs is not Nonlinearity.pairs

    @cached_property
    def units(self) -> int:
        return len(self.windows)

    @cached_property
    def width(self) -> int:
        return self.windows.shape[1]

    @cached_property
    def full_windows(self) -> bool:
        """Whether every unit looks at as many numbers."""
        return bool((self.windows >= 0).all())

    def gathered(self, z: Tensor) -> Tensor:
        """What the windows look at: (..., p) to (..., n, w), zeros beyond the windows."""
        picked = z[..., self.windows.clamp(min=0)]
        return picked if self.full_windows else picked * (self.windows >= 0)

    def rows_at_windows(self, rows: Tensor) -> Tensor:
        """What the windows look at of rows (N, r, p): (N, n, w, r)."""
        found = rows.mT.contiguous()[:, self.windows.clamp(min=0)]
        return found if self.full_windows else found * (self.windows >= 0).unsqueeze(-1)

    def pull_back(self, gain: Tensor, weights: Tensor, inputs: int) -> Tensor:
        """Weights (N, k, n) on the units y = Σ gain·z as weights (N, k, p) on their p inputs z, for gains (N, n, w)."""
        places = self.windows.clamp(min=0).reshape(-1)
        parts: list[Tensor] = []
        for some in weights.split(elements_together("pass", weights, len(places) * len(weights)), dim=1):
            spread = (some.unsqueeze(-1) * gain.unsqueeze(1)).flatten(2)
            before = some.new_zeros(some.shape[0] * some.shape[1], inputs)
            parts.append(before.index_add_(1, places, spread.flatten(0, 1)).unflatten(0, some.shape[:2]))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    @property
    def is_relu(self) -> bool:
        """Whether it is max(z, 0) of every unit."""
        return False

    @property
    def never_negative(self) -> bool:
        """Whether a ReLU after it would change nothing."""
        return False

    def clamped(self) -> Nonlinearity | None:
        """This layer with a ReLU before or after it, as one rule; None if there is no such rule."""
        return None

    def sketched(self, mean: Tensor, samples: Tensor) -> SketchedLayer:
        """The layer in a sketch, from the mean (N, p) and samples (N, K, p) of its input."""
        if ENABLED and self.has_kernels(mean, samples):
            return self.by_kernels(mean, samples)
        seen = self.observed(samples)
        moments = self.sketch_moments(mean, seen.covariance, samples.shape[1])
        curved = curved_units(self.windows, moments.curvature, seen.covariance.detach(), seen.samples.detach())
        back = partial(self.pull_back, moments.gain, inputs=samples.shape[-1])
        return SketchedLayer(moments.mean, seen.values, back, curved)

    def observed(self, samples: Tensor) -> SampledUnits:
        """What samples (N, K, p) of the input show: the units' values, and the covariance of what each looks at."""
        images, count, _ = samples.shape
        flat = samples.flatten(0, 1)
        together = elements_together("cache", flat, self.units * self.width)
        parts = [self.values(self.gathered(some)) for some in flat.split(together)]
        values = joined(parts, 0).unflatten(0, (images, count))
        if self.width == 1:
            return SampledUnits(values, self.gathered(variances(samples)).unsqueeze(-1), samples)
        columns = laid_out(samples.mT)
        every = windows_in_parts(self.windows, columns, self.width * count)
        return SampledUnits(values, joined([sample_covariance(z) for _, z in every], 1), columns.mT)

    def sketch_moments(self, mean: Tensor, covariance: Tensor, probes: int) -> UnitMoments:
        """The units' moments in a sketch, for means (N, p) and covariances (N, n, w, w) of what each looks at."""
        each = [self.local(m, s) for m, s in zip(self.gathered(mean), covariance, strict=True)]
        expected, _, gain, curvature = (torch.stack(part) for part in zip(*each, strict=True))
        return UnitMoments(expected, gain.detach(), curvature.detach())

    def has_kernels(self, mean: Tensor, samples: Tensor) -> bool:
        """Whether `by_kernels` can do what `sketched` is asked: on a GPU, without derivatives."""
        return False

    def by_kernels(self, mean: Tensor, samples: Tensor) -> SketchedLayer:
        """The same as `sketched` by GPU kernels that never make the host wait."""
        raise NotImplementedError


class OneInput(Nonlinearity):
    """Units that look at one number each, unit i at number i."""

    def gathered(self, z: Tensor) -> Tensor:
        return z.unsqueeze(-1)

    def rows_at_windows(self, rows: Tensor) -> Tensor:
        return rows.mT.contiguous().unsqueeze(-2)

    def pull_back(self, gain: Tensor, weights: Tensor, inputs: int) -> Tensor:
        return weights * gain.mT


def cholesky_root(covariance: Tensor) -> Tensor:
    """R with RRᵀ = S, (..., w, w), S with a floor on its diagonal: `FLOOR` of the largest variance of the window."""
    own = covariance.diagonal(dim1=-2, dim2=-1)
    floor = FLOOR[covariance.dtype] * own.detach().amax(-1, keepdim=True) + 1e-30
    if own.shape[-1] == 1:
        return (own + floor).sqrt().unsqueeze(-1)
    return torch.linalg.cholesky(covariance + torch.diag_embed(floor.expand_as(own)))


def whitened(covariance: Tensor, curvature: Tensor, present: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """R with RRᵀ = S, and R⁻¹: (n, w, w) each. If w > first, the unit bends most along the first columns of R.

    R' of Cholesky, or R' times the eigenvectors of R'ᵀHR' in the order of their eigenvalues' size. Any rotation of a
    root is one, so nothing is differentiated through them.
    """
    root = cholesky_root(covariance)
    if root.shape[-1] > first:
        with torch.no_grad():
            both = present.unsqueeze(-1) & present.unsqueeze(-2)
            bend = root.mT @ torch.where(both, curvature, 0.0) @ root
            size = bend.abs().amax((-2, -1), keepdim=True)
            values, vectors = torch.linalg.eigh((bend / torch.where(size > 0, size, 1.0)).double())
            order = values.abs().argsort(-1, descending=True).unsqueeze(-2).expand_as(vectors)
            turn = vectors.gather(-1, order).to(root.dtype)
        root = root @ turn
    return root, torch.linalg.inv(root)
