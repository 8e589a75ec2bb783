"""What follows from moments: flips, classes, comparisons, conversion."""

from __future__ import annotations

import math

import torch
from torch import nn

import netmoments as nm
from tests.closeness import assert_close
from tests.moments.problems import means, perceptron


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
