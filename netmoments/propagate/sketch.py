"""Moments of a network of any size: formulas at every nonlinear layer, how much it spreads from a few real samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from netmoments.gaussian.covariance import Covariance
from netmoments.network.graph import Node, shape_of
from netmoments.precision import full_precision, matvec
from netmoments.progress import Progress
from netmoments.propagate.bent import BentUnits, bent_units, nonlinear_covariance, sample_covariance
from netmoments.propagate.contenders import local_among_contenders
from netmoments.propagate.largest import Largest
from netmoments.propagate.nonlinearity import Local, Nonlinearity
from netmoments.propagate.opaque import Opaque
from netmoments.propagate.plan import Plan, Segment, Stage
from netmoments.propagate.sampled_windows import through_gains, window_covariance
from netmoments.propagate.transposed import added, before_gains, before_segment

PROBES = 64
PROBE_ELEMENTS = {"cpu": 2**23, "cuda": 2**28}
"""Numbers in one layer's probes that go through an affine part, or are looked at window by window, together."""
LEAST_POINTS, MOST_POINTS = 64, 4096
"""At which the largest of a window is looked at, between these as many as there are probes. With fewer,
the noise of the curvatures of wide windows makes variances too large."""


@dataclass(frozen=True, eq=False)
class Sketched:
    """Moments of k scores, and the expected derivatives they come from."""

    mean: Tensor
    """(k,), from the Gaussian formulas; differentiable in the image, the covariance and the weights."""
    correction: Tensor
    """(k,), what to add for a mean without their bias: the probes' mean, less its linear part, says so. Noisier by a
    little: √(rest/probes). Without gradient."""
    covariance: Tensor
    """(k, k), without gradient."""
    slopes: Tensor
    """A, (k, n): the network's expected Jacobian, as a product of expected gains. Without gradient."""


def sketched(
    plan: Plan, mean: Tensor, covariance: Covariance, rows: Tensor, *, probes: int = PROBES, seed: int = 0
) -> Sketched:
    """Mean and covariance of the chosen scores for one image, mean (1, ...), at the price of about `probes` runs.

    Real samples of the noise, the probes, run along and say how much the inputs z of every nonlinear layer spread:
    S = Cov z of each window. The mean then goes from layer to layer by formula, E f(N(m, S)), and each unit is

        y = E f + g·(z − m) + ½ [(z − m)ᵀH(z − m) − tr HS] + rest,   g = E ∇f, H = E ∇²f:

    three uncorrelated parts if z is Gaussian. One backward pass through the gains a score gives its weights on all
    units, so that scores are such sums too, and their covariance is that of the three parts:

        linear      A Σ Aᵀ, with A the product of the gains: exact;
        quadratic   between all pairs of units of all layers, also of different layers: from pairs of probes, see
                    `quadratic_covariance`, which are many more than probes;
        rest        the sample covariance over the probes: small, and so is its error √(2/probes).

    The last two together are kept positive semidefinite: no variance is below its linear part. With fewer than 4
    probes the quadratic part stays in the rest. What remains is the error of the gains, S being from few probes
    (√(2/probes) of each window's own, averaged over all windows) and deep z not quite Gaussian.
    """
    if isinstance(probes, bool) or not isinstance(probes, int) or probes < 2:
        raise ValueError(f"sketch: probes must be an integer of at least 2, as a spread needs two, got {probes!r}")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"sketch: seed must be an integer of at least 0, got {seed!r}")
    generator = torch.Generator(mean.device).manual_seed(seed)
    means = {plan.image: mean}
    deviations = covariance.draw((probes,), generator)
    samples = {plan.image: mean.reshape(1, -1) + deviations}
    layers = []
    with full_precision(), Progress("sketch", 2 * len(plan.stages)) as progress:
        for place, stage in enumerate(plan.stages):
            layers.append(_through(stage, means, samples))
            for node in set(means) - set(plan.needed_after(place)):
                del means[node], samples[node]
            progress.advance(1)
        scores = plan.last.value(means)
        with torch.no_grad():
            sampled = _sampled(plan.last, samples).mean(0)
            chosen = torch.nn.functional.one_hot(rows, len(scores)).to(mean.dtype)
            slopes, nonlinear = _backward(plan, layers, chosen, probes, progress)
            every = covariance.push(slopes) + nonlinear
        correction = sampled[rows] - matvec(slopes, deviations.detach().mean(0)) - scores[rows].detach()
    return Sketched(scores[rows], correction, every, slopes)


@dataclass(frozen=True, eq=False)
class _Layer:
    """What is kept of a nonlinear layer."""

    back: Callable[[Tensor], Tensor]
    """Weights (k, n) on its output as weights (k, p) on its input, by the expected slopes."""
    bent: BentUnits | None


def _through(stage: Stage, means: dict[Node, Tensor], samples: dict[Node, Tensor]) -> _Layer:
    """One affine part and nonlinear layer: its output is added to the means, (1, ...), and to the samples, (K, n)."""
    rule = stage.rule
    z = _sampled(stage.before, samples)
    if isinstance(rule, Opaque):
        return _through_opaque(stage, rule, z, means, samples)
    centred = z - z.mean(0)
    covariance = window_covariance(rule, centred)
    local = _local(rule, rule.gathered(stage.before.value(means)), covariance, len(z))
    y = torch.cat([rule.values(rule.gathered(some)) for some in z.split(_together(z, rule.units * rule.width))])
    means[stage.output] = local.mean.reshape(shape_of(stage.output))
    samples[stage.output] = y
    local = Local(*(x.detach() for x in local))
    with torch.no_grad():
        remainder = y - y.mean(0) - through_gains(rule, local.gain, centred)
        bent = bent_units(rule, local, covariance, centred, remainder)
    return _Layer(partial(before_gains, rule, local.gain, inputs=z.shape[1]), bent)


def _through_opaque(
    stage: Stage, rule: Opaque, z: Tensor, means: dict[Node, Tensor], samples: dict[Node, Tensor]
) -> _Layer:
    """An operation without a formula: its mean and expected slopes are averages over the probes, moved to the mean."""
    moved = stage.before.value(means) + (z - z.mean(0)).detach()
    together = _together(z, max(z.shape[1], rule.units))
    expected = rule.at(moved, together).mean(0)
    y = rule.at(z, together)
    means[stage.output] = expected.reshape(shape_of(stage.output))
    samples[stage.output] = y
    with torch.no_grad():
        moved = moved.detach()
        linear = rule.expected_push(moved, (z - z.mean(0)).detach(), together)
        if bool(y.std(0).any()) and not bool(linear.any()):
            raise ValueError(
                f"sketch: {rule.name} changes with its input, but its derivative is zero (rounding?), so that nothing "
                f'can be said from it; use method="sampling"'
            )
        remainder = y - y.mean(0) - linear
        size = remainder.square().mean(0)
        units = (size > torch.finfo(size.dtype).eps ** 2 * size.max()).nonzero().squeeze(-1)
        nothing = units.unsqueeze(-1).new_full((len(units), 1), -1)
        flat = z.new_zeros(len(units), 1, 1)
        bent = BentUnits(units, nothing, z.new_zeros(len(z), 1), flat, remainder[:, units]) if len(units) else None
    return _Layer(lambda weights: rule.expected_pull(moved, weights, together), bent)


def _local(rule: Nonlinearity, mean: Tensor, covariance: Tensor, probes: int) -> Local:
    if not isinstance(rule, Largest):
        return rule.local(mean, covariance)
    points = min(max(LEAST_POINTS, 1 << (probes - 1).bit_length()), MOST_POINTS)
    return local_among_contenders(replace(rule, points=points), mean, covariance)


def _sampled(segment: Segment, samples: dict[Node, Tensor]) -> Tensor:
    """The output of an affine part at every probe, (K, p)."""
    largest = max(shape_of(node).numel() for node in (*segment.sources, *segment.results))
    together = _together(next(iter(samples.values())), largest)
    return segment.batched("value", {node: samples[node] for node in segment.sources}, together)


def _together(like: Tensor, each: int) -> int:
    return max(1, PROBE_ELEMENTS.get(like.device.type, PROBE_ELEMENTS["cpu"]) // each)


def _backward(
    plan: Plan, layers: list[_Layer], chosen: Tensor, probes: int, progress: Progress
) -> tuple[Tensor, Tensor]:
    """The expected Jacobian (k, n) of scores (k, all), and their covariance (k, k) without its linear part."""
    k = len(chosen)
    grams, remainders = chosen.new_zeros(k, probes, probes), chosen.new_zeros(k, probes)
    weights = before_segment(plan.last, chosen)
    for stage, layer in zip(reversed(plan.stages), reversed(layers), strict=True):
        own = weights.pop(stage.output)
        if layer.bent is not None:
            grams += layer.bent.grams(own)
            remainders += layer.bent.remainders(own)
        behind = before_segment(stage.before, layer.back(own))
        weights = added(weights, behind)
        progress.advance(1)
    if any(isinstance(stage.rule, Opaque) for stage in plan.stages):
        # what has no formula has no quadratic part of its own to set against the others'
        nonlinear = sample_covariance(remainders.double())
    else:
        nonlinear = _positive(nonlinear_covariance(grams.double(), remainders.double()))
    return weights[plan.image], nonlinear.to(chosen.dtype)


def _positive(matrix: Tensor) -> Tensor:
    """The nearest positive semidefinite matrix."""
    values, vectors = torch.linalg.eigh(0.5 * (matrix + matrix.mT))
    return (vectors * values.clamp(min=0)) @ vectors.mT
