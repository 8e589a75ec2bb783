"""Estimates: their errors and intervals, when they are enough, when two agree, and how results are printed."""

import math
from dataclasses import replace

import pytest
import torch

import netmoments as nm
from netmoments.flips.result import (
    EntryResult,
    FlipEstimate,
    Tolerance,
    agree,
    described,
    half_width,
    interval,
    stacked,
    student_quantile,
    wilson,
)


def found(probability, high, route="importance", agreed=True):
    count = torch.tensor([probability], dtype=torch.float64)
    return nm.FlipProbability(
        probability=count, interval=torch.tensor([[0.5 * probability, high]], dtype=torch.float64),
        standard_error=0.1 * count, label=torch.tensor([3]), rival=torch.tensor([5 if probability else -1]),
        runs=torch.tensor([1_000_000]), route=[route], met=torch.tensor([agreed]), agreement=count,
        agreed=torch.tensor([agreed]), seconds=1.0,
    )  # fmt: skip


def test_one_in_words():
    assert described(found(1.2e-6, 2e-6), 0) == "1.2e-06, 95 % 6e-07 to 2e-06, 1,000,000 runs"
    assert described(found(0.0, 3e-6), 0) == "below 3e-06 after 1,000,000 runs"
    assert "exact" in described(found(1.0, 1.0, "exact"), 0)


def test_a_table_is_printed():
    lines = str(found(1.2e-6, 2e-6)).splitlines()
    assert "1.2e-06" in lines[2]
    assert "importance" in lines[2]
    assert "disagree" in str(found(1.2e-6, 2e-6, agreed=False))
    assert "< 3e-06" in str(found(0.0, 3e-6))
    assert "FlipProbability(1.2e-06" in repr(found(1.2e-6, 2e-6))


def test_many_rows_are_cut():
    values = torch.full((30,), 0.5, dtype=torch.float64)
    many = nm.FlipProbability(
        probability=values, interval=torch.stack([values, values], 1), standard_error=values, label=torch.zeros(30),
        rival=torch.ones(30), runs=torch.ones(30), route=["frequencies"] * 30, met=torch.ones(30).bool(),
        agreement=values, agreed=torch.ones(30).bool(), seconds=1.0,
    )  # fmt: skip
    assert str(many).splitlines()[-1] == "… 6 more inputs"
    assert "30 runs" in repr(many)


def test_classes_are_printed():
    shares = torch.tensor([[0.7, 0.3]], dtype=torch.float64)
    classes = nm.ClassProbabilities(
        probability=shares, interval=torch.stack([shares, shares], -1), standard_error=shares,
        runs=torch.tensor([100]), met=torch.tensor([True]), seconds=0.1,
    )  # fmt: skip
    assert "0: 0.7 (0.7 to 0.7)" in str(classes)
    unbatched = replace(classes, probability=classes.probability[0], interval=classes.interval[0])
    assert "0: 0.7 (0.7 to 0.7)" in str(unbatched)
    assert classes.winner.tolist() == [0]
    assert "2 classes" in repr(classes)


def test_values_are_stacked():
    assert stacked([1.0, 2.0], torch.Size((2, 1)), torch.device("cpu")).shape == (2, 1)


def test_what_is_enough():
    assert Tolerance(0.1).times_needed(1e-6, 1e-7) == pytest.approx(1)
    assert Tolerance(0.1).times_needed(1e-6, 2e-7) == pytest.approx(4)
    assert Tolerance(0.1, absolute=0.01).times_needed(1e-6, 0.01 / 1.959964) == pytest.approx(1)
    assert Tolerance(0.1, absolute=0.01).times_needed(1e-6, 1.0, half_width=0.02) == pytest.approx(4)
    assert Tolerance(0.1, absolute=0.01).times_needed(0.5, 0.025, half_width=0.05) == pytest.approx(0.25)
    assert Tolerance(0.1).times_needed(0.0, 0.0) > 1e6


@pytest.mark.parametrize(("freedom", "wanted"), [(4, 2.776), (10, 2.228), (30, 2.042), (1e9, 1.960)])
def test_quantiles_of_student(freedom, wanted):
    assert student_quantile(freedom) == pytest.approx(wanted, rel=0.005)


def test_half_of_an_interval():
    assert half_width(FlipEstimate(0.5, 0.005, 10_000)) == pytest.approx(1.96 * 0.005, rel=1e-3)


def test_an_interval_is_positive_and_below_one():
    low, high = interval(FlipEstimate(1e-6, 5e-7, 100))
    assert 0 < low < 1e-6 < high
    assert math.log(high / 1e-6) == pytest.approx(math.log(1e-6 / low), rel=1e-3)
    low, high = interval(FlipEstimate(0.99, 0.005, 100))
    assert 0 < low < 0.99 < high < 1
    assert interval(FlipEstimate(0.0, 0.01, 100))[0] == 0


def test_the_largest_sample_adds_to_the_error():
    assert FlipEstimate(1.0, 0.3, 10, largest_share=0.4).careful_error == pytest.approx(0.5)


def test_two_estimates_agree_or_not():
    assert agree(FlipEstimate(1e-6, 1e-7, 10), FlipEstimate(1.3e-6, 1e-7, 10))
    assert not agree(FlipEstimate(1e-6, 1e-7, 10), FlipEstimate(4e-6, 1e-7, 10))
    assert agree(FlipEstimate(0.0, 0.0, 10), FlipEstimate(0.0, 0.0, 10))


def test_where_they_disagree_the_interval_holds_both():
    one, two = FlipEstimate(1e-6, 1e-7, 10), FlipEstimate(4e-6, 1e-7, 10)
    low, high = EntryResult(one, two, False, "importance", torch.zeros(2), False).interval
    assert low < 1e-6 < 4e-6 < high
    low, high = EntryResult(one, two, True, "importance", torch.zeros(2), True).interval
    assert high < 4e-6


def test_frequencies_that_were_never_or_always_seen():
    assert wilson(0, 1000) == (0.0, 0.003)
    assert wilson(1000, 1000) == (0.997, 1.0)


def test_wilson_covers():
    """Of 2,000 frequencies of p = 0.03 in 400 samples, 95 % ± five standard errors (0.5 % each) are covered."""
    generator = torch.Generator().manual_seed(0)
    counts = (torch.rand(2000, 400, generator=generator) < 0.03).sum(1).tolist()
    covered = sum(low <= 0.03 <= high for low, high in (wilson(count, 400) for count in counts))
    assert abs(covered / 2000 - 0.95) < 0.025
