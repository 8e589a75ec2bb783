"""The two integrals of a pair of ReLUs to 25 digits by mpmath, in the angle t: another form than the one tested.

With φ, Φ the normal density and distribution, a pair of unit variances, means h and k and correlation ρ has

    Cov(relu z₁, relu z₂) = ρ Φ(h) Φ(k) + J,    J = (1/2π) ∫₀^{asin ρ} (ρ − sin t) g(t) dt,
    P(z₁ > 0, z₂ > 0)     =   Φ(h) Φ(k) + D,    D = (1/2π) ∫₀^{asin ρ} g(t) dt,
    g(t) = exp(−((h − k sin t)² / cos² t + k²) / 2).

`python -m tests.reference.bivariate_integrals` writes `bivariate_integrals.csv` anew (a minute).
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import mpmath
import numpy as np

PATH = Path(__file__).with_suffix(".csv")
COUNT = 100
"""Points in double precision, and as many whose numbers are exact in single precision."""


class Point(NamedTuple):
    h: float
    k: float
    rho: float


class Integrals(NamedTuple):
    nonlinear: mpmath.mpf
    """J."""
    excess: mpmath.mpf
    """D."""


def hard_points(count: int, correlation: float | None = None) -> tuple[np.ndarray, ...]:
    """h, k and ρ crowded where the integrands are steep: h ≈ ±k at all scales, ρ → ±1 at all scales, tails, zeros."""
    rng = np.random.default_rng(7)
    sign = rng.choice([-1.0, 1.0], count)
    h = rng.uniform(-8, 8, count) * rng.choice([1, 0.3, 0.0], count)
    k = sign * h + 10.0 ** rng.uniform(-16, 0.8, count) * rng.choice([-1, 1, 0], count)
    k = np.where(rng.random(count) < 0.2, rng.uniform(-8, 8, count), k)
    if correlation is None:
        rho = sign * (1 - np.where(rng.random(count) < 0.2, 0, 10.0 ** rng.uniform(-17, -2, count)))
        rho = np.where(rng.random(count) < 0.4, rng.uniform(-1, 1, count), rho)
    else:
        rho = sign * correlation
    return h, k, rho


def exact_integrals(h: float, k: float, rho: float) -> Integrals:
    """J and D at 34 digits, on pieces of the path that shrink towards its end, where g may fall within 10⁻²² of it."""
    with mpmath.workdps(34):
        h, k, rho = mpmath.mpf(h), mpmath.mpf(k), mpmath.mpf(rho)

        def height(t: mpmath.mpf) -> mpmath.mpf:
            return mpmath.exp(-((h - k * mpmath.sin(t)) ** 2 / mpmath.cos(t) ** 2 + k * k) / 2)

        end = mpmath.asin(rho)
        path = [0, *(end * (1 - mpmath.mpf(10) ** -j) for j in range(1, 14)), end * (1 - mpmath.mpf(10) ** -26)]
        return Integrals(
            mpmath.quad(lambda t: (rho - mpmath.sin(t)) * height(t), path) / (2 * mpmath.pi),
            mpmath.quad(height, path) / (2 * mpmath.pi),
        )


def rows() -> Iterator[tuple[str, Point, Integrals]]:
    """The dtype that has the numbers exactly, the point, its integrals."""
    places = np.stack(hard_points(COUNT), -1)
    for dtype in ("float64", "float32"):
        for place in places.astype(dtype).tolist():
            yield dtype, Point(*place), exact_integrals(*place)


def write() -> None:
    with PATH.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["dtype", "h_hex", "k_hex", "rho_hex", "nonlinear_part", "orthant_excess"])
        for dtype, place, integrals in rows():
            digits = [mpmath.nstr(value, 25) for value in integrals]
            table.writerow([dtype, *(value.hex() for value in place), *digits])


if __name__ == "__main__":
    write()
