"""Attacks of a report: which images, which classes, what is left out, and options that become attacks."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from netmoments.attacks.box import PixelSupport, Targeted
from netmoments.attacks.sparse_smooth import SparseSmooth
from netmoments.data.images import LabelledImages
from netmoments.report.attack_page import attack_record, render_attack_page
from netmoments.report.attack_study import AttackOptions, Choice, conduct_attack
from netmoments.report.attack_words import draw_attack
from tests.report.shown import FAST, in_a_terminal


def test_images_of_the_target_are_left_out_and_named(network, digits):
    some = digits.take([0, 1, int((digits.labels == 3).nonzero()[0])])
    result = conduct_attack(network, some, Targeted(iterations=10, polish=0, samples=20), Choice(3, target="3"))
    assert len(result) == 2
    assert result.of_the_target == (some.names[2],)
    text = in_a_terminal(draw_attack(result))
    assert f"left out: {some.names[2]}: its label is the target" in text
    assert "1 of 3 chosen images were left out" in text


def test_images_that_are_wrong_are_left_out_and_named(network, digits):
    few = digits.take([0, 1])
    wrong = dataclasses.replace(few, labels=torch.stack([few.labels[0], (few.labels[1] + 1) % 10]))
    result = conduct_attack(network, wrong, FAST, Choice(2))
    (left,) = result.left_out
    assert left.name == few.names[1]
    assert f"the network takes it for {int(few.labels[1])}" in left.reason
    assert attack_record(result)["skipped"][0]["predicted"] == int(few.labels[1])
    assert len(result) == 1


def test_without_labels_the_answers_of_the_network_stand_for_them(network, digits, provenance):
    bare = LabelledImages(digits.images[:6], None, digits.names[:6], ())
    answers = network(bare.images).argmax(1)
    result = conduct_attack(network, bare, FAST, Choice(2, label=str(int(answers[4]))))
    assert result.labels_are_answers
    assert bool((result.result.labels == answers[4]).all())
    assert "own answers stand for them" in in_a_terminal(draw_attack(result))
    assert "own answers stand for them" in render_attack_page(result, provenance, "m", "d")


def test_classes_by_name(network, digits):
    names = tuple(f"digit {k}" for k in range(10))
    own = dataclasses.replace(digits, classes=names)
    quick = Targeted(iterations=5, polish=0, samples=20)
    result = conduct_attack(network, own, quick, Choice(2, label="digit 7", target="9"), names)
    assert result.result.labels.tolist() == [7, 7]
    assert result.result.targets.tolist() == [9, 9]
    assert "digit 7" in in_a_terminal(draw_attack(result))


def test_all_images_are_of_the_target(network, digits):
    threes = digits.take((digits.labels == 3).nonzero()[:2, 0])
    with pytest.raises(ValueError, match="the label of all 2 chosen images is the target: give another --target"):
        conduct_attack(network, threes, FAST, Choice(2, target="3"))
    with pytest.raises(ValueError, match=r"none of the 2 images is of the class 5 \(--label\)"):
        conduct_attack(network, threes, FAST, Choice(2, label="5"))


def test_options_become_attacks():
    assert AttackOptions(kind="sparse-smooth").attack() == SparseSmooth()
    assert AttackOptions(kind="targeted", target="3").attack() == Targeted()
    assert AttackOptions(kind="pixels", percent=5.0, sigma=0.1).attack() == PixelSupport(percent=5.0, largest_sigma=0.1)


def test_the_sample_that_is_shown_is_one_of_the_noise(network, attacked):
    assert torch.equal(attacked.noisy, attacked.result.samples(1, FAST.seed)[0])
    assert torch.equal(attacked.noisy_classes, network(attacked.noisy).argmax(1))
