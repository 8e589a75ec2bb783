"""What a rule is: a nonlinear layer with the moments of its units under a Gaussian.

A layer has n units. Each is a function f of w of the layer's p inputs, its window. A rule must define two things:
`values`, which is f itself, and `local`, the moments of each unit under a Gaussian. The other methods of `Nonlinearity`
follow from these; a rule that knows more overrides them: with exact covariances of pairs, faster moments for sketches,
or GPU kernels. Code that uses a rule never asks which kind it is.
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

EXACT_PAIRS = 2048
"""The most units of a layer for which exact covariances of all pairs are computed beside rows."""


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
