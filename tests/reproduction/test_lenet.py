"""The paper's LeNet on MNIST: what the requirements ask of the whole, on real data. Minutes; `make test-slow`."""

from __future__ import annotations

import pytest
import torch

import netmoments as nm
from benchmarks.measure import class_frequencies, extra_mebibytes, measured
from netmoments.moments.contests import winning_probabilities
from netmoments.propagate.layerwise import need_of
from netmoments.propagate.plan import plan_of
from reproduction.image_sweeps import random_covariance

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def network():
    return nm.zoo.pretrained("lenet")


@pytest.fixture(scope="module")
def images(mnist):
    return nm.data.load(mnist).images


def test_tight_at_the_papers_smallest_noise(network, images):
    """The average over 100 images and 10⁶ samples is in the benchmark; here eight, against 40,000 each.

    A variance from 40,000 samples is off by 0.007, which only adds; the error of the mean has a heavy tail, from scores
    near 0, so the median is taken.
    """
    errors = []
    for number, image in enumerate(images[:8000:1000]):
        covariance = random_covariance(784, 0.001, torch.Generator().manual_seed(number)).float()
        noise = nm.Gaussian(image, covariance)
        sampled = nm.monte_carlo(network, noise, 40_000, seed=number)
        moments = nm.output_moments(network, noise, "two-stage")
        errors.append(
            [moments.compare(sampled).mean_relative.mean(), moments.compare(sampled).variance_relative.mean()]
        )
    mean, variance = torch.tensor(errors).median(0).values.tolist()
    assert mean <= 0.003
    assert variance <= 0.03


def test_the_first_relu_fits_a_small_machine(network, images):
    """6272 units over 784 inputs: A takes 20 MB, all pairs of units would take 157."""
    noise = nm.Gaussian(images[0], std=0.05)
    moments = []
    extra = extra_mebibytes(lambda: moments.append(nm.output_moments(network, noise, nm.TwoStage(layer=0))))
    assert extra < 1024
    g = nm.two_stage(network, images[0], 0)
    compared = moments[0].compare(nm.monte_carlo(g, noise, 10_000))
    assert float(compared.mean.abs().max()) < 5
    assert float(compared.variance.abs().max()) < 5


def test_scores_are_gaussian_enough_to_say_who_wins(network, images):
    """Given the sampled mean and covariance: total variation to the sampled frequencies, for images that flip."""
    found, sigma = 0, 0.1
    while found < 8:
        for number, image in enumerate(images[:300]):
            noise = nm.Gaussian(image, std=sigma)
            won = class_frequencies(network, noise, 100, seed=number)
            if found < 8 and 0.05 <= 1 - float(won.max()) <= 0.95:
                won = class_frequencies(network, noise, 20_000, seed=number)
                sampled = nm.monte_carlo(network, noise, 20_000, seed=number + 1)
                chances = winning_probabilities(sampled.mean, sampled.covariance)
                assert float(0.5 * (chances - won).abs().sum()) <= 0.05
                found += 1
        sigma *= 1.5


def test_a_bank_of_centres_answers_for_the_images_near_them(network, images, tmp_path):
    bank = nm.LinearizationBank.k_means(network, images[:500], 20)
    bank.save(tmp_path / "bank.safetensors")
    again = nm.LinearizationBank.load(tmp_path / "bank.safetensors")
    noise = nm.Gaussian(images[:20], std=0.01)
    near, own = (
        nm.output_moments(network, noise, nm.TwoStage(bank=again)),
        nm.output_moments(network, noise, "two-stage"),
    )
    assert near.distance is not None
    assert float(near.distance.max()) < 15
    agreement = (near.mean.argmax(1) == own.mean.argmax(1)).double().mean()
    assert float(agreement) >= 0.5


def test_layerwise_at_the_papers_largest_noise(network, images):
    """Tighter than ten thousand samples at σ = 0.1, within the memory that was estimated.

    The reference is 40,000 samples with a control variate: its own standard error of each variance is allowed
    for five times over. The average over images is in `python -m reproduction table-2`.
    """
    covariance = random_covariance(784, 0.1, torch.Generator().manual_seed(0)).float()
    noise = nm.Gaussian(images[:1], covariance)
    need = need_of(plan_of(nm.NetworkModel(network, noise.mean)), 784, 4, 10)
    found, cost = measured(lambda: nm.output_moments(network, noise, "layerwise"), torch.device("cpu"))
    reference = nm.output_moments(network, noise, nm.Sampling(40_000, control="sketch"))
    mean_error = nm.relative_difference(found.mean.double(), reference.mean)
    variance_error = nm.relative_difference(found.variance.double(), reference.variance)
    assert float(mean_error.mean()) < 0.0020
    assert float(variance_error.mean()) < 0.0114
    slack = 5 * reference.variance_standard_error / reference.variance
    assert bool((variance_error < 0.005 + slack).all())
    assert cost.bytes is not None
    assert 0.3 * need.bytes < cost.bytes <= need.bytes
