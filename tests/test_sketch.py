"""Moments from a few probes: against exact ones, the dense sums, Monte Carlo and finite differences."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor, nn

import netmoments as nm
from netmoments.covariances import Covariance, Isotropic, LowRank
from netmoments.network.graph import traced_graph
from netmoments.propagate import sketch
from netmoments.propagate.plan import Plan, planned
from netmoments.propagate.sketch import Sketched, sketched
from netmoments.rules import sampled as sampled_windows
from netmoments.rules.maximum import Largest
from netmoments.rules.maximum_lines import direction_sets, expected_largest, largest_of_contenders
from netmoments.rules.sampled import BentUnits, quadratic_covariance
from tests.closeness import assert_close, assert_within_standard_errors
from tests.networks import Block, inputs, network, seeded


def plan_of(module: nn.Module, image: Tensor) -> Plan:
    return planned(traced_graph(module, image, "test"), module, image, "test")


def isotropic(image: Tensor, std: float) -> Isotropic:
    return Isotropic(torch.tensor(std**2, dtype=image.dtype), image.numel())


def sketch_of(module: nn.Module, image: Tensor, covariance: Covariance, **options: int) -> Sketched:
    scores = module(image).numel()
    return only(sketched(plan_of(module, image), image, covariance, torch.arange(scores).unsqueeze(0), **options))


def only(found: Sketched) -> Sketched:
    """The one image of a batch."""
    return Sketched(*(getattr(found, field.name).squeeze(0) for field in dataclasses.fields(found)))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


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
    off = (found.covariance - exact.covariance(noise)) / (sd[:, None] * sd)
    assert_close(off, torch.zeros(3, 3), atol=noise_of_probes)
    gate = 0.5 * torch.erfc(-module[0].bias / (module[0].weight @ factor).norm(dim=1) / math.sqrt(2))
    slopes = module[2].weight * gate @ module[0].weight
    assert_close(found.slopes, slopes, atol=noise_of_probes * float(slopes.detach().abs().max()))


def test_an_affine_network_is_exact_with_two_probes():
    module, image = seeded(lambda: nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))), inputs("shared", 1)
    found = sketch_of(module, image, isotropic(image, 0.3), probes=2)
    jacobian = module[1].weight @ module[0].weight
    assert_close(found.mean, module(image)[0], atol=1e-14)
    assert_close(found.slopes, jacobian, atol=1e-14)
    assert_close(found.covariance, 0.09 * jacobian @ jacobian.mT, atol=1e-14)


def test_tiny_noise_is_the_delta_method():
    module, image = network("lenet"), inputs("lenet", 1)
    found = sketch_of(module, image, isotropic(image, 1e-9), probes=4)
    jacobian = torch.func.jacrev(lambda x: module(x)[0])(image).reshape(10, -1)
    assert_close(found.mean, module(image)[0], atol=1e-8)
    assert_close(found.covariance * 1e18, jacobian @ jacobian.mT, rtol=1e-6, atol=1e-9)


def test_the_quadratic_part_is_unbiased():
    """Against ½ Σ_uv a_iu a_jv tr(H_u C_uv H_v C_uvᵀ) with all pairs formed, the mean of the samples far from 0."""
    inputs, units, width, count, runs = 7, 5, 3, 6, 3000
    root, mean, weights = normal(inputs, inputs), 3 * normal(inputs, seed=1), normal(2, units, seed=2)
    windows = torch.randint(0, inputs, (units, width), generator=torch.Generator().manual_seed(0))
    windows[0, 2] = -1
    curvature = normal(units, width, width, seed=3)
    curvature = curvature + curvature.mT
    present = (windows >= 0).double()
    curvature = curvature * present.unsqueeze(-1) * present.unsqueeze(-2)
    covariance = root @ root.mT
    cross = covariance[windows.clamp(min=0)[:, :, None, None], windows.clamp(min=0)[None, None]]  # (u, w, v, w)
    pairs = torch.einsum("uij,ujvk,vkl,uivl->uv", curvature, cross, curvature, cross)
    dense = 0.5 * weights @ pairs @ weights.mT
    found = []
    for seed in range(runs):
        z = mean + normal(count, inputs, seed=seed) @ root.mT
        bent = BentUnits(torch.arange(units), windows, z.unsqueeze(0), curvature.unsqueeze(0))
        found.append(quadratic_covariance(bent.quadratics(weights.unsqueeze(0)).across)[0])
    estimates = torch.stack(found)
    assert_within_standard_errors(estimates.mean(0), dense, estimates.std(0) / math.sqrt(runs))


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
    found = sketch_of(module, image, isotropic(image, std), probes=512, seed=1)
    sampled = nm.monte_carlo(module, nm.Gaussian(image[0], std=std), samples=40_000, seed=2)
    sd = sampled.variance.sqrt()
    # S from 512 probes is off by 6 %, the mean by 1/√512 = 0.044 of what is not linear; samples by 1/√40000
    assert_close((found.mean + found.correction - sampled.mean) / sd, torch.zeros(len(sd)), atol=0.1)
    assert_close((found.covariance - sampled.covariance) / (sd[:, None] * sd), torch.zeros(len(sd), len(sd)), atol=0.05)


def test_the_correction_takes_the_bias_of_the_formulas_away():
    """Most of the variance is not linear, and few units make it up: not Gaussian, so the formulas are biased."""
    module, image = seeded(Pooled), normal(1, 2, 12, 12, seed=1).abs()
    sampled = nm.monte_carlo(module, nm.Gaussian(image[0], std=0.4), samples=40_000, seed=1)
    plan, scores = plan_of(module, image), torch.arange(3).expand(20, 3)
    with torch.no_grad():
        found = sketched(plan, image.expand(20, -1, -1, -1), isotropic(image, 0.4), scores)
    plain, corrected = found.mean, found.mean + found.correction
    error = torch.hypot(corrected.std(0) / math.sqrt(20), sampled.mean_standard_error)
    assert_within_standard_errors(corrected.mean(0), sampled.mean, error)
    assert float(((plain.mean(0) - sampled.mean) / error).abs().max()) > 5


def random_windows(count: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Places, −1 for none, means and covariances."""
    windows = torch.randint(-1, 40, (count, width), generator=torch.Generator().manual_seed(0))
    windows[:, 0] = windows[:, 0].clamp(min=0)
    present = windows >= 0
    factor = normal(count, width, width) * present.unsqueeze(-1)
    return windows, 4 * normal(count, width, seed=1) * present, factor @ factor.mT


@pytest.mark.parametrize("width", [1, 2, 6, 7])
@pytest.mark.parametrize(("with_zero", "sign"), [(True, 1), (False, 1), (False, -1)])
def test_few_lines_have_no_bias(width, with_zero, sign):
    """Over 300 windows, against many points each: what is left is the error of the lines, and averages out."""
    windows, mean, covariance = random_windows(300, width)
    rule = Largest(windows, with_zero, sign)
    exact = dataclasses.replace(rule, points=4096).local(mean, covariance)
    lines = largest_of_contenders(rule, mean.unsqueeze(0), covariance.unsqueeze(0), probes=64)
    sd = covariance.diagonal(dim1=-2, dim2=-1).amax(-1).sqrt()
    for found, wanted in ((lines.mean[0], exact.mean), (lines.gain[0].mT * sd, exact.gain.mT * sd)):
        off = (found - wanted) / sd
        assert_close(off, torch.zeros_like(off), atol=0.2)
        assert_close(off.mean(-1), torch.zeros_like(off.mean(-1)), atol=0.005)
    bend, expected = (h * sd[:, None, None] for h in (lines.curvature[0], exact.curvature))
    assert_close((bend * covariance).sum((1, 2)).mean(), (expected * covariance).sum((1, 2)).mean(), rtol=0.03)
    assert_close(lines.gain[0] * (windows < 0), torch.zeros(300, width), atol=0)


def test_one_line_is_exact_for_one_input():
    mean, variance = normal(1, 50), normal(1, 1, 50, seed=1).square()
    lines = expected_largest(
        mean, variance, torch.ones(1, 50, dtype=torch.bool), direction_sets(1, 1)[..., :50], with_zero=True
    )
    h = mean[0] / variance[0, 0].sqrt()
    assert_close(lines.mean, nm.relu_mean(mean[0], variance[0, 0].sqrt()), atol=1e-9)  # S has a floor of 1e-12
    assert_close(lines.gain[0], torch.special.ndtr(h), atol=1e-9)


def test_a_batch_is_its_images_with_seeds_in_a_row():
    module, images = seeded(Pooled), normal(5, 2, 12, 12)
    levels = torch.tensor([0.05, 0.1, 0.2, 0.4, 0.0], dtype=torch.float64) ** 2
    rows = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2], [1, 0]])
    plan = plan_of(module, images[:1])
    together = sketched(plan, images, Isotropic(levels, 288), rows, probes=16, seed=7)
    for place in range(5):
        alone = sketched(
            plan,
            images[place : place + 1],
            Isotropic(levels[place], 288),
            rows[place : place + 1],
            probes=16,
            seed=7 + place,
        )
        for field in dataclasses.fields(Sketched):
            found, own = getattr(together, field.name)[place], getattr(alone, field.name)[0]
            assert_close(found, own, rtol=1e-9, atol=1e-13, what=field.name)


def test_how_images_and_windows_are_grouped_does_not_matter(monkeypatch):
    module, images = network("lenet"), inputs("lenet", 3)
    plan, rows = plan_of(module, images[:1]), torch.arange(10).expand(3, 10)
    covariance = Isotropic(torch.tensor([0.01, 0.02, 0.04], dtype=torch.float64), images[0].numel())
    whole = sketched(plan, images, covariance, rows, probes=8)
    one_by_one = sketched(plan, images, covariance, rows, probes=8, memory_budget=1)
    monkeypatch.setitem(sampled_windows.WINDOW_ELEMENTS, "cpu", 500)
    monkeypatch.setitem(sketch.PROBE_ELEMENTS, "cpu", 1)
    in_pieces = sketched(plan, images, covariance, rows, probes=8)
    for field in dataclasses.fields(Sketched):
        for found in (one_by_one, in_pieces):
            assert_close(getattr(found, field.name), getattr(whole, field.name), rtol=1e-9, atol=1e-13)


def test_images_go_together_as_the_memory_allows():
    image = inputs("lenet", 1)
    plan = plan_of(network("lenet"), image)
    counts = [sketch.images_together(plan, image, 8, 10, budget) for budget in (1, 10**6, 10**7)]
    assert counts[0] == 1
    assert counts == sorted(counts)


@pytest.mark.parametrize("std", [0.05, 0.2])
def test_64_probes_are_as_good_as_stated(std):
    """Variances of a small LeNet are off by less than 0.1 on average, where 64 samples are by 0.14."""
    module, images = network("lenet"), inputs("lenet", 4)
    plan, rows = plan_of(module, images[:1]), torch.arange(10).expand(4, 10)
    found = sketched(plan, images, isotropic(images[:1], std), rows)
    sampled = nm.monte_carlo(module, nm.Gaussian(images, std=std), samples=40_000, seed=2)
    variance = found.covariance.diagonal(dim1=-2, dim2=-1)
    assert float(nm.relative_difference(variance, sampled.variance).mean()) < 0.1


def test_chosen_scores_are_those_of_all():
    module, image = network("residual"), inputs("residual", 1)
    plan, covariance = plan_of(module, image), isotropic(image, 0.2)
    every = only(sketched(plan, image, covariance, torch.arange(3).unsqueeze(0)))
    some = only(sketched(plan, image, covariance, torch.tensor([[2, 0]])))
    assert_close(some.mean, every.mean[[2, 0]], atol=1e-14)
    assert_close(some.slopes, every.slopes[[2, 0]], atol=1e-14)
    assert_close(some.covariance, every.covariance[[2, 0]][:, [2, 0]], rtol=1e-10)


def test_same_seed_same_result():
    module, image = network("lenet"), inputs("lenet", 1)
    first, again, other = (sketch_of(module, image, isotropic(image, 0.2), seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first.mean, again.mean)
    assert torch.equal(first.covariance, again.covariance)
    assert not torch.equal(first.covariance, other.covariance)


@pytest.mark.parametrize("probes", [2, 3, 4])
def test_few_probes_still_give_a_covariance(probes):
    module, image = network("residual"), inputs("residual", 1)
    covariance = isotropic(image, 0.5)
    found = sketch_of(module, image, covariance, probes=probes)
    beyond = torch.linalg.eigvalsh(found.covariance - covariance.push(found.slopes))
    assert float(beyond.min()) >= -1e-12 * float(found.covariance.trace())
    assert torch.isfinite(found.mean).all()


@pytest.mark.parametrize("probes", [1, 0, True, 2.0])
def test_a_spread_needs_two_probes(probes):
    image = torch.zeros(1, 6, dtype=torch.float64)
    with pytest.raises(ValueError, match="probes must be an integer of at least 2"):
        sketch_of(small(), image, isotropic(image, 1.0), probes=probes)


@pytest.mark.parametrize("name", ["lenet", "residual", "concatenation"])
def test_derivatives_of_the_mean_by_finite_differences(name):
    module, image = network(name), inputs(name, 1)
    parameter = next(iter(module.parameters()))
    graph, direction, turn = traced_graph(module, image, "test"), normal(*image.shape), normal(*parameter.shape)
    start, step = parameter.detach().clone(), 1e-6
    variance = torch.tensor(0.09, dtype=torch.float64, requires_grad=True)

    def total(along_image: float, along_weights: float, along_variance: float) -> Tensor:
        parameter.data = start + along_weights * turn
        at = image.clone().requires_grad_()
        moved = Isotropic(variance + along_variance, image.numel())
        found = sketched(
            planned(graph, module, image, "test"), at + along_image * direction, moved, torch.arange(3)[None], probes=8
        )
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
