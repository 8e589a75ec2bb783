"""The paper's Figure 2: how far Lemma 4, cut to a few terms, is from E[max(x₁,0) max(x₂,0)]."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from rich import box
from rich.table import Table
from torch import Tensor

from netmoments.normal import distribution
from netmoments.paper.series import relu_cross_moment_partial_sums
from netmoments.relu.marginal import relu_mean
from netmoments.relu.quadrature import nonlinear_part, nonlinear_part_by
from netmoments.relu.rules import graded

TERMS = (1, 5, 10, 20, 50)
MEANS = (-2.0, 2.0)
DEVIATIONS = (0.2, 2.0)
CORRELATIONS = (-0.7, 0.7)
SPACING = 0.2
EXTRA_CORRELATIONS = (0.0, 0.999)


@dataclass(frozen=True)
class SeriesError:
    """The largest absolute error of one truncation over the grid, where it is, and what it is for |ρ| ≤ 0.5."""

    terms: int
    largest: float
    at_correlation: float
    moderate: float


@dataclass(frozen=True)
class Figure2:
    points: int
    series: tuple[SeriesError, ...]
    kernel: float
    """The same for the exact kernel, against one with many times its nodes."""


def correlations() -> list[float]:
    return sorted([*_steps(*CORRELATIONS).tolist(), *EXTRA_CORRELATIONS])


def grid(rho: float) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """μ₁, μ₂, σ₁, σ₂ and ρ: every combination of the paper's values at one correlation."""
    means, deviations = _steps(*MEANS), _steps(*DEVIATIONS)
    corners = torch.meshgrid(means, means, deviations, deviations, indexing="ij")
    mu1, mu2, sigma1, sigma2 = (x.flatten() for x in corners)
    return mu1, mu2, sigma1, sigma2, torch.full_like(mu1, rho)


def cross_moment(mu1: Tensor, mu2: Tensor, sigma1: Tensor, sigma2: Tensor, rho: Tensor) -> Tensor:
    """E[max(x₁,0) max(x₂,0)] by the exact kernel, for tensors of one shape."""
    h, k = mu1 / sigma1, mu2 / sigma2
    covariance = rho * distribution(h) * distribution(k) + nonlinear_part(h, k, rho)
    return sigma1 * sigma2 * covariance + relu_mean(mu1, sigma1) * relu_mean(mu2, sigma2)


def run() -> Figure2:
    """All truncations over the whole grid, a correlation at a time."""
    points, kernel = 0, 0.0
    worst: dict[int, tuple[float, float]] = dict.fromkeys(TERMS, (0.0, 0.0))
    moderate = dict.fromkeys(TERMS, 0.0)
    for rho in correlations():
        place = grid(rho)
        points += place[0].numel()
        exact = cross_moment(*place)
        kernel = max(kernel, _kernel_error(*place))
        for terms, value in _chosen(relu_cross_moment_partial_sums(*place, terms=max(TERMS))):
            error = float((value - exact).abs().max())
            worst[terms] = max(worst[terms], (error, rho))
            if abs(rho) <= 0.5:
                moderate[terms] = max(moderate[terms], error)
    series = tuple(SeriesError(terms, *worst[terms], moderate=moderate[terms]) for terms in TERMS)
    return Figure2(points, series, kernel)


def draw(result: Figure2) -> Table:
    """The comparison as a table for the terminal."""
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title=f"The paper's series (Lemma 4) against the exact kernel, its Figure 2, {result.points:,} points",
    )
    table.add_column("method")
    for heading in ("largest error", "at ρ", "for |ρ| ≤ 0.5"):
        table.add_column(heading, justify="right")
    for row in result.series:
        name = f"series, {row.terms} term{'s' if row.terms > 1 else ''}"
        table.add_row(name, f"{row.largest:.1e}", f"{row.at_correlation:+.1f}", f"{row.moderate:.1e}")
    table.add_section()
    table.add_row("[bold]netmoments[/bold], against 160 nodes", f"[bold]{result.kernel:.1e}[/bold]", "", "")
    return table


def _steps(low: float, high: float) -> Tensor:
    count = round((high - low) / SPACING) + 1
    return torch.linspace(low, high, count, dtype=torch.float64)


def _chosen(partial_sums: Iterator[Tensor]) -> Iterator[tuple[int, Tensor]]:
    return ((terms, value) for terms, value in enumerate(partial_sums, start=1) if terms in TERMS)


def _kernel_error(mu1: Tensor, mu2: Tensor, sigma1: Tensor, sigma2: Tensor, rho: Tensor) -> float:
    h, k = mu1 / sigma1, mu2 / sigma2
    fine = nonlinear_part_by(graded(160, 1.0, steepness=6.0), h, k, rho)
    return float((sigma1 * sigma2 * (nonlinear_part(h, k, rho) - fine)).abs().max())
