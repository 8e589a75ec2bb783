"""What a caller of the front door wants to know, and the method that answers it."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from netmoments.gaussian import Gaussian
from netmoments.moments.methods import (
    by_controlled_sampling,
    by_linear,
    by_sampling,
    by_two_stage,
    linear_surrogate,
    two_stage_surrogate,
)
from netmoments.moments.propagated import by_layerwise, by_sketch, sketch_plan_of, sketches
from netmoments.moments.result import OutputMoments
from netmoments.network.cut import find_relu
from netmoments.network.tracing import Relu, Trace
from netmoments.propagate.plan import Plan
from netmoments.sampling import LinearSurrogate, Surrogate
from netmoments.sweep import random_seed

CALLER = "output_moments"


@dataclass(frozen=True, eq=False)
class Asked:
    """What the caller wants to know, of a network that was looked at."""

    network: nn.Module
    noise: Gaussian
    flat: Gaussian
    found: Trace
    layer: int | str | None
    probes: int
    samples: int
    control: str | None
    seed: int
    memory_budget: int | None

    def propagated(self, plan: Plan, method: str, rows: Tensor) -> OutputMoments:
        if method == "sketch":
            return by_sketch(plan, self.flat, rows, self.probes, self.seed, self.memory_budget)
        result = by_layerwise(plan, self.flat, rows, self.memory_budget, CALLER)
        return dataclasses.replace(result, method=method)

    def linearized(self, method: str, rows: Tensor) -> OutputMoments:
        relu = None if method == "linear" else self._relu()
        if relu is None:
            return by_linear(self.network, self.flat, rows, self.found, self.memory_budget)
        return by_two_stage(self.network, self.flat, _origin(self.noise, rows), rows, relu, self.memory_budget)

    def sampled(self, rows: Tensor) -> OutputMoments:
        if self.control is None:
            return by_sampling(self.network, self.flat, rows, self.samples, self.seed)
        surrogate = self._surrogate(rows)
        return by_controlled_sampling(self.network, self.flat, rows, surrogate, self.samples, self.seed)

    def _surrogate(self, rows: Tensor) -> Surrogate:
        if self.control == "sketch":
            plan = sketch_plan_of(self.network, self.flat.mean, CALLER)
            apart = random_seed(self.seed, "sketch", 0)  # probes must not be among the samples
            with torch.no_grad():
                found = sketches(plan, self.flat, rows, self.probes, apart, self.memory_budget)
            return LinearSurrogate(found.slopes, self.flat)
        if self.control == "linear":
            return linear_surrogate(self.network, self.flat, rows, self.found, self.memory_budget)
        return two_stage_surrogate(self.network, self.flat, rows, self._relu(), self.memory_budget)

    def _relu(self) -> Relu:
        return find_relu(self.found.relus, -1 if self.layer is None else self.layer)


def _origin(noise: Gaussian, rows: Tensor) -> Tensor:
    """For every entry of the flattened noise a number, 0, 1, …: one for those of an expanded mean and equal scores."""
    mean = noise.mean
    batch = range(mean.dim() - noise.event_ndim)
    own = [1 if mean.stride(dim) == 0 else mean.shape[dim] for dim in batch]
    numbers = torch.arange(math.prod(own), device=noise.device).reshape(own)
    each = numbers.expand(noise.batch_shape).reshape(-1, 1)
    return torch.cat([each, rows], 1).unique(dim=0, return_inverse=True)[1]
