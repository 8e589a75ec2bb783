"""Monte Carlo with a surrogate of known moments as control variate: the same samples, smaller errors.

This is behind `Sampling(samples, control=...)`. Control variates (Glynn and Szechtman, "Some new perspectives on the
method of control variates", 2002) are applied to means, variances and covariances. Their coefficients are fitted on
other samples than those they are used on (cross-fitting, Chernozhukov et al. 2018), which `cross_fit` does.

`Auto` has controls of its own (`slopes`, `pair_sums`): linear ones, whose sums over pairs of samples need no samples
kept, so that it can go on until a tolerance is met. Here any surrogate is a control, of a number of samples given
beforehand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from netmoments.affine_relu_affine import AffineReluAffine
from netmoments.checks import describe, require_finite
from netmoments.gaussian import Gaussian
from netmoments.precision import full_precision, matvec
from netmoments.progress import progress_bar
from netmoments.sampling.cross_fit import FOLDS, LEAST_SAMPLES, Estimate, cross_fitted
from netmoments.sampling.monte_carlo import SampledMoments, evaluation, for_entries


class Surrogate(Protocol):
    """A function ℓ of d outputs, with its exact moments under the noise that the samples are drawn from."""

    @property
    def mean(self) -> Tensor:
        """E ℓ(x), (*batch, d)."""
        ...

    @property
    def covariance(self) -> Tensor:
        """Cov ℓ(x), (*batch, d, d)."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """ℓ of samples (samples, *noise's batch, *event), as (samples, *batch, d)."""
        ...


@dataclass(frozen=True, eq=False)
class LinearSurrogate:
    """ℓ(x) = S (x − m) for slopes S (*batch, d, n) and noise N(m, Σ): mean 0, covariance S Σ Sᵀ; all in float64.

    S is the network's Jacobian at m or, better, its expected slope under the noise. Any S is right: a poor one helps
    less. An offset would not matter.
    """

    slopes: Tensor
    noise: Gaussian

    @property
    def batch_shape(self) -> torch.Size:
        return torch.broadcast_shapes(self.slopes.shape[:-2], self.noise.batch_shape)

    @cached_property
    def mean(self) -> Tensor:
        return self._slopes.new_zeros(*self.batch_shape, self.slopes.shape[-2])

    @cached_property
    def covariance(self) -> Tensor:
        outputs = self.slopes.shape[-2]
        pushed = self.noise.covariance.to(torch.float64).push(self._slopes).detach()
        return pushed.expand(*self.batch_shape, outputs, outputs)

    def __call__(self, x: Tensor) -> Tensor:
        deviation = x.double() - self.noise.mean.double()
        return matvec(self._slopes, for_entries(deviation, self.noise, self.batch_shape))

    @cached_property
    def _slopes(self) -> Tensor:
        return self.slopes.detach().double()


@dataclass(frozen=True, eq=False)
class TwoStageSurrogate:
    """ℓ(x) = B relu(A x + c₁) + c₂ (+ D x), a two-stage linearization, with its exact moments in float64.

    Values are in the network's dtype, which must be the noise's.
    """

    network: AffineReluAffine
    noise: Gaussian

    @property
    def batch_shape(self) -> torch.Size:
        return torch.broadcast_shapes(self.network.batch_shape, self.noise.batch_shape)

    @cached_property
    def mean(self) -> Tensor:
        mean = self._precise.mean(self.noise.to(torch.float64)).detach()
        return mean.expand(*self.batch_shape, mean.shape[-1])

    @cached_property
    def covariance(self) -> Tensor:
        covariance = self._precise.covariance(self.noise.to(torch.float64)).detach()
        return covariance.expand(*self.batch_shape, *covariance.shape[-2:])

    def __call__(self, x: Tensor) -> Tensor:
        return self.network(for_entries(x, self.noise, self.batch_shape))

    @property
    def _precise(self) -> AffineReluAffine:
        return self.network.to(torch.float64)


CALLER = "controlled_monte_carlo"
BLOCK = 2**20
"""At most so many values go through `cross_fitted` at a time."""
ROUNDING = 8
"""A surrogate's output that varies by less than this many units of rounding of its values is not used."""


@torch.no_grad()
def controlled_monte_carlo(
    function: Callable[[Tensor], Tensor],
    noise: Gaussian,
    surrogate: Surrogate,
    samples: int = 1000,
    *,
    seed: int = 0,
    batch: int | None = None,
) -> SampledMoments:
    """Mean, variance and covariance of function(x) for x ~ noise, with a surrogate as control variate.

    On the same samples, the surrogate deviates from its known moments; where the function's deviations go along with
    these, they are subtracted. The better the two agree, the smaller the standard errors. The estimates are unbiased
    whatever the surrogate, and a useless one adds less than 1 % to the errors of 1000 samples.

    Args:
        function, noise, seed, batch: as in `monte_carlo`, and the samples are the same.
        surrogate: a `LinearSurrogate`, a `TwoStageSurrogate`, or any `Surrogate` with the function's outputs (those of
            several dimensions in one) and the moments it has under this very noise.
        samples: how many for each entry of the noise; at least 20.

    Coefficients are fitted on four fifths of the samples and used on the last fifth, five times over; `cross_fit` has
    the formulas. Standard errors are asymptotic: below about 100 samples they are too small on average, as those of
    `monte_carlo` are. An estimated covariance need not be positive semidefinite. Where the error of a variance is as
    large as the variance itself, the estimate may be negative; it is left so, because clipping would bias it. The
    values of function and surrogate are kept in float64, which takes 16 bytes for each sample, entry and output.
    """
    run = _run(function, noise, surrogate, samples, seed, batch)
    estimate = _estimated(run.values, run.known, run.moments, run.rounding)
    outputs, shape = run.values.shape[1], run.shape
    covariance, covariance_error = (
        matrix.reshape(*shape[: len(shape) - run.output_ndim], outputs, outputs)
        for matrix in (estimate.covariance, estimate.covariance_error_squared.sqrt())
    )
    return SampledMoments(
        mean=estimate.mean.reshape(shape),
        variance=covariance.diagonal(dim1=-2, dim2=-1).reshape(shape),
        covariance=covariance,
        mean_standard_error=estimate.mean_error_squared.sqrt().reshape(shape),
        variance_standard_error=covariance_error.diagonal(dim1=-2, dim2=-1).reshape(shape),
        covariance_standard_error=covariance_error,
        samples=samples,
    )


class ControlledVariances(NamedTuple):
    """Means and variances, (*batch, *output) in float64, with their standard errors."""

    mean: Tensor
    variance: Tensor
    mean_standard_error: Tensor
    variance_standard_error: Tensor


@torch.no_grad()
def controlled_variances(
    function: Callable[[Tensor], Tensor],
    noise: Gaussian,
    surrogate: Surrogate,
    samples: int = 1000,
    *,
    seed: int = 0,
    batch: int | None = None,
) -> ControlledVariances:
    """The means and variances of `controlled_monte_carlo` without its covariances, for any number of outputs.

    Each output is an entry of its own, as its mean and variance take no other output's control.
    """
    run = _run(function, noise, surrogate, samples, seed, batch)
    variances = run.moments.covariance.diagonal(dim1=-2, dim2=-1)
    alone = _Moments(run.moments.mean.reshape(-1, 1), variances.reshape(-1, 1, 1))
    values, known = (x.reshape(-1, 1, samples) for x in (run.values, run.known))
    estimate = _estimated(values, known, alone, run.rounding)
    mean_error, variance_error = estimate.mean_error_squared.sqrt(), estimate.covariance_error_squared.sqrt()
    found = estimate.mean, estimate.covariance, mean_error, variance_error
    return ControlledVariances(*(x.reshape(run.shape) for x in found))


class _Run(NamedTuple):
    """What function and surrogate returned, (E, d, n) in float64."""

    values: Tensor
    known: Tensor
    moments: _Moments
    rounding: float
    """The relative rounding of the surrogate's values."""
    shape: torch.Size
    """(*batch, *output)."""
    output_ndim: int


def _run(
    function: Callable[[Tensor], Tensor],
    noise: Gaussian,
    surrogate: Surrogate,
    samples: int,
    seed: int,
    batch: int | None,
) -> _Run:
    """Run function and surrogate on the same samples."""
    evaluated = evaluation(CALLER, function, noise, samples, seed, batch, least=1)
    if samples < LEAST_SAMPLES:
        raise ValueError(
            f"{CALLER}: at least {LEAST_SAMPLES} samples are needed, for {FOLDS} folds that are fitted on each other, "
            f"got {samples}; use monte_carlo for fewer"
        )
    function_values: list[Tensor] = []
    surrogate_values: list[Tensor] = []
    moments, output_shape, rounding = None, torch.Size(), 0.0
    with full_precision(), progress_bar("sampling", samples) as show:
        for number, (x, values) in enumerate(evaluated):
            show(number * evaluated.batch)
            output_shape, flat = evaluated.output_shape(values), evaluated.flat(values)
            moments = moments or _moments_of(surrogate, evaluated.entries, flat.shape[-1])
            like = _values_of(surrogate, x, flat.shape)
            rounding = torch.finfo(like.dtype).eps
            function_values.append(flat.double())
            surrogate_values.append(like.double())
    assert moments is not None
    values, known = _samples_last(function_values), _samples_last(surrogate_values)
    shape = torch.Size((*evaluated.entries, *output_shape))
    return _Run(values, known, moments, rounding, shape, len(output_shape))


class _Moments(NamedTuple):
    """The surrogate's exact moments, (E, d) and (E, d, d) in float64."""

    mean: Tensor
    covariance: Tensor


def standardized(values: Tensor, mean: Tensor, covariance: Tensor, rounding: float) -> tuple[Tensor, Tensor]:
    """Controls (ℓ − E ℓ)/s and their correlations, from values (..., d, n), mean (..., d), covariance (..., d, d).

    Both are 0 for an output whose deviation s is rounding: eight times the relative `rounding` of the largest value.
    """
    deviation = covariance.diagonal(dim1=-2, dim2=-1).sqrt()
    largest = torch.maximum(values.abs().amax(-1), mean.abs())
    varies = deviation > ROUNDING * rounding * largest
    scale = torch.where(varies, 1 / torch.where(varies, deviation, 1.0), 0.0)
    return (values - mean.unsqueeze(-1)) * scale.unsqueeze(-1), covariance * scale.unsqueeze(-1) * scale.unsqueeze(-2)


def _estimated(values: Tensor, known: Tensor, moments: _Moments, rounding: float) -> Estimate:
    """Estimates for values (E, d, n), some entries at a time."""
    entries, outputs, samples = values.shape
    together = max(1, BLOCK // (outputs * samples))
    parts = []
    for start in range(0, entries, together):
        span = slice(start, start + together)
        controls, correlation = standardized(known[span], moments.mean[span], moments.covariance[span], rounding)
        parts.append(cross_fitted(values[span], controls, correlation))
    return Estimate(*(torch.cat(pieces) for pieces in zip(*parts, strict=True)))


def _samples_last(batches: list[Tensor]) -> Tensor:
    """Batches (N, *entries, d) joined as (E, d, samples). The list is emptied, so that memory is held once."""
    joined = torch.cat(batches)
    batches.clear()
    return joined.reshape(len(joined), -1, joined.shape[-1]).movedim(0, -1).contiguous()


def _moments_of(surrogate: Surrogate, entries: torch.Size, outputs: int) -> _Moments:
    """The surrogate's moments for each entry, checked."""
    mean, covariance = surrogate.mean, surrogate.covariance
    for name, value, event in (("mean", mean, (outputs,)), ("covariance", covariance, (outputs, outputs))):
        shape = (*entries, *event)
        if not _expands(value, shape, event):
            raise ValueError(
                f"{CALLER}: the surrogate's {name} must have shape {tuple(shape)} or broadcast to it, for the "
                f"{outputs} outputs of the function, got {describe(value)}; choose the same outputs for both"
            )
        require_finite(CALLER, f"the surrogate's {name}", value)
    if bool((covariance.diagonal(dim1=-2, dim2=-1) < 0).any()):
        raise ValueError(f"{CALLER}: the surrogate's variances must be at least 0, got negative ones")
    return _Moments(
        mean.double().expand(*entries, outputs).reshape(-1, outputs),
        covariance.double().expand(*entries, outputs, outputs).reshape(-1, outputs, outputs),
    )


def _values_of(surrogate: Surrogate, x: Tensor, wanted: torch.Size) -> Tensor:
    """The surrogate's values on a batch of samples, (N, *entries, d), checked."""
    values = surrogate(x)
    if not _expands(values, wanted, wanted[-1:]) or values.dim() != len(wanted) or len(values) != len(x):
        raise ValueError(
            f"{CALLER}: surrogate must return a floating-point tensor of shape {tuple(wanted)} for samples of shape "
            f"{tuple(x.shape)}, got {describe(values)}"
        )
    require_finite(CALLER, "what the surrogate returned", values)
    return values.expand(wanted)


def _expands(value: Any, wanted: tuple[int, ...], event: tuple[int, ...]) -> bool:
    """Whether it is a floating-point tensor that ends in `event` and broadcasts to the shape that is wanted."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or len(value.shape) > len(wanted):
        return False
    pairs = zip(reversed(value.shape), reversed(wanted), strict=False)
    return value.shape[-len(event) :] == event and all(have in (1, want) for have, want in pairs)
