"""Mean and variance of one ReLU: digits, tails, limits, derivatives, properties."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

import netmoments as nm
from netmoments.normal import density
from netmoments.relu.marginal import TAIL, excess_moments, nonlinear_variance, open_probability, tail_moments
from tests.closeness import assert_close
from tests.fuzz.oracle import mean_and_variance

mpmath.mp.dps = 40
HEIGHTS = [-37.0, -30.0, -25.0, -17.3, -10.0, -7.1, -5.0, -3.01, -3.0, -2.99, -1.5, -0.2, 0.0, 0.7, 2.5, 4.0, 9.0, 30.0]


def exact_mean(h: float) -> mpmath.mpf:
    return h * mpmath.ncdf(h) + mpmath.npdf(h)


def exact_variance(h: float) -> mpmath.mpf:
    h = mpmath.mpf(h)
    with mpmath.workdps(500):  # the closed form cancels: 400 digits are gone at h = −30
        return +((1 + h * h) * mpmath.ncdf(h) + h * mpmath.npdf(h) - exact_mean(h) ** 2)


@pytest.mark.parametrize("std", [1.0, 1e-3, 40.0])
def test_relative_accuracy_in_float64(std):
    h = torch.tensor(HEIGHTS, dtype=torch.float64)
    s = torch.full_like(h, std)
    mean = torch.tensor([float(exact_mean(v)) for v in HEIGHTS], dtype=torch.float64)
    variance = torch.tensor([float(exact_variance(v)) for v in HEIGHTS], dtype=torch.float64)
    # the exponential alone amplifies the rounding of h²/2 ≤ 700 by itself, 700 · 1.1e-16 at −37; forming (h·s)/s from
    # another s adds two roundings of h, 2 · h² · 1.1e-16
    rtol = 1e-13 if std == 1 else 5e-13
    for name, value, exact in (
        ("mean", nm.relu_mean(h * s, s), std * mean),
        ("variance", nm.relu_variance(h * s, s), std**2 * variance),
    ):
        assert_close(value, exact, rtol=rtol, what=name)


def test_relative_accuracy_in_float32():
    h = torch.tensor([v for v in HEIGHTS if v >= -10], dtype=torch.float32)
    one = torch.ones_like(h)
    assert_close(nm.relu_mean(h, one), [float(exact_mean(v)) for v in h.tolist()], rtol=2e-5)
    assert_close(nm.relu_variance(h, one), [float(exact_variance(v)) for v in h.tolist()], rtol=3e-5)


def test_large_means_in_float32():
    assert nm.relu_variance(torch.tensor(1e4), torch.tensor(1.0)).item() == 1.0
    assert nm.relu_mean(torch.tensor(1e30), torch.tensor(1e-30)).item() == pytest.approx(1e30)
    assert nm.relu_mean(torch.tensor(-1e30), torch.tensor(1e-30)).item() == 0.0


def test_zero_deviation_is_the_relu_itself():
    mean = torch.tensor([-2.0, 0.0, 3.0], dtype=torch.float64)
    assert nm.relu_mean(mean, torch.zeros(3, dtype=torch.float64)).tolist() == [0.0, 0.0, 3.0]
    assert nm.relu_variance(mean, torch.zeros(3, dtype=torch.float64)).tolist() == [0.0, 0.0, 0.0]


def test_tiny_deviations_do_not_underflow():
    value = nm.relu_mean(torch.tensor(-1e-200, dtype=torch.float64), torch.tensor(1e-200, dtype=torch.float64))
    assert value.item() == pytest.approx(1e-200 * float(exact_mean(-1.0)), rel=1e-14)


def test_first_and_second_derivatives():
    mean = torch.tensor([-6.0, -3.2, -0.5, 0.0, 0.3, 2.0, 5.0], dtype=torch.float64, requires_grad=True)
    std = torch.tensor([1.0, 1.1, 0.7, 0.4, 2.0, 0.5, 1.3], dtype=torch.float64, requires_grad=True)
    for function in (nm.relu_mean, nm.relu_variance):
        assert gradcheck(function, (mean, std), atol=1e-8, check_forward_ad=True)
    assert gradgradcheck(nm.relu_mean, (mean, std), atol=1e-6)
    assert gradgradcheck(nm.relu_variance, (mean, std), atol=1e-6)


def test_derivatives_without_noise():
    mean = torch.tensor([-2.0, 0.0, 3.0], dtype=torch.float64, requires_grad=True)
    std = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    by_mean, by_std = torch.autograd.grad(nm.relu_mean(mean, std).sum(), (mean, std))
    assert by_mean.tolist() == [0.0, 0.5, 1.0]
    assert_close(by_std, [0.0, 1 / math.sqrt(2 * math.pi), 0.0], atol=1e-16)
    by_mean, by_std = torch.autograd.grad(nm.relu_variance(mean, std).sum(), (mean, std))
    assert by_mean.tolist() == [0.0, 0.0, 0.0]
    assert by_std.tolist() == [0.0, 0.0, 0.0]


def test_vmap():
    mean, std = torch.linspace(-3, 3, 5, dtype=torch.float64), torch.tensor(0.7, dtype=torch.float64)
    mapped = torch.func.vmap(nm.relu_mean, in_dims=(0, None))(mean, std)
    assert_close(mapped, nm.relu_mean(mean, std), atol=2e-15)  # numbers up to 3, a few roundings


@given(st.floats(-20, 20), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_scaling(h, std, factor):
    h, std = torch.tensor(h, dtype=torch.float64), torch.tensor(std, dtype=torch.float64)
    scaled = nm.relu_variance(h * std * factor, std * factor)
    assert_close(scaled, factor**2 * nm.relu_variance(h * std, std), rtol=1e-12)


@given(st.floats(-12, 12))
def test_relu_of_z_and_minus_z_make_up_z(h):
    """From relu(z) − relu(−z) = z, means differ by h, and v(h) − v(−h) = 2Φ(h) − 1."""
    h, one = torch.tensor(h, dtype=torch.float64), torch.ones((), dtype=torch.float64)
    assert_close(nm.relu_mean(h, one) - nm.relu_mean(-h, one), h, atol=4e-15)
    assert_close(nm.relu_variance(h, one) - nm.relu_variance(-h, one), torch.erf(h / math.sqrt(2)), atol=2e-15)


@given(st.floats(-40, 40))
def test_nonlinear_variance_is_a_variance(h):
    h = torch.tensor(h, dtype=torch.float64)
    assert 0 <= nonlinear_variance(h, torch.ones_like(h)).item() <= 0.25 - 1 / (2 * math.pi) + 1e-15


BAD = {
    "no tensor": (
        lambda: nm.relu_mean(1.0, torch.zeros(3)),
        TypeError,
        "relu_mean: mean must be a torch tensor, got 1.0",
    ),
    "integers": (
        lambda: nm.relu_variance(torch.zeros(3), torch.ones(3, dtype=torch.int32)),
        TypeError,
        "std must be float32 or float64",
    ),
    "shapes": (lambda: nm.relu_mean(torch.zeros(3), torch.ones(4)), ValueError, r"mean \(3,\), std \(4,\)"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    call, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        call()


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_tail_moments(dtype, rtol):
    x = torch.tensor([TAIL, 3.7, 5.0, 9.0, 20.0, 40.0], dtype=dtype)
    for n, moment in enumerate(tail_moments(x)):
        exact = [
            float(mpmath.quad(lambda t, v=v, n=n: t**n * mpmath.exp(-v * t - t * t / 2), [0, 1 / v, 5, 30]))
            for v in x.tolist()
        ]
        assert_close(moment, torch.tensor(exact, dtype=torch.float64), rtol=rtol, what=f"M_{n}")


def test_excess_moments():
    """Relative errors on both sides of where the tail begins, against the closed form in enough digits."""
    x = torch.tensor([0.0, 0.4, 1.7, 2.99, 3.01, 6.0, 12.0, 25.0, 37.0], dtype=torch.float64)
    found = excess_moments(x, density(x))
    for place, v in enumerate(x.tolist()):
        with mpmath.workdps(400):
            exact = [mpmath.ncdf(-v), mpmath.npdf(v) - v * mpmath.ncdf(-v)]
            for n in range(1, 4):
                exact.append(n * exact[-2] - v * exact[-1])
        for n, moment in enumerate(found):
            assert_close(moment[place][None], [float(exact[n])], rtol=1e-12 if n < 3 else 5e-12, what=f"{n} at {v}")


def test_the_gate_of_a_dead_unit_in_float32():
    """The gate has relative accuracy: h is not rounded to float32 on the way."""
    mean, variance = torch.tensor([-4.1, -9.3, -11.9]), torch.tensor([0.81, 1.21, 1.1])
    exact = [float(mpmath.ncdf(m / mpmath.sqrt(v))) for m, v in zip(mean.tolist(), variance.tolist(), strict=True)]
    assert_close(open_probability(mean, variance), exact, rtol=2e-7)


def test_tails_in_float32():
    """Tails are accurate for the float32 inputs as given; with a rounded h²/2 they would be off by h²/2 roundings."""
    mean = torch.tensor([-3.3, -4.1, -5.7, -7.0, -9.3, -11.9])
    std = torch.tensor([1.0, 0.9, 0.7, 1.3, 1.1, 1.0])
    heights = [float(m) / float(s) for m, s in zip(mean, std, strict=True)]
    scale = std.double()
    exact = torch.tensor([[float(x) for x in mean_and_variance(h)] for h in heights], dtype=torch.float64)
    assert_close(nm.relu_mean(mean, std), exact[:, 0] * scale, rtol=1e-6)
    assert_close(nm.relu_variance(mean, std), exact[:, 1] * scale**2, rtol=1e-6)


def test_nothing_is_lost_before_it_is_too_small():
    """φ(40) is too small for float64, 5e27² φ(40) is not; 1e200² is too large, the variance at h = −31 is not."""
    for h, std in ((-40.0, 5e27), (-31.0, 1e200), (-20.0, 1e-60), (-45.0, 1e150)):
        mean, variance = mean_and_variance(h)
        place = torch.tensor([h * std, std], dtype=torch.float64)
        assert_close(nm.relu_mean(*place)[None], [float(mean * mpmath.mpf(std))], atol=1e-300, rtol=1e-12)
        exact = variance * mpmath.mpf(std) ** 2
        if 1e-300 < exact < 1e308:
            assert_close(nm.relu_variance(*place)[None], [float(exact)], rtol=1e-12)


@pytest.mark.parametrize("call", [nm.relu_mean, nm.relu_variance])
@pytest.mark.parametrize("std", [-1.0, -1e-30, math.nan])
def test_negative_deviations_are_refused(call, std):
    with pytest.raises(ValueError, match=r"std must be ≥ 0 everywhere, got (a smallest value of -|NaN)"):
        call(torch.zeros(2), torch.tensor([1.0, std]))
