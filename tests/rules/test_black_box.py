"""Operations without a rule: named by "layerwise", known from samples by a sketch, or refused."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import netmoments as nm
from tests.moments.problems import noise
from tests.networks import seeded


class Called(nn.Module):
    """A module that calls a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Around(nn.Module):
    """A linear layer, a function, a ReLU and a linear layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.function, self.last = nn.Linear(4, 5), function, nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(functional.relu(self.function(self.first(x))))


def each(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function of a batch that treats one image at a time, from a function of one image."""
    return lambda z: torch.stack([function(one) for one in z])


def factors(z: Tensor) -> Tensor:
    """Both factors of a QR decomposition, of matrices whose first number is not near 0, where signs would jump."""
    q, r = torch.linalg.qr(z[:, :4].reshape(-1, 2, 2) + 3 * torch.eye(2).to(z))
    return torch.cat([q.flatten(1), r[:, 1, 1:]], 1)


def spread_of_values(z: Tensor) -> Tensor:
    return torch.cat([torch.linalg.svdvals(z[:, :4].reshape(-1, 2, 2)), z[:, :3]], 1)


NO_RULE: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "sums of exponentials": (lambda z: z.logcumsumexp(1), "logcumsumexp in network"),
    "products": (Called(lambda z: z.cumprod(1)), "cumprod in function"),
    "logarithm of Γ": (lambda z: torch.lgamma(2 + z.exp()), "lgamma in network"),
    "Fourier transform": (lambda z: torch.fft.fft(z).abs(), "fft_r2c in network"),
    "complex numbers": (lambda z: (torch.complex(z, z.flip(1)) * (1 + 2j)).exp().real, "complex in network"),
    "singular values": (spread_of_values, "linalg_svd in network"),
    "two results": (factors, "linalg_qr in network"),
    "sorting": (lambda z: z.sort(1).values, "sort in network"),
    "rounding": (lambda z: (4 * z).round(), "round in network"),
    "division with rounding": (lambda z: torch.div(z, 0.5, rounding_mode="floor"), r"\w*div\w* in network"),
    "integers": (lambda z: (4 * z).int().double(), r"\w+ in network"),
    "truth values": (lambda z: z.bool().double(), r"\w+ in network"),
    "comparison": (lambda z: torch.where(z > 0, z, 0.1 * z), "gt in network"),
    "shapes that depend on data": (each(lambda z: z[z > 0].sum().expand(5)), r"\w+ in network"),
}

KNOWN_FROM_SAMPLES = (
    "sums of exponentials", "products", "logarithm of Γ", "sorting", "Fourier transform", "complex numbers",
    "singular values", "two results",
)  # fmt: skip
NO_DERIVATIVE = ("rounding", "division with rounding")


@pytest.mark.parametrize("case", NO_RULE)
def test_an_operation_without_a_rule_is_named(case):
    """The error says where the operation is and what to do; "sampling" takes the network."""
    function, where = NO_RULE[case]
    net = seeded(lambda: Around(function))
    with pytest.raises(ValueError, match=rf"output_moments: no rule for {where} ") as caught:
        nm.output_moments(net, noise(), "layerwise")
    for advice in ("netmoments.register_rule", 'method="sketch"', 'method="sampling"', "docs/propagation.md"):
        assert advice in str(caught.value)
    assert len(str(caught.value)) < 400
    assert nm.output_moments(net, noise(), nm.Sampling(100)).mean.shape == (3,)


@pytest.mark.parametrize("case", KNOWN_FROM_SAMPLES)
def test_a_sketch_knows_from_samples_what_has_no_rule(case):
    """Right to the error of 512 probes, √(2/512) of the nonlinear part of the variance, and five standard errors.

    "auto" takes the sketch where a gradient is wanted, which samples do not have.
    """
    function, where = NO_RULE[case]
    net = seeded(lambda: Around(function))
    given = nm.Gaussian(0.5 * torch.ones(4, dtype=torch.float64), std=0.1)
    chosen = nm.output_moments(net, nm.Gaussian(given.mean.clone().requires_grad_(), std=0.1))
    assert chosen.method == "sketch"
    assert chosen.mean.requires_grad
    assert re.search(f"no rule for {where}", chosen.reason)
    found = nm.output_moments(net, given, nm.Sketch(probes=512))
    sampled = nm.monte_carlo(net, given, 200_000, seed=1)
    deviation = sampled.variance.sqrt()
    assert float(((found.mean - sampled.mean) / deviation).abs().max()) < 0.1
    assert float((found.variance / sampled.variance - 1).abs().max()) < 0.15


@pytest.mark.parametrize("case", NO_DERIVATIVE)
def test_rounding_is_refused_by_a_sketch_too(case):
    """So does "auto" where a gradient is wanted; otherwise it samples."""
    net = seeded(lambda: Around(NO_RULE[case][0]))
    for given, method in ((noise(), "sketch"), (nm.Gaussian(noise().mean.clone().requires_grad_(), std=0.3), "auto")):
        with pytest.raises(ValueError, match=r"its derivative is zero .*sampling"):
            nm.output_moments(net, given, method)
    sampled = nm.output_moments(net, noise(), tolerance=0.1)
    assert (sampled.method, sampled.reason) == ("sampling", "independent samples")


@pytest.mark.parametrize("case", [case for case in NO_RULE if case not in KNOWN_FROM_SAMPLES + NO_DERIVATIVE])
def test_what_gives_no_numbers_is_refused_by_a_sketch_too(case):
    with pytest.raises(ValueError, match=r"no rule for|no fixed graph"):
        nm.output_moments(seeded(lambda: Around(NO_RULE[case][0])), noise(), "sketch")


REFUSED = (
    nn.Hardshrink(0.2),
    lambda y: functional.relu(y).to(torch.bfloat16).double(),
    lambda y: y[:, 1:].as_strided((len(y), 6), (6, 1), 0),  # reads what is not in the tensor
    lambda y: torch.view_as_complex(y.reshape(-1, 3, 2)).angle().repeat(1, 2),  # from π to −π
    lambda y: y.cumsum(1).gather(1, y.argsort(1)),
)


def test_several_results_of_complex_numbers_are_followed_in_either_dtype():
    """A spectrum that is filtered, in float32, and in float64 inside a float32 network."""

    def filtered(y: Tensor) -> Tensor:
        low, high = torch.fft.rfft(y).split(2, 1)
        return torch.cat([low.abs(), (high * (1 + 1j)).imag, y[:, :2]], 1)

    given = nm.Gaussian(torch.linspace(-1, 1, 4), std=0.1)
    for function in (filtered, lambda y: filtered(y.double()).to(y)):
        net = seeded(
            lambda function=function: nn.Sequential(nn.Linear(4, 6), Called(function), nn.Linear(6, 3)), torch.float32
        )
        found, sampled = nm.output_moments(net, given, nm.Sketch(probes=512)), nm.monte_carlo(net, given, 100_000)
        assert found.mean.dtype == torch.float32
        assert float((found.variance / sampled.variance - 1).abs().max()) < 0.1


@pytest.mark.parametrize("function", REFUSED)
def test_jumps_rough_numbers_and_places_in_memory_are_refused(function):
    net = seeded(lambda: nn.Sequential(nn.Linear(4, 6), Called(function), nn.Linear(6, 3)))
    for method in ("layerwise", "sketch"):
        with pytest.raises(ValueError, match="no rule for"):
            nm.output_moments(net, nm.Gaussian(torch.zeros(4, dtype=torch.float64), std=0.3), method)
