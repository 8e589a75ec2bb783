"""E[max(x₁,0) max(x₂,0)] over the grid of the paper's Figure 2: errors of its series, of sampling, of quadrature."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from netmoments.normal import distribution
from netmoments.paper import relu_cross_moment_partial_sums
from netmoments.relu.bivariate import nonlinear_part, nonlinear_part_by
from netmoments.relu.marginal import relu_mean
from netmoments.relu.quadrature_rules import graded, plain
from netmoments.sampling.evaluation import random_seed
from netmoments.sweep.item import Columns
from reproduction.published import FIGURE_2_TERMS

NAME = "figure-2"
TERMS = FIGURE_2_TERMS
NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
MEANS = (-2.0, 2.0)
DEVIATIONS = (0.2, 2.0)
SPACING = 0.2
PAPER_CORRELATIONS = (-0.7, -0.5, -0.3, -0.1, 0.0, 0.1, 0.3, 0.5, 0.7, 0.999)
SEAM = 1 / math.sqrt(2)
"""Where Lemma 4 changes its series, and neither converges."""
REFERENCE = graded(160, 1.0, steepness=6.0)
CHUNK = 4096
"""Samples at a time: 7 MB for each of the two matrices."""

Place = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""μ₁, μ₂, σ₁, σ₂ and ρ."""


def every_correlation() -> tuple[float, ...]:
    """The paper's, and more of them for curves over ρ: every 0.05, and closer at ±1 and around ±1/√2."""
    steps = [i / 20 for i in range(20)]
    ends = [0.97, 0.98, 0.99, 0.995, 0.999]
    apart = [0.0001, 0.001, 0.003, 0.01, 0.017, 0.025, 0.035]
    positive = [*steps, *ends, SEAM, *(SEAM + d for d in apart), *(SEAM - d for d in apart)]
    return tuple(sorted({*PAPER_CORRELATIONS, *positive, *(-rho for rho in positive if rho)}))


def places() -> tuple[Tensor, Tensor]:
    """Every combination of the grid's mean and deviation of one variable, 210 of them."""
    means, deviations = torch.meshgrid(_steps(*MEANS), _steps(*DEVIATIONS), indexing="ij")
    return means.flatten(), deviations.flatten()


def grid(rho: float, device: str = "cpu") -> Place:
    """Every pair of places at one correlation, (210, 210) each."""
    mu, sigma = (x.to(device) for x in places())
    mu1, mu2 = torch.meshgrid(mu, mu, indexing="ij")
    sigma1, sigma2 = torch.meshgrid(sigma, sigma, indexing="ij")
    return mu1, mu2, sigma1, sigma2, torch.full_like(mu1, rho)


def cross_moment(mu1: Tensor, mu2: Tensor, sigma1: Tensor, sigma2: Tensor, rho: Tensor) -> Tensor:
    """E[max(x₁,0) max(x₂,0)] by the exact kernel, for tensors of one shape."""
    h, k = mu1 / sigma1, mu2 / sigma2
    covariance = rho * distribution(h) * distribution(k) + nonlinear_part(h, k, rho)
    return sigma1 * sigma2 * covariance + relu_mean(mu1, sigma1) * relu_mean(mu2, sigma2)


def truncated_cross_moments(place: Place) -> Iterator[tuple[int, Tensor]]:
    """Lemma 4 with each of the numbers of terms of the figure."""
    sums = enumerate(relu_cross_moment_partial_sums(*place, terms=max(TERMS)), start=1)
    return ((terms, value) for terms, value in sums if terms in TERMS)


def sampled_cross_moments(rho: float, samples: int, generator: Generator, device: str) -> Tensor:
    """E[max(x₁,0) max(x₂,0)] by Monte Carlo for all pairs of places, (210, 210), from the same standard normals.

    relu(μ₁ + σ₁z₁) over all samples is a matrix, relu(μ₂ + σ₂(ρz₁ + √(1−ρ²)z₂)) another: their product has all pairs.
    """
    mu, sigma = (x.to(device).unsqueeze(1) for x in places())
    total = mu.new_zeros(len(mu), len(mu))
    for start in range(0, samples, CHUNK):
        count = min(CHUNK, samples - start)
        z = torch.randn(2, count, dtype=torch.float64, generator=generator).to(device)
        other = rho * z[0] + math.sqrt((1 - rho) * (1 + rho)) * z[1]
        first, second = (torch.addcmul(mu, sigma, x).relu_() for x in (z[0], other))
        total.addmm_(first, second.T)
    return total / samples


def quadrature_errors(place: Place) -> list[float]:
    """The largest absolute error with each number of nodes, and of the shipped kernel, against 160 nodes."""
    mu1, mu2, sigma1, sigma2, rho = place
    h, k, scale = mu1 / sigma1, mu2 / sigma2, sigma1 * sigma2
    fine = nonlinear_part_by(REFERENCE, h, k, rho)
    by_nodes = (nonlinear_part_by(plain(count, 1.0), h, k, rho) for count in NODES)
    return [largest(scale * (value - fine)) for value in (*by_nodes, nonlinear_part(h, k, rho))]


def largest(error: Tensor) -> float:
    return float(error.abs().max())


@dataclass(frozen=True)
class GridErrorSweep:
    """One item a correlation, one row an item; Monte Carlo at the paper's correlations only, NaN at the others."""

    samples: int
    seed: int
    correlations: tuple[float, ...] = field(default_factory=every_correlation)
    name: str = "series"
    unit: str = "points"

    @property
    def configuration(self) -> Mapping[str, Any]:
        return {
            "samples": self.samples,
            "seed": self.seed,
            "correlations": list(self.correlations),
            "terms": list(TERMS),
            "nodes": list(NODES),
        }

    @property
    def counts(self) -> tuple[int, ...]:
        return (len(places()[0]) ** 2,) * len(self.correlations)

    def prepare(self, device: str) -> Callable[[int], Columns]:
        def compute(item: int) -> Columns:
            row = self._row(item, device)
            return {name: np.array([value]) for name, value in row.items()}

        return compute

    def _row(self, item: int, device: str) -> dict[str, float]:
        rho = self.correlations[item]
        place = grid(rho, device)
        exact = cross_moment(*place)
        row = {"rho": rho, "monte_carlo": math.nan}
        series = dict(truncated_cross_moments(place))
        row |= {f"series_{n}": largest(value - exact) for n, value in series.items()}
        row |= {f"sampled_{n}": math.nan for n in TERMS}
        *by_nodes, row["kernel"] = quadrature_errors(place)
        row |= {f"nodes_{n}": error for n, error in zip(NODES, by_nodes, strict=True)}
        if rho in PAPER_CORRELATIONS:
            generator = Generator().manual_seed(random_seed(self.seed, NAME, item))
            sampled = sampled_cross_moments(rho, self.samples, generator, device)
            row["monte_carlo"] = largest(sampled - exact)
            row |= {f"sampled_{n}": largest(value - sampled) for n, value in series.items()}
        return row


def _steps(low: float, high: float) -> Tensor:
    count = round((high - low) / SPACING) + 1
    return torch.linspace(low, high, count, dtype=torch.float64)
