"""The estimate that pairs of samples give, and the allowances that keep its stated errors honest.

The usual standard error is computed from the samples' own spread. It is too small in three situations, and each has an
allowance here:

1. *A variance known from few samples* is skewed: `allowing_for_skewness`.
2. *A control that explains every sample* leaves nothing to judge an error by: `allowing_for_the_unseen`.
3. *Rare events.* A unit that opens h standard deviations above its mean input is open in a share Φ(−h) of the samples.
   A hundred samples may well show nothing of a unit that opens at 2.5. If much depends on it, mean and variance miss
   that part, while the spread of the samples suggests that everything is known. A few samples at s = `WIDENING` times
   the noise see the unit open at h/s. They are not samples of the outputs, but they show what could be missed.

How much n samples may miss, for the third: events that they have seldom seen have h ≥ h(n), with Φ(−h(n)) = 5/n. Of the
variance of relu(sz − h), z ~ N(0, 1), at most the share

    κ(n) = g(h(n)) / s²g(h(n)/s),     g(h) = E relu(z − h)² = (1 + h²)Φ(−h) − hφ(h)

remains at the noise itself. For the variance of its square, replace g by g₄(h) = E relu(z − h)⁴ = (h⁴ + 6h² + 3)Φ(−h) −
(h³ + 5h)φ(h) and s² by s⁴; that share is a tenth of κ or less. Up to logarithms κ(n) behaves like the ratio φ(h)/φ(h/s)
of densities, n^{1/s² − 1}. For s = 2.5 and n from 96 to 10,000 this power is 1.3 to 1.5 times κ(n); the code uses it,
and a sixth of it for squares. A jump leaves more than a ReLU, at most 12 times what is allowed for, where it is about
to be seen.

Smooth functions raise little alarm: the even part of a quadratic has s⁴ = 39 times its variance at s times the noise,
less than 1/κ. Squares of it have s⁸, which is five times too much at n = 96 and not too much from n = 800 on.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

PILOT = 64
"""Pairs of a first look at a network. WIDE_PAIRS of them are at wider noise, and only show what may be missed."""
WIDENING = 2.5
"""The samples that look for rare events have noise of so many times the deviation."""
WIDE_PAIRS = 16
"""Mirrored pairs at wider noise. They show an event at 3 deviations (one sample in 740) in 98 of 100 cases."""
SQUARES = 6.0
"""From the wider noise to the noise, the variance of squares is taken to fall by this factor more than that of values.
"""
MOST_SHARE = 1.0
"""Relative errors of variances above this are enlarged for skewness only as much as this one."""
ROUNDING = 16
"""An output that varies by less than so many units in the last place of its mean is taken not to vary."""


class PairEstimate(NamedTuple):
    """Means (E, d), covariances (E, d, d) or variances (E, d), and the squares of their standard errors."""

    mean: Tensor
    second: Tensor
    mean_error_squared: Tensor
    second_error_squared: Tensor

    @property
    def variance(self) -> Tensor:
        return self.second if self.second.dim() == 2 else self.second.diagonal(dim1=-2, dim2=-1)

    @property
    def variance_error_squared(self) -> Tensor:
        squared = self.second_error_squared
        return squared if squared.dim() == 2 else squared.diagonal(dim1=-2, dim2=-1)


def counts_of_infinite(values: Tensor) -> Tensor:
    """How many of the samples (..., d) are not finite, and how often each output is not, (1 + d,)."""
    infinite = ~values.isfinite()
    return torch.cat([infinite.any(-1).sum().reshape(1), infinite.flatten(0, -2).sum(0)])


def infinite_outputs(infinite: Tensor, samples: int) -> ValueError:
    """The error that some of so many samples gave no numbers, from their `counts_of_infinite`."""
    where = infinite[1:].nonzero().squeeze(1).tolist()
    named = ", ".join(map(str, where[:4])) + (", …" if len(where) > 4 else "")
    return ValueError(
        f"output_moments: {int(infinite[0])} of {samples} samples gave NaN or infinite outputs (output {named}), so "
        f"that there are no moments; use less noise, clamp the network's input, or choose other outputs="
    )


def allowing_for_skewness(estimate: PairEstimate) -> PairEstimate:
    """The estimate with larger errors where a variance is known badly.

    An estimated variance v with relative error r is too small more often than too large, and nearly symmetric in its
    logarithm. Two standard errors upwards therefore lead to v·e^{2r}, so one standard error is (e^{2r} − 1)/2 of v:
    close to r where r is small (0.0101 for 0.01), 0.41 for 0.3. Errors of covariances grow in proportion.
    """
    relative = estimate.variance_error_squared.sqrt() / estimate.variance.clamp(min=0)
    relative = relative.nan_to_num(0.0).clamp(max=MOST_SHARE)
    factor = torch.where(relative > 0, torch.expm1(2 * relative) / (2 * relative), 1.0)
    squared = factor.unsqueeze(-1) * factor.unsqueeze(-2) if estimate.second.dim() == 3 else factor**2
    return estimate._replace(second_error_squared=estimate.second_error_squared * squared)


def allowing_for_the_unseen(estimate: PairEstimate, samples: Tensor, wide: Tensor | None = None) -> PairEstimate:
    """The estimate with errors that allow for what so many samples, (E,), cannot have shown.

    One further sample, of which control and mean know nothing, and which is off by the output's own deviation, moves
    the mean by 1/n of that deviation and the variance by √2/n of itself. Where the control explains every sample this
    is all the error there is. `wide` (2, E, d), if given, is what `wide_residuals` found at wider noise: those samples
    then count among the n, and the residual variances are taken as at least `unseen_variances`. An event that is rarer
    or larger than both is not covered.
    """
    deviation = estimate.variance.clamp(min=0).sqrt()
    move = deviation / (samples if wide is None else samples + 2 * WIDE_PAIRS).unsqueeze(-1)
    with_products = estimate.second.dim() == 3
    second_move = move.unsqueeze(-1) * deviation.unsqueeze(-2) if with_products else move * deviation
    mean_error_squared, second_error_squared = estimate.mean_error_squared, estimate.second_error_squared
    if wide is not None:
        of_mean, of_second = 2 * unseen_variances(wide, samples) / samples.unsqueeze(-1)
        if with_products:
            of_second = (of_second.unsqueeze(-1) * of_second.unsqueeze(-2)).sqrt()
        mean_error_squared = torch.maximum(mean_error_squared, of_mean)
        second_error_squared = torch.maximum(second_error_squared, of_second)
    return estimate._replace(
        mean_error_squared=mean_error_squared + move.square(),
        second_error_squared=second_error_squared + 2 * second_move.square(),
    )


def tolerance_met(estimate: PairEstimate, dtype: torch.dtype) -> Tensor:
    """The tolerance that an estimate meets for each input, (E,).

    The errors of means, in standard deviations of the output, and the relative errors of variances, divided by √2, are
    averaged over the outputs; the larger of both averages counts. An output whose deviation is within the rounding of
    its values in `dtype` is taken to have that deviation.
    """
    rounding = ROUNDING * torch.finfo(dtype).eps * estimate.mean.abs()
    deviation = torch.maximum(estimate.variance.clamp(min=0).sqrt(), rounding)
    mean, second = estimate.mean_error_squared.sqrt(), estimate.variance_error_squared.sqrt()
    mean = torch.where(mean == 0, 0.0, mean / deviation).mean(-1)
    second = torch.where(second == 0, 0.0, second / deviation**2).mean(-1)
    return torch.maximum(mean, second / math.sqrt(2)).nan_to_num(nan=torch.inf, posinf=torch.inf)


def residual_variance(target: Tensor, control: Tensor) -> Tensor:
    """The variance of a target over the first dimension after a linear regression on one control."""
    target, control = target - target.mean(0), control - control.mean(0)
    power = control.square().mean(0)
    product = (target * control).mean(0)
    explained = torch.where(power > 0, product**2 / torch.where(power > 0, power, 1.0), 0.0)
    return (target.square().mean(0) - explained).clamp(min=0)


def wide_residuals(first: Tensor, second: Tensor, linear: Tensor | None) -> Tensor:
    """Residual variances (2, E, d) of e and of t (see `pair_sums`) at wider noise, about their own means.

    `first` and `second` are the values (p, E, d) at both samples of p mirrored pairs, `linear` is their control ℓ, if
    there is one. Its square explains what it can with a slope fitted here, because slopes differ at wider noise. The
    result is 0 where a value is not a number.
    """
    odd, even = (first - second).double() / 2, (first + second).double() / 2
    even = even - even.mean(0)
    square = torch.zeros_like(odd) if linear is None else linear.double() ** 2
    residual = residual_variance(torch.stack([even, odd**2 + even**2], 1), square.unsqueeze(1))
    return (residual * (len(first) / (len(first) - 2))).nan_to_num(0.0, 0.0, 0.0)  # two coefficients were fitted


def unseen_variances(wide: Tensor, samples: Tensor) -> Tensor:
    """How much so many samples, (E,), may have missed of the variances (2, E, d) of e and t.

    The share n^{1/s² − 1} of what `wide_residuals` found, and for t a share smaller by `SQUARES`: see the module.
    """
    share = samples.unsqueeze(-1) ** (WIDENING**-2 - 1)
    return torch.stack([share, share / SQUARES]) * wide
