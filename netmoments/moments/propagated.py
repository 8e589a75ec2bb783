"""Moments by propagation through the network's graph: layer by layer, by a sketch, and which of them to take."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from netmoments.gaussian import Gaussian
from netmoments.gaussian.covariance import Covariance
from netmoments.linearize.memory import gigabytes, memory_limit
from netmoments.moments.result import OutputMoments
from netmoments.network.graph import graph_of
from netmoments.progress import Progress
from netmoments.propagate.budget import Need, layerwise_need
from netmoments.propagate.layerwise import layerwise
from netmoments.propagate.opaque import opaque
from netmoments.propagate.piecewise_linear import PiecewiseLinear
from netmoments.propagate.plan import Plan
from netmoments.propagate.planner import planned, planned_with
from netmoments.propagate.sketch import Sketched, sketched

MANY_SCORES = 100
"""Beyond this many scores a sketch follows the `LARGEST` only, unless told which."""
LARGEST = 5


class Chosen(NamedTuple):
    """What `method="auto"` takes, and why, in words."""

    method: str
    reason: str


def plan_of(network: nn.Module, mean: Tensor, caller: str) -> Plan:
    """The plan of a network with its present weights, for images like those of a flat batch of means."""
    image = mean[:1].detach()
    return planned(graph_of(network, image, caller), network, image, caller)


def sketch_plan_of(network: nn.Module, mean: Tensor, caller: str) -> Plan:
    """The same for a sketch, which knows operations without a rule from samples."""
    image = mean[:1].detach()
    return planned_with(graph_of(network, image, caller), network, image, caller, opaque)


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
    mean, covariance = _each(layerwise, plan, noise, rows)
    return OutputMoments(mean, _variances(covariance), covariance, method="layerwise", outputs=rows)


def require_fitting(plan: Plan, noise: Gaussian, memory_budget: int | None, caller: str) -> None:
    """An error, before anything is computed, where whole covariances do not fit the memory there is for them."""
    need, limit = _need(plan, noise), memory_limit(noise.device, memory_budget)
    if need.bytes > limit:
        raise ValueError(
            f'{caller}: method="layerwise" needs {gigabytes(need.bytes)} for the covariances at {need.layer}, but '
            f'{gigabytes(limit)} is the limit; raise memory_budget=, or use method="sketch" (any size) or "sampling"'
        )


def by_sketch(plan: Plan, noise: Gaussian, rows: Tensor, probes: int, seed: int) -> OutputMoments:
    """Real samples for the spread at every layer, formulas for the rest."""
    found = sketches(plan, noise, rows, probes, seed)
    covariance = torch.stack([one.covariance for one in found])
    mean = torch.stack([one.mean for one in found])
    return OutputMoments(mean, _variances(covariance), covariance, method="sketch", outputs=rows)


def sketches(plan: Plan, noise: Gaussian, rows: Tensor, probes: int, seed: int) -> list[Sketched]:
    """A sketch for each entry of the noise."""
    if not plan.last.sources:
        constant = plan.last.value({})
        nothing = constant.new_zeros(rows.shape[1], rows.shape[1])
        flat = constant.new_zeros(rows.shape[1], noise.size)
        return [Sketched(constant[row], torch.zeros_like(constant[row]), nothing, flat) for row in rows]
    with Progress("sketches", len(noise.mean)) as progress:
        result = []
        for place, row in enumerate(rows):
            mean, covariance = _entry(noise, place)
            result.append(sketched(plan, mean, covariance, row, probes=probes, seed=seed + place))
            progress.advance(1)
    return result


Propagation = Callable[[Plan, Tensor, Covariance, Tensor], tuple[Tensor, Tensor]]


def _each(propagation: Propagation, plan: Plan, noise: Gaussian, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Means (N, k) and covariances (N, k, k), entry by entry of the noise."""
    if not plan.last.sources:
        constant = plan.last.value({})[rows]
        return constant, constant.new_zeros(*rows.shape, rows.shape[1])
    means, covariances = [], []
    with Progress("images", len(noise.mean)) as progress:
        for place, row in enumerate(rows):
            mean, covariance = propagation(plan, *_entry(noise, place), row)
            means.append(mean)
            covariances.append(covariance)
            progress.advance(1)
    return torch.stack(means), torch.stack(covariances)


def _entry(noise: Gaussian, place: int) -> tuple[Tensor, Covariance]:
    """The mean (1, ...) and the covariance, without batch, of one entry of a flat batch."""
    return noise.mean[place : place + 1], noise.covariance.entries(place)


def _need(plan: Plan, noise: Gaussian) -> Need:
    return layerwise_need(plan, noise.covariance.rank, noise.dtype.itemsize, noise.device.type)


def _variances(covariance: Tensor) -> Tensor:
    return covariance.diagonal(dim1=-2, dim2=-1)
