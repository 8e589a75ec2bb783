"""Where to run the network: noise drawn where surrogates cannot tell whether it flips, from densities that are known.

With h(ε) the surrogates' probability of a flip, samples have the density φ(ε) ρ(ε), ρ = g/G with G = E g and

    g = √(h (1 − h) + κ h),

which makes the variance of (1{flip} − h)/ρ least where h is right; κ allows for it not to be. Where flips are common,
κ min(h, 1 − h): what is sure either way needs no samples, as h is a control variate there; and some plain samples tell
how right h is (`as_seen`). h depends on a few directions of the noise only, so that many points can be looked at
without running the network: a pool, from which points are chosen with the chances that make them samples of φ ρ.

The pool is drawn from saddlepoint Gaussians: N(0, I) tilted by exp(−θ q), for some θ between 0 and the one at which the
surrogate margin q has mean 0. Their densities are φ exp(−θ q − K(θ)), so that the weight of a point in the mixture of
them (balance heuristic, Veach & Guibas 1995; Owen & Zhou 2000) depends on q alone, in any number of directions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from netmoments.flips.surrogate import Quadratic
from netmoments.normal import distribution

POOL = 40_000
"""Points of a pool."""
FEWER = 8_000
"""Points of one that is for a few samples only."""
NET, NETS = 8192, 8
"""Points of an even net, and how many nets."""
TRIAL = 4_000
"""Points that say how much each Gaussian of a pool is needed."""
MOST_TILTS = 16
"""Gaussians of a pool for each rival."""
TILT_STEP = 0.8
"""Between them, in standard deviations of q."""
MOST_TILT = 100.0
"""Beyond so many standard deviations of q nothing is looked for."""
LEAST_SHARE = 0.1
"""Of a pool: what is divided equally among its Gaussians."""
COMMON = 0.005
"""Where surrogates expect more flips than this, they are a control variate."""
DOUBT = 0.1
"""κ: how wrong a surrogate may be where it is sure of a flip."""
SHARES = (0.1, 0.7, 0.2)
"""Of the three parts of a guide: g as if surrogates were better than they seem; g as they seem; and tilted Gaussians
themselves, which keep weights bounded where surrogates are sure and wrong (defensive mixture, Hesterberg 1995).
"""
AS_THEY_SEEM = 1
SHARES_BESIDE_PLAIN = (0.5, 0.5)
"""Of the two parts of a guide whose samples go with plain ones, which keep weights bounded: g as plain samples have
seen surrogates to be, and g as they seem.
"""
LEAST_DEFENCE = 0.02
"""Of the defensive part: what a surrogate gets that hardly matters."""
MOST_LOGARITHM = 600.0
"""Of a ratio of densities: what float64 can still multiply."""
AFFORDABLE = 2.5
"""θ times a surrogate's spread, at most."""
DEFENSIVE = 0.5
"""Of the saddlepoint's θ: tilts from there on are in the defensive part."""


@dataclass(frozen=True, eq=False)
class Tilts:
    """N(0, I) in k directions tilted by exp(−θ q), for some θ (T,): covariance (I + θH)⁻¹, mean −θ(I + θH)⁻¹b."""

    thetas: Tensor
    means: Tensor
    """(T, k)."""
    variances: Tensor
    """(T, k)."""
    cumulants: Tensor
    """K(θ) = log E exp(−θ q), (T,)."""

    @classmethod
    def at(cls, surrogate: Quadratic, thetas: Tensor) -> Tilts:
        """K(θ) = −θa − ½ log det(I + θH) + ½ θ² bᵀ(I + θH)⁻¹b, on the CPU."""
        variances = 1 / (1 + thetas.unsqueeze(1) * surrogate.curvature)
        means = -thetas.unsqueeze(1) * variances * surrogate.slope
        cumulants = -thetas * surrogate.constant + 0.5 * variances.log().sum(1)
        cumulants = cumulants + 0.5 * thetas.square() * (variances * surrogate.slope.square()).sum(1)
        return cls(thetas, means, variances, cumulants)

    def to(self, device: torch.device) -> Tilts:
        return Tilts(*(x.to(device) for x in vars(self).values()))

    def moved(self, which: Tensor, normal: Tensor) -> Tensor:
        """Points (N, k), each of the Gaussian that it names (N,), from standard normal numbers (N, k)."""
        return self.means[which] + self.variances[which].sqrt() * normal

    def log_ratios(self, margin: Tensor) -> Tensor:
        """log of each density over N(0, I), (N, T), at points with this surrogate margin q (N,)."""
        return -margin.unsqueeze(1) * self.thetas - self.cumulants


def tilted_means(surrogate: Quadratic, thetas: Tensor) -> Tensor:
    """E q under N(0, I) tilted by exp(−θ q), (T,): falls with θ."""
    tilts = Tilts.at(surrogate, thetas)
    square = surrogate.curvature * (tilts.means.square() + tilts.variances)
    return surrogate.constant + tilts.means @ surrogate.slope + 0.5 * square.sum(1)


def saddlepoint(surrogate: Quadratic) -> float:
    """θ at which the tilted q has mean 0, or the nearest at which I + θH is positive definite and tilts not absurd."""
    values = surrogate.curvature
    most = MOST_TILT / max(surrogate.size, 1e-300)
    high = min(most, 0.98 / max(-float(values.min()), 1e-300))
    low = max(-most, -0.98 / max(float(values.max()), 1e-300))
    for _ in range(8):  # each narrows the interval 32 times
        thetas = torch.linspace(low, high, 33, dtype=torch.float64)
        above = int((tilted_means(surrogate, thetas) > 0).sum())
        low, high = float(thetas[max(above - 1, 0)]), float(thetas[min(above, 32)])
    return 0.5 * (low + high)


def tilts_of(surrogate: Quadratic, centre: float) -> Tilts:
    """From one step beyond the saddlepoint back to N(0, I), or as far as `MOST_TILTS` steps go."""
    step = TILT_STEP / max(surrogate.size, 1e-300)
    sign = 1.0 if centre >= 0 else -1.0
    count = min(MOST_TILTS, int(abs(centre) / step) + 3)
    thetas = sign * (abs(centre) + step * (1 - torch.arange(count, dtype=torch.float64)))
    allowed = ((1 + thetas.unsqueeze(1) * surrogate.curvature) > 0.02).all(1)
    thetas = torch.cat([thetas[allowed], thetas.new_zeros(1)])
    return Tilts.at(surrogate, thetas).to(surrogate.basis.device)


def uncertainty(failing: Tensor, common: bool) -> Tensor:
    """g = √(h (1 − h) + κ h), where flips are common √(h (1 − h) + κ min(h, 1 − h))."""
    doubted = torch.minimum(failing, 1 - failing) if common else failing
    return (failing * (1 - failing) + DOUBT * doubted).sqrt()


def spreads(surrogate: Quadratic, centre: float) -> tuple[float, float]:
    """Of a surrogate, as the first parts of a guide take it: no more than 1/θ, at which its errors would hardly cost
    anything; and as it was found, or what could be afforded: runs grow as exp((θs)²).
    """
    scale = 1 / max(abs(centre), 1e-300)
    return min(surrogate.spread, scale), min(surrogate.spread, AFFORDABLE * scale)


@dataclass(frozen=True, eq=False)
class Guide:
    """Surrogates of some rivals, with a pool of points in the directions that they depend on."""

    surrogates: tuple[Quadratic, ...]
    spreads: tuple[tuple[float, float], ...]
    tilts: tuple[Tilts, ...]
    defence: tuple[float, ...]
    """Of the defensive part: what is for each surrogate."""
    basis: Tensor
    """Q (n, K), orthonormal: all directions of the surrogates."""
    places: tuple[Tensor, ...]
    """Qᵀ times the basis of each surrogate, (K, k)."""
    pool: Tensor
    """Points (M, K)."""
    weight: Tensor
    """Of each point in a mean over the noise, (M,)."""
    chance: Tensor
    """Of each point to be chosen, (M,): sums to 1."""
    levels: tuple[float, ...]
    """G of the parts of the guide."""
    expected: float
    """E h."""
    expected_error: float
    """Its standard error, from the size of the pool."""
    predicted: float
    """The variance of one run's estimate over the square of the probability, if the surrogates are right: of 1{flip}/ρ
    where flips are rare, of (1{flip} − h)/ρ where they are common.
    """
    shares: tuple[float, ...]
    """E h_j over their sum, of each surrogate."""
    sizes: tuple[Tensor, ...] = ()
    """Points of the pool from each Gaussian of each surrogate, (T,)."""
    common: bool = False
    """Whether flips are expected so often that surrogates are a control variate."""
    seen: tuple[float, float] | None = None
    """How far the smallest margins of plain samples were above the surrogates' smallest: mean and deviation."""
    expected_seen: tuple[float, float] = (0.0, 0.0)
    """E h as plain samples have seen surrogates to be, and its standard error."""

    @property
    def beyond(self) -> bool:
        """Whether the surrogate that matters most leaves more unexplained than can be afforded, θs > `AFFORDABLE`."""
        most = max(range(len(self.shares)), key=lambda j: self.shares[j])
        return self.surrogates[most].spread > self.spreads[most][AS_THEY_SEEM]

    def failing(self, white: Tensor) -> Tensor:
        """h (N,) at ε (N, n)."""
        return self._failing(self.margins(self.coordinates(white)), AS_THEY_SEEM)

    def coordinates(self, white: Tensor) -> Tensor:
        return (white @ self.basis).double()

    def margins(self, z: Tensor) -> Tensor:
        """The surrogates' margins (N, J)."""
        pairs = zip(self.surrogates, self.places, strict=True)
        return torch.stack([surrogate.at(z @ place) for surrogate, place in pairs], 1)

    def ratio(self, white: Tensor) -> Tensor:
        """ρ (N,): the density of samples over that of N(0, I)."""
        margins = self.margins(self.coordinates(white))
        return self._together([x / level for x, level in zip(self._parts(margins), self.levels, strict=True)])

    def draw(self, normal: Tensor, generator: torch.Generator) -> Tensor:
        """Samples ε (N, n) of the guide, from standard normal numbers of that shape."""
        chosen = stratified_choice(self.chance, len(normal), generator)
        z = self.pool[chosen].to(normal.dtype)
        return normal + (z - normal @ self.basis) @ self.basis.mT

    def refilled(self, generator: torch.Generator) -> Guide:
        """With other points in its pool, and the density that it has: a pool of so many points is not quite of it."""
        fresh = self._filled(list(self.sizes), generator)[0]
        return replace(self, pool=fresh.pool, weight=fresh.weight, chance=fresh.chance)

    def averaged(self, pools: int, generator: torch.Generator) -> Guide:
        """With levels and E h that are means over so many pools, of which this one is the first."""
        rows = [(self.expected, *self.levels)]
        for _ in range(pools - 1):
            other = self._filled(list(self.sizes), generator)[0]
            rows.append((other.expected, *other.levels))
        every = torch.tensor(rows, dtype=torch.float64).mean(0).tolist()
        error = self.expected_error / math.sqrt(pools)
        return replace(self, expected=every[0], levels=tuple(every[1:]), expected_error=error)

    def sharpened(self, generator: torch.Generator) -> Guide:
        """With E h from nets of points that fill the space evenly (randomized quasi-Monte Carlo, Owen 1997), the
        surrogates' slopes first; its error is that of the mean of independent nets. For flips that are common.
        """
        slopes = [place @ own.slope.to(place) for own, place in zip(self.surrogates, self.places, strict=True)]
        size, device = self.basis.shape[1], self.basis.device
        every = torch.cat([torch.stack(slopes, 1), torch.eye(size, dtype=torch.float64, device=device)], 1)
        turn = torch.linalg.qr(every).Q
        means = []  # of h as surrogates are seen to be, where they were, and as they seem
        for _ in range(NETS):
            seed = int(torch.randint(2**31, (1,), device=device, generator=generator))
            net = torch.quasirandom.SobolEngine(size, scramble=True, seed=seed).draw(NET, dtype=torch.float64)
            z = torch.special.ndtri(net.clamp(1e-12, 1 - 1e-12)).to(device) @ turn.mT
            margins = self.margins(z)
            means.append([float(self._failing(margins, part).mean()) for part in range(2)])
        values = torch.tensor(means, dtype=torch.float64)
        (first, known), errors = values.mean(0).tolist(), (values.std(0) / math.sqrt(NETS)).tolist()
        return replace(self, expected=known, expected_error=errors[1], expected_seen=(first, errors[0]))

    def as_seen(self, white: Tensor, smallest: Tensor) -> Guide:
        """With h = Φ(−(q + m)/d) for the first part, q being the smallest surrogate margin, and m and d the mean and
        the deviation of what the smallest margins (N,) at plain samples ε (N, n) are above it.

        For flips that are common, beside plain samples. d is no more than margins vary, and no less than what the best
        surrogate leaves unexplained.
        """
        above = smallest - self.margins(self.coordinates(white)).amin(1)
        least = min(own[AS_THEY_SEEM] for own in self.spreads)
        deviation = max(min(float(above.std()), float(smallest.std())), least)
        return replace(self, seen=(float(above.mean()), deviation))._planned()

    def failing_as_seen(self, white: Tensor) -> Tensor:
        """h (N,) at ε (N, n), as plain samples have seen surrogates to be."""
        return self._failing(self.margins(self.coordinates(white)), 0)

    def _failing(self, margins: Tensor, part: int) -> Tensor:
        if part == 0 and self.seen is not None:
            above, deviation = self.seen
            return distribution(-(margins.amin(1) + above) / deviation).clamp(1e-12, 1 - 1e-12)
        return joint_failing(margins, margins.new_tensor([own[part] for own in self.spreads]))

    def _parts(self, margins: Tensor) -> list[Tensor]:
        guided = [uncertainty(self._failing(margins, part), self.common) for part in range(2)]
        return guided if self.seen is not None else [*guided, self._defensive(margins)]

    def _together(self, parts: list[Tensor]) -> Tensor:
        """The parts, each of mean 1 under the noise, by their shares."""
        shares = SHARES if self.seen is None else SHARES_BESIDE_PLAIN
        return torch.stack([share * part for share, part in zip(shares, parts, strict=True)]).sum(0)

    def _defensive(self, margins: Tensor) -> Tensor:
        """The mean of the densities over N(0, I) of tilts that are far enough."""
        chosen = []
        for j, own in enumerate(self.tilts):
            far = own.thetas.abs() >= DEFENSIVE * own.thetas.abs().max()
            each = own.log_ratios(margins[:, j])[:, far].logsumexp(1) - math.log(int(far.sum()))
            chosen.append(each + math.log(self.defence[j]))
        return torch.stack(chosen, 1).logsumexp(1).clamp(max=MOST_LOGARITHM).exp()

    def _filled(self, sizes: list[Tensor], generator: torch.Generator) -> tuple[Guide, Tensor]:
        """With a pool of so many points of each Gaussian; and how much each Gaussian is needed."""
        drawn, origin, tilts = [], [], self.tilts
        for own, place, counts in zip(tilts, self.places, sizes, strict=True):
            which = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
            shape = (len(which), place.shape[0])
            normal = torch.randn(shape, dtype=place.dtype, device=place.device, generator=generator)
            along = normal @ place
            drawn.append(normal + (own.moved(which, along) - along) @ place.mT)
            origin.append(which + sum(map(len, sizes[: len(drawn) - 1])))
        pool, where = torch.cat(drawn), torch.cat(origin)
        margins = self.margins(pool)
        counts = torch.cat(sizes)
        ratios = torch.cat([own.log_ratios(margins[:, j]) for j, own in enumerate(tilts)], 1)
        weight = (-(ratios + counts.log()).logsumexp(1)).exp()
        order = margins.amin(1).argsort()
        filled = replace(self, pool=pool[order], weight=weight[order])._planned()
        nothing = filled.chance.new_zeros(len(counts))
        return filled, nothing.index_add(0, where[order], filled.chance)

    def _planned(self) -> Guide:
        """With the chances of the points of its pool, and what is expected of samples."""
        margins, weight = self.margins(self.pool), self.weight
        parts = [weight * part for part in self._parts(margins)]
        levels = (*(float(part.sum()) for part in parts[:2]), 1.0)[: len(parts)]
        total = self._together([part / max(level, 1e-300) for part, level in zip(parts, levels, strict=True)])
        failing = self._failing(margins, AS_THEY_SEEM)
        terms = weight * failing
        expected = float(terms.sum())
        rho = (total / weight.clamp(min=1e-300)).clamp(min=1e-300)
        left = failing * (1 - failing) if self.common else failing
        variance = float((weight * left / rho).sum()) - (0.0 if self.common else expected**2)
        own_parts = [own[AS_THEY_SEEM] for own in self.spreads]
        each = (weight.unsqueeze(1) * distribution(-margins / margins.new_tensor(own_parts))).sum(0)
        return replace(
            self,
            chance=total / total.sum(),
            levels=levels,
            expected=expected,
            predicted=max(variance, 0.0) / expected**2 if expected**2 > 0 else math.inf,
            expected_error=float(terms.std()) * math.sqrt(len(terms)),
            shares=tuple((each / each.sum().clamp(min=1e-300)).tolist()),
        )


@dataclass(frozen=True)
class PlainNoise:
    """No guide: samples of the noise itself."""

    expected: float = 0.0
    expected_error: float = 0.0
    predicted: float = 0.0

    def draw(self, normal: Tensor, generator: torch.Generator) -> Tensor:
        return normal

    def ratio(self, white: Tensor) -> Tensor:
        return torch.ones(len(white), dtype=torch.float64, device=white.device)

    def failing(self, white: Tensor) -> Tensor:
        return torch.zeros(len(white), dtype=torch.float64, device=white.device)


def guide(surrogates: tuple[Quadratic, ...], generator: torch.Generator, points: int = POOL) -> Guide:
    """The guide of some surrogates: a first pool says what is needed of each for the second, of so many points."""
    every = torch.cat([surrogate.basis.double() for surrogate in surrogates], 1)
    left, singular, _ = torch.linalg.svd(every, full_matrices=False)
    basis = left[:, singular > 1e-5 * singular[0]]
    places = tuple(basis.mT @ surrogate.basis.double() for surrogate in surrogates)
    nothing = basis.new_zeros(0)
    centres = [saddlepoint(surrogate) for surrogate in surrogates]
    tilts = tuple(tilts_of(*each) for each in zip(surrogates, centres, strict=True))
    empty = Guide(
        surrogates=surrogates,
        tilts=tilts,
        defence=(1 / len(surrogates),) * len(surrogates),
        spreads=tuple(spreads(*each) for each in zip(surrogates, centres, strict=True)),
        basis=basis.to(surrogates[0].basis.dtype),
        places=places,
        pool=nothing,
        weight=nothing,
        chance=nothing,
        levels=(),
        expected=0.0,
        expected_error=0.0,
        predicted=math.inf,
        shares=(),
    )
    total = sum(len(own.thetas) for own in tilts)
    equal = [torch.full_like(own.thetas, max(1, TRIAL // total), dtype=torch.long) for own in tilts]
    trial, needed = empty._filled(equal, generator)
    attention = [share + LEAST_DEFENCE for share in trial.shares]
    defence = tuple(share / sum(attention) for share in attention)
    empty = replace(empty, defence=defence, common=trial.expected >= COMMON)
    shares = (1 - LEAST_SHARE) * needed + LEAST_SHARE / total
    sizes = (shares * points).long().clamp(min=2).split([len(own.thetas) for own in tilts])
    return replace(empty, sizes=tuple(sizes))._filled(list(sizes), generator)[0]


def joint_failing(margins: Tensor, spread: Tensor) -> Tensor:
    """h = 1 − Π (1 − Φ(−q_j/s_j)) over rivals, from q (N, J) and s (J,), accurate where it is small."""
    each = distribution(-margins / spread).clamp(max=1 - 1e-12)
    return -torch.expm1(torch.log1p(-each).sum(1))


def stratified_choice(chance: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Places chosen with these chances, one from each of `count` equal parts of their sum, in random order."""
    order = torch.rand(count, dtype=torch.float64, device=chance.device, generator=generator)
    levels = (torch.arange(count, dtype=torch.float64, device=chance.device) + order) / count
    places = torch.searchsorted(chance.cumsum(0), levels).clamp(max=len(chance) - 1)
    shuffled = torch.rand(count, device=chance.device, generator=generator).argsort()
    return places[shuffled]
