import math

import pytest
import torch

import netmoments as nm
from netmoments.flips.result import Tolerance
from netmoments.flips.splitting import Population, adapted, averaged, by_splitting, next_level, population
from tests.flips.classifiers import Rounded, linear, noisy_network, run_alone, tail


def test_populations_without_gradients():
    """Φ(−4), within five standard errors of the mean of populations."""
    noisy = noisy_network(Rounded(4.0).eval(), nm.Gaussian(torch.zeros(3), std=1.0))
    found = run_alone(by_splitting(noisy, Tolerance(0.1), 150_000))
    assert abs(found.estimate.probability - tail(4)) < 5 * found.estimate.error
    low, high = found.interval
    assert low < tail(4) < high
    assert int(found.wins.argmax()) == 1
    assert noisy.runs <= 160_000


def test_a_population_that_starts_among_flips_counts_them():
    noisy = noisy_network(Rounded(0.0).eval(), nm.Gaussian(torch.zeros(3), std=1.0))
    found = run_alone(population(noisy, 10**6))
    assert abs(found.probability - 0.5) < 5 * 0.5 / math.sqrt(400)


def test_nothing_is_found_where_nothing_flips():
    network = linear(4)
    network.weight.data.zero_()
    network.bias = torch.nn.Parameter(torch.tensor([1.0, 0.0]))
    noisy = noisy_network(network, nm.Gaussian(torch.zeros(4), std=1.0))
    assert run_alone(population(noisy, 10**6)).probability == 0


@pytest.mark.parametrize(("chance", "runs"), [(1e-6, 900), (0.0, 300)])
def test_half_of_the_runs_are_left_where_no_population_found_a_flip(monkeypatch, chance, runs):
    """Populations take 300 runs each. They begin if they end within 1,000 where flips are found, else within 500."""

    async def stand_in(noisy, limit):
        noisy.runs += 300
        return Population(chance * (1 + noisy.runs), torch.zeros(2))

    monkeypatch.setattr("netmoments.flips.splitting.population", stand_in)
    noisy = noisy_network(linear(4), nm.Gaussian(torch.zeros(4), std=1.0))
    start = noisy.runs
    run_alone(by_splitting(noisy, Tolerance(1e-9), start + 1000))
    assert noisy.runs - start == runs


def test_levels_fall_to_zero():
    margins = torch.arange(1.0, 101.0)
    assert next_level(margins, 1000.0) == pytest.approx(25.75)
    assert next_level(margins, 20.0) == 20.0
    assert next_level(margins - 50, 1000.0) == 0.0


def test_steps_adapt():
    assert adapted(0.5, 0.9) > 0.5 > adapted(0.5, 0.1)
    assert adapted(0.98, 1.0) == 0.98


def test_an_average_has_the_error_of_a_mean():
    found = averaged([Population(p, torch.zeros(2)) for p in (1e-6, 2e-6, 3e-6)])
    assert found.probability == pytest.approx(2e-6)
    assert found.error == pytest.approx(1e-6 / math.sqrt(3))
    assert found.freedom == 2
