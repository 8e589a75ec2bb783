"""The paper's Figure 2: the error of Lemma 4, truncated to a few terms, for E[max(x₁,0) max(x₂,0)] over a grid."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich import box
from rich.table import Table
from torch import Generator, Tensor

from netmoments.checks import random_seed
from netmoments.normal import distribution
from netmoments.paper import relu_cross_moment_partial_sums
from netmoments.relu.bivariate import nonlinear_part, nonlinear_part_by
from netmoments.relu.marginal import relu_mean
from netmoments.relu.quadrature_rules import graded, plain
from netmoments.report.pictures import BLUE, INK, ORANGE, SMALL, new_figure
from netmoments.sweep.item import Columns
from reproduction.experiment import BesidePaper, Drawing, Outcome, Panel, Settings
from reproduction.plots import AMBER, GREEN, GREY, PURPLE, SKY, dress
from reproduction.published import FIGURE_2_ERROR_5_TERMS, FIGURE_2_ERROR_20_TERMS, FIGURE_2_TERMS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "figure-2"
TERMS = FIGURE_2_TERMS
"""Numbers of terms at which Lemma 4 is truncated."""
NODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of nodes of our quadrature."""
MEANS = (-2.0, 2.0)
DEVIATIONS = (0.2, 2.0)
SPACING = 0.2
"""The paper's grid for both variables: the ranges of means and deviations, and the step of either."""
PAPER_CORRELATIONS = (-0.7, -0.5, -0.3, -0.1, 0.0, 0.1, 0.3, 0.5, 0.7, 0.999)
SEAM = 1 / math.sqrt(2)
"""The |ρ| at which Lemma 4 changes from one series to the other, and neither converges."""
MODERATE = 0.5
"""Errors are also given for |ρ| up to this."""
REFERENCE = graded(160, 1.0, steepness=6.0)
"""The rule with which the quadrature is compared."""
CHUNK = 4096
"""Samples processed at a time; each of the two matrices takes 7 MB."""
ROUNDING = 1e-17
"""The value at which an error of exactly zero is drawn."""
SHADES = (AMBER, ORANGE, PURPLE, SKY, BLUE)
MARKERS = "osD^v"
Place = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""μ₁, μ₂, σ₁, σ₂ and ρ."""


def reproduce(settings: Settings) -> Outcome:
    results = settings.run(GridErrorSweep(settings.samples, settings.seed))
    paper = _rows(results.columns, np.isin(results.columns["rho"], PAPER_CORRELATIONS))
    lists = {name: column.tolist() for name, column in paper.items()}
    exact, sampled = (_series(kind, lists, lists["rho"]) for kind in ("series", "sampled"))
    twenty, five = TERMS.index(20), TERMS.index(5)
    floor = float(paper["monte_carlo"].max())
    caption = (
        "Largest absolute error of E[max(x₁,0) max(x₂,0)] by Lemma 4, cut to a number of terms, over the paper's grid "
        "of means and deviations. Left: also over its correlations; against the exact value, and against Monte Carlo, "
        "whose own error is the dashed line; and of our quadrature by its number of nodes. Right: by correlation, "
        f"{len(results.columns['rho'])} of them."
    )
    return Outcome(
        name=NAME,
        title="Figure 2: cutting the series of Lemma 4",
        reading=_words(exact, paper, floor, settings.samples),
        comparisons=(
            BesidePaper("largest error, 20 terms, against exact", exact[twenty].largest, FIGURE_2_ERROR_20_TERMS),
            BesidePaper(
                f"largest error, 20 terms, against {settings.samples:,} samples",
                sampled[twenty].largest,
                FIGURE_2_ERROR_20_TERMS,
            ),
            BesidePaper("largest error, 5 terms, |ρ| ≤ 0.5", exact[five].moderate, FIGURE_2_ERROR_5_TERMS),
            BesidePaper("largest error, 5 terms, all ρ", exact[five].largest, None),
            BesidePaper(f"largest error of {settings.samples:,} samples", floor, None),
            BesidePaper("largest error of the shipped kernel", float(paper["kernel"].max()), None),
        ),
        panels=(_series_panel(exact, sampled, floor), _nodes_panel(paper)),
        drawings=(Drawing(NAME, caption, partial(draw_errors, results.columns, settings.samples)),),
        numbers={
            "samples": settings.samples,
            "correlations": results.columns["rho"].tolist(),
            "errors": {
                name: [None if math.isnan(x) else x for x in column.tolist()]
                for name, column in results.columns.items()
                if name not in ("rho", "item")
            },
        },
        seconds=results.seconds,
    )


def every_correlation() -> tuple[float, ...]:
    """The paper's correlations, and more for curves over ρ: every 0.05, and closer near ±1 and ±1/√2."""
    steps = [i / 20 for i in range(20)]
    ends = [0.97, 0.98, 0.99, 0.995, 0.999]
    apart = [0.0001, 0.001, 0.003, 0.01, 0.017, 0.025, 0.035]
    positive = [*steps, *ends, SEAM, *(SEAM + d for d in apart), *(SEAM - d for d in apart)]
    return tuple(sorted({*PAPER_CORRELATIONS, *positive, *(-rho for rho in positive if rho)}))


def places() -> tuple[Tensor, Tensor]:
    """All 210 combinations of mean and deviation of one variable on the grid."""
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
    """Lemma 4, truncated at each of the figure's numbers of terms."""
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
    """A sweep with one item and row per correlation; Monte Carlo runs only at the paper's correlations, and is NaN
    elsewhere.
    """

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


@dataclass(frozen=True)
class SeriesError:
    """The largest absolute error of one truncation over the grid, its place, and the largest for |ρ| ≤ 0.5."""

    terms: int
    largest: float
    at_correlation: float
    moderate: float


@dataclass(frozen=True)
class Figure2:
    points: int
    series: tuple[SeriesError, ...]
    kernel: float
    """The largest error of the exact kernel, against one with many times its nodes."""


def run() -> Figure2:
    """Compute all truncations over the paper's grid, one correlation at a time, without Monte Carlo."""
    points, kernel = 0, 0.0
    columns: dict[str, list[float]] = {f"series_{terms}": [] for terms in TERMS}
    for rho in PAPER_CORRELATIONS:
        place = grid(rho)
        points += place[0].numel()
        exact = cross_moment(*place)
        for terms, value in truncated_cross_moments(place):
            columns[f"series_{terms}"].append(largest(value - exact))
        kernel = max(kernel, quadrature_errors(place)[-1])
    return Figure2(points, _series("series", columns, PAPER_CORRELATIONS), kernel)


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
        table.add_row(
            f"series, {_terms(row.terms)}", f"{row.largest:.1e}", f"{row.at_correlation:+.1f}", f"{row.moderate:.1e}"
        )
    table.add_section()
    table.add_row("[bold]netmoments[/bold], against 160 nodes", f"[bold]{result.kernel:.1e}[/bold]", "", "")
    return table


def _series(kind: str, columns: Mapping[str, Sequence[float]], rho: Sequence[float]) -> tuple[SeriesError, ...]:
    """The worst error of every truncation, from its errors at each correlation."""
    found = []
    for terms in TERMS:
        errors = list(zip(columns[f"{kind}_{terms}"], rho, strict=True))
        moderate = max(error for error, place in errors if abs(place) <= MODERATE)
        worst, where = max(errors)
        found.append(SeriesError(terms, worst, where, moderate))
    return tuple(found)


def _rows(columns: Columns, chosen: np.ndarray) -> dict[str, np.ndarray]:
    return {name: column[chosen] for name, column in columns.items()}


def _terms(count: int) -> str:
    return f"{count} term{'s' if count > 1 else ''}"


def _series_panel(exact: Sequence[SeriesError], sampled: Sequence[SeriesError], floor: float) -> Panel:
    rows = [
        (
            _terms(row.terms),
            f"{row.largest:.1e}",
            f"{row.at_correlation:+.3g}",
            f"{row.moderate:.1e}",
            f"{against.largest:.1e}",
            f"{against.moderate:.1e}",
        )
        for row, against in zip(exact, sampled, strict=True)
    ]
    return Panel(
        title="Lemma 4 by its number of terms, largest absolute error over the paper's grid",
        columns=("series", "against exact", "at ρ", "|ρ| ≤ 0.5", "against sampling", "|ρ| ≤ 0.5"),
        rows=tuple(rows),
        caption=f"Sampling itself is up to {floor:.1e} from the exact value.",
        emphasis=(1,),
    )


def _nodes_panel(paper: Mapping[str, np.ndarray]) -> Panel:
    groups = [np.abs(paper["rho"]) <= MODERATE, np.abs(paper["rho"]) == 0.7, paper["rho"] == 0.999]
    names = [*(f"nodes_{count}" for count in NODES), "kernel"]
    labels = [*map(str, NODES), "as shipped"]
    rows = (
        (label, *(f"{paper[name][g].max():.1e}" for g in groups)) for label, name in zip(labels, names, strict=True)
    )
    return Panel(
        title="Our quadrature by its number of nodes, the same grid",
        columns=("nodes", "|ρ| ≤ 0.5", "|ρ| = 0.7", "ρ = 0.999"),
        rows=tuple(rows),
        caption="Against 160 graded nodes. As shipped: nodes chosen by correlation, 56 graded ones beyond 0.99.",
        breaks=(len(NODES),),
    )


def _words(
    exact: Sequence[SeriesError], paper: Mapping[str, np.ndarray], floor: float, samples: int
) -> tuple[str, ...]:
    by_terms = {row.terms: row for row in exact}
    enough = float(f"{samples * (floor / FIGURE_2_ERROR_20_TERMS) ** 2:.0e}")
    return (
        "The paper's grid: means −2 to 2, deviations 0.2 to 2 and correlations −0.7 to 0.7 in steps of 0.2, with ρ = 0 "
        f"and 0.999, {len(places()[0]) ** 2 * len(paper['rho']):,} points. Lemma 4 as printed, with 1 to 50 terms, "
        f"against the exact kernel and, as the paper did, against Monte Carlo ({samples:,} samples, shared by all "
        "points of a correlation). The curves over ρ are on the same grid of means and deviations.",
        f"With 20 terms the series is {by_terms[20].largest:.1e} off at ρ = ±0.7, where the paper reports 10^−2.5 = "
        f"{FIGURE_2_ERROR_20_TERMS:.1e}; with 5 terms, which it uses from there on, {by_terms[5].largest:.1e} there "
        f"and {by_terms[5].moderate:.1e} for |ρ| ≤ 0.5. At ρ = ±1/√2 neither branch converges.",
        f"Monte Carlo with {samples:,} samples is itself up to {floor:.1e} off, and the error against it stops falling "
        "there."
        + (f" To see 10^−2.5 takes about {enough:,.0f} samples." if enough > samples else "")
        + f" The quadrature has nothing special at ±1/√2: the kernel as shipped is within {paper['kernel'].max():.0e} "
        "on the grid.",
    )


def draw_errors(columns: Columns, samples: int) -> Figure:
    """Draw, on the left, the worst error on the paper's grid over the number of terms or nodes; on the right, errors
    over ρ.
    """
    figure = new_figure(6.0, 3.9)
    left, right = figure.subplots(1, 2, sharey=True)
    _over_terms(left, columns, samples)
    _over_correlation(right, columns)
    for axes in (left, right):
        axes.legend(
            loc="upper center", bbox_to_anchor=(0.45, -0.2), ncols=2, columnspacing=1, handlelength=1.8, frameon=False,
            fontsize=SMALL, labelcolor=INK,
        )  # fmt: skip
    return figure


def _over_terms(axes: Axes, columns: Columns, samples: int) -> None:
    paper = np.isin(columns["rho"], PAPER_CORRELATIONS)
    moderate = paper & (np.abs(columns["rho"]) <= SEAM)

    def worst(kind: str, counts: Sequence[int], rows: np.ndarray) -> list[float]:
        return [max(ROUNDING, float(columns[f"{kind}_{count}"][rows].max())) for count in counts]

    axes.semilogy(TERMS, worst("sampled", TERMS, paper), color=ORANGE, marker="s", markersize=4, linewidth=1.3,
                  label="series vs sampling")  # fmt: skip
    axes.axhline(columns["monte_carlo"][paper].max(), color=ORANGE, linestyle="--", linewidth=1,
                 label=f"sampling, {samples:,}")  # fmt: skip
    axes.semilogy(TERMS, worst("series", TERMS, paper), color=BLUE, marker="o", markersize=4, linewidth=1.3,
                  label="series vs exact")  # fmt: skip
    axes.semilogy(NODES, worst("nodes", NODES, paper), color=GREEN, marker="^", markersize=4, linewidth=1.3,
                  label="quadrature nodes")  # fmt: skip
    axes.semilogy(NODES, worst("nodes", NODES, moderate), color=GREEN, marker="^", markersize=4, linewidth=1.3,
                  markerfacecolor="white", linestyle=":", label="nodes, |ρ| ≤ 0.7")  # fmt: skip
    axes.axhline(max(ROUNDING, columns["kernel"][paper].max()), color=INK, linestyle="-.", linewidth=1,
                 label="netmoments")  # fmt: skip
    dress(axes, "The paper's grid", "terms of the series, or nodes", "largest absolute error")
    axes.set_xticks([1, 10, 20, 30, 40, 50])


def _over_correlation(axes: Axes, columns: Columns) -> None:
    order = np.argsort(columns["rho"])
    rho = columns["rho"][order]
    for count, colour, marker in zip(TERMS, SHADES, MARKERS, strict=True):
        error = np.maximum(ROUNDING, columns[f"series_{count}"][order])
        axes.semilogy(rho, error, color=colour, marker=marker, markersize=2.2, linewidth=1,
                      label=f"{count} term{'s' if count > 1 else ''}")  # fmt: skip
    kernel = np.maximum(ROUNDING, columns["kernel"][order])
    axes.semilogy(rho, kernel, color=INK, linestyle="-.", linewidth=1.1, label="netmoments")
    for place in (-SEAM, SEAM):
        axes.axvline(place, color=GREY, linestyle=":", linewidth=0.9)
    dress(axes, "By correlation", "correlation ρ", "")
    axes.set_xticks([-1, -SEAM, -0.5, 0, 0.5, SEAM, 1], ["−1", "−1/√2", "", "0", "", "1/√2", "1"])
