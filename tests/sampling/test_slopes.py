"""Expected slopes as controls: those of a network that is known, and no more gradients than they are worth."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import netmoments as nm
from netmoments.network.model import NetworkModel
from netmoments.sampling import slopes
from netmoments.sampling.fast_network import fast_network
from netmoments.sampling.slopes import MOST_POINTS, SlopeControls, expected_slopes, linear_controls, points_worth

WEIGHT = torch.tensor([[1.0, 2.0, 0.0], [0.0, -1.0, 0.5]], dtype=torch.float64)


def slopes_of(network: nn.Module, noise: nm.Gaussian, products: bool, points: int = 4, outputs=None):
    model = NetworkModel.of_any(network, noise.mean, "test")
    with torch.no_grad():
        return expected_slopes(model, fast_network(model), noise, outputs, points, products=products, seed=1)


@pytest.fixture
def affine() -> nn.Module:
    network = nn.Linear(3, 2).double().eval()
    network.weight.data = WEIGHT.clone()
    return network


COVARIANCES = {
    "isotropic": 0.25,
    "diagonal": torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64),
    "dense": torch.tensor([[1.0, 0.3, 0.0], [0.3, 1.0, 0.1], [0.0, 0.1, 0.5]], dtype=torch.float64),
}


@pytest.mark.parametrize("kind", COVARIANCES)
@pytest.mark.parametrize("products", [True, False])
def test_an_affine_network_has_its_rows_as_slopes_with_variance_one(affine, kind, products):
    noise = nm.Gaussian(torch.zeros(2, 3, dtype=torch.float64), COVARIANCES[kind])
    found = slopes_of(affine, noise, products)
    dense = noise.covariance.dense()
    dense = dense if dense.dim() == 2 else dense[0]
    full = WEIGHT @ dense @ WEIGHT.T
    spread = full.diagonal().sqrt()
    torch.testing.assert_close(found.slopes[0], WEIGHT / spread.unsqueeze(1))
    correlation = full / spread.unsqueeze(1) / spread
    torch.testing.assert_close(found.known[1], correlation if products else torch.ones(2, dtype=torch.float64))


def test_slopes_of_chosen_outputs(affine):
    noise = nm.Gaussian(torch.zeros(2, 3, dtype=torch.float64), 1.0)
    found = slopes_of(affine, noise, False, outputs=torch.tensor([[1], [0]]))
    expected = torch.stack([WEIGHT[1:], WEIGHT[:1]])
    torch.testing.assert_close(found.slopes, expected / expected.norm(dim=-1, keepdim=True))


def test_gradients_at_once_are_those_of_one_output_at_a_time(monkeypatch):
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)).double().eval()
    noise = nm.Gaussian(torch.zeros(2, 3, dtype=torch.float64), 1.0)
    for outputs in (None, torch.tensor([[1, 3], [0, 2]])):
        together = slopes_of(network, noise, True, outputs=outputs)
        with monkeypatch.context() as patch:
            patch.setattr(slopes, "TOGETHER", 0)
            alone = slopes_of(network, noise, True, outputs=outputs)
        torch.testing.assert_close(together.slopes, alone.slopes)
        torch.testing.assert_close(together.known, alone.known)


def test_an_output_that_does_not_depend_on_the_noise_has_no_slope(affine):
    affine.weight.data[1] = 0
    found = slopes_of(affine, nm.Gaussian(torch.zeros(1, 3, dtype=torch.float64), 1.0), True)
    assert torch.equal(found.slopes[0, 1], torch.zeros(3, dtype=torch.float64))
    assert found.known[0].tolist() == [[pytest.approx(1.0), 0.0], [0.0, 0.0]]


def test_controls_that_are_recorded_have_the_numbers_of_the_noise_they_are_for(affine, monkeypatch):
    """As on a GPU, where what was done first for tensors of some shapes is done again: the diagonal is one of them."""

    def recorded(known, work, *given):
        return known.setdefault(tuple(x.shape for x in given), work)(*given)

    monkeypatch.setattr("netmoments.sampling.fast_network.recorded", recorded)
    factor = torch.ones(3, 1, dtype=torch.float64)
    model = NetworkModel.of_any(affine, torch.zeros(1, 3, dtype=torch.float64), "test")
    with torch.no_grad():
        fast = replace(fast_network(model), recordings={})
        for diagonal in (0.1, 5.0):
            noise = nm.Gaussian(torch.zeros(1, 3, dtype=torch.float64), nm.LowRank(factor, diagonal))
            found = expected_slopes(model, fast, noise, None, 4, products=True, seed=1)
            full = WEIGHT @ noise.covariance.dense() @ WEIGHT.T
            spread = full.diagonal().sqrt()
            torch.testing.assert_close(found.known[0], full / spread.unsqueeze(1) / spread)


def test_what_gradients_are_worth():
    odd = torch.randn(64, 1, 10, generator=torch.Generator().manual_seed(0))
    even = torch.randn(64, 1, 10, generator=torch.Generator().manual_seed(1))
    assert points_worth(odd, -odd, 1e4) == 1  # one gradient says all of a linear network
    mixed = points_worth(odd + 0.5 * even, -odd + 0.5 * even, 1e4)
    assert 1 < mixed <= MOST_POINTS
    assert mixed % 2 == 0
    assert points_worth(odd + 10 * even, -odd + 10 * even, 1e4) == 0  # slopes explain nothing
    assert points_worth(odd, -odd, 50) == 0  # gradients of ten outputs cost more than all samples


def test_no_slopes_where_there_is_no_derivative():
    class Rounded(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.detach() * 2

    assert slopes_of(Rounded().eval(), nm.Gaussian(torch.zeros(1, 3), 1.0), False) == SlopeControls()


def test_linear_controls_are_the_slopes_along_the_noise():
    own, deviations, others = torch.randn(2, 3, 4), torch.randn(5, 2, 4), torch.randn(5, 2, 4)
    one, other = linear_controls(own, deviations, others)
    torch.testing.assert_close(one, torch.einsum("pan,adn->pad", deviations, own))
    torch.testing.assert_close(other, torch.einsum("pan,adn->pad", others, own))
    assert linear_controls(own, deviations, None)[1] is None
    assert linear_controls(None, deviations, others) is None
