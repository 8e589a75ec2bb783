"""Triton kernels for the lower triangle of a layer's covariance, stored with its mirror image or summed into a form.

A program takes a run of tiles, row by row, and loads the covariances of the next tile before it evaluates the current
one. Pairs with correlations that are too strong for the evaluation of the whole tile, few in most tiles, are marked and
left to the `strong` kernels, which evaluate those of many tiles together. `tail_kernel` computes pairs with a unit that
is hardly ever open again, to relative accuracy.
"""

from __future__ import annotations

from netmoments.relu import tiles
from netmoments.relu.triton.kernels import (
    BLOCK,
    DEVIATION,
    FIRST,
    GATE,
    INTERPRETED,
    INVERSE,
    MEAN,
    OWN,
    columns_of,
    constexpr,
    jit,
    nonlinear_nodes,
    nonlinear_series,
    quantity,
    reciprocal,
    standardized,
    tl,
    whole_covariance,
)

BINS = constexpr(512)
"""The parts of [0, 1], a power of two, that have a row in tables by correlation; another row is for 1 itself."""

TERMS_OF_BIN = constexpr(0)  # columns of such a table
START_OF_BIN = constexpr(1)
STOP_OF_BIN = constexpr(2)
COLUMNS_OF_BIN = constexpr(3)

REACH = constexpr(tiles.REACH)

LANES = constexpr(128)
"""How many strongly correlated pairs a program evaluates at a time."""


@jit
def tile_position(index):
    """Block row and block column of a tile of the lower triangle, counted row by row."""
    row = ((tl.sqrt(8.0 * index.to(tl.float32) + 1.0) - 1.0) * 0.5).to(tl.int32)
    row = tl.where(row * (row + 1) // 2 > index, row - 1, row)
    row = tl.where((row + 1) * (row + 2) // 2 <= index, row + 1, row)
    return row, index - row * (row + 1) // 2


@jit
def following(row, column):
    """Position of the tile after this one."""
    return tl.where(column == row, row + 1, row), tl.where(column == row, 0, column + 1)


@jit
def bin_of(lookup, size):
    """The row of a table for the correlation `size`, from 0 to 1: the product is exact."""
    return lookup + (size * BINS).to(tl.int32) * COLUMNS_OF_BIN


@jit
def terms_up_to(lookup, size):
    """How many terms of the series are enough up to the correlation `size`, a multiple of AT_ONCE."""
    return tl.load(bin_of(lookup, size) + TERMS_OF_BIN)


@jit
def rule_up_to(lookup, size):
    """The first node, and the end of the nodes, of a rule that is enough up to the correlation `size`."""
    row = bin_of(lookup, size)
    return tl.load(row + START_OF_BIN), tl.load(row + STOP_OF_BIN)


@jit
def largest_of(size):
    """The largest of some numbers ≥ 0; it may be NaN if one of them is.

    The bits of float32 numbers ≥ 0 are ordered in the same way as integers, which are compared faster.
    """
    if size.dtype == tl.float32:
        return tl.max(size.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    else:
        return tl.max(size)


@jit
def columns_of_side(table, image, start, units, TERMS: constexpr, SIDE: constexpr):
    """`columns_of` the units along a side of a tile, from `start` on; SIDE divides BLOCK, so all are in one block."""
    nth = start // BLOCK
    block = image * ((units + BLOCK - 1) // BLOCK) + nth
    return table + block.to(tl.int64) * (BLOCK * (FIRST + TERMS)) + (start - nth * BLOCK) + tl.arange(0, SIDE)


@jit
def covariances_ahead(source, by_row, top, left, units, wanted, SIDE: constexpr, EVEN: constexpr):
    """The covariances of a tile, loaded long before they are used; 0 outside of the layer, and all 0 unless `wanted`.

    With EVEN, tiles divide the layer, so that no place is outside.
    """
    i = tl.arange(0, SIDE)
    at = source + top.to(tl.int64) * by_row + left + i[:, None] * by_row + i[None, :]
    if EVEN:
        return tl.load(at, mask=wanted, other=0)
    else:
        return tl.load(at, mask=wanted & (top + i < units)[:, None] & (left + i < units)[None, :], other=0)


@jit
def moderate_nodes(rho, row, column, nodes, start, stop):
    """J by quadrature with fewer operations than `nonlinear_nodes`, for |ρ| ≤ 0.9, say, where 1 − τ⁴ loses no digits.

    With τ = uT and s = (1+τ²)/(1−τ²) = 2/(1−τ²) − 1 the exponent is s·(−(h²+k²)s/2 + 2hkτ/(1−τ²)).
    """
    h = quantity(row, MEAN)[:, None]
    k = quantity(column, MEAN)[None, :]
    extent = rho * reciprocal(1 + tl.sqrt(tl.maximum(1 - rho * rho, 0.0)))
    square = extent * extent
    even = (h * h + k * k) * -0.7213475204444817
    odd = h * k * extent * 1.4426950408889634
    total = tl.zeros_like(rho)
    for n in range(start, stop):
        u = tl.load(nodes + 3 * n)
        weight = tl.load(nodes + 3 * n + 1)
        y = square * (u * u)
        inverse = reciprocal(1 - y * y)
        twice = inverse + inverse
        over_minus = twice + twice * y
        over_plus = inverse - inverse * y
        height = tl.exp2((over_minus - 1) * (over_minus * (even + odd * u) - even))
        total += (weight - square * (weight * u)) * over_plus * over_plus * height
    return total * square * reciprocal(1 + square) * 0.6366197723675814


@jit
def mark(chosen, marks, tile, SIDE: constexpr):
    """Mark the chosen pairs of a tile by a bit for each place, row by row, from the lowest bit of a word upwards."""
    WORD: constexpr = min(SIDE, 32)
    WORDS: constexpr = SIDE * SIDE // WORD
    bits = tl.reshape(chosen, (WORDS, WORD)).to(tl.int32) << tl.arange(0, WORD)[None, :]
    tl.store(marks + tile * WORDS + tl.arange(0, WORDS), tl.sum(bits, 1))


@jit
def weak_part(
    rho, row, column, lookup, series_reach, nodes, reach, marked, marks, tile, BY_NODES: constexpr, SIDE: constexpr
):
    """J of a tile's pairs with |ρ| ≤ `reach`; 0 for the others, and NaN where ρ is NaN.

    It comes from the series up to `series_reach`, and beyond from quadrature, if BY_NODES. The first of the programs
    that share the tile writes into `marked` whether there are other pairs, and into `marks` which.
    """
    size = tl.abs(rho)
    largest = largest_of(size)
    within = largest <= reach
    if tl.program_id(2) == 0:
        tl.store(marked + tile, tl.where(within, 0, 1))
        if not within:
            mark(size > reach, marks, tile, SIDE)
    largest = tl.where(within, largest, reach)
    if BY_NODES:
        if largest > series_reach:
            start, stop = rule_up_to(lookup, largest)
            value = moderate_nodes(rho, row, column, nodes, start, stop)
        else:
            value = nonlinear_series(rho, row, column, terms_up_to(lookup, largest))
    else:
        value = nonlinear_series(rho, row, column, terms_up_to(lookup, largest))
    return tl.where(size > reach, 0.0, value)


@jit
def covariance_kernel(
    table, covariance, result, marked, marks, lookup, series_reach, nodes, reach,
    units, covariance_by_image, tiles, run,
    TERMS: constexpr, BY_NODES: constexpr, SIDE: constexpr, EVEN: constexpr,
):  # fmt: skip
    """Cov(relu z) of a layer without the nonlinear parts of strongly correlated pairs.

    A program takes `run` tiles of the lower triangle, and stores each with its mirror image.
    """
    image = tl.program_id(1)
    source = covariance + image.to(tl.int64) * covariance_by_image
    square = result + image.to(tl.int64) * units * units
    inner = tl.arange(0, SIDE)[:, None] * units + tl.arange(0, SIDE)[None, :]
    first = tl.program_id(0) * run
    end = min(first + run, tiles)
    block_row, block_column = tile_position(first)
    ahead = covariances_ahead(source, units, block_row * SIDE, block_column * SIDE, units, first < end, SIDE, EVEN)
    for tile in range(first, end):
        top = block_row * SIDE
        left = block_column * SIDE
        i = top + tl.arange(0, SIDE)
        j = left + tl.arange(0, SIDE)
        c = tl.where(i[:, None] > j[None, :], ahead, 0.0)
        block_row, block_column = following(block_row, block_column)
        ahead = covariances_ahead(
            source, units, block_row * SIDE, block_column * SIDE, units, tile + 1 < end, SIDE, EVEN
        )
        row = columns_of_side(table, image, top, units, TERMS, SIDE)
        column = columns_of_side(table, image, left, units, TERMS, SIDE)
        rho = c * quantity(row, INVERSE)[:, None] * quantity(column, INVERSE)[None, :]
        nonlinear = weak_part(
            rho, row, column, lookup, series_reach, nodes, reach, marked, marks, image.to(tl.int64) * tiles + tile,
            BY_NODES, SIDE,
        )  # fmt: skip
        value = whole_covariance(c, nonlinear, row, column)
        if top == left:
            value = tl.where(i[:, None] == j[None, :], quantity(row, OWN)[:, None], value)
            value = tl.where(i[:, None] >= j[None, :], value, tl.trans(value))
        here = square + top.to(tl.int64) * units + left + inner
        opposite = square + left.to(tl.int64) * units + top + inner
        if EVEN:
            tl.store(here, value)
            tl.store(opposite, tl.trans(value))
        else:
            tl.store(here, value, mask=(i < units)[:, None] & (j < units)[None, :])
            tl.store(opposite, tl.trans(value), mask=(j < units)[:, None] & (i < units)[None, :])


@jit
def weights_of(weights, unit, output, units, outputs, EVEN: constexpr):
    """The weights B of some outputs and units; 0 outside of them."""
    inside = (output < outputs)[:, None]
    if not EVEN:
        inside = inside & (unit < units)[None, :]
    return tl.load(weights + output[:, None] * units + unit[None, :], mask=inside, other=0)


@jit
def high_and_low(x):
    """A float32 as the sum of two numbers: x rounded to the 11 bits that tensor cores read, and the rest."""
    high = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return high, x - high


@jit
def full_product(a, b, PRECISION: constexpr):
    """a bᵀ; "tf32x3" is for float32 on tensor cores, three products of high and low parts, and "ieee" for any dtype."""
    if PRECISION == "tf32x3":
        a_high, a_low = high_and_low(a)
        b_high, b_low = high_and_low(b)
        product = tl.dot(a_low, tl.trans(b_high), input_precision="tf32")
        product = tl.dot(a_high, tl.trans(b_low), product, input_precision="tf32")
        return tl.dot(a_high, tl.trans(b_high), product, input_precision="tf32")
    else:
        return tl.dot(a, tl.trans(b), input_precision=PRECISION, out_dtype=a.dtype)


@jit
def diagonal_kernel(
    table, covariance, weights, sums, marked, marks, lookup, series_reach, nodes, reach,
    units, outputs, first_tile, origin, covariance_by_image, covariance_by_row, weights_by_image,
    sums_by_image, sums_by_program, tiles, run,
    TERMS: constexpr, BY_NODES: constexpr, SIDE: constexpr, EVEN: constexpr,
    OUTPUTS: constexpr, PRECISION: constexpr,
):  # fmt: skip
    """The diagonal of B K Bᵀ, without the nonlinear parts of strongly correlated pairs, in `sums` to be summed later.

    These are (images, programs, outputs); a program takes a run of tiles of the lower triangle, with their mirror
    images, and OUTPUTS outputs. `covariance` holds only the rows from `origin` on, which start with tile `first_tile`.
    PRECISION is that of the products of a tile; all else is summed in float64.
    """
    image = tl.program_id(1)
    source = covariance + image.to(tl.int64) * covariance_by_image - origin.to(tl.int64) * covariance_by_row
    output = tl.program_id(2) * OUTPUTS + tl.arange(0, OUTPUTS)
    weights += image.to(tl.int64) * weights_by_image
    first = tl.program_id(0) * run
    end = min(first + run, tiles)
    block_row, block_column = tile_position(first_tile + first)
    ahead = covariances_ahead(
        source, covariance_by_row, block_row * SIDE, block_column * SIDE, units, first < end, SIDE, EVEN
    )
    total = tl.zeros((OUTPUTS, SIDE), tl.float64)
    for tile in range(first, end):
        top = block_row * SIDE
        left = block_column * SIDE
        i = top + tl.arange(0, SIDE)
        j = left + tl.arange(0, SIDE)
        c = tl.where(i[:, None] > j[None, :], ahead, 0.0)
        block_row, block_column = following(block_row, block_column)
        ahead = covariances_ahead(
            source, covariance_by_row, block_row * SIDE, block_column * SIDE, units, tile + 1 < end, SIDE, EVEN
        )
        row = columns_of_side(table, image, top, units, TERMS, SIDE)
        column = columns_of_side(table, image, left, units, TERMS, SIDE)
        rho = c * quantity(row, INVERSE)[:, None] * quantity(column, INVERSE)[None, :]
        nonlinear = weak_part(
            rho, row, column, lookup, series_reach, nodes, reach, marked, marks, image.to(tl.int64) * tiles + tile,
            BY_NODES, SIDE,
        )  # fmt: skip
        value = whole_covariance(c, nonlinear, row, column)
        value = tl.where(i[:, None] == j[None, :], 0.5 * quantity(row, OWN)[:, None], value)
        b_i = weights_of(weights, i, output, units, outputs, EVEN)
        b_j = weights_of(weights, j, output, units, outputs, EVEN)
        product = full_product(b_j, value, PRECISION)
        total += (product * b_i).to(tl.float64)
    here = sums + image.to(tl.int64) * sums_by_image + tl.program_id(0) * sums_by_program
    tl.store(here + output, 2 * tl.sum(total, 1))


@jit
def ones(word):
    """How many bits of a 32-bit word are 1."""
    if INTERPRETED:
        pairs = word - ((word >> 1) & 0x55555555)
        fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
        eights = (fours + (fours >> 4)) & 0x0F0F0F0F
        sixteens = eights + (eights >> 8)
        return (sixteens + (sixteens >> 16)) & 0x3F
    else:
        return tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1)


@jit
def place_of_one(word, nth):
    """The place of the bit number `nth` = 0, 1, … among the bits of a word that are 1."""
    place = tl.zeros_like(nth)
    for step in tl.static_range(5):
        below = ones((word >> place) & ((1 << (16 >> step)) - 1))
        place = tl.where(nth >= below, place + (16 >> step), place)
        nth = tl.where(nth >= below, nth - below, nth)
    return place


@jit
def count_marks(image, marked, marks, running, tiles, GROUP: constexpr, SIDE: constexpr):
    """Where the words of a group of tiles begin in `marks`, how many words there are, and how many pairs they mark.

    The running sums of marked pairs, word by word, are written to `running`.
    """
    WORDS: constexpr = SIDE * SIDE // min(SIDE, 32)
    word = tl.arange(0, GROUP * WORDS)
    first = tl.program_id(0) * GROUP
    words = min(tiles - first, GROUP) * WORDS
    tile = image.to(tl.int64) * tiles + first
    full = tl.load(marked + tile + word // WORDS, mask=word < words, other=0) != 0
    sums = tl.cumsum(ones(tl.load(marks + tile * WORDS + word, mask=full, other=0)), 0)
    count = tl.max(sums, 0)
    if count > 0:
        tl.store(running + tile * WORDS + word, sums, mask=word < words)
        tl.debug_barrier()
    return tile * WORDS, words, count


@jit
def find_marks(nth, base, words, marks, running, LENGTH: constexpr):
    """The word and the bit of the marks number `nth`, by bisection of the running sums of at most LENGTH words."""
    word = tl.zeros_like(nth)
    before = tl.zeros_like(nth)
    for halving in tl.static_range(1, 16):
        if (LENGTH >> halving) > 0:
            ahead = word + (LENGTH >> halving)
            sums = tl.load(running + base + ahead - 1, mask=ahead <= words, other=2147483647)
            before = tl.where(sums <= nth, sums, before)
            word = tl.where(sums <= nth, ahead, word)
    return word, place_of_one(tl.load(marks + base + word), nth - before)


@jit
def strong_pairs(
    nth, base, words, table, image, source, by_row, units, first_tile, marks, running, nodes, lookup,
    TERMS: constexpr, GROUP: constexpr, SIDE: constexpr,
):  # fmt: skip
    """The strongly correlated pairs number `nth` of a group of tiles: their units i > j, ΦΦc and s₁s₂J."""
    WORD: constexpr = min(SIDE, 32)
    WORDS: constexpr = SIDE * SIDE // WORD
    word, bit = find_marks(nth, base, words, marks, running, GROUP * WORDS)
    place = word % WORDS * WORD + bit
    block_row, block_column = tile_position(first_tile + tl.program_id(0) * GROUP + word // WORDS)
    i = block_row * SIDE + place // SIDE
    j = block_column * SIDE + place % SIDE
    c = tl.load(source + i.to(tl.int64) * by_row + j)
    row = columns_of(table, image, i, units, TERMS)
    column = columns_of(table, image, j, units, TERMS)
    rho = c * quantity(row, INVERSE) * quantity(column, INVERSE)
    rho = tl.minimum(tl.maximum(rho, -1.0), 1.0)
    start, stop = rule_up_to(lookup, largest_of(tl.abs(rho)))
    nonlinear = nonlinear_nodes(quantity(row, MEAN), quantity(column, MEAN), rho, nodes, start, stop)
    separable = c * quantity(row, GATE) * quantity(column, GATE)
    return i, j, separable, nonlinear * quantity(row, DEVIATION) * quantity(column, DEVIATION)


@jit
def strong_covariance_kernel(
    table, covariance, result, marked, marks, running, nodes, lookup, units, covariance_by_image, tiles,
    TERMS: constexpr, GROUP: constexpr, SIDE: constexpr,
):  # fmt: skip
    """The covariances of the strongly correlated pairs, which `covariance_kernel` leaves out, GROUP tiles a program."""
    image = tl.program_id(1)
    source = covariance + image.to(tl.int64) * covariance_by_image
    square = result + image.to(tl.int64) * units * units
    base, words, count = count_marks(image, marked, marks, running, tiles, GROUP, SIDE)
    for done in range(0, count, LANES):
        nth = done + tl.arange(0, LANES)
        i, j, separable, nonlinear = strong_pairs(
            tl.where(nth < count, nth, 0), base, words, table, image, source, units, units, 0, marks, running,
            nodes, lookup, TERMS, GROUP, SIDE,
        )  # fmt: skip
        tl.store(square + i.to(tl.int64) * units + j, separable + nonlinear, mask=nth < count)
        tl.store(square + j.to(tl.int64) * units + i, separable + nonlinear, mask=nth < count)


@jit
def strong_diagonal_kernel(
    table, covariance, weights, sums, marked, marks, running, nodes, lookup,
    units, outputs, first_tile, origin, covariance_by_image, covariance_by_row, weights_by_image,
    sums_by_image, sums_by_program, tiles,
    TERMS: constexpr, GROUP: constexpr, SIDE: constexpr, OUTPUTS: constexpr,
):  # fmt: skip
    """The part that `diagonal_kernel` leaves out, for GROUP tiles and OUTPUTS outputs a program, in `sums` as there."""
    image = tl.program_id(1)
    source = covariance + image.to(tl.int64) * covariance_by_image - origin.to(tl.int64) * covariance_by_row
    output = tl.program_id(2) * OUTPUTS + tl.arange(0, OUTPUTS)
    weights += image.to(tl.int64) * weights_by_image
    base, words, count = count_marks(image, marked, marks, running, tiles, GROUP, SIDE)
    total = tl.zeros((LANES, OUTPUTS), tl.float64)
    for done in range(0, count, LANES):
        nth = done + tl.arange(0, LANES)
        i, j, _, nonlinear = strong_pairs(
            tl.where(nth < count, nth, 0), base, words, table, image, source, covariance_by_row, units, first_tile,
            marks, running, nodes, lookup, TERMS, GROUP, SIDE,
        )  # fmt: skip
        wanted = (nth < count)[:, None] & (output < outputs)[None, :]
        b_i = tl.load(weights + output[None, :] * units + i[:, None], mask=wanted, other=0)
        b_j = tl.load(weights + output[None, :] * units + j[:, None], mask=wanted, other=0)
        total += (nonlinear[:, None] * b_i * b_j).to(tl.float64)
    here = sums + image.to(tl.int64) * sums_by_image + tl.program_id(0) * sums_by_program
    tl.store(here + output, 2 * tl.sum(total, 0))


@jit
def seldom_open_kernel(table, chosen, units, seldom, faint, TERMS: constexpr, WIDE: constexpr):
    """1 for units that `bivariate.noticeable` picks, in `deep_layers` of images, else 0; one image a program."""
    image = tl.program_id(0)
    opened = tl.zeros((1,), tl.float64)
    deviation, reach = opened, opened
    for start in range(0, units, WIDE):
        unit = start + tl.arange(0, WIDE)
        s, gate, size = sizes_of(table, image, unit, units, TERMS)
        opened = tl.maximum(opened, tl.max(s * gate))
        deviation = tl.maximum(deviation, tl.max(s))
        reach = tl.maximum(reach, tl.max(size))
    for start in range(0, units, WIDE):
        unit = start + tl.arange(0, WIDE)
        _, _, size = sizes_of(table, image, unit, units, TERMS)
        found = (opened < seldom * deviation) & (size > faint * reach)
        tl.store(chosen + image.to(tl.int64) * units + unit, found.to(tl.int8), mask=unit < units)


@jit
def sizes_of(table, image, unit, units, TERMS: constexpr):
    """s, Φ(h) and s·exp(−min(h, 0)²/4) of some units in float64; 0 past the last unit."""
    column = columns_of(table, image, unit, units, TERMS)
    s = tl.load(column + DEVIATION * BLOCK, mask=unit < units, other=0).to(tl.float64)
    gate = tl.load(column + GATE * BLOCK, mask=unit < units, other=0).to(tl.float64)
    h = tl.minimum(tl.load(column + MEAN * BLOCK, mask=unit < units, other=0).to(tl.float64), 0.0)
    return s, gate, s * tl.exp(-0.25 * h * h)


@jit
def crossing(v, plus, minus):
    """The w with plus·w − minus/w = v, without cancellation."""
    root = tl.sqrt(v * v + 4 * plus * minus)
    return tl.where(v < 0, 2 * minus / tl.maximum(root - v, 1e-300), (v + root) / tl.maximum(2 * plus, 1e-300))


@jit
def tail_nonlinear_part(h, k, rho, points, NODES: constexpr):
    """J·exp(max(|h|,|k|)²/2) in float64: `tiles.tail_nonlinear_part`, along the path of `tiles._TailPath`.

    `points` are NODES pairs of x⁴ and its weight.
    """
    k = tl.where(rho < 0, -k, k)
    rho = tl.abs(rho)
    plus = tl.abs(h + k) * 0.5
    minus = tl.abs(h - k) * 0.5
    end = tl.sqrt((1 - rho) / (1 + rho))
    first = plus * end - minus / tl.maximum(end, 1e-300)
    last = plus - minus
    lowest = -tl.sqrt(tl.minimum(last, 0.0) * tl.minimum(last, 0.0) + REACH * REACH)
    highest = tl.sqrt(tl.maximum(first, 0.0) * tl.maximum(first, 0.0) + REACH * REACH)
    low = tl.where(first < lowest, crossing(lowest, plus, minus), end)
    high = tl.where(last > highest, crossing(highest, plus, minus), 1.0)
    whole = (first >= lowest) & (last <= highest)
    length = tl.where(whole, 2 * rho / ((1 + rho) * (1 + end)), high - low)
    cut = tl.where(first < lowest, low - end, 0.0)
    total = tl.zeros_like(rho)
    for n in range(NODES):
        step = length * tl.load(points + 2 * n)
        w = low + step
        v = plus * w - minus / w
        spread = 1 + w * w
        total += tl.load(points + 2 * n + 1) * tl.exp(-0.5 * v * v) * (cut + step) * (w + end) / (spread * spread)
    return total * length * 0.6366197723675814 / (1 + end * end)


@jit
def deviations_of(mean, variance, unit, units, mean_by_unit, variance_by_unit):
    """h and s of some units, computed in float64, where the table has rounded them; s is 0 past the last unit."""
    m = tl.load(mean + unit * mean_by_unit, mask=unit < units, other=0).to(tl.float64)
    s = tl.sqrt(tl.maximum(tl.load(variance + unit * variance_by_unit, mask=unit < units, other=0).to(tl.float64), 0.0))
    return standardized(m, s), s


@jit
def tail_kernel(
    table, mean, variance, covariance, result, chosen, points,
    units, mean_by_image, mean_by_unit, variance_by_image, variance_by_unit, covariance_by_image, dead,
    TERMS: constexpr, NODES: constexpr, SIDE: constexpr,
):  # fmt: skip
    """Cov(relu z) to relative accuracy, for pairs with a unit that is `chosen`, (images, units) of bytes.

    If `chosen` is None, these are units whose h is left of `dead`. A program takes one tile of the lower triangle, with
    its mirror image; most tiles have no such pair.
    """
    image = tl.program_id(1).to(tl.int64)
    block_row, block_column = tile_position(tl.program_id(0))
    i = block_row * SIDE + tl.arange(0, SIDE)
    j = block_column * SIDE + tl.arange(0, SIDE)
    mean += image * mean_by_image
    variance += image * variance_by_image
    h, s = deviations_of(mean, variance, i, units, mean_by_unit, variance_by_unit)
    k, t = deviations_of(mean, variance, j, units, mean_by_unit, variance_by_unit)
    if chosen is None:
        rare_row = (s > 0) & (h < dead)
        rare_column = (t > 0) & (k < dead)
    else:
        rare_row = tl.load(chosen + image * units + i, mask=i < units, other=0) != 0
        rare_column = tl.load(chosen + image * units + j, mask=j < units, other=0) != 0
    if tl.max(rare_row.to(tl.int32)) + tl.max(rare_column.to(tl.int32)) > 0:
        wanted = (rare_row[:, None] | rare_column[None, :]) & (i[:, None] > j[None, :]) & (i < units)[:, None]
        source = covariance + image * covariance_by_image
        noisy = (s > 0)[:, None] & (t > 0)[None, :]
        inner = i.to(tl.int64)[:, None] * units + j[None, :]
        c = tl.load(source + inner, mask=wanted & noisy, other=0).to(tl.float64)
        larger = tl.where(noisy, tl.maximum(s[:, None], t[None, :]), 1.0)
        smaller = tl.where(noisy, tl.minimum(s[:, None], t[None, :]), 1.0)
        rho = tl.minimum(tl.maximum(c / larger / smaller, -1.0), 1.0)
        highest = tl.maximum(tl.abs(h)[:, None], tl.abs(k)[None, :])
        root = tl.exp(-0.25 * highest * highest)
        nonlinear = tail_nonlinear_part(h[:, None], k[None, :], rho, points, NODES)
        row = columns_of_side(table, image, block_row * SIDE, units, TERMS, SIDE)
        column = columns_of_side(table, image, block_column * SIDE, units, TERMS, SIDE)
        gates = quantity(row, GATE).to(tl.float64)[:, None] * quantity(column, GATE).to(tl.float64)[None, :]
        value = c * gates + nonlinear * (s[:, None] * root) * (t[None, :] * root)
        square = result + image * units * units
        tl.store(square + inner, value.to(result.dtype.element_ty), mask=wanted)
        mirrored = j.to(tl.int64)[None, :] * units + i[:, None]
        tl.store(square + mirrored, value.to(result.dtype.element_ty), mask=wanted)
