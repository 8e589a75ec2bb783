import math

import pytest
import torch

import netmoments as nm
from netmoments.flips.frequent import by_frequencies, by_guided_frequencies, nothing_found, plain_estimate, plain_wins
from netmoments.flips.result import Target
from netmoments.flips.search import Search
from tests.flips.classifiers import Corner, Rounded, at_distance, linear, margins_of, tail

NONE_BEFORE = (0, torch.zeros(2, dtype=torch.float64))


def guided_estimate(network, noise, target, seed=0):
    margins = margins_of(network, noise, seed=seed)
    search = Search.from_noise(margins, margins.generator)
    search.refit()
    plain = plain_estimate(int((search.plain < 0).sum()), len(search.plain))
    return by_guided_frequencies(margins, search, plain, target, 100_000, margins.generator), margins


@pytest.mark.parametrize("distance", [-1.5, 0.0, 0.7, 1.5])
def test_half_the_runs_of_plain_sampling_for_one_point(distance):
    network = linear()
    target = Target(1e-9, absolute=0.01)
    found, margins = guided_estimate(network, nm.Gaussian(at_distance(network, distance), std=1.0), target)
    truth = tail(distance)
    assert abs(found.estimate.probability - truth) < 5 * found.estimate.error
    assert found.met
    assert margins.runs <= 0.5 * truth * (1 - truth) * (1.96 / 0.01) ** 2


def test_a_network_of_two_layers():
    found, margins = guided_estimate(
        Corner(1.0, 1.2).eval(), nm.Gaussian(torch.zeros(6), std=1.0), Target(1e-9, absolute=0.01)
    )
    truth = Corner.probability(1.0, 1.2)
    assert abs(found.estimate.probability - truth) < 5 * found.estimate.careful_error
    assert margins.runs <= 0.5 * truth * (1 - truth) * (1.96 / 0.01) ** 2


def test_plain_frequencies_until_it_is_enough():
    margins = margins_of(Rounded(1.0).eval(), nm.Gaussian(torch.zeros(3), std=1.0))
    found = by_frequencies(margins, Target(0.1), 100_000, NONE_BEFORE)
    assert found.met
    low, high = found.interval
    assert low < tail(1) < high
    assert abs(found.estimate.probability - tail(1)) < 5 * found.estimate.error


def test_what_is_never_seen_is_bounded():
    margins = margins_of(Rounded(20.0).eval(), nm.Gaussian(torch.zeros(3), std=1.0))
    found = nothing_found(margins, Target(0.1), 3000, NONE_BEFORE)
    assert found.estimate.probability == 0
    assert found.interval == (0.0, 0.001)
    assert not found.met


def test_winners_are_counted():
    margins = margins_of(Rounded(0.0).eval(), nm.Gaussian(torch.zeros(3), std=1.0))
    wins = plain_wins(margins, 1000)
    assert wins[0] == 0
    assert abs(float(wins[1]) / 1000 - 0.5) < 5 * 0.5 / math.sqrt(1000)
