"""Sketches with few and many probes, against exact moments, Monte Carlo and finite differences."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import netmoments as nm
from netmoments import memory
from netmoments.covariances import Covariance, Isotropic, LowRank
from netmoments.propagate import sketch
from netmoments.propagate.sketch import Sketched, sketched
from tests.closeness import assert_close
from tests.networks import Block, inputs, network, seeded
from tests.propagate.small import isotropic, normal, plan_for


def sketch_of(module: nn.Module, image: Tensor, covariance: Covariance, **options: int) -> Sketched:
    scores = module(image).numel()
    return only(sketched(plan_for(module, image), image, covariance, torch.arange(scores).unsqueeze(0), **options))


def only(batch: Sketched) -> Sketched:
    """The only image of a batch."""
    return Sketched(*(found.squeeze(0) for found in batch))


def small(inputs: int = 6, hidden: int = 12) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, 3)))


def test_one_hidden_layer_converges_to_the_exact_moments():
    module, image, probes = small(), torch.zeros(1, 6, dtype=torch.float64), 4096
    factor = normal(6, 6, seed=2)
    noise = nm.Gaussian(image[0], LowRank(factor))
    exact = nm.AffineReluAffine(module[0].weight, module[0].bias, module[2].weight, module[2].bias)
    found = sketch_of(module, image, LowRank(factor), probes=probes)
    # every variance of an input is off by √(2/K); gains follow by at most 0.12 of that, the smaller parts by all of it
    noise_of_probes = math.sqrt(2 / probes)
    sd = exact.variance(noise).sqrt()
    assert_close((found.mean - exact.mean(noise)) / sd, torch.zeros(3), atol=noise_of_probes)
    error = (found.covariance - exact.covariance(noise)) / (sd[:, None] * sd)
    assert_close(error, torch.zeros(3, 3), atol=noise_of_probes)
    gate = 0.5 * torch.erfc(-module[0].bias / (module[0].weight @ factor).norm(dim=1) / math.sqrt(2))
    slopes = module[2].weight * gate @ module[0].weight
    assert_close(found.slopes, slopes, atol=noise_of_probes * float(slopes.detach().abs().max()))


def test_an_affine_network_is_exact_with_two_probes():
    module, image = seeded(lambda: nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))), inputs("shared", 1)
    found = sketch_of(module, image, isotropic(0.3, image), probes=2)
    jacobian = module[1].weight @ module[0].weight
    assert_close(found.mean, module(image)[0], atol=1e-14)
    assert_close(found.slopes, jacobian, atol=1e-14)
    assert_close(found.covariance, 0.09 * jacobian @ jacobian.mT, atol=1e-14)


def test_tiny_noise_is_the_delta_method():
    module, image = network("lenet"), inputs("lenet", 1)
    found = sketch_of(module, image, isotropic(1e-9, image), probes=4)
    jacobian = torch.func.jacrev(lambda x: module(x)[0])(image).reshape(10, -1)
    assert_close(found.mean, module(image)[0], atol=1e-8)
    assert_close(found.covariance * 1e18, jacobian @ jacobian.mT, rtol=1e-6, atol=1e-9)


class Pooled(nn.Module):
    """A convolution, a pool of ReLUs, a residual block with normalisation, another pool, scores."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu, self.block = nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), Block(4)
        self.pool, self.last = nn.MaxPool2d(3, 2, padding=1), nn.Linear(36, 3)
        self.block.norm1.running_mean.normal_()
        self.block.norm2.running_var.uniform_(0.5, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.pool(self.relu(self.first(x))))
        return self.last(self.pool(x).flatten(1))


@pytest.mark.parametrize(
    ("module", "image", "std"),
    [
        (seeded(Pooled), normal(1, 2, 12, 12), 0.05),
        (network("residual"), inputs("residual", 1), 0.3),
        (network("concatenation"), inputs("concatenation", 1), 0.5),
        (network("shared"), inputs("shared", 1), 0.2),
        (network("folded"), inputs("folded", 1), 0.5),
    ],
    ids=["pooled", "residual", "concatenation", "shared", "folded"],
)
def test_networks_against_monte_carlo(module, image, std):
    found = sketch_of(module, image, isotropic(std, image), probes=512, seed=1)
    reference = nm.monte_carlo(module, nm.Gaussian(image[0], std=std), 40_000, seed=2)
    sd = reference.variance.sqrt()
    # S from 512 probes is off by 6 %, the mean by 1/√512 = 0.044 of what is not linear; samples by 1/√40000
    assert_close((found.mean - reference.mean) / sd, torch.zeros(len(sd)), atol=0.1)
    error = (found.covariance - reference.covariance) / (sd[:, None] * sd)
    assert_close(error, torch.zeros_like(error), atol=math.sqrt(2 / 512) + math.sqrt(2 / 40_000))


def test_an_image_has_the_same_probes_whatever_comes_after_it():
    module, images = seeded(Pooled), normal(5, 2, 12, 12)
    levels = torch.tensor([0.05, 0.1, 0.2, 0.4, 0.0], dtype=torch.float64) ** 2
    rows = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0]])
    plan = plan_for(module, images[:1])
    together = sketched(plan, images, Isotropic(levels, 288), rows, probes=16, seed=7)
    for place in range(5):
        first = slice(place + 1)
        alone = sketched(plan, images[first], Isotropic(levels[first], 288), rows[first], probes=16, seed=7)
        for name, found, expected in zip(Sketched._fields, together, alone, strict=True):
            assert_close(found[place], expected[place], rtol=1e-9, atol=1e-13, what=name)


def test_probes_are_not_the_weights_of_a_network_made_with_the_same_seed():
    """Random numbers of seed 0 are often the weights too; probes along these would see far too much variance."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(128, 16, bias=False), nn.ReLU(), nn.Linear(16, 2)).double().eval()
    with torch.no_grad():
        module[0].weight.copy_(torch.randn(16, 128, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    image = torch.zeros(1, 128, dtype=torch.float64)
    exact = nm.output_moments(module, nm.Gaussian(image, std=0.1), "two-stage", check=0).variance
    found = sketch_of(module, image, isotropic(0.1, image), probes=64, seed=0).covariance.diagonal()
    # probes know each spread to 1/√128 of itself; with the weights as probes it is over √2 too large
    assert_close(found / exact[0], torch.ones(2), atol=0.35)


def test_how_images_and_windows_are_grouped_does_not_matter(monkeypatch):
    module, images = network("lenet"), inputs("lenet", 3)
    plan, rows = plan_for(module, images[:1]), torch.arange(10).expand(3, 10)
    covariance = Isotropic(torch.tensor([0.01, 0.02, 0.04], dtype=torch.float64), images[0].numel())
    whole = sketched(plan, images, covariance, rows, probes=8)
    one_by_one = sketched(plan, images, covariance, rows, probes=8, memory_budget=1)
    monkeypatch.setitem(memory.PIECE["cpu"], "cache", 500 * 8)
    in_pieces = sketched(plan, images, covariance, rows, probes=8)
    for found in (one_by_one, in_pieces):
        for name, part, expected in zip(Sketched._fields, found, whole, strict=True):
            assert_close(part, expected, rtol=1e-9, atol=1e-13, what=name)


def test_images_go_together_as_the_memory_allows():
    image = inputs("lenet", 1)
    plan = plan_for(network("lenet"), image)
    counts = [sketch.images_together(plan, image, 8, 10, budget) for budget in (1, 10**6, 10**7)]
    assert counts[0] == 1
    assert counts == sorted(counts)


@pytest.mark.parametrize("std", [0.05, 0.2])
def test_64_probes_are_as_good_as_stated(std):
    """Variances of a small LeNet are off by less than 0.1 on average; with 64 samples by 0.14, with 10,000 by 0.011."""
    module, images = network("lenet"), inputs("lenet", 4)
    plan, rows = plan_for(module, images[:1]), torch.arange(10).expand(4, 10)
    found = sketched(plan, images, isotropic(std, images[:1]), rows)
    reference = nm.monte_carlo(copy.deepcopy(module).float(), nm.Gaussian(images.float(), std=std), 10_000, seed=2)
    variance = found.covariance.diagonal(dim1=-2, dim2=-1)
    assert float(nm.relative_difference(variance, reference.variance).mean()) < 0.1


def test_chosen_scores_are_those_of_all():
    module, image = network("residual"), inputs("residual", 1)
    plan, covariance = plan_for(module, image), isotropic(0.2, image)
    all_scores = only(sketched(plan, image, covariance, torch.arange(3).unsqueeze(0)))
    chosen = only(sketched(plan, image, covariance, torch.tensor([[2, 0]])))
    assert_close(chosen.mean, all_scores.mean[[2, 0]], atol=1e-14)
    assert_close(chosen.slopes, all_scores.slopes[[2, 0]], atol=1e-14)
    assert_close(chosen.covariance, all_scores.covariance[[2, 0]][:, [2, 0]], rtol=1e-10)


def test_same_seed_same_result():
    module, image = network("lenet"), inputs("lenet", 1)
    first, again, other = (sketch_of(module, image, isotropic(0.2, image), seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first.mean, again.mean)
    assert torch.equal(first.covariance, again.covariance)
    assert not torch.equal(first.covariance, other.covariance)


@pytest.mark.parametrize("probes", [2, 3, 4])
def test_few_probes_still_give_a_covariance(probes):
    module, image = network("residual"), inputs("residual", 1)
    covariance = isotropic(0.5, image)
    found = sketch_of(module, image, covariance, probes=probes)
    eigenvalues = torch.linalg.eigvalsh(found.covariance - covariance.push(found.slopes))
    assert float(eigenvalues.min()) >= -1e-12 * float(found.covariance.trace())
    assert torch.isfinite(found.mean).all()


@pytest.mark.parametrize("name", ["lenet", "residual", "concatenation"])
def test_derivatives_of_the_mean_by_finite_differences(name):
    module, image = network(name), inputs(name, 1)
    parameter = next(iter(module.parameters()))
    direction, turn = normal(*image.shape), normal(*parameter.shape)
    start, step = parameter.detach().clone(), 1e-6
    variance = torch.tensor(0.09, dtype=torch.float64, requires_grad=True)

    def total(along_image: float, along_weights: float, along_variance: float) -> Tensor:
        parameter.data = start + along_weights * turn
        at = image.clone().requires_grad_()
        moved = Isotropic(variance + along_variance, image.numel())
        found = sketched(plan_for(module, image), at + along_image * direction, moved, torch.arange(3)[None], probes=8)
        if along_image == along_weights == along_variance == 0:
            found.mean.sum().backward()
            gradients.append(at.grad)
        return found.mean.sum().detach()

    gradients: list[Tensor] = []
    total(0.0, 0.0, 0.0)
    derivatives = [(gradients[0] * direction).sum(), (parameter.grad * turn).sum(), variance.grad]
    for place, derivative in enumerate(derivatives):
        moves = [[sign * step if place == other else 0.0 for other in range(3)] for sign in (1, -1)]
        slope = (total(*moves[0]) - total(*moves[1])) / (2 * step)
        assert_close(derivative, slope, rtol=1e-5, atol=1e-7, what=f"derivative {place}")  # 1e-7 ≫ rounding 1e-15/1e-6
    parameter.data = start


def test_the_covariance_is_symmetric_to_the_bit():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5)).eval()
    found = nm.output_moments(network, nm.Gaussian(torch.randn(3, 6), std=0.3), "sketch", check=0)
    assert torch.equal(found.covariance, found.covariance.mT)
