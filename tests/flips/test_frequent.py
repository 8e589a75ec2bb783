import math

import pytest
import torch

import netmoments as nm
from netmoments.flips.frequent import (
    PILOT,
    PLAIN_SHARES,
    Pilot,
    by_frequencies,
    by_guided_frequencies,
    guided_counting,
    plain_estimate,
    plain_wins,
)
from netmoments.flips.result import Tolerance
from netmoments.flips.search import Search
from tests.flips.classifiers import Corner, Rounded, at_distance, linear, noisy_network, run_alone, tail

NONE_BEFORE = (0, torch.zeros(2, dtype=torch.float64))


def guided_estimate(network, noise, tolerance, seed=0):
    noisy = noisy_network(network, noise, seed=seed)
    search = run_alone(Search.from_noise(noisy))
    search.refit()
    plain = plain_estimate(int((search.plain_margins < 0).sum()), len(search.plain_margins))
    return run_alone(by_guided_frequencies(noisy, search, plain, tolerance, 100_000)), noisy


@pytest.mark.parametrize("distance", [-1.5, 0.0, 0.7, 1.5])
def test_half_the_runs_of_plain_sampling_for_one_point(distance):
    network = linear()
    tolerance = Tolerance(1e-9, absolute=0.01)
    found, noisy = guided_estimate(network, nm.Gaussian(at_distance(network, distance), std=1.0), tolerance)
    truth = tail(distance)
    assert abs(found.estimate.probability - truth) < 5 * found.estimate.error
    assert found.met
    assert noisy.runs <= 0.5 * truth * (1 - truth) * (1.96 / 0.01) ** 2


def test_a_network_of_two_layers():
    found, noisy = guided_estimate(
        Corner(1.0, 1.2).eval(), nm.Gaussian(torch.zeros(6), std=1.0), Tolerance(1e-9, absolute=0.01)
    )
    truth = Corner.probability(1.0, 1.2)
    assert abs(found.estimate.probability - truth) < 5 * found.estimate.careful_error
    assert noisy.runs <= 0.5 * truth * (1 - truth) * (1.96 / 0.01) ** 2


def test_plain_frequencies_until_the_target_is_met():
    noisy = noisy_network(Rounded(1.0).eval(), nm.Gaussian(torch.zeros(3), std=1.0))
    found = run_alone(by_frequencies(noisy, Tolerance(0.1), 100_000, NONE_BEFORE))
    assert found.met
    low, high = found.interval
    assert low < tail(1) < high
    assert abs(found.estimate.probability - tail(1)) < 5 * found.estimate.error


def test_what_is_never_seen_is_bounded():
    noisy = noisy_network(Rounded(20.0).eval(), nm.Gaussian(torch.zeros(3), std=1.0))
    found = run_alone(by_frequencies(noisy, Tolerance(0.1), 3000, NONE_BEFORE))
    assert found.estimate.probability == 0
    assert found.interval == (0.0, 0.001)
    assert not found.met


def test_winners_are_counted():
    noisy = noisy_network(Rounded(0.0).eval(), nm.Gaussian(torch.zeros(3), std=1.0))
    wins = run_alone(plain_wins(noisy, 1000))
    assert wins[0] == 0
    assert abs(float(wins[1]) / 1000 - 0.5) < 5 * 0.5 / math.sqrt(1000)


def counting_of(noisy):
    search = run_alone(Search.from_noise(noisy))
    search.refit()
    pilot = run_alone(Pilot.of(noisy, PILOT))
    return guided_counting(noisy, search, Tolerance(1e-9, absolute=0.01), pilot)


def counting(flips, chances, ratio):
    """Counting after plain samples with these flips, at which a guide has these h and ρ."""
    network = linear()
    noisy = noisy_network(network, nm.Gaussian(at_distance(network, 1.0), std=1.0))
    work = counting_of(noisy)
    work.flips, work.flip_chances = [flips], [torch.stack([torch.zeros_like(chances), chances], 1)]
    work.calibrated_flip_chances = [chances.square()]
    work.ratios, work.origins = [torch.stack([torch.ones_like(ratio), ratio], 1)], [torch.zeros(len(flips)).long()]
    return work


def test_a_guide_is_used_as_far_as_it_knows_where_flips_are():
    generator = torch.Generator().manual_seed(0)
    chance = torch.rand(4000, generator=generator, dtype=torch.float64).square()
    flips = (torch.rand(4000, generator=generator) < chance).double()
    density = (chance * (1 - chance)).sqrt()
    density = density / density.mean()
    assert counting(flips, chance, density).best_share() == PLAIN_SHARES[0]
    shuffled = torch.randperm(4000, generator=generator)
    assert counting(flips, chance[shuffled], density[shuffled]).best_share() == 1.0


def test_plain_samples_come_first_while_they_are_missing():
    zeros = torch.zeros(20, dtype=torch.float64)
    work = counting(zeros, zeros, torch.ones_like(zeros))
    assert work.least_plain == 150  # 3/2/n ≤ 0.01
    assert work.divided(100) == [75, 25]
    assert work.divided(1000)[0] >= 130
    assert work.unseen_error == pytest.approx(3 / 2 / 1.959964 / 20)
    assert work.plain_flips == (0, 20)


def test_both_controls_have_the_means_they_say():
    """Over 20,000 plain samples: within five standard errors."""
    noisy = noisy_network(Corner(1.0, 1.2).eval(), nm.Gaussian(torch.zeros(6), std=1.0))
    work = counting_of(noisy)
    white = noisy.normal(20_000)
    work.add(white, run_alone(noisy.margins_at(white)), 0)
    controls = work.controls()
    assert controls.values.shape == (20_000, 2)
    for place in range(2):
        values = controls.values[:, place]
        error = math.hypot(float(values.std()) / math.sqrt(len(values)), controls.errors[place])
        assert abs(float(values.mean()) - controls.means[place]) < 5 * error
