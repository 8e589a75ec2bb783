"""Lemma 2: the extended Price theorem, both sides of it computed."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from netmoments.checks import require_float_tensors


def price_theorem_sides(
    function: Callable[..., Tensor], mean: Tensor, covariance: Tensor, nodes: int = 24
) -> tuple[Tensor, Tensor]:
    """Both sides of Lemma 2 for a smooth Ψ(x₁, …, x_p) of an even number p of jointly Gaussian variables:

        ∂^{p/2} E[Ψ(x)] / ∂σ₁₂ ∂σ₃₄ …  =  E[∂^p Ψ(x) / ∂x₁ … ∂x_p].

    Expectations are Gauss–Hermite sums with `nodes` points a dimension, through the Cholesky factor of the covariance;
    derivatives are exact. The left side differentiates the sum in the covariances, the right side the function.
    """
    mean, covariance = require_float_tensors("price_theorem_sides", mean=mean, covariance=covariance)
    size = mean.numel()
    if mean.dim() != 1 or size % 2 or covariance.shape != (size, size):
        raise ValueError(
            "price_theorem_sides: mean must have shape (p,) with p even and covariance (p, p), "
            f"got {tuple(mean.shape)} and {tuple(covariance.shape)}"
        )
    points, weights = _gauss_hermite_grid(size, nodes, mean)
    left = _derivative_of_expectation(function, mean, covariance, points, weights)
    x = mean + points @ torch.linalg.cholesky(covariance).mT
    return left, (weights * _mixed_derivative(function, x)).sum()


def _derivative_of_expectation(
    function: Callable[..., Tensor], mean: Tensor, covariance: Tensor, points: Tensor, weights: Tensor
) -> Tensor:
    shifts = [torch.zeros((), dtype=mean.dtype, device=mean.device, requires_grad=True) for _ in mean[::2]]
    moved = covariance.detach().clone()
    for pair, shift in enumerate(shifts):
        step = torch.zeros_like(covariance)
        step[2 * pair, 2 * pair + 1] = step[2 * pair + 1, 2 * pair] = 1
        moved = moved + shift * step
    x = mean.detach() + points @ torch.linalg.cholesky(moved).mT
    value = (weights * function(*x.unbind(-1))).sum()
    for shift in shifts:
        (value,) = torch.autograd.grad(value, shift, create_graph=True)
    return value.detach()


def _mixed_derivative(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    coordinates = [column.clone().requires_grad_() for column in x.detach().unbind(-1)]
    value = function(*coordinates)
    for coordinate in coordinates:
        (value,) = torch.autograd.grad(value.sum(), coordinate, create_graph=True)
    return value.detach()


def _gauss_hermite_grid(size: int, nodes: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Points (nodes^size, size) and weights with Σ w f(point) = E f(N(0, I)) for polynomials of degree 2·nodes − 1."""
    line, weight = np.polynomial.hermite_e.hermegauss(nodes)
    points = torch.tensor(list(itertools.product(line, repeat=size)), dtype=like.dtype, device=like.device)
    weights = torch.ones((), dtype=like.dtype, device=like.device)
    for _ in range(size):
        weights = torch.outer(weights.flatten(), weights.new_tensor(weight / weight.sum())).flatten()
    return points, weights
