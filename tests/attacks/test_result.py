"""What an attack found: measures of the noise, and images that were not attacked."""

from __future__ import annotations

import torch

from netmoments.attacks.sparse_smooth import SparseSmooth
from tests.attacks.problems import QUICK


def test_what_the_result_holds(confident):
    mu = confident.mu.flatten(1)
    torch.testing.assert_close(confident.l1, mu.abs().sum(1))
    torch.testing.assert_close(confident.l2, (mu**2).sum(1).sqrt())
    torch.testing.assert_close(confident.linf, mu.abs().amax(1))
    assert bool(((confident.gap >= 0) & (confident.gap < 0.5)).all())
    assert bool(((confident.ssim > 0) & (confident.ssim < 1)).all())
    assert bool((confident.towards != confident.labels).all())
    assert bool((confident.answers != confident.labels).all())
    records = confident.records()
    assert len(records) == 12
    assert all(value is None or value == value for record in records for value in record.values())  # no NaN
    assert "12 images" in repr(confident)
    noise = confident.noise
    assert noise.mean.shape == confident.images.shape


def test_one_target_for_all_and_images_already_wrong_are_skipped(digits):
    network, images = digits
    labels = images.labels.clone()
    labels[3] = (labels[3] + 1) % 10
    target = next(k for k in range(10) if k not in labels.tolist()[:5])
    result = SparseSmooth(**QUICK)(network, images.images[:5], labels[:5], target)
    assert result.places.tolist() == [0, 1, 2, 4]
    assert [s.place for s in result.skipped] == [3]
    assert result.skipped[0].predicted == int(images.labels[3])
    nothing = SparseSmooth(**QUICK)(network, images.images[3:4], labels[3:4])
    assert len(nothing) == 0
    assert nothing.records() == []
    assert "nothing attacked" in repr(nothing)
