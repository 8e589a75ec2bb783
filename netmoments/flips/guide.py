"""A guide: a density of noise, from surrogates, under which the network is run where it is unsure whether it flips.

With h(ε) the probability of a flip by the surrogates and φ the density of N(0, I), samples have the density φ(ε) ρ(ε),

    ρ = g/G,   G = E g (the normalizer),   g = √(h (1 − h) + κ h),

which makes the variance of (1{flip} − h)/ρ least where h is right; κ allows for it not to be. Where flips are common,
the last term is κ min(h, 1 − h): h is a control variate there, and what is sure either way needs no samples. Some plain
samples then show how right h is (`Guide.calibrated`). A guide is a mixture of such densities, its parts.

As h depends on a few directions of the noise only, it can be evaluated at many points without running the network.
These points form a pool, from which points are chosen with such chances that they are samples of φ ρ. The pool is drawn
from tilted Gaussians: N(0, I) tilted by exp(−θ q), for some θ between 0 and the saddlepoint, at which the surrogate
margin q has mean 0. Their densities are φ exp(−θ q − K(θ)), so that the weight of a point in the mixture of them
(balance heuristic, Veach & Guibas 1995; Owen & Zhou 2000) depends on q alone, in any number of directions.
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
SMALL_POOL = 8_000
"""Points of a pool from which few samples are drawn."""
TRIAL_POOL = 4_000
"""Points that show how much each Gaussian of a pool is needed."""
NET, NETS = 8192, 8
"""Points of a net that fills the space evenly, and how many nets E h is averaged over."""
MOST_TILTS = 16
"""A pool has at most so many Gaussians for each surrogate, apart from N(0, I)."""
TILT_STEP = 0.8
"""The step in θ from one Gaussian to the next, times the standard deviation of q."""
MOST_TILT = 100.0
"""The largest θ, times the standard deviation of q: nothing is looked for farther away."""
LEAST_SHARE = 0.1
"""This share of a pool is divided equally among its Gaussians, the rest by need."""
CONTROL_FROM = 0.005
"""Flips are common if the surrogates expect at least this probability. They are then a control variate."""
DOUBT = 0.1
"""κ: how wrong a surrogate may be where it is sure of a flip."""
SHARP, AS_FITTED = 0, 1
"""The places of a guide's first two parts. Both are g, with h from surrogates of smaller spreads s (`SHARP`) and of the
spreads that were fitted. In a calibrated guide the first part has the calibrated h instead.
"""
SHARES = (0.1, 0.66, 0.2, 0.04)
"""The shares of the parts of a guide. The third, defensive part are the tilted Gaussians themselves, which keep weights
1/ρ bounded where surrogates are sure and wrong (defensive mixture, Hesterberg 1995). The last is `Widened` noise, which
meets flips that surrogates of few directions know nothing of.
"""
WIDE_DIRECTIONS, FEW_DIRECTIONS = 8, 32
"""The noise is widened along so many directions at most: those along which surrogates vary most. Where surrogates have
more than the second number, such noise would hardly meet other faces, and is not widened.
"""
FACTORS, WIDE_FLIPS, WIDE_POINTS = (1.5, 2.0, 2.5, 3.0, 4.0, 5.0), 0.05, 2000
"""It is widened by the first of these factors with which surrogates expect such a share of flips, at so many points."""
CALIBRATED_SHARES = (0.5, 0.5)
"""The shares of the parts of a calibrated guide. It has no third part, as plain samples keep weights bounded."""
LEAST_DEFENCE = 0.02
"""Added to the share of each surrogate in the defensive part, for those that hardly matter."""
LARGEST_LOG_RATIO = 600.0
"""Ratios of densities are cut at the exponential of this, which float64 can still multiply."""
AFFORDABLE = 2.5
"""The largest product θ·s of saddlepoint and spread. Beyond it, what a surrogate leaves unexplained costs more runs
than can be afforded.
"""
DEFENSIVE = 0.5
"""The defensive part has the tilted Gaussians whose θ is at least this share of the largest."""


def guide(surrogates: tuple[Quadratic, ...], generator: torch.Generator, points: int = POOL) -> Guide:
    """The guide of some surrogates, with a pool of so many points.

    A trial pool shows first how much each Gaussian and each surrogate is needed.
    """
    bases = torch.cat([surrogate.basis.double() for surrogate in surrogates], 1)
    left, singular, _ = torch.linalg.svd(bases, full_matrices=False)
    basis = left[:, singular > 1e-5 * singular[0]]
    nothing, local_bases = basis.new_zeros(0), tuple(basis.mT @ surrogate.basis.double() for surrogate in surrogates)
    centres = [saddlepoint(surrogate) for surrogate in surrogates]
    tilts = tuple(tilts_of(*pair) for pair in zip(surrogates, centres, strict=True))
    empty = Guide(
        surrogates=surrogates,
        generator=generator,
        tilts=tilts,
        defence=(1 / len(surrogates),) * len(surrogates),
        spreads=tuple(spreads_of(*pair) for pair in zip(surrogates, centres, strict=True)),
        basis=basis.to(surrogates[0].basis.dtype),
        local_bases=local_bases,
        widened=Widened(varying_directions(surrogates, local_bases), FACTORS[0]),
        pool=nothing,
        weights=nothing,
        chances=nothing,
    )
    empty = replace(empty, widened=empty.widened_enough())
    kinds = [len(each.thetas) for each in tilts] + [1]
    total = sum(kinds)
    equal = [torch.full((kind,), max(1, TRIAL_POOL // total), device=basis.device) for kind in kinds]
    trial, needs = empty._filled(equal)
    attention = [share + LEAST_DEFENCE for share in trial.shares]
    defence = tuple(share / sum(attention) for share in attention)
    empty = replace(empty, defence=defence, common=trial.expected >= CONTROL_FROM)
    pool_shares = (1 - LEAST_SHARE) * needs + LEAST_SHARE / total
    sizes = (pool_shares * points).long().clamp(min=2).split(kinds)
    return replace(empty, pool_sizes=tuple(sizes))._filled(list(sizes))[0]


@dataclass(frozen=True, eq=False)
class Guide:
    """The density φ ρ of J surrogates, with a pool of M points in the K directions that they depend on.

    Q (n, K) is an orthonormal basis of these directions, and z = Qᵀε are coordinates in it. Across them, samples are
    standard normal.
    """

    surrogates: tuple[Quadratic, ...]
    generator: torch.Generator
    """Where the points of pools and the choices among them come from."""
    spreads: tuple[tuple[float, float], ...]
    """For each surrogate, s in the parts `SHARP` and `AS_FITTED`."""
    tilts: tuple[Tilts, ...]
    defence: tuple[float, ...]
    """The share of each surrogate in the defensive part."""
    basis: Tensor
    """Q, (n, K)."""
    local_bases: tuple[Tensor, ...]
    """QᵀU of each surrogate's basis U, (K, k)."""
    widened: Widened
    pool: Tensor
    """Points z (M, K)."""
    weights: Tensor
    """The weight of each point in a mean over the noise, (M,)."""
    chances: Tensor
    """The chance of each point to be chosen, (M,); they sum to 1."""
    normalizers: tuple[float, ...] = ()
    """G = E g of each part of the guide, by which it is divided: then its mean under the noise is 1."""
    expected: float = 0.0
    """E h, the probability of a flip by the surrogates."""
    expected_error: float = 0.0
    """The standard error of E h, due to the size of the pool."""
    predicted_variance: float = math.inf
    """The variance of one run's estimate over the square of the probability, if the surrogates are right: of 1{flip}/ρ
    where flips are rare, of (1{flip} − h)/ρ where they are common.
    """
    shares: tuple[float, ...] = ()
    """The share of each surrogate in the sum of all E h_j."""
    pool_sizes: tuple[Tensor, ...] = ()
    """For each surrogate, the number of points from each of its Gaussians, (T,); and last that of widened ones, (1,).
    """
    common: bool = False
    """Whether flips are expected so often that surrogates are a control variate."""
    calibration: tuple[float, float] | None = None
    """By how much the smallest margins of plain samples were above those of the surrogates: mean and deviation."""
    calibrated_expected: tuple[float, float] = (0.0, 0.0)
    """E h of the calibrated h, and its standard error."""

    def draw(self, normal: Tensor) -> Tensor:
        """Samples ε (N, n) of the guide: standard normal numbers of that shape, moved to chosen points of the pool."""
        chosen = stratified_choice(self.chances, len(normal), self.generator)
        z = self.pool[chosen].to(normal.dtype)
        return normal + (z - normal @ self.basis) @ self.basis.mT

    def ratio(self, white: Tensor) -> Tensor:
        """ρ (N,) at ε (N, n): the density of samples over that of N(0, I)."""
        z = self.coordinates(white)
        return self.ratio_of_margins(self.surrogate_margins(z), self.widened.squares(z))

    def ratio_of_margins(self, margins: Tensor, squares: Tensor) -> Tensor:
        """ρ (N,) from the surrogates' margins (N, J), and the squared lengths (N,) along the widened directions."""
        parts = self._parts(margins, squares)
        return self._mixed([part / normalizer for part, normalizer in zip(parts, self.normalizers, strict=True)])

    def flip_chance(self, white: Tensor) -> Tensor:
        """h (N,) at ε (N, n), by the surrogates as they were fitted."""
        return self._flip_chance(self.surrogate_margins(self.coordinates(white)), AS_FITTED)

    def calibrated_flip_chance(self, white: Tensor) -> Tensor:
        """The calibrated h (N,) at ε (N, n)."""
        return self._flip_chance(self.surrogate_margins(self.coordinates(white)), SHARP)

    def coordinates(self, white: Tensor) -> Tensor:
        """z = Qᵀε, (N, K)."""
        return (white @ self.basis).double()

    def surrogate_margins(self, z: Tensor) -> Tensor:
        """The surrogates' margins (N, J) at z (N, K)."""
        with_bases = zip(self.surrogates, self.local_bases, strict=True)
        return torch.stack([surrogate.at(z @ local) for surrogate, local in with_bases], 1)

    def widened_enough(self) -> Widened:
        """Noise that is widened until surrogates expect flips, or by the largest factor."""
        shape = (WIDE_POINTS, self.basis.shape[1])
        normal = torch.randn(shape, dtype=torch.float64, device=self.basis.device, generator=self.generator)
        for factor in FACTORS:
            widened = replace(self.widened, factor=factor)
            margins = self.surrogate_margins(widened.moved(normal))
            if float(self._flip_chance(margins, AS_FITTED).mean()) >= WIDE_FLIPS:
                break
        return widened

    def refilled(self) -> Guide:
        """The same guide with fresh points, as a pool has the density φ ρ only on average over pools."""
        fresh = self._filled(list(self.pool_sizes))[0]
        return replace(self, pool=fresh.pool, weights=fresh.weights, chances=fresh.chances)

    def without_pool(self) -> Guide:
        """The same guide, only to evaluate its density: no samples are drawn from it any more."""
        nothing = self.weights[:0]
        return replace(self, pool=nothing, weights=nothing, chances=nothing)

    def averaged_over_pools(self, pools: int) -> Guide:
        """The same guide with normalizers and E h that are means over so many pools, of which this one is the first."""
        rows = [(self.expected, *self.normalizers)]
        for _ in range(pools - 1):
            fresh = self._filled(list(self.pool_sizes))[0]
            rows.append((fresh.expected, *fresh.normalizers))
        expected, *normalizers = torch.tensor(rows, dtype=torch.float64).mean(0).tolist()
        error = self.expected_error / math.sqrt(pools)
        return replace(self, expected=expected, normalizers=tuple(normalizers), expected_error=error)

    def averaged_over_nets(self) -> Guide:
        """The same guide with a more exact E h, for flips that are common.

        E h is averaged over nets of points that fill the space evenly, the surrogates' slopes first (randomized
        quasi-Monte Carlo, Owen 1997). Its error is that of the mean of independent nets.
        """
        with_bases = zip(self.surrogates, self.local_bases, strict=True)
        slopes = [local @ surrogate.slope.to(local) for surrogate, local in with_bases]
        size, device = self.basis.shape[1], self.basis.device
        columns = torch.cat([torch.stack(slopes, 1), torch.eye(size, dtype=torch.float64, device=device)], 1)
        rotation = torch.linalg.qr(columns).Q
        means = []
        for _ in range(NETS):
            seed = int(torch.randint(2**31, (1,), device=device, generator=self.generator))
            net = torch.quasirandom.SobolEngine(size, scramble=True, seed=seed).draw(NET, dtype=torch.float64)
            z = torch.special.ndtri(net.clamp(1e-12, 1 - 1e-12)).to(device) @ rotation.mT
            margins = self.surrogate_margins(z)
            means.append([float(self._flip_chance(margins, part).mean()) for part in (SHARP, AS_FITTED)])
        values = torch.tensor(means, dtype=torch.float64)
        (sharp, fitted), errors = values.mean(0).tolist(), (values.std(0) / math.sqrt(NETS)).tolist()
        known = (sharp, errors[SHARP])
        return replace(self, expected=fitted, expected_error=errors[AS_FITTED], calibrated_expected=known)

    def calibrated(self, white: Tensor, smallest: Tensor) -> Guide:
        """The guide with h = Φ(−(q + m)/d) in its first part, for flips that are common, beside plain samples.

        q is the smallest surrogate margin. m and d are the mean and the deviation of how far the smallest margins (N,)
        at plain samples ε (N, n) are above q; d is no more than these margins vary, and no less than what the best
        surrogate leaves unexplained.
        """
        above = smallest - self.surrogate_margins(self.coordinates(white)).amin(1)
        least = min(spreads[AS_FITTED] for spreads in self.spreads)
        deviation = max(min(float(above.std()), float(smallest.std())), least)
        return replace(self, calibration=(float(above.mean()), deviation))._planned()

    def _flip_chance(self, margins: Tensor, part: int) -> Tensor:
        """h (N,) of one of the first two parts, from the surrogates' margins (N, J)."""
        if part == SHARP and self.calibration is not None:
            above, deviation = self.calibration
            return distribution(-(margins.amin(1) + above) / deviation).clamp(1e-12, 1 - 1e-12)
        return joint_flip_chance(margins, margins.new_tensor([spreads[part] for spreads in self.spreads]))

    def _parts(self, margins: Tensor, squares: Tensor) -> list[Tensor]:
        """The parts (N,) of the guide before they are divided by their normalizers."""
        parts = [uncertainty(self._flip_chance(margins, part), self.common) for part in (SHARP, AS_FITTED)]
        if self.calibration is not None:
            return parts
        wide = self.widened.log_ratios(squares).clamp(max=LARGEST_LOG_RATIO).exp()
        return [*parts, self._defensive(margins), wide]

    def _mixed(self, parts: list[Tensor]) -> Tensor:
        """The mixture of parts that have mean 1 under the noise."""
        shares = SHARES if self.calibration is None else CALIBRATED_SHARES
        return torch.stack([share * part for share, part in zip(shares, parts, strict=True)]).sum(0)

    def _defensive(self, margins: Tensor) -> Tensor:
        """The mean (N,) of the densities of tilted Gaussians over that of N(0, I), for those with a large θ."""
        terms = []
        for j, tilts in enumerate(self.tilts):
            far = tilts.thetas.abs() >= DEFENSIVE * tilts.thetas.abs().max()
            mean = tilts.log_ratios(margins[:, j])[:, far].logsumexp(1) - math.log(int(far.sum()))
            terms.append(mean + math.log(self.defence[j]))
        return torch.stack(terms, 1).logsumexp(1).clamp(max=LARGEST_LOG_RATIO).exp()

    def _filled(self, sizes: list[Tensor]) -> tuple[Guide, Tensor]:
        """The guide with a pool of so many points of each Gaussian, and the probability (all T,) that a sample has its
        point from each of them.

        `sizes` are `pool_sizes`.
        """
        points, origins = [], []
        *of_tilts, of_wide = sizes
        for tilts, local, counts in zip(self.tilts, self.local_bases, of_tilts, strict=True):
            which = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
            shape = (len(which), local.shape[0])
            normal = torch.randn(shape, dtype=local.dtype, device=local.device, generator=self.generator)
            along = normal @ local
            points.append(normal + (tilts.moved(which, along) - along) @ local.mT)
            origins.append(which + sum(map(len, sizes[: len(points) - 1])))
        shape = (int(of_wide), self.basis.shape[1])
        normal = torch.randn(shape, dtype=torch.float64, device=of_wide.device, generator=self.generator)
        points.append(self.widened.moved(normal))
        counts = torch.cat(sizes)
        origins.append(torch.full((int(of_wide),), len(counts) - 1, device=of_wide.device))
        pool, origin = torch.cat(points), torch.cat(origins)
        margins, wide = self.surrogate_margins(pool), self.widened.log_ratios(self.widened.squares(pool))
        tilted = [tilts.log_ratios(margins[:, j]) for j, tilts in enumerate(self.tilts)]
        ratios = torch.cat([*tilted, wide.unsqueeze(1)], 1)
        weights = (-(ratios + counts.log()).logsumexp(1)).exp()
        order = margins.amin(1).argsort()
        filled = replace(self, pool=pool[order], weights=weights[order])._planned()
        nothing = filled.chances.new_zeros(len(counts))
        return filled, nothing.index_add(0, origin[order], filled.chances)

    def _planned(self) -> Guide:
        """The guide with what follows from its pool: normalizers, chances of the points, E h and the variance."""
        margins, weights = self.surrogate_margins(self.pool), self.weights
        parts = [weights * part for part in self._parts(margins, self.widened.squares(self.pool))]
        normalizers = (*(float(part.sum()) for part in parts[:2]), 1.0, 1.0)[: len(parts)]
        total = self._mixed(
            [part / max(normalizer, 1e-300) for part, normalizer in zip(parts, normalizers, strict=True)]
        )
        flip_chance = self._flip_chance(margins, AS_FITTED)
        terms = weights * flip_chance
        expected = float(terms.sum())
        rho = (total / weights.clamp(min=1e-300)).clamp(min=1e-300)
        numerator = flip_chance * (1 - flip_chance) if self.common else flip_chance
        variance = float((weights * numerator / rho).sum()) - (0.0 if self.common else expected**2)
        fitted = margins.new_tensor([spreads[AS_FITTED] for spreads in self.spreads])
        each = (weights.unsqueeze(1) * distribution(-margins / fitted)).sum(0)
        return replace(
            self,
            chances=total / total.sum(),
            normalizers=normalizers,
            expected=expected,
            predicted_variance=max(variance, 0.0) / expected**2 if expected**2 > 0 else math.inf,
            expected_error=float(terms.std()) * math.sqrt(len(terms)),
            shares=tuple((each / each.sum().clamp(min=1e-300)).tolist()),
        )


@dataclass(frozen=True, eq=False)
class Widened:
    """N(0, I) in K directions, c times as wide along some of them."""

    directions: Tensor
    """D (K, w), orthonormal."""
    factor: float
    """c."""

    def squares(self, z: Tensor) -> Tensor:
        """|Dᵀz|² (N,) at z (N, K)."""
        return (z @ self.directions).square().sum(1)

    def moved(self, normal: Tensor) -> Tensor:
        """Samples (N, K) from standard normal numbers (N, K)."""
        return normal + (self.factor - 1) * (normal @ self.directions) @ self.directions.mT

    def log_ratios(self, squares: Tensor) -> Tensor:
        """The logarithm (...) of its density over that of N(0, I): −w log c + ½ (1 − 1/c²) |Dᵀz|²."""
        return 0.5 * (1 - self.factor**-2) * squares - self.directions.shape[1] * math.log(self.factor)


def varying_directions(surrogates: tuple[Quadratic, ...], local_bases: tuple[Tensor, ...]) -> Tensor:
    """The directions (K, w) along which surrogates vary most: Σ_j U_j (b bᵀ + ½ H²) U_jᵀ/deviation², leading ones; none
    (w = 0) where K is not small.
    """
    device, size = local_bases[0].device, local_bases[0].shape[0]
    if size > FEW_DIRECTIONS:
        return torch.zeros(size, 0, dtype=torch.float64, device=device)
    power = torch.zeros(size, size, dtype=torch.float64, device=device)
    for surrogate, local in zip(surrogates, local_bases, strict=True):
        along, curvature = local @ surrogate.slope.to(device), local * surrogate.curvature.to(device)
        total = along.unsqueeze(1) * along + 0.5 * curvature @ curvature.mT
        power = power + total / max(surrogate.deviation, 1e-150) ** 2
    return torch.linalg.eigh(power).eigenvectors[:, -WIDE_DIRECTIONS:]


@dataclass(frozen=True)
class PlainNoise:
    """In the place of a guide, the noise itself: ρ = 1, and h = 0."""

    expected: float = 0.0
    expected_error: float = 0.0
    predicted_variance: float = 0.0

    def without_pool(self) -> PlainNoise:
        return self

    def draw(self, normal: Tensor) -> Tensor:
        return normal

    def ratio(self, white: Tensor) -> Tensor:
        return torch.ones(len(white), dtype=torch.float64, device=white.device)

    def flip_chance(self, white: Tensor) -> Tensor:
        return torch.zeros(len(white), dtype=torch.float64, device=white.device)


def joint_flip_chance(margins: Tensor, spread: Tensor) -> Tensor:
    """h = 1 − Π (1 − Φ(−q_j/s_j)) over surrogates, from q (N, J) and s (J,), accurate where it is small."""
    each = distribution(-margins / spread).clamp(max=1 - 1e-12)
    return -torch.expm1(torch.log1p(-each).sum(1))


def uncertainty(flip_chance: Tensor, common: bool) -> Tensor:
    """g = √(h (1 − h) + κ h), or √(h (1 − h) + κ min(h, 1 − h)) where flips are common."""
    doubted = torch.minimum(flip_chance, 1 - flip_chance) if common else flip_chance
    return (flip_chance * (1 - flip_chance) + DOUBT * doubted).sqrt()


def spreads_of(surrogate: Quadratic, centre: float) -> tuple[float, float]:
    """The spreads s of a surrogate in the parts `SHARP` and `AS_FITTED` of a guide; `centre` is its saddlepoint θ.

    The first is at most 1/θ, at which errors of the surrogate would hardly cost anything. The second is the fitted one,
    but at most `AFFORDABLE`/θ, as runs grow like exp((θs)²).
    """
    scale = 1 / max(abs(centre), 1e-300)
    return min(surrogate.spread, scale), min(surrogate.spread, AFFORDABLE * scale)


def stratified_choice(chances: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """`count` indices drawn with these chances (M,), which sum to 1, in random order.

    The sum is cut into `count` equal parts and one index drawn from each, so that each index comes as often as it
    should, to one more or less.
    """
    uniform = torch.rand(count, dtype=torch.float64, device=chances.device, generator=generator)
    places = (torch.arange(count, dtype=torch.float64, device=chances.device) + uniform) / count
    chosen = torch.searchsorted(chances.cumsum(0), places).clamp(max=len(chances) - 1)
    order = torch.rand(count, device=chances.device, generator=generator).argsort()
    return chosen[order]


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
        """Points (N, k) of the Gaussians with indices `which` (N,), from standard normal numbers (N, k)."""
        return self.means[which] + self.variances[which].sqrt() * normal

    def log_ratios(self, margin: Tensor) -> Tensor:
        """The logarithm of each density over that of N(0, I), (N, T), at points with surrogate margin q (N,)."""
        return -margin.unsqueeze(1) * self.thetas - self.cumulants


def tilts_of(surrogate: Quadratic, centre: float) -> Tilts:
    """Tilted Gaussians from one step of θ beyond the saddlepoint (`centre`) back towards 0, and N(0, I) itself.

    There are at most `MOST_TILTS` beside the last.
    """
    step = TILT_STEP / max(surrogate.deviation, 1e-300)
    sign = 1.0 if centre >= 0 else -1.0
    count = min(MOST_TILTS, int(abs(centre) / step) + 3)
    thetas = sign * (abs(centre) + step * (1 - torch.arange(count, dtype=torch.float64)))
    allowed = ((1 + thetas.unsqueeze(1) * surrogate.curvature) > 0.02).all(1)
    thetas = torch.cat([thetas[allowed], thetas.new_zeros(1)])
    return Tilts.at(surrogate, thetas).to(surrogate.basis.device)


def saddlepoint(surrogate: Quadratic) -> float:
    """The θ at which the tilted q has mean 0, or the nearest for which I + θH is positive definite and |θ| not absurd.

    The limit of |θ| is `MOST_TILT` over the standard deviation of q.
    """
    values = surrogate.curvature
    most = MOST_TILT / max(surrogate.deviation, 1e-300)
    high = min(most, 0.98 / max(-float(values.min()), 1e-300))
    low = max(-most, -0.98 / max(float(values.max()), 1e-300))
    for _ in range(8):  # each narrows the interval 32 times
        thetas = torch.linspace(low, high, 33, dtype=torch.float64)
        above = int((tilted_means(surrogate, thetas) > 0).sum())
        low, high = float(thetas[max(above - 1, 0)]), float(thetas[min(above, 32)])
    return 0.5 * (low + high)


def tilted_means(surrogate: Quadratic, thetas: Tensor) -> Tensor:
    """E q under N(0, I) tilted by exp(−θ q), (T,): it falls as θ grows."""
    tilts = Tilts.at(surrogate, thetas)
    square = surrogate.curvature * (tilts.means.square() + tilts.variances)
    return surrogate.constant + tilts.means @ surrogate.slope + 0.5 * square.sum(1)
