"""Moments by propagation through the network's graph: layer by layer, by a sketch, and which of them to take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from netmoments.gaussian import Gaussian
from netmoments.linearize.memory import gigabytes, memory_limit
from netmoments.moments.result import OutputMoments
from netmoments.network.graph import graph_of, recorded_graph
from netmoments.progress import Progress
from netmoments.propagate.budget import Need, layerwise_need
from netmoments.propagate.known_plans import plan_for, recorded_plan
from netmoments.propagate.layerwise import layerwise
from netmoments.propagate.opaque import opaque
from netmoments.propagate.piecewise_linear import PiecewiseLinear
from netmoments.propagate.plan import Plan
from netmoments.propagate.planner import Otherwise
from netmoments.propagate.sketch import Sketched, sketched

MANY_SCORES = 100
"""Beyond this many scores a sketch follows the `LARGEST` only, unless told which."""
LARGEST = 5
TOGETHER = {"cpu": 1, "cuda": 32}
"""Images whose noise goes through a network layer by layer together, at most: more do not pay."""


class Chosen(NamedTuple):
    """What `method="auto"` takes, and why, in words."""

    method: str
    reason: str


def plan_of(network: nn.Module, mean: Tensor, caller: str) -> Plan:
    """The plan of a network with its present weights, for images like those of a flat batch of means."""
    image = mean[:1].detach()
    return plan_for(graph_of(network, image, caller), network, image, caller)


def sketch_plan_of(network: nn.Module, mean: Tensor, caller: str) -> Plan:
    """The same for a sketch, which knows operations without a rule from samples."""
    image = mean[:1].detach()
    return plan_for(graph_of(network, image, caller), network, image, caller, opaque)


def unchecked_plan_of(network: nn.Module, mean: Tensor, caller: str, otherwise: Otherwise | None = None) -> Plan:
    """Either, as it was recorded: for what goes through `rechecked`."""
    image = mean[:1].detach()
    return recorded_plan(recorded_graph(network, image, caller), network, image, caller, otherwise)


def chosen_method(plan: Plan, noise: Gaussian, memory_budget: int | None) -> Chosen:
    """Exact where the network is (Affine, ReLU, Affine), else layer by layer where that fits, else a sketch."""
    need, limit = _need(plan, noise), memory_limit(noise.device, memory_budget)
    fits = need.bytes <= limit
    if not plan.last.sources:
        return Chosen("exact", "the scores do not depend on the input")
    if not plan.stages and fits:
        return Chosen("exact", "the network is affine")
    if len(plan.stages) == 1 and isinstance(plan.stages[0].rule, PiecewiseLinear) and fits:
        return Chosen("exact", f"the only nonlinear layer is {plan.stages[0].name}, which is piecewise linear")
    size = f"{gigabytes(need.bytes)} (at {need.layer}) of the {gigabytes(limit)} there are for it"
    if fits:
        return Chosen("layerwise", f"the joint covariance of all layers takes {size}")
    return Chosen("sketch", f"the joint covariance of all layers would take {size}")


def by_layerwise(plan: Plan, noise: Gaussian, rows: Tensor, memory_budget: int | None, caller: str) -> OutputMoments:
    """The joint Gaussian of all live tensors, with third cumulants, through every layer."""
    require_fitting(plan, noise, memory_budget, caller)
    mean, covariance = expected_layerwise(plan, noise, rows, memory_budget)
    return OutputMoments(mean, _variances(covariance), covariance, method="layerwise", outputs=rows)


def expected_layerwise(plan: Plan, noise: Gaussian, rows: Tensor, memory_budget: int | None) -> tuple[Tensor, Tensor]:
    """Means (N, k) and covariances (N, k, k), as many entries of the noise at a time as fit the memory there is."""
    if not plan.last.sources:
        constant = plan.last.value({})[rows]
        return constant, constant.new_zeros(*rows.shape, rows.shape[1])
    together = max(1, memory_limit(noise.device, memory_budget) // _need(plan, noise).bytes)
    parts = []
    with Progress("images", len(rows)) as progress:
        for span in images_together(len(rows), min(together, TOGETHER[noise.device.type])):
            parts.append(layerwise(plan, noise.mean[span], noise.covariance.entries(span), rows[span]))
            progress.advance(span.stop - span.start)
    means, covariances = zip(*parts, strict=True)
    return torch.cat(means), torch.cat(covariances)


def images_together(count: int, together: int) -> Iterator[slice]:
    """All of them, some at a time."""
    for start in range(0, count, together):
        yield slice(start, min(start + together, count))


def require_fitting(plan: Plan, noise: Gaussian, memory_budget: int | None, caller: str) -> None:
    """An error, before anything is computed, where whole covariances do not fit the memory there is for them."""
    need, limit = _need(plan, noise), memory_limit(noise.device, memory_budget)
    if need.bytes > limit:
        raise ValueError(
            f'{caller}: method="layerwise" needs {gigabytes(need.bytes)} for the covariances at {need.layer}, but '
            f'{gigabytes(limit)} is the limit; raise memory_budget=, or use method="sketch" (any size) or "sampling"'
        )


def by_sketch(
    plan: Plan, noise: Gaussian, rows: Tensor, probes: int, seed: int, memory_budget: int | None
) -> OutputMoments:
    """Real samples for the spread at every layer, formulas for the rest."""
    found = sketches(plan, noise, rows, probes, seed, memory_budget)
    return OutputMoments(found.mean, _variances(found.covariance), found.covariance, method="sketch", outputs=rows)


def sketches(plan: Plan, noise: Gaussian, rows: Tensor, probes: int, seed: int, memory_budget: int | None) -> Sketched:
    """A sketch of all entries of the noise."""
    if plan.last.sources:
        return sketched(plan, noise.mean, noise.covariance, rows, probes=probes, seed=seed, memory_budget=memory_budget)
    constant = plan.last.value({})[rows]
    nothing, flat = constant.new_zeros(*rows.shape, rows.shape[1]), constant.new_zeros(*rows.shape, noise.size)
    return Sketched(constant, torch.zeros_like(constant), nothing, flat)


def _need(plan: Plan, noise: Gaussian) -> Need:
    return layerwise_need(plan, noise.covariance.rank, noise.dtype.itemsize)


def _variances(covariance: Tensor) -> Tensor:
    return covariance.diagonal(dim1=-2, dim2=-1)
