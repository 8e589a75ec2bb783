"""The moments of all units of a layer in a sketch: of many images at once, and no more of them than a sketch needs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from netmoments.normal import density, distribution, standard_deviation
from netmoments.propagate.contenders import largest_of_contenders
from netmoments.propagate.elementwise import Elementwise
from netmoments.propagate.largest import Largest
from netmoments.propagate.nonlinearity import Nonlinearity
from netmoments.propagate.piecewise_linear import PiecewiseLinear
from netmoments.propagate.sampled_windows import joined, laid_out, variances, window_covariance, windows_in_parts
from netmoments.relu.marginal import standardize

SAMPLE_ELEMENTS = {"cpu": 2**19, "cuda": 2**28}
"""Numbers in samples of windows that a rule of any kind is asked about together."""


class Seen(NamedTuple):
    """What samples (N, K, p) of the input of a layer show."""

    values: Tensor
    """Of the units, (N, K, n)."""
    covariance: Tensor
    """S of what each unit looks at, (N, n, w, w)."""
    samples: Tensor
    """The same samples, in memory as they are best looked at again: place by place where there are windows."""


class Units(NamedTuple):
    """The moments of n units with w inputs each, for N images."""

    mean: Tensor
    """E f, (N, n), differentiable in the means and covariances of the inputs."""
    gain: Tensor
    """E ∇f, (N, n, w), without gradient."""
    curvature: Tensor
    """E ∇²f, (N, n, w, w), without gradient."""


def seen(rule: Nonlinearity, samples: Tensor) -> Seen:
    """The values of a layer, and how much what its units look at spreads."""
    images, count, _ = samples.shape
    if isinstance(rule, Largest):
        columns = laid_out(samples.mT)
        every = windows_in_parts(rule.windows, columns, rule.width * count)
        parts = [(_largest(rule, z, rule.windows[some]), window_covariance(z)) for some, z in every]
        values, covariances = (joined(part, 1) for part in zip(*parts, strict=True))
        return Seen(laid_out(values.mT), covariances, columns.mT)
    flat = samples.flatten(0, 1)
    elements = SAMPLE_ELEMENTS.get(flat.device.type, SAMPLE_ELEMENTS["cpu"])
    together = max(1, elements // (rule.units * rule.width))
    found = joined([rule.values(rule.gathered(some)) for some in flat.split(together)], 0).unflatten(0, (images, count))
    if rule.width == 1:
        return Seen(found, rule.gathered(variances(samples)).unsqueeze(-1), samples)
    columns = laid_out(samples.mT)
    every = windows_in_parts(rule.windows, columns, rule.width * count)
    return Seen(found, joined([window_covariance(z) for _, z in every], 1), columns.mT)


def _largest(rule: Largest, z: Tensor, windows: Tensor) -> Tensor:
    """The values (N, m, K) of windows (N, m, w, K); places (m, w), of which −1 is none."""
    missing = (windows < 0).unsqueeze(-1)
    if bool(missing.any()):
        z = z.masked_fill(missing, -rule.sign * torch.inf)
    extreme = z.amax(-2) if rule.sign > 0 else z.amin(-2)
    return rule.sign * torch.relu(rule.sign * extreme) if rule.with_zero else extreme


def moments_of_units(rule: Nonlinearity, mean: Tensor, covariance: Tensor, probes: int) -> Units:
    """For Gaussian inputs with means (N, p) and covariances (N, n, w, w) of what each unit looks at."""
    if isinstance(rule, PiecewiseLinear):
        return _piecewise_linear(rule, mean, covariance.flatten(1))
    windows = rule.gathered(mean)
    if isinstance(rule, Largest):
        return Units(*largest_of_contenders(rule, windows, covariance, probes))
    if isinstance(rule, Elementwise):
        expected, _, gain, curvature = torch.func.vmap(lambda m, s: tuple(rule.local(m, s)))(windows, covariance)
    else:
        each = [rule.local(m, s) for m, s in zip(windows, covariance, strict=True)]
        expected, _, gain, curvature = (torch.stack(part) for part in zip(*each, strict=True))
    return Units(expected, gain.detach(), curvature.detach())


def _piecewise_linear(rule: PiecewiseLinear, mean: Tensor, variance: Tensor) -> Units:
    """Of f(z) = offset + slope·z + Σ bend relu(z − kink), from means and variances (N, n).

    With m the distance from a kink and h = m/s, a ReLU has the mean mΦ + sφ, whose derivatives are Φ in m and φ in s,
    as if these were constants; the gain is slope + Σ bend Φ, the curvature Σ bend φ/s.
    """
    s = standard_deviation(variance)
    bends, shifted = rule.bends.unsqueeze(1), mean - rule.kinks.unsqueeze(1)
    with torch.no_grad():
        h = standardize(shifted, s)
        gate, bell = bends * distribution(h), bends * density(h)
        gain = rule.slope + gate.sum(0)
        curvature = torch.where(s > 0, bell.sum(0) / torch.where(s > 0, s, 1.0), 0.0)
    expected = rule.offset + rule.slope * mean + (shifted * gate + s * bell).sum(0)
    return Units(expected, gain.unsqueeze(-1), curvature.unsqueeze(-1).unsqueeze(-1))
