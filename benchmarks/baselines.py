"""Methods from the literature, for comparison: each is a row of `netmoments.tightness(..., methods=BASELINES)`.

Each takes a network in eval mode, a flat batch of noise about N images and the indices (N, k) of the wanted scores, and
returns the means and the variances (N, k) of these scores.

| name               | what it does                                                                                    |
|--------------------|-------------------------------------------------------------------------------------------------|
| `adf`              | assumed density filtering: the mean and variance of every number, without correlations          |
| `unscented`        | the unscented transform: the network at 2r points, r the rank of the noise                      |
| `four_term_series` | layer by layer as Gaussians, covariances of piecewise linear units by four terms of a series    |
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from netmoments.covariances import Covariance
from netmoments.gaussian import Gaussian
from netmoments.memory import elements_together, gigabytes, memory_limit
from netmoments.moments.tightness import Rival
from netmoments.network.graph import Node, family, shape_of
from netmoments.network.model import NetworkModel
from netmoments.normal import density, standard_deviation, standardize
from netmoments.precision import full_precision
from netmoments.propagate.operators import OPERATORS, linear_arguments
from netmoments.propagate.plan import Plan, plan_of
from netmoments.propagate.rows import carried, need_of
from netmoments.propagate.segments import AffineStep, Segment
from netmoments.rules.one_number import PiecewiseLinear
from netmoments.rules.registry import operator_name

MOST_POINTS = 100_000
"""The unscented transform is refused if it would need more points."""


@torch.no_grad()
def adf(network: nn.Module, noise: Gaussian, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Assumed density filtering (Gast, Roth, CVPR 2018): every number has a mean and a variance, without correlations.

    Affine operations z = L x + c, one at a time: v → Σⱼ Lᵢⱼ² vⱼ. Nonlinear layers: the mean and variance of each unit,
    for independent Gaussian inputs. Exact for uncorrelated noise where no two paths through the network ever meet.
    Neighbouring units share their inputs, so most of the variance of the scores is dropped.

    Raises:
        ValueError: the network has an operation without a rule for variances alone.
    """
    plan = plan_of(NetworkModel.of(network, noise.mean, "adf"))
    return _image_by_image(
        noise, indices, lambda mean, covariance, wanted: _without_correlations(plan, mean, covariance, wanted)
    )


@torch.no_grad()
def unscented(network: nn.Module, noise: Gaussian, indices: Tensor) -> tuple[Tensor, Tensor]:
    """The unscented transform with κ = 0 (Julier, Uhlmann 1997), the third-degree cubature rule.

    The network at the 2r points x ± √r Rᵢ, each of weight 1/(2r), where Σ = RRᵀ and R has r columns. Means of cubic
    polynomials and variances of linear functions are exact.

    Raises:
        ValueError: it would take more than 100,000 points.
    """
    points = 2 * noise.covariance.rank
    if points > MOST_POINTS:
        raise ValueError(f"unscented: {points:,} points; at most {MOST_POINTS:,} are tried, use sampling")
    return _image_by_image(
        noise, indices, lambda mean, covariance, wanted: _at_points(network, mean, covariance, wanted)
    )


@torch.no_grad()
def four_term_series(
    network: nn.Module, noise: Gaussian, indices: Tensor, memory_budget: int | None = None
) -> tuple[Tensor, Tensor]:
    """Layer by layer with Gaussian tensors; covariances of piecewise linear units by four terms in their correlation.

    Cov(f(z), f(z')) = Σₙ aₙ aₙ' ρⁿ/n! over n ≥ 1 (Mehler; Wright and others 2024), truncated after n = 4. The rest
    is of order ρ⁵ between units; a unit's own variance is exact. Layers of more than 2048 units,
    and units of another kind, are as in `netmoments.Layerwise`.

    Raises:
        ValueError: the network has an operation without a rule, or what is carried does not fit into memory.
    """
    plan = plan_of(NetworkModel.of(network, noise.mean, "four_term_series"))
    need = need_of(plan, noise.covariance.rank, noise.mean.element_size(), plan.last.size)
    limit = memory_limit(noise.mean.device, memory_budget)
    if need.bytes > limit:
        raise ValueError(
            f"four_term_series: it needs {gigabytes(need.bytes)} for the covariances at {need.layer}, but "
            f"{gigabytes(limit)} is the limit; raise memory_budget="
        )
    cut = replace(plan, stages=tuple(replace(stage, rule=_cut_short(stage.rule)) for stage in plan.stages))

    def one(mean: Tensor, covariance: Covariance, wanted: Tensor) -> tuple[Tensor, Tensor]:
        means, covariances = carried(cut, mean, covariance, wanted.unsqueeze(0), skewed=False)
        return means[0], covariances[0].diagonal()

    return _image_by_image(noise, indices, one)


BASELINES: dict[str, Rival] = {
    "ADF (diagonal)": adf,
    "unscented": unscented,
    "series, 4 terms": four_term_series,
}
"""The methods by the name of their row."""

OneImage = Callable[[Tensor, Covariance, Tensor], tuple[Tensor, Tensor]]
"""A function from a mean (1, ...), its covariance and the wanted scores (k,) to their means and variances (k,)."""


def _image_by_image(noise: Gaussian, indices: Tensor, one: OneImage) -> tuple[Tensor, Tensor]:
    each = [
        one(noise.mean[place : place + 1], noise.covariance.entries(place), wanted)
        for place, wanted in enumerate(indices)
    ]
    means, variances = (torch.stack(part) for part in zip(*each, strict=True))
    return means, variances


def _at_points(network: nn.Module, mean: Tensor, covariance: Covariance, wanted: Tensor) -> tuple[Tensor, Tensor]:
    root = covariance.root()
    offsets = root.mT * root.shape[-1] ** 0.5
    with full_precision():
        values = torch.cat(
            [
                network(mean + some.reshape(-1, *mean.shape[1:]))[:, wanted].double()
                for some in torch.cat([offsets, -offsets]).split(elements_together("inputs", mean, mean.numel()))
            ]
        )
    return values.mean(0).to(mean.dtype), values.var(0, correction=0).to(mean.dtype)


def _cut_short(rule: Any) -> Any:
    """A piecewise linear rule with its covariances by the series; any other rule unchanged."""
    if not isinstance(rule, PiecewiseLinear):
        return rule
    return FourTerms(rule.offset, rule.slope, rule.bends, rule.kinks)


@dataclass(frozen=True, eq=False)
class FourTerms(PiecewiseLinear):
    """Piecewise linear units whose covariances use four terms of the series in their correlation ρ."""

    def pairs(self, mean: Tensor, covariance: Tensor) -> Tensor:
        """Σₙ₌₂⁴ aₙ aₙ' ρⁿ/n!, with aₙ = s Σ bend Heₙ₋₂(h)φ(h) up to sign; the first term is the linear part."""
        s = standard_deviation(covariance.diagonal(dim1=-2, dim2=-1))
        h = standardize(mean - self._by_kink(self.kinks, mean), s)
        bell = self._by_kink(self.bends, mean) * density(h)
        safe = torch.where(s > 0, s, 1.0)
        rho = (covariance / safe.unsqueeze(-1) / safe.unsqueeze(-2)).clamp(-1, 1)
        second, third, fourth = (s * (bell * factor).sum(0) for factor in (1.0, h, h * h - 1))

        def term(coefficient: Tensor, power: int, factorial: float) -> Tensor:
            return coefficient.unsqueeze(-1) * coefficient.unsqueeze(-2) * rho**power / factorial

        return term(second, 2, 2.0) + term(third, 3, 6.0) + term(fourth, 4, 24.0)


def _without_correlations(plan: Plan, mean: Tensor, covariance: Covariance, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Means (k,) and variances (k,) of the wanted scores of one image, mean (1, ...), as if all numbers were
    independent.
    """
    means: dict[Node, Tensor] = {plan.image: mean}
    variances: dict[Node, Tensor] = {plan.image: covariance.variances().reshape(mean.shape)}
    with full_precision():
        for stage in plan.stages:
            rule = stage.rule
            z, own = stage.before.value(means), _segment_variances(stage.before, variances)
            local = rule.local(rule.gathered(z), torch.diag_embed(rule.gathered(own)))
            means[stage.output] = local.mean.reshape(shape_of(stage.output))
            variances[stage.output] = local.variance.reshape(shape_of(stage.output))
        return plan.last.value(means)[wanted], _segment_variances(plan.last, variances)[wanted]


Values = Mapping[Node, Any]


def _segment_variances(segment: Segment, sources: dict[Node, Tensor]) -> Tensor:
    """The variances of the results of an affine part, (p,), flattened and concatenated."""
    values: dict[Node, Any] = {node: sources[node] for node in segment.sources}
    for step in segment.steps:
        values[step.node] = _step_variances(step, values)
    return torch.cat([values[node].reshape(-1) for node in segment.results])


def _step_variances(step: AffineStep, variances: Values) -> Any:
    """The variances after one affine operation z = L x + c, if its inputs are independent."""
    kind = family(step.node.target)
    if step.constants is None or kind not in SQUARED:
        raise ValueError(
            f"adf: no rule for the variances of {operator_name(step.node)} with correlations dropped; there are rules "
            f"for {', '.join(sorted({str(known.__name__).strip('_') for known in SQUARED}))}"
        )
    return SQUARED[kind](step, variances)


def _selected(step: AffineStep, variances: Values) -> Any:
    """For an L with entries 0 and 1, whose squares are L itself."""
    return step.linear(variances)


def _scaled(step: AffineStep, variances: Values) -> Any:
    """For an operation that scales each number by its own factor: Lᵢᵢ² vᵢ."""
    (source,) = step.inputs
    factor = step.linear({source: torch.ones_like(variances[source])})
    if isinstance(factor, tuple | list):  # normalised values, then the statistics
        return (factor[0].square() * variances[source],)
    return factor.square() * variances[source]


def _multiplied(step: AffineStep, variances: Values) -> Any:
    """For products with constants: the same operation with their squares."""
    node, constants, noisy = step.node, step.constants or {}, frozenset(step.inputs)
    scales = {name: value for name, value in node.kwargs.items() if name in ("alpha", "beta") and value != 1}
    if scales:
        raise ValueError(f"adf: {operator_name(node)} is known for factors of 1, got {scales}")

    def squared(argument: Node) -> Any:
        value = variances[argument] if argument in noisy else constants[argument]
        return value if argument in noisy or not isinstance(value, Tensor) else value.square()

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), squared)
    target: Any = node.target
    return target(*linear_arguments(node, OPERATORS[family(target)], args, noisy), **kwargs)


def _summed(step: AffineStep, variances: Values) -> Tensor:
    """For x ± alpha·y, in any order: vₓ + alpha² v_y, as if x and y were independent."""
    (first, second, *rest), named = step.node.args, step.node.kwargs
    alpha = float(rest[0] if rest else named.get("alpha", 1))  # type: ignore[arg-type]
    factors = (alpha, 1.0) if family(step.node.target) is aten.rsub else (1.0, alpha)
    total = torch.zeros(shape_of(step.node)).to(variances[step.inputs[0]])
    for node, factor in zip((first, second), factors, strict=True):
        if node in step.inputs:
            total = total + factor**2 * variances[node]  # type: ignore[index]
    return total


def _averaged(count: Callable[[AffineStep], Any]) -> Callable[[AffineStep, Values], Tensor]:
    """For means of `count` numbers each: the mean of their variances, divided by `count` once more."""

    def rule(step: AffineStep, variances: Values) -> Tensor:
        average: Tensor = step.linear(variances)
        counts = count(step)
        return average / (counts.to(average) if isinstance(counts, Tensor) else counts)

    return rule


def _reduced_count(step: AffineStep) -> float:
    return shape_of(step.inputs[0]).numel() / shape_of(step.node).numel()


def _pooled_count(step: AffineStep) -> int:
    """The size of the kernel, with padding counted as zeros, or the divisor that overrides it."""
    given: tuple[Any, ...] = step.node.args
    kernel, _, padding, ceil_mode, with_padding, divisor = (*given[1:], *_POOL_DEFAULTS[len(given) :])
    if divisor is not None:
        return int(divisor)
    if ceil_mode or (any(padding) and not with_padding):
        raise ValueError("adf: average pooling is known only if all its windows have the same divisor")
    return math.prod(kernel if len(kernel) > 1 else kernel * _POOLED[family(step.node.target)])


def _adaptive_count(step: AffineStep) -> Tensor:
    """The count of numbers in each window of adaptive pooling: ⌈(i+1)·in/out⌉ − ⌊i·in/out⌋ along each axis."""
    (source,), total = step.inputs, torch.ones(())
    many = len(step.node.args[1]) if isinstance(step.node.args[1], list | tuple) else 1
    for length, out in zip(shape_of(source)[-many:], shape_of(step.node)[-many:], strict=True):
        place = torch.arange(out)
        own = -(-(place + 1) * length // out) - place * length // out
        total = total.unsqueeze(-1) * own
    return total


aten = torch.ops.aten
_POOLED = {aten.avg_pool1d: 1, aten.avg_pool2d: 2, aten.avg_pool3d: 3}
_POOL_DEFAULTS: tuple[Any, ...] = (None, None, [], [0], False, True, None)
"""Defaults of input, kernel, stride, padding, ceil_mode, count_include_pad and divisor_override."""

SQUARED: dict[Any, Callable[[AffineStep, Values], Any]] = {
    **dict.fromkeys(
        (
            aten.convolution, aten.linear, aten.addmm, aten.baddbmm, aten.mm, aten.bmm, aten.mv, aten.dot, aten.matmul,
        ),
        _multiplied,
    ),
    **dict.fromkeys(
        (
            aten.mul, aten.div, aten.neg, aten.native_batch_norm, aten._native_batch_norm_legit_no_training,
            aten._batch_norm_no_update, aten.cudnn_batch_norm, aten.miopen_batch_norm,
        ),
        _scaled,
    ),
    **dict.fromkeys((aten.add, aten.sub, aten.rsub), _summed),
    aten.mean: _averaged(_reduced_count),
    **dict.fromkeys(_POOLED, _averaged(_pooled_count)),
    **dict.fromkeys(
        (
            aten._adaptive_avg_pool2d, aten._adaptive_avg_pool3d, aten.adaptive_avg_pool1d, aten.adaptive_avg_pool2d,
        ),
        _averaged(_adaptive_count),
    ),
    **dict.fromkeys(
        (
            aten.view, aten._unsafe_view, aten.reshape, aten.flatten, aten.unflatten, aten.expand,
            aten.squeeze, aten.unsqueeze, aten.select, aten.slice, aten.split, aten.split_with_sizes, aten.chunk,
            aten.unbind, aten.narrow, aten.permute, aten.transpose, aten.t, aten.flip, aten.roll, aten.clone,
            aten.contiguous, aten.alias, aten.detach, aten._to_copy, aten.sum, aten.cumsum, aten.cat, aten.stack,
            aten.constant_pad_nd, aten.reflection_pad1d, aten.reflection_pad2d, aten.replication_pad1d,
            aten.replication_pad2d, aten.upsample_nearest1d, aten.upsample_nearest2d, aten.pixel_shuffle,
            aten.pixel_unshuffle, aten.channel_shuffle, aten.index, aten.index_select, aten.repeat, aten.tril,
            aten.triu, operator.getitem,
        ),
        _selected,
    ),
}  # fmt: skip
"""How an affine operator maps the variances of independent numbers; all overloads are alike."""
