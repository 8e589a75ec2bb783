"""Attacks on a CUDA device cost what they do on a CPU, and fool as many samples as was asked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import netmoments as nm
from netmoments.attacks.base import Attack
from netmoments.attacks.box import PixelSupport, Targeted
from netmoments.attacks.result import AttackResult
from netmoments.attacks.sparse_smooth import SparseSmooth
from tests.gpu import NEEDS_CUDA, tf32_allowed

pytestmark = [pytest.mark.gpu, NEEDS_CUDA]


@pytest.fixture(autouse=True)
def _tf32() -> Iterator[None]:
    with tf32_allowed():
        yield


def digit_like_images(network: nn.Module, count: int) -> Tensor:
    """(count, 1, 8, 8) images that the network is sure are the classes 0, 1, …: grey ones moved up its scores."""
    labels = torch.arange(count) % 10
    x = 0.3 + 0.1 * torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(5))
    for _ in range(60):
        x.requires_grad_()
        loss = nn.functional.cross_entropy(network(x), labels, reduction="sum")
        x = (x - 0.02 * torch.autograd.grad(loss, x)[0].sign()).detach().clamp(0, 1)
    return x


def noise_for_digits(device: str, attack: Attack, count: int = 6, targets: bool = False) -> AttackResult:
    network = nm.zoo.pretrained("digits").float()
    images, labels = digit_like_images(network, count), torch.arange(count) % 10
    wanted = (labels + 1) % 10 if targets else None
    return attack(network.to(device), images.to(device), labels, wanted)


@pytest.mark.parametrize("targets", [False, True])
def test_sparse_and_smooth_noise_costs_what_it_does_on_a_cpu(targets):
    """The same problem by the formula; the solver's path depends on rounding, its optimum on the kinks it passes."""
    attack = SparseSmooth(gamma=0.1, polish=0, samples=50)
    here, there = (noise_for_digits(device, attack, targets=targets) for device in ("cpu", "cuda"))
    assert there.mu.is_cuda
    cost, other = ((result.l1 + result.tv).cpu() for result in (here, there))
    assert float((cost / other - 1).abs().median()) < 0.01
    torch.testing.assert_close(here.margin, there.margin.cpu(), atol=2e-3, rtol=0)


def test_as_many_samples_are_fooled():
    result = noise_for_digits("cuda", SparseSmooth(samples=1000))
    assert bool(result.feasible.all())
    assert float((result.success.rate - 0.95).abs().max()) < 5 * (0.05 * 0.95 * 2 / 1000) ** 0.5


def test_attacks_within_a_box():
    boxed = [noise_for_digits(device, Targeted(beta=0.2, polish=0), targets=True) for device in ("cpu", "cuda")]
    torch.testing.assert_close(boxed[0].margin, boxed[1].margin.cpu(), atol=0.05, rtol=0.02)
    few = [noise_for_digits(device, PixelSupport(percent=10, beta=0.5)) for device in ("cpu", "cuda")]
    changed = [(result.mu.cpu() != 0).flatten(1).sum(1) for result in few]
    assert int(max(changed[0].max(), changed[1].max())) <= 6


def test_expected_logits():
    lenet = nm.zoo.pretrained("lenet").cuda()
    images = torch.rand(3, 1, 28, 28, generator=torch.Generator().manual_seed(4)).cuda()
    model = nm.ExpectedLogits(lenet, 0.02, at=images)
    x = images.clone().requires_grad_()
    model(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(model(images), nm.two_stage(lenet, images).mean(nm.Gaussian(images, std=0.02)))
