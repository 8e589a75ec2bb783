"""What the field uses instead, for comparison: ADF, the unscented transform, a series of four terms."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from netmoments.covariances import Covariance
from netmoments.network.graph import Node, shape_of
from netmoments.normal import density, standard_deviation
from netmoments.precision import full_precision
from netmoments.propagate.layerwise import gaussian_layerwise
from netmoments.propagate.plan import AffineStep, Plan, Segment
from netmoments.relu.marginal import standardize
from netmoments.rules.affine import OPERATORS, family, linear_call
from netmoments.rules.piecewise_linear import PiecewiseLinear
from netmoments.rules.registry import operator_name

TOGETHER_BYTES = {"cpu": 2**24, "cuda": 2**28}
"""Points that go through a network at a time."""


@torch.no_grad()
def unscented(
    network: Callable[[Tensor], Tensor], mean: Tensor, covariance: Covariance, rows: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean (k,) and covariance (k, k) of the chosen scores from 2r points x ± √r Rᵢ, all of weight 1/(2r), Σ = RRᵀ.

    The unscented transform with κ = 0, the third-degree cubature rule: exact for cubic polynomials. `mean` is (1, ...)
    """
    root = covariance.root()
    spread = root.mT * root.shape[-1] ** 0.5
    together = max(1, TOGETHER_BYTES.get(mean.device.type, TOGETHER_BYTES["cpu"]) // (mean.numel() * mean.itemsize))
    scores = []
    with full_precision():
        for offset in torch.cat([spread, -spread]).split(together):
            scores.append(network(mean + offset.reshape(-1, *mean.shape[1:]))[:, rows].double())
    values = torch.cat(scores)
    centred = values - values.mean(0)
    return values.mean(0).to(mean.dtype), (centred.mT @ centred / len(centred)).to(mean.dtype)


def by_series(plan: Plan, mean: Tensor, covariance: Covariance, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Layer by layer, every tensor Gaussian, covariances of piecewise linear units by four terms of their series."""
    stages = tuple(
        replace(stage, rule=_series(stage.rule)) if isinstance(stage.rule, PiecewiseLinear) else stage
        for stage in plan.stages
    )
    means, covariances = gaussian_layerwise(replace(plan, stages=stages), mean, covariance, rows.unsqueeze(0))
    return means[0], covariances[0]


def _series(rule: PiecewiseLinear) -> FourTerms:
    return FourTerms(rule.offset, rule.slope, rule.bends, rule.kinks)


@dataclass(frozen=True, eq=False)
class FourTerms(PiecewiseLinear):
    """Piecewise linear units whose covariances are four terms of the series in their correlation ρ."""

    def pairs(self, mean: Tensor, covariance: Tensor) -> Tensor:
        """Σₙ₌₂⁴ aₙ aₙ' ρⁿ/n!, with aₙ = s Σ bend Heₙ₋₂(h)φ(h) up to sign; the first term is the linear part."""
        s = standard_deviation(covariance.diagonal(dim1=-2, dim2=-1))
        h = standardize(mean - self._beside(self.kinks, mean), s)
        bell = self._beside(self.bends, mean) * density(h)
        safe = torch.where(s > 0, s, 1.0)
        rho = (covariance / safe.unsqueeze(-1) / safe.unsqueeze(-2)).clamp(-1, 1)
        second, third, fourth = (s * (bell * factor).sum(0) for factor in (1.0, h, h * h - 1))

        def term(coefficient: Tensor, power: int, factorial: float) -> Tensor:
            return coefficient.unsqueeze(-1) * coefficient.unsqueeze(-2) * rho**power / factorial

        return term(second, 2, 2.0) + term(third, 3, 6.0) + term(fourth, 4, 24.0)


aten = torch.ops.aten
Values = Mapping[Node, Any]
_CALLER = "diagonal"
_POOLED = {aten.avg_pool1d: 1, aten.avg_pool2d: 2, aten.avg_pool3d: 3}
_POOL_DEFAULTS: tuple[Any, ...] = (None, None, [], [0], False, True, None)
"""Input, kernel, stride, padding, ceil_mode, count_include_pad, divisor_override."""


def variance_step(step: AffineStep, variances: Values) -> Any:
    """What one affine operation z = L x + c makes of the variances of its inputs if those are independent."""
    kind = family(step.node.target)
    if step.constants is None or kind not in SQUARED:
        raise ValueError(
            f"{_CALLER}: no rule for the variances of {operator_name(step.node)} with correlations dropped; there are "
            f"rules for {', '.join(sorted({str(known.__name__).strip('_') for known in SQUARED}))}"
        )
    return SQUARED[kind](step, variances)


def _linear(step: AffineStep, values: Values) -> Any:
    """L itself, at other values than the operation's own."""
    every = {**(step.constants or {}), **values}
    return linear_call(step.node, OPERATORS[family(step.node.target)], every, frozenset(step.inputs))


def _selected(step: AffineStep, variances: Values) -> Any:
    """Entries of L are 0 and 1."""
    return _linear(step, {node: variances[node] for node in step.inputs})


def _scaled(step: AffineStep, variances: Values) -> Any:
    """Each number by a factor of its own: Lᵢᵢ² vᵢ."""
    (source,) = step.inputs
    factor = _linear(step, {source: torch.ones_like(variances[source])})
    if isinstance(factor, tuple | list):  # normalised values, then the statistics
        return (factor[0].square() * variances[source],)
    return factor.square() * variances[source]


def _multiplied(step: AffineStep, variances: Values) -> Any:
    """Products with constants: the same with their squares."""
    squares = {node: value.square() for node, value in (step.constants or {}).items() if isinstance(value, Tensor)}
    scales = {name: value for name, value in step.node.kwargs.items() if name in ("alpha", "beta") and value != 1}
    if scales:
        raise ValueError(f"{_CALLER}: {operator_name(step.node)} is known for factors of 1, got {scales}")
    return _linear(step, {**squares, **{node: variances[node] for node in step.inputs}})


def _summed(step: AffineStep, variances: Values) -> Tensor:
    """x ± alpha·y, in any order: vₓ + alpha² v_y, as if x and y were not the same."""
    (first, second, *rest), named = step.node.args, step.node.kwargs
    alpha = float(rest[0] if rest else named.get("alpha", 1))  # type: ignore[arg-type]
    factors = (alpha, 1.0) if family(step.node.target) is aten.rsub else (1.0, alpha)
    total = torch.zeros(shape_of(step.node)).to(variances[step.inputs[0]])
    for node, factor in zip((first, second), factors, strict=True):
        if node in step.inputs:
            total = total + factor**2 * variances[node]  # type: ignore[index]
    return total


def _averaged(count: Callable[[AffineStep], Any]) -> Callable[[AffineStep, Values], Tensor]:
    """Means of `count` numbers each: the mean of their variances, by `count` once more."""

    def rule(step: AffineStep, variances: Values) -> Tensor:
        average: Tensor = _selected(step, variances)
        counts = count(step)
        return average / (counts.to(average) if isinstance(counts, Tensor) else counts)

    return rule


def _reduced_count(step: AffineStep) -> float:
    return shape_of(step.inputs[0]).numel() / shape_of(step.node).numel()


def _pooled_count(step: AffineStep) -> int:
    """The kernel's size, padding counting as zeros; another divisor if there is one."""
    given: tuple[Any, ...] = step.node.args
    kernel, _, padding, ceil_mode, with_padding, divisor = (*given[1:], *_POOL_DEFAULTS[len(given) :])
    if divisor is not None:
        return int(divisor)
    if ceil_mode or (any(padding) and not with_padding):
        raise ValueError(f"{_CALLER}: average pooling is known only if all its windows have the same divisor")
    return math.prod(kernel if len(kernel) > 1 else kernel * _POOLED[family(step.node.target)])


def _adaptive_count(step: AffineStep) -> Tensor:
    """How many numbers each window of adaptive pooling has: ⌈(i+1)·in/out⌉ − ⌊i·in/out⌋ along each axis."""
    (source,), total = step.inputs, torch.ones(())
    many = len(step.node.args[1]) if isinstance(step.node.args[1], list | tuple) else 1
    for length, out in zip(shape_of(source)[-many:], shape_of(step.node)[-many:], strict=True):
        place = torch.arange(out)
        own = -(-(place + 1) * length // out) - place * length // out
        total = total.unsqueeze(-1) * own
    return total


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
"""By operator, all overloads alike."""


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
