"""What follows from moments: flips, classes, comparisons, conversion, a table."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor, nn

import netmoments as nm
from benchmarks.measure import class_frequencies
from tests.closeness import assert_close
from tests.moments.problems import deep, means, noise, perceptron
from tests.networks import seeded


def test_flips_and_classes():
    """Between two, P(0 wins) = Φ((m₀ − m₁)/√Var(y₀ − y₁)); labels are classes, not places."""
    net, noise = perceptron(5), nm.Gaussian(means(3), std=0.3)
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
    net, noise = perceptron(5), nm.Gaussian(means(2), std=0.3)
    sampled = nm.output_moments(net, noise, nm.Sampling(1000))
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


def test_moments_convert_like_tensors(generator):
    network = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3)).eval()
    moments = nm.output_moments(network, nm.Gaussian(torch.rand(2, 5, generator=generator), std=0.1), "two-stage", 2)
    double = moments.to(torch.float64)
    assert double.covariance.dtype == torch.float64
    assert torch.equal(double.outputs, moments.outputs)
    assert double.cut == moments.cut


def test_errors_convert_with_the_rest():
    found = nm.output_moments(deep(), noise(2), tolerance=0.1).to(torch.float32)
    assert found.mean.dtype == found.covariance.dtype == found.wins.dtype == torch.float32
    for part in (found.error.mean, found.error.variance, found.error.covariance):
        assert part.dtype == torch.float32
    unchecked = nm.output_moments(deep(), noise(2), "layerwise", check=0).to(torch.float32)
    assert unchecked.error is None
    no_matrix = nm.output_moments(deep(), noise(2), tolerance=0.1, covariance=False).to(torch.float32)
    assert (no_matrix.covariance, no_matrix.error.covariance) == (None, None)


# winners


def test_winners_of_samples_are_counted():
    """With the Gaussian of the moments as one sample more."""
    net, given = deep(5), noise(2, std=0.8)
    found = nm.output_moments(net, given, nm.Sampling(2000, seed=1))
    frequency = class_frequencies(net, given, 2000, seed=1)
    assert_close(found.wins, frequency, atol=1e-12)
    gaussian = dataclasses.replace(found, wins=None)
    expected = (2000 * found.wins + gaussian.class_probabilities()) / 2001
    assert_close(found.class_probabilities(), expected, atol=1e-12)
    for label in (0, 3, torch.tensor([4, 1])):
        lost = 2000 * (1 - found.wins.gather(1, torch.as_tensor(label).expand(2).unsqueeze(1)).squeeze(1))
        assert_close(found.flip_probability(label), (lost + gaussian.flip_probability(label)) / 2001, atol=1e-12)
    assert_close(found.class_probabilities().sum(-1), [1.0, 1.0], atol=1e-12)


def test_winners_where_the_scores_are_not_gaussian():
    """The squared length of two standard normals, against 1: exponential, and skewed."""

    class Length(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([x.square().sum(1), torch.ones_like(x[:, 0])], 1)

    # |x|² of two standard normals is exponential: above 1 with probability e^{−1/2}
    given = nm.Gaussian(torch.zeros(2, dtype=torch.float64), std=1.0)
    found = nm.output_moments(Length().eval(), given, nm.Auto(0.01, samples=10_000))
    chance = math.exp(-0.5)
    allowed = 5 * math.sqrt(chance * (1 - chance) / found.samples)
    assert_close(found.class_probabilities()[0], torch.tensor(chance), atol=allowed)
    assert_close(found.flip_probability(0), torch.tensor(1 - chance), atol=allowed)
    # E|x|² = 2, Var = 4: a Gaussian has 1 − Φ(−1/2)
    fitted = dataclasses.replace(found, wins=None).class_probabilities()[0]
    assert_close(fitted, torch.tensor(0.5 * math.erfc(-0.5 / math.sqrt(2))), atol=0.02)
    assert float(fitted) - chance > 0.05


def test_winners_among_chosen_scores():
    net, given = deep(5), noise(3, std=0.8)
    found = nm.output_moments(net, given, nm.Sampling(500), [4, 1])
    assert found.wins.shape == (3, 2)
    assert_close(found.wins.sum(-1), [1.0] * 3, atol=1e-12)
    assert_close(found.flip_probability(4), 1 - found.class_probabilities()[:, 0], atol=1e-12)


def test_winners_without_a_covariance():
    net, given = deep(120), noise(2, std=0.8)
    found = nm.output_moments(net, given, tolerance=0.1)
    assert found.covariance is None
    assert torch.equal(found.class_probabilities(), found.wins)
    assert_close(found.flip_probability(7), 1 - found.wins[:, 7], atol=1e-12)
    nothing = dataclasses.replace(found, wins=None)
    for call in (nothing.class_probabilities, lambda: nothing.flip_probability(1)):
        with pytest.raises(ValueError, match=r"120 outputs have no covariance; choose some with outputs=, or pass cov"):
            call()


def test_a_covariance_that_rounding_left_askew_has_winners():
    """Float32 matrices of sketches and samples are symmetric and positive semidefinite only to rounding."""
    for seed in range(5):
        net = seeded(lambda: nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 12)), torch.float32, seed)
        given = nm.Gaussian(torch.linspace(-1, 1, 4), std=0.2)
        for method in ("sketch", nm.Sketch(probes=8), nm.Auto(0.1)):
            found = nm.output_moments(net, given, method, check=0)
            chances = found.class_probabilities()
            assert_close(chances.sum(-1), torch.ones(()), atol=1e-6)
            assert bool((chances >= 0).all())
    askew = torch.tensor([[1.0, 0.999999], [1.0000012, 1.0]])
    found = nm.OutputMoments(torch.tensor([1.0, 0.0]), torch.ones(2), askew, "by hand")
    assert_close(found.class_probabilities(), [1.0, 0.0], atol=1e-6)


# as words


def table(found: nm.OutputMoments) -> list[str]:
    return str(found).splitlines()


def test_printed_it_is_a_table():
    net, given = deep(3), noise(std=0.5)
    found = nm.output_moments(net, given, tolerance=0.05)
    lines = table(found)
    assert lines[0].startswith(f"sampling: {found.samples:,} runs of the network an input, ")
    assert found.reason in lines[0]
    assert lines[1] == f"tolerance 0.05 met: {float(found.reached):.2g} reached"
    assert lines[2].split() == ["output", "mean", "±", "error", "std", "±", "error"]
    assert len(lines) == 3 + 3
    for row, line in enumerate(lines[3:]):
        name, mean, _, error, std, _, std_error = line.split()
        assert int(name) == row
        spread = float(found.variance[row].sqrt())
        assert float(mean) == pytest.approx(float(found.mean[row]), rel=1e-3)
        assert float(error) == pytest.approx(float(found.error.mean[row]), rel=0.06)
        assert float(std) == pytest.approx(spread, rel=1e-3)
        # Var = σ², so dσ = dVar/2σ
        assert float(std_error) == pytest.approx(float(found.error.variance[row]) / (2 * spread), rel=0.06)


def test_printed_without_a_check():
    lines = table(nm.output_moments(deep(3), noise(), "layerwise", check=0))
    assert lines[0].startswith("layerwise: ")
    assert "runs" not in lines[0]
    assert lines[1].endswith("(not checked)")
    assert not any("±" in line for line in lines)


def test_printed_of_an_exact_answer():
    lines = table(nm.output_moments(perceptron(), noise()))
    assert lines[0].startswith("exact: ")
    assert lines[0].endswith("; the only nonlinear layer is 1, which is piecewise linear")
    assert all(line.split()[3] == "0" for line in lines[2:])


def test_printed_of_many():
    """Of more than 12 outputs the largest, of more than 3 inputs the first; chosen outputs by their own indices."""
    net, given = deep(20), noise(2, 3)
    found = nm.output_moments(net, given, tolerance=0.1)
    lines = table(found)
    assert [line for line in lines if line.startswith("input")] == ["input 0, 0", "input 0, 1", "input 0, 2"]
    assert lines[-1] == "… 3 more inputs"
    assert sum("the 12 largest of 20" in line for line in lines) == 3
    start = lines.index("input 0, 1") + 2
    shown = [int(line.split()[0]) for line in lines[start : start + 12]]
    assert shown == found.mean[0, 1].topk(12).indices.sort().values.tolist()
    some = table(nm.output_moments(net, noise(), nm.Auto(0.1), [7, 2]))
    assert [line.split()[0] for line in some[-2:]] == ["7", "2"]


def test_printed_of_a_tolerance_that_was_not_met():
    found = nm.output_moments(deep(), noise(std=2.0), tolerance=1e-4, samples=100)
    assert table(found)[1].startswith("tolerance 0.0001 not met within the limit of 100 samples: ")
    assert not found.met


def test_in_a_word():
    found = nm.output_moments(deep(), noise(2), tolerance=0.1)
    assert repr(found) == f"OutputMoments(batch (2,), 3 outputs by sampling, error {float(found.reached.max()):.2g})"
    assert repr(nm.output_moments(deep(), noise(), "linear")) == "OutputMoments(3 outputs by linear)"
    assert nm.output_moments(deep(), noise(), "linear").met  # no tolerance was asked for


# one of several


def test_no_such_output():
    with pytest.raises(KeyError, match=r"no output 'scores'; there are: one tensor only"):
        nm.output_moments(deep(), noise(), "linear")["scores"]


def test_comparison_needs_covariances_and_errors():
    net, given = deep(5), noise(2)
    sampled = nm.output_moments(net, given, nm.Sampling(500))
    without = nm.output_moments(net, given, tolerance=0.1, covariance=False)
    for one, other in ((without, sampled), (sampled, without)):
        with pytest.raises(ValueError, match=r"both must have a covariance; choose outputs=, or pass covariance=True"):
            one.compare(other)
    checked = nm.output_moments(net, given, "layerwise")
    with pytest.raises(ValueError, match=r"other must be sampled .* it is by layerwise"):
        sampled.compare(checked)  # its errors are from samples, but are not those of independent ones
    assert float(checked.compare(nm.output_moments(net, given)).mean.abs().max()) < 50  # a formula is a little off


def test_parts_of_sampled_moments_are_compared_with_both_errors():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = deep(5)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"p": self.net(x), "q": self.net(2 * x)}

    net, given = Two().eval(), noise(2)
    one, other = (nm.output_moments(net, given, nm.Sampling(400, seed=seed), covariance=True) for seed in (1, 2))
    error = torch.hypot(one["p"].error.mean, other["p"].error.mean).double()
    assert_close(one["p"].compare(other["p"]).mean, (one["p"].mean - other["p"].mean).double() / error, rtol=1e-6)


@pytest.mark.parametrize("ask", [lambda found: found.class_probabilities(), lambda found: found.flip_probability(0)])
def test_a_gaussian_fitted_to_probabilities_is_warned_of(ask):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3), nn.Softmax(1)).eval()
    noise = nm.Gaussian(torch.zeros(3), std=0.3)
    with pytest.warns(UserWarning, match="seem to be probabilities"):
        ask(nm.output_moments(network, noise, "sketch"))
    ask(nm.output_moments(network, noise))  # frequencies of its own samples
    ask(nm.output_moments(network[:3].eval(), noise, "sketch"))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread = nn.Linear(4, 2), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"mean": self.mean(x), "the logarithm of the spread": self.spread(x)}


def test_printed_of_several_outputs():
    """Each with the name of its own, cut to a length; a chosen one without."""
    found = nm.output_moments(seeded(TwoHeads), noise())
    heads = [line.split("  ")[0].strip() or line.strip().split("  ")[0] for line in table(found)[2:]]
    assert heads == ["mean 0", "mean 1", *(f"the logarithm of the {number}" for number in range(3))]
    assert table(found["mean"])[2].split()[0] == "0"
