"""How often each class wins, from samples."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from netmoments.gaussian import Gaussian
from netmoments.precision import full_precision
from netmoments.progress import Progress
from netmoments.sampling.evaluation import evaluation


@torch.no_grad()
def class_frequencies(
    network: Callable[[Tensor], Tensor],
    noise: Gaussian,
    samples: int = 10_000,
    *,
    seed: int = 0,
    batch: int | None = None,
) -> Tensor:
    """How often each class has the largest score when x ~ noise, (*batch_shape, classes), in float64, from samples.

    A frequency f has the standard error √(f(1−f)/samples). Arguments and memory as in `monte_carlo`.
    """
    evaluated = evaluation("class_frequencies", network, noise, samples, seed, batch, least=1)
    counts: Tensor | None = None
    with full_precision(), Progress("sampling", samples) as progress:
        for x, values in evaluated:
            won = torch.nn.functional.one_hot(values.argmax(-1), values.shape[-1]).sum(0)
            counts = won if counts is None else counts + won
            progress.advance(len(x))
    assert counts is not None
    return counts.double() / samples
