"""The GPU's kernels for sketches are equal to the plain versions, which stand in elsewhere: on a GPU, and interpreted.

`TRITON_INTERPRET=1 pytest tests/rules/test_sketch_kernels.py` where Triton is installed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import netmoments as nm
from netmoments.relu.triton import kernels
from netmoments.rules import maximum_lines, sketch_launch
from netmoments.rules.base import Nonlinearity, QuadraticForms, paired
from netmoments.rules.maximum import Largest
from netmoments.rules.maximum_lines import Windows, _in_parts, frames_for
from netmoments.rules.one_number import PiecewiseLinear, between, one_kink, relu
from netmoments.rules.registry import pooling_windows
from tests.gpu import NEEDS_CUDA

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")  # by Triton's interpreter
OLD_NUMPY = tuple(map(int, np.__version__.split(".")[:2])) < (2, 5)
"""Triton's interpreter (3.6) makes numbers of arrays with one entry, which NumPy 2.5 refuses."""
interpreted = pytest.mark.skipif(
    not (kernels.PRESENT and bool(kernels.INTERPRETED) and OLD_NUMPY),
    reason="needs Triton, TRITON_INTERPRET=1 and NumPy before 2.5",
)
DTYPES = [torch.float32, torch.float64]
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12}
"""Of sums over K samples or n units of numbers of order 1, and of what a Cholesky factor magnifies."""


def drawn(images: int, count: int, inputs: int, dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Means and samples about them, neighbours correlated; one input certain, one far above 0 and one far below."""
    generator = torch.Generator().manual_seed(inputs)
    noise = torch.randn(images, count, inputs + 2, dtype=torch.float64, generator=generator)
    mean = torch.randn(images, inputs, dtype=torch.float64, generator=generator)
    mean[:, 3], mean[:, 4] = 60.0, -60.0
    smooth = noise[..., :-2] + 0.7 * noise[..., 1:-1] + 0.3 * noise[..., 2:]
    smooth[..., 5] = 0
    return mean.to(device, dtype), (mean.unsqueeze(1) + smooth).to(device, dtype)


def pooled(shape: tuple[int, int], kernel: int, stride: int, padding: int) -> Tensor:
    sizes = [(side + 2 * padding - kernel) // stride + 1 for side in shape]
    return pooling_windows(1, shape, sizes, *((x, x) for x in (kernel, stride, padding, 1)))


def layer(name: str, dtype: torch.dtype, device: str = "cpu") -> PiecewiseLinear:
    like = torch.zeros((), dtype=dtype, device=device)
    if name == "leaky":
        return one_kink(like.new_full((70,), 0.1), like.new_full((70,), 0.9))
    return relu(70, like) if name == "relu" else between(-1.0, 0.5, 70, like)


def parts(rule: PiecewiseLinear) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return rule.offset, rule.slope, rule.bends, rule.kinks


def assert_single_inputs(name: str, count: int, dtype: torch.dtype, device: str) -> None:
    rule = layer(name, dtype, device)
    mean, samples = drawn(2, count, 70, dtype, device)
    values, units, quadratics = sketch_launch.single_inputs(parts(rule), mean, samples)
    seen = rule.observed(samples)
    plain = rule.sketch_moments(mean, seen.covariance, count)
    close = {"rtol": 20 * TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(values, seen.values, **close)
    for own, other in zip(units, plain, strict=True):
        torch.testing.assert_close(own, other, **close)
    assert_forms(quadratics, rule, samples, plain.curvature)
    assert_one_layer(rule, mean, samples, values, units.mean)


def assert_windows(rule: Largest, dtype: torch.dtype, device: str) -> None:
    mean, samples = drawn(2, 20, 72, dtype, device)
    values, units, quadratics = sketch_launch.largest_of_windows(rule.windows, rule.sign, rule.with_zero, mean, samples)
    seen = rule.observed(samples)
    close = {"rtol": 20 * TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(values, seen.values, **close)
    windows = Windows(
        rule.sign * rule.gathered(mean).flatten(0, 1).mT,
        seen.covariance.flatten(0, 1).permute(1, 2, 0).contiguous(),
        (rule.windows >= 0).mT.repeat(1, 2),
        torch.arange(rule.units, device=device).repeat(2),
    )
    plain = _in_parts(windows, frames_for(rule.units, 20), rule.with_zero)
    torch.testing.assert_close(units.mean.flatten(), rule.sign * plain.mean, **close)
    torch.testing.assert_close(units.gain.flatten(0, 1), plain.gain.mT, **close)
    # the curvature divides by a Cholesky factor, whose smallest pivots are the root of FLOOR
    curvature = rule.sign * plain.curvature.permute(2, 0, 1)
    scale = float(curvature.abs().max())
    torch.testing.assert_close(units.curvature.flatten(0, 1), curvature, rtol=0, atol=100 * TOLERANCE[dtype] * scale)
    assert_forms(quadratics, rule, samples, units.curvature)
    assert_one_layer(rule, mean, samples, values, units.mean)


def assert_forms(
    found: Callable[[Tensor], QuadraticForms], rule: Nonlinearity, samples: Tensor, curvature: Tensor
) -> None:
    """Σ_u a_u z_uᵀ H_u z_u' with everything written out, in float64, for more scores than go together.

    What is made of the forms between samples does not depend on the means of their rows and columns.
    """
    shape = (2, sketch_launch.SCORES + 2, rule.units)
    weights = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(samples)
    own, across = found(weights)
    seen = samples.double().mT[:, rule.windows.clamp(min=0)] * (rule.windows >= 0).unsqueeze(-1)  # (N, n, w, K)
    z, a = seen - seen.mean(-1, keepdim=True), weights.double()
    curved, few = curvature.double() @ z, paired(samples.shape[1])
    expected = torch.einsum("nru,nuik,nuik->nrk", a, z, curved)
    between_samples = torch.einsum("nru,nuik,nuil->nrkl", a, z[..., :few], curved[..., -few:])
    pairs = ((own, expected), (without_means(across), without_means(between_samples)))
    for one, another in pairs:
        tolerance = TOLERANCE[samples.dtype] * float(another.abs().max())
        torch.testing.assert_close(one.double(), another, rtol=0, atol=tolerance)


def without_means(across: Tensor) -> Tensor:
    forms = across - across.mean(-1, keepdim=True)
    return forms - forms.mean(-2, keepdim=True)


def assert_one_layer(rule: Nonlinearity, mean: Tensor, samples: Tensor, values: Tensor, expected: Tensor) -> None:
    """What the rule makes of it in a sketch."""
    assert rule.has_kernels(mean, samples)
    found = rule.in_sketch(mean, samples)
    assert torch.equal(found.values, values)
    assert torch.equal(found.mean, expected)


def assert_power_moments(kinks: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To rounding of sums of powers of f's rise: k of them for E fᵏ; certain units and units far from kinks too."""
    generator = torch.Generator().manual_seed(kinks)
    shapes = ((70,), (70,), (kinks, 70), (kinks, 70), (2, 70), (2, 70))
    drawn = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    offset, slope, bends, places, mean, std = (x.to(device, dtype) for x in drawn)
    mean[1, 5:9], mean[1, 9:12], std[0, :3] = 20, -30, 0
    rule, variance = PiecewiseLinear(offset, slope, bends, places), std.square()
    assert sketch_launch.available(mean.unsqueeze(1))
    found = rule.power_moments(mean, variance)
    monkeypatch.setattr(kernels, "PRESENT", False)
    plain = rule.power_moments(mean, variance)
    eps, rise = torch.finfo(dtype).eps, (slope.abs() + bends.abs().sum(0)) * std.abs()
    bound = (offset.abs() + (mean * slope).abs() + (bends * (mean.unsqueeze(1) - places)).abs().sum(1)) * eps * 4
    assert bool(((found.centre - plain.centre).abs() <= bound).all())
    for power, ours, theirs in zip((1, 2, 3), found[1:4], plain[1:4], strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert bool(((one - other).abs() <= 50 * eps * rise**power).all())
    assert bool(((found.fourth - plain.fourth).abs() <= 50 * eps * rise**4).all())


WINDOWS = [(2, 2, 0), (3, 2, 0), (3, 2, 1)]
KINDS = [(False, 1), (True, 1), (False, -1)]


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["relu", "leaky", "hardtanh"])
@pytest.mark.parametrize("count", [4, 20])
def test_single_inputs(dtype, name, count):
    assert_single_inputs(name, count, dtype, "cpu")


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kinks", [1, 2, 4])
def test_power_moments(dtype, kinks, monkeypatch):
    assert_power_moments(kinks, dtype, "cpu", monkeypatch)


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kernel", "stride", "padding"), WINDOWS)
@pytest.mark.parametrize(("with_zero", "sign"), KINDS)
def test_windows(monkeypatch, dtype, kernel, stride, padding, with_zero, sign):
    monkeypatch.setattr(maximum_lines, "MOST_FRAMES", 2)
    assert_windows(Largest(pooled((9, 8), kernel, stride, padding), with_zero, sign), dtype, "cpu")


@interpreted
def test_a_sketch_by_the_kernels_is_that_without(monkeypatch):
    """Pools take other lines, but the covariance of scores has the same sampled spread."""
    monkeypatch.setattr(maximum_lines, "MOST_FRAMES", 4)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 4)).eval()
    noise = nm.Gaussian(torch.randn(2, 1, 8, 8), std=0.3)
    fused = nm.output_moments(network, noise, nm.Sketch(probes=16))
    monkeypatch.setattr(kernels, "PRESENT", False)
    plain = nm.output_moments(network, noise, nm.Sketch(probes=16))
    torch.testing.assert_close(fused.mean, plain.mean, rtol=0, atol=0.02)
    torch.testing.assert_close(fused.variance, plain.variance, rtol=0.1, atol=0)


@interpreted
def test_a_sample_that_is_no_number_stays_none():
    mean, samples = drawn(1, 4, 72, torch.float32)
    samples[0, 1, 20] = torch.nan
    rule = Largest(pooled((9, 8), 2, 2, 0), with_zero=True)
    values, units, _ = sketch_launch.largest_of_windows(rule.windows, 1, True, mean, samples)
    torch.testing.assert_close(values, rule.observed(samples).values, equal_nan=True)
    touched = (rule.windows == 20).any(-1)
    assert bool(units.mean[0, touched].isnan().all())
    assert not bool(units.mean[0, ~touched].isnan().any())
    single, moments, _ = sketch_launch.single_inputs(parts(relu(72, torch.zeros(()))), mean, samples)
    assert single.isnan().sum() == moments.mean.isnan().sum() == 1


@pytest.mark.gpu
@NEEDS_CUDA
class TestOnGpu:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("name", ["relu", "leaky", "hardtanh"])
    @pytest.mark.parametrize("count", [4, 20])
    def test_single_inputs(self, name, count, dtype):
        assert_single_inputs(name, count, dtype, "cuda")

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("kinks", [1, 2, 4])
    def test_power_moments(self, kinks, dtype, monkeypatch):
        assert_power_moments(kinks, dtype, "cuda", monkeypatch)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("kernel", "stride", "padding"), WINDOWS)
    @pytest.mark.parametrize(("with_zero", "sign"), KINDS)
    def test_windows(self, kernel, stride, padding, with_zero, sign, dtype):
        windows = pooled((9, 8), kernel, stride, padding).cuda()
        assert_windows(Largest(windows, with_zero, sign), dtype, "cuda")
