"""A study of noise on a CUDA device is the CPU's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import netmoments as nm
from netmoments.data.images import LabelledImages
from netmoments.report.noise_study import StudyConfig, study
from tests.gpu import NEEDS_CUDA, tf32_allowed

pytestmark = [pytest.mark.gpu, NEEDS_CUDA]


@pytest.fixture(autouse=True)
def _tf32() -> Iterator[None]:
    with tf32_allowed():
        yield


def test_a_study_is_the_same_as_on_the_cpu():
    images = torch.rand(12, 1, 8, 8, generator=torch.Generator().manual_seed(9))
    data = LabelledImages(images, torch.arange(12) % 10, tuple(map(str, range(12))), ())
    found = {
        device: study(
            nm.zoo.pretrained("digits"), data, StudyConfig(0.1, check=2, samples=500, device=torch.device(device))
        )
        for device in ("cpu", "cuda")
    }
    torch.testing.assert_close(found["cuda"].flips, found["cpu"].flips, rtol=1e-3, atol=1e-9)
    for here, there in zip(found["cpu"].checks, found["cuda"].checks, strict=True):
        # other random numbers: over 5 errors of √2·0.022
        torch.testing.assert_close(here.flips, there.flips, rtol=0, atol=0.15)
