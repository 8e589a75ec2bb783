"""What is tried at random, and what must hold: each campaign makes a case from its number, and raises if it fails.

The same number is the same case: `python -m tests.fuzz one layers 1234` runs one again.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import mpmath
import numpy as np
import torch
from torch import Tensor, nn

import netmoments as nm
from netmoments.normal import distribution
from tests.fuzz.oracle import pair


@dataclass(frozen=True)
class Campaign:
    """So many cases of one kind, and in words what each is and what must hold."""

    check: Callable[[np.random.Generator], None]
    cases: int
    tried: str
    holds: str


def generator_of(name: str, number: int) -> np.random.Generator:
    """Depends on the campaign and the case alone."""
    return np.random.default_rng([number, *name.encode()])


EPS = {torch.float32: 1.2e-7, torch.float64: 2.3e-16}
DTYPES = (torch.float32, torch.float64)


def dtype_of(rng: np.random.Generator) -> torch.dtype:
    return DTYPES[int(rng.integers(2))]


def heights(rng: np.random.Generator, count: int) -> np.ndarray:
    """h of some units: ordinary, dead, linear, far beyond, exactly 0, or all of one kind."""
    kinds = rng.choice(5, count if rng.random() < 0.7 else 1, p=[0.5, 0.2, 0.1, 0.1, 0.1])
    return np.choose(
        np.broadcast_to(kinds, count),
        [
            rng.normal(size=count),
            -rng.uniform(3, 14, count),
            rng.uniform(3, 14, count),
            rng.choice([-1, 1], count) * 10.0 ** rng.uniform(1, 6, count),
            np.zeros(count),
        ],
    )


def layer(rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Means and a covariance: of any rank, with duplicates, opposites, certain units and deviations of many sizes."""
    dtype, units = dtype_of(rng), int(rng.integers(1, 25))
    factor = rng.normal(size=(units, int(rng.integers(1, units + 2))))
    if units > 2 and rng.random() < 0.4:
        factor[1] = factor[0] * rng.choice([-1.0, 1.0, 0.5])
    if rng.random() < 0.2:
        factor[int(rng.integers(units))] = 0
    size = 10.0 ** (rng.uniform(-8, 8) + rng.uniform(-2, 2, units) * rng.integers(0, 2))
    factor *= size[:, None]
    matrix = factor @ factor.T
    mean = heights(rng, units) * np.sqrt(np.diag(matrix))
    return torch.tensor(mean).to(dtype), torch.tensor(0.5 * (matrix + matrix.T)).to(dtype)


def check_layer(rng: np.random.Generator) -> None:
    mean, matrix = layer(rng)
    eps, s = EPS[mean.dtype], matrix.diagonal().sqrt()
    found, orthant = nm.relu_covariance(mean, matrix), nm.orthant_probability(mean, matrix)
    for name, result in (("covariance", found), ("orthant", orthant)):
        assert bool(torch.isfinite(result).all()), f"{name} is not finite"
        assert torch.equal(result, result.mT), f"{name} is not symmetric to the bit"
    own = nm.relu_variance(mean, s).double()
    assert bool(((found.diagonal() - own).abs() <= 1e3 * eps * own + torch.finfo(mean.dtype).tiny).all()), "diagonal"
    assert bool((found.diagonal() >= 0).all()), "a negative variance"
    safe = torch.where(s > 0, s, 1.0).double()
    correlations = found.double() / safe.unsqueeze(-1) / safe
    smallest = float(torch.linalg.eigvalsh(correlations)[0])
    assert smallest >= -20 * len(s) * eps, f"smallest eigenvalue {smallest}"
    gate = distribution(mean.double() / torch.where(s > 0, s, 1e-300).double()).clamp(0, 1)
    assert bool((orthant <= torch.minimum(gate.unsqueeze(-1), gate) + 1e2 * eps)[:, s > 0][s > 0].all()), "P > Φ"
    order = torch.from_numpy(rng.permutation(len(s)))
    again = nm.relu_covariance(mean[order], matrix[order][:, order])
    rounding = 40 * eps * (safe.unsqueeze(-1) * safe)[order][:, order]
    assert bool(((again - found[order][:, order]).abs() <= rounding).all()), "another order of the units"


def noise(rng: np.random.Generator, size: int, dtype: torch.dtype) -> nm.Gaussian:
    """Any structure, any rank, with and without zeros."""
    mean = torch.tensor(rng.normal(size=size)).to(dtype)
    factor = torch.tensor(rng.normal(size=(size, int(rng.integers(1, size + 1))))).to(dtype)
    scale = 10.0 ** rng.uniform(-6, 2)
    match int(rng.integers(5)):
        case 0:
            return nm.Gaussian(mean, std=float(scale))
        case 1:
            return nm.Gaussian(
                mean, covariance=torch.tensor(rng.uniform(0, 1, size) * rng.integers(0, 2, size)).to(dtype)
            )
        case 2:
            return nm.Gaussian(mean, covariance=nm.LowRank(scale * factor))
        case 3:
            return nm.Gaussian(mean, covariance=nm.LowRank(factor, float(scale)))
        case _:
            product = factor @ factor.mT
            return nm.Gaussian(mean, covariance=nm.Dense(0.5 * (product + product.mT)))


def check_form(rng: np.random.Generator) -> None:
    dtype, size, units, outputs = dtype_of(rng), *(int(x) for x in rng.integers(1, (6, 30, 4)))
    given = noise(rng, size, dtype)
    A, B = (torch.tensor(rng.normal(size=shape)).to(dtype) for shape in ((units, size), (outputs, units)))
    B[:, torch.from_numpy(rng.random(units) < 0.2)] = 0
    spread = given.covariance.push_diagonal(A).double().sqrt().numpy()
    c1 = torch.tensor(heights(rng, units) * spread - (A.double() @ given.mean.double()).numpy()).to(dtype)
    network = nm.AffineReluAffine(A, c1, B, torch.zeros(outputs, dtype=dtype))
    mean, variance, covariance = network.mean(given), network.variance(given), network.covariance(given)
    for name, result in (("mean", mean), ("variance", variance), ("covariance", covariance)):
        assert bool(torch.isfinite(result).all()), f"{name} is not finite"
    assert torch.equal(covariance, covariance.mT), "not symmetric to the bit"
    wide = network.to(torch.float64)
    exact_noise = given.to(torch.float64)
    z = (wide.A @ exact_noise.mean.unsqueeze(-1)).squeeze(-1) + wide.c1
    exact = wide.B @ nm.relu_covariance(z, exact_noise.covariance.push(wide.A)) @ wide.B.mT
    reach = (wide.B.abs() @ exact_noise.covariance.push_diagonal(wide.A).sqrt()).square()
    shift = wide.B.abs() @ (wide.A.abs() @ exact_noise.mean.abs() + wide.c1.abs()) * wide.B.abs().sum(-1)
    # rounding of a mean moves h, and what a unit adds by as much as s times that
    allowed = 60 * EPS[dtype] * (reach + reach.sqrt() * shift)
    assert bool(((variance - exact.diagonal()).abs() <= allowed).all()), "another variance than B K Bᵀ"
    assert bool(((covariance.diagonal() - variance).abs() <= allowed).all()), "variance is not the diagonal"
    assert bool((variance >= 0).all()), "a negative variance"


def check_marginal(rng: np.random.Generator) -> None:
    dtype, count = dtype_of(rng), int(rng.integers(1, 50))
    limit = 15 if dtype == torch.float32 else 100
    std = torch.tensor(10.0 ** rng.uniform(-limit, limit, count)).to(dtype)
    std[torch.from_numpy(rng.random(count) < 0.1)] = 0
    mean = torch.tensor(heights(rng, count)).to(dtype) * std
    expected, variance = nm.relu_mean(mean, std), nm.relu_variance(mean, std)
    wide_mean, wide_variance = nm.relu_mean(mean.double(), std.double()), nm.relu_variance(mean.double(), std.double())
    tiny = torch.finfo(dtype).tiny
    for name, result, exact in (("mean", expected, wide_mean), ("variance", variance, wide_variance)):
        assert bool(torch.isfinite(result).all()), f"{name} is not finite"
        rtol = 1e-5 if dtype == torch.float32 else 1e-13  # at h = −2 the closed form cancels by h⁴
        assert bool(((result - exact).abs() <= rtol * exact + tiny).all()), f"{name} in another dtype"
    assert bool((expected >= torch.relu(mean)).all()), "below relu(mean)"
    assert bool(((variance >= 0) & (variance.double() <= std.double() ** 2 * (1 + 1e-6) + tiny)).all()), "variance"


SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (3,), (2, 3), (3, 3), (1, 2, 2), (2, 1, 2, 2)]
VALUES = [0.0, 1.0, -1.0, 1e-60, 1e60, 1e-30, math.nan, math.inf, -math.inf, 10**400, 2**80, True, None, "0.1", [1.0]]


def any_argument(rng: np.random.Generator) -> Any:
    """A number, a tensor, a structure, or something else that a user may pass."""
    if rng.random() < 0.3:
        return VALUES[int(rng.integers(len(VALUES)))]
    shape = SHAPES[int(rng.integers(len(SHAPES)))]
    value = torch.tensor(rng.normal(size=shape)).to(dtype_of(rng))
    if rng.random() < 0.5:
        value = value.abs()
    if rng.random() < 0.2 and value.numel():
        value.flatten()[0:1].fill_(float(rng.choice([math.nan, math.inf, -1.0, 0.0])))
    match int(rng.integers(12)):
        case 0:
            return nm.LowRank(value, 0.1)
        case 1:
            return nm.Dense(value @ value.mT if value.dim() > 1 else value)
        case 2:
            return nm.Diagonal(value)
        case 3:
            return value.to_sparse()
        case 4:
            return value.to(torch.float16)
        case 5:
            return value.to("meta")
        case 6:
            return value[..., :1].expand(value.shape) if value.dim() else value
        case 7:
            return value.to(torch.complex64)
        case _:
            return value


def _require(said: bool, error: Exception) -> None:
    if not said:
        raise AssertionError(f"{type(error).__name__}: {error}")


def check_gaussian(rng: np.random.Generator) -> None:
    """Any arguments: a Gaussian whose numbers are those of a covariance, or an error that says what is wrong."""
    mean, value = any_argument(rng), any_argument(rng)
    name = "std" if rng.random() < 0.5 else "covariance"
    try:
        made = nm.Gaussian(mean, **{name: value})
    except (ValueError, TypeError) as error:
        _require(str(error).startswith("Gaussian: "), error)
        return
    variances = made.variance
    assert bool(torch.isfinite(variances).all() & (variances >= 0).all()), "not the variances of a covariance"
    matrix = made.covariance.dense()
    assert torch.equal(matrix, matrix.mT) or isinstance(made.covariance, nm.Dense), "not symmetric"
    assert bool(torch.isfinite(made.sample(2)).all()), "a sample is not finite"


def check_any_call(rng: np.random.Generator) -> None:
    """Functions of the engine with any arguments: a finite result, or an error that names the function."""
    first, second = any_argument(rng), any_argument(rng)
    calls: dict[str, Callable[[], Any]] = {
        "relu_mean": lambda: nm.relu_mean(first, second),
        "relu_variance": lambda: nm.relu_variance(first, second),
        "relu_covariance": lambda: nm.relu_covariance(first, second),
        "orthant_probability": lambda: nm.orthant_probability(first, second),
        "AffineReluAffine": lambda: nm.AffineReluAffine(first, second, first, second),
    }
    name = list(calls)[int(rng.integers(len(calls)))]
    try:
        calls[name]()
    except (ValueError, TypeError) as error:
        words = ("of a ReLU layer", "correlations must be within", f"{name}: ")  # kernels do not know who called
        _require(any(word in str(error) for word in words), error)


METHODS = ("two-stage", "linear", "layerwise", "sketch", "sampling")


def check_network(rng: np.random.Generator) -> None:
    dtype, widths = dtype_of(rng), [int(x) for x in rng.integers(1, 9, int(rng.integers(2, 5)))]
    layers: list[nn.Module] = []
    for before, after in zip(widths, [*widths[1:], 3], strict=True):
        linear = nn.Linear(before, after, dtype=dtype)
        linear.weight.data = torch.tensor(rng.normal(size=(after, before)) * 10.0 ** rng.uniform(-2, 1)).to(dtype)
        linear.bias.data = torch.tensor(rng.normal(size=after) * rng.choice([0.0, 1.0, 10.0])).to(dtype)
        layers += [linear, [nn.ReLU(), nn.LeakyReLU(0.1), nn.Hardtanh()][int(rng.choice(3, p=[0.8, 0.1, 0.1]))]]
    network = nn.Sequential(*layers[:-1]).eval()
    method = METHODS[int(rng.integers(len(METHODS)))]
    if method == "two-stage" and not any(isinstance(module, nn.ReLU) for module in network):
        method = "layerwise"
    found = nm.output_moments(network, noise(rng, widths[0], dtype), method)
    assert bool(torch.isfinite(found.mean).all()), "the mean is not finite"
    assert bool((torch.isfinite(found.variance) & (found.variance >= 0)).all()), "not a variance"
    if found.covariance is not None:
        assert torch.equal(found.covariance, found.covariance.mT), "not symmetric to the bit"


FUNCTIONS = (nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU, nn.Softplus, nn.ReLU6, nn.Sigmoid, nn.ELU, nn.LeakyReLU)


def picture_network(rng: np.random.Generator, dtype: torch.dtype) -> tuple[nn.Module, tuple[int, ...]]:
    """A convolution, perhaps a normalisation, a pool, a softmax, two nonlinear layers; and the shape of its inputs."""

    def perhaps(share: float, layer: Callable[[], nn.Module]) -> list[nn.Module]:
        return [layer()] if rng.random() < share else []

    def function() -> nn.Module:
        return FUNCTIONS[0 if rng.random() < 0.4 else int(rng.integers(len(FUNCTIONS)))]()

    channels, side, maps, width = (int(rng.integers(*ends)) for ends in ((1, 3), (4, 7), (1, 4), (2, 7)))
    layers = [nn.Conv2d(channels, maps, 3, padding=1), *perhaps(0.3, lambda: nn.BatchNorm2d(maps)), function()]
    layers += [[nn.MaxPool2d(2)], [nn.AvgPool2d(2)], [nn.AdaptiveAvgPool2d(2)], []][int(rng.integers(4))]
    layers += [nn.Flatten()]
    features = nn.Sequential(*layers).eval()(torch.zeros(1, channels, side, side)).shape[1]
    layers += [*perhaps(0.3, lambda: nn.LayerNorm(features)), nn.Linear(features, width), function()]
    layers += [*perhaps(0.3, lambda: nn.LayerNorm(width)), nn.Linear(width, 3), *perhaps(0.2, lambda: nn.Softmax(-1))]
    network = nn.Sequential(*layers).to(dtype).eval()
    for tensor in network.parameters():
        tensor.data = torch.tensor(rng.normal(size=tuple(tensor.shape)) * 10.0 ** rng.uniform(-1.5, 0.7)).to(dtype)
    return network, (channels, side, side)


def check_kinds(rng: np.random.Generator) -> None:
    """By every method, with the errors that are stated."""
    dtype, method = dtype_of(rng), ("linear", "layerwise", "sketch", "sampling", "auto")[int(rng.integers(5))]
    network, shape = picture_network(rng, dtype)
    given = nm.Gaussian(torch.tensor(rng.normal(size=shape)).to(dtype), std=float(10.0 ** rng.uniform(-3, 0.7)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "linear" warns of smooth functions
        found = nm.output_moments(network, given, method, samples=300 if method == "auto" else None)
    assert bool(torch.isfinite(found.mean).all()), "the mean is not finite"
    assert bool((torch.isfinite(found.variance) & (found.variance >= 0)).all()), "not a variance"
    assert found.covariance is not None
    assert torch.equal(found.covariance, found.covariance.mT), "not symmetric to the bit"
    values = torch.linalg.eigvalsh(found.covariance.double())
    largest = float(values[-1].clamp(min=0).sqrt())
    allowed = 100 * EPS[dtype] * largest * (largest + float(found.mean.double().norm()))  # scores are rounded, too
    if method in ("layerwise", "auto"):  # corrections of first order, and control variates, keep no sign
        assert found.error is not None
        assert found.error.covariance is not None
        allowed += 5 * float(found.error.covariance.double().norm())
    assert float(values[0]) >= -allowed, f"smallest eigenvalue {float(values[0]):.2g}, allowed {-allowed:.2g}"


def check_digits(rng: np.random.Generator) -> None:
    """The covariance and orthant probability of a pair beside 40 digits, at the numbers that float64 has."""
    h = float(heights(rng, 1)[0]) if rng.random() < 0.5 else -float(rng.uniform(3, 37))
    near = float(rng.choice([-1, 1])) * h + float(rng.choice([0.0, 1.0])) * 10.0 ** float(rng.uniform(-12, 1))
    k = near if rng.random() < 0.5 else float(rng.uniform(-8, 8))
    h, k = max(-37.0, min(37.0, h)), max(-37.0, min(37.0, k))
    rho = float(rng.choice([-1, 1])) * (1 - 10.0 ** rng.uniform(-9, -1))
    rho = float(rng.uniform(-1, 1)) if rng.random() < 0.6 else rho
    exact = pair(h, k, rho)
    mean = torch.tensor([h, k], dtype=torch.float64)
    matrix = torch.tensor([[1.0, rho], [rho, 1.0]], dtype=torch.float64)
    dead = min(h, k) < -3
    for name, found, parts, strong in (
        ("covariance", nm.relu_covariance(mean, matrix)[0, 1], (exact.separable, exact.nonlinear), 1e-12),
        ("orthant probability", nm.orthant_probability(mean, matrix)[0, 1], (exact.gates, exact.excess), 1e-8),
    ):
        error = abs(mpmath.mpf(float(found)) - sum(parts))
        relative = strong if abs(rho) > 0.99 else 1e-12
        allowed = relative * sum(map(abs, parts)) + mpmath.mpf(10) ** -300 if dead else mpmath.mpf(10) ** -14
        assert error <= allowed, f"{name}: off by {float(error):.2g}, allowed {float(allowed):.2g}"


CAMPAIGNS = {
    "layers": Campaign(
        check_layer,
        34_000,
        "ReLU layers of 1 to 24 units: any rank, duplicates, certain, dead and linear units, deviations 1e-10 to 1e10",
        "finite, symmetric to the bit, positive semidefinite to rounding, the diagonal is `relu_variance`, "
        "P(both open) ≤ P(one open), any order of units",
    ),
    "forms": Campaign(
        check_form,
        20_000,
        "`AffineReluAffine` under every structure of noise, outputs of dead units only among them",
        "finite, symmetric to the bit, variance ≥ 0 and that of B K Bᵀ in float64",
    ),
    "one unit": Campaign(
        check_marginal,
        15_000,
        "`relu_mean` and `relu_variance` of up to 50 units, deviations from 1e-100 to 1e100 and 0",
        "finite, mean ≥ relu(mean), 0 ≤ variance ≤ std², float32 is float64 to 1e-5",
    ),
    "Gaussians": Campaign(
        check_gaussian,
        20_000,
        "`Gaussian` of any arguments: numbers, tensors of any kind and shape, structures, NaN, 10⁴⁰⁰",
        "a covariance and finite samples, or an error that begins with `Gaussian:`",
    ),
    "any arguments": Campaign(
        check_any_call,
        10_000,
        "functions of the engine with any two arguments",
        "a result, or an error that says whose argument is wrong",
    ),
    "networks": Campaign(
        check_network,
        1_000,
        "`output_moments` of small networks by every method, both dtypes, every structure of noise",
        "finite mean, variance ≥ 0, covariance symmetric to the bit",
    ),
    "kinds of layers": Campaign(
        check_kinds,
        600,
        "`output_moments` of small networks for images: convolutions, pools, normalisations, smooth functions, softmax",
        'the same; covariance positive semidefinite to rounding, by "layerwise" and "auto" to five stated errors',
    ),
    "40 digits": Campaign(
        check_digits,
        500,
        "pairs of units beside mpmath at 40 digits, h down to −37 and |ρ| up to 1 − 10⁻⁹",
        "1e-14 absolutely; where a unit is dead 1e-12 of the two parts (orthant probabilities beyond |ρ| = 0.99: 1e-8)",
    ),
}


class Failure(NamedTuple):
    number: int
    error: str


class Piece(NamedTuple):
    failures: list[Failure]
    seconds: float
    """Of a processor."""


def run_piece(name: str, first: int, count: int) -> Piece:
    """Cases `first`, `first` + 1, … of a campaign."""
    torch.set_num_threads(1)
    start, found = time.process_time(), []
    for number in range(first, first + count):
        try:
            CAMPAIGNS[name].check(generator_of(name, number))
        except Exception as error:
            found.append(Failure(number, f"{type(error).__name__}: {error}".splitlines()[0][:200]))
    return Piece(found, time.process_time() - start)
