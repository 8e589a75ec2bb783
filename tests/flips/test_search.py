import math

import torch

import netmoments as nm
from netmoments.flips.margins import alone
from netmoments.flips.search import SEEDS, START, Search, likely_rivals
from tests.flips.classifiers import Corner, at_distance, linear, margins_of, tail


def test_a_linear_margin_is_known_after_the_start():
    network = linear()
    margins = margins_of(network, nm.Gaussian(at_distance(network, 5.0), std=1.0))
    for start in (Search.from_noise, Search.from_pulled):
        search = alone(start(margins, margins.generator))
        search.refit()
        assert search.guide is not None
        assert abs(math.log(search.guide.expected / tail(5))) < 0.1
        assert search.guide.surrogates[0].rival == 1


def test_rounds_add_gradients_and_know_two_ways_to_flip():
    margins = margins_of(Corner(4.0, 4.2).eval(), nm.Gaussian(torch.zeros(6), std=1.0))
    search = alone(Search.from_noise(margins, margins.generator))
    for _ in range(4):
        before = search.gradients
        alone(search.advance())
        assert search.gradients > before
    assert search.guide is not None
    assert margins.runs == 3 * search.gradients


def test_joined_searches_know_what_both_found():
    network = linear()
    margins = margins_of(network, nm.Gaussian(at_distance(network, 4.0), std=1.0))
    one, two = (
        alone(Search.from_noise(margins, margins.generator)),
        alone(Search.from_pulled(margins, margins.generator)),
    )
    assert len(Search.joined(one, two).evidence) == len(one.evidence) + len(two.evidence)
    assert len(one.evidence) == START


def test_a_rival_is_seeded_once():
    network = linear(classes=4)
    margins = margins_of(network, nm.Gaussian(at_distance(network, 4.0), std=1.0))
    search = alone(Search.from_noise(margins, margins.generator))
    for rival in (1, 2, 3):
        alone(search.seed(rival))
        before = len(search.evidence)
        alone(search.seed(rival))
        assert len(search.evidence) == before
        assert int((search.evidence.rivals == rival).sum()) >= SEEDS


def test_a_network_that_never_moves_has_no_guide():
    network = torch.nn.Linear(4, 2)
    network.weight.data.zero_()
    network.bias.data = torch.tensor([1.0, 0.0])
    margins = margins_of(network.eval(), nm.Gaussian(torch.zeros(4), std=1.0))
    search = alone(Search.from_noise(margins, margins.generator))
    alone(search.advance())
    assert search.guide is None


def test_likely_rivals_are_the_nearest():
    generator = torch.Generator().manual_seed(0)
    margins = torch.randn(200, 4, generator=generator) + torch.tensor([0.0, 3.0, 4.0, 30.0])
    margins[:, 0] = torch.inf
    assert likely_rivals(margins) == [1, 2]


def test_a_round_has_room_for_many_surrogates():
    """Eleven rivals that are looked at one by one: every gradient of a round is somebody's, and some are common."""
    network = linear(12, 12)
    network.weight.data = torch.eye(12)
    margins = margins_of(network, nm.Gaussian(4.0 * torch.eye(12)[0], std=1.0))
    search = alone(Search.from_noise(margins, margins.generator))
    for rival in range(1, 12):
        alone(search.seed(rival))
    search.refit()
    assert search.guide is not None
    before = len(search.evidence)
    assert len(search.guide.surrogates) >= 9
    alone(search.round())
    assert len(search.evidence) - before >= 48
