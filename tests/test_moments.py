"""The front door: every method, batch and choice of scores, against each other, by hand, and against samples."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import jacrev

import netmoments as nm
from netmoments.moments import methods
from reproduction.engine import random_network
from tests.closeness import assert_close
from tests.networks import inputs, network, seeded

METHODS = ("two-stage", "linear", "sampling")


def perceptron() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 5)))


def means(*batch: int, seed: int = 2) -> Tensor:
    return torch.randn(*batch, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def linearizations(monkeypatch) -> list[int]:
    """How many points every call of `two_stage` was given."""
    counted = []

    def counting(network, at, *args, **kwargs):
        counted.append(len(at))
        return nm.two_stage(network, at, *args, **kwargs)

    monkeypatch.setattr(methods, "two_stage", counting)
    return counted


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("method", METHODS)
def test_shapes_and_facts(method, batch):
    noise = nm.Gaussian(means(*batch), std=0.3, event_ndim=1)
    found = nm.output_moments(perceptron(), noise, method, samples=50)
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


@pytest.mark.parametrize("method", ["two-stage", "linear"])
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
    which = {"layer": 1} if method == "two-stage" else {}
    together = nm.output_moments(net, noise, method, **which)
    flat = noise.flattened()
    for i in range(6):
        alone = nm.output_moments(net, flat.entries(slice(i, i + 1)), method, **which)
        assert_close(together.mean[i // 3, i % 3], alone.mean[0], atol=1e-12)
        assert_close(together.covariance[i // 3, i % 3], alone.covariance[0], atol=1e-12)


@pytest.mark.parametrize("kind", ["isotropic", "mixed batches", "low rank"])
def test_entries_of_a_batch(kind):
    """Chosen entries of a Gaussian whose parts have their batch dimensions in different places."""
    generator = torch.Generator().manual_seed(5)
    mean, factor = means(3), torch.randn(4, 2, dtype=torch.float64, generator=generator)
    noise = {
        "isotropic": lambda: nm.Gaussian(mean, std=0.3),
        "mixed batches": lambda: nm.Gaussian(means(2, 3), 1.0, event_ndim=1).affine(
            torch.randn(2, 1, 4, 4, dtype=torch.float64, generator=generator)
        ),
        "low rank": lambda: nm.Gaussian(
            mean, nm.LowRank(factor, torch.rand(3, 4, dtype=torch.float64, generator=generator))
        ),
    }[kind]()
    flat = noise.flattened()
    count = noise.batch_shape.numel()
    index = torch.tensor([count - 1, 0])
    dense = noise.covariance.dense().expand(*noise.batch_shape, 4, 4).reshape(count, 4, 4)
    chosen = flat.entries(index)
    assert_close(chosen.mean, noise.mean.reshape(count, 4)[index], atol=0)
    assert_close(chosen.covariance.dense().expand(2, 4, 4), dense[index], atol=1e-15)
    if len(noise.batch_shape) == 1:
        assert_close(noise.entries(index).covariance.dense().expand(2, 4, 4), dense[index], atol=1e-15)
    else:
        with pytest.raises(ValueError, match=r"one batch dimension is needed, got \(2, 3\)"):
            noise.entries(index)


def test_noise_levels_of_one_mean_share_a_linearization(linearizations):
    net, x = network("residual"), inputs("residual", 3)
    levels = torch.tensor([0.01, 0.1, 0.5, 1.0], dtype=torch.float64)
    noise = nm.Gaussian(x[0].expand(4, 2, 6, 6), nm.Isotropic(levels**2, 72))
    found = nm.output_moments(net, noise, layer=0)
    assert linearizations == [1]
    grid = nm.Gaussian(x.expand(4, 3, 2, 6, 6), nm.Isotropic((levels**2)[:, None].expand(4, 3), 72), event_ndim=3)
    all_found = nm.output_moments(net, grid, layer=0, outputs=2)
    assert linearizations == [1, 3]
    for i, level in enumerate(levels.tolist()):
        alone = nm.output_moments(net, nm.Gaussian(x, std=level), layer=0)
        assert_close(found.covariance[i], alone.covariance[0], rtol=1e-9, atol=1e-14)
        best = all_found.outputs[i]
        assert_close(all_found.mean[i], alone.mean.gather(1, best), atol=1e-12)
        assert_close(all_found.variance[i], alone.variance.gather(1, best), rtol=1e-9)


def test_what_shares_a_mean_but_not_the_scores_is_linearized_apart(linearizations):
    net, x = perceptron(), means()
    noise = nm.Gaussian(x.expand(3, 4), std=0.3)
    found = nm.output_moments(net, noise, "two-stage", [[0, 1], [4, 2], [0, 1]])
    assert linearizations == [2]
    everything = nm.output_moments(net, nm.Gaussian(x, std=0.3), "two-stage")
    for i, rows in enumerate([[0, 1], [4, 2], [0, 1]]):
        assert_close(found.mean[i], everything.mean[rows], atol=1e-15)
        assert_close(found.covariance[i], everything.covariance[rows][:, rows], atol=1e-15)


@pytest.mark.parametrize("method", METHODS)
def test_chosen_scores_are_selected_from_all(method):
    net, noise = perceptron(), nm.Gaussian(means(2, 3), std=0.3, event_ndim=1)
    everything = nm.output_moments(net, noise, method, samples=200)
    best = net(noise.mean).topk(2, -1).indices
    each = torch.tensor([[0, 3], [1, 2], [4, 0], [2, 2], [3, 1], [0, 4]])
    choices = {"a list": ([3, 0], torch.tensor([3, 0]).expand(2, 3, 2)), "the largest": (2, best)}
    choices |= {"each": (each, each.reshape(2, 3, 2)), "from the end": ([-1, 0], torch.tensor([4, 0]).expand(2, 3, 2))}
    for name, (outputs, rows) in choices.items():
        found = nm.output_moments(net, noise, method, outputs, samples=200)
        assert torch.equal(found.outputs, rows), name
        assert_close(found.mean, everything.mean.gather(-1, rows), atol=1e-14, what=name)
        assert_close(found.variance, everything.variance.gather(-1, rows), atol=1e-14, what=name)
        square = everything.covariance.gather(-2, rows.unsqueeze(-1).expand(2, 3, 2, 5))
        square = square.gather(-1, rows.unsqueeze(-2).expand(2, 3, 2, 2))
        assert_close(found.covariance, square, atol=1e-14, what=name)


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
    net, noise = perceptron(), nm.Gaussian(means(3), std=0.3)
    found = nm.output_moments(net, noise, "sampling", samples=300, seed=7)
    sampled = nm.monte_carlo(net, noise, 300, seed=7)
    for name in ("mean", "variance", "covariance"):
        assert_close(getattr(found, name), getattr(sampled, name), atol=0)
        error = f"{name}_standard_error"
        assert_close(getattr(found, error), getattr(sampled, error), atol=0)


def test_exact_for_one_hidden_layer():
    """A perceptron is its own two-stage linearization: large noise, within five standard errors of samples."""
    net, noise = perceptron(), nm.Gaussian(means(2), std=3.0)
    exact = nm.output_moments(net, noise, "two-stage")
    report = exact.compare(nm.output_moments(net, noise, "sampling", samples=100_000, seed=3))
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


@pytest.mark.parametrize("method", ["two-stage", "linear"])
def test_the_memory_budget_changes_nothing(method, linearizations):
    net, noise = network("lenet"), nm.Gaussian(inputs("lenet", 7), std=0.1)
    which = {"layer": 1} if method == "two-stage" else {}
    expected = nm.output_moments(net, noise, method, **which)
    found = nm.output_moments(net, noise, method, **which, memory_budget=40_000)
    if method == "two-stage":
        assert linearizations == [7, 2, 2, 2, 1]
    assert_close(found.mean, expected.mean, atol=1e-13)
    assert_close(found.covariance, expected.covariance, atol=1e-14)


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


def test_float32():
    double = nm.output_moments(perceptron(), nm.Gaussian(means(3), std=0.3), "two-stage")
    single = nm.output_moments(perceptron().float(), nm.Gaussian(means(3).float(), std=0.3), "two-stage")
    assert single.mean.dtype == single.covariance.dtype == torch.float32
    assert_close(single.mean, double.mean, rtol=1e-5, atol=1e-6)
    assert_close(single.variance, double.variance, rtol=1e-5)


# what follows from the moments


def test_flips_and_classes():
    """Between two, P(0 wins) = Φ((m₀ − m₁)/√Var(y₀ − y₁)); labels are classes, not places."""
    net, noise = perceptron(), nm.Gaussian(means(3), std=0.3)
    found = nm.output_moments(net, noise, "two-stage", [4, 1])
    m, c = found.mean, found.covariance
    lead = (m[:, 0] - m[:, 1]) / (c[:, 0, 0] + c[:, 1, 1] - 2 * c[:, 0, 1]).sqrt()
    wins = 0.5 * torch.special.erfc(-lead * math.sqrt(0.5))
    assert_close(found.class_probabilities()[:, 0], wins, rtol=1e-12)
    assert_close(found.flip_probability(1), wins, rtol=1e-12)
    assert_close(found.flip_probability(torch.tensor([1, 4, 1])), [wins[0], 1 - wins[1], wins[2]], rtol=1e-10)
    everything = nm.output_moments(net, noise, "two-stage")
    for label in range(5):
        lost = 1 - everything.class_probabilities()[:, label]
        assert_close(everything.flip_probability(label), lost, atol=1e-14)


def test_comparison_with_samples():
    net, noise = perceptron(), nm.Gaussian(means(2), std=0.3)
    sampled = nm.output_moments(net, noise, "sampling", samples=1000)
    itself = sampled.compare(sampled)
    assert float(itself.mean.abs().max()) == float(itself.covariance.abs().max()) == 0
    shifted = nm.OutputMoments(
        sampled.mean + 3 * sampled.mean_standard_error, 1.1 * sampled.variance, sampled.covariance, "by hand"
    )
    report = shifted.compare(sampled)
    assert_close(report.mean, torch.full((2, 5), 3.0), rtol=1e-10)
    assert_close(report.variance_relative, torch.full((2, 5), 0.2 / 2.1), rtol=1e-6)
    assert "3.0 SE at most" in str(report)
    assert nm.output_moments(net, noise, "two-stage").compare(nm.monte_carlo(net, noise, 1000)).mean.shape == (2, 5)


# bad input

NET = perceptron().float()
NOISE = nm.Gaussian(torch.zeros(4), std=0.1)
BATCH = nm.Gaussian(torch.zeros(3, 4), std=0.1)
GATES = nm.AffineReluAffine(torch.ones(4, 4), torch.zeros(4), torch.ones(2, 4), torch.zeros(2))


def moments(method: str = "two-stage", *args, noise: nm.Gaussian = NOISE, **kwargs) -> nm.OutputMoments:
    return nm.output_moments(NET, noise, method, *args, **kwargs)


BAD: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "noise a tensor": (lambda: nm.output_moments(NET, torch.zeros(4)), TypeError, r"noise must be a netmoments\.Gauss"),
    "unknown method": (lambda: moments("exact"), ValueError, r"one of auto, layerwise, .*sampling, got 'exact'"),
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
    "unknown layer": (lambda: moments(layer="relu9"), ValueError, r"no ReLU is named 'relu9'; the ReLUs are: 0 '1'"),
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
    "one sample": (lambda: moments("sampling", samples=1), ValueError, r"samples must be an integer of at least 2"),
    "seed": (lambda: moments("sampling", seed=-1), ValueError, r"seed must be an integer of at least 0"),
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
        lambda: moments(outputs=[0, 1]).compare(moments("sampling", [1, 0], samples=5)),
        ValueError,
        r"both must be of the same scores",
    ),
    "comparison of other scores, all of them": (
        lambda: moments().compare(moments("sampling", [4, 3, 2, 1, 0], samples=5)),
        ValueError,
        r"both must be of the same scores",
    ),
    "comparison of other shapes": (
        lambda: moments().compare(moments("sampling", [0], samples=5)),
        ValueError,
        r"got shapes \(5,\) and \(1,\); give both the same outputs=",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    call, error, message = BAD[case]
    with pytest.raises(error, match=message):
        call()


def test_the_paper_s_two_stage_is_near_the_truth_for_a_trained_network():
    """Sampled moments of the shipped digits network at little noise: 5 % of the spread."""
    net = nm.zoo.pretrained("digits")
    x = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    noise = nm.Gaussian(x, std=0.01)
    found, sampled = nm.output_moments(net, noise, "two-stage"), nm.monte_carlo(net, noise, 4000)
    floor = 5 * math.sqrt(2 / 4000)
    assert float(nm.relative_difference(found.variance, sampled.variance).mean()) < 0.05 + floor


def test_a_bank_answers_for_one_input():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3)).eval()
    bank = nm.LinearizationBank.at(network, torch.rand(3, 5))
    moments = nm.output_moments(network, nm.Gaussian(torch.rand(5), std=0.1), bank=bank)
    assert moments.mean.shape == (3,)
    assert moments.distance.shape == ()
    with pytest.raises(ValueError, match="a bank has its own ReLU"):
        nm.output_moments(network, nm.Gaussian(torch.rand(5), std=0.1), bank=bank, layer=0)


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
    assert bool((nm.output_moments(network, noise, "sampling", samples=100).variance > 0).all())


def test_a_network_that_was_changed_is_looked_at_again():
    network = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3)).eval()
    noise = nm.Gaussian(torch.rand(5), std=0.1)
    assert nm.output_moments(network, noise, "two-stage").mean.shape == (3,)
    network[2] = nn.Linear(9, 4).eval()
    assert nm.output_moments(network, noise, "two-stage").mean.shape == (4,)
    network.append(nn.ReLU().eval())
    assert len(nm.relus(network, noise.mean[None])) == 2


def test_an_affine_relu_affine_is_exact_or_sampled_as_asked(generator):
    g = nm.AffineReluAffine(*(torch.randn(s, generator=generator) for s in ((6, 4), (6,), (5, 6), (5,))))
    noise = nm.Gaussian(torch.randn(3, 4, generator=generator), std=0.3)
    for outputs in (None, [4, 0], 2):
        exact = nm.output_moments(g, noise, outputs=outputs)
        sampled = nm.output_moments(g, noise, "sampling", outputs, samples=20_000)
        assert (exact.method, sampled.method) == ("exact", "sampling")
        assert float(exact.compare(sampled).mean.abs().max()) < 5
        assert float(exact.compare(sampled).covariance.abs().max()) < 5
    with pytest.raises(ValueError, match='exact with method="auto" or "two-stage"'):
        nm.output_moments(g, noise, "linear")


def test_moments_convert_like_tensors(generator):
    network = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3)).eval()
    moments = nm.output_moments(network, nm.Gaussian(torch.rand(2, 5, generator=generator), std=0.1), "two-stage", 2)
    double = moments.to(torch.float64)
    assert double.covariance.dtype == torch.float64
    assert torch.equal(double.outputs, moments.outputs)
    assert double.cut == moments.cut
