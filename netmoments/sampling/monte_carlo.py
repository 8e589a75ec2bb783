"""Plain Monte Carlo: moments and class frequencies of what a function returns, each with its standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from netmoments.affine_relu_affine import AffineReluAffine
from netmoments.checks import (
    describe,
    random_seed,
    require_broadcastable,
    require_count,
    require_finite,
    require_float_tensor,
    require_float_tensors,
    require_seed,
)
from netmoments.gaussian import Gaussian
from netmoments.memory import piece_bytes
from netmoments.precision import full_precision
from netmoments.progress import progress_bar

SMALLEST_BATCH = 16


@dataclass(frozen=True, eq=False)
class SampledMoments:
    """Moments estimated from samples, in float64. Shapes: (*batch, *output), covariances (*batch, D, D).

    Unbiased; each number has its standard error, which falls as 1/√samples.

    >>> sampled = monte_carlo(torch.nn.Identity(), Gaussian(torch.zeros(2), std=1.0), samples=1000)
    >>> bool((sampled.mean.abs() < 5 * sampled.mean_standard_error).all())
    True
    """

    mean: Tensor
    variance: Tensor
    covariance: Tensor
    mean_standard_error: Tensor
    variance_standard_error: Tensor
    covariance_standard_error: Tensor
    samples: int
    method: str = "sampling"


class MomentSums:
    """The sums of powers of a random vector from which its covariance and that covariance's standard error follow.

    They are Σδᵢ, Σδᵢδⱼ, Σδᵢ²δⱼ and Σδᵢ²δⱼ² in float64, with δ = y − x̄ for a shift x̄ near the mean, and may have
    leading batch dimensions. `about` gives those of even powers about another point, such as the mean itself.
    """

    def __init__(self, shift: Tensor) -> None:
        outputs = shift.shape[-1]
        self.count = 0
        self.shift = shift
        self.first = torch.zeros_like(shift)
        self.second, self.third, self.fourth = (shift.new_zeros(*shift.shape, outputs) for _ in range(3))

    def add(self, values: Tensor) -> None:
        """Add `values`, (samples, *batch, D)."""
        delta = (values.double() - self.shift).movedim(0, -2)
        square = delta * delta
        self.count += values.shape[0]
        self.first += delta.sum(-2)
        self.second += delta.mT @ delta
        self.third += square.mT @ delta
        self.fourth += square.mT @ square

    def about(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Σδᵢδⱼ and Σδᵢ²δⱼ² about another point: δ' = δ − a, expanded."""
        a = point - self.shift
        row, column = a.unsqueeze(-1), a.unsqueeze(-2)
        first_row, first_column = self.first.unsqueeze(-1), self.first.unsqueeze(-2)
        n = self.count
        squares = self.second.diagonal(dim1=-2, dim2=-1)
        square_row, square_column = squares.unsqueeze(-1), squares.unsqueeze(-2)
        second = self.second - row * first_column - first_row * column + n * row * column
        fourth = (
            self.fourth
            - 2 * column * self.third
            - 2 * row * self.third.mT
            + 4 * row * column * self.second
            + column**2 * square_row
            + row**2 * square_column
            - 2 * row * column**2 * first_row
            - 2 * column * row**2 * first_column
            + n * row**2 * column**2
        )
        return second, fourth

    def moments(self, output_shape: torch.Size) -> SampledMoments:
        """Unbiased estimates and their standard errors: sampling variances of k-statistics (Kendall and Stuart).

        Var(sᵢⱼ) = m₂₂/n − (n−2)/(n(n−1)) cᵢⱼ² + cᵢᵢcⱼⱼ/(n(n−1)) with m₂₂ = E[δᵢ²δⱼ²] about the mean.
        """
        n = self.count
        mean = self.shift + self.first / n
        second, fourth = self.about(mean)
        covariance = second / (n - 1)
        covariance = 0.5 * (covariance + covariance.mT)
        variance = covariance.diagonal(dim1=-2, dim2=-1)
        product = variance.unsqueeze(-1) * variance.unsqueeze(-2)
        spread = fourth / n - (n - 2) / (n - 1) * covariance**2 + product / (n - 1)
        covariance_error = (spread / n).clamp(min=0).sqrt()
        shape = (*self.shift.shape[:-1], *output_shape)
        return SampledMoments(
            mean=mean.reshape(shape),
            variance=variance.reshape(shape),
            covariance=covariance,
            mean_standard_error=(variance / n).sqrt().reshape(shape),
            variance_standard_error=covariance_error.diagonal(dim1=-2, dim2=-1).reshape(shape),
            covariance_standard_error=covariance_error,
            samples=n,
        )


def relative_difference(x: Tensor, y: Tensor) -> Tensor:
    """2|x − y| / (|x| + |y|), the paper's absolute relative difference: 0 for equal values (0 and 0 too), at most 2.

    x and y broadcast; the result is in float64.

    >>> relative_difference(torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 0.0]))
    tensor([2., 0.], dtype=torch.float64)
    """
    caller = "relative_difference"
    x, y = (require_float_tensor(caller, name, value).double() for name, value in (("x", x), ("y", y)))
    x, y = require_float_tensors(caller, x=x, y=y)
    require_broadcastable(caller, x=x.shape, y=y.shape)
    require_finite(caller, "x", x)
    require_finite(caller, "y", y)
    larger = torch.maximum(x.abs(), y.abs())
    larger = torch.where(larger > 0, larger, 1.0)
    x, y = x / larger, y / larger  # so that nothing overflows or vanishes
    size = x.abs() + y.abs()
    return torch.where(size > 0, 2 * (x - y).abs() / torch.where(size > 0, size, 1.0), 0.0).clamp(max=2)


@torch.no_grad()
def monte_carlo(
    function: Callable[[Tensor], Tensor],
    noise: Gaussian,
    samples: int = 10_000,
    *,
    seed: int = 0,
    batch: int | None = None,
) -> SampledMoments:
    """Mean, variance and covariance of function(x) for x ~ noise, each with its standard error, from samples.

    Args:
        function: takes inputs (N, *event) and returns (N, ...), one row an input: any module or callable. An
            `AffineReluAffine` with a batch of its own gets the samples of each entry apart.
        noise: the input distribution; with batch dimensions, moments are taken for each of its entries.
        samples: how many for each entry; at least 2.
        seed: same seed, same batch, same device: same result.
        batch: how many samples (of every entry) go through at once, by default as many as make
            1 MiB of inputs on a CPU and 64 MiB on a GPU.

    Sums are in float64, streamed, so memory does not grow with `samples`. TF32 is off. A run of more than a second
    shows its progress if the terminal is one.

    >>> sampled = monte_carlo(torch.relu, Gaussian(torch.zeros(1), std=1.0), samples=10_000)
    >>> bool((sampled.mean - 0.39894).abs() < 5 * sampled.mean_standard_error)  # 1/√(2π)
    True
    """
    evaluated = evaluation("monte_carlo", function, noise, samples, seed, batch, least=2)
    sums, output_shape = None, torch.Size()
    with full_precision(), progress_bar("sampling", samples) as show:
        for number, (_, values) in enumerate(evaluated):
            show(number * evaluated.batch)
            output_shape = evaluated.output_shape(values)
            flat = evaluated.flat(values)
            if sums is None:
                sums = MomentSums(flat.double().mean(0))
            sums.add(flat)
    assert sums is not None
    return sums.moments(output_shape)


@dataclass(frozen=True, eq=False)
class Evaluation:
    """A function and the samples on which it is evaluated. Iterating gives batches of samples with the function's
    values.

    Samples are (N, *noise's batch, *event), values (N, *entries, *output). Same seed, batch and device: same samples.
    """

    caller: str
    function: Callable[[Tensor], Tensor]
    noise: Gaussian
    entries: torch.Size
    """The batch shape of the noise, broadcast with that of the function if it has one of its own."""
    samples: int
    seed: int
    batch: int

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        # not the seed itself: a network whose weights were drawn with that seed would meet them again as noise
        own = random_seed(self.seed, "samples", 0)
        generator = torch.Generator(self.noise.device).manual_seed(own)
        for start in range(0, self.samples, self.batch):
            x = self.noise.sample(min(self.batch, self.samples - start), generator=generator)
            yield x, self._values(x)

    def flat(self, values: Tensor) -> Tensor:
        """The values as (N, *entries, D)."""
        return values.reshape(*values.shape[: 1 + len(self.entries)], -1)

    def output_shape(self, values: Tensor) -> torch.Size:
        return values.shape[1 + len(self.entries) :]

    def _values(self, x: Tensor) -> Tensor:
        """The function's values, checked. An `AffineReluAffine` takes the samples of each entry of its own batch apart;
        any other function gets one flat batch of inputs.
        """
        if isinstance(self.function, AffineReluAffine):
            return self._finite(
                self.function(for_entries(x, self.noise, self.entries)).expand(len(x), *self.entries, -1)
            )
        inputs = x.reshape(-1, *self.noise.event_shape)
        values = self.function(inputs.clone())  # which it may write into, while others still need the samples
        if not isinstance(values, Tensor) or values.dim() < 1 or values.shape[0] != inputs.shape[0]:
            raise ValueError(
                f"{self.caller}: function must return a tensor with one row for each of the {inputs.shape[0]} inputs "
                f"of shape {tuple(self.noise.event_shape)}, got {describe(values)}"
            )
        if not values.is_floating_point():
            raise TypeError(f"{self.caller}: function must return floating-point values, got {describe(values)}")
        return self._finite(values.reshape(len(x), *self.entries, *values.shape[1:]))

    def _finite(self, values: Tensor) -> Tensor:
        if not bool(torch.isfinite(values).all()):
            raise ValueError(f"{self.caller}: function returned NaN or infinite values")
        return values


def evaluation(
    caller: str, function: Any, noise: Any, samples: int, seed: int, batch: int | None, *, least: int
) -> Evaluation:
    """The arguments of a Monte Carlo run, checked; `least` is the smallest number of samples allowed."""
    require_count(caller, "samples", samples, least=least)
    require_seed(caller, seed)
    if not isinstance(noise, Gaussian):
        raise TypeError(f"{caller}: noise must be a netmoments.Gaussian, got {describe(noise)}")
    if not callable(function):
        raise TypeError(f"{caller}: function must be callable, got {describe(function)}")
    entries = noise.batch_shape
    if isinstance(function, AffineReluAffine):
        entries = require_broadcastable(caller, network=function.batch_shape, noise=noise.batch_shape)
    if batch is None:
        batch = _default_batch(noise, entries, samples)
    require_count(caller, "batch", batch, least=1)
    return Evaluation(caller, function, noise, entries, samples, seed, batch)


def for_entries(x: Tensor, noise: Gaussian, entries: torch.Size) -> Tensor:
    """Samples (N, *noise's batch, *event) as (N, ..., n), which broadcasts with entries that have more dimensions."""
    ones = (1,) * (len(entries) - len(noise.batch_shape))
    return x.reshape(len(x), *ones, *noise.batch_shape, noise.size)


def _default_batch(noise: Gaussian, entries: torch.Size, samples: int) -> int:
    bytes_each = noise.size * noise.dtype.itemsize
    inputs = max(SMALLEST_BATCH, piece_bytes("inputs", noise.device) // bytes_each)
    return max(1, min(samples, inputs // entries.numel()))
