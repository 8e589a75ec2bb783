"""The embedded digits network, twelve of its images, and noise that fools it on them."""

from __future__ import annotations

import pytest
from torch import nn

from netmoments import data
from netmoments.attacks.result import AttackResult
from netmoments.attacks.sparse_smooth import SparseSmooth
from netmoments.network import zoo


@pytest.fixture(scope="session")
def digits() -> tuple[nn.Module, data.LabelledImages]:
    return zoo.pretrained("digits").float(), data.load("digits").first(12)


@pytest.fixture(scope="session")
def confident(digits) -> AttackResult:
    network, images = digits
    return SparseSmooth(samples=400)(network, images.images, images.labels)
