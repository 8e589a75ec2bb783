"""The two integrals behind the covariance of two ReLUs, exact to rounding for every correlation.

For z₁ ~ N(h,1), z₂ ~ N(k,1) with correlation ρ, Price's theorem (1958), d E f(z₁)g(z₂)/dρ = E f′(z₁)g′(z₂), applied
twice gives

    Cov(relu z₁, relu z₂) = ρΦ(h)Φ(k) + J,      J = ∫₀^ρ (ρ − r) φ₂(h,k;r) dr      (nonlinear part)
    P(z₁>0, z₂>0)         = Φ(h)Φ(k) + D,       D = ∫₀^ρ φ₂(h,k;r) dr              (orthant excess)

with φ₂ the bivariate normal density at (h,k). The half-angle substitution r = 2τ/(1+τ²) makes both algebraic,

    φ₂ dr = (1/π) exp(−(1+τ²)·[((h+k)/2)²/(1+τ)² + ((h−k)/2)²/(1−τ)²]) dτ/(1+τ²).

There is no trigonometry, and the exponent is a sum of squares, so nothing cancels as ρ → ±1. With T = ρ/(1+√(1−ρ²))
the range is τ = Tu, u in [0,1]. Gauss–Legendre in u needs fewer nodes than in r or in the angle asin r, whose
singularities are closer. Beyond |ρ| = 0.99 the nodes of J are graded towards u = 1; D, whose integrand has a boundary
layer of any width there, comes from Owen's T (1956). Up to moderate correlations both integrals are power series in ρ,
which are cheaper than nodes (see `quadrature_rules`).

`nonlinear_part` and `orthant_excess` are the entries. They evaluate a block of pairs with the rule that is cheapest for
most of them, and the other pairs apart, with a better one (`_by_correlation`). `Units` holds the units of a layer, and
the functions after it tell which of them matter.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from netmoments.normal import density, distribution, owen_t, standard_deviation, standardize
from netmoments.relu.quadrature_rules import (
    EXCESS_SERIES_RULES,
    NONLINEAR_RULES,
    RULES,
    SERIES_RULES,
    Rule,
    SeriesRule,
)

TERM_COST = 0.08
"""The cost of a term of the series for a block of pairs, in units of the cost of one node for it: two passes over the
block instead of twelve and an exponential."""
GEOMETRY_COST = 1.5
"""The cost of what comes before the first node of a block, in the same unit."""
SEARCH_COST = 0.5
"""The cost of looking for the pairs of a block that need a better rule, in the same unit."""
EXCEPTION_COST = 250_000
"""The fixed cost of treating pairs apart, however few, is that of one node for so many pairs: calls, not arithmetic."""
GATHER_COST = 4
"""The cost of picking one pair out of a block, in nodes for that pair."""
FEW_EXPONENTIALS = 65536
"""Up to so many exponentials are computed at once: node by node, the calls would cost more than the arithmetic."""
SMALL_LAYER = 2**14
"""Up to so many pairs, of all images together, a layer is evaluated in one block with one rule."""
SURVEY = 1024
"""How many pairs of a block are looked at to choose its rule. It matters to speed only: no pair gets too few nodes."""
SLOTS = 21
"""Buffers of the size of a tile in the scratch memory: 13 for quadrature, 6 for derivatives, 2 for their weights."""
KEPT_BYTES = 64 * 2**20
"""Scratch memory up to this size is kept by a CPU thread for the next call: fresh pages cost more than arithmetic."""
SELDOM = 0.03
"""A layer is deep if each unit that matters is open with less than this probability."""
DEAD = -3.0
"""Left of this h an absolute error of this module is more than 1e-12 (1e-6 in float32) of the value itself."""
FAINT = 1e-16
"""Units whose standard deviation is less than this part of the largest one change nothing."""


def nonlinear_part(
    h: Tensor, k: Tensor, rho: Tensor, scratch: Scratch | None = None, series: TileSeries | None = None
) -> Tensor:
    """J(h,k;ρ) = Cov(relu z₁, relu z₂) − ρΦ(h)Φ(k) for unit variances: positive, O(ρ²), even under k, ρ → −k, −ρ.

    The three broadcast and have equally many dimensions. |ρ| > 1 is an error. The result lives in `scratch`, if given.
    With the series of the same pairs, moderate correlations take that instead of nodes.
    """
    scratch = scratch or _fresh_scratch(h, k, rho)
    rules, series_rules = NONLINEAR_RULES[rho.dtype], SERIES_RULES[rho.dtype]
    if series is None:
        return _by_correlation(nonlinear_part_by, rules, (), h, k, rho, scratch)
    evaluate = _nodes_or_series(nonlinear_part_by, nonlinear_series, series)
    return _by_correlation(evaluate, rules, series_rules, h, k, rho, scratch)


def orthant_excess(
    h: Tensor, k: Tensor, rho: Tensor, scratch: Scratch | None = None, series: TileSeries | None = None
) -> Tensor:
    """D(h,k;ρ) = P(z₁>0, z₂>0) − Φ(h)Φ(k) = ∂J/∂ρ, of the sign of ρ. Conventions as for `nonlinear_part`."""
    scratch = scratch or _fresh_scratch(h, k, rho)
    rules, series_rules = RULES[rho.dtype], EXCESS_SERIES_RULES[rho.dtype]
    if series is None:
        return _by_correlation(orthant_excess_by, rules, (), h, k, rho, scratch)
    evaluate = _nodes_or_series(orthant_excess_by, excess_series, series)
    return _by_correlation(evaluate, rules, series_rules, h, k, rho, scratch)


class Units(NamedTuple):
    """Standardized means h and standard deviations s of a set of units, (images or 1, units); s > 0 for pairs."""

    h: Tensor
    s: Tensor
    series: SeriesFactors | None = None
    """The units' factors in the series for pairs, so that `tiles` can use it."""

    def with_series(self) -> Units:
        """The same units with their factors in the series, which are computed when they are needed."""
        return self._replace(series=SeriesFactors(self.h))

    def rows(self) -> Units:
        """Shaped as the rows of a matrix of pairs, (images, units, 1)."""
        return Units(self.h.unsqueeze(-1), self.s.unsqueeze(-1))

    def columns(self) -> Units:
        """Shaped as the columns of a matrix of pairs, (images, 1, units)."""
        return Units(self.h.unsqueeze(-2), self.s.unsqueeze(-2))

    def span(self, index: slice) -> Units:
        """A range of the units."""
        return Units(self.h[:, index], self.s[:, index])


class NoMoments(ValueError):
    """A layer was given a mean that holds NaN, or a variance that does or is negative."""


def units_of(mean: Tensor, variance: Tensor) -> Units:
    """The units with these means and variances; NaN or a negative variance is refused here, before it spreads."""
    if bool(torch.isnan(mean).any()):
        raise NoMoments("the mean of a ReLU layer holds NaN")
    if not bool((variance >= 0).all()):
        raise NoMoments("the diagonal of the covariance of a ReLU layer must be ≥ 0, got a negative value or NaN")
    std = standard_deviation(variance)
    return Units(standardize(mean, std), std)


def saturation(dtype: torch.dtype) -> float:
    """The |h| beyond which a unit is linear or dead to rounding: J ≤ exp(−h²/2)."""
    return 6.0 if dtype == torch.float32 else 8.5


def active(units: Units) -> Tensor:
    """Which units are neither without variance (s = 0) nor linear or dead to rounding, (images or 1, units)."""
    return (units.s > 0) & (units.h.abs() <= saturation(units.h.dtype))


@torch.no_grad()
def deep_layers(units: Units, weights: Tensor | None) -> Tensor:
    """Which images have a deep layer, (images,): an output that depends on seldom open units only.

    For such an output the largest |Bᵢ|sᵢΦ(hᵢ) is less than `SELDOM` times the largest |Bᵢ|sᵢ: the s₁s₂ to which the
    accuracy of this module refers are a thousand times its variance or more. Without weights B (images or 1, d, p) all
    units together are one output.
    """
    if weights is None:
        return (units.s * distribution(units.h)).amax(-1) < SELDOM * units.s.amax(-1)
    size = (weights * units.s.unsqueeze(-2)).abs()
    opened = size * distribution(units.h).unsqueeze(-2)
    return (opened.amax(-1) < SELDOM * size.amax(-1)).any(-1)


def noticeable(units: Units, weights: Tensor | None) -> Tensor:
    """Which units of a deep layer change an output, (images, units); the deviations of the others are `FAINT`.

    The deviation of a dead unit's output is less than s·exp(−h²/4).
    """
    size = units.s * units.h.clamp(max=0).square().mul(-0.25).exp()
    if weights is None:
        return size > FAINT * size.amax(-1, keepdim=True)
    sizes = (weights * size.unsqueeze(-2)).abs()
    return (sizes > FAINT * sizes.amax(-1, keepdim=True)).any(-2)


def dead(units: Units) -> Tensor:
    """Which units are hardly ever open, (images, units)."""
    return (units.s > 0) & (units.h < DEAD)


def nonlinear_matrix(units: Units, covariance: Tensor) -> Tensor:
    """s₁s₂J of all pairs of a small layer at once, (images, p, p), and 0 on the diagonal.

    Covariances are (images or 1, p, p). All pairs get the nodes that the largest correlation needs: for up to
    `SMALL_LAYER` pairs that is faster than choosing rules by pair.
    """
    h, s = units.h, units.s
    safe = torch.where(s > 0, s, 1.0)
    rho = (covariance / safe.unsqueeze(-1) / safe.unsqueeze(-2)).clamp_(-1, 1)
    rho.diagonal(dim1=1, dim2=2).zero_()
    largest = float(rho.abs().max())
    for rule in NONLINEAR_RULES[rho.dtype]:
        if largest <= rule.limit:
            scratch = Scratch(rho.dtype, rho.device, max(len(h), len(rho)) * h.shape[1] ** 2)
            value = nonlinear_part_by(rule, h.unsqueeze(-1), h.unsqueeze(-2), rho, scratch)
            lower = value.mul_(s.unsqueeze(-1)).mul_(s.unsqueeze(-2)).tril_(-1)
            return lower + lower.mT  # symmetric to the bit, which two roundings of one pair are not
    raise no_correlations(largest, rho.dtype)


def no_correlations(largest: float, dtype: torch.dtype) -> ValueError:
    """The error to raise if the largest correlation is NaN or more than 1."""
    name, most = str(dtype).removeprefix("torch."), torch.finfo(dtype).max
    return ValueError(
        f"correlations must be within [−1, 1], got {largest}: a mean or covariance holds NaN or infinity (a {name} "
        f"variance of more than {most:.0e} is infinite: take smaller units{'' if '64' in name else ', or float64'})"
    )


_kept_scratch = threading.local()


class Scratch:
    """Named buffers of one dtype and device, each of up to `elements` elements, in one block of memory.

    The content of a buffer lasts until its name is taken again. Only buffers that are used take physical memory.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, elements: int) -> None:
        self.elements = elements
        with torch.inference_mode(False):  # else a block kept from inside inference mode would be unusable outside
            self._block = torch.empty(SLOTS, elements, dtype=dtype, device=device)
        self._slots: dict[str, Tensor] = {}

    def take(self, name: str, shape: torch.Size) -> Tensor:
        """The buffer of this name as a tensor of this shape, with arbitrary content."""
        slot = self._slots.get(name)
        if slot is None:
            slot = self._slots[name] = self._block[len(self._slots)]
        return slot[: shape.numel()].view(shape)


def scratch_for(like: Tensor, elements: int) -> Scratch:
    """Scratch memory for blocks of up to `elements` pairs; on a CPU the thread keeps it between calls."""
    size = SLOTS * elements * like.dtype.itemsize
    if like.device.type != "cpu" or size > KEPT_BYTES:
        return Scratch(like.dtype, like.device, elements)
    kept: dict[torch.dtype, Scratch] = _kept_scratch.__dict__.setdefault("by_dtype", {})
    if like.dtype not in kept or kept[like.dtype].elements < elements:
        kept[like.dtype] = Scratch(like.dtype, like.device, elements)
    return kept[like.dtype]


def common_shape(*tensors: Tensor) -> torch.Size:
    """The broadcast shape of tensors with equally many dimensions (`torch.broadcast_shapes` is slow)."""
    return torch.Size(map(max, *map(_shape, tensors)))


_shape = attrgetter("shape")


def _fresh_scratch(h: Tensor, k: Tensor, rho: Tensor) -> Scratch:
    return Scratch(rho.dtype, rho.device, common_shape(h, k, rho).numel())


class _Geometry(NamedTuple):
    """What all nodes of a block share, in the module's notation and with P = ((h+k)/2)², M = ((h−k)/2)²."""

    extent: Tensor  # T, of the sign of ρ
    below: Tensor  # 1 − T, to full relative accuracy
    above: Tensor  # 1 + T, likewise
    square: Tensor  # T²
    plus: Tensor  # −P/2
    minus: Tensor  # −M/2
    both: Tensor  # −(P + M)/2


def _geometry(h: Tensor, k: Tensor, rho: Tensor, scratch: Scratch) -> _Geometry:
    one = rho.new_ones(())
    below = torch.sub(one, rho, out=scratch.take("below", rho.shape))
    above = torch.add(one, rho, out=scratch.take("above", rho.shape))
    root = torch.mul(below, above, out=scratch.take("root", rho.shape)).sqrt_()
    below.add_(root)
    above.add_(root)
    root.add_(1)
    extent = torch.div(rho, root, out=scratch.take("extent", rho.shape))
    pairs = common_shape(h, k, rho)
    plus = torch.add(h, k, out=scratch.take("plus", pairs)).square_().mul_(-0.125)
    minus = torch.sub(h, k, out=scratch.take("minus", pairs)).square_().mul_(-0.125)
    return _Geometry(
        extent=extent,
        below=below.div_(root),
        above=above.div_(root),
        square=torch.mul(extent, extent, out=root),
        plus=plus,
        minus=minus,
        both=torch.add(plus, minus, out=scratch.take("both", pairs)),
    )


class _Nodes:
    """The parts of the integrands at one node after another, for a large block, in the same scratch memory."""

    def __init__(self, at: _Geometry, scratch: Scratch) -> None:
        self._at = at
        self._one = at.extent.new_ones(())
        self._ratio = scratch.take("ratio", at.extent.shape)
        self._factor = scratch.take("factor", at.extent.shape)
        self._height = scratch.take("height", at.both.shape)
        self.total = scratch.take("total", at.both.shape).zero_()

    def height(self, v: float) -> Tensor:
        """exp(−(P + M + Pr + M/r)/2) with r = ((1−τ)/(1+τ))², at the node u = 1 − v.

        The exponent is that of the module's docstring, since 1 + τ² is half of (1+τ)² + (1−τ)².
        """
        at, ratio = self._at, self._ratio
        torch.add(at.below, at.extent, alpha=v, out=ratio)
        torch.add(at.above, at.extent, alpha=-v, out=self._factor)
        ratio.div_(self._factor).square_()
        torch.addcmul(at.both, at.plus, ratio, out=self._height)
        return self._height.addcdiv_(at.minus, ratio).exp_()

    def spread(self, u: float) -> Tensor:
        """1 + τ²."""
        return torch.add(self._one, self._at.square, alpha=u * u, out=self._ratio)

    def shortfall(self, u: float) -> Tensor:
        """1 − Tτ."""
        return torch.add(self._one, self._at.square, alpha=-u, out=self._factor)


def nonlinear_part_by(rule: Rule, h: Tensor, k: Tensor, rho: Tensor, scratch: Scratch | None = None) -> Tensor:
    """J with one rule for every pair, 2T²/(π(1+T²)) Σ w(1−u) (1−Tτ)/(1+τ²)² exp(…).

    This is as ρ − r = 2(T−τ)(1−Tτ)/((1+T²)(1+τ²)).
    """
    scratch = scratch or _fresh_scratch(h, k, rho)
    at = _geometry(h, k, rho, scratch)
    if len(rule.nodes) * at.both.numel() <= FEW_EXPONENTIALS:
        nodes = _all_nodes(rule, at)
        terms = nodes.heights * (nodes.weight * nodes.v) * (1 - at.square * nodes.u)
        total = terms.div_(nodes.spread.square_()).sum(0)
    else:
        block = _Nodes(at, scratch)
        total = block.total
        for u, weight, v in rule.nodes:
            height = block.height(v)
            total.addcmul_(block.shortfall(u).div_(block.spread(u).square_()), height, value=weight * v)
    return total.mul_((at.square / (1 + at.square)).mul_(2 / math.pi))


def orthant_excess_by(rule: Rule, h: Tensor, k: Tensor, rho: Tensor, scratch: Scratch | None = None) -> Tensor:
    """D with one rule for every pair, T/π Σ w/(1+τ²) exp(…), or from Owen's T if the rule's limit is 1."""
    scratch = scratch or _fresh_scratch(h, k, rho)
    if rule.limit == 1.0:
        return excess_by_owen(h, k, rho, scratch)
    at = _geometry(h, k, rho, scratch)
    if len(rule.nodes) * at.both.numel() <= FEW_EXPONENTIALS:
        nodes = _all_nodes(rule, at)
        total = (nodes.heights * nodes.weight).div_(nodes.spread).sum(0)
    else:
        block = _Nodes(at, scratch)
        total = block.total
        for u, weight, v in rule.nodes:
            height = block.height(v)
            total.addcdiv_(height, block.spread(u), value=weight)
    return total.mul_(at.extent.mul_(1 / math.pi))


class _AllNodes(NamedTuple):
    """What `_Nodes` gives one by one, for all nodes of a small block at once, along a new first dimension."""

    u: Tensor
    weight: Tensor
    v: Tensor
    heights: Tensor
    spread: Tensor


def _all_nodes(rule: Rule, at: _Geometry) -> _AllNodes:
    table = torch.tensor(rule.nodes, dtype=at.extent.dtype, device=at.extent.device)
    u, weight, v = table.T.reshape(3, -1, *(1,) * at.extent.dim()).unbind()
    ratio = torch.addcmul(at.below, at.extent, v).div_(torch.addcmul(at.above, at.extent, v, value=-1)).square_()
    heights = torch.addcmul(at.both, at.plus, ratio).addcdiv_(at.minus, ratio).exp_()
    return _AllNodes(u, weight, v, heights, spread=torch.addcmul(heights.new_ones(()), at.square, u * u))


Evaluation = Callable[[Any, Tensor, Tensor, Tensor, Scratch], Tensor]
"""A function that evaluates an integral by a rule, from h, k and ρ."""


def _nodes_or_series(
    by_nodes: Evaluation, by_terms: Callable[[TileSeries, int, Tensor, Scratch], Tensor], series: TileSeries
) -> Evaluation:
    """An evaluation that takes nodes or terms of the series, depending on the kind of the rule."""

    def evaluate(rule: Rule | SeriesRule, h: Tensor, k: Tensor, rho: Tensor, scratch: Scratch) -> Tensor:
        if isinstance(rule, SeriesRule):
            return by_terms(series, rule.terms, rho, scratch)
        return by_nodes(rule, h, k, rho, scratch)

    return evaluate


def _by_correlation(
    evaluate: Evaluation,
    rules: tuple[Rule, ...],
    series_rules: tuple[SeriesRule, ...],
    h: Tensor,
    k: Tensor,
    rho: Tensor,
    scratch: Scratch,
) -> Tensor:
    """Evaluate a block with the rule that is cheapest for it, and the pairs beyond its limit with a better one."""
    low, high = (float(x) for x in torch.aminmax(rho))
    largest = max(-low, high)
    if not largest <= 1:
        raise no_correlations(largest, rho.dtype)
    rules = rules[: next(i for i, rule in enumerate(rules) if largest <= rule.limit) + 1]
    enough = next((i for i, rule in enumerate(series_rules) if largest <= rule.limit), len(series_rules))
    base = _cheapest_base(rules, series_rules[: enough + 1], rho, largest)
    if base.limit >= largest:
        return evaluate(base, h, k, rho, scratch)
    beyond = torch.abs(rho, out=scratch.take("size", rho.shape)) > base.limit
    where = beyond.expand(common_shape(h, k, rho)).nonzero(as_tuple=True)
    result = evaluate(base, h, k, rho, scratch)
    h, k, rho = (x.expand(result.shape)[where] for x in (h, k, rho))
    result[where] = evaluate(rules[-1], h, k, rho, _fresh_scratch(h, k, rho))
    return result


def _cheapest_base(
    rules: tuple[Rule, ...], series_rules: tuple[SeriesRule, ...], rho: Tensor, largest: float
) -> Rule | SeriesRule:
    """The rule for the whole block that costs least, if pairs beyond its limit then get the last of `rules` too."""
    apart, exception = SEARCH_COST + EXCEPTION_COST / rho.numel(), len(rules[-1].nodes) + GATHER_COST
    candidates: tuple[Rule | SeriesRule, ...] = (*series_rules, *rules)
    enough = min((rule for rule in candidates if largest <= rule.limit), key=_block_cost)
    if _block_cost(enough) <= apart:
        return enough
    survey = rho.flatten()[:: max(1, rho.numel() // SURVEY)].abs().unsqueeze(-1)
    limits = torch.tensor([rule.limit for rule in candidates], dtype=rho.dtype, device=rho.device)
    beyond = (survey > limits).sum(0).tolist()
    costs = [
        _block_cost(rule) + (apart if rule.limit < largest else 0) + exception * count / len(survey)
        for rule, count in zip(candidates, beyond, strict=True)
    ]
    return candidates[costs.index(min(costs))]


def _block_cost(rule: Rule | SeriesRule) -> float:
    """The cost of a rule for a block, in nodes."""
    return TERM_COST * rule.terms if isinstance(rule, SeriesRule) else len(rule.nodes) + GEOMETRY_COST


class SeriesFactors:
    """The factors aₙ(h) of units in the series of `quadrature_rules`, computed as far as they are needed."""

    def __init__(self, h: Tensor) -> None:
        self._h = h
        self._factors = [density(h) * math.sqrt(0.5)]
        self._stacked = self._factors[0].unsqueeze(0)

    def first(self, terms: int) -> Tensor:
        """a₀, a₁, …, at least `terms` of them along a new first dimension."""
        while len(self._factors) < terms:
            n = len(self._factors) - 1
            following = self._h * self._factors[n] / math.sqrt(n + 3)
            if n > 0:
                following.sub_(self._factors[n - 1], alpha=n / math.sqrt((n + 2) * (n + 3)))
            self._factors.append(following)
        if len(self._stacked) < terms:
            self._stacked = torch.stack(self._factors)
        return self._stacked


class TileSeries(NamedTuple):
    """The series of a tile of pairs: the factors of all units, and which of them are its rows and its columns."""

    factors: SeriesFactors
    rows: slice
    columns: slice

    def downwards(self, terms: int) -> Iterator[tuple[Tensor, Tensor]]:
        """aₙ of the rows and of the columns of each term, the last term first."""
        factors = self.factors.first(terms)[:terms].flip(0)
        return zip(
            factors[..., self.rows].unsqueeze(-1).unbind(),
            factors[..., self.columns].unsqueeze(-2).unbind(),
            strict=True,
        )


def nonlinear_series(series: TileSeries, terms: int, rho: Tensor, scratch: Scratch) -> Tensor:
    """J = ρ² Σ aₙ(h)aₙ(k)ρⁿ by the first `terms` terms. The result lives in the scratch memory."""
    return _power_sum(series, (1.0,) * terms, rho, scratch).mul_(rho).mul_(rho)


def excess_series(series: TileSeries, terms: int, rho: Tensor, scratch: Scratch) -> Tensor:
    """D = ρ Σ (n+2) aₙ(h)aₙ(k)ρⁿ by the first `terms` terms. The result lives in the scratch memory."""
    return _power_sum(series, tuple(n + 2.0 for n in range(terms)), rho, scratch).mul_(rho)


def _power_sum(series: TileSeries, scales: tuple[float, ...], rho: Tensor, scratch: Scratch) -> Tensor:
    """Σ scaleₙ aₙ(h)aₙ(k)ρⁿ by Horner's rule."""
    pairs = zip(reversed(scales), series.downwards(len(scales)), strict=True)
    scale, (a, b) = next(pairs)
    outer, shape = common_shape(a, b), common_shape(a, b, rho)
    total, term = scratch.take("total", shape), scratch.take("height", outer)
    total.copy_(torch.mul(a * scale, b, out=term))
    for scale, (a, b) in pairs:
        torch.mul(a * scale, b, out=term)
        torch.addcmul(term, total, rho, out=total)
    return total


class Conditional(NamedTuple):
    """Each unit given that the other is 0: standardized means (h−ρk)/q and (k−ρh)/q, and the deviation q = √(1−ρ²).

    At ρ = ±1 the means are huge, so that Φ gives 0 or 1, or they are 0, where the numerator is 0.
    """

    first: Tensor
    second: Tensor
    deviation: Tensor


def conditional(h: Tensor, k: Tensor, rho: Tensor, scratch: Scratch, gap: Tensor | None = None) -> Conditional:
    """The conditional means and their deviation, in the scratch memory.

    The numerators are written (h∓k) ± (1−|ρ|)k, so that nothing cancels near ρ = ±1. `gap` is 1−|ρ|, if the caller
    knows it better than it follows from ρ.
    """
    one, pairs = rho.new_ones(()), common_shape(h, k, rho)
    size = torch.abs(rho, out=scratch.take("size", rho.shape))
    buffer = scratch.take("gap", rho.shape)
    gap = torch.sub(one, size, out=buffer) if gap is None else buffer.copy_(gap)
    deviation = torch.addcmul(gap, gap, size, out=scratch.take("deviation", rho.shape)).sqrt_()
    flip = torch.copysign(one, rho, out=scratch.take("flip", rho.shape))
    slack = gap.mul_(flip)
    divisor = torch.clamp(deviation, min=torch.finfo(rho.dtype).tiny, out=size)
    first = torch.addcmul(h, flip, k, value=-1, out=scratch.take("first", pairs)).addcmul_(slack, k).div_(divisor)
    second = torch.addcmul(k, flip, h, value=-1, out=scratch.take("second", pairs)).addcmul_(slack, h).div_(divisor)
    return Conditional(first, second, deviation)


def _even_exponent(x: Tensor) -> Tensor:
    """The even number e for which x·2⁻ᵉ is between 1/2 and 2."""
    return torch.frexp(x).exponent // 2 * 2


def _exact_product(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The exact product of float64 numbers, as the sum of two float64 numbers (Dekker 1971)."""
    product = a * b
    (a_high, a_low), (b_high, b_low) = ((high, x - high) for x in (a, b) for high in (_high_half(x),))
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def _high_half(x: Tensor) -> Tensor:
    """The upper half of the digits of float64 numbers."""
    scaled = x * (2.0**27 + 1)
    return scaled - (scaled - x)


def correlation_and_gap(first: Tensor, second: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """ρ = c/√(v₁v₂), cut to [−1, 1], and 1−|ρ| = (v₁v₂−c²)/(v₁v₂(1+|ρ|)), for variances v > 0 and covariances c.

    Both are float64. v₁v₂ − c² comes from exact products, so that no digit of the given numbers is lost in 1−|ρ|.
    """
    first, second, covariance = first.double(), second.double(), covariance.double()
    exponents = _even_exponent(first), _even_exponent(second)
    first, second = torch.ldexp(first, -exponents[0]), torch.ldexp(second, -exponents[1])
    covariance = torch.ldexp(covariance, -((exponents[0] + exponents[1]) // 2))
    product, product_rest = _exact_product(first, second)
    square, square_rest = _exact_product(covariance, covariance)
    size = (covariance.abs() / product.sqrt()).clamp(max=1)
    gap = ((product - square) + (product_rest - square_rest)).clamp(min=0) / (product * (1 + size))
    return torch.copysign(1 - gap, covariance), gap


def excess_by_owen(h: Tensor, k: Tensor, rho: Tensor, scratch: Scratch, gap: Tensor | None = None) -> Tensor:
    """P(z₁>0, z₂>0) − Φ(h)Φ(k) for any ρ in [−1, 1], to rounding:

    P = Φ(h)/2 + Φ(k)/2 − T(h, (k−ρh)/hq) − T(k, (h−ρk)/kq) − [h and k on different sides of 0]/2   (Owen 1956)

    P has infinite slope at ρ = ±1, where a rounding of ρ by 1e-16 would be an error of 1e-9; `gap` is 1−|ρ|, if known
    better.
    """
    h, k, rho = torch.broadcast_tensors(h, k, rho)
    origin = (h.abs() < 1e-30) & (k.abs() < 1e-30)  # T has no limit there, but P has: step off
    h = torch.where(origin, 1e-30, h)
    k = torch.where(origin, 1e-30, k)
    means = conditional(h, k, rho, scratch, gap)
    below_h, below_k = distribution(h), distribution(k)
    opposite = 0.5 * ((h < 0) != (k < 0)).to(h.dtype)
    probability = 0.5 * (below_h + below_k) - owen_t(h, means.second) - owen_t(k, means.first) - opposite
    return probability - below_h * below_k
