"""On a CUDA device: everything equals its CPU twin, at full precision even where TF32 is allowed."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import netmoments as nm
from netmoments.attacks.box import PixelSupport, Targeted
from netmoments.attacks.sparse_smooth import SparseSmooth
from netmoments.data.images import LabelledImages
from netmoments.moments.class_probabilities import winning_probabilities
from netmoments.network.weights import read_tensors
from netmoments.precision import full_precision
from netmoments.relu.quadratic_form import layer_form, layer_form_diagonal
from netmoments.relu.triton import kernels
from netmoments.report.noise_study import StudyConfig, study
from netmoments.rules.maximum import Largest
from reproduction.covariances import random_factor
from reproduction.linearization_error import LinearizationErrorSweep
from reproduction.over_images import Subjects
from reproduction.points import Bank, PointsSweep
from reproduction.sampled import MonteCarloSweep
from reproduction.tightness import TightnessSweep, delta_method, moments_at
from reproduction.training import RECIPES, train
from tests import test_fused
from tests.closeness import assert_close, assert_within_standard_errors
from tests.test_fused_sketch import KINDS, WINDOWS, assert_single_inputs, assert_windows, pooled

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

TOLERANCE = {torch.float32: 5e-6, torch.float64: 1e-13}


@pytest.fixture(autouse=True)
def tf32_allowed():
    """The user allows TF32 everywhere; the library must not use it."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


def layer(units: int, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    factor = torch.randn(2, units, rank, dtype=torch.float64, generator=generator)
    factor = torch.nn.functional.normalize(factor, dim=-1)
    matrix = factor @ factor.mT
    return torch.randn(2, units, dtype=torch.float64, generator=generator).to(dtype), matrix.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [300, 6, 2])
def test_covariance_and_gradients_equal_the_cpus(dtype, rank):
    mean, matrix = layer(400, rank, dtype)
    upstream = torch.randn(2, 400, 400, dtype=dtype, generator=torch.Generator().manual_seed(1)) / 400
    results = []
    for device in ("cpu", "cuda"):
        m, s = (x.to(device).requires_grad_() for x in (mean, matrix))
        value = nm.relu_covariance(m, s)
        assert value.device.type == device
        results.append([value, *torch.autograd.grad(value, (m, s), upstream.to(device))])
    for name, one, other in zip(("value", "by mean", "by covariance"), *results, strict=True):
        # rank 2 has correlations of 1 to rounding, where the gradient moves by the square root of that rounding
        loose = rank == 2 and name != "value"
        assert_close(
            other.cpu(),
            one.double(),
            atol=(1e-2 if dtype == torch.float32 else 1e-6) if loose else TOLERANCE[dtype],
            what=name,
        )


def test_orthant_probability_equals_the_cpus():
    mean, matrix = layer(200, 3, torch.float64)
    value = nm.orthant_probability(mean.cuda(), matrix.cuda()).cpu()
    assert_close(value, nm.orthant_probability(mean, matrix), atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_network_moments_and_gradients(dtype):
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)

    parts = [normal(500, 100) / 10, normal(500), normal(7, 500) / 20, normal(7), normal(3, 100)]
    results = []
    for device in ("cpu", "cuda"):
        A, c1, B, c2, x = (part.to(device).requires_grad_() for part in parts)
        network, noise = nm.AffineReluAffine(A, c1, B, c2), nm.Gaussian(x, std=0.4)
        covariance = network.covariance(noise)
        gradients = torch.autograd.grad(covariance.diagonal(dim1=1, dim2=2).sum(), (A, c1, B, x))
        results.append([network.mean(noise), network.variance(noise), covariance, *gradients])
    for i, (one, other) in enumerate(zip(*results, strict=True)):
        assert_close(
            other.cpu(), one.double(), atol=10 * TOLERANCE[dtype], rtol=10 * TOLERANCE[dtype], what=f"result {i}"
        )


def test_sampling_on_the_device():
    network = nm.AffineReluAffine(
        torch.ones(5, 3).cuda(), torch.zeros(5).cuda(), torch.ones(2, 5).cuda(), torch.zeros(2).cuda()
    )
    noise = nm.Gaussian(torch.zeros(4, 3), std=0.3).to("cuda")
    sampled = nm.monte_carlo(network, noise, samples=100_000, seed=1)
    assert sampled.mean.device.type == "cuda"
    assert_within_standard_errors(sampled.mean, network.mean(noise), sampled.mean_standard_error)
    assert_within_standard_errors(sampled.variance, network.variance(noise), sampled.variance_standard_error)


def test_mixed_devices_are_refused():
    with pytest.raises(ValueError, match="one device"):
        nm.relu_covariance(torch.zeros(3), torch.eye(3).cuda())
    network = nm.AffineReluAffine(
        torch.ones(5, 3).cuda(), torch.zeros(5).cuda(), torch.ones(2, 5).cuda(), torch.zeros(2).cuda()
    )
    with pytest.raises(ValueError, match=r"noise\.to\('cuda:0'\)"):
        network.mean(nm.Gaussian(torch.zeros(3), std=1.0))


@pytest.fixture(scope="module")
def lenet():
    return nm.zoo.pretrained("lenet").cuda()


def test_two_stage_is_the_same_as_on_the_cpu(lenet):
    """Float32 Jacobians: sums of a few hundred products of order 1, so 1e-4 of the largest entry."""
    images = torch.rand(3, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    for layer in range(3):
        here = nm.two_stage(nm.zoo.pretrained("lenet"), images, layer)
        there = nm.two_stage(lenet, images.cuda(), layer)
        for name in ("A", "c1", "B", "c2"):
            x, y = getattr(here, name), getattr(there, name).cpu()
            assert float((x - y).abs().max()) < 1e-4 * float(x.abs().max()), (layer, name)


def test_two_stage_reproduces_the_output_whatever_the_settings(lenet):
    images = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(1)).cuda()
    with full_precision(), torch.no_grad():
        exact = lenet(images)
    assert torch.backends.cudnn.conv.fp32_precision != "ieee"  # TF32 is on outside
    for layer in range(3):
        value = nm.two_stage(lenet, images, layer)(images)
        assert float(((value - exact).abs().amax(1) / exact.abs().amax(1)).max()) < 1e-5


def test_the_first_relu_of_lenet_has_moments(lenet):
    image = torch.rand(1, 28, 28, generator=torch.Generator().manual_seed(2)).cuda()
    noise = nm.Gaussian(image, std=0.05)
    moments = nm.output_moments(lenet, noise, layer=0)
    g = nm.two_stage(lenet, image, 0)
    sampled = nm.monte_carlo(g, noise, 20_000)
    assert g.A.shape == (6272, 784)
    assert float(moments.compare(sampled).mean.abs().max()) < 5
    assert float(moments.compare(sampled).variance.abs().max()) < 5


def test_every_method_of_the_front_door(lenet):
    images = torch.rand(5, 1, 28, 28, generator=torch.Generator().manual_seed(3)).cuda()
    noise = nm.Gaussian(images, std=0.01)
    sampled = nm.output_moments(lenet, noise, "sampling", outputs=3, samples=20_000)
    for method in ("two-stage", "linear"):
        moments = nm.output_moments(lenet, noise, method, outputs=3)
        assert moments.mean.is_cuda
        assert float(nm.relative_difference(moments.variance.double(), sampled.variance).mean()) < 0.1
        chances = moments.class_probabilities()
        assert chances.is_cuda
        torch.testing.assert_close(chances.sum(-1), torch.ones_like(chances[..., 0]))


def test_winning_probabilities_are_the_same_as_on_the_cpu():
    generator = torch.Generator().manual_seed(4)
    mean = torch.randn(20, 10, generator=generator, dtype=torch.float64)
    factor = torch.randn(20, 10, 10, generator=generator, dtype=torch.float64)
    covariance = factor @ factor.mT
    here = winning_probabilities(mean, covariance)
    there = winning_probabilities(mean.cuda(), covariance.cuda()).cpu()
    torch.testing.assert_close(here, there, rtol=1e-6, atol=1e-15)


def test_maps_on_the_gpu():
    network = nm.zoo.pretrained("digits").cuda()
    image = torch.rand(1, 8, 8, generator=torch.Generator().manual_seed(5)).cuda()
    noise = nm.Gaussian(image, std=0.2)
    stored, maps = nm.two_stage(network, image, 0), nm.two_stage_maps(network, image, 0)
    mean, covariance = maps.moments(noise)
    torch.testing.assert_close(mean, stored.mean(noise), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(covariance, stored.covariance(noise), rtol=1e-4, atol=1e-5)


def test_a_bank_moves_to_the_gpu(lenet):
    points = torch.rand(3, 1, 28, 28, generator=torch.Generator().manual_seed(6))
    bank = nm.LinearizationBank.at(nm.zoo.pretrained("lenet"), points).to("cuda")
    noise = nm.Gaussian(points.flip(0).cuda() + 0.001, std=0.01)
    moments = nm.output_moments(lenet, noise, bank=bank)
    assert moments.distance is not None
    torch.testing.assert_close(moments.distance.float().cpu(), torch.full((3,), 0.028), rtol=1e-3, atol=0)


def test_memory_of_a_batch_stays_within_its_budget(lenet):
    images = torch.rand(64, 1, 28, 28, generator=torch.Generator().manual_seed(7)).cuda()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    budget = 256 * 2**20
    nm.output_moments(lenet, nm.Gaussian(images, std=0.05), "two-stage", memory_budget=budget)
    jacobians = 2 * 64 * 1024 * 784 * 4  # A of all images, and their Gaussian's factors, were they held together
    tiles = 2**30
    assert torch.cuda.max_memory_allocated() - before < min(jacobians, 2 * budget) + tiles


def test_training_on_the_gpu_is_reproducible(tmp_path):
    recipe = dataclasses.replace(RECIPES["lenet"], epochs=1)
    generator = torch.Generator().manual_seed(8)
    images = torch.rand(1000, 1, 28, 28, generator=generator)
    data = LabelledImages(images, torch.randint(10, (1000,), generator=generator), tuple(map(str, range(1000))), ())
    written = []
    for name in ("a", "b"):
        train(recipe, data, data, weights=tmp_path / f"{name}.safetensors", device="cuda")
        written.append(read_tensors(tmp_path / f"{name}.safetensors")[0])
    assert all(torch.equal(written[0][name], written[1][name]) for name in written[0])


def test_a_study_is_the_same_as_on_the_cpu():
    images = torch.rand(12, 1, 8, 8, generator=torch.Generator().manual_seed(9))
    data = LabelledImages(images, torch.arange(12) % 10, tuple(map(str, range(12))), ())
    found = {
        device: study(
            nm.zoo.pretrained("digits"), data, StudyConfig(0.1, check=2, samples=500, device=torch.device(device))
        )
        for device in ("cpu", "cuda")
    }
    torch.testing.assert_close(found["cuda"].flips, found["cpu"].flips, rtol=1e-3, atol=1e-9)
    for here, there in zip(found["cpu"].checks, found["cuda"].checks, strict=True):
        torch.testing.assert_close(
            here.flips, there.flips, rtol=0, atol=0.15
        )  # other random numbers: over 5 errors of √2·0.022


def experiment_subjects() -> Subjects:
    network = nm.zoo.pretrained("lenet")
    images = torch.rand(3, 1, 28, 28, generator=torch.Generator().manual_seed(1))
    return Subjects(network, images, torch.tensor([5, 17, 40]), seed=2)


@pytest.mark.parametrize("kind", ["sampled", "computed", "points", "layers"])
def test_experiments_repeat_bit_for_bit(kind):
    subjects = experiment_subjects()
    sweep = {
        "sampled": lambda: MonteCarloSweep("monte-carlo", subjects, 3, samples=500),
        "computed": lambda: TightnessSweep("tightness", subjects, 3),
        "points": lambda: PointsSweep(
            "points", subjects, [Bank(2, False, subjects.images[:2], torch.tensor([0, 1, 1]))], 3
        ),
        "layers": lambda: LinearizationErrorSweep("layers", subjects, 3),
    }[kind]()
    first, again = (sweep.prepare("cuda")(0) for _ in range(2))
    for name in first:
        np.testing.assert_array_equal(first[name], again[name], err_msg=name)


def test_experiments_compute_what_they_compute_on_a_cpu():
    subjects = experiment_subjects()
    factors = torch.stack([subjects.factor(place) for place in range(3)])
    found = []
    for device in ("cpu", "cuda"):
        images = subjects.images.to(device)
        network = nm.two_stage(nm.zoo.pretrained("lenet").to(device), images)
        found.append(
            moments_at(network, images, factors.to(device)) | delta_method(network, images, factors.to(device))
        )
    for name, here in found[0].items():
        if name == "series":  # all rounding at small noise
            continue
        there = found[1][name].cpu()
        assert float(nm.relative_difference(here, there).max()) < 2e-3, name


def test_random_factors_on_the_device():
    factor = random_factor(200, torch.Generator("cuda").manual_seed(0))
    values = torch.linalg.eigvalsh(factor @ factor.T)
    assert_close(values.sum().cpu(), torch.tensor(200.0, dtype=torch.float64), rtol=1e-12)
    assert float(values.min()) > 0


def noise_for_digits(device: str, attack, count: int = 6, targets: bool = False):
    images = nm.data.load("digits").first(count)
    network = nm.zoo.pretrained("digits").float().to(device)
    wanted = (images.labels + 1) % 10 if targets else None
    return attack(network, images.images.to(device), images.labels, wanted)


@pytest.mark.parametrize("targets", [False, True])
def test_sparse_and_smooth_noise_costs_what_it_does_on_a_cpu(targets):
    """The same problem by the formula; the solver's path depends on rounding, its optimum on the kinks it passes."""
    attack = SparseSmooth(gamma=0.1, polish=0, samples=50)
    here, there = (noise_for_digits(device, attack, targets=targets) for device in ("cpu", "cuda"))
    assert there.mu.is_cuda
    cost, other = ((result.l1 + result.tv).cpu() for result in (here, there))
    assert float((cost / other - 1).abs().median()) < 0.01
    torch.testing.assert_close(here.margin, there.margin.cpu(), atol=2e-3, rtol=0)


def test_as_many_samples_are_fooled_on_the_gpu():
    result = noise_for_digits("cuda", SparseSmooth(samples=1000))
    assert bool(result.feasible.all())
    assert float((result.success.rate - 0.95).abs().max()) < 5 * (0.05 * 0.95 * 2 / 1000) ** 0.5


def test_attacks_within_a_box_on_the_gpu():
    boxed = [noise_for_digits(device, Targeted(beta=0.2, polish=0), targets=True) for device in ("cpu", "cuda")]
    torch.testing.assert_close(boxed[0].margin, boxed[1].margin.cpu(), atol=0.05, rtol=0.02)
    few = [noise_for_digits(device, PixelSupport(percent=10, beta=0.5)) for device in ("cpu", "cuda")]
    changed = [(result.mu.cpu() != 0).flatten(1).sum(1) for result in few]
    assert int(max(changed[0].max(), changed[1].max())) <= 6


def test_expected_logits_on_the_gpu(lenet):
    images = torch.rand(3, 1, 28, 28, generator=torch.Generator().manual_seed(4)).cuda()
    model = nm.ExpectedLogits(lenet, 0.02, at=images)
    x = images.clone().requires_grad_()
    model(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(model(images), nm.two_stage(lenet, images).mean(nm.Gaussian(images, std=0.02)))


PROPAGATED = {
    "layerwise": {"method": "layerwise"},
    "sketch": {"method": "sketch"},
    "assisted": {"method": "sampling", "control": "sketch", "samples": 500},
}


@pytest.mark.parametrize("name", ["residual", "lenet-like"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_layerwise_is_the_cpu_s(name, dtype):
    """Float64: rounding; float32: 1e-3 of the variance (windows decided on one side of rounding or the other)."""
    torch.manual_seed(0)
    net = small(name).to(dtype).eval()
    x = torch.randn(1, 1, 12, 12).to(dtype)
    here = nm.output_moments(net, nm.Gaussian(x, std=0.3), "layerwise")
    there = nm.output_moments(net.cuda(), nm.Gaussian(x.cuda(), std=0.3), "layerwise").to("cpu")
    tolerance = 1e-8 if dtype == torch.float64 else 2e-3
    torch.testing.assert_close(there.mean, here.mean, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(there.covariance, here.covariance, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", PROPAGATED)
def test_propagated_moments_against_samples(kind):
    torch.manual_seed(0)
    net = small("lenet-like").cuda().eval()
    noise = nm.Gaussian(torch.randn(2, 1, 12, 12, device="cuda"), std=0.1)
    found = nm.output_moments(net, noise, **PROPAGATED[kind])
    sampled = nm.monte_carlo(net, noise, 200_000, seed=3)
    error = nm.relative_difference(found.variance.double(), sampled.variance)
    assert float(error.mean()) < 0.06


def test_layerwise_has_gradients():
    torch.manual_seed(0)
    net = small("lenet-like").cuda().double().eval()
    x = torch.randn(1, 1, 12, 12, device="cuda", dtype=torch.float64)
    towards = torch.randn_like(x)

    def value(at: torch.Tensor) -> torch.Tensor:
        return nm.output_moments(net, nm.Gaussian(at, std=0.2), "layerwise").mean.sum()

    at = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(value(at), at)
    with torch.no_grad():
        difference = (value(x + 1e-4 * towards) - value(x - 1e-4 * towards)) / 2e-4
    assert float((slope * towards).sum()) == pytest.approx(float(difference), rel=1e-2, abs=1e-3)


def small(name: str) -> torch.nn.Module:
    """For (1, 12, 12) images."""
    nn = torch.nn
    if name == "residual":

        class Skip(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
                self.last = nn.Linear(4 * 36, 3)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = torch.relu(self.first(x))
                y = torch.relu(y + self.second(y))
                return self.last(torch.nn.functional.max_pool2d(y, 2).flatten(1))

        return Skip()
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(6, 8, 3, padding=1), nn.MaxPool2d(3, 2, 1),
        nn.ReLU(), nn.Flatten(), nn.Linear(72, 24), nn.LeakyReLU(0.1), nn.Linear(24, 4),
    )  # fmt: skip


def hard_layer(units: int, kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two images: weak, strong or ±1 correlations, with certain, linear, dead and repeated units among them."""
    mean, _, matrix = test_fused.layer(units, {"weak": 400, "strong": 6, "one": 1}[kind], dtype)
    return mean.cuda(), matrix.cuda()


def by_kernels_and_plainly(call, monkeypatch) -> tuple[list[Tensor], list[Tensor]]:
    """A call's results with Triton's kernels, and with Triton missing."""
    pytest.importorskip("triton")
    fast = call()
    with monkeypatch.context() as missing:
        missing.setattr(kernels, "PRESENT", False)
        plain = call()
    return fast, plain


KERNEL_TOLERANCE = {torch.float32: 5e-7, torch.float64: 1e-14}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["weak", "strong", "one"])
@pytest.mark.parametrize("units", [1, 7, 130, 256, 1000])
def test_the_kernels_covariance_is_the_plain_one(units, kind, dtype, monkeypatch):
    mean, matrix = hard_layer(units, kind, dtype)
    fast, _ = by_kernels_and_plainly(lambda: [nm.relu_covariance(mean, matrix)], monkeypatch)
    with monkeypatch.context() as missing:
        missing.setattr(kernels, "PRESENT", False)
        exact = nm.relu_covariance(mean.double(), matrix.double())
    std = matrix.double().diagonal(dim1=1, dim2=2).sqrt()
    scale = std.unsqueeze(-1) * std.unsqueeze(-2)
    error = ((fast[0].double() - exact).abs() - KERNEL_TOLERANCE[dtype] * scale).max()
    assert float(error) <= 1e-20
    assert torch.equal(fast[0], fast[0].mT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["weak", "strong"])
@pytest.mark.parametrize("units", [7, 130, 500])
def test_the_kernels_gradients_are_the_plain_ones(units, kind, dtype, monkeypatch):
    mean, matrix = hard_layer(units, kind, dtype)
    upstream = torch.randn(2, units, units, dtype=dtype, device="cuda") / units

    def call() -> list[Tensor]:
        m, s = mean.clone().requires_grad_(), matrix.clone().requires_grad_()
        return list(torch.autograd.grad(nm.relu_covariance(m, s), (m, s), upstream))

    tolerance = 3e-5 if dtype == torch.float32 else 1e-12
    for one, other in zip(*by_kernels_and_plainly(call, monkeypatch), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("form", [layer_form, layer_form_diagonal])
@pytest.mark.parametrize(("units", "kind"), [(7, "strong"), (130, "strong"), (500, "weak"), (256, "strong")])
def test_the_kernels_forms_are_the_plain_ones(units, kind, form, dtype, monkeypatch):
    mean, matrix = hard_layer(units, kind, dtype)
    weights = torch.randn(20, units, dtype=dtype, device="cuda") / units**0.5

    def call() -> list[Tensor]:
        inputs = [x.clone().requires_grad_() for x in (mean, matrix, weights)]
        value = form(*inputs)
        by_mean, by_matrix, by_weights = torch.autograd.grad(value.sin().sum(), inputs)
        return [value.detach(), by_mean, by_matrix + by_matrix.mT, by_weights]

    tolerance = 3e-5 if dtype == torch.float32 else 1e-12
    for one, other in zip(*by_kernels_and_plainly(call, monkeypatch), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("moment", ["variance", "covariance"])
@pytest.mark.parametrize("budget", [None, 2**20])
def test_the_kernels_moments_of_a_network_are_the_plain_ones(budget, moment, dtype, monkeypatch):
    """A batch of noises, with a unit that B never uses, in one piece and in strips."""
    generator = torch.Generator().manual_seed(0)
    A, B = (torch.randn(*shape, generator=generator).to(dtype).cuda() for shape in ((300, 20), (5, 300)))
    B[:, 7] = 0
    images = torch.randn(3, 20, generator=generator).to(dtype).cuda()
    upstream = torch.randn(3, 5, 5, generator=generator).to(dtype).cuda()

    def call() -> list[Tensor]:
        x, a, b = (tensor.clone().requires_grad_() for tensor in (images, A, B))
        network = nm.AffineReluAffine(a, torch.zeros_like(a[:, 0]), b, torch.zeros_like(b[:, 0]))
        value = getattr(network, moment)(nm.Gaussian(x, std=0.3), memory_budget=budget)
        grad = upstream if value.dim() == 3 else upstream[..., 0]
        return [value.detach(), *torch.autograd.grad(value, (x, a, b), grad)]

    for one, other in zip(*by_kernels_and_plainly(call, monkeypatch), strict=True):
        scale = float(other.abs().max())
        torch.testing.assert_close(one, other, rtol=0, atol=scale * (1e-4 if dtype == torch.float32 else 1e-12))


def test_the_kernels_refuse_what_the_plain_version_refuses():
    mean, matrix = hard_layer(40, "weak", torch.float32)
    with pytest.raises(ValueError, match="mean of a ReLU layer holds NaN"):
        nm.relu_covariance(torch.full_like(mean, torch.nan), matrix)
    with pytest.raises(ValueError, match="diagonal of the covariance"):
        nm.relu_covariance(mean, matrix - 10 * torch.eye(40, device="cuda"))
    matrix[1, 4, 2] = matrix[1, 2, 4] = torch.nan
    assert bool(torch.isnan(nm.relu_covariance(mean, matrix)[1, 4, 2]))


@pytest.mark.parametrize("method", ["layerwise", "sketch", "two-stage"])
def test_a_batch_is_its_images(method):
    """Images with noise of their own, together and one at a time; float64, so that only rounding differs."""
    torch.manual_seed(0)
    net = small("lenet-like").cuda().double().eval()
    x = torch.randn(5, 1, 12, 12, device="cuda", dtype=torch.float64)
    std = torch.linspace(0.05, 0.3, 5, device="cuda", dtype=torch.float64)
    noise = nm.Gaussian(x, nm.Isotropic(std**2, 144), event_ndim=3)
    together = nm.output_moments(net, noise, method)
    for place in range(5):
        alone = nm.Gaussian(x[place : place + 1], nm.Isotropic(std[place : place + 1] ** 2, 144), event_ndim=3)
        options = {"seed": place} if method == "sketch" else {}
        found = nm.output_moments(net, alone, method, **options)
        torch.testing.assert_close(found.mean[0], together.mean[place], rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(found.covariance[0], together.covariance[place], rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["relu", "leaky", "hardtanh"])
@pytest.mark.parametrize("count", [4, 20])
def test_the_kernels_of_a_sketch_for_single_inputs(name, count, dtype):
    assert_single_inputs(name, count, dtype, "cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("kernel", "stride", "padding"), WINDOWS)
@pytest.mark.parametrize(("with_zero", "sign"), KINDS)
def test_the_kernels_of_a_sketch_for_windows(kernel, stride, padding, with_zero, sign, dtype):
    windows = pooled((9, 8), kernel, stride, padding).cuda()
    assert_windows(Largest(windows, with_zero, sign), dtype, "cuda")


def test_a_replayed_sketch_is_the_same_sketch(lenet, monkeypatch):
    """Done, recorded, replayed; replayed for another image; and after the weights have changed."""
    network = copy.deepcopy(lenet)
    images = torch.rand(2, 1, 28, 28, generator=torch.Generator().manual_seed(0)).cuda()
    first, second = (nm.Gaussian(image, std=0.05) for image in images.split(1))

    def sketch(noise: nm.Gaussian) -> Tensor:
        return nm.output_moments(network, noise, "sketch").covariance

    done, recorded, again, other = (sketch(noise) for noise in (first, first, first, second))
    with torch.no_grad():
        next(network.parameters()).mul_(1.5)
    changed = sketch(second)
    monkeypatch.setattr("netmoments.propagate.sketch.REPLAYED_BYTES", 0)
    stronger = sketch(second)
    with torch.no_grad():
        next(network.parameters()).div_(1.5)
    for found, expected in ((recorded, done), (again, done), (other, sketch(second)), (changed, stronger)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    assert not torch.allclose(other, done, rtol=0.01)
    assert not torch.allclose(changed, other, rtol=0.01)


class Reordered(nn.Module):
    """Looks up an order that lies on the host, which no recording can do."""

    order = torch.tensor([2, 0, 1])

    def forward(self, x: Tensor) -> Tensor:
        return x[:, self.order]


def test_what_cannot_be_recorded_is_done_and_leaves_the_stream_as_it_was():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), Reordered(), nn.Linear(3, 2)).cuda().eval()
    noise, before = nm.Gaussian(torch.zeros(1, 4, device="cuda"), std=0.3), torch.cuda.current_stream()
    found = [nm.output_moments(net, noise, "sketch").covariance for _ in range(4)]
    assert torch.cuda.current_stream() == before
    for again in found[1:]:
        torch.testing.assert_close(again, found[0])


def test_a_recording_made_in_inference_mode_serves_outside(lenet):
    noise = nm.Gaussian(torch.rand(1, 1, 28, 28, generator=torch.Generator().manual_seed(0)).cuda(), std=0.05)
    outputs = list(range(10))
    with torch.inference_mode():
        for _ in range(2):
            nm.output_moments(lenet, noise, "sampling", outputs, samples=100, control="sketch")
    found = [nm.output_moments(lenet, noise, "sketch", outputs).covariance for _ in range(3)]
    for again in found[1:]:
        torch.testing.assert_close(again, found[0])
