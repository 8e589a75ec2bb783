"""The GPU's kernels: chosen where they can run, with tables that have enough and hardly more."""

from __future__ import annotations

import pytest
import torch

import netmoments as nm
from netmoments.relu.quadrature_rules import NONLINEAR_RULES, nonlinear_limits
from netmoments.relu.triton import forward_kernels, kernels, launch

DTYPES = [torch.float32, torch.float64]


def test_without_triton_or_a_gpu_the_plain_version_is_used(monkeypatch):
    tensor = torch.zeros(1)
    monkeypatch.setattr(kernels, "INTERPRETED", False)
    assert not launch.available(tensor)
    monkeypatch.setattr(kernels, "PRESENT", False)
    assert not launch.available(tensor)
    monkeypatch.setattr(kernels, "INTERPRETED", True)
    assert not launch.available(tensor)
    monkeypatch.setattr(kernels, "PRESENT", True)
    assert launch.available(tensor)


def test_the_kernels_are_called_where_they_can_run(monkeypatch):
    called = []
    monkeypatch.setattr(launch, "ENABLED", True)
    monkeypatch.setattr(launch, "available", lambda tensor: True)
    monkeypatch.setattr(launch, "relu_covariance", lambda mean, *rest: called.append(1) or torch.zeros(1, 3, 3))
    nm.relu_covariance(torch.zeros(3), torch.eye(3))
    assert called == [1]


def lookup_rows(dtype: torch.dtype, strong: bool) -> list[list[int]]:
    at = launch.tables(dtype, torch.device("cpu"))
    return (at.strong if strong else at.weak).tolist()


def correlations_between(low: float, high: float, dtype: torch.dtype) -> list[float]:
    """A fine grid, and numbers at, right below and right above the parts' ends, as the dtype has them."""
    ends = torch.arange(1, 512, dtype=dtype) / 512
    every = torch.cat(
        (
            torch.linspace(low, high, 20_011, dtype=dtype),
            ends,
            torch.nextafter(ends, torch.zeros_like(ends)),
            torch.nextafter(ends, torch.ones_like(ends)),
        )
    ).double()
    return every[(every >= low) & (every <= high)].tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_series_terms_looked_up_are_enough_and_hardly_more(dtype):
    at, rows = launch.tables(dtype, torch.device("cpu")), lookup_rows(dtype, strong=False)
    limits, at_once = nonlinear_limits(launch.TERMS[dtype], dtype), int(kernels.AT_ONCE)

    def rounded_up(terms: int) -> int:
        return -(-terms // at_once) * at_once

    for rho in correlations_between(0.0, at.series_reach, dtype):
        terms = rows[int(rho * int(forward_kernels.BINS))][0]
        assert limits[terms] >= rho
        assert terms in range(0, launch.TERMS[dtype] + 1, at_once)
        beyond = min(rho + 1 / int(forward_kernels.BINS), at.series_reach)
        assert terms <= rounded_up(next(n for n, limit in enumerate(limits) if limit >= beyond))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strong", [False, True])
def test_the_rules_looked_up_have_nodes_enough_and_hardly_more(strong, dtype):
    at, rows, rules = (
        launch.tables(dtype, torch.device("cpu")),
        lookup_rows(dtype, strong),
        NONLINEAR_RULES[dtype],
    )
    reach = 1.0 if strong else at.reach
    starts = at.rules.tolist()
    for rho in correlations_between(0.0, reach, dtype):
        _, start, stop = rows[int(rho * int(forward_kernels.BINS))]
        rule = rules[starts.index(start)]
        assert stop - start == len(rule.nodes)
        assert rule.limit >= rho
        beyond = min(rho + 1 / int(forward_kernels.BINS), reach)
        assert len(rule.nodes) <= next(len(other.nodes) for other in rules if other.limit >= beyond)
