"""What the GPU's kernels look up: coefficients, nodes, and how many of either are enough."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from netmoments.normal import gauss_legendre
from netmoments.relu import forward_kernels, kernels
from netmoments.relu.rules import NONLINEAR_RULES, Rule
from netmoments.relu.series import excess_limits, nonlinear_limits, recurrence

TERMS = {torch.float32: 24, torch.float64: 80}
"""Terms of the series at most, to be had where nodes cost more."""

CHEAP = {torch.float32: 12, torch.float64: 80}
"""Up to this many terms are cheaper than the nodes that would do as well."""

MODERATE = {torch.float32: 0.87, torch.float64: 0.0}
"""Up to this correlation a whole tile is evaluated by the nodes that its largest one needs."""

OWEN_NODES = {torch.float32: 7, torch.float64: 14}
"""As many as `normal.owen_t` takes."""


class Tables(NamedTuple):
    """The constants of the kernels on a device: rules for the nodes, limits for the series."""

    steps: Tensor
    nodes: Tensor
    rules: Tensor
    node_limits: Tensor
    series_limits: Tensor
    excess_limits: Tensor
    owen: Tensor
    weak: Tensor
    """What is `enough`, by correlation, up to `reach`."""
    strong: Tensor
    """What is `enough`, by correlation."""
    series_reach: float
    """Up to this correlation the series is cheaper than nodes."""
    reach: float
    """Beyond this correlation pairs are evaluated apart from the others."""
    last_reach: float
    excess_reach: float


@cache
def tables(dtype: torch.dtype, device: torch.device) -> Tables:
    """Made once for each dtype and device."""
    terms, rules = TERMS[dtype], NONLINEAR_RULES[dtype]
    series, excess = nonlinear_limits(terms, dtype), excess_limits(terms, dtype)
    starts = [0]
    for rule in rules:
        starts.append(starts[-1] + rule.cost)
    owen = [(u * u, w) for u, w in zip(*gauss_legendre(OWEN_NODES[dtype]), strict=True)]
    series_reach = series[CHEAP[dtype]]
    reach = max(series_reach, MODERATE[dtype])
    with torch.inference_mode(False):
        return Tables(
            steps=torch.tensor(recurrence(terms), dtype=torch.float64, device=device),
            nodes=torch.tensor([(u, w * v, v) for rule in rules for u, w, v in rule.nodes], dtype=dtype, device=device),
            rules=torch.tensor(starts, dtype=torch.int32, device=device),
            node_limits=_padded([rule.limit for rule in rules[:-1]], dtype, device),
            series_limits=_padded(series[:-1], dtype, device),
            excess_limits=_padded(excess[:-1], dtype, device),
            owen=torch.tensor(owen, dtype=dtype, device=device),
            weak=torch.tensor(enough(series, rules, series_reach, reach), dtype=torch.int32, device=device),
            strong=torch.tensor(enough(series, rules, series_reach, 1.0), dtype=torch.int32, device=device),
            series_reach=series_reach,
            reach=reach,
            last_reach=series[-1],
            excess_reach=excess[-1],
        )


def enough(
    series: Sequence[float], rules: Sequence[Rule], series_reach: float, reach: float
) -> list[tuple[int, int, int]]:
    """Terms of the series, first and last node of a rule, good for all correlations of a part of [0, 1].

    A row for each of the parts, and one for 1 itself. Correlations are cut to `series_reach`, and for rules to `reach`.
    """
    parts, at_once = int(forward_kernels.BINS), int(kernels.AT_ONCE)
    rows = []
    for part in range(parts + 1):
        largest = min((part + 1) / parts, reach)
        terms = sum(limit < min(largest, series_reach) for limit in series[:-1])
        nth = sum(rule.limit < largest for rule in rules[:-1])
        start = sum(rule.cost for rule in rules[:nth])
        rows.append((-(-terms // at_once) * at_once, start, start + rules[nth].cost))
    return rows


def _padded(limits: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """To a power of two, with a limit that no correlation exceeds."""
    length = 1 << (len(limits) - 1).bit_length()
    return torch.tensor([*limits, *[2.0] * (length - len(limits))], dtype=dtype, device=device)
