import pytest
import torch
from torch import nn

import netmoments as nm
from netmoments.flips.margins import Clock, NoisyMargins, OutOfTime, are_probabilities
from tests.flips.classifiers import at_distance, linear, margins_of

SIZE = 5
MEAN = torch.arange(1.0, 1.0 + SIZE)
FACTOR = torch.randn(SIZE, 2, generator=torch.Generator().manual_seed(3))
MATRIX = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(4))
NOISES = {
    "isotropic": nm.Gaussian(MEAN, std=0.3),
    "diagonal": nm.Gaussian(MEAN, covariance=MEAN),
    "dense": nm.Gaussian(MEAN, covariance=nm.Dense(MATRIX @ MATRIX.mT)),
    "low rank": nm.Gaussian(MEAN, covariance=nm.LowRank(FACTOR, 0.1)),
}


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES.keys())
def test_margins_and_gradients_of_a_linear_network(noise):
    """f = (w₀ − w_j)·x, and its gradient in ε is Lᵀ(w₀ − w_j)."""
    network = linear(SIZE, classes=3)
    margins = margins_of(network, noise)
    white = margins.normal(7)
    rivals = torch.tensor([1, 2, 1, 2, -1, -1, -1])
    found, gradients = margins.with_gradients(white, rivals)
    x = margins.inputs(white)
    scores = network(x).detach().double()
    torch.testing.assert_close(found[:, 1:], scores[:, :1] - scores[:, 1:], rtol=1e-5, atol=1e-5)
    assert bool((found[:, 0] == torch.inf).all())
    torch.testing.assert_close(margins.of(white), found, rtol=1e-5, atol=1e-5)
    root = noise.covariance.root()
    chosen = torch.where(rivals < 0, found.argmin(1), rivals)
    wanted = (network.weight[0] - network.weight[chosen]) @ root
    torch.testing.assert_close(gradients, wanted.detach(), rtol=1e-4, atol=1e-5)


def test_samples_have_the_covariance_of_the_noise():
    """Entries of a sample covariance from 20,000 samples: within five standard errors, √(2/n)·max variance."""
    noise = NOISES["low rank"]
    margins = margins_of(linear(SIZE), noise)
    x = margins.inputs(margins.normal(20_000)).double()
    wanted = noise.covariance.dense().double()
    error = 5 * (2 / 20_000) ** 0.5 * float(wanted.diagonal().max())
    assert float((x.mT.cov() - wanted).abs().max()) < error


def test_runs_are_counted_and_a_gradient_counts_two_more():
    margins = margins_of(linear(SIZE), NOISES["isotropic"])
    margins.of(margins.normal(10))
    assert margins.runs == 10
    margins.with_gradients(margins.normal(4), torch.full((4,), -1))
    assert margins.runs == 22


def test_outputs_that_are_no_numbers_are_refused():
    class Root(nn.Module):
        def forward(self, x):
            return torch.cat([x[:, :1].sqrt(), x[:, 1:]], 1)

    margins = margins_of(Root().eval(), nm.Gaussian(torch.full((SIZE,), 1.0), std=1.0))
    with pytest.raises(ValueError, match=r"NaN or infinite outputs.*less noise"):
        margins.of(margins.normal(200))


def test_time_is_over():
    network = linear(SIZE)
    flat = NOISES["isotropic"].flattened()
    model = nm.NetworkModel(network, flat.mean)
    margins = NoisyMargins(model, flat, 0, torch.Generator().manual_seed(0), Clock(seconds=1e-9))
    with pytest.raises(OutOfTime):
        margins.of(margins.normal(2))


def test_probabilities_are_compared_by_their_logarithms():
    """A softmax over scores has the margins of the scores themselves, and their gradients."""
    network = linear()
    softmax = torch.nn.Sequential(network, torch.nn.Softmax(1)).eval()
    noise = nm.Gaussian(at_distance(network, 3.0), std=1.0)
    plain, ended = margins_of(network, noise), margins_of(softmax, noise)
    assert ended.probabilities
    assert not plain.probabilities
    white = plain.normal(20)
    torch.testing.assert_close(ended.of(white), plain.of(white), rtol=1e-4, atol=1e-4)
    rivals = torch.full((20,), -1)
    for one, other in zip(ended.with_gradients(white, rivals), plain.with_gradients(white, rivals), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_scores_that_sum_to_1_at_the_mean_only_are_no_probabilities():
    network = linear(2, classes=2)
    network.weight.data = torch.eye(2)
    assert not margins_of(network, nm.Gaussian(torch.tensor([1.0, 0.0]), std=0.1)).probabilities


def test_what_is_taken_for_probabilities():
    assert are_probabilities(torch.tensor([[0.2, 0.8], [1.0, 0.0]]))
    assert not are_probabilities(torch.tensor([[0.2, 0.9]]))
    assert not are_probabilities(torch.tensor([[-0.5, 1.5]]))
