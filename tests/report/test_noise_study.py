"""What noise does to answers, computed: flips, accuracy over noise, checks by samples, attacks that may fail."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import nn

import netmoments as nm
from netmoments.data.images import LabelledImages
from netmoments.report import attack_study
from netmoments.report.attack_study import NotAttacked
from netmoments.report.noise_study import RELATIVE_LEVELS, StudyConfig, checked_images, study
from netmoments.sampling.monte_carlo import class_frequencies
from tests.report.shown import CHECKED, PLAIN


def test_flip_probabilities_are_those_of_the_front_door(network, found):
    for level, sigma in enumerate(CHECKED.levels):
        moments = nm.output_moments(network, nm.Gaussian(found.images.images, std=sigma), "two-stage")
        flips = moments.flip_probability(found.predicted)
        torch.testing.assert_close(found.flips[:, level], flips, rtol=1e-3, atol=1e-12)
        assert found.right is not None
        right = moments.class_probabilities().gather(1, found.images.labels.unsqueeze(1))[:, 0]
        torch.testing.assert_close(found.right[:, level], right, rtol=1e-3, atol=1e-12)
    assert found.moments.cut == "relu3"


def test_the_curve_begins_at_the_accuracy_and_falls(found):
    sigmas, shares = zip(*found.curve, strict=True)
    assert sigmas == (0.0, *CHECKED.levels)
    assert shares[0] == found.clean_accuracy == 1.0
    assert all(a >= b - 1e-3 for a, b in itertools.pairwise(shares))


def test_checks_are_sampled_from_the_network(network, found):
    assert [check.image for check in found.checks] == checked_images(found)
    for check in found.checks:
        noise = nm.Gaussian(found.images.images[check.image], std=0.1)
        won = class_frequencies(network, noise, CHECKED.samples, seed=found.chosen_level)
        assert float(check.flips[found.chosen_level]) == 1 - float(won[found.predicted[check.image]])
    assert found.checks[0].image == int(found.ranking[0])
    assert 0 <= found.largest_check_error <= 1


def test_small_noise_agrees_with_samples(network):
    """At σ = 0.02 the linearization is good: computed flips are within 5 standard errors plus a hundredth."""
    fragile = nm.data.load("digits").take([275, 220, 256])
    found = study(network, fragile, StudyConfig(0.02, samples=10_000, check=3))
    for check in found.checks:
        sampled = float(check.flips[found.chosen_level])
        error = (sampled * (1 - sampled) / 10_000) ** 0.5
        assert abs(sampled - float(found.flip[check.image])) < 5 * error + 0.01


def test_more_classes_than_are_followed_keep_the_label(generator):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 30)).eval()
    images = LabelledImages(torch.rand(5, 1, 4, 4, generator=generator), torch.arange(5), tuple("abcde"), ())
    found = study(network, images, StudyConfig(0.1, samples=50, check=1))
    assert found.moments.outputs.shape == (5, 10)
    assert bool((found.moments.outputs == images.labels.unsqueeze(1)).any(1).all())
    assert found.right.shape == (5, len(RELATIVE_LEVELS))


def test_folders_of_some_classes_are_matched_by_name(network, found):
    names = tuple(f"digit {k}" for k in range(10))
    images = found.images.take(((found.images.labels == 3) | (found.images.labels == 7)).nonzero()[:6, 0])
    labels = (images.labels == 3).long()
    some = dataclasses.replace(images, labels=labels, classes=("digit 7", "digit 3"))
    result = study(network, some, dataclasses.replace(CHECKED, check=0), names)
    assert torch.equal(result.images.labels, images.labels)
    assert result.clean_accuracy == 1.0


def test_a_report_attacks_nothing_that_takes_long(network, digits, monkeypatch):
    monkeypatch.setattr(attack_study, "QUICK", {"cpu": 1e3})
    slow = study(network, digits.first(3), PLAIN)
    assert isinstance(slow.attacks, NotAttacked)
    assert "3 images takes 64 × 64 numbers each" in slow.attacks.reason


def test_a_report_of_wrong_answers_only(network, digits):
    few = digits.first(3)
    wrong = dataclasses.replace(few, labels=(few.labels + 1) % 10)
    nothing = study(network, wrong, PLAIN)
    assert isinstance(nothing.attacks, NotAttacked)
    assert "none of these images right" in nothing.attacks.reason


BAD = {
    "labels out of range": (
        lambda net, images: study(net, dataclasses.replace(images, labels=images.labels + 7, classes=()), CHECKED),
        r"the label of test/\d+ is 16, but the network has 10 scores, 0 to 9",
    ),
    "sigma": (lambda net, images: StudyConfig(-0.1), "sigma must be a positive number"),
    "samples": (lambda net, images: StudyConfig(0.1, samples=1), "samples ≥ 2"),
    "one score": (
        lambda net, images: study(nn.Sequential(net, nn.Linear(10, 1)).eval(), images, CHECKED),
        r"has only 1 score; make it two",
    ),
    "other classes": (
        lambda net, images: study(
            net, dataclasses.replace(images, labels=images.labels % 2, classes=("a", "b")), CHECKED
        ),
        r"the images have 2 classes \(a, b\) and the network 10 scores: which is which",
    ),
    "class names": (lambda net, images: study(net, images, CHECKED, ("a", "b")), "2 class names for a network with 10"),
    "training": (lambda net, images: study(nm.zoo.build("digits").train(), images, CHECKED), r"network\.eval\(\)"),
    "size": (
        lambda net, images: study(net, dataclasses.replace(images, images=torch.rand(40, 1, 12, 12)), CHECKED),
        r"cannot take an input of shape \(1, 12, 12\)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_explained(network, found, name):
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call(network, found.images)
