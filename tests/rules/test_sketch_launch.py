"""When a layer of a sketch goes by the GPU's kernels, and how its work is split; the kernels' numbers are theirs."""

from __future__ import annotations

import pytest
import torch

from netmoments.relu.triton import kernels
from netmoments.rules import sketch_launch
from netmoments.rules.maximum import Largest
from netmoments.rules.one_number import one_kink, relu


def test_kernels_are_not_for_derivatives_wide_windows_or_many_samples(monkeypatch):
    monkeypatch.setattr(kernels, "PRESENT", True)
    monkeypatch.setattr(kernels, "INTERPRETED", True)
    rule, mean, samples = relu(3, torch.zeros(())), torch.zeros(1, 3), torch.zeros(1, 4, 3)
    assert rule.has_kernels(mean, samples)
    assert not rule.has_kernels(mean.clone().requires_grad_(), samples)
    learned = one_kink(torch.zeros(3).requires_grad_(), torch.ones(3))
    assert not learned.has_kernels(mean, samples)
    assert not rule.has_kernels(mean, torch.zeros(1, sketch_launch.MOST_SAMPLES + 1, 3))
    narrow, wide = (Largest(torch.arange(width).reshape(1, width), with_zero=False) for width in (9, 16))
    assert narrow.has_kernels(torch.zeros(1, 9), torch.zeros(1, 4, 9))
    assert not wide.has_kernels(torch.zeros(1, 16), torch.zeros(1, 4, 16))
    monkeypatch.setattr(kernels, "PRESENT", False)
    assert not rule.has_kernels(mean, samples)


@pytest.mark.parametrize(("steps", "times"), [(1, 1), (7, 3), (5000, 1), (5000, 100), (4224, 1), (123_457, 11)])
def test_every_step_is_taken_once(steps, times):
    """All programs but the last take equally many steps, and there are enough programs if there is enough work."""
    each, programs = sketch_launch._split(steps, times)
    assert (programs - 1) * each < steps <= programs * each
    assert programs * times >= min(steps * times, sketch_launch.PROGRAMS) / 2


def test_sides_of_matrices_are_powers_of_two():
    assert [sketch_launch._power(number) for number in (1, 15, 16, 17, 64, 65)] == [16, 16, 16, 32, 64, 128]
