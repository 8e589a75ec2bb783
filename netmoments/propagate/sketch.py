"""Moments of a network of any size: formulas at every nonlinear layer, how much it spreads from a few real samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from netmoments.gaussian.covariance import Covariance
from netmoments.linearize.memory import memory_limit
from netmoments.network.graph import Node, shape_of
from netmoments.precision import full_precision, matmul, matvec
from netmoments.progress import Progress
from netmoments.propagate import fused_sketch
from netmoments.propagate.bent import LEAST_SAMPLES, BentUnits, Quadratics, bent_units, nonlinear_covariance, paired
from netmoments.propagate.fused_sketch import FusedBent
from netmoments.propagate.largest import Largest
from netmoments.propagate.opaque import Opaque
from netmoments.propagate.plan import Plan, Segment, Stage
from netmoments.propagate.replayed import replayed
from netmoments.propagate.sampled_windows import centred
from netmoments.propagate.sketched_units import moments_of_units, seen
from netmoments.propagate.transposed import added, before_gains, before_segment
from netmoments.relu.fused import MOST_IMAGES

PROBES = 64
PROBE_ELEMENTS = {"cpu": 2**22, "cuda": 2**28}
"""Numbers in one layer's probes that go through an affine part together."""
IMAGE_ELEMENTS = {"cpu": 2**21, "cuda": 2**29}
"""Numbers in the largest layer's probes of all images that go together: on a CPU more than one image is not faster."""
REPLAYED_BYTES = 4 * 2**30
"""A recording keeps its memory: work that takes more (or an eighth of the device's) is not recorded, and is not a
matter of launches either."""


@dataclass(frozen=True, eq=False)
class Sketched:
    """Moments of k scores for N images, and the expected derivatives they come from."""

    mean: Tensor
    """(N, k), from the Gaussian formulas; differentiable in the image, the covariance and the weights."""
    correction: Tensor
    """(N, k), what to add for a mean without their bias: the probes' mean, less its linear part, says so. Noisier by a
    little: √(rest/probes). Without gradient."""
    covariance: Tensor
    """(N, k, k), without gradient."""
    slopes: Tensor
    """A, (N, k, n): the network's expected Jacobian, as a product of expected gains. Without gradient."""


def sketched(
    plan: Plan,
    mean: Tensor,
    covariance: Covariance,
    rows: Tensor,
    *,
    probes: int = PROBES,
    seed: int = 0,
    memory_budget: int | None = None,
) -> Sketched:
    """Mean and covariance of the chosen scores (N, k) of images (N, ...), at the price of about `probes` runs of each.

    The covariance is one for all images or has a batch dimension for them. Real samples of the noise, the probes, run
    along and say how much the inputs z of every nonlinear layer spread: S = Cov z of each window. The mean then goes
    from layer to layer by formula, E f(N(m, S)), and each unit is

        y = E f + g·(z − m) + ½ [(z − m)ᵀH(z − m) − tr HS] + rest,   g = E ∇f, H = E ∇²f:

    three uncorrelated parts if z is Gaussian. One backward pass through the gains a score gives its weights on all
    units, so that scores are such sums too, and their covariance is that of the three parts:

        linear      A Σ Aᵀ, with A the product of the gains: exact;
        quadratic   between all pairs of units of all layers, also of different layers: from pairs of probes, see
                    `quadratic_covariance`, which are many more than probes;
        rest        the sample covariance over the probes: small, and so is its error √(2/probes). What all layers leave
                    after their linear parts is what the sampled scores leave after A.

    No variance is below its linear part. With fewer than 4 probes the quadratic part stays in the rest. What remains is
    the error of the gains, S being from few probes (√(2/probes) of each window's own, averaged over all windows) and
    deep z not quite Gaussian.

    Image number i has the probes of seed + i, whatever the others are; images go together as the memory allows.
    """
    if isinstance(probes, bool) or not isinstance(probes, int) or probes < 2:
        raise ValueError(f"sketch: probes must be an integer of at least 2, as a spread needs two, got {probes!r}")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"sketch: seed must be an integer of at least 0, got {seed!r}")
    together = images_together(plan, mean, probes, rows.shape[1], memory_budget)
    parts = []
    with full_precision(), Progress("sketches", len(mean)) as progress:
        for start in range(0, len(mean), together):
            some = slice(start, start + together)
            parts.append(_sketched(plan, mean[some], covariance.entries(some), rows[some], probes, seed + start))
            progress.advance(len(mean[some]))
    fields = ("mean", "correction", "covariance", "slopes")
    every = {name: [getattr(part, name) for part in parts] for name in fields}
    return Sketched(**{name: found[0] if len(found) == 1 else torch.cat(found) for name, found in every.items()})


def images_together(plan: Plan, mean: Tensor, probes: int, scores: int, memory_budget: int | None) -> int:
    """How many images go at a time: on a CPU as many as its caches like, on a GPU as the memory allows; at least 1."""
    inputs, outputs = _layer_sizes(plan)
    fitting = min(MOST_IMAGES, memory_limit(mean.device, memory_budget) // _bytes_each(plan, mean, probes, scores))
    wanted = IMAGE_ELEMENTS.get(mean.device.type, IMAGE_ELEMENTS["cpu"])
    return max(1, min(fitting, wanted // (probes * max(*inputs, *outputs, mean[0].numel()))))


def _layer_sizes(plan: Plan) -> tuple[list[int], list[int]]:
    """Numbers that go in and come out of each nonlinear layer."""
    inputs = [sum(shape_of(node).numel() for node in stage.before.results) for stage in plan.stages] or [0]
    return inputs, [shape_of(stage.output).numel() for stage in plan.stages] or [0]


def _bytes_each(plan: Plan, mean: Tensor, probes: int, scores: int) -> int:
    """Memory for an image: its probes at the input of every nonlinear layer, and a few copies of the largest.

    And those of its windows that are paired, where there are windows.
    """
    inputs, outputs = _layer_sizes(plan)
    largest = max(*inputs, *outputs, mean[0].numel())
    windows = max((stage.rule.windows.numel() for stage in plan.stages if isinstance(stage.rule, Largest)), default=0)
    sampled = probes * (sum(inputs) + max(outputs) + 4 * largest) + paired(probes) * windows
    return mean.dtype.itemsize * (sampled + 4 * scores * largest)


def _sketched(plan: Plan, mean: Tensor, covariance: Covariance, rows: Tensor, probes: int, seed: int) -> Sketched:
    """The same for images that go together."""
    deviations = _drawn(covariance, len(mean), probes, seed, mean)
    if _can_be_replayed(plan, mean, deviations, rows.shape[1]):
        found = replayed(plan, partial(_followed, plan), mean, deviations, rows)
    else:
        found = _followed(plan, mean, deviations, rows)
    scores, correction, nonlinear, slopes = found
    with torch.no_grad():
        return Sketched(scores, correction, covariance.push(slopes) + nonlinear, slopes)


def _can_be_replayed(plan: Plan, mean: Tensor, deviations: Tensor, scores: int) -> bool:
    """Whether all layers go by kernels that ask nothing of the host, and a recording would not take much memory."""
    if not mean.is_cuda or torch.is_grad_enabled():
        return False
    if not all(fused_sketch.available(stage.rule, mean, deviations) for stage in plan.stages):
        return False
    most = min(REPLAYED_BYTES, torch.cuda.get_device_properties(mean.device).total_memory // 8)
    return len(mean) * _bytes_each(plan, mean, deviations.shape[1], scores) <= most


def _followed(plan: Plan, mean: Tensor, deviations: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores' means, their correction, the nonlinear part of their covariance, and slopes, from the probes."""
    probes = deviations.shape[1]
    means = {plan.image: mean.flatten(1)}
    samples = {plan.image: means[plan.image].unsqueeze(1) + deviations}
    layers = []
    with Progress("sketch", 2 * len(plan.stages)) as progress:
        for place, stage in enumerate(plan.stages):
            layers.append(_through(stage, means, samples))
            for node in set(means) - set(plan.needed_after(place)):
                del means[node], samples[node]
            progress.advance(1)
        scores = _at(plan.last, means).gather(1, rows)
        with torch.no_grad():
            sampled = _at(plan.last, samples).mT.gather(1, rows.unsqueeze(-1).expand(-1, -1, probes))
            chosen = mean.new_zeros(*rows.shape, shape_of(plan.last.results[0]).numel())
            chosen.scatter_(-1, rows.unsqueeze(-1), 1.0)
            slopes, quadratics = _backward(plan, layers, chosen, probes, progress)
            deviations = deviations.detach()
            remainders = centred(sampled, -1) - matmul(slopes, centred(deviations, 1).mT)
            nonlinear = nonlinear_covariance(remainders.double(), quadratics).to(mean.dtype)
            correction = sampled.mean(-1) - matvec(slopes, deviations.mean(1)) - scores.detach()
    return scores, correction, nonlinear, slopes


def _drawn(covariance: Covariance, images: int, probes: int, seed: int, like: Tensor) -> Tensor:
    """Deviations (N, K, n) of the probes of every image, whose numbers have its own seed."""
    white = like.new_empty(images, probes, covariance.normals)
    generator = torch.Generator(like.device)
    for place, own in enumerate(white):
        torch.randn(own.shape, generator=generator.manual_seed(seed + place), out=own)
    return covariance.coloured(white.transpose(0, 1)).transpose(0, 1)


@dataclass(frozen=True, eq=False)
class _Layer:
    """What is kept of a nonlinear layer."""

    back: Callable[[Tensor], Tensor]
    """Weights (N, k, n) on its output as weights (N, k, p) on its input, by the expected slopes."""
    bent: BentUnits | FusedBent | None


def _through(stage: Stage, means: dict[Node, Tensor], samples: dict[Node, Tensor]) -> _Layer:
    """One affine part and nonlinear layer: its output is added to the means, (N, n), and to the samples, (N, K, n)."""
    rule = stage.rule
    mean, z = _at(stage.before, means), _at(stage.before, samples)
    if isinstance(rule, Opaque):
        return _through_opaque(stage, rule, mean, z, means, samples)
    bent: BentUnits | FusedBent | None
    if fused_sketch.available(rule, mean, z):
        values, units, bent = fused_sketch.layer(rule, mean, z)
    else:
        found = seen(rule, z)
        values, units = found.values, moments_of_units(rule, mean, found.covariance, z.shape[1])
        bent = bent_units(rule, units.curvature, found.covariance.detach(), found.samples.detach())
    means[stage.output], samples[stage.output] = units.mean, values
    return _Layer(partial(before_gains, rule, units.gain, inputs=z.shape[-1]), bent)


def _through_opaque(
    stage: Stage,
    rule: Opaque,
    mean: Tensor,
    z: Tensor,
    means: dict[Node, Tensor],
    samples: dict[Node, Tensor],
) -> _Layer:
    """An operation without a formula: its mean and expected slopes are averages over the probes, moved to the mean."""
    moved = mean.unsqueeze(1) + centred(z, 1).detach()
    together = _together(z, max(z.shape[-1], rule.units))
    values = rule.at(z.flatten(0, 1), together).unflatten(0, z.shape[:2])
    means[stage.output] = rule.at(moved.flatten(0, 1), together).unflatten(0, z.shape[:2]).mean(1)
    samples[stage.output] = values
    varies = values.detach().std(1).any(-1)
    moved = moved.detach()

    def back(weights: Tensor) -> Tensor:
        pulled = [rule.expected_pull(at, own, together) for at, own in zip(moved, weights, strict=True)]
        lost = varies & weights.flatten(1).any(-1) & ~torch.stack(pulled).flatten(1).any(-1)
        if bool(lost.any()):
            raise ValueError(
                f"sketch: {rule.name} changes with its input, but its derivative is zero (rounding?), so that nothing "
                f'can be said from it; use method="sampling"'
            )
        return torch.stack(pulled)

    return _Layer(back, None)


def _at(segment: Segment, sources: dict[Node, Tensor]) -> Tensor:
    """The output of an affine part at means (N, n) or samples (N, K, n) of its sources: (N, p) or (N, K, p)."""
    given = {node: sources[node].flatten(0, -2) for node in segment.sources}
    like = sources[segment.sources[0]]
    largest = max(shape_of(node).numel() for node in (*segment.sources, *segment.results))
    return segment.batched("value", given, _together(like, largest)).unflatten(0, like.shape[:-1])


def _together(like: Tensor, each: int) -> int:
    return max(1, PROBE_ELEMENTS.get(like.device.type, PROBE_ELEMENTS["cpu"]) // each)


def _backward(
    plan: Plan, layers: list[_Layer], chosen: Tensor, probes: int, progress: Progress
) -> tuple[Tensor, Quadratics | None]:
    """The expected Jacobian (N, k, n) of scores (N, k, all), and their quadratic forms over all layers."""
    # what has no formula has no quadratic part of its own to set against the others'
    formulas = probes >= LEAST_SAMPLES and not any(isinstance(stage.rule, Opaque) for stage in plan.stages)
    quadratics = None
    weights = before_segment(plan.last, chosen)
    for stage, layer in zip(reversed(plan.stages), reversed(layers), strict=True):
        own = weights.pop(stage.output)
        if formulas and layer.bent is not None:
            found = layer.bent.quadratics(own)
            quadratics = found if quadratics is None else Quadratics(*map(torch.add, quadratics, found))
        weights = added(weights, before_segment(stage.before, layer.back(own)))
        progress.advance(1)
    return weights[plan.image], quadratics
