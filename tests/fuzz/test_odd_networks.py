"""Networks that are nearly dead, numbers near the ends of a dtype, odd weights, and inputs that share memory."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import netmoments as nm
from tests.closeness import assert_close
from tests.fuzz.oracle import mean_and_variance
from tests.fuzz.workloads import METHODS
from tests.networks import seeded

NOISE = nm.Gaussian(torch.linspace(-1, 1, 3), std=0.1)


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval()


class Shifted(nn.Module):
    """Adds a buffer, in float64, to what a float32 layer returns."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("shift", torch.zeros(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.shift


class Mixed(Shifted):
    """Has a product with it instead, which torch refuses."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) @ self.shift.diag()


def sparse() -> nn.Module:
    network = perceptron()
    network[0].weight = nn.Parameter(network[0].weight.detach().to_sparse())
    return network


def quantized() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(perceptron(), {nn.Linear}, dtype=torch.qint8).eval()


class InFloat64(nn.Module):
    """Returns float64, for no tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).double()


BAD = {
    "scores of another dtype": (
        InFloat64,
        ValueError,
        r"returns torch.float64 for an input of torch.float32; convert what it returns, with .to\(torch.float32\)",
    ),
    "a buffer that changes the dtype": (
        Shifted,
        ValueError,
        r"returns torch.float64 for an input of torch.float32; it has shift \(float64\).*network.to\(torch.float32\)",
    ),
    "a buffer of another dtype": (
        Mixed,
        ValueError,
        r"cannot take an input .*; it has shift \(float64\) for",
    ),
    "sparse weights": (sparse, TypeError, r"the network's 0.weight must be a plain tensor, got one that is sparse_coo"),
    "no weights yet": (
        lambda: perceptron().to("meta"),
        TypeError,
        r"the network's 0.weight has no values.*meta",
    ),
    "packed weights": (quantized, TypeError, r"0 is quantized \(Linear\) .*pass the float network it was made from"),
}


@pytest.mark.filterwarnings("ignore:.*([Qq]uantiz|[Ss]parse|TypedStorage)")
@pytest.mark.parametrize("case", BAD)
def test_odd_weights(case):
    make, kind, words = BAD[case]
    with pytest.raises(kind, match=words):
        nm.output_moments(make().eval(), NOISE)


@pytest.mark.parametrize("method", METHODS)
def test_memory_that_entries_share(method):
    """Expanded and overlapping inputs, and expanded weights, are those numbers and nothing else."""
    network = perceptron()
    network[2].weight = nn.Parameter(torch.linspace(-1, 1, 4).expand(2, 4))
    for mean in (torch.ones(1).expand(3), torch.ones(3).expand(2, 3), torch.arange(5.0).as_strided((3, 3), (1, 1))):
        before = mean.clone()
        found = nm.output_moments(network, nm.Gaussian(mean, std=0.1), METHODS[method]())
        copied = nm.output_moments(network, nm.Gaussian(mean.clone(), std=0.1), METHODS[method]())
        torch.testing.assert_close(found.mean, copied.mean)
        torch.testing.assert_close(found.variance, copied.variance)
        assert torch.equal(mean, before)
    matrix = torch.ones(1, 1).expand(3, 3)
    shared = nm.output_moments(network, nm.Gaussian(NOISE.mean, covariance=matrix), METHODS[method]())
    alone = nm.output_moments(network, nm.Gaussian(NOISE.mean, covariance=matrix.clone()), METHODS[method]())
    torch.testing.assert_close(shared.variance, alone.variance)


def dead(h: float, units: int, dtype: torch.dtype) -> nn.Module:
    """The sum of so many ReLUs of h + x."""
    network = nn.Sequential(nn.Linear(1, units), nn.ReLU(), nn.Linear(units, 1)).to(dtype).eval()
    for parameter, value in zip(network.parameters(), (1, h, 1, 0), strict=True):
        nn.init.constant_(parameter, value)
    return network


@pytest.mark.parametrize("method", ["auto", "layerwise", "two-stage"])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1.5e-6), (torch.float64, 1e-12)])
def test_units_that_hardly_ever_open(method, dtype, rtol):
    """Mean and variance relative to themselves, alone and where 100 units open together; then only small, not NaN."""
    for h in (-3.5, -7.0, -12.0, -13.0, -25.0, -37.0):
        exact = mean_and_variance(h)
        for units in (1, 100):
            found = nm.output_moments(dead(h, units, dtype), nm.Gaussian(torch.zeros(1, dtype=dtype), std=1.0), method)
            for one, other in ((found.mean, exact[0] * units), (found.variance, exact[1] * units**2)):
                if other > 10 * torch.finfo(dtype).tiny:
                    assert float(one) == pytest.approx(float(other), rel=rtol)
                else:
                    assert 0 <= float(one) <= 11 * torch.finfo(dtype).tiny


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("mean", "std"), [(1.0, 1e12), (0.0, 1e16), (1e18, 1e12), (5e29, 1.0), (1.0, 1e-18), (0.0, 1e-20)]
)
def test_numbers_near_the_ends_of_float32(method, mean, std):
    """Moments are finite as long as variances fit, though their squares do not."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)).eval()
    found = nm.output_moments(network, nm.Gaussian(torch.tensor([0.3, -0.7, 1.1]) * mean, std=std), METHODS[method]())
    assert bool(found.mean.isfinite().all())
    assert bool((found.variance.isfinite() & (found.variance >= 0)).all())


class Exponential(nn.Module):
    """exp(scale x)."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return torch.exp(self.scale * x)


@pytest.mark.parametrize("scale", [3.0, 4.0])
def test_powers_beyond_float32_where_no_weight_lies_do_not_count(scale):
    """E exp(ax) = exp(a²/2) and Var exp(ax) = exp(a²)(exp(a²) − 1), though exp(2ax) is infinite at far nodes."""
    found = nm.output_moments(Exponential(scale).eval(), nm.Gaussian(torch.zeros(2), std=1.0), "layerwise", check=0)
    squared = scale**2
    assert_close(found.mean.double(), torch.full((2,), math.exp(squared / 2)).double(), rtol=1e-5)
    assert_close(found.variance.double(), torch.full((2,), math.exp(squared) * math.expm1(squared)).double(), rtol=1e-4)


def test_layers_after_infinite_moments_are_not_what_an_error_is_about():
    """A ReLU after exponentials that are infinite."""
    parts = (nn.Linear, 4, 6), (Exponential, 1.0), (nn.Linear, 6, 6), (nn.ReLU,), (nn.Linear, 6, 2)
    network = seeded(lambda: nn.Sequential(*(kind(*sizes) for kind, *sizes in parts)), torch.float32)
    with pytest.raises(ValueError, match=r"too large for float32; take smaller units of the input, or network"):
        nm.output_moments(network, nm.Gaussian(torch.zeros(4), std=60.0), "layerwise")


def test_variances_too_large_for_the_dtype():
    """1e42 is none of float32's: an error says so."""
    network = nn.Sequential(nn.Linear(3, 6), nn.Tanhshrink(), nn.Linear(6, 2)).eval()
    nn.init.constant_(network[0].weight, 1e5)
    with pytest.raises(
        ValueError, match=r"too large for float32; take smaller units of the input, or network and noise"
    ):
        nm.output_moments(network, nm.Gaussian(torch.zeros(3), std=1e16), "layerwise")
    perceptron = dead(0.0, 2, torch.float32)
    nn.init.constant_(perceptron[0].weight, 1e5)
    with pytest.raises(ValueError, match=r"a float32 variance of more than 3e\+38 is infinite"):
        nm.output_moments(perceptron, nm.Gaussian(torch.zeros(1), std=1e16), "layerwise")


def test_inputs_that_are_taken_for_masks():
    """Beyond 1e30, where no linear layer looks linear: refused by name, or known from samples."""
    noise = nm.Gaussian(torch.tensor([3e29, -7e29, 1.1e30]), std=1.0)
    with pytest.raises(ValueError, match="no rule for addmm in 0 as it is called there"):
        nm.output_moments(perceptron(), noise, "layerwise")
    assert bool(nm.output_moments(perceptron(), noise, "sketch").mean.isfinite().all())


@pytest.mark.parametrize("method", ["auto", "layerwise", "sketch"])
def test_variances_too_small_for_the_dtype_have_an_error(method):
    """1e-62 is 0 in float32, which is not said to be exact."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).eval()
    for parameter in network[2].parameters():
        parameter.data *= 1e-30
    found = nm.output_moments(network, nm.Gaussian(torch.zeros(3), std=0.5), method)
    assert bool((found.variance == 0).all())
    assert bool((found.error.mean > 0).all())
    assert bool((found.error.variance > 0).all())


class Steep(nn.Module):
    """Each input divided by the spread of all, which is 0 at the mean: a slope of 1e8."""

    def forward(self, x):
        return torch.tanh((x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-8))


def test_formulas_say_that_they_cannot_follow_a_steep_network():
    noise = nm.Gaussian(torch.zeros(6), std=0.1)
    for method, expected in (
        ("layerwise", r'too large for float32.* or method="auto"'),
        ("sketch", r"too large for float32"),
        (nm.Sampling(100, control=nm.Sketch()), r"the sketch that samples are compared with .* must be finite"),
    ):
        with pytest.raises(ValueError, match=expected):
            nm.output_moments(Steep().eval(), noise, method)
    assert bool(nm.output_moments(Steep().eval(), noise, tolerance=0.1).variance.isfinite().all())
