"""What all attacks share: arguments that are read or refused, and images in groups."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import netmoments as nm
from netmoments.attacks.box import PixelSupport, Targeted
from netmoments.attacks.sparse_smooth import SparseSmooth
from netmoments.network import zoo
from tests.attacks.problems import QUICK


@pytest.mark.parametrize("polish", [0, 40])
def test_images_in_groups_are_attacked_like_all_at_once(digits, monkeypatch, polish):
    network, images = digits
    x, labels = images.images[:5], images.labels[:5]
    attack = SparseSmooth(gamma=0.0, polish=polish, iterations=150, samples=50)
    together = attack(network, x, labels)
    monkeypatch.setattr("netmoments.attacks.base.TOGETHER", {"cpu": 2, "cuda": 2})
    apart = attack(network, x, labels)
    assert torch.equal(apart.places, together.places)
    torch.testing.assert_close(apart.l1 + apart.tv, together.l1 + together.tv, rtol=5e-3, atol=0)


SETTINGS = [
    (SparseSmooth, {"sigma": 0.0}, "sigma must be a standard deviation above 0"),
    (SparseSmooth, {"sigma": -1.0}, "sigma must be a standard deviation above 0"),
    (SparseSmooth, {"confidence": 1.0}, "confidence must be between 0 and 1, got 1.0"),
    (SparseSmooth, {"confidence": 0.0}, "confidence must be between 0 and 1"),
    (SparseSmooth, {"gamma": -0.1}, "gamma must be a margin of at least 0"),
    (SparseSmooth, {"gamma": float("nan")}, "gamma must be a margin of at least 0"),
    (SparseSmooth, {"gamma": 1.0, "confidence": 0.9}, "got both"),
    (SparseSmooth, {"gamma": "a"}, "gamma must be a margin"),
    (SparseSmooth, {"confidence": "a"}, "confidence must be between"),
    (SparseSmooth, {"rivals": 0}, "rivals must be an integer of at least 1"),
    (SparseSmooth, {"iterations": 0}, "iterations must be an integer of at least 1"),
    (SparseSmooth, {"polish": -1}, "polish must be an integer of at least 0"),
    (SparseSmooth, {"samples": 1}, "samples must be an integer of at least 2"),
    (SparseSmooth, {"bounds": (1.0, 0.0)}, "bounds must be finite with the lowest first"),
    (SparseSmooth, {"bounds": (0.0, torch.inf)}, "bounds must be finite with the lowest first"),
    (PixelSupport, {"bounds": (0.0, 1e-323), "percent": 5}, "bounds must be finite with the lowest first"),
    (SparseSmooth, {"bounds": 255}, "bounds must be two numbers"),
    (Targeted, {"beta": 0.0}, "beta must be a number above 0"),
    (Targeted, {"largest_sigma": -1.0}, "largest_sigma must be a number above 0"),
    (Targeted, {"wanted": 1.5}, "wanted must be a share of samples"),
    (PixelSupport, {"percent": 0.0}, r"percent must be in \(0, 100\]"),
    (PixelSupport, {"percent": 101}, r"percent must be in \(0, 100\]"),
    (PixelSupport, {}, "got neither"),
    (PixelSupport, {"percent": 1, "mask": torch.ones(8, 8, dtype=torch.bool)}, "got both"),
]


@pytest.mark.parametrize(("attack", "settings", "message"), SETTINGS)
def test_settings_that_mean_nothing_are_refused(attack, settings, message):
    with pytest.raises(ValueError, match=message):
        attack(**settings)


def test_bad_images_labels_and_targets(digits):
    network, images = digits
    x, labels = images.images[:3], images.labels[:3]
    attack = SparseSmooth(**QUICK)
    broken = x.clone()
    broken[1, 0, 2, 2] = float("nan")
    cases = [
        ((network, broken, labels), "images must be finite, got 1 NaN"),
        ((network, x * 255, labels), r"images must be within the bounds \(0, 1\), got values from 0 to 255"),
        ((network, x[0], labels), r"images must be a batch \(N, C, H, W\)"),
        ((network, x, labels, labels), "a target must differ from the label; they are equal for images"),
        ((network, x, labels, torch.tensor([10, 1, 1])), "targets must be from 0 to 9, got"),
        ((network, x, labels[:2]), "labels must be one number or one for each of 3 images"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            attack(*arguments)
    for wrong in (labels.float(), None, "3"):
        with pytest.raises(TypeError, match="labels must be whole numbers"):
            attack(network, x, wrong)
    with pytest.raises(ValueError, match="one for all or one for each of 3"):
        PixelSupport(mask=torch.ones(2, 1, 8, 8, dtype=torch.bool))(network, x, labels)
    with torch.inference_mode():
        assert len(attack(network, x * 1.0, labels)) == 3
    with pytest.raises(ValueError, match="training mode"):
        attack(zoo.pretrained("digits").float().train(), x, labels)
    with pytest.raises(ValueError, match="give targets="):
        Targeted()(network, x, labels)
    with pytest.raises(ValueError, match="no pixel that may change"):
        PixelSupport(mask=torch.zeros(8, 8, dtype=torch.bool))(network, x, labels)
    with pytest.raises(ValueError, match="must broadcast"):
        PixelSupport(mask=torch.ones(7, 8, dtype=torch.bool))(network, x, labels)
    with pytest.raises(TypeError, match="boolean tensor"):
        PixelSupport(mask=torch.ones(8, 8))
    just_outside = x.clone()
    just_outside[0, 0, 0, 0] = -5e-7
    assert len(attack(network, just_outside, labels)) == 3
    with pytest.raises(MemoryError):
        SparseSmooth(**QUICK, memory_budget=1000)(network, x, labels)


def test_the_users_preprocessing_keeps_its_mode():
    torch.manual_seed(0)
    images = torch.rand(2, 1, 4, 4)
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3)).eval()
    preprocessing = nn.Sequential(nn.Dropout(0.5))
    labels = network(images).argmax(1)
    nm.attacks.SparseSmooth(iterations=2, polish=0, samples=4, preprocessing=preprocessing)(network, images, labels)
    assert preprocessing.training
    assert preprocessing[0].training
