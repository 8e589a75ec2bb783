"""Tests on a CUDA device: when they are skipped, and the settings of a user that they run under."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@contextmanager
def tf32_allowed() -> Iterator[None]:
    """The user allows TF32 everywhere; the library must not use it."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
