"""Sketches: moments of networks of any size, by formulas at every layer that take spreads from a few samples.

Some samples of the noise, the probes, run through the network together with the mean and show how much the inputs of
every nonlinear layer vary. Its rule turns that into expected outputs and gains. A backward pass through the gains then
gives the covariance of the scores; `sketched` has the formulas.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from netmoments.checks import random_seed
from netmoments.covariances import Covariance
from netmoments.memory import elements_together, memory_limit
from netmoments.precision import full_precision
from netmoments.progress import Show, progress_bar
from netmoments.propagate.plan import Plan
from netmoments.propagate.replay import REPLAYED_BYTES, replayed
from netmoments.relu.triton.launch import MOST_IMAGES
from netmoments.rules.base import LEAST_SAMPLES, QuadraticForms, SketchedLayer, paired, remainder_covariance

PROBES = 64
"""Probes of each image, by default."""


class Sketched(NamedTuple):
    """Moments of k scores for N images, and the expected derivatives they come from."""

    mean: Tensor
    """(N, k), from the Gaussian formulas; differentiable in the image, the covariance and the weights."""
    covariance: Tensor
    """(N, k, k), without gradient."""
    slopes: Tensor
    """A, (N, k, n): the network's expected Jacobian, as a product of gains. Without gradient."""


def sketched(
    plan: Plan,
    mean: Tensor,
    covariance: Covariance,
    outputs: Tensor,
    *,
    probes: int = PROBES,
    seed: int = 0,
    memory_budget: int | None = None,
) -> Sketched:
    """Mean and covariance of the scores with indices `outputs` (N, k) of images (N, ...).

    This takes about as long as `probes` runs of the network for each image. The covariance is one for all images, or
    has a batch dimension for them.

    The probes, samples of the noise, estimate S = Cov z of each window z of every nonlinear layer. The mean goes from
    layer to layer by formula, E f(N(m, S)), and each unit is

        y = E f + g·(z − m) + ½ [(z − m)ᵀH(z − m) − tr HS] + rest,   g = E ∇f, H = E ∇²f:

    three parts that are uncorrelated if z is Gaussian. One backward pass through the gains for each score gives its
    weights on all units, so that scores are such sums too, and their covariance is that of the three parts:

        linear      A Σ Aᵀ, with A the product of the gains: exact;
        quadratic   between all pairs of units of all layers, also of different layers: from pairs of probes, which are
                    many more than probes (`quadratic_covariance`);
        rest        the sample covariance over the probes: small, and so is its error √(2/probes). What all layers leave
                    after their linear parts is what the sampled scores leave after A.

    No variance is below its linear part. With fewer than 4 probes the quadratic part stays in the rest. What remains is
    the error of the gains, S being from few probes (√(2/probes) of each window's own, averaged over all windows) and
    deep z not quite Gaussian.

    The probes of an image depend on `seed` and on its place in the batch, whatever the other images are. Their seed is
    none that a user would choose: weights drawn with that would be the probes. As many images go together as a
    CPU's cache likes, or the memory of a GPU allows.
    """
    if not plan.last.sources:
        constant = plan.last.value({})[outputs]
        nothing = constant.new_zeros(*outputs.shape, outputs.shape[1])
        return Sketched(constant, nothing, constant.new_zeros(*outputs.shape, mean[0].numel()))
    seeds = [random_seed(seed, "probes", place) for place in range(len(mean))]
    together = images_together(plan, mean, probes, outputs.shape[1], memory_budget)
    if together >= len(mean):
        return _sketched(plan, mean, covariance, outputs, probes, seeds)
    parts = []
    with progress_bar("sketches", len(mean)) as show:
        for start in range(0, len(mean), together):
            show(start)
            images = slice(start, start + together)
            entries = covariance.entries(images)
            parts.append(_sketched(plan, mean[images], entries, outputs[images], probes, seeds[images]))
    return Sketched(*map(torch.cat, zip(*parts, strict=True)))


def images_together(plan: Plan, mean: Tensor, probes: int, scores: int, memory_budget: int | None) -> int:
    """How many images go at a time: on a CPU as many as its caches like, on a GPU as the memory allows; at least 1."""
    of_one = bytes_each(plan, probes, scores, mean.element_size())
    fitting = min(MOST_IMAGES, memory_limit(mean.device, memory_budget) // of_one)
    return max(1, min(fitting, elements_together("cache", mean, probes * plan.layer_sizes.largest)))


def bytes_each(plan: Plan, probes: int, scores: int, itemsize: int) -> int:
    """The memory that one image takes.

    It has its probes at the input of every nonlinear layer, a few copies of the largest of these, and its paired probes
    at all places of windows.
    """
    inputs, outputs, windows, largest = plan.layer_sizes
    sampled = probes * (inputs + outputs + 4 * largest) + paired(probes) * windows
    return itemsize * (sampled + 4 * scores * largest)


def _sketched(
    plan: Plan, mean: Tensor, covariance: Covariance, outputs: Tensor, probes: int, seeds: list[int]
) -> Sketched:
    """`sketched` for images that all go together, with a seed for each."""
    deviations = _probe_deviations(covariance, probes, seeds, mean)
    if mean.is_cuda and _can_be_replayed(plan, mean, deviations, outputs.shape[1]):
        work = partial(_forward_and_back, plan)
        scores, nonlinear, slopes = replayed(plan.recordings, work, mean, deviations, outputs)
    else:
        scores, nonlinear, slopes = _forward_and_back(plan, mean, deviations, outputs)
    with torch.no_grad():
        total = covariance.push(slopes) + nonlinear
        return Sketched(scores, (total + total.mT) / 2, slopes)


def _probe_deviations(covariance: Covariance, probes: int, seeds: list[int], like: Tensor) -> Tensor:
    """The probes of every image less its mean, (N, K, n), drawn with the image's seed."""
    white = like.new_empty(len(seeds), probes, covariance.normals)
    generator = torch.Generator(like.device)
    for of_image, seed in zip(white, seeds, strict=True):
        torch.randn(of_image.shape, generator=generator.manual_seed(seed), out=of_image)
    return covariance.coloured(white.transpose(0, 1)).transpose(0, 1)


def _can_be_replayed(plan: Plan, mean: Tensor, deviations: Tensor, scores: int) -> bool:
    """Whether all layers have kernels that never make the host wait, and a recording would not take much memory."""
    if torch.is_grad_enabled() or not all(stage.rule.has_kernels(mean, deviations) for stage in plan.stages):
        return False
    most = min(REPLAYED_BYTES, torch.cuda.get_device_properties(mean.device).total_memory // 8)
    return len(mean) * bytes_each(plan, deviations.shape[1], scores, mean.element_size()) <= most


def _forward_and_back(plan: Plan, mean: Tensor, deviations: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Take mean and probes through the network: the scores' mean, nonlinear covariance, and slopes."""
    probes = deviations.shape[1]
    means = {plan.image: mean.flatten(1)}
    samples = {plan.image: means[plan.image].unsqueeze(1) + deviations}
    layers = []
    with full_precision(), progress_bar("sketch", 2 * len(plan.stages)) as show:
        for place, stage in enumerate(plan.stages):
            show(place)
            layer = stage.rule.in_sketch(stage.before.values(means), stage.before.values(samples))
            means[stage.output], samples[stage.output] = layer.mean, layer.values
            layers.append(layer)
            for node in set(means) - set(plan.needed[place + 1]):
                del means[node], samples[node]
        scores = plan.last.values(means).gather(1, outputs)
        with torch.no_grad():
            sampled = plan.last.values(samples).mT.gather(1, outputs.unsqueeze(-1).expand(-1, -1, probes))
            slopes, forms = _backward(plan, layers, outputs, mean, probes, show)
            deviations = deviations.detach()
            centre = deviations.mean(1, keepdim=True)
            remainders = sampled - sampled.mean(-1, keepdim=True) - slopes @ (deviations - centre).mT
            nonlinear = remainder_covariance(remainders.double(), forms).to(mean.dtype)
    return scores, nonlinear, slopes


def _backward(
    plan: Plan, layers: list[SketchedLayer], outputs: Tensor, like: Tensor, probes: int, show: Show
) -> tuple[Tensor, QuadraticForms | None]:
    """The expected Jacobian (N, k, n) of scores with indices (N, k), and their quadratic forms over all layers."""
    # what has no formula has no quadratic part of its own to set against the others'
    with_forms = probes >= LEAST_SAMPLES and plan.has_formulas
    total = None
    weights = plan.score_weights(outputs, like)
    for place in reversed(range(len(layers))):
        show(2 * len(layers) - 1 - place)
        stage, layer = plan.stages[place], layers[place]
        on_units = weights.pop(stage.output)
        if with_forms and layer.quadratics is not None:
            forms = layer.quadratics(on_units)
            total = forms if total is None else QuadraticForms(*map(torch.add, total, forms))
        weights = stage.before.pull_back(layer.pull_back(on_units), weights)
    return weights[plan.image], total
