"""Remark 1 and Lemma 1: the distributions of max(x, 0) and max²(x, 0)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from netmoments.normal import density, distribution


def relu_atom(mean: Tensor, std: Tensor) -> Tensor:
    """Remark 1: the mass Q(μ/σ) = P(x ≤ 0) that max(x, 0) has at 0."""
    return distribution(-mean / std)


def relu_density(y: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Remark 1: the density f_x(y) u(y) of max(x, 0) away from 0."""
    return torch.where(y > 0, density((y - mean) / std) / std, 0.0)


def relu_mean_zero_mean(std: Tensor) -> Tensor:
    """Remark 1: E max(x, 0) = σ/√(2π) for μ = 0."""
    return std / math.sqrt(2 * math.pi)


def squared_relu_density(y: Tensor, std: Tensor) -> Tensor:
    """Lemma 1: the density f_x(√y)/(2√y) of max²(x, 0) away from 0, for μ = 0. The mass at 0 is 1/2."""
    root = torch.sqrt(torch.where(y > 0, y, 1.0))
    return torch.where(y > 0, density(root / std) / (2 * std * root), 0.0)


def squared_relu_mean(std: Tensor) -> Tensor:
    """Lemma 1: E max²(x, 0) = σ²/2 for μ = 0."""
    return 0.5 * std * std
