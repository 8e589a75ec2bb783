"""Checks of arguments: what passes, and errors that name the caller, the argument, what came and what was wanted."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import netmoments as nm
from netmoments.checks import (
    describe,
    random_seed,
    require_broadcastable,
    require_count,
    require_finite,
    require_float_tensor,
    require_float_tensors,
    require_seed,
    require_sigma,
    values_hold,
)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(3, 4), "a float32 tensor of shape (3, 4)"),
        (torch.zeros((), dtype=torch.int64), "a int64 tensor of shape ()"),
        (0.5, "0.5"),
        (True, "True"),
        ([1.0], "a list"),
        (None, "a NoneType"),
    ],
)
def test_values_are_described(value, words):
    assert describe(value) == words


def test_good_values_come_back():
    x, y = torch.zeros(3, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    assert require_float_tensor("caller", "x", x) is x
    assert require_float_tensors("caller", x=x, y=y) == (x, y)
    assert require_broadcastable("caller", x=(3, 1), y=(4,)) == (3, 4)
    require_finite("caller", "x", x)
    require_count("caller", "n", 2, least=2)


BAD = {
    "no tensor": (lambda: require_float_tensor("f", "x", [1.0]), TypeError, r"f: x must be a torch tensor.*as_tensor"),
    "integers": (lambda: require_float_tensor("f", "x", torch.arange(2)), TypeError, r"got a int64 .*\.float\(\)"),
    "dtypes": (
        lambda: require_float_tensors("f", x=torch.zeros(2), y=torch.zeros(2).double()),
        TypeError,
        r"f: x and y must have one dtype, got torch\.float32 and torch\.float64; convert one",
    ),
    "devices": (
        lambda: require_float_tensors("f", x=torch.zeros(2), y=torch.zeros(2, device="meta")),
        ValueError,
        "f: x and y must be on one device, got cpu and meta; move one",
    ),
    "shapes": (
        lambda: require_broadcastable("f", x=(3,), y=(4,)),
        ValueError,
        r"must broadcast, got x \(3,\), y \(4,\)",
    ),
    "empty": (lambda: require_broadcastable("f", x=(0, 3)), ValueError, r"must not be empty, got x \(0, 3\)"),
    "nan": (
        lambda: require_finite("f", "x", torch.tensor([0.0, torch.nan, torch.inf])),
        ValueError,
        "f: x must be finite, got 2 NaN or infinite values in a float32 tensor",
    ),
    "too few": (lambda: require_count("f", "n", 1, least=2), ValueError, "n must be an integer of at least 2, got 1"),
    "a fraction": (lambda: require_count("f", "n", 2.0, least=2), ValueError, r"at least 2, got 2\.0"),
    "a boolean": (lambda: require_count("f", "n", True, least=1), ValueError, "at least 1, got True"),
    "a tensor": (
        lambda: require_count("f", "n", torch.ones(9, 9), least=2),
        ValueError,
        r"got a float32 tensor of shape \(9, 9\)$",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_values_are_explained(case):
    call, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        call()


def test_values_that_cannot_be_read_are_taken_to_hold():
    """Inside vmap, values cannot be read; other errors are raised."""

    def checked(x: torch.Tensor) -> torch.Tensor:
        require_finite("f", "x", x)
        return x

    assert torch.func.vmap(checked)(torch.tensor([1.0, torch.nan])).shape == (2,)
    assert not values_hold(torch.tensor([True, False]))
    with pytest.raises(RuntimeError, match="meta"):
        values_hold(torch.ones(2, device="meta", dtype=torch.bool))


UNLIKE = {
    "sparse": (lambda: torch.eye(3).to_sparse(), r"sparse_coo; convert it with \.to_dense\(\)"),
    "rows": (lambda: torch.eye(3).to_sparse_csr(), r"sparse_csr; convert it with \.to_dense\(\)"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), r"nested; pass its parts"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        r"nested; pass its parts",
    ),
    "quantized": (
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        r"quantized; convert it with \.dequantize\(\)",
    ),
    "complex": (lambda: torch.ones(3, dtype=torch.complex64), r"complex; pass its real and imaginary parts"),
    "meta": (lambda: torch.ones(3, device="meta"), r"no values, as it is on the meta device"),
}


@pytest.mark.filterwarnings("ignore:.*(nested|Nested|[Ss]parse|quantiz)")
@pytest.mark.parametrize("kind", UNLIKE)
def test_tensors_that_are_no_block_of_real_numbers(kind):
    """Wherever such a tensor is passed, the error says what to do about it."""
    make, words = UNLIKE[kind]
    value, x = make(), torch.zeros(3)
    calls = [
        lambda: require_float_tensor("f", "x", value),
        lambda: require_float_tensors("f", x=value),
        lambda: nm.Gaussian(value, std=0.1),
        lambda: nm.two_stage(torch.nn.Linear(3, 2).eval(), at=value),
    ]
    if kind != "meta":  # which is another device first
        calls += [
            lambda: nm.Gaussian(x, std=value),
            lambda: nm.Gaussian(x, covariance=value),
            lambda: nm.Gaussian(x, covariance=nm.LowRank(value)),
            lambda: nm.Gaussian(x, covariance=nm.Dense(value)),
            lambda: nm.relu_mean(value, x),
            lambda: nm.relu_covariance(x, value),
            lambda: nm.AffineReluAffine(value, x, x[None], x[:1]),
        ]
    for call in calls:
        with pytest.raises(TypeError, match=words):
            call()


def test_large_integers_are_not_written_out():
    assert describe(2**400) == "an integer of 401 bits"
    assert require_seed("f", 2**80) == 2**80
    with pytest.raises(ValueError, match="f: seed must be an integer of at least 0, got an integer of 401 bits"):
        require_seed("f", -(2**400))
    with pytest.raises(ValueError, match="sigma must be a standard deviation above 0, got an integer of 1329 bits"):
        require_sigma("f", 10**400)


@pytest.mark.parametrize("name", ["tolerance", "samples", "sample", "relative error", "label", "quantized", "complex"])
def test_numbers_beyond_all_bounds_and_odd_indices_are_explained(name):
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    noise = nm.Gaussian(torch.zeros(3), std=0.1)
    meta = torch.empty((), dtype=torch.int64, device="meta")
    calls: dict[str, tuple[Callable[[], object], str]] = {
        "tolerance": (lambda: nm.output_moments(net, noise, tolerance=10**400), "tolerance must be between"),
        "samples": (lambda: nm.output_moments(net, noise, samples=2**80), "samples must be an integer of at most"),
        "sample": (lambda: noise.sample(2**80), "count must be an integer of at most"),
        "relative error": (lambda: nm.flip_probability(net, noise, relative_error=10**400), "relative_error must be"),
        "label": (lambda: nm.flip_probability(net, noise, meta), "label must be an integer or a plain tensor"),
        "quantized": (lambda: nm.output_moments(net, noise, outputs=quantized()), "outputs must be indices"),
        "complex": (lambda: nm.output_moments(net, noise, outputs=torch.ones(2) * 1j), "outputs must be indices"),
    }
    call, words = calls[name]
    with pytest.raises((TypeError, ValueError), match=words):
        call()


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


# seeds: the same for ever, and another for every purpose and item


def test_seeds_are_what_they_always_were():
    assert random_seed(0, "monte-carlo", 0) == 4862794602643682422
    assert random_seed(20261115, "monte-carlo", 7) == 6242148033895693001
    assert random_seed(1, "1", 1) == 6734197056050198910


def test_seeds_depend_on_all_three():
    seeds = {random_seed(seed, name, item) for seed in range(5) for name in ("a", "b", "1") for item in range(200)}
    assert len(seeds) == 5 * 3 * 200
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62
