"""The expected slopes of a network under noise, which are the control of its samples, and what they are worth.

The slopes S are averages of gradients at K points of the noise. If a share v of the outputs' variance is even in the
noise, K gradients lose about 2v/K of the variance that slopes could explain. That costs 8v/K more of the 1/tolerance²
samples (see `pair_sums`), while the gradients of d outputs cost GRADIENT_RUNS·d·K runs of the network. `points_worth`
takes the K for which the sum is smallest.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from netmoments.checks import random_seed
from netmoments.covariances import Covariance
from netmoments.gaussian import Gaussian
from netmoments.memory import elements_together
from netmoments.network.model import NetworkModel
from netmoments.sampling.fast_network import FastNetwork

GRADIENT_RUNS = 3
"""The cost of the gradient of one output, in runs of the network."""
MOST_POINTS = 16
"""At most so many points have their gradients taken."""
UNSEEN_POINTS = 8
"""The number of points on a GPU where waiting for the share v would take longer than the gradients."""
TOGETHER = 64
"""At most so many gradients are taken at once on a CPU."""
SLOPE_NUMBERS = 2**26
"""Without slopes if those of all inputs of a call would be more numbers than this."""


class SlopeControls(NamedTuple):
    """Controls ℓ = S δ, scaled to variance 1, or 0 for an output without a slope; empty without slopes."""

    slopes: Tensor | None = None
    """S, (E, d, n)."""
    known: Tensor | None = None
    """R = S Σ Sᵀ, (E, d, d), or its diagonal (E, d), in float64."""
    points: int = 0
    """Points at which the network was differentiated."""


def points_worth(first: Tensor, second: Tensor, runs: float) -> int:
    """At how many points gradients are worth taking, if `runs` plain samples would meet the tolerance.

    `first` and `second` are the values (p, E, d) at both samples of some mirrored pairs, from which v follows. Slopes
    explain at most (1 − v)² of the variance of squares; if that share of the runs is less than one point costs, the
    result is 0. On a GPU the host does not wait for v where gradients are cheap.
    """
    outputs = first.shape[-1]
    affordable = 0.25 * runs / (GRADIENT_RUNS * outputs)
    if affordable < 0.5:
        return 0
    if first.device.type == "cuda" and affordable > UNSEEN_POINTS:
        return UNSEEN_POINTS
    even, odd = ((first + second) / 2).double().var(0), ((first - second) / 2).double().square().mean(0)
    total = even + odd
    share = float(torch.where(total > 0, even / torch.where(total > 0, total, 1.0), 0.0).mean())
    if (1 - share) ** 2 * runs < GRADIENT_RUNS * outputs:
        return 0
    best = math.sqrt(8 * share * runs / (GRADIENT_RUNS * outputs))
    points = max(1, int(min(best + 0.5, affordable, MOST_POINTS)))
    return points if points == 1 else points // 2 * 2


def expected_slopes(
    model: NetworkModel,
    fast: FastNetwork,
    noise: Gaussian,
    outputs: Tensor | None,
    points: int,
    *,
    products: bool,
    seed: int,
) -> SlopeControls:
    """The gradients averaged over so many mirrored points of the noise, or taken at the mean itself for one point.

    There are no slopes where `gradients_under_noise` has none.
    """
    generator = torch.Generator(noise.device).manual_seed(random_seed(seed, "slopes", 0))
    slopes = gradients_under_noise(model, fast, noise, outputs, points, generator)
    if slopes is None:
        return SlopeControls()
    covariance = noise.covariance
    kind, work = ("controls", covariance.structure, products), partial(_of_variance_one, covariance, products)
    scaled, known = fast.replayed(kind, work, slopes, *covariance.tensors())
    return SlopeControls(scaled, known, points)


def gradients_under_noise(
    model: NetworkModel,
    fast: FastNetwork,
    noise: Gaussian,
    outputs: Tensor | None,
    points: int,
    generator: torch.Generator,
) -> Tensor | None:
    """The gradients (E, d, n) averaged over so many mirrored points of the noise, or at the mean itself for one point.

    None for no points, where the network cannot be differentiated, or where they would take too much memory. Numbers
    that are not finite are 0: any slopes make a control, if not a good one.
    """
    count, entries = model.outputs if outputs is None else outputs.shape[1], len(noise.mean)
    if points == 0 or not model.has_gradient or noise.size * count * entries > SLOPE_NUMBERS:
        return None
    if any(map(Tensor.is_inference, model.network.parameters())):
        return None
    mean = noise.mean.detach().flatten(1)
    inputs = mean.unsqueeze(0)
    if points > 1:
        half = noise.covariance.draw((points // 2, entries), generator)
        inputs = torch.cat([mean + half, mean - half])
    each = points * (count if noise.device.type == "cuda" else 1)
    together = elements_together("backward", mean, each * model.pass_size, model.memory_budget)
    rows, parts = inputs.reshape(points, entries, *noise.event_shape), []
    try:
        for start in range(0, entries, together):
            span = slice(start, start + together)
            parts.append(_average_gradients(fast, rows[:, span], count, None if outputs is None else outputs[span]))
    except RuntimeError:
        return None
    slopes = parts[0] if len(parts) == 1 else torch.cat(parts)
    return slopes.nan_to_num(0.0, 0.0, 0.0)


def linear_controls(
    slopes: Tensor | None, deviations: Tensor, others: Tensor | None
) -> tuple[Tensor, Tensor | None] | None:
    """The control ℓ = S δ at both samples of p pairs, (p, A, d) each, for slopes S (A, d, n); None without slopes.

    `deviations` (p, A, n) are δ of the first samples, `others` those of the second. Without `others` the pairs are
    mirrored: the second control is −ℓ, and not returned (None).
    """
    if slopes is None:
        return None
    first = torch.matmul(deviations.movedim(0, 1), slopes.mT).movedim(0, 1)
    return first, None if others is None else torch.matmul(others.movedim(0, 1), slopes.mT).movedim(0, 1)


def _average_gradients(fast: FastNetwork, points: Tensor, count: int, outputs: Tensor | None) -> Tensor:
    """Average gradients (A, d, n) of d outputs over K points (K, A, ...) of each of A inputs.

    On a GPU, and where the gradients fit into one small batch, all are taken at once, each with a run of its own,
    because a step takes longer to ask for than to do. Else one run serves all outputs, and they go one at a time.
    """
    number, entries = points.shape[:2]
    rows = points.flatten(0, 1).clone()  # a tensor of inference mode has no gradient
    chosen = None if outputs is None else outputs.repeat(number, 1)
    if rows.device.type == "cuda" or count * len(rows) <= min(TOGETHER, fast.batch):
        output = torch.arange(count, device=rows.device).repeat_interleave(len(rows)).unsqueeze(1)
        output = output if chosen is None else chosen.repeat(count, 1).gather(1, output)
        gradients = fast.gradients(rows.repeat(count, *(1,) * (rows.dim() - 1)), output)
        return gradients.reshape(count, number, entries, -1).mean(1).movedim(0, 1)
    with torch.enable_grad():
        x = rows.requires_grad_()
        values = fast(x.clone())  # which it may write into
        values = values if chosen is None else values.gather(1, chosen)
        slopes = [torch.autograd.grad(values[:, k].sum(), x, retain_graph=k + 1 < count)[0] for k in range(count)]
    return torch.stack([slope.reshape(number, entries, -1).mean(0) for slope in slopes], 1)


def _of_variance_one(covariance: Covariance, products: bool, slopes: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    """Slopes (E, d, n) scaled so that each control has variance 1, or is 0 if it has none; and R.

    The covariance is the given structure with these tensors. R is computed in float64, before the slopes are rounded to
    their dtype.
    """
    exact, given = covariance.with_tensors([x.double() for x in tensors]), slopes.double()
    known = exact.push(given) if products else exact.push_diagonal(given)
    spread = (known.diagonal(dim1=-2, dim2=-1) if products else known).clamp(min=0).sqrt()
    by = (1 / spread).nan_to_num(0.0, 0.0, 0.0)
    known = (known * (by.unsqueeze(-1) * by.unsqueeze(-2) if products else by**2)).nan_to_num(0.0, 0.0, 0.0)
    scaled = (given * by.unsqueeze(-1)).nan_to_num(0.0, 0.0, 0.0).to(slopes.dtype)
    return scaled, known.expand(len(slopes), *known.shape[1:])
