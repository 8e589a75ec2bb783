"""Expected scores as a module: the exact mean, its derivatives, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import netmoments as nm
from netmoments.network import zoo
from tests.networks import seeded


def one_or_several(generator, images=()) -> nm.AffineReluAffine:
    """A network with a linear path around its ReLUs, or one for each image."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*images, *shape, generator=generator, dtype=torch.float64)

    return nm.AffineReluAffine(draw(5, 12), draw(5), draw(3, 5), draw(3), draw(3, 12))


@pytest.mark.parametrize("images", [(), (4,)])
def test_it_is_the_exact_mean(generator, images):
    network = one_or_several(generator, images)
    x = torch.randn(4, 12, generator=generator, dtype=torch.float64)
    mu = torch.randn(4, 12, generator=generator, dtype=torch.float64)
    expected = network.mean(nm.Gaussian(x + mu, std=0.3))
    torch.testing.assert_close(nm.ExpectedLogits(network, 0.3)(x, mu), expected, rtol=1e-13, atol=1e-13)


def test_derivatives(generator):
    network = one_or_several(generator)
    x, mu = (torch.randn(2, 12, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2))
    sigma = torch.tensor([0.2, 0.5], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, mu, s: nm.ExpectedLogits(network, s)(x, mu), (x, mu, sigma))


def test_of_a_network_it_is_the_two_stage_mean(digits):
    network, images = digits
    x = images.images[:3]
    expected = nm.two_stage(network, x).mean(nm.Gaussian(x, std=0.05))
    torch.testing.assert_close(nm.ExpectedLogits(network, 0.05)(x), expected)
    fixed = nm.ExpectedLogits(network, 0.05, at=x)
    torch.testing.assert_close(fixed(x), expected)
    moved = 0.1 * torch.ones_like(x)
    there = nm.two_stage(network, x).mean(nm.Gaussian(x + moved, std=0.05))
    torch.testing.assert_close(fixed(x, moved), there)
    torch.testing.assert_close(fixed(x + moved), there)


def test_a_batch_of_signals_is_a_batch():
    """(N, channels, steps) has as many dimensions as one image."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv1d(2, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(18, 4)).eval()
    x = torch.randn(5, 2, 8)
    expected = nm.two_stage(network, x, event_ndim=2).mean(nm.Gaussian(x.flatten(1), std=0.1))
    torch.testing.assert_close(nm.ExpectedLogits(network, 0.1)(x), expected)
    torch.testing.assert_close(nm.ExpectedLogits(network, 0.1, at=x)(x), expected)


def test_another_librarys_attack_can_climb_it(digits):
    """Projected gradient descent as any library has it, on a module in eval mode with frozen weights."""
    network, images = digits
    x, labels = images.images[:4], images.labels[:4]
    model = nm.ExpectedLogits(network, 0.02, at=x)
    assert not model.training
    start = x.clone()
    for _ in range(20):
        start.requires_grad_()
        loss = nn.functional.cross_entropy(model(start), labels, reduction="sum")
        start = (start + 0.03 * torch.autograd.grad(loss, start)[0].sign()).detach()
        start = torch.clamp(torch.clamp(start, x - 0.4, x + 0.4), 0, 1)
    assert bool((model(start).argmax(1) != labels).all())


def test_bad_input(digits, generator):
    network, images = digits
    for sigma in (0.0, -1.0, float("nan"), float("inf"), torch.tensor([0.1, 0.0])):
        with pytest.raises(ValueError, match="sigma must be a standard deviation above 0"):
            nm.ExpectedLogits(network, sigma)
    with pytest.raises(TypeError, match="sigma must be a number or a tensor"):
        nm.ExpectedLogits(network, "much")
    with pytest.raises(ValueError, match="leave out at="):
        nm.ExpectedLogits(one_or_several(generator), 0.1, at=torch.zeros(1, 12))
    with pytest.raises(TypeError, match="images must be a torch tensor"):
        nm.ExpectedLogits(network, 0.1)(images.images.numpy())
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module"):
        nm.ExpectedLogits("digits", 0.1)
    with pytest.raises(ValueError, match="training mode"):
        nm.ExpectedLogits(zoo.pretrained("digits").float().train(), 0.1)
    with pytest.raises(ValueError, match="linearized at 2 images, got"):
        nm.ExpectedLogits(network, 0.1, at=images.images[:2])(images.images[:1])


def deep() -> nn.Module:
    layers = nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 3)
    return seeded(lambda: nn.Sequential(*layers))


@pytest.mark.parametrize("method", ["layerwise", "sketch", nm.Sketch(probes=32, seed=4), nm.TwoStage(0)])
def test_expected_logits_by_other_methods(method, generator):
    """What `output_moments` gives, and derivatives in the images, by central differences, and in the weights."""
    network, x = deep(), torch.randn(2, 6, generator=generator, dtype=torch.float64)
    model = nm.ExpectedLogits(network, 0.2, method=method)
    expected = nm.output_moments(network, nm.Gaussian(x, std=0.2), method).mean
    torch.testing.assert_close(model(x).detach(), expected, rtol=1e-12, atol=1e-12)
    if method == nm.TwoStage(0):
        return
    shift = torch.zeros_like(x).requires_grad_()
    slope, weight = torch.autograd.grad(model(x, shift)[:, 1].sum(), (shift, network[0].weight))
    towards = torch.randn(shift.shape, dtype=torch.float64, generator=generator)
    with torch.no_grad():
        ahead, behind = (model(x, sign * 1e-5 * towards)[:, 1].sum() for sign in (1, -1))
    assert float((slope * towards).sum()) == pytest.approx(float(ahead - behind) / 2e-5, rel=1e-5)
    assert bool(weight.any())


def test_what_does_not_go_together_is_refused(generator):
    x = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    for method in ("linear", nm.Sampling(), nm.Auto()):
        with pytest.raises(ValueError, match="method must be two-stage, layerwise or sketch, got"):
            nm.ExpectedLogits(deep(), 0.1, method=method)
    with pytest.raises(ValueError, match=r"method must be one of auto, .*got 'exact'"):
        nm.ExpectedLogits(deep(), 0.1, method="exact")
    with pytest.raises(ValueError, match=r'are for method="two-stage"'):
        nm.ExpectedLogits(deep(), 0.1, at=x, method="layerwise")
    with pytest.raises(ValueError, match=r"a bank is for output_moments; give at="):
        nm.ExpectedLogits(deep(), 0.1, method=nm.TwoStage(bank=nm.LinearizationBank.at(deep(), x)))


def test_layerwise_repairs_its_answer_here_too():
    """Weights with which fourth powers in cumulants are beyond float32: these are left out, as by `output_moments`."""
    layers = nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)
    network = seeded(lambda: nn.Sequential(*layers), torch.float32)
    with torch.no_grad():
        network[0].weight *= 1e12
    image = torch.ones(1, 4)
    expected = nm.ExpectedLogits(network, 0.5, method="layerwise")(image)
    assert bool(expected.isfinite().all())
    found = nm.output_moments(network, nm.Gaussian(image, std=0.5), "layerwise", check=0)
    torch.testing.assert_close(expected.detach(), found.mean)
