"""The expected loss under Gaussian noise, for training: mean and spread of the scores from one pass over stacked rows.

The idea is from *Analytical Moment Regularizer for Gaussian Robust Networks* (arXiv 1904.11005), but moments go through
every layer. A batch of N images goes through the network as (1 + K)·N rows, the means m and K rows m + dₖ for random
directions of the noise. Affine layers take them as they are. At a ReLU, with s² the mean of dₖ²,

    m ← E relu(N(m, s²)),   dₖ ← Φ(m/s) dₖ + rest,

that is, the expected slope plus random numbers with the variance that it leaves; at a max-pool, the even and odd parts
of f(m ± dₖ). The scores m ± dₖ then have the moments of the scores under noise, except for what the rests of different
units share, and their mean loss is the expected one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy

from netmoments.normal import density, distribution

PROBES = 1
"""Number of random directions of the noise; a pass takes 1 + PROBES times as long as a plain one."""
NEAR = 5
"""Side of the window over which a feature map's spread is averaged, since few directions say little about one unit."""
LEAST = 1e-6
"""Added to the deviations, and the least share of a variance that a slope leaves, so that square roots are
differentiable.
"""


class ExpectedScores(NamedTuple):
    """Scores under the noise."""

    mean: Tensor
    """(N, d)."""
    deviations: Tensor
    """(K, N, d), random; the covariance of the scores is E Σₖdₖdₖᵀ/K."""


def expected_scores(network: nn.Module, images: Tensor, sigma: float, probes: int = PROBES) -> ExpectedScores:
    """For images (N, C, H, W) under N(0, σ²I), by a network of affine layers, ReLUs, max-pools and dropout as modules.

    Differentiable in the weights. Directions are drawn from torch's own generator. The mean is exact for one ReLU layer
    as `probes` grow; with few of them the spread of a unit errs by √(2/probes), less what is averaged over a map.
    """
    directions = sigma * torch.randn(probes, *images.shape, dtype=images.dtype, device=images.device)
    with _with_moments(network, len(images), probes):
        rows = network(torch.cat([images, (images + directions).flatten(0, 1)]))
    mean, deviations = _parts(rows, len(images), probes)
    return ExpectedScores(mean, deviations)


def expected_cross_entropy(
    scores: ExpectedScores, labels: Tensor, weight: float, label_smoothing: float = 0.0
) -> Tensor:
    """The expected cross-entropy L under noise, (): L(m) + weight · (½L(m + dₖ) + ½L(m − dₖ) − L(m)), averaged over k.

    A weight of 1 is the expectation, 0 the loss of the expected scores. To second order in dₖ the bracket is
    ½ dₖᵀH dₖ with H = diag(p) − ppᵀ; beyond that, it also notices spread where the network is certain and H is 0.
    """
    plain = cross_entropy(scores.mean, labels, label_smoothing=label_smoothing)
    rows = torch.cat([scores.mean + scores.deviations, scores.mean - scores.deviations])
    spread = cross_entropy(rows.flatten(0, 1), labels.repeat(len(rows)), label_smoothing=label_smoothing)
    return plain + weight * (spread - plain)


def relu_rows(rows: Tensor, images: int, probes: int) -> Tensor:
    """The rows m and m + dₖ after a ReLU, from those before it."""
    mean, deviations = _parts(rows, images, probes)
    variance = deviations.square().mean(0)
    if variance.dim() == 4:
        variance = avg_pool2d(variance, NEAR, 1, NEAR // 2, count_include_pad=False)
    std = variance.add(LEAST**2).sqrt()
    h = mean / std
    gate, bell = distribution(h), density(h)
    expected = h * gate + bell
    left = ((1 + h * h) * gate + h * bell - expected.square() - gate.square()).clamp(min=LEAST)
    after = std * expected
    moved = gate * deviations + std * left.sqrt() * torch.randn_like(deviations)
    return torch.cat([after, (after + moved).flatten(0, 1)])


def pool_rows(rows: Tensor, images: int, probes: int, pool: Callable[[Tensor], Tensor]) -> Tensor:
    """The rows after a max-pool: the mean is the even part of f(m ± dₖ), averaged over k, and dₖ is the odd part."""
    mean, deviations = _parts(rows, images, probes)
    above = pool(rows[images:]).unflatten(0, (probes, images))
    below = pool((mean - deviations).flatten(0, 1)).unflatten(0, (probes, images))
    after = (above + below).mean(0) / 2
    return torch.cat([after, (after + (above - below) / 2).flatten(0, 1)])


def dropout_rows(rows: Tensor, images: int, probes: int, share: float) -> Tensor:
    """The rows after dropout, which drops a unit from the mean and all rows, or from none."""
    if not share:
        return rows
    kept = (torch.rand_like(rows[:images]) >= share) / (1 - share)
    return rows * kept.repeat(1 + probes, *(1,) * (rows.dim() - 1))


def _parts(rows: Tensor, images: int, probes: int) -> tuple[Tensor, Tensor]:
    """The means (N, ...) and the deviations (K, N, ...)."""
    mean = rows[:images]
    return mean, rows[images:].unflatten(0, (probes, images)) - mean


AFFINE = (
    nn.Linear, nn.Conv2d, nn.BatchNorm2d, nn.BatchNorm1d, nn.Flatten, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.Identity,
)  # fmt: skip
"""Layers that can be applied to the rows as they are."""


@contextmanager
def _with_moments(network: nn.Module, images: int, probes: int) -> Iterator[None]:
    """Let the network take rows of means and directions: its nonlinear modules return such rows in place of their own
    outputs.
    """
    changed = []
    try:
        for module in network.modules():
            if isinstance(module, nn.ReLU):
                instead: Callable[[Tensor], Tensor] = partial(relu_rows, images=images, probes=probes)
            elif isinstance(module, nn.MaxPool2d):
                instead = partial(pool_rows, images=images, probes=probes, pool=module.forward)
            elif isinstance(module, nn.Dropout):
                share = module.p if module.training else 0.0
                instead = partial(dropout_rows, images=images, probes=probes, share=share)
            elif isinstance(module, AFFINE) or next(module.children(), None) is not None:
                continue
            else:
                kind = type(module).__name__
                raise ValueError(f"moments know ReLU, MaxPool2d, Dropout and affine layers in training, not {kind}")
            module.forward = instead  # type: ignore[assignment]
            changed.append(module)
        yield
    finally:
        for module in changed:
            del module.forward
