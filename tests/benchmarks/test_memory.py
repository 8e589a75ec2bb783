"""Memory stays flat: measured as the peak of a process of its own."""

from __future__ import annotations

import sys

import pytest

from benchmarks.memory import in_a_process_of_its_own

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")


@pytest.mark.parametrize("noise", ["isotropic", "diagonal", "dense"])
def test_variance_of_a_batch(noise):
    """p = 2000, batch 4, float64: one p×p matrix alone would be 30 MiB an image, the paper's way 1.5 GiB for one."""
    assert in_a_process_of_its_own("exact", 2000, 784, 4, "float64", noise) <= 100


@pytest.mark.slow
def test_variance_of_a_wide_layer():
    """p = 20,000: the p×p matrix would be 3.2 GB."""
    assert in_a_process_of_its_own("exact", 20_000, 784, 1, "float64") <= 1024
