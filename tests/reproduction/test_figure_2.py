"""Figure 2: the grid, the series and the quadrature against each other and against sampling."""

from __future__ import annotations

import functools
import itertools
import json
import math

import pytest
import torch
from torch import Generator

from netmoments.paper import relu_cross_moment_series
from reproduction import figure_2, published
from reproduction.figure_2 import (
    NODES,
    PAPER_CORRELATIONS,
    SEAM,
    TERMS,
    GridErrorSweep,
    cross_moment,
    every_correlation,
    grid,
    places,
    sampled_cross_moments,
)
from tests.closeness import assert_close
from tests.reproduction.small import drawn, settings_for


def test_the_correlations_are_the_papers_and_more():
    rho = every_correlation()
    assert set(PAPER_CORRELATIONS) <= set(rho)
    assert {SEAM, -SEAM, -0.999} <= set(rho)
    assert list(rho) == sorted(set(rho))
    assert 70 <= len(rho) <= 100
    assert sum(abs(abs(x) - SEAM) < 0.04 for x in rho) >= 20


def test_sampled_cross_moments_are_within_five_standard_errors():
    """And every pair is where the grid has it: a transposition would be off by far more."""
    rho, samples = 0.6, 20_000
    sampled = sampled_cross_moments(rho, samples, Generator().manual_seed(7), "cpu")
    exact = cross_moment(*grid(rho))
    mu, sigma = places()
    chosen = torch.arange(0, 210, 13)
    z = torch.randn(2, 50_000, dtype=torch.float64, generator=Generator().manual_seed(8))
    other = rho * z[0] + math.sqrt(1 - rho**2) * z[1]
    first, second = (torch.relu(mu[chosen, None] + sigma[chosen, None] * x) for x in (z[0], other))
    spread = ((first**2) @ (second**2).T / z.shape[1] - (first @ second.T / z.shape[1]) ** 2).sqrt()
    error = (sampled - exact)[chosen][:, chosen].abs()
    assert bool((error <= 5 * spread / math.sqrt(samples) + 1e-3).all())
    assert float((exact - exact.T).abs().max()) < 1e-12  # swapping the variables changes nothing
    moved = sampled_cross_moments(-rho, samples, Generator().manual_seed(7), "cpu")
    assert float((moved - exact).abs().max()) > 1  # the correlation matters


def test_samples_come_in_chunks_of_any_number():
    generator = Generator().manual_seed(3)
    z = torch.cat([torch.randn(2, n, dtype=torch.float64, generator=generator) for n in (4096, 4096, 808)], 1)
    mu, sigma = (x[:, None] for x in places())
    other = 0.3 * z[0] + math.sqrt(1 - 0.3**2) * z[1]
    expected = torch.relu(mu + sigma * z[0]) @ torch.relu(mu + sigma * other).T / 9000
    assert_close(sampled_cross_moments(0.3, 9000, Generator().manual_seed(3), "cpu"), expected, atol=1e-12)


@pytest.fixture(scope="module")
def rows() -> dict[float, dict[str, float]]:
    sweep = GridErrorSweep(samples=2000, seed=1, correlations=(-0.7, 0.3, SEAM, 0.999))
    assert sweep.counts == (44_100,) * 4
    compute = sweep.prepare("cpu")
    found = {}
    for item, rho in enumerate(sweep.correlations):
        columns = compute(item)
        assert all(column.shape == (1,) for column in columns.values())
        found[rho] = {name: float(column[0]) for name, column in columns.items()}
    return found


def test_series_errors_are_those_of_the_design_guide(rows):
    """20 terms are 5.7e-3 off at |ρ| = 0.7, 5 terms 4e-2; and equal another evaluation at every ninth place."""
    assert rows[-0.7]["series_20"] == pytest.approx(5.7e-3, rel=0.02)
    assert rows[-0.7]["series_5"] == pytest.approx(4.15e-2, rel=0.02)
    assert rows[SEAM]["series_50"] > 1e-3
    place = tuple(x.flatten()[::9] for x in grid(-0.7))
    for terms in TERMS:
        error = float((relu_cross_moment_series(*place, terms=terms) - cross_moment(*place)).abs().max())
        assert 0.7 * rows[-0.7][f"series_{terms}"] < error <= rows[-0.7][f"series_{terms}"] * (1 + 1e-9)


def test_the_worst_point_of_a_truncation_is_found(rows):
    place = grid(0.3)
    error = (relu_cross_moment_series(*place, terms=1) - cross_moment(*place)).abs()
    assert rows[0.3]["series_1"] == float(error.max())


def test_more_nodes_are_better_down_to_rounding(rows):
    for row in rows.values():
        errors = [row[f"nodes_{count}"] for count in NODES]
        for fewer, more in itertools.pairwise(errors):
            assert more < 0.5 * fewer or more < 1e-15
        assert row["kernel"] < 2e-15
    assert rows[0.999]["nodes_8"] > 1e-7  # where the kernel needs more of them
    assert rows[-0.7]["nodes_8"] < 1e-12


def test_sampling_at_the_papers_correlations_only(rows):
    assert math.isnan(rows[SEAM]["monte_carlo"])
    assert math.isnan(rows[SEAM]["sampled_5"])
    floor = rows[0.3]["monte_carlo"]
    assert 1e-2 < floor < 1
    assert rows[0.3]["sampled_50"] == pytest.approx(floor, rel=1e-9)  # the series is exact there
    assert abs(rows[-0.7]["sampled_1"] - rows[-0.7]["series_1"]) <= rows[-0.7]["monte_carlo"] * (1 + 1e-9)


def test_figure_2_from_beginning_to_end(tmp_path, monkeypatch):
    some = (-0.7, 0.0, 0.7, 0.999)
    monkeypatch.setattr(figure_2, "PAPER_CORRELATIONS", some)
    fewer = functools.partial(GridErrorSweep, correlations=(*some, 0.99))
    monkeypatch.setattr(figure_2, "GridErrorSweep", fewer)
    outcome = figure_2.reproduce(settings_for(tmp_path, samples=1000))
    ours = {one.what: one.ours for one in outcome.comparisons}
    assert ours["largest error, 20 terms, against exact"] == pytest.approx(5.7e-3, rel=0.02)
    assert ours["largest error, 20 terms, against 1,000 samples"] > 1e-2
    assert outcome.comparisons[0].paper == published.FIGURE_2_ERROR_20_TERMS
    assert all(len(row) == len(panel.columns) for panel in outcome.panels for row in panel.rows)
    assert "nan" not in str(outcome.panels).lower()
    json.dumps(outcome.numbers, allow_nan=False)
    assert drawn(outcome.drawings[0].draw(), tmp_path)
