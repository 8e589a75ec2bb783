"""A study of noise on a CUDA device is the CPU's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

import netmoments as nm
from netmoments.data.images import LabelledImages
from netmoments.report.arguments import StudyConfig
from netmoments.report.noise_study import Study, study
from tests.gpu import NEEDS_CUDA, tf32_allowed

pytestmark = [pytest.mark.gpu, NEEDS_CUDA]


@pytest.fixture(autouse=True)
def _tf32() -> Iterator[None]:
    with tf32_allowed():
        yield


def test_a_study_is_the_same_as_on_the_cpu():
    images = torch.rand(12, 1, 8, 8, generator=torch.Generator().manual_seed(9))
    data = LabelledImages(images, torch.arange(12) % 10, tuple(map(str, range(12))), ())
    config = StudyConfig(0.1, tolerance=0.02, samples=2500, rare=3, seconds=300, attacks=0)
    here, there = (
        study(nm.zoo.pretrained("digits"), data, dataclasses.replace(config, device=torch.device(device)))
        for device in ("cpu", "cuda")
    )
    assert torch.equal(here.predicted, there.predicted)
    # other random numbers: within 5 errors of both, each a quarter of its interval
    error = torch.hypot(here.half_width, there.half_width) / 2
    assert bool(((here.flip - there.flip).abs() < 5 * error).all())
    assert bool(((here.scores.mean - there.scores.mean).abs() < 5 * torch.hypot(*mean_errors(here, there))).all())
    for one, other in zip(here.curve, there.curve, strict=True):
        assert abs(one.share - other.share) <= 5 * (one.high - one.low)


def mean_errors(*studies: Study) -> list[torch.Tensor]:
    return [found.scores.mean_error for found in studies]
