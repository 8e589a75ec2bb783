"""B N Bᵀ without N: the forms of pairs are products with what the covariance adds to its linear part."""

from __future__ import annotations

import pytest
import torch

import netmoments as nm
from netmoments.normal import distribution
from netmoments.relu.quadratic_form import pairs_form, pairs_form_diagonal
from tests.closeness import assert_close
from tests.relu.layers import random_layer


@pytest.mark.parametrize("memory_budget", [2**16, 2**24])
def test_forms_of_pairs_are_what_the_covariance_adds_to_its_linear_part(memory_budget):
    """N = K − Cov(z) Φ(h) Φ(k) between different units, from factors of Cov(z), in strips or at once."""
    mean, matrix = random_layer(70, seed=3, rank=9, batch=(2,))
    factor = torch.linalg.eigh(matrix)
    left = factor.eigenvectors * factor.eigenvalues.clamp(min=0).sqrt().unsqueeze(-2)
    matrix = left @ left.mT
    variance = matrix.diagonal(dim1=1, dim2=2)
    weights = torch.randn(1, 3, 70, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights[..., 9] = 0  # a unit that B never uses
    gate = distribution(mean / variance.sqrt())
    linear = gate.unsqueeze(-1) * matrix * gate.unsqueeze(-2)
    between = (nm.relu_covariance(mean, matrix) - linear).diagonal_scatter(torch.zeros_like(mean), dim1=1, dim2=2)
    exact = weights @ between @ weights.mT
    # 4,900 entries of order 0.1 with errors of a few roundings each
    assert_close(pairs_form(mean, variance, left, left, weights, memory_budget), exact, atol=1e-12)
    diagonal = pairs_form_diagonal(mean, variance, left, left, weights, memory_budget)
    assert_close(diagonal, exact.diagonal(dim1=1, dim2=2), atol=1e-12)
