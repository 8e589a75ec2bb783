"""Expected slopes of a network under noise, the control of its samples: how many gradients they are worth, and they.

With the share v of the outputs' variance that is even in the noise, slopes from K gradients lose about 2v/K of the
variance they explain, which costs 8v/K more pairs of 1/tolerance² (see `pair_sums`), and BACKWARD·d·K runs of the
network: the best K follows.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from netmoments.covariances import Covariance
from netmoments.gaussian import Gaussian, random_seed
from netmoments.memory import elements_together
from netmoments.network.model import NetworkModel
from netmoments.sampling.fast_network import FastNetwork

BACKWARD = 3
"""What one output's gradient costs, in runs of the network."""
MOST_POINTS = 16
"""Points at which gradients are taken, at most."""
UNSEEN_POINTS = 8
"""The same where the share of the variance that is even is not waited for, on a GPU."""
TOGETHER = 64
"""Gradients that are taken at once on a CPU, at most."""
SLOPE_NUMBERS = 2**26
"""Slopes are kept for all inputs of a call if these are no more numbers than that."""


class SlopeControls(NamedTuple):
    """Controls ℓ = S δ of variance 1, or 0 for an output without a slope; without any, nothing."""

    slopes: Tensor | None = None
    """S, (E, d, n)."""
    known: Tensor | None = None
    """R = S Σ Sᵀ, (E, d, d), or its diagonal (E, d), in float64."""
    points: int = 0
    """Points at which the network was differentiated."""


def points_worth(first: Tensor, second: Tensor, runs: float) -> int:
    """Points that gradients are worth where `runs` plain samples would do, from values (p, E, d) of mirrored pairs.

    Slopes explain at most (1 − v)² of the variance of squares, which must be more of these runs than a point costs. On
    a GPU the host does not wait for v where gradients are cheap.
    """
    outputs = first.shape[-1]
    affordable = 0.25 * runs / (BACKWARD * outputs)
    if affordable < 0.5:
        return 0
    if first.device.type == "cuda" and affordable > UNSEEN_POINTS:
        return UNSEEN_POINTS
    even, odd = ((first + second) / 2).double().var(0), ((first - second) / 2).double().square().mean(0)
    total = even + odd
    share = float(torch.where(total > 0, even / torch.where(total > 0, total, 1.0), 0.0).mean())
    if (1 - share) ** 2 * runs < BACKWARD * outputs:
        return 0
    best = math.sqrt(8 * share * runs / (BACKWARD * outputs))
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
    memory_budget: int | None = None,
) -> SlopeControls:
    """The average gradient over points of the noise, mirrored ones, or at the mean itself for one point.

    None where the network cannot be differentiated, where slopes are no numbers, or would take too much memory.
    """
    count, entries = model.outputs if outputs is None else outputs.shape[1], len(noise.mean)
    if points == 0 or not model.has_gradient or noise.size * count * entries > SLOPE_NUMBERS:
        return SlopeControls()
    if any(map(Tensor.is_inference, model.network.parameters())):
        return SlopeControls()
    mean, covariance = noise.mean.detach().flatten(1), noise.covariance
    inputs = mean.unsqueeze(0)
    if points > 1:
        generator = torch.Generator(noise.device).manual_seed(random_seed(seed, "slopes", 0))
        half = covariance.draw((points // 2, entries), generator)
        inputs = torch.cat([mean + half, mean - half])
    each = points * (count if noise.device.type == "cuda" else 1)
    together = elements_together("backward", mean, each * model.pass_size, memory_budget)
    rows, parts = inputs.reshape(points, entries, *noise.event_shape), []
    try:
        for start in range(0, entries, together):
            some = slice(start, start + together)
            chosen = None if outputs is None else outputs[some]
            parts.append(_average_gradients(fast, rows[:, some], count, chosen))
    except RuntimeError:
        return SlopeControls()
    slopes = parts[0] if len(parts) == 1 else torch.cat(parts)
    if slopes.device.type != "cuda" and not bool(torch.isfinite(slopes).all()):
        return SlopeControls()
    kind, work = ("controls", covariance.structure, products), partial(_of_variance_one, covariance, products)
    scaled, known = fast.replayed(kind, work, slopes, *covariance.tensors())
    return SlopeControls(scaled, known, points)


def _average_gradients(fast: FastNetwork, points: Tensor, count: int, outputs: Tensor | None) -> Tensor:
    """Average gradients (A, d, n) of d outputs at K points (K, A, ...) of each of A entries.

    One output at a time with one run for all; or all at once, each with a run of its own, on a GPU, or where these are
    no more than fit into a batch, and a step takes longer to ask for than to do.
    """
    number, entries = points.shape[:2]
    rows = points.flatten(0, 1).clone()  # not a tensor of inference mode
    chosen = None if outputs is None else outputs.repeat(number, 1)
    if rows.device.type == "cuda" or count * len(rows) <= min(TOGETHER, fast.batch):
        each = torch.arange(count, device=rows.device).repeat_interleave(len(rows)).unsqueeze(1)
        each = each if chosen is None else chosen.repeat(count, 1).gather(1, each)
        slopes = fast.gradients(rows.repeat(count, *(1,) * (rows.dim() - 1)), each)
        return slopes.reshape(count, number, entries, -1).mean(1).movedim(0, 1)
    with torch.enable_grad():
        x = rows.requires_grad_()
        values = fast(x.clone())  # which it may write into
        values = values if chosen is None else values.gather(1, chosen)
        found = [torch.autograd.grad(values[:, k].sum(), x, retain_graph=k + 1 < count)[0] for k in range(count)]
    return torch.stack([slope.reshape(number, entries, -1).mean(0) for slope in found], 1)


def _of_variance_one(covariance: Covariance, products: bool, slopes: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    """Slopes (E, d, n) scaled so that each control has the variance 1, or 0 where it has none, and R.

    The covariance is the one given, with these tensors. R is that of slopes which are not rounded to their dtype.
    """
    exact, given = covariance.with_tensors([x.double() for x in tensors]), slopes.double()
    known = exact.push(given) if products else exact.push_diagonal(given)
    spread = (known.diagonal(dim1=-2, dim2=-1) if products else known).clamp(min=0).sqrt()
    by = (1 / spread).nan_to_num(0.0, 0.0, 0.0)
    known = (known * (by.unsqueeze(-1) * by.unsqueeze(-2) if products else by**2)).nan_to_num(0.0, 0.0, 0.0)
    scaled = (given * by.unsqueeze(-1)).nan_to_num(0.0, 0.0, 0.0).to(slopes.dtype)
    return scaled, known.expand(len(slopes), *known.shape[1:])
