"""What noise does to answers: flips and scores with intervals, accuracy over noise, and work that ends early."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn

import netmoments as nm
from benchmarks.measure import class_frequencies
from netmoments.data.images import LabelledImages
from netmoments.report import attack_study, noise_study
from netmoments.report.arguments import RELATIVE_LEVELS
from netmoments.report.attack_study import NotAttacked
from netmoments.report.noise_study import COPIES, NEAREST, example_images, study
from netmoments.report.pictures import drawn_noise
from tests.report.shown import PLAIN, STUDIED

SAMPLES = 8_000
QUIET = dataclasses.replace(PLAIN, attacks=0)


def sampled_flip(network, image, sigma: float, answer: int, seed: int) -> float:
    return 1 - float(class_frequencies(network, nm.Gaussian(image, std=sigma), SAMPLES, seed=seed)[answer])


def test_flips_are_those_of_plain_samples(network, found):
    """Within 5 standard errors of both; where there is only a bound, below it."""
    fragile, robust = found.order[:6].tolist(), found.order[-2:].tolist()
    for number in fragile + robust:
        image, answer = found.images.images[number], int(found.predicted[number])
        there = sampled_flip(network, image, STUDIED.sigma, answer, number)
        error = math.hypot(float(found.half_width[number]) / 2, ((there + 1 / SAMPLES) * (1 - there) / SAMPLES) ** 0.5)
        assert abs(float(found.flip[number]) - there) < 5 * error + (found.bounded[number] and 3 / SAMPLES)


def test_every_flip_has_an_interval(found):
    low, high = found.interval.unbind(1)
    assert bool(((low >= 0) & (low <= found.flip) & (found.flip <= high) & (high <= 1)).all())
    known = found.samples < STUDIED.samples
    assert float(found.half_width[known].max()) <= 1.05 * STUDIED.tolerance
    assert bool((found.runs >= found.samples).all())
    assert bool((low[found.bounded] == 0).all())
    torch.testing.assert_close(high[found.bounded], 3.0 / found.samples[found.bounded].double())


def test_images_nearest_to_flipping_are_known_to_a_tenth(found):
    """An error of 10 % is an interval of ± 20 %, and somewhat more where weights vary."""
    for number in found.order[: STUDIED.rare].tolist():
        low, high = found.interval[number].tolist()
        assert 0 < high - low < 0.6 * float(found.flip[number])
        assert found.route[number] in ("frequencies", "importance", "splitting")
    assert "importance" in found.route
    flips = found.flip[found.order]
    assert bool((flips[:-1] >= flips[1:]).all())
    assert bool((found.rivals != found.predicted).all())


def test_the_curve_begins_at_the_accuracy_and_its_band_covers_a_large_sample(network, found):
    assert [point.sigma for point in found.curve] == [0.0, *STUDIED.levels]
    start = found.curve[0]
    assert start.share == start.low == start.high == found.clean_accuracy == 1.0
    for place in (4, 7):
        point = found.curve[place]
        there = torch.stack(
            [
                class_frequencies(network, nm.Gaussian(image, std=point.sigma), 2000, seed=number)[label]
                for number, (image, label) in enumerate(zip(found.images.images, found.images.labels, strict=True))
            ]
        ).double()
        error = float((there * (1 - there) / 2000).sum().sqrt()) / len(there)
        assert 0 < point.high - point.low < 0.03
        assert point.low - 3 * error <= float(there.mean()) <= point.high + 3 * error
        assert point.low <= point.share <= point.high
    assert found.curve[-1].share < found.curve[1].share


def test_scores_are_those_of_the_front_door(network, found):
    moments = nm.output_moments(network, nm.Gaussian(found.images.images, std=STUDIED.sigma), nm.Sampling(4000, seed=1))
    scores, there = found.scores, moments.variance.sqrt()
    assert scores.method == "sampling"
    own, other = scores.mean_error, there / 4000**0.5
    assert bool(((scores.mean - moments.mean).abs() < 5 * torch.hypot(own, other.double())).all())
    # a standard deviation has about 1/√(2n) of itself as error; √2 for heavier tails than a Gaussian's
    error = torch.hypot(scores.deviation_error, there.double() / 4000**0.5)
    assert bool(((scores.deviation - there).abs() < 5 * error).all())
    torch.testing.assert_close(found.shares.sum(1), torch.ones(40, dtype=torch.float64))


def test_a_formula_for_the_scores(network, digits):
    formula = study(network, digits.first(4), dataclasses.replace(QUIET, method="layerwise"))
    sampled = study(network, digits.first(4), QUIET)
    assert formula.scores.method == "layerwise"
    torch.testing.assert_close(formula.flip, sampled.flip)
    error = torch.hypot(formula.scores.mean_error.double(), sampled.scores.mean_error)
    assert bool(((formula.scores.mean - sampled.scores.mean).abs() < 5 * error + 0.05).all())


def test_examples_are_fragile_images_and_others(found):
    assert [example.image for example in found.examples] == example_images(found)
    assert found.examples[0].image == int(found.order[0])
    assert len({example.image for example in found.examples}) == STUDIED.examples
    assert all(example.noisy.shape[1:] == found.images.images.shape[1:] for example in found.examples)


def test_every_image_is_known_at_every_level(network, found):
    """Samples of our own at twice the noise agree, and the level that was asked about is what was found."""
    assert [level.sigma for level in found.levels] == [0.0, *STUDIED.levels]
    start, *_, twice, _ = found.levels
    assert STUDIED.levels[5] == twice.sigma == 2 * STUDIED.sigma
    assert bool((start.flips == 0).all())
    assert torch.equal(start.right, (found.predicted == found.images.labels).long())
    assert torch.equal(start.lead, torch.full_like(start.lead, math.inf))
    assert bool((start.deviation == 0).all())
    for level in found.levels:
        assert torch.allclose(level.shares.sum(1), torch.ones(40).double())
        own = level.shares.gather(1, found.predicted.unsqueeze(1)).squeeze(1)
        assert torch.allclose(own, 1 - level.flips / level.samples.double())
    number = int(found.at(6).order[0])
    there = sampled_flip(network, found.images.images[number], twice.sigma, int(found.predicted[number]), 3)
    low, high = found.at(6).interval[number].tolist()
    assert low - (high - low) < there < high + (high - low)
    assert found.at(4) is found
    assert bool((found.at(6).flip >= found.flip - 0.05).all())
    assert found.at(0).interval.abs().max() == 0


def test_the_curve_is_the_mean_of_its_images(found):
    for level, point in zip(found.levels, found.curve, strict=True):
        assert level.point() == point
    some = torch.arange(40) < 10
    assert found.levels[6].point(some).share == pytest.approx(
        float((found.levels[6].right / found.levels[6].samples)[:10].double().mean())
    )


def test_the_network_was_asked_about_the_copies_that_pages_draw(network, found):
    assert found.copies.shape == (8, 40, COPIES)
    for place, number in ((0, 3), (5, 7), (7, 39)):
        noisy = found.images.images[number] + found.levels[place].sigma * drawn_noise(number, COPIES, (1, 8, 8)).float()
        assert torch.equal(network(noisy).argmax(1), found.copies[place, number])
    assert torch.equal(found.copies[0], found.predicted.unsqueeze(1).expand(-1, COPIES))


def test_copies_of_large_images_and_of_other_noise_are_not_drawn(network, digits, generator):
    few = digits.first(2)
    assert study(network, few, dataclasses.replace(QUIET, covariance=torch.full((1, 8, 8), 0.01))).copies is None
    assert study(network, few, dataclasses.replace(QUIET, examples=0)).copies is None
    assert study(network, few, dataclasses.replace(QUIET, seconds=1e-6)).copies is None
    wide = nn.Sequential(nn.AvgPool2d(25), nn.Flatten(), nn.Linear(16, 3)).eval()
    images = LabelledImages(torch.rand(1, 1, 100, 100, generator=generator), None, ("a",), ())
    assert study(wide, images, QUIET).copies is None


def test_samples_alone(network, digits):
    few = study(network, digits.first(5), QUIET)
    assert set(few.route) == {"frequencies"}
    assert torch.equal(few.runs, few.samples)
    assert few.attacks is None
    assert few.stopped == ""
    assert 0 < few.seconds < math.inf
    again = study(network, digits.first(5), QUIET)
    assert torch.equal(few.flip, again.flip)
    assert torch.equal(few.scores.mean, again.scores.mean)


def test_nearest_flips_are_flips_and_no_farther_than_samples_say(network, found):
    """Seen by the network; and half of the noise is beyond the plane through one: p ≥ Φ(−distance), nearly."""
    numbers = [each.image for each in found.nearest]
    assert numbers == list(dict.fromkeys([*example_images(found), *found.order[:NEAREST].tolist()]))
    pixels = torch.stack([found.images.images[each.image] + each.change for each in found.nearest])
    with torch.no_grad():
        answers = network(pixels).argmax(1).tolist()
    assert answers == [each.becomes for each in found.nearest]
    assert all(answer != int(found.predicted[number]) for answer, number in zip(answers, numbers, strict=True))
    for each in found.nearest:
        assert each.distance == pytest.approx(float(each.change.norm()) / STUDIED.sigma, rel=1e-4)
    nearest = min(found.nearest, key=lambda each: each.distance)
    assert nearest.image in found.order[:3].tolist()


def test_nearest_flips_take_a_share_of_the_time_and_none_where_nothing_is_shown(network, digits, monkeypatch):
    assert study(network, digits.first(3), dataclasses.replace(QUIET, examples=0)).nearest == ()
    assert len(study(network, digits.first(3), QUIET).nearest) == 3
    monkeypatch.setattr(noise_study, "NEAREST_RUNS", 1e12)
    assert study(network, digits.first(3), QUIET).nearest == ()


def test_images_that_nothing_flips_have_no_nearest_flip():
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 2)).eval()
    nn.init.zeros_(network[1].weight)
    network[1].bias.data = torch.tensor([1.0, 0.0])
    images = LabelledImages(torch.rand(3, 1, 4, 4), None, tuple("abc"), ())
    assert study(network, images, QUIET).nearest == ()


def test_time_that_ends_the_work_is_said(network, digits):
    hasty = study(network, digits.first(5), dataclasses.replace(STUDIED, seconds=1e-6))
    assert hasty.stopped == "the time allowed"
    assert bool((hasty.samples >= 16).all())
    assert len(hasty.curve) == 1 + len(RELATIVE_LEVELS)
    assert isinstance(hasty.attacks, NotAttacked)
    assert "the time allowed" in hasty.attacks.reason


@pytest.mark.parametrize("raises_in", ["_levels", "entries_found", "examples_of", "nearest_flip"])
def test_an_interruption_keeps_what_is_known(network, digits, monkeypatch, raises_in):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(noise_study, raises_in, interrupted)
    kept = study(network, digits.first(5), dataclasses.replace(STUDIED, rare=1))
    assert kept.stopped == "an interruption"
    assert kept.clean_accuracy == 1.0
    assert bool((kept.samples >= 192).all())
    assert kept.curve[1 if raises_in == "_levels" else 4].sigma == STUDIED.sigma
    assert [level.sigma for level in kept.levels] == [point.sigma for point in kept.curve]
    assert len(kept.examples) == (4 if raises_in == "nearest_flip" else 0)
    assert kept.nearest == ()


def test_an_interruption_of_the_attacks_keeps_the_study(network, digits, monkeypatch):
    few = digits.first(4)
    whole = study(network, few, dataclasses.replace(QUIET, attacks=0))

    def interrupted(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(attack_study, "_attacked", interrupted)
    found = study(network, few, dataclasses.replace(QUIET, attacks=2))
    assert isinstance(found.attacks, NotAttacked)
    assert "interruption" in found.attacks.reason
    assert torch.equal(found.flip, whole.flip)


@pytest.mark.parametrize("activation", [nn.SiLU, nn.Tanh])
def test_networks_without_a_relu(activation, generator):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), activation(), nn.Linear(12, 3)).eval()
    images = LabelledImages(torch.rand(4, 1, 4, 4, generator=generator), None, tuple("abcd"), ())
    found = study(network, images, dataclasses.replace(STUDIED, rare=2, attacks=0))
    number = int(found.order[0])
    there = sampled_flip(network, images.images[number], STUDIED.sigma, int(found.predicted[number]), 3)
    low, high = found.interval[number].tolist()
    error = 5 * (max(there, 1 / SAMPLES) / SAMPLES) ** 0.5
    assert low - (high - low) - error < there < high + (high - low) + error


def test_a_covariance_in_place_of_sigma(network, digits):
    """Of the shape of an image or of all pixels; the same as sigma where it is sigma² on every pixel."""
    few = digits.first(4)
    variances = torch.full((1, 8, 8), QUIET.sigma**2)
    alike = study(network, few, QUIET)
    for covariance in (variances, variances.flatten().diag()):
        found = study(network, few, dataclasses.replace(QUIET, covariance=covariance))
        error = torch.hypot(found.scores.mean_error, alike.scores.mean_error)
        assert bool(((found.scores.mean - alike.scores.mean).abs() < 5 * error).all())
    rows = variances.clone()
    rows[:, 4:] = 0
    half = study(network, few, dataclasses.replace(QUIET, covariance=rows))
    assert bool((half.scores.deviation < alike.scores.deviation).all())
    assert torch.equal(half.examples[0].noisy[:, :, 4:], few.images[half.examples[0].image][:, 4:].expand(5, 1, 4, 8))


def test_images_without_labels(network, digits):
    few = digits.first(5)
    bare = study(network, dataclasses.replace(few, labels=None, classes=()), QUIET)
    assert not bare.labelled
    assert bare.clean_accuracy is None
    assert bare.curve[0].share == 1.0
    labelled = study(network, few, QUIET)
    assert torch.equal(bare.flip, labelled.flip)


def test_more_classes_than_are_followed_keep_the_label(generator):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 30)).eval()
    images = LabelledImages(torch.rand(5, 1, 4, 4, generator=generator), torch.arange(5), tuple("abcde"), ())
    found = study(network, images, QUIET)
    assert found.count == 30
    assert found.scores.outputs.shape == found.shares.shape == (5, 10)
    assert bool((found.scores.outputs == images.labels.unsqueeze(1)).any(1).all())
    assert found.scores.place(2, 2) is not None
    absent = (set(range(30)) - set(found.scores.outputs[2].tolist())).pop()
    assert found.scores.place(2, absent) is None


def test_folders_of_some_classes_are_matched_by_name(network, found):
    names = tuple(f"digit {k}" for k in range(10))
    images = found.images.take(((found.images.labels == 3) | (found.images.labels == 7)).nonzero()[:6, 0])
    labels = (images.labels == 3).long()
    some = dataclasses.replace(images, labels=labels, classes=("digit 7", "digit 3"))
    result = study(network, some, QUIET, names)
    assert torch.equal(result.images.labels, images.labels)
    assert result.clean_accuracy == 1.0
    assert result.class_name(3) == "digit 3"


def test_what_it_will_take_is_said_first(network, digits):
    said: list[str] = []
    study(network, digits.first(3), QUIET, say=said.append)
    assert len(said) == 1
    assert said[0].startswith("3 images, ")
    assert "runs of the network" in said[0]


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
    assert nothing.clean_accuracy == 0.0


BAD = {
    "labels out of range": (
        lambda net, images: study(net, dataclasses.replace(images, labels=images.labels + 7, classes=()), QUIET),
        r"the label of test/\d+ is 16, but the network has 10 scores, 0 to 9",
    ),
    "one score": (
        lambda net, images: study(nn.Sequential(net, nn.Linear(10, 1)).eval(), images, QUIET),
        r"has only 1 score; make it two",
    ),
    "maps of scores": (
        lambda net, images: study(nn.Conv2d(1, 3, 3).eval(), images, QUIET),
        r"must give each image one row of scores, got \(3, 6, 6\)",
    ),
    "not finite": (
        lambda net, images: study(nn.Sequential(net, Infinite()).eval(), images, QUIET),
        "the network's output must be finite",
    ),
    "other classes": (
        lambda net, images: study(
            net, dataclasses.replace(images, labels=images.labels % 2, classes=("a", "b")), QUIET
        ),
        r"the images have 2 classes \(a, b\) and the network 10 scores: which is which",
    ),
    "class names": (lambda net, images: study(net, images, QUIET, ("a", "b")), "2 class names for a network with 10"),
    "training": (lambda net, images: study(nm.zoo.build("digits").train(), images, QUIET), r"network\.eval\(\)"),
    "size": (
        lambda net, images: study(net, dataclasses.replace(images, images=torch.rand(40, 1, 12, 12)), QUIET),
        r"cannot take an input of shape \(1, 12, 12\)",
    ),
}


class Infinite(nn.Module):
    def forward(self, scores):
        return scores / 0.0


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_explained(network, found, name):
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call(network, found.images)
