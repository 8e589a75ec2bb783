"""One call for any network, noise and method.

First the methods: their options, what "auto" chooses and why, what each is, controls of sampling. Then what holds for
all of them: shapes, choices of scores, batches, structures of covariance, gradients, bad input.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import jacrev

import netmoments as nm
from netmoments.linearize.two_stage import linearized_at
from tests.closeness import assert_close
from tests.moments.problems import PROPAGATED, assert_same, deep, means, noise, perceptron
from tests.networks import FACTORIES, inputs, network, random_network, seeded

# methods as values


def test_a_short_name_is_the_method_with_its_default_options():
    values = {
        "auto": nm.Auto(), "layerwise": nm.Layerwise(), "sketch": nm.Sketch(probes=64, seed=0),
        "two-stage": nm.TwoStage(layer=-1, bank=None), "linear": nm.Linear(),
        "sampling": nm.Sampling(samples=10_000, control=None, seed=0),
    }  # fmt: skip
    for name, value in values.items():
        assert value.name == name
        assert_same(*(nm.output_moments(deep(), noise(2), method) for method in (name, value)), atol=0)
        assert type(value)() == value
    assert nm.Sketch(probes=64) != nm.Sketch(probes=32)
    assert nm.Sampling(control="sketch") == nm.Sampling(control=nm.Sketch())
    with pytest.raises(AttributeError):
        values["sketch"].probes = 3


def test_options_of_a_method_are_used():
    few, other_seed, default = (
        nm.output_moments(deep(), noise(), method) for method in (nm.Sketch(probes=8), nm.Sketch(seed=1), "sketch")
    )
    assert not torch.equal(few.covariance, default.covariance)
    assert not torch.equal(other_seed.covariance, default.covariance)
    errors = [nm.output_moments(deep(), noise(), nm.Sampling(count)).mean_standard_error for count in (100, 10_000)]
    assert bool((errors[0] > 5 * errors[1]).all())


BAD_OPTIONS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "one probe": (lambda: nm.Sketch(probes=1), ValueError, r"probes must be an integer of at least 2.*, got 1"),
    "no probe": (lambda: nm.Sketch(probes=0), ValueError, r"probes must be an integer of at least 2.*, got 0"),
    "a true probe": (lambda: nm.Sketch(probes=True), ValueError, r"probes must be .* at least 2.*, got True"),
    "half a probe": (lambda: nm.Sketch(probes=2.5), ValueError, r"probes must be .* at least 2.*, got 2.5"),
    "a sketch's seed": (lambda: nm.Sketch(seed=-1), ValueError, r"seed must be an integer of at least 0"),
    "one probe for control": (lambda: nm.Sampling(control=nm.Sketch(1)), ValueError, r"probes must be .*at least 2"),
    "one sample": (lambda: nm.Sampling(1), ValueError, r"samples must be an integer of at least 2"),
    "a seed": (lambda: nm.Sampling(seed=-1), ValueError, r"seed must be an integer of at least 0"),
    "unknown control": (
        lambda: nm.Sampling(control="exact"),
        ValueError,
        r"control must be one of two-stage, linear, sketch, or None, .*got 'exact'",
    ),
    "control by a method without a surrogate": (
        lambda: nm.Sampling(control=nm.Layerwise()),
        ValueError,
        r"control must be one of two-stage, linear, sketch, or None, .*got Layerwise\(\)",
    ),
    "not a bank": (lambda: nm.TwoStage(bank=3), TypeError, r"bank must be a netmoments\.LinearizationBank, got 3"),
    "few samples for a control": (
        lambda: nm.output_moments(deep(), noise(), nm.Sampling(19, control="linear")),
        ValueError,
        r"at least 20 samples are needed, .* got 19",
    ),
    "unknown method": (
        lambda: nm.output_moments(deep(), noise(), "exact"),
        ValueError,
        r"one of auto, layerwise, sketch, two-stage, linear, sampling, or .*netmoments\.Sketch\(.*, got 'exact'",
    ),
    "a class": (
        lambda: nm.output_moments(deep(), noise(), nm.Sketch),
        TypeError,
        r"method must be a value, got the class Sketch; write Sketch\(\)",
    ),
    "no method": (lambda: nm.output_moments(deep(), noise(), None), ValueError, r"method must be one of .*got None"),
    "an option of another method": (lambda: nm.output_moments(deep(), noise(), probes=8), TypeError, "probes"),
}


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_bad_options(case):
    call, error, message = BAD_OPTIONS[case]
    with pytest.raises(error, match=message):
        call()


# what auto takes


class Pooled(nn.Module):
    """One nonlinear layer that is not of one number at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.pool, self.last = nn.Linear(4, 8), nn.MaxPool1d(2), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.pool(self.first(x).unsqueeze(1)).squeeze(1))


CHOSEN: dict[str, tuple[Callable[[], nn.Module], int | None, str, str]] = {
    "affine": (lambda: seeded(lambda: nn.Linear(4, 3)), None, "exact", r"^the network is affine$"),
    "one ReLU": (perceptron, None, "exact", r"^the only nonlinear layer is 1, which is piecewise linear$"),
    "one pool": (
        lambda: seeded(Pooled),
        None,
        "layerwise",
        r"of all layers takes .* \(at pool\) of the .*B",
    ),
    "two ReLUs": (
        deep,
        None,
        "layerwise",
        r"^the joint covariance of all layers takes .*MB \(at \d\) of the .*GB",
    ),
    "two, little memory": (deep, 99, "sketch", r"layers would take .* \(at \d\) of the 9.9e-05 MB"),
    "one, little memory": (perceptron, 99, "sketch", r"would take .* \(at \d\) of the 9.9e-05 MB"),
}


@pytest.mark.parametrize("case", CHOSEN)
def test_auto_says_what_it_takes_and_why(case):
    make, budget, method, reason = CHOSEN[case]
    found = nm.output_moments(make(), noise(), memory_budget=budget)
    assert found.method == method
    assert found.reason is not None
    assert re.search(reason, found.reason), found.reason


def test_two_stages_keep_a_layer_or_take_a_bank():
    net = deep()
    kept = [nm.output_moments(net, noise(2), nm.TwoStage(layer)) for layer in (0, "1", -1, "3")]
    assert [found.cut for found in kept] == ["1", "1", "3", "3"]
    assert_same(kept[0], kept[1], atol=0)
    assert float((kept[0].variance - kept[2].variance).abs().max()) > 1e-4
    found = nm.output_moments(net, noise(2), nm.TwoStage(bank=nm.LinearizationBank.at(net, means(3))))
    assert (found.method, found.cut, found.reason) == ("two-stage", "3", None)
    assert found.distance.shape == (2,)


def test_a_method_that_was_asked_for_has_no_reason():
    for method in ("layerwise", "sketch", "two-stage", "linear", "sampling"):
        found = nm.output_moments(deep(), noise(), method)
        assert (found.method, found.reason) == (method, None)


def test_what_auto_takes_is_what_the_method_gives():
    assert_same(nm.output_moments(deep(), noise(2)), nm.output_moments(deep(), noise(2), "layerwise"), atol=1e-15)
    little = nm.output_moments(deep(), noise(2), memory_budget=99)
    assert_same(little, nm.output_moments(deep(), noise(2), "sketch", memory_budget=99), atol=0)


# what each is


def test_exact_is_exact():
    """One ReLU, large noise, against the formulas for it; an affine network against A Σ Aᵀ."""
    net = perceptron()
    gates = nm.AffineReluAffine(net[0].weight, net[0].bias, net[2].weight, net[2].bias)
    found, expected = (nm.output_moments(which, noise(2, std=3.0)) for which in (net, gates))
    assert (found.method, expected.method) == ("exact", "exact")
    assert_same(found, expected)
    affine = seeded(lambda: nn.Linear(4, 3))
    found = nm.output_moments(affine, noise(2))
    assert_close(found.mean, affine(means(2)), atol=1e-14)
    assert_close(found.covariance, 0.09 * (affine.weight @ affine.weight.mT).expand(2, 3, 3), atol=1e-14)


def test_linear_is_the_delta_method():
    net, x = network("lenet"), inputs("lenet", 3)
    factor = 0.1 * torch.randn(3, 64, 70, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    covariance = factor @ factor.mT
    found = nm.output_moments(net, nm.Gaussian(x, nm.Dense(covariance)), "linear")
    assert_close(found.mean, net(x), atol=1e-14)
    for i in range(3):
        J = jacrev(lambda v: net(v.reshape(1, 1, 8, 8))[0])(x[i].flatten())
        assert_close(found.covariance[i], J @ covariance[i] @ J.mT, atol=1e-14)


def test_sampling_is_monte_carlo():
    net, noise = perceptron(5), nm.Gaussian(means(3), std=0.3)
    found = nm.output_moments(net, noise, nm.Sampling(300, seed=7))
    sampled = nm.monte_carlo(net, noise, 300, seed=7)
    for name in ("mean", "variance", "covariance"):
        assert_close(getattr(found, name), getattr(sampled, name), atol=0)
        error = f"{name}_standard_error"
        assert_close(getattr(found, error), getattr(sampled, error), atol=0)


def test_exact_for_one_hidden_layer():
    """A perceptron is its own two-stage linearization: large noise, within five standard errors of samples."""
    net, noise = perceptron(5), nm.Gaussian(means(2), std=3.0)
    exact = nm.output_moments(net, noise, "two-stage")
    report = exact.compare(nm.output_moments(net, noise, nm.Sampling(100_000, seed=3)))
    for part in (report.mean, report.variance, report.covariance):
        assert float(part.abs().max()) < 5
    by_hand = nm.AffineReluAffine(net[0].weight, net[0].bias, net[2].weight, net[2].bias)
    same = nm.output_moments(by_hand, noise)
    assert (same.method, same.cut) == ("exact", None)
    assert_close(exact.mean, same.mean, atol=1e-13)
    assert_close(exact.covariance, same.covariance, atol=1e-13)
    wrong = nm.output_moments(net, noise, "linear").compare(nm.monte_carlo(net, noise, 100_000, seed=3))
    assert float(wrong.mean.abs().max()) > 50


def test_choices_of_an_affine_relu_affine():
    g, noise = random_network(6, 20, 5, seed=3), nm.Gaussian(torch.ones(2, 6, dtype=torch.float64), std=0.4)
    everything = nm.output_moments(g, noise)
    some = nm.output_moments(g, noise, outputs=[4, 1])
    assert_close(some.mean, everything.mean[:, [4, 1]], atol=1e-15)
    assert_close(some.covariance, everything.covariance[:, [4, 1]][:, :, [4, 1]], atol=1e-15)
    largest = nm.output_moments(g, noise, outputs=2)
    assert torch.equal(largest.outputs, g(noise.mean).topk(2, -1).indices)
    assert_close(largest.variance, everything.variance.gather(1, largest.outputs), atol=1e-15)


def test_an_affine_relu_affine_is_exact_or_sampled_as_asked(generator):
    g = nm.AffineReluAffine(*(torch.randn(s, generator=generator) for s in ((6, 4), (6,), (5, 6), (5,))))
    noise = nm.Gaussian(torch.randn(3, 4, generator=generator), std=0.3)
    for outputs in (None, [4, 0], 2):
        exact = nm.output_moments(g, noise, outputs=outputs)
        sampled = nm.output_moments(g, noise, nm.Sampling(20_000), outputs)
        assert (exact.method, sampled.method) == ("exact", "sampling")
        assert float(exact.compare(sampled).mean.abs().max()) < 5
        assert float(exact.compare(sampled).covariance.abs().max()) < 5
    with pytest.raises(ValueError, match='exact with method="auto" or "two-stage"'):
        nm.output_moments(g, noise, "linear")


def test_the_paper_s_two_stage_is_near_the_truth_for_a_trained_network():
    """Sampled moments of the shipped digits network at little noise: 5 % of the spread."""
    net = nm.zoo.pretrained("digits")
    x = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    noise = nm.Gaussian(x, std=0.01)
    found, sampled = nm.output_moments(net, noise, "two-stage"), nm.monte_carlo(net, noise, 4000)
    floor = 5 * math.sqrt(2 / 4000)
    assert float(nm.relative_difference(found.variance, sampled.variance).mean()) < 0.05 + floor


@pytest.fixture
def linearizations(monkeypatch) -> list[int]:
    """How many points are linearized at a time."""
    counted = []

    def counting(model, points, *others):
        counted.append(len(points))
        return linearized_at(model, points, *others)

    monkeypatch.setattr(sys.modules[nm.TwoStage.__module__], "linearized_at", counting)
    return counted


def test_noise_levels_of_one_mean_share_a_linearization(linearizations):
    net, x = network("residual"), inputs("residual", 3)
    levels = torch.tensor([0.01, 0.1, 0.5, 1.0], dtype=torch.float64)
    noise = nm.Gaussian(x[0].expand(4, 2, 6, 6), nm.Isotropic(levels**2, 72))
    found = nm.output_moments(net, noise, nm.TwoStage(0))
    assert linearizations == [1]
    grid = nm.Gaussian(x.expand(4, 3, 2, 6, 6), nm.Isotropic((levels**2)[:, None].expand(4, 3), 72), event_ndim=3)
    all_found = nm.output_moments(net, grid, nm.TwoStage(0), 2)
    assert linearizations == [1, 3]
    for i, level in enumerate(levels.tolist()):
        alone = nm.output_moments(net, nm.Gaussian(x, std=level), nm.TwoStage(0))
        assert_close(found.covariance[i], alone.covariance[0], rtol=1e-9, atol=1e-14)
        best = all_found.outputs[i]
        assert_close(all_found.mean[i], alone.mean.gather(1, best), atol=1e-12)
        assert_close(all_found.variance[i], alone.variance.gather(1, best), rtol=1e-9)


def test_what_shares_a_mean_but_not_the_scores_is_linearized_apart(linearizations):
    net, x = perceptron(5), means()
    noise = nm.Gaussian(x.expand(3, 4), std=0.3)
    found = nm.output_moments(net, noise, "two-stage", [[0, 1], [4, 2], [0, 1]])
    assert linearizations == [2]
    everything = nm.output_moments(net, nm.Gaussian(x, std=0.3), "two-stage")
    for i, rows in enumerate([[0, 1], [4, 2], [0, 1]]):
        assert_close(found.mean[i], everything.mean[rows], atol=1e-15)
        assert_close(found.covariance[i], everything.covariance[rows][:, rows], atol=1e-15)


@pytest.mark.parametrize("method", [nm.TwoStage(1), nm.Linear()])
def test_the_memory_budget_changes_nothing(method, linearizations):
    net, noise = network("lenet"), nm.Gaussian(inputs("lenet", 7), std=0.1)
    expected = nm.output_moments(net, noise, method)
    found = nm.output_moments(net, noise, method, memory_budget=40_000)
    if method == nm.TwoStage(1):
        assert linearizations == [7, 2, 2, 2, 1]
    assert_close(found.mean, expected.mean, atol=1e-13)
    assert_close(found.covariance, expected.covariance, atol=1e-14)


@pytest.mark.parametrize("method", ["layerwise", "linear", nm.Sampling(control="linear")])
def test_an_affine_relu_affine_is_not_propagated(method):
    gates = nm.AffineReluAffine(torch.ones(4, 4), torch.zeros(4), torch.ones(2, 4), torch.zeros(2))
    with pytest.raises(ValueError, match=r'an AffineReluAffine is exact with method="auto" or "two-stage"'):
        nm.output_moments(gates, nm.Gaussian(torch.zeros(4), std=0.1), method)


# control variates


def test_controls_are_unbiased_and_sharper():
    """Within 5 standard errors, both estimates' together, of many plain samples; each smaller than without."""
    net = network("shared")
    given = nm.Gaussian(inputs("shared", 2), std=0.1)
    truth = nm.output_moments(net, given, nm.Sampling(200_000, seed=9))
    plain = nm.output_moments(net, given, nm.Sampling(2000, seed=1))
    for control in ("linear", "two-stage", "sketch"):
        found = nm.output_moments(net, given, nm.Sampling(2000, control=control, seed=1))
        assert found.method == "sampling"
        for name in ("mean", "variance", "covariance"):
            error, without, of_truth = (getattr(m, f"{name}_standard_error") for m in (found, plain, truth))
            off = (getattr(found, name) - getattr(truth, name)) / (error**2 + of_truth**2).sqrt()
            assert float(off.abs().max()) < 5, (control, name)
            assert float((error / without).max()) < (0.5 if name == "mean" else 0.8), (control, name)
    again = nm.output_moments(net, given, nm.Sampling(2000, control=nm.Sketch(), seed=1))
    assert_same(again, found, atol=0)


def test_controls_take_chosen_scores_and_layers():
    net, given = deep(scores=5), noise(2, 3)
    for control in ("linear", "two-stage", "sketch"):
        everything = nm.output_moments(net, given, nm.Sampling(200, control=control))
        some = nm.output_moments(net, given, nm.Sampling(200, control=control), [3, 0])
        assert_close(some.mean, everything.mean[..., [3, 0]], atol=0.05)
        assert torch.equal(some.outputs, torch.tensor([3, 0]).expand(2, 3, 2))
    first, last = (nm.output_moments(net, given, nm.Sampling(200, control=nm.TwoStage(layer))) for layer in (0, -1))
    assert float((first.mean - last.mean).abs().max()) > 0
    alike = nm.output_moments(net, given, nm.Sampling(200, control=nm.TwoStage("3")))
    assert_same(alike, last, atol=0)


# shapes and batches


METHODS = ("two-stage", "linear", "sampling")


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("method", METHODS)
def test_shapes_and_facts(method, batch):
    noise = nm.Gaussian(means(*batch), std=0.3, event_ndim=1)
    found = nm.output_moments(perceptron(5), noise, method)
    assert found.method == method
    assert found.cut == ("1" if method == "two-stage" else None)
    assert found.outputs is None
    assert found.mean.shape == found.variance.shape == (*batch, 5)
    assert found.covariance.shape == (*batch, 5, 5)
    assert_close(found.covariance.diagonal(dim1=-2, dim2=-1), found.variance, atol=0)
    assert_close(found.covariance, found.covariance.mT, atol=1e-17)
    assert (found.mean_standard_error is None) == (method != "sampling")
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
    """The sketch of entry i has the seed of the whole, plus i."""
    net, x = network(name), inputs(name, 4)
    size = x[0].numel()
    variance = 0.1 * torch.rand(2, 2, size, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    given = nm.Gaussian(x.reshape(2, 2, *x.shape[1:]), nm.Diagonal(variance), event_ndim=x.dim() - 1)
    together = nm.output_moments(net, given, nm.Sketch(seed=5) if method == "sketch" else method)
    assert together.mean.shape == (2, 2, 3)
    for i in range(4):
        alone = nm.Gaussian(x[i], nm.Diagonal(variance.reshape(4, size)[i]))
        found = nm.output_moments(net, alone, nm.Sketch(seed=5 + i) if method == "sketch" else method)
        assert_close(together.mean[i // 2, i % 2], found.mean, atol=1e-13)
        assert_close(together.covariance[i // 2, i % 2], found.covariance, atol=1e-13)


TRACEABLE = [name for name in FACTORIES if name != "only backward"]


@pytest.mark.parametrize("name", TRACEABLE)
def test_every_network_of_the_collection_against_samples(name):
    """Little noise: variances are within 2 % and 4 standard errors of 20 000 samples; a sketch has its own error."""
    net, samples = network(name), 20_000
    given = nm.Gaussian(inputs(name, 1)[0], std=0.05)
    sampled = nm.output_moments(net, given, nm.Sampling(samples, seed=1))
    for method, allowed in (("auto", 0.02), ("sketch", 0.02 + 4 * math.sqrt(2 / 64) * 0.12)):
        found = nm.output_moments(net, given, method)
        off = nm.relative_difference(found.variance, sampled.variance)
        assert float(off.max()) < allowed + 4 * math.sqrt(2 / samples), method
        assert float(((found.mean - sampled.mean) / sampled.variance.sqrt()).abs().max()) < allowed + 4 / samples**0.5


# which scores


def test_a_sketch_of_many_scores_is_of_the_five_largest():
    net, given = deep(scores=120), noise(2, 3)
    best = net(given.mean).topk(5, -1).indices
    for options in ({"method": "sketch"}, {"memory_budget": 99}):
        found = nm.output_moments(net, given, **options)
        assert found.method == "sketch"
        assert torch.equal(found.outputs, best)
        assert found.covariance.shape == (2, 3, 5, 5)
    every = nm.output_moments(net, given, "sketch", list(range(120)))
    assert every.mean.shape == (2, 3, 120)
    assert_close(found.variance, every.variance.gather(-1, best), atol=1e-12)
    assert nm.output_moments(deep(scores=100), noise(), "sketch").outputs is None
    assert nm.output_moments(net, given, "layerwise").mean.shape == (2, 3, 120)


@pytest.mark.parametrize("method", ["auto", *PROPAGATED, "two-stage", "linear", nm.Sampling(200)])
def test_chosen_scores_are_selected_from_all(method):
    net, given = deep(scores=5), noise(2, 3)
    everything = nm.output_moments(net, given, method)
    assert everything.outputs is None
    each = torch.tensor([[0, 3], [1, 2], [4, 0], [2, 2], [3, 1], [0, 4]])
    choices = {
        "a list": ([3, 0], torch.tensor([3, 0]).expand(2, 3, 2)),
        "the largest": (2, net(given.mean).topk(2, -1).indices),
        "each": (each, each.reshape(2, 3, 2)),
        "from the end": ([-1, 0], torch.tensor([4, 0]).expand(2, 3, 2)),
    }
    for name, (outputs, rows) in choices.items():
        found = nm.output_moments(net, given, method, outputs)
        assert torch.equal(found.outputs, rows), name
        assert_close(found.mean, everything.mean.gather(-1, rows), atol=1e-14, what=name)
        square = everything.covariance.gather(-2, rows.unsqueeze(-1).expand(2, 3, 2, 5))
        square = square.gather(-1, rows.unsqueeze(-2).expand(2, 3, 2, 2))
        assert_close(found.covariance, square, atol=1e-13, what=name)


# batches, covariances, dtypes


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
    found = nm.output_moments(deep(), given)
    assert found.method == "layerwise"
    assert_same(found, nm.output_moments(deep(), dense), atol=1e-8 if "singular" in kind else 1e-12)
    exact = nm.output_moments(perceptron(), given)
    assert exact.method == "exact"
    assert_same(exact, nm.output_moments(perceptron(), given, "two-stage"))
    probes = 1024
    sketch = nm.output_moments(perceptron(), given, nm.Sketch(probes))
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


# gradients, modes, side effects


@pytest.mark.parametrize("name", ["shared", "concatenation", "changes the output"])
def test_gradients_in_the_noise_and_the_weights(name, monkeypatch):
    """Central differences with a step of 1e-6: truncation is 1e-12 of third derivatives, rounding 1e-10.

    All pairs of directions are followed: derivatives take the directions of a choice of them as fixed.
    """
    monkeypatch.setattr("netmoments.propagate.factors.PAIRED", 128)
    net, x = network(name), inputs(name, 1)
    generator = torch.Generator().manual_seed(1)
    weight = next(net.parameters())
    given = [x, torch.full((1, x[0].numel()), 0.04, dtype=torch.float64), weight.detach().clone()]
    steps = [torch.rand(part.shape, dtype=torch.float64, generator=generator) for part in given]
    mix = torch.rand(3, 3, dtype=torch.float64, generator=generator)

    def of(mean: Tensor, variance: Tensor, method: str) -> Tensor:
        moments = nm.output_moments(net, nm.Gaussian(mean, nm.Diagonal(variance)), method)
        return (moments.mean @ mix[0]).sum() + (0 if method == "sketch" else (moments.covariance * mix).sum())

    for method in ("auto", "sketch"):
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
    assert bool((nm.output_moments(network, noise, nm.Sampling(100)).variance > 0).all())


def test_a_network_made_in_inference_mode_is_refused_in_words():
    with torch.inference_mode():
        net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)).eval()
    with pytest.raises(ValueError, match=r"made under torch\.inference_mode"):
        nm.output_moments(net, nm.Gaussian(torch.zeros(4), std=0.1))
    assert nm.output_moments(net, nm.Gaussian(torch.zeros(4), std=0.1), nm.Sampling(100)).mean.shape == (2,)


# bad input


NET = perceptron(5).float()
NOISE = nm.Gaussian(torch.zeros(4), std=0.1)
BATCH = nm.Gaussian(torch.zeros(3, 4), std=0.1)
GATES = nm.AffineReluAffine(torch.ones(4, 4), torch.zeros(4), torch.ones(2, 4), torch.zeros(2))


def moments(method: object = "two-stage", *args, noise: nm.Gaussian = NOISE, **kwargs) -> nm.OutputMoments:
    return nm.output_moments(NET, noise, method, *args, **kwargs)


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
    "little memory": (
        lambda: nm.output_moments(deep(), noise(), "layerwise", memory_budget=99),
        ValueError,
        r'"layerwise" needs 0\.\d+ MB for the covariances at \d, but 9.9e-05 MB is the limit; raise memory_budget=, or '
        r'use method="sketch" \(any size\) or "sampling"',
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


def test_a_layer_too_wide_for_exact_pairs_is_not_called_exact():
    torch.manual_seed(0)
    noise = nm.Gaussian(torch.linspace(-1, 1, 3), std=0.5)
    for width, method in ((2048, "exact"), (2049, "layerwise")):
        network = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 2)).eval()
        assert nm.output_moments(network, noise).method == method


def test_a_method_of_ones_own_can_be_a_control():
    class Own(nm.Linear):
        name = "own"

    assert nm.Sampling(100, control=Own()).control.name == "own"
    with pytest.raises(ValueError, match="control must be one of"):
        nm.Sampling(100, control=nm.Layerwise())
