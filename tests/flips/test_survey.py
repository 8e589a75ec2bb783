"""Surveys of many inputs: shares with intervals, scores with errors, and no more samples than are needed."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import nn

import netmoments as nm
from netmoments.flips.noisy_network import Clock
from netmoments.flips.result import shares_interval
from netmoments.flips.survey import SurveyGoal, expected_share_error, samples_needed, surveyed
from netmoments.network.model import NetworkModel

GOAL = SurveyGoal(half_width=0.02, least=64, most=20_000)


def linear(weight: list[list[float]]) -> nn.Module:
    network = nn.Linear(len(weight[0]), len(weight), bias=False).double().eval()
    network.weight.data = torch.tensor(weight, dtype=torch.float64)
    return network


@pytest.fixture(scope="module")
def found():
    """Two classes whose margin at input i is N(mᵢ, 2): flips with Φ(−mᵢ/√2)."""
    network = linear([[1.0, 0.0], [0.0, 1.0]])
    means = torch.tensor([[0.1, 0.0], [1.0, 0.0], [3.0, 0.0], [9.0, 0.0]], dtype=torch.float64)
    noise = nm.Gaussian(means, std=1.0)
    model = NetworkModel.of_any(network, means, "test")
    followed = torch.tensor([[0, 1]]).expand(4, -1)
    return means, surveyed(model, noise, torch.zeros(4, dtype=torch.int64), followed, GOAL, seed=3)


def test_shares_are_as_exact_as_asked(found):
    means, survey = found
    truth = torch.from_numpy(stats.norm.cdf(means[:, 0] / math.sqrt(2)))
    share = survey.wins[:, 0] / survey.samples
    error = (truth * (1 - truth) / survey.samples).sqrt()
    assert bool(((share - truth).abs() <= 5 * error + 1e-9).all())
    bounds = shares_interval(survey.wins[:, 0], survey.samples)
    assert float(((bounds[:, 1] - bounds[:, 0]) / 2).max()) <= GOAL.half_width
    assert int(survey.wins.sum()) == int(survey.samples.sum())


def test_inputs_that_never_flip_take_few_samples(found):
    _, survey = found
    assert int(survey.samples[3]) == 2 * GOAL.least  # 79 are needed, in lots
    assert int(survey.samples[0]) > 10 * int(survey.samples[3])


def test_scores_have_their_moments_and_errors(found):
    means, survey = found
    assert bool(((survey.mean - means).abs() <= 5 * survey.mean_error).all())
    assert bool(((survey.deviation - 1).abs() <= 5 * survey.deviation_error).all())
    expected = 1 / survey.samples.double().sqrt().unsqueeze(1)
    torch.testing.assert_close(survey.mean_error, expected.expand(-1, 2), rtol=0.5, atol=0)
    torch.testing.assert_close(survey.deviation_error, (expected / math.sqrt(2)).expand(-1, 2), rtol=0.6, atol=0)
    lead = (means[:, 0] - means[:, 1]) / math.sqrt(2)
    # the mean of a lead of so many deviations is known to √(1 + lead²/2) of 1/√n
    assert bool(((survey.lead - lead).abs() <= 5 * (1 + lead**2 / 2).sqrt() / survey.samples.sqrt()).all())


def test_an_input_is_sampled_alike_alone_and_among_others(found):
    means, survey = found
    model = NetworkModel.of_any(linear([[1.0, 0.0], [0.0, 1.0]]), means, "test")
    for part in ([2], [3, 0]):
        labels, followed = torch.zeros(len(part), dtype=torch.int64), torch.tensor([[0, 1]]).expand(len(part), -1)
        apart = surveyed(model, nm.Gaussian(means[part], std=1.0), labels, followed, GOAL, seed=3)
        assert torch.equal(apart.wins, survey.wins[part])
        torch.testing.assert_close(apart.mean, survey.mean[part], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(apart.deviation, survey.deviation[part], rtol=1e-10, atol=0)


def test_a_clock_ends_it_after_the_first_round():
    network = linear([[1.0, 0.0], [0.0, 1.0]])
    means = torch.zeros(3, 2, dtype=torch.float64)
    model = NetworkModel.of_any(network, means, "test")
    labels, followed = torch.zeros(3, dtype=torch.int64), torch.zeros(3, 1, dtype=torch.int64)
    over = Clock(1e-9)
    survey = surveyed(model, nm.Gaussian(means, std=1.0), labels, followed, GOAL, seed=0, clock=over)
    assert survey.samples.tolist() == [64, 64, 64]


@pytest.mark.parametrize(("count", "samples"), [(0, 50), (50, 50), (7, 50), (499, 1000), (1, 400)])
def test_intervals_cover_as_often_as_they_say(count, samples):
    """Wilson's against the exact probabilities of counts: 95 % on average over shares near what was seen."""
    low, high = shares_interval(torch.tensor(count), torch.tensor(samples)).tolist()
    assert 0 <= low <= count / samples <= high <= 1
    chances = []
    every = torch.arange(samples + 1)
    bounds = shares_interval(every, torch.full_like(every, samples)).numpy()
    for p in (max(low, 1e-3), (low + high) / 2, min(high, 1 - 1e-3)):
        inside = (bounds[:, 0] <= p) & (p <= bounds[:, 1])
        chances.append(float(stats.binom.pmf(every.numpy(), samples, p)[inside].sum()))
    assert sum(chances) / len(chances) > 0.93


def test_how_many_samples_are_missing():
    count, samples = torch.tensor([0, 0, 50, 5000]), torch.tensor([64, 400, 100, 10_000])
    needed = samples_needed(count, samples, 0.01)
    assert needed[0] == math.ceil(1.05 * 150)
    assert needed[1] == 400
    assert 9_000 < needed[2] < 11_000
    assert needed[3] == 10_000


def test_the_error_of_a_mean_of_shares_is_never_0():
    nothing = expected_share_error(torch.zeros(10, dtype=torch.int64), torch.full((10,), 50))
    assert 0 < nothing < 0.01
    half = expected_share_error(torch.full((100,), 50), torch.full((100,), 100))
    assert half == pytest.approx(0.05 / 10, rel=0.01)


def test_scores_that_are_no_numbers_are_refused():
    class Divided(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x, 1 / x.clamp(min=0)], 1)

    means = torch.full((1, 2), 0.5, dtype=torch.float64)
    model = NetworkModel.of_any(Divided().eval(), means, "test")
    label, followed = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"of 64 samples gave NaN or infinite scores.*use less noise"):
        surveyed(model, nm.Gaussian(means, std=1.0), label, followed, GOAL, seed=0)
