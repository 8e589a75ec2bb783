"""The nonlinear covariance of pairs of ReLUs and its derivatives, one tile of pairs at a time.

For pre-activations z₁, z₂ with means m = (s₁h, s₂k), variances s₁², s₂² and covariance c = ρs₁s₂:

    Cov(relu z₁, relu z₂) = c Φ(h)Φ(k) + s₁s₂ J(h,k;ρ).

The first, separable part is what the best linear approximation of each ReLU would give. The second, the nonlinear
part, is O(ρ²), vanishes for every pair with a saturated unit, and is all that needs quadrature.

Two families of functions compute it. `nonlinear_covariance` and `tile_gradient` use the rules of `bivariate`, whose
error is absolute, in units of s₁s₂. That is enough if some unit that matters is open now and then. In a *deep* layer
none is, and the covariances are smaller than that error: the `tail_…` functions compute the same integrals to relative
accuracy. Further down are the helpers of whoever works through a layer: `Chunk` and `triangle` divide it into tiles,
`UnitGradients` adds up derivatives, and `OfImages` and `GradientOfImages` are what the autograd functions have in
common.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd import Function

from netmoments.normal import density, distribution, gauss_legendre
from netmoments.relu.bivariate import (
    SLOTS,
    Scratch,
    TileSeries,
    Units,
    common_shape,
    conditional,
    nonlinear_part,
    orthant_excess,
)


class Tile(NamedTuple):
    """A block of pairs: rows and columns of the matrix of all pairs."""

    rows: slice
    columns: slice

    def keep_lower_(self, matrix: Tensor) -> Tensor:
        """Zero this tile of a matrix, in place, on and above the matrix's diagonal, so that each pair counts once."""
        below = max(0, self.rows.start - self.columns.start)  # so many columns are below the diagonal in all rows
        if self.columns.start + below < self.columns.stop:
            matrix[..., below:].tril_(self.rows.start - self.columns.start - below - 1)
        return matrix


def correlation(units: Units, tile: Tile, covariance: Tensor, scratch: Scratch) -> Tensor:
    """ρ = c/(s₁s₂) of a tile's pairs, cut to [−1, 1] against rounding, and 0 on and above the diagonal.

    An uncorrelated pair has no nonlinear part, nor derivatives of one, and so contributes nothing.
    """
    row, column = units.span(tile.rows).rows(), units.span(tile.columns).columns()
    rho = scratch.take("rho", common_shape(row.s, column.s, covariance))
    torch.mul(covariance, row.s.reciprocal(), out=rho)
    return tile.keep_lower_(rho.mul_(column.s.reciprocal()).clamp_(-1, 1))


def nonlinear_covariance(units: Units, tile: Tile, covariance: Tensor, scratch: Scratch) -> Tensor:
    """s₁s₂J of a tile's pairs, given their covariances. The result lives in the scratch memory."""
    row, column = units.span(tile.rows).rows(), units.span(tile.columns).columns()
    rho = correlation(units, tile, covariance, scratch)
    return nonlinear_part(row.h, column.h, rho, scratch, _series_of(units, tile)).mul_(row.s).mul_(column.s)


def excess_probability(units: Units, tile: Tile, covariance: Tensor, scratch: Scratch) -> Tensor:
    """D = P(z₁>0, z₂>0) − Φ(h)Φ(k) of a tile's pairs. The result lives in the scratch memory."""
    row, column = units.span(tile.rows).rows(), units.span(tile.columns).columns()
    rho = correlation(units, tile, covariance, scratch)
    return orthant_excess(row.h, column.h, rho, scratch, _series_of(units, tile))


def _series_of(units: Units, tile: Tile) -> TileSeries | None:
    """The series of a tile's pairs, if the units have its factors."""
    return None if units.series is None else TileSeries(units.series, *tile)


class TileGradient(NamedTuple):
    """Derivatives of Σ weight·s₁s₂J over a tile: in each unit's m and s², and in each pair's covariance."""

    by_covariance: Tensor
    """The derivative of the pair's own s₁s₂J, not yet multiplied by its weight."""
    by_row_mean: Tensor
    by_column_mean: Tensor
    by_row_variance: Tensor
    by_column_variance: Tensor


def tile_gradient(units: Units, tile: Tile, covariance: Tensor, weight: Tensor, scratch: Scratch) -> TileGradient:
    """The derivatives in closed form, with a = (h−ρk)/q, b = (k−ρh)/q, q = √(1−ρ²) and D the orthant excess:

    ∂(s₁s₂J)/∂c   = D
    ∂(s₁s₂J)/∂m₁  = s₂ (k D + φ(k)[Φ(a) − Φ(h)] + ρφ(h)[Φ(b) − Φ(k)])
    ∂(s₁s₂J)/∂s₁² = s₂/(2s₁) (φ(h)(k−ρh)[Φ(b) − Φ(k)] + qφ(h)φ(b) − φ(h)φ(k))

    They are the derivatives of the whole covariance less those of cΦ(h)Φ(k). All are finite at ρ = ±1, and zero at
    ρ = 0. Factors that depend on one unit are taken out of the sums, which become products of matrices and vectors.
    """
    row, column = units.span(tile.rows), units.span(tile.columns)
    h, k = row.h.unsqueeze(-1), column.h.unsqueeze(-2)
    rho = correlation(units, tile, covariance, scratch)
    rho.copy_(torch.where(rho.abs() >= 1 - 4 * torch.finfo(rho.dtype).eps, rho.sign(), rho))  # equal but for rounding
    weight = torch.mul(weight, rho != 0, out=scratch.take("used", weight.shape))
    excess = orthant_excess(h, k, rho, scratch, _series_of(units, tile))
    means = conditional(h, k, rho, scratch)
    phi_h, phi_k = density(row.h), density(column.h)
    common = torch.square(means.second, out=scratch.take("common", means.second.shape)).add_(h * h).mul_(-0.5).exp_()
    common.mul_(means.deviation).mul_(0.5 / math.pi).addcmul_(phi_h.unsqueeze(-1), phi_k.unsqueeze(-2), value=-1)
    change_h = means.first.mul_(-math.sqrt(0.5)).erfc_().mul_(0.5).sub_(distribution(h))
    change_k = means.second.mul_(-math.sqrt(0.5)).erfc_().mul_(0.5).sub_(distribution(k))
    # from here on the buffers of the quadrature are used again, but for those of rho and of the excess
    change_h = torch.mul(change_h, weight, out=scratch.take("plus", weight.shape))
    change_k = torch.mul(change_k, weight, out=scratch.take("minus", weight.shape))
    tilted_h = torch.mul(change_h, rho, out=scratch.take("above", weight.shape))
    tilted_k = torch.mul(change_k, rho, out=scratch.take("below", weight.shape))
    weighted = torch.mul(excess, weight, out=scratch.take("height", weight.shape))
    common = torch.mul(common, weight, out=scratch.take("both", weight.shape))

    def over_columns(matrix: Tensor, vector: Tensor) -> Tensor:
        return (matrix @ vector.unsqueeze(-1)).squeeze(-1)

    def over_rows(matrix: Tensor, vector: Tensor) -> Tensor:
        return (vector.unsqueeze(-2) @ matrix).squeeze(-2)

    pull_rows = phi_h * over_columns(tilted_k, column.s)
    pull_columns = phi_k * over_rows(tilted_h, row.s)
    return TileGradient(
        by_covariance=excess,
        by_row_mean=over_columns(weighted, column.s * column.h) + over_columns(change_h, column.s * phi_k) + pull_rows,
        by_column_mean=over_rows(weighted, row.s * row.h) + over_rows(change_k, row.s * phi_h) + pull_columns,
        by_row_variance=(
            phi_h * over_columns(change_k, column.s * column.h) - row.h * pull_rows + over_columns(common, column.s)
        )
        / (2 * row.s),
        by_column_variance=(
            phi_k * over_rows(change_h, row.s * row.h) - column.h * pull_columns + over_rows(common, row.s)
        )
        / (2 * column.s),
    )


TAIL_NODES = 64
"""Nodes of the rule for tails, Gauss–Legendre in x: see `_TailPath`."""
POWER = 4
"""The power of x that spaces the nodes for tails."""
NODES_TOGETHER = 2**15
"""How many numbers, pairs times nodes, are evaluated at a time."""
REACH = 8.8
"""Standard deviations at which integrals for tails are cut off: exp(−REACH²/2) is a tenth of float64's rounding."""
TEMPORARIES = 16
"""How many tensors of the size of a tile the `tail_…` functions hold at a time."""


class _TailPath(NamedTuple):
    """The path of integration of pairs whose J and D are wanted to relative accuracy.

    With ρ ≥ 0 (else k, ρ → −k, −ρ, which leaves J as it is), w = √((1−r)/(1+r)), W the same of ρ, p = |h+k|/2 and
    d = |h−k|/2, the integrals of `bivariate` are

        D = (1/π) ∫ E(w)/(1+w²) dw,      J = 2/(π(1+W²)) ∫ (w²−W²) E(w)/(1+w²)² dw      from W to 1,
        E(w) = exp(−(p²(1+w²) + d²(1+1/w²))/2) = exp(−max(|h|,|k|)²/2) exp(−v²/2),      v = pw − d/w,

    a Gaussian in v, which grows with w. The path is cut `REACH` standard deviations from the peak. Between its ends
    w = low + length·x⁴ crowds the nodes where v is steep, so that one rule serves every h, k and ρ: J to 1e-13 of
    itself, D to 1e-13 up to |ρ| = 0.99 and to 1e-8 beyond. It needs eight times the nodes of `bivariate`, and float64:
    the rounding of h to float32 alone changes φ(h) by h²·6e-8 of itself.
    """

    plus: Tensor  # p
    minus: Tensor  # d
    end: Tensor  # W
    low: Tensor  # where the path begins: W, or later
    length: Tensor
    cut: Tensor  # low − W, to full relative accuracy

    @classmethod
    def of_pairs(cls, h: Tensor, k: Tensor, rho: Tensor) -> _TailPath:
        """The path for pairs with ρ ≥ 0."""
        plus, minus = (h + k).abs() / 2, (h - k).abs() / 2
        end = ((1 - rho) / (1 + rho)).sqrt()
        first, last = plus * end - torch.where(minus > 0, minus / end, 0.0), plus - minus
        lowest = -(last.clamp(max=0).square() + REACH**2).sqrt()
        highest = (first.clamp(min=0).square() + REACH**2).sqrt()
        low = torch.where(first < lowest, _w_at(lowest, plus, minus), end)
        high = torch.where(last > highest, _w_at(highest, plus, minus), 1.0)
        whole = (first >= lowest) & (last <= highest)
        length = torch.where(whole, 2 * rho / ((1 + rho) * (1 + end)), high - low)
        return cls(plus, minus, end, low, length, torch.where(first < lowest, low - end, 0.0))

    def nodes(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """w², w²−W², 1+w² and weight·exp(−v²/2), (nodes, ...), for a few nodes at a time."""
        points, weights = tail_rule(self.low.device)
        together = max(1, NODES_TOGETHER // max(1, self.low.numel()))
        along_nodes = (-1, *(1 for _ in self.low.shape))
        for point, weight in zip(points.split(together), weights.split(together), strict=True):
            step = self.length * point.reshape(along_nodes)
            w = self.low + step
            rise = (self.cut + step) * (w + self.end)
            height = torch.addcdiv(self.plus * w, self.minus, w, value=-1).square_().mul_(-0.5).exp_()
            square = w * w
            yield square, rise, 1 + square, height.mul_(weight.reshape(along_nodes))


@lru_cache(maxsize=8)
def tail_rule(device: torch.device) -> tuple[Tensor, Tensor]:
    """x⁴ and the weights 4x³·weight of Gauss–Legendre's nodes x, (nodes,) each."""
    with torch.inference_mode(False), torch.no_grad():
        points, weights = (torch.tensor(x, dtype=torch.float64) for x in gauss_legendre(TAIL_NODES))
        return (points**POWER).to(device), (POWER * points ** (POWER - 1) * weights).to(device)


def _w_at(v: Tensor, plus: Tensor, minus: Tensor) -> Tensor:
    """The w with pw − d/w = v, without cancellation."""
    root = (v * v + 4 * plus * minus).sqrt()
    return torch.where(v < 0, 2 * minus / (root - v), (v + root) / (2 * plus))


def _flipped(k: Tensor, rho: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """k and ρ times the sign of ρ, so that ρ ≥ 0, and that sign."""
    sign = torch.copysign(torch.ones_like(rho), rho)
    return k * sign, rho.abs(), sign


def height_root(h: Tensor, k: Tensor) -> Tensor:
    """exp(−max(|h|,|k|)²/4), the square root of the factor that J and D share: it underflows later than they do."""
    return torch.maximum(h.abs(), k.abs()).square().mul_(-0.25).exp_()


class TailSums(NamedTuple):
    """J, D, ∂J/∂h and ∂J/∂k of pairs, all without their common factor exp(−max(|h|,|k|)²/2)."""

    nonlinear: Tensor
    excess: Tensor
    by_first: Tensor
    by_second: Tensor


def tail_nonlinear_part(h: Tensor, k: Tensor, rho: Tensor) -> Tensor:
    """J·exp(max(|h|,|k|)²/2) to relative accuracy, for float64 tensors that broadcast; see `_TailPath`."""
    k, rho, _ = _flipped(k, rho)
    path = _TailPath.of_pairs(h, k, rho)
    total = torch.zeros_like(path.low)
    for _, rise, spread, height in path.nodes():
        total += height.mul_(rise).div_(spread.square_()).sum(0)
    return total.mul_(path.length * (2 / math.pi)).div_(1 + path.end.square())


def tail_excess(h: Tensor, k: Tensor, rho: Tensor) -> Tensor:
    """D·exp(max(|h|,|k|)²/2), in the same way as J in `tail_nonlinear_part`."""
    k, rho, sign = _flipped(k, rho)
    path = _TailPath.of_pairs(h, k, rho)
    total = torch.zeros_like(path.low)
    for _, _, spread, height in path.nodes():
        total += height.div_(spread).sum(0)
    return total.mul_(path.length * sign / math.pi)


def tail_sums(h: Tensor, k: Tensor, rho: Tensor) -> TailSums:
    """J and D, and the derivatives of J, to relative accuracy.

    ∂J/∂h = −∫ (ρ−r)(h−rk)/(1−r²) φ₂ dr, where (h−rk)/(1−r²) is ((h+k)/2 + (h−k)/(2w²))(1+w²)/2; ∂J/∂k is the same with
    h and k exchanged.
    """
    k, rho, sign = _flipped(k, rho)
    path = _TailPath.of_pairs(h, k, rho)
    nonlinear, excess, common, steep = (torch.zeros_like(path.low) for _ in range(4))
    for square, rise, spread, height in path.nodes():
        share = height.div_(spread)
        excess += share.sum(0)
        share = share.mul_(rise)
        common += share.sum(0)
        nonlinear += (share / spread).sum(0)
        steep += (share / square).sum(0)
    scale = path.length / math.pi
    risen = scale / (1 + path.end.square())
    common, steep = common.mul_(risen * (h + k) / 2), steep.mul_(risen * (h - k) / 2)
    return TailSums(2 * risen * nonlinear, scale * sign * excess, -(common + steep), (steep - common) * sign)


def tail_correlation(units: Units, tile: Tile, covariance: Tensor) -> Tensor:
    """ρ of a tile's pairs, cut to [−1, 1]; the same to the bit whichever unit of a pair comes first."""
    row, column = units.span(tile.rows).rows(), units.span(tile.columns).columns()
    larger, smaller = torch.maximum(row.s, column.s), torch.minimum(row.s, column.s)
    return (covariance / larger / smaller).clamp_(-1, 1)


def tail_covariance(units: Units, tile: Tile, covariance: Tensor, scratch: Scratch) -> Tensor:
    """`nonlinear_covariance` to relative accuracy, for float64."""
    row, column = units.span(tile.rows).rows(), units.span(tile.columns).columns()
    rho = tile.keep_lower_(tail_correlation(units, tile, covariance))
    root = height_root(row.h, column.h)
    return tail_nonlinear_part(row.h, column.h, rho).mul_(row.s * root).mul_(column.s * root)


def tail_gradient(units: Units, tile: Tile, covariance: Tensor, weight: Tensor, scratch: Scratch) -> TileGradient:
    """`tile_gradient` to relative accuracy, for float64: s₂∂J/∂h in m₁, s₂/(2s₁) (J − h∂J/∂h − ρD) in s₁²."""
    row, column = units.span(tile.rows).rows(), units.span(tile.columns).columns()
    rho = tile.keep_lower_(tail_correlation(units, tile, covariance))
    root = height_root(row.h, column.h)
    sums = TailSums(*(x.mul_(root).mul_(root) for x in tail_sums(row.h, column.h, rho)))
    weight = weight * (rho != 0)
    rest = sums.nonlinear - rho * sums.excess
    return TileGradient(
        by_covariance=sums.excess,
        by_row_mean=(weight * column.s * sums.by_first).sum(-1),
        by_column_mean=(weight * row.s * sums.by_second).sum(-2),
        by_row_variance=(weight * column.s * (rest - row.h * sums.by_first) / (2 * row.s)).sum(-1),
        by_column_variance=(weight * row.s * (rest - column.h * sums.by_second) / (2 * column.s)).sum(-2),
    )


GradientOfTile = Callable[[Units, Tile, Tensor, Tensor, Scratch], TileGradient]
"""`tile_gradient` or `tail_gradient`."""


def gate_slopes(units: Units) -> tuple[Tensor, Tensor]:
    """Derivatives of Φ(h): φ(h)/s in the mean, −hφ(h)/(2s²) in s²; finite, and 0 for a unit without variance."""
    bell = density(units.h)
    noisy = (units.s > 0) & (bell > 0)
    safe = torch.where(noisy, units.s, torch.ones_like(units.s))
    by_mean = torch.where(noisy, bell / safe, torch.zeros_like(safe))
    largest = torch.finfo(safe.dtype).max
    return by_mean.clamp(max=largest), (-0.5 * units.h * by_mean / safe).clamp(-largest, largest)


WIDEST_TILE = 4096
"""The most columns of a tile."""


@dataclass(frozen=True)
class Chunk:
    """Images that are treated together, and the units that matter for at least one of them."""

    images: slice
    units: Tensor
    """The indices of these units."""
    every_unit: bool
    """Whether these are all units, so that tensors need not be indexed."""

    @property
    def count(self) -> int:
        """How many images."""
        return self.images.stop - self.images.start

    def restrict(self, units: Units) -> Units:
        """The units of this chunk; s = 0 is replaced by 1, since the covariances of such a unit are 0 anyway."""
        s = self.pick(units.s)
        return Units(self.pick(units.h), torch.where(s > 0, s, 1.0))

    def pick(self, tensor: Tensor) -> Tensor:
        """This chunk's part of a tensor (images or 1, units, ...), where 1 is for all images together."""
        part = tensor if tensor.shape[0] == 1 else tensor[self.images]
        return part if self.every_unit else part.index_select(1, self.units)

    def add(self, target: Tensor, value: Tensor) -> None:
        """target[images, units] += value, summed over images where the target is shared."""
        part = target if target.shape[0] == 1 else target[self.images]
        value = value.sum_to_size(part.shape[0], *value.shape[1:])
        if self.every_unit:
            part += value
        else:
            part.index_add_(1, self.units, value)

    def block(self, square: Tensor, rows: slice, columns: slice) -> Tensor:
        """square[images, rows, columns], where rows and columns count this chunk's units; a copy unless it has all."""
        part = square if square.shape[0] == 1 else square[self.images]
        if self.every_unit:
            return part[:, rows, columns]
        return part[:, self.units[rows].unsqueeze(1), self.units[columns]]

    def with_all_units(self, tensor: Tensor) -> Tensor:
        """This chunk's images of a tensor, with all units."""
        return tensor if tensor.shape[0] == 1 else tensor[self.images]

    def add_block(self, square: Tensor, rows: slice, columns: slice, value: Tensor) -> None:
        """square[images, rows, columns] += value."""
        part = square[self.images]
        if self.every_unit:
            part[:, rows, columns] += value
        else:
            part[:, self.units[rows].unsqueeze(1), self.units[columns]] += value


def chunks(relevant: Tensor, images: int, elements: int, shared: bool) -> Iterator[Chunk]:
    """Split images into chunks of at most `elements` pairs, or single images if these have more.

    Images that share one covariance of the pre-activations (`shared`) go up to 16 together, however large, so that it
    is computed once for all of them. `relevant` (images or 1, units) says which units matter.
    """
    units = relevant.shape[1]
    together = max(elements // (units * units), min(16, images) if shared else 1)
    for start in range(0, images, together):
        span = slice(start, min(start + together, images))
        mask = (relevant if relevant.shape[0] == 1 else relevant[span]).any(0)
        index = mask.nonzero().squeeze(-1)
        if len(index):
            yield Chunk(span, index, every_unit=len(index) == units)


def triangle(units: int, elements: int) -> Iterator[Tile]:
    """Tiles that cover every pair row > column, of at most `elements` pairs each where possible.

    The largest come first, so that scratch memory grows no more after them.
    """
    width = min(units, WIDEST_TILE, max(1, elements))
    height = max(1, min(elements // width, max(128, -(-units // 4))))
    height = -(-units // -(-units // height))
    for top in reversed(range(0, units, height)):
        bottom = min(top + height, units)
        for left in range(0, bottom, width):
            yield Tile(slice(top, bottom), slice(left, min(left + width, bottom)))


def images_of(tensor: Tensor, chosen: Tensor) -> Tensor:
    """The chosen images of a tensor, or the tensor itself if all images share it."""
    return tensor if tensor.shape[0] == 1 else tensor[chosen]


def tile_elements(memory_budget: int, dtype: torch.dtype) -> int:
    """How many pairs a tile may have within so many bytes of scratch memory."""
    return max(1, memory_budget // (SLOTS * dtype.itemsize))


class UnitGradients:
    """Derivatives in each unit's mean and variance, summed over the pairs it is part of: (images, units)."""

    def __init__(self, images: int, units: Units) -> None:
        self.by_mean = units.h.new_zeros(images, units.h.shape[1])
        self.by_variance = units.h.new_zeros(images, units.h.shape[1])

    def add_tile(self, slopes: TileGradient, tile: Tile) -> None:
        """Add the derivatives of one tile."""
        self.by_mean[:, tile.rows] += slopes.by_row_mean
        self.by_mean[:, tile.columns] += slopes.by_column_mean
        self.by_variance[:, tile.rows] += slopes.by_row_variance
        self.by_variance[:, tile.columns] += slopes.by_column_variance


Dims = tuple[int | None, ...]
"""The vmapped dimension of each input, None for an input that is not vmapped."""


class OfImages(Function):
    """A function of tensors whose dimension 0 is images, N or 1 (shared), with derivatives in reverse mode only."""

    @classmethod
    def vmap(cls, info: Any, in_dims: Dims, *inputs: Any) -> tuple[Tensor, int]:
        """Run once with the vmapped dimension folded into the images; shared inputs stay shared."""
        size, images = info.batch_size, _images(in_dims, inputs)
        folded = [
            x if d is None and (not isinstance(x, Tensor) or x.shape[0] == 1) else _fold(x, d, size, images)
            for x, d in zip(inputs, in_dims, strict=True)
        ]
        return cls.apply(*folded).unflatten(0, (size, images)), 0

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise RuntimeError(
            "forward-mode derivatives (torch.func.jvp, jacfwd) of the exact ReLU covariance are not available: "
            "use reverse mode (backward, torch.func.grad, vjp or jacrev)"
        )


class GradientOfImages(Function):
    """A gradient as a function (grad, *tensors, *options), one result for each of the first tensors."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise RuntimeError(
            "second derivatives of the exact ReLU covariance are not available: differentiate it once only, "
            "or differentiate an output mean, which has all derivatives"
        )

    @classmethod
    def vmap(cls, info: Any, in_dims: Dims, *inputs: Any) -> tuple[Any, Any]:
        """Run once with the vmapped dimension folded into the images.

        Every vmapped call needs gradients of its own, so inside no input stays shared; the gradient of an input that
        images share is summed over them afterwards.
        """
        size, images = info.batch_size, _images(in_dims, inputs)
        folded = [
            _fold(x, d, size, images) if isinstance(x, Tensor) else x for x, d in zip(inputs, in_dims, strict=True)
        ]
        outputs = tuple(value.unflatten(0, (size, images)) for value in cls.apply(*folded))
        own_images = [_own_images(x, d) for x, d in zip(inputs, in_dims, strict=True) if isinstance(x, Tensor)][1:]
        reduced = tuple(
            value.sum(1, keepdim=True) if own < images else value
            for value, own in zip(outputs, own_images, strict=False)
        )
        return reduced, (0,) * len(reduced)


def _own_images(tensor: Tensor, dim: int | None) -> int:
    """How many images a tensor has: N, or 1 if they share it."""
    return tensor.shape[0] if dim is None else tensor.movedim(dim, 0).shape[1]


def _images(in_dims: Dims, inputs: tuple[Any, ...]) -> int:
    return max(_own_images(x, d) for x, d in zip(inputs, in_dims, strict=True) if isinstance(x, Tensor))


def _fold(tensor: Tensor, dim: int | None, size: int, images: int) -> Tensor:
    """(size, N or 1, ...) or (N or 1, ...) → (size·N, ...)."""
    unfolded = tensor.unsqueeze(0) if dim is None else tensor.movedim(dim, 0)
    return unfolded.expand(size, images, *unfolded.shape[2:]).reshape(size * images, *unfolded.shape[2:])
