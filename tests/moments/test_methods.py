"""Ways to moments as values: their options, what "auto" chooses and why, what each is, controls of sampling."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import jacrev

import netmoments as nm
from netmoments.linearize.two_stage import Linearizer
from netmoments.moments import methods
from tests.closeness import assert_close
from tests.moments.problems import assert_same, deep, means, noise, perceptron
from tests.networks import inputs, network, random_network, seeded

# methods as values


def test_a_short_name_is_the_method_with_its_default_options():
    values = {
        "auto": nm.Auto(tolerance=0.01, samples=None, seconds=None, seed=0), "layerwise": nm.Layerwise(),
        "sketch": nm.Sketch(probes=64, seed=0),
        "two-stage": nm.TwoStage(layer=-1, bank=None), "linear": nm.Linear(),
        "sampling": nm.Sampling(samples=10_000, control=None, seed=0),
    }  # fmt: skip
    net = deep()
    for name, value in values.items():
        assert value.name == name
        assert_same(*(nm.output_moments(net, noise(2), method, check=0) for method in (name, value)), atol=0)
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
    "a tolerance of 0": (lambda: nm.Auto(0), ValueError, r"tolerance must be a number above 0, such as .*, got 0"),
    "a tolerance below": (
        lambda: nm.Auto(-0.1),
        ValueError,
        r"tolerance must be a number above 0, such as .*, got -0.1",
    ),
    "a tolerance of NaN": (
        lambda: nm.Auto(math.nan),
        ValueError,
        r"tolerance must be a number above 0, such as .*, got nan",
    ),
    "no end": (lambda: nm.Auto(math.inf), ValueError, r"tolerance must be a number above 0, such as .*, got inf"),
    "a true tolerance": (
        lambda: nm.Auto(True),
        ValueError,
        r"tolerance must be a number above 0, such as .*, got True",
    ),
    "a tolerance in words": (
        lambda: nm.Auto("fine"),
        ValueError,
        r"tolerance must be a number above 0, such as .*, got 'fine'",
    ),
    "no seconds": (lambda: nm.Auto(seconds=0), ValueError, r"seconds must be a number above 0, such as .*, got 0"),
    "few samples": (lambda: nm.Auto(samples=19), ValueError, r"samples must be an integer of at least 20.*, got 19"),
    "a seed of auto": (lambda: nm.Auto(seed=-1), ValueError, r"seed must be an integer of at least 0"),
    "unknown control": (
        lambda: nm.Sampling(control="exact"),
        ValueError,
        r"control must be one of sketch, two-stage, linear, or None, .*got 'exact'",
    ),
    "control by a method without a surrogate": (
        lambda: nm.Sampling(control=nm.Layerwise()),
        ValueError,
        r"control must be one of sketch, two-stage, linear, or None, .*got Layerwise\(\)",
    ),
    "not a bank": (lambda: nm.TwoStage(bank=3), TypeError, r"bank must be a netmoments\.LinearizationBank, got 3"),
    "few samples for a control": (
        lambda: nm.Sampling(19, control="linear"),
        ValueError,
        r"Sampling with a control: samples must be an integer of at least 20, got 19",
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


def test_a_method_of_ones_own_can_be_a_control():
    class Own(nm.Linear):
        name = "own"

    assert nm.Sampling(100, control=Own()).control.name == "own"
    with pytest.raises(ValueError, match="control must be one of"):
        nm.Sampling(100, control=nm.Layerwise())


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
"""What is exact, and which formula is taken where the noise requires a gradient."""


@pytest.mark.parametrize("case", CHOSEN)
def test_auto_says_what_it_takes_and_why(case):
    """Samples, unless a formula is exact or a gradient is wanted."""
    make, budget, method, reason = CHOSEN[case]
    net = make()
    found = nm.output_moments(net, with_gradient(), memory_budget=budget)
    assert found.method == method
    assert found.reason is not None
    assert re.search(reason, found.reason), found.reason
    assert found.mean.requires_grad
    plain = nm.output_moments(net, noise(), memory_budget=budget, tolerance=0.1)
    if method == "exact":
        assert (plain.method, plain.reason) == ("exact", found.reason)
    else:
        assert plain.method == "sampling"
        assert re.search("samples.*, controlled by expected slopes", plain.reason), plain.reason
    with torch.no_grad():  # where no gradient can be had, none is wanted
        assert nm.output_moments(net, with_gradient(), memory_budget=budget, tolerance=0.1).method == plain.method


def with_gradient(*batch: int) -> nm.Gaussian:
    return nm.Gaussian(means(*batch).requires_grad_(), std=0.3, event_ndim=1)


def test_what_auto_takes_is_what_the_method_gives():
    """With its gradient."""
    net = deep()
    for method, budget, atol in (("layerwise", None, 1e-15), ("sketch", 99, 0)):
        given, same = with_gradient(2), with_gradient(2)
        chosen = nm.output_moments(net, given, memory_budget=budget)
        named = nm.output_moments(net, same, method, memory_budget=budget)
        assert_same(chosen, named, atol=atol)
        slopes = [torch.autograd.grad(found.mean.sum(), x.mean)[0] for found, x in ((chosen, given), (named, same))]
        assert_close(*slopes, atol=1e-14)


def test_a_layer_too_wide_for_exact_pairs_is_not_called_exact():
    torch.manual_seed(0)
    noise = nm.Gaussian(torch.linspace(-1, 1, 3), std=0.5)
    for width, method in ((2048, "exact"), (2049, "sampling")):
        network = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 2)).eval()
        assert nm.output_moments(network, noise).method == method


def test_a_method_that_was_asked_for_has_no_reason():
    for method in ("layerwise", "sketch", "two-stage", "linear", "sampling"):
        found = nm.output_moments(deep(), noise(), method, check=0)
        assert (found.method, found.reason) == (method, None)


# what each is


def test_exact_is_exact():
    """One ReLU, large noise, against the formulas for it; an affine network against A Σ Aᵀ."""
    net = perceptron()
    gates = nm.AffineReluAffine(net[0].weight, net[0].bias, net[2].weight, net[2].bias)
    found, expected = (nm.output_moments(which, noise(2, std=3.0)) for which in (net, gates))
    assert (found.method, expected.method) == ("exact", "exact")
    assert_same(found, expected)
    for error in (found.error, expected.error):
        assert not any(part.any() for part in (error.mean, error.variance, error.covariance))
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


def test_two_stages_keep_a_layer_or_take_a_bank():
    net = deep()
    kept = [nm.output_moments(net, noise(2), nm.TwoStage(layer)) for layer in (0, "1", -1, "3")]
    assert [found.cut for found in kept] == ["1", "1", "3", "3"]
    assert_same(kept[0], kept[1], atol=0)
    assert float((kept[0].variance - kept[2].variance).abs().max()) > 1e-4
    found = nm.output_moments(net, noise(2), nm.TwoStage(bank=nm.LinearizationBank.at(net, means(3))))
    assert (found.method, found.cut, found.reason) == ("two-stage", "3", None)
    assert found.distance.shape == (2,)


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
    counted, at = [], Linearizer.at

    def counting(self, points, indices):
        counted.append(len(points))
        return at(self, points, indices)

    monkeypatch.setattr(Linearizer, "at", counting)
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


@pytest.mark.parametrize("covariance", [True, False])
@pytest.mark.parametrize("control", [None, "linear"])
def test_sampling_keeps_to_the_callers_memory(control, covariance):
    """No more inputs go through the network at a time than fit; the samples are other ones, as batches are."""
    net, given, seen = deep(), noise(2), []
    whole = nm.output_moments(net, given, nm.Sampling(2000, control=control), covariance=covariance)
    handle = net.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    budget = 10 * 8 * nm.NetworkModel(net, given.mean[:1]).pass_size
    method = nm.Sampling(2000, control=control)
    small = nm.output_moments(net, given, method, covariance=covariance, memory_budget=budget)
    handle.remove()
    assert seen == [] or max(seen) <= 20
    error = torch.hypot(whole.error.mean, small.error.mean)
    assert bool(((whole.mean - small.mean).abs() < 5 * error).all())


@pytest.mark.parametrize("method", [nm.TwoStage(1), nm.Linear()])
def test_the_memory_budget_changes_nothing(method, linearizations):
    net, noise = network("lenet"), nm.Gaussian(inputs("lenet", 7), std=0.1)
    expected = nm.output_moments(net, noise, method)
    found = nm.output_moments(net, noise, method, memory_budget=40_000)
    if method == nm.TwoStage(1):
        assert linearizations == [7, 2, 2, 2, 1]
    assert_close(found.mean, expected.mean, atol=1e-13)
    assert_close(found.covariance, expected.covariance, atol=1e-14)


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


# many outputs


@pytest.mark.parametrize("method", [nm.Auto(0.05), nm.Sampling(400), nm.Sampling(400, control="linear")])
def test_many_outputs_have_no_covariances_unless_asked_for(method):
    """More than 100: variances from sums of squares alone, the same numbers as the diagonal of all products."""
    net = deep(scores=101)
    plain, full = (nm.output_moments(net, noise(2), method, covariance=wanted) for wanted in (None, True))
    assert plain.covariance is None
    assert plain.error.covariance is None
    assert full.covariance.shape == full.error.covariance.shape == (2, 101, 101)
    for found in (plain, full):
        assert found.mean.shape == found.variance.shape == found.error.variance.shape == (2, 101)
    few = nm.output_moments(deep(scores=100), noise(2), method)
    assert few.covariance.shape == (2, 100, 100)
    assert nm.output_moments(deep(scores=100), noise(2), method, covariance=False).covariance is None
    # the samples are the same ones, but plain sampling without covariances draws in pairs
    same = method != nm.Sampling(400)
    atol = 1e-12 if same else float(6 * (plain.error.mean + full.error.mean).max())
    assert_close(plain.mean, full.mean, atol=atol)


def test_plain_sampling_without_covariances_is_unbiased():
    """Within 5 standard errors of many samples: 101 means and variances of 2 inputs."""
    net = deep(scores=101)
    found = nm.output_moments(net, noise(2), nm.Sampling(2000, seed=3))
    truth = nm.monte_carlo(net, noise(2), 100_000, seed=4)
    for name in ("mean", "variance"):
        off = getattr(found, name) - getattr(truth, name)
        error = (getattr(found.error, name) ** 2 + getattr(truth, f"{name}_standard_error") ** 2).sqrt()
        assert float((off / error).abs().max()) < 5, name
        # errors of samples, from as many
        expected = getattr(truth, f"{name}_standard_error") * math.sqrt(100_000 / 2000)
        assert_close(getattr(found.error, name) / expected, torch.ones(2, 101), atol=0.25, what=name)
    assert found.samples == 2000
    assert_close(found.wins.sum(-1), [1.0, 1.0], atol=1e-12)


@pytest.mark.parametrize("method", ["auto", "layerwise", "two-stage", "linear"])
def test_covariances_that_nobody_wants_are_not_held(method, monkeypatch):
    """More than 100 outputs: entries go some at a time, and only variances stay."""
    net = seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 101)))
    wanted = nm.output_moments(net, noise(5), method, covariance=True, check=0)
    monkeypatch.setattr(methods, "elements_together", lambda *sizes: 2)
    found = nm.output_moments(net, noise(5), method, check=0)
    assert found.covariance is None
    assert_close(found.mean, wanted.mean, rtol=1e-12, atol=1e-14)
    assert_close(found.variance, wanted.covariance.diagonal(dim1=-2, dim2=-1), rtol=1e-10, atol=1e-14)
