"""Plain Monte Carlo: the mean, the variance and the covariance of what a function returns."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from netmoments.gaussian import Gaussian
from netmoments.precision import full_precision
from netmoments.progress import Progress
from netmoments.sampling.evaluation import evaluation
from netmoments.sampling.sums import MomentSums, SampledMoments


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
    """
    evaluated = evaluation("monte_carlo", function, noise, samples, seed, batch, least=2)
    sums, output_shape = None, torch.Size()
    with full_precision(), Progress("sampling", samples) as progress:
        for x, values in evaluated:
            output_shape = evaluated.output_shape(values)
            flat = evaluated.flat(values)
            if sums is None:
                sums = MomentSums(flat.double().mean(0))
            sums.add(flat)
            progress.advance(len(x))
    assert sums is not None
    return sums.moments(output_shape)
