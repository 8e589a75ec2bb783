"""What controls explain, on a function whose parts are known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from benchmarks.controls import explained, products, shares, triples


class KnownParts(nn.Module):
    """y = 3x₁ + x₂ + x₁² + x₃²: under N(0, I) its odd part has variance 10, its even part 4, half of it along x₃."""

    def forward(self, x: Tensor) -> Tensor:
        return (3 * x[:, :1] + x[:, 1:2] + x[:, :1] ** 2 + x[:, 2:] ** 2).repeat(1, 2)


def test_parts_of_a_known_function():
    row = shares(KnownParts(), torch.zeros(3), 1.0, 4000)
    assert row["even"] == pytest.approx(4 / 14, abs=0.03)  # kurtosis of x²: four standard errors of 4,000 pairs
    assert row["odd: 16"] > 0.9
    assert row["64"] > row["odd: 16"] - 0.01
    assert row["leading 16"] == pytest.approx(1, abs=1e-6)  # three directions, and a quadratic


def test_nothing_is_explained_by_noise():
    """c coefficients fitted to N values that do not depend on them cost about c/N of what is left, and never help."""
    torch.manual_seed(0)
    controls, targets = torch.randn(4000, 20).double(), torch.randn(4000, 3).double()
    assert -0.03 < explained(controls, targets) < 0
    assert explained(targets[:, :1], targets[:, :1]) == pytest.approx(1, abs=1e-8)


def test_products_are_all_of_them():
    lines = torch.tensor([[2.0, 3.0, 5.0]])
    assert sorted(products(lines)[0].tolist()) == [4, 6, 9, 10, 15, 25]
    assert triples(lines).shape == (1, 10)
