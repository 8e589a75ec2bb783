"""Triton kernels for the covariance of a layer of ReLUs: pairs stay in registers, only results are written to memory.

A layer is described by a table with a row for each quantity and a column for each unit (`units_kernel`). Tiles of
SIDE×SIDE pairs are evaluated independently. Most pairs get J from the series of `bivariate`, with as many terms as the
tile's largest correlation needs. The pairs beyond the series' reach, few in most tiles, are gathered and evaluated
together by the nodes of `quadrature_rules`. This module has what all kernels share, and the kernels that need whole
rows, for products and gradients. Those that need the lower triangle only are in `forward_kernels`.

The plain versions in `relu.covariance` and `relu.quadratic_form` define what these kernels compute. Without Triton this
module can be imported, but not used.
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from typing import Any

_found = find_spec("triton")
PRESENT = _found is not None and _found.origin is not None
"""Whether Triton is installed; a folder of that name, which Python would import too, has no origin."""

if PRESENT:
    triton: Any = import_module("triton")
    tl: Any = import_module("triton.language")
    jit, constexpr = triton.jit, tl.constexpr
else:
    tl: Any = None
    jit, constexpr = (lambda kernel: kernel), int

INTERPRETED = constexpr(os.environ.get("TRITON_INTERPRET") == "1")
"""Whether Triton's interpreter runs the kernels on CPU tensors, which is slow, and for tests."""

# rows of the table of units; those of the series' aₙ follow
MEAN = constexpr(0)  # h
DEVIATION = constexpr(1)  # s
INVERSE = constexpr(2)  # 1/s; 0 for a unit without variance, linear or dead, so that its correlations are 0
GATE = constexpr(3)  # Φ(h)
OWN = constexpr(4)  # the unit's own variance
FIRST = constexpr(5)  # a₀, then a₁, a₂, …: 0 for such a unit

BLOCK = constexpr(64)
AT_ONCE = constexpr(
    4
)  # terms of a series are loaded so many at a time; TERMS and every number of terms are multiples of it


@jit
def standardized(m, s):
    """h = m/s in float64, as `normal.standardize` but cut to ±40."""
    noisy = tl.abs(m) < 40 * s
    certain = tl.where(m > 0, 40.0, tl.where(m < 0, -40.0, 0.0))
    return tl.where(noisy, m / tl.where(noisy, s, 1.0), certain)


@jit
def tail_moments(x):
    """M₀, M₁ and M₂ of `marginal.tail_moments` in float64, for x ≥ 3."""
    ratio = 0.5 * (tl.sqrt(x * x + 164) - x)
    for n in range(38):
        ratio = (40 - n) / (x + ratio)
    second = 2 / (x + ratio)
    first = 1 / (x + second)
    zeroth = 1 / (x + first)
    return zeroth, first * zeroth, second * first * zeroth


@jit
def units_kernel(
    mean, variance, table, fault, steps,
    units, mean_by_image, mean_by_unit, variance_by_image, variance_by_unit, saturation, TERMS: constexpr,
):  # fmt: skip
    """The table of a layer, in float64 throughout; `fault` becomes 1 for a NaN mean, 2 for a variance not ≥ 0."""
    image = tl.program_id(1)
    unit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = unit < units
    m = tl.load(mean + image * mean_by_image + unit * mean_by_unit, mask=inside, other=0).to(tl.float64)
    square = tl.load(variance + image * variance_by_image + unit * variance_by_unit, mask=inside, other=1)
    square = square.to(tl.float64)
    code = tl.max(tl.where(square >= 0, tl.where(m == m, 0, 1), 2))
    if code > 0:
        tl.atomic_max(fault, code)
    s = tl.sqrt(tl.maximum(square, 0.0))
    h = standardized(m, s)

    x = tl.abs(h)
    root = tl.exp(-0.25 * x * x)
    bell = root * root * 0.3989422804014327
    zeroth, first, second = tail_moments(tl.maximum(x, 3.0))
    tail = x > 3
    middle = tl.erf(x * 0.7071067811865476)
    below = tl.where(tail, bell * zeroth, 0.5 * (1 - middle))
    near = (1 + x * x) * below - x * bell - (bell - x * below) * (bell - x * below)
    scaled = s * root  # underflows later than s²·bell's factors do
    once = scaled * root * first * 0.3989422804014327
    beyond = scaled * scaled * (second * 0.3989422804014327) - once * once
    own = tl.where(tail, beyond, square * near) + tl.where(h > 0, square * middle, 0.0)

    active = inside & (s > 0) & (x <= saturation)
    block = image.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    here = table + block * BLOCK * (FIRST + TERMS) + tl.arange(0, BLOCK)
    kind = table.dtype.element_ty
    tl.store(here + MEAN * BLOCK, h.to(kind))
    tl.store(here + DEVIATION * BLOCK, tl.where(inside, s, 0.0).to(kind))
    tl.store(here + INVERSE * BLOCK, tl.where(active, 1 / tl.where(active, s, 1.0), 0.0).to(kind))
    tl.store(here + GATE * BLOCK, tl.where(inside, tl.where(h > 0, 1 - below, below), 0.0).to(kind))
    tl.store(here + OWN * BLOCK, tl.where(inside, own, 0.0).to(kind))
    previous = tl.zeros((BLOCK,), tl.float64)
    current = tl.where(active, bell * 0.7071067811865476, 0.0)
    for n in tl.static_range(TERMS):
        tl.store(here + (FIRST + n) * BLOCK, current.to(kind))
        following = tl.load(steps + 2 * n) * h * current - tl.load(steps + 2 * n + 1) * previous
        previous = current
        current = following


@jit
def columns_of(table, image, unit, units, TERMS: constexpr):
    """Pointers to the columns of some units in the table; past the last unit, up to a full block, columns are 0."""
    blocks = (units + BLOCK - 1) // BLOCK
    block = image * blocks + unit // BLOCK
    return table + block.to(tl.int64) * (BLOCK * (FIRST + TERMS)) + unit % BLOCK


@jit
def quantity(column, row):
    """One row of the table for these units."""
    return tl.load(column + row * BLOCK)


@jit
def reciprocal(x):
    """1/x; in float32 to two units in the last place and for x between 1e-37 and 1e37, in one instruction."""
    if INTERPRETED or x.dtype == tl.float64:
        return 1 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@jit
def terms_for(limits, largest, LENGTH: constexpr):
    """How many terms of a series are enough up to the correlation `largest`, rounded up to a multiple of AT_ONCE."""
    return (how_many(limits, largest, LENGTH) + AT_ONCE - 1) // AT_ONCE * AT_ONCE


@jit
def how_many(limits, largest, LENGTH: constexpr):
    """How many entries of a table of limits (padded with 2) are below `largest`."""
    return tl.sum((tl.load(limits + tl.arange(0, LENGTH)) < largest).to(tl.int32))


@jit
def covariances_of_tile(corner, by_row, units, i, j, SIDE: constexpr):
    """The covariances of a tile that starts at `corner` of a matrix whose rows are `by_row` apart; 0 outside."""
    at = corner + tl.arange(0, SIDE)[:, None] * by_row + tl.arange(0, SIDE)[None, :]
    return tl.load(at, mask=(i < units)[:, None] & (j < units)[None, :], other=0)


@jit
def correlations(c, row, column):
    """ρ = c/(s₁s₂), cut to [−1, 1] against rounding, and 0 for pairs with a unit that is not active."""
    rho = c * quantity(row, INVERSE)[:, None] * quantity(column, INVERSE)[None, :]
    return tl.minimum(tl.maximum(rho, -1.0), 1.0)


@jit
def whole_covariance(c, nonlinear, row, column):
    """cΦ(h)Φ(k) + s₁s₂J; NaN where c is."""
    gates = quantity(row, GATE)[:, None] * quantity(column, GATE)[None, :]
    return c * gates + nonlinear * quantity(row, DEVIATION)[:, None] * quantity(column, DEVIATION)[None, :]


@jit
def nonlinear_series(rho, row, column, terms):
    """J by the first terms of the series, by Horner's rule; AT_ONCE terms are loaded together."""
    total = tl.zeros_like(rho)
    for rest in range(terms - AT_ONCE, -1, -AT_ONCE):
        row_rest = row + (FIRST + rest) * BLOCK
        column_rest = column + (FIRST + rest) * BLOCK
        for back in tl.static_range(AT_ONCE):
            a = quantity(row_rest, AT_ONCE - 1 - back)
            b = quantity(column_rest, AT_ONCE - 1 - back)
            total = total * rho + a[:, None] * b[None, :]
    return total * rho * rho


@jit
def excess_series(rho, row, column, terms):
    """D by the first terms of the series."""
    total = tl.zeros_like(rho)
    for last in range(terms - 1, -1, -AT_ONCE):
        for back in tl.static_range(AT_ONCE):
            a = quantity(row, FIRST + last - back) * (last - back + 2)
            b = quantity(column, FIRST + last - back)
            total = total * rho + a[:, None] * b[None, :]
    return total * rho


@jit
def density(x):
    """φ(x)."""
    return tl.exp(-0.5 * x * x) * 0.3989422804014327


@jit
def distribution(x):
    """Φ(x), to rounding in absolute terms."""
    return 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)


@jit
def conditional(h, k, rho):
    """(h−ρk)/q, (k−ρh)/q and q = √(1−ρ²), as in `bivariate.conditional`."""
    gap = 1 - tl.abs(rho)
    flip = tl.where(rho < 0, -1.0, 1.0).to(rho.dtype)
    q = tl.sqrt(gap + gap * tl.abs(rho))
    divisor = tl.maximum(q, 1e-30)
    slack = gap * flip
    return (h - flip * k + slack * k) / divisor, (k - flip * h + slack * h) / divisor, q


@jit
def owen_t(height, reach, owen, OWEN: constexpr):
    """Owen's T(h, r/h), as in the module `normal`; `owen` holds (node², weight)."""
    a = tl.abs(height)
    b = tl.abs(reach)
    inner = tl.maximum(a, b)
    slope = tl.minimum(a, b) / tl.maximum(inner, 1e-30)
    square = slope * slope
    decay = -0.5 * inner * inner
    total = tl.zeros_like(slope)
    for n in range(OWEN):
        spread = 1 + square * tl.load(owen + 2 * n)
        total += tl.load(owen + 2 * n + 1) * tl.exp(decay * spread) / spread
    direct = total * slope * 0.15915494309189535
    below_a = distribution(-a)
    below_b = distribution(-b)
    swapped = 0.5 * (below_a + below_b) - below_a * below_b - direct
    value = tl.where(b > a, swapped, direct)
    return tl.where((height < 0) != (reach < 0), -value, value)


@jit
def excess_by_owen(h, k, rho, owen, OWEN: constexpr):
    """D for any correlation, as in `bivariate.excess_by_owen`."""
    origin = (tl.abs(h) < 1e-30) & (tl.abs(k) < 1e-30)
    h = tl.where(origin, 1e-30, h).to(rho.dtype)
    k = tl.where(origin, 1e-30, k).to(rho.dtype)
    given_k, given_h, _ = conditional(h, k, rho)
    below_h = distribution(h)
    below_k = distribution(k)
    opposite = tl.where((h < 0) != (k < 0), 0.5, 0.0)
    probability = 0.5 * (below_h + below_k) - owen_t(h, given_h, owen, OWEN) - owen_t(k, given_k, owen, OWEN) - opposite
    return probability - below_h * below_k


@jit
def nonlinear_nodes(h, k, rho, nodes, start, stop):
    """J by quadrature, node by node: the formula of `bivariate`; `nodes` holds (u, weight·(1−u), 1−u)."""
    below = 1 - rho
    above = 1 + rho
    root = tl.sqrt(below * above)
    scale = 1 / (1 + root)
    below = (below + root) * scale
    above = (above + root) * scale
    extent = rho * scale
    square = extent * extent
    plus = (h + k) * (h + k) * -0.125
    minus = (h - k) * (h - k) * -0.125
    total = tl.zeros_like(rho)
    for n in range(start, stop):
        u = tl.load(nodes + 3 * n)
        weight = tl.load(nodes + 3 * n + 1)
        v = tl.load(nodes + 3 * n + 2)
        low = below + extent * v
        high = above - extent * v
        spread = 1 + square * (u * u)
        inverse = reciprocal(low * high * spread)
        flat = inverse * low * high
        steep = inverse * spread
        ratio = low * low * steep
        other = high * high * steep
        height = tl.exp(plus + minus + plus * ratio * ratio + minus * other * other)
        total += weight * (1 - square * u) * flat * flat * height
    return total * square * reciprocal(1 + square) * 0.6366197723675814


@jit
def rule_for(largest, node_limits, rules, LENGTH: constexpr):
    """The first node, and the end of the nodes, of the rule that is enough up to the correlation `largest`."""
    rule = how_many(node_limits, largest, LENGTH)
    return tl.load(rules + rule), tl.load(rules + rule + 1)


@jit
def write_list(patch, rho, beyond, SIDE: constexpr):
    """List a tile's pairs that are `beyond`, with their places and correlations, in the 2·SIDE² numbers of `patch`.

    Returns the number of each pair in the list, and the length of the list.
    """
    in_row = tl.sum(beyond.to(tl.int32), 1)
    number = tl.cumsum(beyond.to(tl.int32), 1) + (tl.cumsum(in_row, 0) - in_row)[:, None] - 1
    place = tl.arange(0, SIDE)[:, None] * SIDE + tl.arange(0, SIDE)[None, :]
    tl.debug_barrier()
    tl.store(patch + number, place.to(rho.dtype), mask=beyond)
    tl.store(patch + SIDE * SIDE + number, rho, mask=beyond)
    tl.debug_barrier()
    return number, tl.sum(in_row, 0)


@jit
def listed_pairs(
    patch, lane, listed, table, image, top, left, units, nodes, start, stop, TERMS: constexpr, SIDE: constexpr
):
    """The units of some pairs of a list, their columns in the table, and the pairs' J."""
    place = tl.load(patch + lane, mask=listed, other=0).to(tl.int32)
    rho = tl.load(patch + SIDE * SIDE + lane, mask=listed, other=0)
    i = top + place // SIDE
    j = left + place % SIDE
    row = columns_of(table, image, i, units, TERMS)
    column = columns_of(table, image, j, units, TERMS)
    return i, j, row, column, nonlinear_nodes(quantity(row, MEAN), quantity(column, MEAN), rho, nodes, start, stop)


@jit
def product_kernel(
    table, covariance, weights, product, patches, nodes, rules, node_limits, series_limits, reach,
    units, outputs, origin, stop, blocks, covariance_by_image, covariance_by_row, weights_by_image,
    TERMS: constexpr, NODE_LIMITS: constexpr, LIMITS: constexpr, LANES: constexpr, SIDE: constexpr,
):  # fmt: skip
    """K Bᵀ in parts to be summed later, (parts, images, outputs, units), each from `blocks` blocks of columns.

    `covariance` holds only the rows from `origin` to `stop`.
    """
    part = tl.program_id(1)
    image = tl.program_id(2)
    top = origin + tl.program_id(0) * SIDE
    i = top + tl.arange(0, SIDE)
    row = columns_of(table, image, i, units, TERMS)
    strip = covariance + image.to(tl.int64) * covariance_by_image + (top - origin).to(tl.int64) * covariance_by_row
    program = (image.to(tl.int64) * tl.num_programs(1) + part) * tl.num_programs(0) + tl.program_id(0)
    patch = patches + program * (2 * SIDE * SIDE)
    mine = product + (part * tl.num_programs(2) + image).to(tl.int64) * outputs * units
    for block in range(part * blocks, min((part + 1) * blocks, (units + SIDE - 1) // SIDE)):
        left = block * SIDE
        j = left + tl.arange(0, SIDE)
        column = columns_of(table, image, j, units, TERMS)
        apart = i[:, None] != j[None, :]
        c = covariances_of_tile(strip + left, covariance_by_row, units, i, j, SIDE)
        rho = tl.where(apart, correlations(c, row, column), 0.0)
        largest = tl.max(tl.max(tl.abs(rho), 1), 0)
        nonlinear = nonlinear_series(rho, row, column, terms_for(series_limits, tl.minimum(largest, reach), LIMITS))
        if largest > reach:
            beyond = tl.abs(rho) > reach
            number, count = write_list(patch, rho, beyond, SIDE)
            start, end = rule_for(largest, node_limits, rules, NODE_LIMITS)
            for done in range(0, count, LANES):
                lane = done + tl.arange(0, LANES)
                _, _, _, _, found = listed_pairs(
                    patch, lane, lane < count, table, image, top, left, units, nodes, start, end, TERMS, SIDE
                )
                tl.store(patch + lane, found, mask=lane < count)
            tl.debug_barrier()
            nonlinear = tl.where(beyond, tl.load(patch + number, mask=beyond, other=0), nonlinear)
        value = tl.where(apart, whole_covariance(c, nonlinear, row, column), quantity(row, OWN)[:, None])
        tl.debug_barrier()
        for d in range(outputs):
            b = tl.load(weights + image.to(tl.int64) * weights_by_image + d * units + j, mask=j < units, other=0)
            before = tl.load(mine + d * units + i, mask=i < stop, other=0)
            tl.store(mine + d * units + i, before + tl.sum(value * b[None, :], 1), mask=i < stop)
        tl.debug_barrier()


@jit
def gradient_kernel(
    table, covariance, weights, partners, by_covariance, sums, owen, excess_limits, reach,
    units, outputs, origin, stop, blocks,
    covariance_by_image, covariance_by_row, weights_by_image, partners_by_image,
    TERMS: constexpr, LIMITS: constexpr, OWEN: constexpr, FACTORED: constexpr, SIDE: constexpr,
):  # fmt: skip
    """Derivatives of Σ wᵢⱼKᵢⱼ over the ordered pairs of different units, in parts to be summed later.

    w is `weights`, (images, units, units); or, if FACTORED, ½ weightsᵀ·partners, which is symmetric, with both (images,
    outputs, units). `by_covariance` gets wᵢⱼ·P(zᵢ>0, zⱼ>0). `sums`, (3, parts, images, units), gets the
    derivatives of the nonlinear parts in each unit's mean and variance, and of the separable parts in its gate.
    `covariance` and `by_covariance` hold only the rows from `origin` to `stop`.
    """
    part = tl.program_id(1)
    image = tl.program_id(2)
    top = origin + tl.program_id(0) * SIDE
    i = top + tl.arange(0, SIDE)
    row = columns_of(table, image, i, units, TERMS)
    strip = covariance + image.to(tl.int64) * covariance_by_image + (top - origin).to(tl.int64) * covariance_by_row
    h = quantity(row, MEAN)[:, None]
    gate_i = quantity(row, GATE)[:, None]
    phi_h = density(h)
    by_mean = tl.zeros((SIDE,), h.dtype)
    by_variance = tl.zeros((SIDE,), h.dtype)
    by_gate = tl.zeros((SIDE,), h.dtype)
    for block in range(part * blocks, min((part + 1) * blocks, (units + SIDE - 1) // SIDE)):
        left = block * SIDE
        j = left + tl.arange(0, SIDE)
        inside = (i < units)[:, None] & (j < units)[None, :]
        apart = inside & (i[:, None] != j[None, :])
        c = covariances_of_tile(strip + left, covariance_by_row, units, i, j, SIDE)
        column = columns_of(table, image, j, units, TERMS)
        rho = tl.where(apart, correlations(c, row, column), 0.0)
        wanted = rho != 0
        k = quantity(column, MEAN)[None, :]
        s = quantity(column, DEVIATION)[None, :]
        gate_j = quantity(column, GATE)[None, :]
        if FACTORED:
            weight = tl.zeros_like(rho)
            for d in range(outputs):
                a = tl.load(weights + image.to(tl.int64) * weights_by_image + d * units + i, mask=i < units, other=0)
                b = tl.load(partners + image.to(tl.int64) * partners_by_image + d * units + j, mask=j < units, other=0)
                weight += a[:, None] * b[None, :]
            weight = tl.where(apart, weight, 0.0)
            entry = 0.5 * weight
        else:
            square = weights + image.to(tl.int64) * weights_by_image
            row_i = i.to(tl.int64)[:, None]
            row_j = j.to(tl.int64)[None, :]
            entry = tl.load(square + row_i * units + j[None, :], mask=apart, other=0)
            weight = entry + tl.load(square + row_j * units + i[:, None], mask=apart, other=0)

        size = tl.abs(rho)
        largest = tl.max(tl.max(size, 1), 0)
        terms = terms_for(excess_limits, tl.minimum(largest, reach), LIMITS)
        excess = excess_series(rho, row, column, terms)
        if largest > reach:
            excess = tl.where(size > reach, excess_by_owen(h, k, rho, owen, OWEN), excess)
        excess = tl.where(wanted, excess, 0.0)
        at = (top - origin + tl.arange(0, SIDE)).to(tl.int64)[:, None] * units + j[None, :]
        probability = excess + gate_i * gate_j
        target = by_covariance + image.to(tl.int64) * (stop - origin) * units
        tl.store(target + at, entry * probability, mask=inside & (i[:, None] < stop))

        phi_k = density(k)
        a, b, q = conditional(h, k, rho)
        change_h = distribution(a) - distribution(h)
        change_k = distribution(b) - distribution(k)
        common = phi_h * (q * density(b) - phi_k)
        pulled = tl.where(wanted, weight * s, 0.0)
        by_mean += tl.sum(pulled * (k * excess + phi_k * change_h + rho * phi_h * change_k), 1)
        by_variance += tl.sum(pulled * (phi_h * (k - rho * h) * change_k + common), 1)
        by_gate += tl.sum(weight * c * gate_j, 1)
    mine = sums + (part * tl.num_programs(2) + image).to(tl.int64) * units + i
    apart_by = tl.num_programs(1).to(tl.int64) * tl.num_programs(2) * units
    tl.store(mine, by_mean, mask=i < stop)
    tl.store(mine + apart_by, by_variance * quantity(row, INVERSE) * 0.5, mask=i < stop)
    tl.store(mine + 2 * apart_by, by_gate, mask=i < stop)
