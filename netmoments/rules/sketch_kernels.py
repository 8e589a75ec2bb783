"""Triton kernels for a layer of a sketch: values at samples, covariances of windows, moments, quadratic forms.

Samples (images, K, p) are not copied into windows; a window's inputs are looked up by their places. The plain versions
in `one_number`, `maximum_lines` and `base` define what these kernels compute. Without Triton this module can
be imported, but not used.
"""

from __future__ import annotations

from netmoments.relu.triton.kernels import INTERPRETED, constexpr, density, jit, standardized, tl

FAR = constexpr(40.0)  # standard deviations at which integrals are cut off


@jit
def gate_and_bell(shifted, s):
    """Φ(h) and φ(h) at h = m/s, cut to ±40; at s = 0 that is ±40, or 0 for m = 0."""
    noisy = tl.abs(shifted) < FAR * s
    certain = tl.where(shifted > 0, FAR, tl.where(shifted < 0, -FAR, 0.0))
    h = tl.where(noisy, shifted / tl.where(noisy, s, 1.0), certain)
    return 0.5 + 0.5 * tl.erf(h * 0.7071067811865476), tl.exp(-0.5 * h * h) * 0.3989422804014327


@jit
def single_inputs_kernel(
    samples, mean, offset, slope, bends, kinks, values, expected, gain, curvature,
    units, COUNT: constexpr, TWO: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Units f(z) = offset + slope·z + bend relu(z − kink), with a second kink if TWO.

    Computes f at all samples, and E f, E f′ and E f″ under a Gaussian with the given mean and the samples' variance.
    """
    image = tl.program_id(1).to(tl.int64)
    unit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = unit < units
    base, tilt = tl.load(offset + unit, mask=inside, other=0), tl.load(slope + unit, mask=inside, other=0)
    bend, kink = tl.load(bends + unit, mask=inside, other=0), tl.load(kinks + unit, mask=inside, other=0)
    other_bend, other_kink = tl.zeros_like(bend), tl.zeros_like(kink)
    if TWO:
        other_bend = tl.load(bends + units + unit, mask=inside, other=0)
        other_kink = tl.load(kinks + units + unit, mask=inside, other=0)
    here = image * COUNT * units + unit
    origin = tl.load(samples + here, mask=inside, other=0)
    total, squares = tl.zeros_like(origin), tl.zeros_like(origin)
    for _ in range(COUNT):
        z = tl.load(samples + here, mask=inside, other=0)
        value = base + tilt * z + bend * tl.maximum(z - kink, 0.0)
        if TWO:
            value += other_bend * tl.maximum(z - other_kink, 0.0)
        tl.store(values + here, value, mask=inside)
        here += units
        away = z - origin
        total += away
        squares += away * away
    variance = (squares - total * total / COUNT) / (COUNT - 1)
    s = tl.sqrt(tl.where(variance < 0, 0.0, variance))  # NaN stays NaN
    m = tl.load(mean + image * units + unit, mask=inside, other=0)
    gate, bell = gate_and_bell(m - kink, s)
    found = base + tilt * m + bend * ((m - kink) * gate + s * bell)
    slopes, bells = tilt + bend * gate, bend * bell
    if TWO:
        gate, bell = gate_and_bell(m - other_kink, s)
        found += other_bend * ((m - other_kink) * gate + s * bell)
        slopes += other_bend * gate
        bells += other_bend * bell
    at = image * units + unit
    tl.store(expected + at, found, mask=inside)
    tl.store(gain + at, slopes, mask=inside)
    tl.store(curvature + at, tl.where(s > 0, bells / tl.where(s > 0, s, 1.0), 0.0), mask=inside)


@jit
def excess_moments(x, bell):
    """`marginal.excess_moments` in float64, for n = 0, …, 4."""
    far = tl.maximum(x, 3.0)
    ratio = 0.5 * (tl.sqrt(far * far + 164) - far)
    for n in range(36):
        ratio = (40 - n) / (far + ratio)
    fourth = 4 / (far + ratio)
    third = 3 / (far + fourth)
    second = 2 / (far + third)
    first = 1 / (far + second)
    none = bell / (far + first)
    one = first * none
    two = second * one
    three = third * two
    below = 0.5 * (1 - tl.erf(x * 0.7071067811865476))
    near = bell - x * below
    nearer = below - x * near
    nearest = 2 * near - x * nearer
    tail = x > 3
    return (
        tl.where(tail, none, below),
        tl.where(tail, one, near),
        tl.where(tail, two, nearer),
        tl.where(tail, three, nearest),
        tl.where(tail, fourth * three, 3 * nearer - x * nearest),
    )


@jit
def power_moments_kernel(
    mean, variance, offset, slope, bends, kinks, found,
    row, units, mean_by_image, mean_by_unit, variance_by_image, variance_by_unit,
    KINKS: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """`one_number.PiecewiseLinear.power_moments` in float64, for sorted kinks.

    `found` gets f(m) and then the moments in the order of `PowerMoments`, each as a row of images × units numbers.
    """
    image = tl.program_id(1).to(tl.int64)
    unit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = unit < units
    m = tl.load(mean + image * mean_by_image + unit * mean_by_unit, mask=inside, other=0).to(tl.float64)
    square = tl.load(variance + image * variance_by_image + unit * variance_by_unit, mask=inside, other=0)
    s = tl.sqrt(tl.where(square < 0, 0.0, square).to(tl.float64))  # NaN stays NaN
    tilt = tl.load(slope + unit, mask=inside, other=0).to(tl.float64)
    centre = tl.load(offset + unit, mask=inside, other=0).to(tl.float64) + tilt * m
    through = tilt
    for k in tl.static_range(KINKS):
        bend = tl.load(bends + k * units + unit, mask=inside, other=0).to(tl.float64)
        away = m - tl.load(kinks + k * units + unit, mask=inside, other=0).to(tl.float64)
        centre += bend * tl.maximum(away, 0.0)
        through += tl.where(away <= 0, 0.0, bend)
    through *= s
    # moments of the line through f(m): E f², E f⁴, E f′, E f²f′, E f′², E f′³; all others are 0
    one, three = tl.zeros_like(m), tl.zeros_like(m)
    two = through * through
    four = 3 * two * two
    steep, once, twice, even, mixed, cube = through, one, through * two, two, one, through * two
    d2, d3, d4, d5, d6 = one, one, one, one, one
    q2, q3, q4, c2, c3, c4 = one, one, one, one, one, one
    before, risen = tl.zeros_like(m), tilt
    for k in tl.static_range(KINKS):
        bend = tl.load(bends + k * units + unit, mask=inside, other=0).to(tl.float64)
        away = m - tl.load(kinks + k * units + unit, mask=inside, other=0).to(tl.float64)
        step = bend * away
        before += tl.where(away <= 0, step, 0.0)
        after = before
        for j in tl.static_range(k + 1, KINKS):
            next_bend = tl.load(bends + j * units + unit, mask=inside, other=0).to(tl.float64)
            next_away = m - tl.load(kinks + j * units + unit, mask=inside, other=0).to(tl.float64)
            after -= tl.where(next_away <= 0, 0.0, next_bend * next_away)
        low = risen * s
        risen += bend
        high = risen * s
        t = -standardized(away, s)
        bell, sign = density(t), tl.where(t < 0, -1.0, 1.0)
        w0, w1, w2, w3, w4 = excess_moments(tl.abs(t), bell)
        value = after - step + low * t
        rise = high - low
        rise2 = rise * (high + low)
        rise3 = rise * (high * high + high * low + low * low)
        by1, by2, by3 = rise * w1, sign * rise2 * w2, rise3 * w3
        one += by1
        two += 2 * value * by1 + by2
        three += 3 * value * (value * by1 + by2) + by3
        by4 = sign * rise2 * (high * high + low * low) * w4
        four += 2 * value * (value * (2 * value * by1 + 3 * by2) + 2 * by3) + by4
        steep += sign * rise * w0
        once += value * sign * rise * w0 + rise2 * w1
        twice += value * (value * sign * rise * w0 + 2 * rise2 * w1) + sign * rise3 * w2
        even += sign * rise2 * w0
        mixed += value * sign * rise2 * w0 + rise3 * w1
        cube += sign * rise3 * w0
        jump = rise * bell
        squared = rise2 * bell
        cubed = rise3 * bell
        tt = t * t
        d2 += jump
        d3 += jump * t
        d4 += jump * (tt - 1)
        d5 += jump * t * (tt - 3)
        d6 += jump * (tt * (tt - 6) + 3)
        q2 += 2 * value * jump
        q3 += 2 * (value * jump * t + squared)
        q4 += 2 * (value * jump * (tt - 1) + squared * t)
        c2 += 3 * value * value * jump
        c3 += 3 * value * (value * jump * t + 2 * squared)
        c4 += 3 * value * (value * jump * (tt - 1) + 2 * squared * t) + 6 * cubed
    at = found + image * units + unit
    kind = found.dtype.element_ty
    tl.store(at, centre.to(kind), mask=inside)
    tl.store(at + row, one.to(kind), mask=inside)
    tl.store(at + 2 * row, steep.to(kind), mask=inside)
    tl.store(at + 3 * row, d2.to(kind), mask=inside)
    tl.store(at + 4 * row, d3.to(kind), mask=inside)
    tl.store(at + 5 * row, d4.to(kind), mask=inside)
    tl.store(at + 6 * row, d5.to(kind), mask=inside)
    tl.store(at + 7 * row, d6.to(kind), mask=inside)
    tl.store(at + 8 * row, two.to(kind), mask=inside)
    tl.store(at + 9 * row, (2 * once).to(kind), mask=inside)
    tl.store(at + 10 * row, (2 * even + q2).to(kind), mask=inside)
    tl.store(at + 11 * row, q3.to(kind), mask=inside)
    tl.store(at + 12 * row, q4.to(kind), mask=inside)
    tl.store(at + 13 * row, three.to(kind), mask=inside)
    tl.store(at + 14 * row, (3 * twice).to(kind), mask=inside)
    tl.store(at + 15 * row, (6 * mixed + c2).to(kind), mask=inside)
    tl.store(at + 16 * row, (6 * cube + c3).to(kind), mask=inside)
    tl.store(at + 17 * row, c4.to(kind), mask=inside)
    tl.store(at + 18 * row, four.to(kind), mask=inside)


@jit
def window_samples_kernel(
    columns, places, values, covariance, inputs, units, sign,
    COUNT: constexpr, WIDTH: constexpr, WITH_ZERO: constexpr, WIDE: constexpr, EVERY: constexpr, PRECISION: constexpr,
):  # fmt: skip
    """The largest input of each window at all samples, and the sample covariance of its inputs; one program per window.

    For sign −1 it is the smallest; WITH_ZERO makes 0 compete. `columns` are samples (images, inputs, COUNT), `values`
    (images, units, COUNT).
    """
    image, number, every = tl.program_id(1).to(tl.int64), tl.arange(0, WIDE), tl.arange(0, EVERY)
    unit = image * units + tl.program_id(0)
    place = tl.load(places + tl.program_id(0) * WIDTH + number, mask=number < WIDTH, other=-1)
    seen = (place >= 0)[:, None] & (every < COUNT)[None, :]
    z = tl.load(columns + (image * inputs + place)[:, None] * COUNT + every[None, :], mask=seen, other=0)
    extreme = tl.max(tl.where(seen, sign * z, float("-inf")), 0)
    if WITH_ZERO:
        extreme = tl.maximum(extreme, 0.0)
    extreme = tl.where(tl.max((z != z).to(tl.int32), 0) > 0, float("nan"), extreme)
    tl.store(values + unit * COUNT + every, sign * extreme, mask=every < COUNT)
    z = tl.where(seen, z - (tl.sum(z, 1) / COUNT)[:, None], 0.0)
    products = tl.dot(z, tl.trans(z), input_precision=PRECISION, out_dtype=z.dtype)
    inner = number[:, None] * WIDTH + number[None, :]
    both = (number < WIDTH)[:, None] & (number < WIDTH)[None, :]
    tl.store(covariance + unit * (WIDTH * WIDTH) + inner, products / (COUNT - 1), mask=both)


@jit
def line_moments(t, DEGREES: constexpr):
    """F(t) = P(τ < t) for the density ½χ_w(|τ|), and P(|τ'| < |t|) for a τ' with one degree of freedom more.

    By C_w(x) = C_{w−2}(x) − x^{w−2} exp(−x²/2) / (2^{w/2−1} Γ(w/2)), from C_1 = erf(x/√2) and C_2 = 1 − exp(−x²/2).
    """
    square = t * t
    bell = tl.exp(-0.5 * square)
    x = tl.abs(t)
    odd, odd_term = tl.erf(x * 0.7071067811865476), x * bell * 0.7978845608028654
    even, even_term = 1 - bell, square * bell * 0.5
    for count in tl.static_range(3, DEGREES + 2):
        if count % 2 == 1:
            odd -= odd_term
            odd_term *= square * (1.0 / count)
        else:
            even -= even_term
            even_term *= square * (1.0 / count)
    if DEGREES % 2 == 1:
        half = 0.5 * odd
        following = even
    else:
        half = 0.5 * even
        following = odd
    return tl.where(t < 0, 0.5 - half, 0.5 + half), following


@jit
def number_at(pointer, wanted):
    """`tl.load` with a mask, 0 where it is false, as inline assembly.

    Triton's compiler does not look into it. Its search for the best layout of loads and stores would take a minute for
    a kernel with hundreds of them.
    """
    if INTERPRETED:
        return tl.load(pointer, mask=wanted, other=0)
    elif pointer.dtype.element_ty == tl.float64:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.f64 $0, 0d0000000000000000; @p ld.global.f64 $0, [$1]; }",
            "=d,l,r", [pointer.to(tl.int64), wanted.to(tl.int32)], dtype=tl.float64, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; mov.f32 $0, 0f00000000; @p ld.global.f32 $0, [$1]; }",
            "=f,l,r", [pointer.to(tl.int64), wanted.to(tl.int32)], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip


@jit
def put(pointer, value, wanted):
    """`tl.store` with a mask, as inline assembly, for the same reason."""
    if INTERPRETED:
        tl.store(pointer, value, mask=wanted)
    elif pointer.dtype.element_ty == tl.float64:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.f64 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,d,r", [pointer.to(tl.int64), value, wanted.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.f32 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,f,r", [pointer.to(tl.int64), value, wanted.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@jit
def inputs_of(mean, places, variances, inside, sign, WIDTH: constexpr, SHARE: constexpr):
    """The means of a window's inputs and which of them are present, as tuples, and what is added to the variances.

    A missing input gets a mean too low ever to lead.
    """
    reach = number_at(variances, inside) * 0
    trace, number = reach, reach
    present, means = (), ()
    for i in tl.static_range(WIDTH):
        place = tl.load(places + i, mask=inside, other=-1)
        here = place >= 0
        variance = number_at(variances + i * (WIDTH + 1), inside)
        m = number_at(mean + place, here)
        reach = tl.maximum(reach, 4 * tl.sqrt(tl.maximum(variance, 0.0)) + tl.abs(m))
        trace += variance
        number += tl.where(here, 1.0, 0.0)
        present = present + (here,)
        means = means + (m,)
    start = ()
    for i in tl.static_range(WIDTH):
        start = start + (tl.where(present[i], means[i] * sign, -FAR * reach),)
    return start, present, SHARE * trace / tl.maximum(number, 1.0) + 1e-30


@jit
def cholesky(covariance, inside, floor, WIDTH: constexpr):
    """R with RRᵀ = S + floor·I, as a tuple: R₀₀, R₁₀, R₁₁, R₂₀, …"""
    root = ()
    for i in tl.static_range(WIDTH):
        for j in tl.static_range(i + 1):
            value = number_at(covariance + i * WIDTH + j, inside)
            for k in tl.static_range(j):
                value -= root[i * (i + 1) // 2 + k] * root[j * (j + 1) // 2 + k]
            if i == j:
                value = tl.sqrt(tl.maximum(value + floor, floor))
            else:
                value = value / root[j * (j + 1) // 2 + j]
            root = root + (value,)
    return root


@jit
def slopes_along(root, direction, present, WIDTH: constexpr):
    """Rv, with 0 for missing inputs."""
    slopes = ()
    for i in tl.static_range(WIDTH):
        value = root[i * (i + 1) // 2] * direction[0]
        for j in tl.static_range(1, i + 1):
            value += root[i * (i + 1) // 2 + j] * direction[j]
        slopes = slopes + (tl.where(present[i], value, 0.0),)
    return slopes


@jit
def turn_of(i: constexpr, start, slope, least, COUNT: constexpr):
    """The t between which line i, start + slope·t, is the highest of all; parallel lines cross far away."""
    first = least * 0 - FAR
    last = least * 0 + FAR
    for j in tl.static_range(COUNT):
        if j != i:
            steeper = slope[i] - slope[j]
            aside = least if i > j else -least
            steeper = tl.where(tl.abs(steeper) <= least, aside, steeper)
            crossing = (start[j] - start[i]) / steeper
            first = tl.maximum(first, tl.where(steeper > 0, crossing, -FAR))
            last = tl.minimum(last, tl.where(steeper > 0, FAR, crossing))
    first = tl.minimum(first, FAR)
    return first, tl.maximum(last, first)


@jit
def several(value, COUNT: constexpr):
    """A tuple that holds a value COUNT times."""
    found = ()
    for _ in tl.static_range(COUNT):
        found = found + (value,)
    return found


@jit
def divided(tilted, root, WIDTH: constexpr):
    """X with X R = L, where X and L are tuples, row by row."""
    found = ()
    for i in tl.static_range(WIDTH):
        row = ()
        for back in tl.static_range(WIDTH):
            value = tilted[i * WIDTH + WIDTH - 1 - back]
            for later in tl.static_range(back):
                value -= row[later] * root[(WIDTH - back + later) * (WIDTH - back + later + 1) // 2 + WIDTH - 1 - back]
            row = (value / root[(WIDTH - 1 - back) * (WIDTH - back) // 2 + WIDTH - 1 - back],) + row
        found = found + row
    return found


@jit
def largest_kernel(
    mean, places, covariance, directions, expected, gain, curvature, inputs, units, sets, lines, sign,
    WIDTH: constexpr, WITH_ZERO: constexpr, SHARE: constexpr, AVERAGE: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """E f, E ∇f and E ∇²f of the largest input of a window, as in `maximum_lines.expected_largest`.

    Each thread takes one window. `directions` are (lines, WIDTH, sets); SHARE is the part of the mean variance that is
    added to the variances, AVERAGE is E χ_w.
    """
    image, unit = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = unit < units
    at = image * units + unit
    own = covariance + at * (WIDTH * WIDTH)
    start, present, floor = inputs_of(mean + image * inputs, places + unit * WIDTH, own, inside, sign, WIDTH, SHARE)
    root = cholesky(own, inside, floor, WIDTH)
    nothing = floor * 0
    if WITH_ZERO:
        start = start + (nothing,)
    COUNT: constexpr = WIDTH + WITH_ZERO
    centre = start[0]
    for other in tl.static_range(1, COUNT):
        centre = tl.maximum(centre, start[other])
    probability, tilted, along = several(nothing, COUNT), several(nothing, WIDTH * WIDTH), nothing
    for line in range(lines):
        direction = ()
        least = nothing
        for d in tl.static_range(WIDTH):
            v = number_at(directions + (line * WIDTH + d) * sets + unit % sets, inside)
            direction = direction + (v,)
        slope = slopes_along(root, direction, present, WIDTH)
        for e in tl.static_range(WIDTH):
            least = tl.maximum(least, tl.abs(slope[e]))
        least = 1e-12 * least + 1e-18
        if WITH_ZERO:
            slope = slope + (nothing,)
        more_probability = ()
        more_tilted = ()
        for i in tl.static_range(COUNT):
            first, last = turn_of(i, start, slope, least, COUNT)
            before, nearer = line_moments(first, WIDTH)
            until, farther = line_moments(last, WIDTH)
            moment = (0.5 * AVERAGE) * (farther - nearer)
            along += slope[i] * moment
            more_probability = more_probability + (probability[i] + (until - before),)
            if i < WIDTH:
                for f in tl.static_range(WIDTH):
                    more_tilted = more_tilted + (tilted[i * WIDTH + f] + moment * direction[f],)
        probability = more_probability
        tilted = more_tilted
    found = along / lines + centre
    for g in tl.static_range(COUNT):
        found += (start[g] - centre) * (probability[g] / lines)
    put(expected + at, sign * found, inside)
    bent = divided(tilted, root, WIDTH)
    for row in tl.static_range(WIDTH):
        put(gain + at * WIDTH + row, probability[row] / lines, inside)
        for column in tl.static_range(WIDTH):
            both = bent[row * WIDTH + column] + bent[column * WIDTH + row]
            put(curvature + at * (WIDTH * WIDTH) + row * WIDTH + column, 0.5 * both * sign / lines, inside)


@jit
def transposing_kernel(source, target, rows, columns, SIDE: constexpr):
    """Copy (images, rows, columns) to (images, columns, rows)."""
    image = tl.program_id(1).to(tl.int64) * rows * columns
    across = (columns + SIDE - 1) // SIDE
    row = (tl.program_id(0) // across * SIDE + tl.arange(0, SIDE)).to(tl.int64)
    column = (tl.program_id(0) % across * SIDE + tl.arange(0, SIDE)).to(tl.int64)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tile = tl.load(source + image + row[:, None] * columns + column[None, :], mask=inside)
    tl.store(target + image + column[:, None] * rows + row[None, :], tl.trans(tile), mask=tl.trans(inside))


@jit
def curved_windows_kernel(
    columns, places, curvature, own, curved, inputs, units,
    COUNT: constexpr, WIDTH: constexpr, FEW: constexpr, WIDE: constexpr, EVERY: constexpr, PRECISION: constexpr,
):  # fmt: skip
    """z_uᵀH_u z_u of each window u at all samples, (images, units, COUNT), and H_u z_u at the last FEW samples.

    The latter are (images, units · WIDTH, FEW). Samples are taken about their mean; each program takes one window.
    """
    image, number, every = tl.program_id(1).to(tl.int64), tl.arange(0, WIDE), tl.arange(0, EVERY)
    unit = image * units + tl.program_id(0)
    known = number < WIDTH
    place = tl.load(places + tl.program_id(0) * WIDTH + number, mask=known, other=-1)
    seen = (place >= 0)[:, None] & (every < COUNT)[None, :]
    z = tl.load(columns + (image * inputs + place)[:, None] * COUNT + every[None, :], mask=seen, other=0)
    z = tl.where(seen, z - (tl.sum(z, 1) / COUNT)[:, None], 0.0)
    inner = number[:, None] * WIDTH + number[None, :]
    bend = tl.load(curvature + unit * (WIDTH * WIDTH) + inner, mask=known[:, None] & known[None, :], other=0)
    bent = tl.dot(bend, z, input_precision=PRECISION, out_dtype=z.dtype)
    tl.store(own + unit * COUNT + every, tl.sum(z * bent, 0), mask=every < COUNT)
    late = (every >= COUNT - FEW) & (every < COUNT)
    at = (unit * WIDTH + number)[:, None] * FEW + (every - (COUNT - FEW))[None, :]
    tl.store(curved + at, bent, mask=known[:, None] & late[None, :])


@jit
def squares_kernel(
    samples, curvature, weights, own, units, scores, steps,
    COUNT: constexpr, EVERY: constexpr, ROWS: constexpr, PRECISION: constexpr,
):  # fmt: skip
    """Σ_u a_u H_u z_u² over units with one input, at all samples, for 16 scores at a time, in parts to be summed."""
    part, image = tl.program_id(0), tl.program_id(1).to(tl.int64)
    score = tl.program_id(2) * 16 + tl.arange(0, 16)
    every = tl.arange(0, EVERY).to(tl.int64)
    here = samples + image * COUNT * units
    total = tl.zeros((16, EVERY), samples.dtype.element_ty)
    for step in range(part * steps, min((part + 1) * steps, (units + ROWS - 1) // ROWS)):
        unit = step * ROWS + tl.arange(0, ROWS)
        inside = unit < units
        seen = inside[:, None] & (every < COUNT)[None, :]
        z = tl.load(here + unit[:, None] + every[None, :] * units, mask=seen, other=0)
        z = tl.where(seen, z - (tl.sum(z, 1) / COUNT)[:, None], 0.0)
        square = z * z * tl.load(curvature + image * units + unit, mask=inside, other=0)[:, None]
        mine = weights + (image * scores + score)[:, None] * units + unit[None, :]
        weight = tl.load(mine, mask=(score < scores)[:, None] & inside[None, :], other=0)
        total += tl.dot(weight, square, input_precision=PRECISION, out_dtype=total.dtype)
    at = ((part * tl.num_programs(1) + image) * scores + score)[:, None] * COUNT + every[None, :]
    tl.store(own + at, total, mask=(score < scores)[:, None] & (every < COUNT)[None, :])


@jit
def forms_kernel(
    samples, places, curved, weights, across, units, scores, steps, by_image, by_sample, by_place,
    COUNT: constexpr, WIDTH: constexpr, FEW: constexpr, SOME: constexpr, SCORES: constexpr, ROWS: constexpr,
    PRECISION: constexpr,
):  # fmt: skip
    """Σ_u a_u z_uᵀ H_u z'_u over units u, for SCORES scores, z being the first FEW samples and z' the last FEW.

    The results are parts to be summed later, (parts, images, scores, FEW, FEW). Samples are taken about the first one,
    which changes only the means of rows and columns. The rows of a step are the inputs of all units, one after the
    other. `curved` is H z', (images, units · WIDTH, FEW); or H, where each unit has one input and `places` is None.
    """
    group, part, image = tl.program_id(0) * SCORES, tl.program_id(1), tl.program_id(2).to(tl.int64)
    some = tl.arange(0, SOME).to(tl.int64)
    here = samples + image * by_image
    forms = several(tl.zeros((SOME, SOME), samples.dtype.element_ty), SCORES)
    for step in range(part * steps, min((part + 1) * steps, (units * WIDTH + ROWS - 1) // ROWS)):
        row = step * ROWS + tl.arange(0, ROWS)
        inside = row < units * WIDTH
        unit = row // WIDTH
        place = row
        if WIDTH > 1:
            place = tl.load(places + row, mask=inside, other=-1)
        present = inside & (place >= 0)
        at = place.to(tl.int64) * by_place
        origin = tl.load(here + at, mask=present, other=0)
        wanted = (some < FEW)[:, None] & present[None, :]
        first = tl.load(here + some[:, None] * by_sample + at[None, :], mask=wanted, other=0)
        first = tl.where(wanted, first - origin[None, :], 0.0)
        wanted = present[:, None] & (some < FEW)[None, :]
        if WIDTH == 1:
            bend = tl.load(curved + image * units + unit, mask=inside, other=0)
            last = tl.load(here + at[:, None] + (COUNT - FEW + some)[None, :] * by_sample, mask=wanted, other=0)
            last = tl.where(wanted, (last - origin[:, None]) * bend[:, None], 0.0)
        else:
            last = tl.load(curved + (image * units * WIDTH + row)[:, None] * FEW + some[None, :], mask=wanted, other=0)
        more = ()
        for score in tl.static_range(SCORES):
            mine = weights + (image * scores + group + score) * units + unit
            weight = tl.load(mine, mask=inside & (group + score < scores), other=0)
            form = tl.dot(first * weight[None, :], last, input_precision=PRECISION, out_dtype=first.dtype)
            more = more + (forms[score] + form,)
        forms = more
    inner = some[:, None] * FEW + some[None, :]
    within = (some < FEW)[:, None] & (some < FEW)[None, :]
    for number in tl.static_range(SCORES):
        sums = across + ((part * tl.num_programs(2) + image) * scores + group + number) * (FEW * FEW)
        tl.store(sums + inner, forms[number], mask=within & (group + number < scores))
