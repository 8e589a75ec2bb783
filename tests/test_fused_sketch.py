"""The GPU's kernels for sketches: in Triton's interpreter, equal to the plain versions, which stand in elsewhere.

`TRITON_INTERPRET=1 pytest tests/test_fused_sketch.py` where Triton is installed; on a GPU see `test_gpu.py`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import netmoments as nm
from netmoments.relu.triton import kernels
from netmoments.rules import maximum_lines as contenders
from netmoments.rules import sketch_launch as fused_sketch
from netmoments.rules.maximum import Largest
from netmoments.rules.maximum_lines import Windows, _in_parts, frames_for
from netmoments.rules.piecewise_linear import PiecewiseLinear, between, one_kink, relu
from netmoments.rules.registry import pooling_windows
from netmoments.rules.sampled import BentUnits, moments_of_units, seen
from netmoments.rules.sketch_launch import FusedBent

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")  # by Triton's interpreter

interpreted = pytest.mark.skipif(
    not (kernels.PRESENT and bool(kernels.INTERPRETED)), reason="needs Triton and TRITON_INTERPRET=1"
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
    pair = lambda x: (x, x)  # noqa: E731
    return pooling_windows(1, shape, sizes, pair(kernel), pair(stride), pair(padding), (1, 1))


def without_means(across: Tensor) -> Tensor:
    """The forms less the means of their rows and columns, which is all that is made of them."""
    forms = across - across.mean(-1, keepdim=True)
    return forms - forms.mean(-2, keepdim=True)


def layers(dtype: torch.dtype, device: str = "cpu") -> dict[str, PiecewiseLinear]:
    like = torch.zeros((), dtype=dtype, device=device)
    return {
        "relu": relu(70, like),
        "leaky": one_kink(like.new_full((70,), 0.1), like.new_full((70,), 0.9)),
        "hardtanh": between(-1.0, 0.5, 70, like),
    }


def assert_single_inputs(name: str, count: int, dtype: torch.dtype, device: str) -> None:
    rule = layers(dtype, device)[name]
    mean, samples = drawn(2, count, 70, dtype, device)
    values, units, bent = fused_sketch.layer(rule, mean, samples)
    found = seen(rule, samples)
    plain = moments_of_units(rule, mean, found.covariance, count)
    close = {"rtol": 20 * TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(values, found.values, **close)
    for own, other in zip(units, plain, strict=True):
        torch.testing.assert_close(own, other, **close)
    every = BentUnits(torch.arange(rule.units, device=device), rule.windows, samples, plain.curvature)
    assert_same_forms(bent, every, TOLERANCE[dtype])


def assert_windows(rule: Largest, dtype: torch.dtype, device: str) -> None:
    mean, samples = drawn(2, 20, 72, dtype, device)
    values, units, bent = fused_sketch.layer(rule, mean, samples)
    found = seen(rule, samples)
    close = {"rtol": 20 * TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(values, found.values, **close)
    windows = Windows(
        rule.sign * rule.gathered(mean).flatten(0, 1).mT,
        found.covariance.flatten(0, 1).permute(1, 2, 0).contiguous(),
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
    every = BentUnits(torch.arange(rule.units, device=device), rule.windows, samples, units.curvature)
    assert_same_forms(bent, every, TOLERANCE[dtype])


def assert_same_forms(found: FusedBent, expected: BentUnits, tolerance: float) -> None:
    """For more scores than go together; the tolerance is relative to the largest form."""
    shape = (2, fused_sketch.SCORES + 2, len(expected.units))
    weights = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    own, across = found.quadratics(weights.to(expected.samples))
    other = expected.quadratics(weights.to(expected.samples))
    for one, another in ((own, other.own), (without_means(across), without_means(other.across))):
        torch.testing.assert_close(one, another, rtol=0, atol=tolerance * float(another.abs().max()))


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
@pytest.mark.parametrize(("kernel", "stride", "padding"), WINDOWS)
@pytest.mark.parametrize(("with_zero", "sign"), KINDS)
def test_windows(monkeypatch, dtype, kernel, stride, padding, with_zero, sign):
    monkeypatch.setattr(contenders, "MOST_FRAMES", 2)
    assert_windows(Largest(pooled((9, 8), kernel, stride, padding), with_zero, sign), dtype, "cpu")


@interpreted
def test_a_sketch_by_the_kernels_is_that_without(monkeypatch):
    """Pools take other lines, but the covariance of scores has the same sampled spread."""
    monkeypatch.setattr(contenders, "MOST_FRAMES", 4)
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Conv2d(1, 3, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Flatten(), torch.nn.Linear(27, 4)
    ).eval()
    noise = nm.Gaussian(torch.randn(2, 1, 8, 8), std=0.3)
    fused = nm.output_moments(network, noise, "sketch", probes=16)
    monkeypatch.setattr(kernels, "PRESENT", False)
    plain = nm.output_moments(network, noise, "sketch", probes=16)
    torch.testing.assert_close(fused.mean, plain.mean, rtol=0, atol=0.02)
    torch.testing.assert_close(fused.variance, plain.variance, rtol=0.1, atol=0)


@interpreted
def test_a_sample_that_is_no_number_stays_none():
    mean, samples = drawn(1, 4, 72, torch.float32)
    samples[0, 1, 20] = torch.nan
    rule = Largest(pooled((9, 8), 2, 2, 0), with_zero=True)
    values, units, _ = fused_sketch.layer(rule, mean, samples)
    torch.testing.assert_close(values, seen(rule, samples).values, equal_nan=True)
    touched = (rule.windows == 20).any(-1)
    assert bool(units.mean[0, touched].isnan().all())
    assert not bool(units.mean[0, ~touched].isnan().any())
    single = fused_sketch.layer(relu(72, torch.zeros(())), mean, samples)
    assert single[0].isnan().sum() == single[1].mean.isnan().sum() == 1


def test_kernels_are_not_for_derivatives_wide_windows_or_many_samples(monkeypatch):
    monkeypatch.setattr(kernels, "PRESENT", True)
    monkeypatch.setattr(kernels, "INTERPRETED", True)
    rule, mean, samples = relu(3, torch.zeros(())), torch.zeros(1, 3), torch.zeros(1, 4, 3)
    assert fused_sketch.available(rule, mean, samples)
    assert not fused_sketch.available(rule, mean.clone().requires_grad_(), samples)
    learned = one_kink(torch.zeros(3).requires_grad_(), torch.ones(3))
    assert not fused_sketch.available(learned, mean, samples)
    assert not fused_sketch.available(rule, mean, torch.zeros(1, fused_sketch.MOST_SAMPLES + 1, 3))
    wide = Largest(torch.arange(16).reshape(1, 16), with_zero=False)
    assert not fused_sketch.available(wide, torch.zeros(1, 16), torch.zeros(1, 4, 16))
    monkeypatch.setattr(kernels, "PRESENT", False)
    assert not fused_sketch.available(rule, mean, samples)
