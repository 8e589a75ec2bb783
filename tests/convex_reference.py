"""The sparse and smooth problem by successive convex programming with CVXPY and Clarabel: slow, and another way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sparse

Margins = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""From a shift (n,) to margins + γ (K,) and their gradients (K, n)."""


def differences(height: int, width: int) -> tuple[sparse.csr_matrix, sparse.csr_matrix]:
    """Forward differences across and down as matrices; the last column and the last row have none."""

    def along(size: int) -> sparse.dia_matrix:
        return sparse.diags([np.r_[-np.ones(size - 1), 0], np.ones(size - 1)], [0, 1], shape=(size, size))

    return (
        sparse.kron(sparse.eye(height), along(width)).tocsr(),
        sparse.kron(along(height), sparse.eye(width)).tocsr(),
    )


def objective(shift: np.ndarray, height: int, width: int) -> float:
    """‖μ‖₁ + isotropic TV of one channel."""
    across, down = differences(height, width)
    return float(np.abs(shift).sum() + np.hypot(across @ shift, down @ shift).sum())


@dataclass(frozen=True)
class Found:
    objective: float
    shift: np.ndarray


def convex(slopes: np.ndarray, limits: np.ndarray, lower: np.ndarray, upper: np.ndarray, height: int, width: int):
    """argmin ‖μ‖₁ + TV(μ) with slopes·μ ≤ limits in the box, by an interior-point method; None if there is none."""
    import cvxpy

    across, down = differences(height, width)
    shift = cvxpy.Variable(len(lower))
    lengths = cvxpy.norm(cvxpy.vstack([across @ shift, down @ shift]), 2, axis=0)
    problem = cvxpy.Problem(
        cvxpy.Minimize(cvxpy.norm1(shift) + cvxpy.sum(lengths)),
        [slopes @ shift <= limits, shift >= lower, shift <= upper],
    )
    problem.solve(solver=cvxpy.CLARABEL)
    return shift.value


def successive_convex(
    margins: Margins, lower: np.ndarray, upper: np.ndarray, height: int, width: int, rounds: int = 12
) -> Found | None:
    """Margins linearized at the last point, that problem solved, scaled to where the true margins hold; the best."""
    here, best = np.zeros_like(lower), None
    for number in range(rounds):
        value, slopes = margins(here)
        length = np.linalg.norm(slopes, axis=1)
        new = convex(slopes / length[:, None], (slopes @ here - value) / length, lower, upper, height, width)
        if new is None:
            return best
        scaled = _scaled(margins, new, lower, upper)
        if scaled is not None:
            cost = objective(scaled, height, width)
            before = np.inf if best is None else best.objective
            if cost < before:
                best = Found(cost, scaled)
            if before - cost < 1e-6 * cost and number > 3:
                break
        here = new if number < 4 else here + 0.7 * (new - here)
    return best


def _scaled(margins: Margins, shift: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> np.ndarray | None:
    def holds(t: float) -> bool:
        return bool((margins(np.clip(t * shift, lower, upper))[0] <= 0).all())

    low, high = 0.5, 2.0
    if not holds(high):
        return None
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return np.clip(high * shift, lower, upper)
