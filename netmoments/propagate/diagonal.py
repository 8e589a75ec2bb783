"""Assumed density filtering: means and variances of every number, correlations dropped. A baseline, not for use.

Neighbouring units of a network share their inputs, so what is dropped is most of the variance of its scores: on the
paper's LeNet it comes out a thousand times too small. It is here because it is what others do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from netmoments.gaussian.covariance import Covariance
from netmoments.network.graph import Node, shape_of
from netmoments.precision import full_precision
from netmoments.propagate.plan import Plan, Segment
from netmoments.propagate.squared import variance_step


def diagonal(plan: Plan, mean: Tensor, covariance: Covariance, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Means (k,) and variances (k,) of the chosen scores for one image, mean (1, ...), every tensor independent.

    Affine operations: v → Σⱼ Lᵢⱼ² vⱼ, one at a time. Nonlinear layers: their own mean and variance, of inputs that are
    Gaussian and independent. Exact if no two paths ever meet.
    """
    means: dict[Node, Tensor] = {plan.image: mean}
    variances: dict[Node, Tensor] = {plan.image: covariance.variances().reshape(mean.shape)}
    with full_precision():
        for stage in plan.stages:
            rule = stage.rule
            z, spread = stage.before.value(means), _variances(stage.before, variances)
            local = rule.local(rule.gathered(z), torch.diag_embed(rule.gathered(spread)))
            means[stage.output] = local.mean.reshape(shape_of(stage.output))
            variances[stage.output] = local.variance.reshape(shape_of(stage.output))
        return plan.last.value(means)[rows], _variances(plan.last, variances)[rows]


def _variances(segment: Segment, sources: dict[Node, Tensor]) -> Tensor:
    """Of the results of an affine part, (p,), flattened and put end to end."""
    values: dict[Node, Any] = {node: sources[node] for node in segment.sources}
    for step in segment.steps:
        values[step.node] = variance_step(step, values)
    return torch.cat([values[node].reshape(-1) for node in segment.results])
