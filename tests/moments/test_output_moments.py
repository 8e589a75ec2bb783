"""One call for any network, noise and method: what holds for all of them.

Shapes, batches, structures of covariance, dtypes, errors, gradients, side effects, bad input.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import netmoments as nm
from tests.closeness import assert_close
from tests.moments.problems import PROPAGATED, assert_same, deep, means, noise, perceptron
from tests.networks import FACTORIES, inputs, network, seeded

# shapes and batches


METHODS = ("two-stage", "linear", "sampling", nm.Auto(0.1))


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("method", METHODS)
def test_shapes_and_facts(method, batch):
    noise = nm.Gaussian(means(*batch), std=0.3, event_ndim=1)
    found = nm.output_moments(deep(5), noise, method)
    assert found.method == ("sampling" if isinstance(method, nm.Auto) else method)
    assert found.cut == ("3" if method == "two-stage" else None)
    assert found.outputs is None
    assert found.mean.shape == found.variance.shape == (*batch, 5)
    assert found.covariance.shape == (*batch, 5, 5)
    assert_close(found.covariance.diagonal(dim1=-2, dim2=-1), found.variance, atol=0)
    assert_close(found.covariance, found.covariance.mT, atol=1e-17)
    assert found.error.mean.shape == found.error.variance.shape == (*batch, 5)
    assert found.error.covariance.shape == (*batch, 5, 5)
    assert found.batch_shape == batch
    assert found.seconds > 0
    assert bool((found.error.covariance > 0).all())
    assert found.class_probabilities().shape == (*batch, 5)
    assert found.flip_probability(2).shape == batch


@pytest.mark.parametrize("method", [nm.TwoStage(1), nm.Linear()])
@pytest.mark.parametrize("kind", ["number", "an image", "diagonal", "dense", "low rank"])
def test_a_batch_is_a_loop(method, kind):
    generator = torch.Generator().manual_seed(5)
    x, net = inputs("residual", 6).reshape(2, 3, 2, 6, 6), network("residual")
    factor = 0.1 * torch.randn(2, 3, 72, 2, dtype=torch.float64, generator=generator)
    spread = {
        "number": nm.Isotropic(torch.tensor(0.04, dtype=torch.float64), 72),
        "an image": nm.Isotropic(torch.rand(2, 3, dtype=torch.float64, generator=generator), 72),
        "diagonal": nm.Diagonal(torch.rand(2, 3, 72, dtype=torch.float64, generator=generator)),
        "dense": nm.Dense(factor @ factor.mT),
        "low rank": nm.LowRank(factor, torch.rand(72, dtype=torch.float64, generator=generator)),
    }[kind]
    noise = nm.Gaussian(x, spread, event_ndim=3)
    together = nm.output_moments(net, noise, method)
    flat = noise.flattened()
    for i in range(6):
        alone = nm.output_moments(net, flat.entries(slice(i, i + 1)), method)
        assert_close(together.mean[i // 3, i % 3], alone.mean[0], atol=1e-12)
        assert_close(together.covariance[i // 3, i % 3], alone.covariance[0], atol=1e-12)


@pytest.mark.parametrize("method", PROPAGATED)
@pytest.mark.parametrize("name", ["residual", "mutating"])
def test_a_batch_is_a_loop_of_what_is_propagated(method, name):
    """The probes of a sketch depend on the place: each entry is the last of a batch of those up to it."""
    net, x = network(name), inputs(name, 4)
    size = x[0].numel()
    variance = 0.1 * torch.rand(2, 2, size, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    given = nm.Gaussian(x.reshape(2, 2, *x.shape[1:]), nm.Diagonal(variance), event_ndim=x.dim() - 1)
    together = nm.output_moments(net, given, method)
    assert together.mean.shape == (2, 2, 3)
    for i in range(4):
        first = slice(0 if method == "sketch" else i, i + 1)
        upto = nm.Gaussian(x[first], nm.Diagonal(variance.reshape(4, size)[first]))
        found = nm.output_moments(net, upto, method)
        assert_close(together.mean[i // 2, i % 2], found.mean[-1], atol=1e-13)
        assert_close(together.covariance[i // 2, i % 2], found.covariance[-1], atol=1e-13)


TRACEABLE = [name for name in FACTORIES if name != "only backward"]


@pytest.mark.parametrize("name", TRACEABLE)
def test_every_network_of_the_collection_against_samples(name):
    """Little noise: variances are within 2 % and 4 standard errors of 20 000 samples; a sketch has its own error.

    And samples until a tolerance is met within 5 standard errors of both.
    """
    net, samples = network(name), 20_000
    given = nm.Gaussian(inputs(name, 1)[0], std=0.05)
    sampled = nm.output_moments(net, given, nm.Sampling(samples, seed=1))
    for method, allowed in (("layerwise", 0.02), ("sketch", 0.02 + 4 * math.sqrt(2 / 64) * 0.12)):
        found = nm.output_moments(net, given, method, check=0)
        off = nm.relative_difference(found.variance, sampled.variance)
        assert float(off.max()) < allowed + 4 * math.sqrt(2 / samples), method
        assert float(((found.mean - sampled.mean) / sampled.variance.sqrt()).abs().max()) < allowed + 4 / samples**0.5
    found = nm.output_moments(net, given, tolerance=0.02)
    for part in ("mean", "variance", "covariance"):
        off = getattr(found, part) - getattr(sampled, part)
        error = (getattr(found.error, part) ** 2 + getattr(sampled.error, part) ** 2).sqrt()
        assert float((off / error).abs().max()) < 5, part


# covariances and dtypes


def structures(batch: tuple[int, ...]) -> dict[str, object]:
    generator = torch.Generator().manual_seed(5)
    factor = 0.3 * torch.randn(*batch, 4, 2, dtype=torch.float64, generator=generator)
    variance = torch.rand(*batch, 4, dtype=torch.float64, generator=generator)
    return {
        "number": nm.Isotropic(torch.tensor(0.04, dtype=torch.float64), 4),
        "an image": nm.Isotropic(variance[..., 0], 4),
        "diagonal": nm.Diagonal(variance),
        "dense": nm.Dense(factor @ factor.mT + torch.diag_embed(variance)),
        "dense, singular": nm.Dense(factor @ factor.mT),
        "low rank": nm.LowRank(factor),
        "low rank and diagonal": nm.LowRank(factor, variance),
        "nothing": nm.Isotropic(torch.tensor(0.0, dtype=torch.float64), 4),
    }


@pytest.mark.parametrize("kind", structures((2,)))
def test_every_structure_of_covariance(kind):
    """Layer by layer the same as the dense matrix, exact for one ReLU; a sketch as near as its probes are many."""
    covariance = structures((2,))[kind]
    given = nm.Gaussian(means(2), covariance)
    dense = nm.Gaussian(means(2), nm.Dense(covariance.dense().expand(2, 4, 4)))
    found, expected = (nm.output_moments(deep(), which, "layerwise", check=0) for which in (given, dense))
    assert_same(found, expected, atol=1e-8 if "singular" in kind else 1e-12)
    exact = nm.output_moments(perceptron(), given)
    assert exact.method == "exact"
    assert_same(exact, nm.output_moments(perceptron(), given, "two-stage"))
    probes = 1024
    sketch = nm.output_moments(perceptron(), given, nm.Sketch(probes), check=0)
    scale = exact.variance.sqrt() + 1e-9
    assert_close((sketch.mean - exact.mean) / scale, torch.zeros(2, 3), atol=2 * math.sqrt(2 / probes))
    off = (sketch.covariance - exact.covariance) / (scale.unsqueeze(-1) * scale.unsqueeze(-2))
    assert_close(off, torch.zeros(2, 3, 3), atol=2 * math.sqrt(2 / probes))


@pytest.mark.parametrize("name", ["residual", "shared", "changes the output"])
def test_float32(name):
    """A sum of a few hundred rounded products, and variances that are differences of such."""
    for method in PROPAGATED:
        double, single = (
            nm.output_moments(network(name, dtype), nm.Gaussian(inputs(name, 1).to(dtype), std=0.2), method)
            for dtype in (torch.float64, torch.float32)
        )
        assert single.method == double.method
        assert single.mean.dtype == single.variance.dtype == single.covariance.dtype == torch.float32
        assert double.mean.dtype == torch.float64
        if method != "sketch":  # its draws differ
            assert_close(single.mean, double.mean, atol=1e-5)
            assert_close(single.variance, double.variance, rtol=1e-3)


def test_two_stages_in_float32():
    double = nm.output_moments(perceptron(5), nm.Gaussian(means(3), std=0.3), "two-stage")
    single = nm.output_moments(perceptron(5).float(), nm.Gaussian(means(3).float(), std=0.3), "two-stage")
    assert single.mean.dtype == single.covariance.dtype == torch.float32
    assert_close(single.mean, double.mean, rtol=1e-5, atol=1e-6)
    assert_close(single.variance, double.variance, rtol=1e-5)


def test_what_is_constant_has_no_variance():
    class Constant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ones(len(x), 2, dtype=x.dtype)

    for method in ("auto", *PROPAGATED):
        found = nm.output_moments(Constant().eval(), noise(), method)
        assert_close(found.mean, [1.0, 1.0], atol=0)
        assert_close(found.covariance, torch.zeros(2, 2), atol=0)
        certain = nm.output_moments(deep(), noise(std=0.0), method)
        assert_close(certain.mean, deep()(means()), atol=1e-14)
        assert_close(certain.covariance, torch.zeros(3, 3), atol=1e-20)


# errors


def test_the_error_of_a_formula_is_how_far_it_is_off():
    """Large noise on one ReLU, where the truth is known: a linearization is off by many standard deviations of the
    check's samples, the paper's formula by none; each error is at least that of the samples.
    """
    net, given = perceptron(5), noise(2, std=3.0)
    exact = nm.output_moments(net, given)
    for method in ("linear", "two-stage"):
        found = nm.output_moments(net, given, method)
        for part in ("mean", "variance", "covariance"):
            off = (getattr(found, part) - getattr(exact, part)).abs()
            error = getattr(found.error, part)
            assert bool((off < 5 * error).all()), (method, part)
            if method == "linear" and part == "mean":
                assert bool((error < 2 * off).all())
    spread = exact.variance.sqrt()
    # 128 mirrored pairs: the part of the variance that is even in the noise, at most all of it
    assert bool((found.error.mean < 5 * spread * math.sqrt(1 / 128)).all())


def test_more_runs_say_more_of_the_error_and_none_say_nothing():
    net, given = perceptron(), noise(2, std=1.0)
    few, default, many = (nm.output_moments(net, given, "two-stage", check=count) for count in (64, None, 16384))
    for part in ("mean", "variance", "covariance"):
        assert float(getattr(many.error, part).mean()) < 0.5 * float(getattr(few.error, part).mean())
    assert few.samples < default.samples < many.samples
    assert 256 <= default.samples <= 256 + 16  # and points where it is differentiated
    unchecked = nm.output_moments(net, given, "two-stage", check=0)
    assert unchecked.error is None
    assert unchecked.mean_standard_error is unchecked.variance_standard_error is None
    assert unchecked.covariance_standard_error is None
    assert unchecked.samples == 0
    for found in (few, default, many):
        assert_same(found, unchecked, atol=0)
        assert torch.equal(found.mean_standard_error, found.error.mean)


def test_noise_with_a_gradient_is_checked_when_asked():
    given = nm.Gaussian(means(2).requires_grad_(), std=0.3)
    for method in PROPAGATED:
        assert nm.output_moments(deep(), given, method).error is None
        found = nm.output_moments(deep(), given, method, check=64)
        assert found.mean.requires_grad
        assert not found.error.mean.requires_grad
        assert bool((found.error.variance > 0).all())


def test_checks_take_chosen_outputs():
    """Outputs of scales 1, 10, …, 10⁴, each with an error of its own scale."""
    net, given = deep(5), noise(2)
    with torch.no_grad():
        net[-1].weight *= 10.0 ** torch.arange(5, dtype=torch.float64).unsqueeze(1)
    some = nm.output_moments(net, given, "layerwise", [3, 1])
    assert some.error.covariance.shape == (2, 2, 2)
    share = some.error.mean / some.variance.sqrt()
    assert bool((share > 1e-4).all())
    assert bool((share < 0.2).all())


def test_checks_take_no_covariances_that_are_not_wanted(monkeypatch):
    """Their sums would take some 130 bytes for each of the covariances: 13 GB for 10,000 outputs."""
    module, asked = importlib.import_module("netmoments.moments.output_moments"), []
    sampled = module.mirrored_moments

    def noting(*args, products, **options):
        asked.append(products)
        return sampled(*args, products=products, **options)

    monkeypatch.setattr(module, "mirrored_moments", noting)
    for wanted in (None, True):
        found = nm.output_moments(deep(101), noise(2), "sketch", covariance=wanted)
        assert found.error.variance.shape == (2, 101)
        assert (found.error.covariance is not None) == bool(wanted)
    assert asked == [False, True]


def test_a_tolerance_is_for_auto():
    for option in ({"tolerance": 0.1}, {"samples": 100}, {"seconds": 1.0}):
        (name,) = option
        with pytest.raises(ValueError, match=rf'{name}= is for method="auto", got Layerwise\(\)'):
            nm.output_moments(deep(), noise(), "layerwise", **option)
    options = nm.output_moments(deep(), noise(), tolerance=0.05, samples=500)
    assert_same(options, nm.output_moments(deep(), noise(), nm.Auto(0.05, samples=500)))
    assert_same(options, nm.output_moments(deep(), noise(), nm.Auto(samples=500), tolerance=0.05))
    with pytest.raises(ValueError, match=r"tolerance must be a number above 0, such as .*, got 0"):
        nm.output_moments(deep(), noise(), tolerance=0)
    with pytest.raises(ValueError, match=r"check must be an integer of at least 0.*, got -1"):
        nm.output_moments(deep(), noise(), "layerwise", check=-1)
    for few in (1, 15):
        with pytest.raises(ValueError, match=rf"check must be 0 for none, or at least 16 runs, got {few}"):
            nm.output_moments(deep(), noise(), "layerwise", check=few)
    assert nm.output_moments(deep(), noise(), "layerwise", check=16).samples == 16


# gradients, modes, side effects


@pytest.mark.parametrize("name", ["shared", "concatenation", "changes the output"])
def test_gradients_in_the_noise_and_the_weights(name, monkeypatch):
    """Central differences with a step of 1e-6: truncation is 1e-12 of third derivatives, rounding 1e-10.

    All pairs of directions are followed: derivatives take the directions of a choice of them as fixed.
    """
    monkeypatch.setattr("netmoments.propagate.rows.PAIRED", 128)
    net, x = network(name), inputs(name, 1)
    generator = torch.Generator().manual_seed(1)
    weight = next(net.parameters())
    given = [x, torch.full((1, x[0].numel()), 0.04, dtype=torch.float64), weight.detach().clone()]
    steps = [torch.rand(part.shape, dtype=torch.float64, generator=generator) for part in given]
    mix = torch.rand(3, 3, dtype=torch.float64, generator=generator)

    def of(mean: Tensor, variance: Tensor, method: str) -> Tensor:
        moments = nm.output_moments(net, nm.Gaussian(mean, nm.Diagonal(variance)), method, check=0)
        return (moments.mean @ mix[0]).sum() + (0 if method == "sketch" else (moments.covariance * mix).sum())

    for method in ("layerwise", "sketch"):
        leaves = [part.clone().requires_grad_() for part in given[:2]]
        slopes = torch.autograd.grad(of(*leaves, method), [*leaves, weight])
        for place in range(3):
            ends = []
            for sign in (1, -1):
                moved = [part + sign * 1e-6 * steps[i] * (i == place) for i, part in enumerate(given)]
                with torch.no_grad():
                    weight.copy_(moved[2])
                    ends.append(of(*moved[:2], method))
                    weight.copy_(given[2])
            change = (ends[0] - ends[1]) / 2e-6
            assert_close(change, (slopes[place] * steps[place]).sum(), rtol=1e-5, atol=1e-8, what=f"{method} {place}")


def test_gradients_in_the_noise():
    """The moments carry gradients to the noise's covariance, for those who look for the worst noise."""
    net, x = network("lenet"), inputs("lenet", 2)
    variance = torch.full((2, 64), 0.01, dtype=torch.float64, requires_grad=True)

    def spread(variance: Tensor) -> Tensor:
        return nm.output_moments(net, nm.Gaussian(x, nm.Diagonal(variance)), "two-stage").variance.sum()

    (slope,) = torch.autograd.grad(spread(variance), variance)
    step = 1e-5 * torch.rand(2, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        change = (spread(variance + step) - spread(variance - step)) / 2
    assert_close(change, (slope * step).sum(), rtol=1e-6)


@pytest.mark.parametrize("method", ["auto", *PROPAGATED])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_and_in_inference_mode(method, mode):
    expected = nm.output_moments(network("residual"), nm.Gaussian(inputs("residual", 1), std=0.1), method)
    net = network("residual")
    with mode():
        found = nm.output_moments(net, nm.Gaussian(inputs("residual", 1), std=0.1), method)
    assert_same(found, expected)
    assert not found.mean.requires_grad


@pytest.mark.parametrize("method", ["auto", *PROPAGATED])
def test_the_network_the_input_and_the_random_state_are_untouched(method):
    net, x = network("mutating"), inputs("mutating", 2)
    kept, random = x.clone(), torch.get_rng_state()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    found = nm.output_moments(net, nm.Gaussian(x, std=0.1), method)
    assert not found.mean.requires_grad
    assert torch.equal(x, kept)
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in net.parameters())
    assert not any(m.training or m._forward_hooks or m._forward_pre_hooks for m in net.modules())


class _Changed(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.change = change
        self.rest = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3))

    def forward(self, x):
        return self.rest(self.change(x))


@pytest.mark.parametrize("change", [torch.detach, lambda x: (x * 255).round() / 255], ids=["detached", "rounded"])
def test_a_network_without_a_derivative_is_refused_not_given_zero_variance(change):
    network = _Changed(change).eval()
    noise = nm.Gaussian(torch.rand(5), std=0.1)
    for method in ("two-stage", "linear"):
        with pytest.raises(ValueError, match=r"change with the input but their derivative is zero or missing"):
            nm.output_moments(network, noise, method)
    for method in (nm.Sampling(100), nm.Auto(0.1)):
        assert bool((nm.output_moments(network, noise, method).variance > 0).all())


def test_a_network_made_in_inference_mode_is_sampled_or_refused_in_words():
    torch.manual_seed(0)
    with torch.inference_mode():
        net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    given = nm.Gaussian(torch.zeros(4), std=0.1)
    for method in ("layerwise", "sketch", "two-stage", "linear"):
        with pytest.raises(ValueError, match=r"made under torch\.inference_mode"):
            nm.output_moments(net, given, method)
    for method in (nm.Sampling(100), nm.Auto(0.1)):
        assert nm.output_moments(net, given, method).mean.shape == (2,)
    assert nm.output_moments(net, given, tolerance=0.1).reason == "independent samples"


# bad input


NET = perceptron(5).float()
NOISE = nm.Gaussian(torch.zeros(4), std=0.1)
BATCH = nm.Gaussian(torch.zeros(3, 4), std=0.1)


def test_an_affine_relu_affine_gives_what_is_asked():
    with_all, without = nm.output_moments(GATES, NOISE), nm.output_moments(GATES, NOISE, covariance=False)
    assert with_all.covariance is not None
    assert without.covariance is None
    assert torch.equal(without.variance, with_all.variance)
    assert with_all.seconds > 0


GATES = nm.AffineReluAffine(torch.ones(4, 4), torch.zeros(4), torch.ones(2, 4), torch.zeros(2))


def moments(method: object = "two-stage", *args, noise: nm.Gaussian = NOISE, **kwargs) -> nm.OutputMoments:
    return nm.output_moments(NET, noise, method, *args, **{"check": 0, **kwargs})


BAD: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "noise a tensor": (lambda: nm.output_moments(NET, torch.zeros(4)), TypeError, r"noise must be a netmoments\.Gauss"),
    "not a network": (lambda: nm.output_moments(torch.relu, NOISE), TypeError, r"must be a torch\.nn\.Module"),
    "training mode": (
        lambda: nm.output_moments(nn.Sequential(nn.Linear(4, 2), nn.ReLU()), NOISE, "two-stage"),
        ValueError,
        r"output_moments: the network is in training mode",
    ),
    "no ReLU": (
        lambda: nm.output_moments(nn.Linear(4, 2).eval(), NOISE, "two-stage"),
        ValueError,
        r"no ReLU.*method='linear'",
    ),
    "unknown layer": (
        lambda: moments(nm.TwoStage("relu9")),
        ValueError,
        r"no ReLU is named 'relu9'; the ReLUs are: 0 '1'",
    ),
    "wrong size": (
        lambda: moments(noise=nm.Gaussian(torch.zeros(5), std=0.1)),
        ValueError,
        r"output_moments: the network cannot take an input of shape \(5,\)",
    ),
    "wrong dtype": (
        lambda: moments(noise=nm.Gaussian(torch.zeros(4).double(), std=0.1)),
        TypeError,
        r"network is torch\.float32 .* but the input torch\.float64",
    ),
    "output out of range": (lambda: moments(outputs=[5]), ValueError, r"outputs must be from 0 to 4, got \[5\]"),
    "too many": (lambda: moments(outputs=6), ValueError, r"from 1 to the network's 5 scores, .*got 6"),
    "none": (lambda: moments(outputs=0), ValueError, r"from 1 to the network's 5 scores, .*got 0"),
    "true": (lambda: moments(outputs=True), ValueError, r"from 1 to the network's 5 scores, .*got True"),
    "too many of an AffineReluAffine": (
        lambda: nm.output_moments(GATES, NOISE, outputs=3),
        ValueError,
        r"from 1 to the network's 2 scores",
    ),
    "out of range of an AffineReluAffine": (
        lambda: nm.output_moments(GATES, NOISE, outputs=[2]),
        ValueError,
        r"outputs must be from 0 to 1",
    ),
    "a key of an AffineReluAffine": (
        lambda: nm.output_moments(GATES, NOISE, key="scores"),
        ValueError,
        r"an AffineReluAffine has one output; leave out key, got 'scores'",
    ),
    "no memory for an AffineReluAffine": (
        lambda: nm.output_moments(GATES, NOISE, memory_budget=-5),
        ValueError,
        r"memory_budget must be a positive",
    ),
    "outputs in words": (lambda: moments(outputs="a"), ValueError, r"outputs must be indices of scores, .*got 'a'"),
    "little memory": (
        lambda: nm.output_moments(deep(), noise(), "layerwise", memory_budget=99),
        ValueError,
        r'"layerwise" needs 0\.\d+ MB for the covariances at the scores, but 9.9e-05 MB is the limit; raise '
        r'memory_budget=, or use method="sketch" \(any size\) or "sampling"',
    ),
    "no memory": (lambda: moments("auto", memory_budget=0), ValueError, r"must be a positive number of bytes, got 0"),
    "negative memory": (
        lambda: moments("layerwise", memory_budget=-1),
        ValueError,
        r"memory_budget must be a positive",
    ),
    "score out of range": (lambda: moments("auto", [5]), ValueError, r"outputs must be from 0 to 4, got \[5\]"),
    "too many scores": (lambda: moments("auto", 6), ValueError, r"from 1 to the network's 5 scores, .*got 6"),
    "budget": (lambda: moments(memory_budget=0), ValueError, r"memory_budget must be a positive number of bytes"),
    "budget too small": (
        lambda: moments(memory_budget=100),
        MemoryError,
        r"5 outputs × \(9 units of '1' \+ 4 inputs\) for 1 images take 0\.00026 MB, and 0\.0001 MB may be used",
    ),
    "label not chosen": (
        lambda: moments(outputs=[0, 1]).flip_probability(3),
        ValueError,
        r"class 3 is not among the chosen outputs; add it to outputs=",
    ),
    "label out of range": (lambda: moments().flip_probability(7), ValueError, r"label must be between 0 and 4"),
    "label a fraction": (lambda: moments(outputs=[0]).flip_probability(0.5), TypeError, r"label must be an integer"),
    "label true": (lambda: moments(outputs=[0]).flip_probability(True), TypeError, r"label must be an integer"),
    "labels of another batch": (
        lambda: moments(outputs=[0], noise=BATCH).flip_probability(torch.zeros(2, dtype=torch.int64)),
        ValueError,
        r"label must broadcast to the batch shape \(3,\), got a int64 tensor of shape \(2,\)",
    ),
    "comparison without errors": (lambda: moments().compare(moments()), ValueError, r"other must be sampled"),
    "comparison with a tensor": (lambda: moments().compare(NOISE.mean), TypeError, r"other must be moments, got a"),
    "comparison of other scores": (
        lambda: moments(outputs=[0, 1]).compare(moments(nm.Sampling(5), [1, 0])),
        ValueError,
        r"both must be of the same scores",
    ),
    "comparison of other scores, all of them": (
        lambda: moments().compare(moments(nm.Sampling(5), [4, 3, 2, 1, 0])),
        ValueError,
        r"both must be of the same scores",
    ),
    "comparison of other shapes": (
        lambda: moments().compare(moments(nm.Sampling(5), [0])),
        ValueError,
        r"got shapes \(5,\) and \(1,\); give both the same outputs=",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    call, error, message = BAD[case]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("method", ["auto", nm.Sampling(200), "linear"])
def test_noise_below_the_last_digit_has_an_error_that_says_so(method):
    """Float32 scores of samples do not differ then: their variance of 0 is no better known than their digits."""
    net = seeded(lambda: nn.Sequential(*(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))))
    mean = torch.tensor([0.4, -0.2, 0.9, 1.3])
    for std in (1e-9, 1e-15):
        true = nm.output_moments(net.double(), nm.Gaussian(mean.double(), std=std), "linear", check=0)
        found = nm.output_moments(net.float(), nm.Gaussian(mean, std=std), method)
        assert found.error is not None
        assert bool(((found.variance - true.variance).abs() <= 3 * found.error.variance).all())
        assert bool(((found.mean - true.mean).abs() <= 3 * found.error.mean).all())


@pytest.mark.parametrize("method", ["auto", "layerwise", "sketch", "two-stage", "linear", "sampling"])
def test_moments_beyond_the_range_of_their_dtype_are_refused(method):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    with pytest.raises(ValueError, match=r"too large|float64|infinite"):
        nm.output_moments(network, nm.Gaussian(torch.zeros(3), std=1e25), method)
