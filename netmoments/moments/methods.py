"""The ways to moments, each a function of a network, a flat batch of noise and the chosen scores (N, k)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from netmoments.affine_relu_affine import AffineReluAffine
from netmoments.gaussian import Gaussian
from netmoments.linearize.bank import LinearizationBank
from netmoments.linearize.linear import linearized
from netmoments.linearize.memory import directions_at_once, memory_limit, points_at_once
from netmoments.linearize.two_stage import two_stage
from netmoments.moments.result import OutputMoments
from netmoments.network.tracing import Relu, Trace
from netmoments.sampling import (
    LinearSurrogate,
    SampledMoments,
    Surrogate,
    TwoStageSurrogate,
    controlled_monte_carlo,
    monte_carlo,
)

TOGETHER_BYTES = {"cpu": 2**30, "cuda": 16 * 2**30}
"""Jacobians of different points that are held at a time."""


def by_two_stage(
    network: nn.Module, noise: Gaussian, origin: Tensor, rows: Tensor, relu: Relu, memory_budget: int | None
) -> OutputMoments:
    """Linearized before and after one ReLU at the mean of the noise.

    `origin` (N,) numbers the means, equal ones (with equal scores chosen) alike: they share a linearization.
    """
    first = _first_of_each(origin)
    points, chosen = noise.mean[first].detach(), rows[first]
    each = (relu.size * noise.size + rows.shape[1] * (relu.size + noise.size)) * noise.dtype.itemsize
    together = _fitting(each, noise.device, memory_budget)

    def linearizations() -> Iterable[tuple[AffineReluAffine, Tensor]]:
        for start in range(0, len(points), together):
            span = slice(start, start + together)
            group = two_stage(
                network, points[span], relu.index, outputs=chosen[span], event_ndim=noise.event_ndim,
                memory_budget=memory_budget,
            )  # fmt: skip
            yield from _with_their_entries(group, origin, start)

    return _gathered(linearizations(), noise, rows, method="two-stage", cut=relu.name)


def by_bank(bank: LinearizationBank, noise: Gaussian, rows: Tensor) -> OutputMoments:
    """Each input from the linearization at the nearest point of a bank."""
    nearest, distance = bank.nearest(noise.mean)
    pairs = ((bank.member(int(number)), (nearest == number).nonzero().squeeze(1)) for number in nearest.unique())
    answers = ((network.outputs(rows[index]), index) for network, index in pairs)
    return _gathered(answers, noise, rows, method="two-stage", cut=bank.relu, distance=distance)


def by_linear(
    network: nn.Module, noise: Gaussian, rows: Tensor, found: Trace, memory_budget: int | None
) -> OutputMoments:
    """The delta method: E g ≈ g(mean), Cov g ≈ J Σ Jᵀ."""
    means, covariances = [], []
    for mean, jacobian, span in _linearizations(network, noise, rows, found, memory_budget):
        means.append(mean)
        covariances.append(noise.covariance.entries(span).push(jacobian))
    covariance = torch.cat(covariances)
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    return OutputMoments(torch.cat(means), variance, covariance, method="linear", outputs=rows)


def _linearizations(
    network: nn.Module, noise: Gaussian, rows: Tensor, found: Trace, memory_budget: int | None
) -> Iterable[tuple[Tensor, Tensor, slice]]:
    """Scores (·, k) and Jacobians (·, k, n) at the means, some at a time, with the entries they are for."""
    itemsize = noise.dtype.itemsize
    together = points_at_once(noise.device, found.largest, itemsize, memory_budget)
    together = min(together, _fitting(rows.shape[1] * noise.size * itemsize, noise.device, memory_budget))
    working = directions_at_once(noise.device, found.largest * together, itemsize, memory_budget)
    for start in range(0, len(noise.mean), together):
        span = slice(start, start + together)
        yield (*linearized(network, noise.mean[span], rows[span], working), span)


def by_sampling(network: nn.Module, noise: Gaussian, rows: Tensor, samples: int, seed: int) -> OutputMoments:
    """Monte Carlo on the network itself."""
    sampled = monte_carlo(_chosen_scores(network, rows.to(noise.device)), noise, samples, seed=seed)
    return dataclasses.replace(_with_errors(sampled), outputs=rows)


def by_controlled_sampling(
    network: nn.Module, noise: Gaussian, rows: Tensor, surrogate: Surrogate, samples: int, seed: int
) -> OutputMoments:
    """Monte Carlo with a control variate whose moments are known."""
    function = _chosen_scores(network, rows.to(noise.device))
    sampled = controlled_monte_carlo(function, noise, surrogate, samples, seed=seed)
    return dataclasses.replace(_with_errors(sampled), outputs=rows)


def linear_surrogate(
    network: nn.Module, noise: Gaussian, rows: Tensor, found: Trace, memory_budget: int | None
) -> LinearSurrogate:
    """The derivative at the mean."""
    slopes = torch.cat([jacobian for _, jacobian, _ in _linearizations(network, noise, rows, found, memory_budget)])
    return LinearSurrogate(slopes, noise)


def two_stage_surrogate(
    network: nn.Module, noise: Gaussian, rows: Tensor, relu: Relu, memory_budget: int | None
) -> TwoStageSurrogate:
    """The two-stage linearization at the mean."""
    points = noise.mean.detach()
    flat = two_stage(
        network, points, relu.index, outputs=rows, event_ndim=noise.event_ndim, memory_budget=memory_budget
    )
    return TwoStageSurrogate(flat, noise)


def _chosen_scores(network: nn.Module, rows: Tensor) -> Callable[[Tensor], Tensor]:
    """The scores (N, k) of each of N images, for samples of all of them in turn."""
    images = len(rows)

    def chosen(x: Tensor) -> Tensor:
        scores = network(x)
        picked = scores.reshape(-1, images, scores.shape[1]).gather(2, rows.expand(len(x) // images, -1, -1))
        return picked.reshape(len(x), -1)

    return chosen


def _with_errors(sampled: SampledMoments) -> OutputMoments:
    return OutputMoments(
        sampled.mean,
        sampled.variance,
        sampled.covariance,
        method="sampling",
        mean_standard_error=sampled.mean_standard_error,
        variance_standard_error=sampled.variance_standard_error,
        covariance_standard_error=sampled.covariance_standard_error,
    )


def of_affine_relu_affine(network: AffineReluAffine, noise: Gaussian) -> OutputMoments:
    """Exact, for a network that is one."""
    covariance = network.covariance(noise)
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    return OutputMoments(network.mean(noise), variance, covariance, method="exact")


def sampled_affine_relu_affine(network: AffineReluAffine, noise: Gaussian, samples: int, seed: int) -> OutputMoments:
    """Monte Carlo, for the same."""
    return _with_errors(monte_carlo(network, noise, samples, seed=seed))


def _with_their_entries(
    group: AffineReluAffine, origin: Tensor, start: int
) -> Iterable[tuple[AffineReluAffine, Tensor]]:
    """The networks of points start, start + 1, …, with the entries of the noise that each is for.

    Networks with equally many entries go together, one set of all their first entries, of all their second, and so on:
    the noise levels of a study, say.
    """
    count = len(group.c1)
    mine = ((origin >= start) & (origin < start + count)).nonzero().squeeze(1)
    mine = mine[origin[mine].argsort(stable=True)]
    levels = (origin[mine] - start).bincount(minlength=count).unique()
    if len(levels) == 1:
        for entries in mine.reshape(count, -1).unbind(1):
            yield group, entries
        return
    for number in range(count):
        yield group.entries(number), mine[origin[mine] == start + number]


def _gathered(
    answers: Iterable[tuple[AffineReluAffine, Tensor]],
    noise: Gaussian,
    rows: Tensor,
    *,
    method: str,
    cut: str,
    distance: Tensor | None = None,
) -> OutputMoments:
    """The moments of each network for its entries of the noise, put in the noise's order."""
    means, covariances, order = [], [], []
    for network, index in answers:
        part = of_affine_relu_affine(network, noise.entries(index))
        means.append(part.mean)
        covariances.append(part.covariance)
        order.append(index)
    back = torch.cat(order).argsort()
    covariance = torch.cat(covariances)[back]
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    return OutputMoments(torch.cat(means)[back], variance, covariance, method, cut, rows, distance)


def _first_of_each(origin: Tensor) -> Tensor:
    """The first place of every number 0, 1, … in `origin`."""
    numbers = int(origin.max()) + 1
    places = torch.arange(len(origin), device=origin.device)
    return places.new_full((numbers,), len(origin)).scatter_reduce_(0, origin, places, "amin")


def _fitting(bytes_each: int, device: torch.device, memory_budget: int | None) -> int:
    limit = memory_limit(device, memory_budget)
    if memory_budget is None:
        limit = min(limit, TOGETHER_BYTES.get(device.type, TOGETHER_BYTES["cpu"]))
    return max(1, limit // bytes_each)
