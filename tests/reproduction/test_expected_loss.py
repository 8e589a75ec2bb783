"""The loss expected under noise: against the exact moments of one ReLU layer, and against samples."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import netmoments as nm
from reproduction.expected_loss import (
    ExpectedScores,
    dropout_rows,
    expected_cross_entropy,
    expected_scores,
    pool_rows,
    relu_rows,
)

SIGMA = 0.3


def test_one_relu_layer_has_its_exact_moments():
    """Mean and covariance as probes grow. The spread s of a unit errs by s/√(2K), the mean by less."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(9, 12), nn.ReLU(), nn.Linear(12, 3)).double().eval()
    images = torch.randn(2, 1, 3, 3, dtype=torch.float64)
    with torch.no_grad():
        found = expected_scores(network, images, SIGMA, probes=20_000)
    exact = nm.output_moments(network, nm.Gaussian(images, std=SIGMA), nm.TwoStage())
    scale = exact.variance.sqrt()
    assert ((found.mean - exact.mean).abs() < 5 * scale / 20_000**0.5).all()
    variance = found.deviations.square().mean(0)  # but for what the rests of different units share
    assert ((variance / exact.variance - 1).abs() < 0.2).all()


def test_one_unit_has_its_whole_variance():
    torch.manual_seed(1)
    rows = torch.cat([torch.full((1, 1), 0.3), 0.3 + 0.5 * torch.randn(200_000, 1)])
    after = relu_rows(rows, 1, 200_000)
    mean, std = torch.tensor(0.3), torch.tensor(0.5)
    assert abs(after[0] - nm.relu_mean(mean, std)) < 5 * 0.5 / 200_000**0.5
    variance = nm.relu_variance(mean, std)
    assert abs(after[1:].var() / variance - 1) < 5 * (2 / 200_000) ** 0.5 * 2  # the spread's own error, and the rest's


def test_without_noise_it_is_the_network():
    network = nm.zoo.pretrained("digits").float()
    images = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    found = expected_scores(network, images, 1e-5)
    torch.testing.assert_close(found.mean, network(images), rtol=1e-3, atol=1e-3)
    labels = torch.arange(4)
    loss = expected_cross_entropy(found, labels, 1.0)
    torch.testing.assert_close(loss, cross_entropy(network(images), labels), rtol=1e-3, atol=1e-3)


def test_to_second_order_it_adds_the_trace():
    """The next term is of the fourth order in the deviations."""
    torch.manual_seed(2)
    mean, directions = torch.randn(3, 5, dtype=torch.float64), torch.randn(7, 3, 5, dtype=torch.float64)
    labels = torch.tensor([0, 3, 4])
    share = mean.softmax(-1)
    hessian = torch.diag_embed(share) - share.unsqueeze(-1) * share.unsqueeze(-2)
    covariance = torch.einsum("kni,knj->nij", directions, directions) / 7
    trace = 0.5 * (hessian * covariance).sum((-2, -1)).mean()
    for size in (1e-2, 1e-3):
        found = expected_cross_entropy(ExpectedScores(mean, size * directions), labels, 0.5)
        added = (found - cross_entropy(mean, labels)) / (0.5 * size**2)
        assert abs(added - trace) < 10 * size**2


def test_close_to_samples_on_a_trained_network():
    """Where noise adds little the expected loss is that of samples: to the second order's own error, a tenth."""
    network = nm.zoo.pretrained("digits").float()
    everything = nm.data.load("digits").first(200)
    images, labels = everything.images, everything.labels
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        noisy = [network(images + 0.1 * torch.randn(images.shape, generator=generator)) for _ in range(200)]
        losses = torch.stack([cross_entropy(scores, labels) for scores in noisy])
        plain = cross_entropy(network(images), labels)
        torch.manual_seed(4)
        ours = torch.stack([expected_cross_entropy(expected_scores(network, images, 0.1), labels, 1.0)
                            for _ in range(20)])  # fmt: skip
    rise = losses.mean() - plain
    assert abs(ours.mean() - losses.mean()) < 0.3 * rise
    assert ours.std() < losses.std()  # less noise in it than in one noisy copy


def test_gradients_reach_every_weight_and_are_right():
    torch.manual_seed(5)
    network = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)
    ).double()
    images, labels = torch.rand(2, 1, 4, 4, dtype=torch.float64), torch.tensor([0, 2])
    weights = [weight.detach().requires_grad_() for weight in network.parameters()]
    names = [name for name, _ in network.named_parameters()]

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self) -> torch.Tensor:
            torch.manual_seed(6)
            return expected_cross_entropy(expected_scores(self.network, images, SIGMA, 3), labels, 0.7)

    loss = Loss()

    def value(*given: torch.Tensor) -> torch.Tensor:
        named = {f"network.{name}": weight for name, weight in zip(names, given, strict=True)}
        return torch.func.functional_call(loss, named, ())

    assert torch.autograd.gradcheck(value, weights)


def test_rows_keep_their_mean_and_share_their_dropout():
    torch.manual_seed(7)
    rows = torch.randn(3 * 2, 4, 6, 6)  # two images, two directions
    pooled = pool_rows(rows, 2, 2, nn.MaxPool2d(2))
    assert pooled.shape == (6, 4, 3, 3)
    linear = pool_rows(rows, 2, 2, nn.AvgPool2d(2))
    torch.testing.assert_close(linear, nn.AvgPool2d(2)(rows))
    dropped = dropout_rows(torch.ones(6, 50), 2, 2, 0.5)
    assert set(dropped.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(dropped[:2], dropped[2:4])
    assert torch.equal(dropped[:2], dropped[4:])
    far = relu_rows(rows + 100, 2, 2)
    torch.testing.assert_close(far, rows + 100, rtol=0, atol=0.02)  # but for the least rest, a thousandth of s


def test_other_layers_are_refused():
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    with pytest.raises(ValueError, match="not Tanh"):
        expected_scores(network, torch.rand(1, 1, 2, 2), SIGMA)
