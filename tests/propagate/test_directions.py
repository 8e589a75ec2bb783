"""Directions of the noise: colours, the layout of rows, inner products of quadratic parts from some directions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from netmoments.propagate.directions import (
    Directions,
    FactorLayout,
    as_matrices,
    as_rows,
    colours,
    inner_product_weights,
    random_normals,
    random_signs,
    signs_of_colours,
)
from tests.closeness import assert_close, assert_within_standard_errors
from tests.propagate.small import normal, symmetric

CPU = torch.device("cpu")


def test_the_layout_puts_rows_one_after_the_other():
    layout = FactorLayout.of(rank=50, paired=4, signs=7, leading=3)
    assert [layout.quadratic, layout.turns] == [slice(50, 60), slice(67, 71)]
    assert layout.total == 71


@pytest.mark.parametrize(
    ("event", "apart"), [((1, 28, 28), 6), ((3, 32, 32), 4), ((1, 784), 48), ((784,), 48), ((60, 5, 5), 1)]
)
def test_numbers_of_one_colour_are_far_apart_in_one_channel(event, apart):
    colour = colours(event, math.prod(event), 48)
    assert colour.unique().tolist() == list(range(int(colour.max()) + 1))
    assert int(colour.max()) < 48
    colour = colour.reshape(event if len(event) > 1 else (1, *event))
    for dimension in range(1, colour.dim()):
        for step in range(1, min(apart, colour.shape[dimension])):
            length = colour.shape[dimension] - step
            assert not bool((colour.narrow(dimension, 0, length) == colour.narrow(dimension, step, length)).any())
    if len(colour) <= 48:
        assert not bool((colour[:1] == colour[1:]).any())


@pytest.mark.parametrize(("event", "rank"), [((7,), 7), ((1, 28, 28), 30), ((1, 28, 28), 800)])
def test_noise_that_is_not_one_number_a_pixel_takes_colours_in_turn(event, rank):
    assert torch.equal(colours(event, rank, 48), torch.arange(rank) % 48)


def test_numbers_with_a_colour_of_their_own_have_no_random_signs():
    first, second = signs_of_colours(colours((5,), 5, 48), torch.float64, CPU)
    assert torch.equal(first, torch.eye(5, dtype=torch.float64))
    assert torch.equal(second, first)


def test_sums_of_a_colour_give_the_inner_product_without_bias():
    """On average over random signs, also for colours with themselves, where one set of signs would mix in traces."""
    colour, runs = torch.arange(12) % 3, 20_000
    one, other = symmetric(2, 12) + torch.eye(12, dtype=torch.float64)
    signs = 2.0 * torch.randint(0, 2, (2, runs, 12, 1), generator=torch.Generator().manual_seed(1)) - 1
    first, second = torch.nn.functional.one_hot(colour) * signs.double()

    def along(matrix: Tensor) -> Tensor:
        return torch.diagonal_scatter(first.mT @ matrix @ first, (first * (matrix @ second)).sum(-2), dim1=-2, dim2=-1)

    found = (along(one) * along(other)).sum((1, 2))
    assert_within_standard_errors(found.mean(), (one * other).sum(), found.std() / math.sqrt(runs))


def test_leading_directions_have_no_chance_error():
    """FᵀT over random signs: exact where F is a sum of leading directions, without bias where it is not."""
    rank, colour, runs = 12, torch.arange(12) % 4, 2000
    layout = FactorLayout.of(rank, 6, 0, 2)
    leading = torch.linalg.qr(normal(1, rank, 2)).Q
    turns, linear = normal(1, 3, rank, seed=2), normal(1, 3, rank, seed=3)
    linear[:, :2] = normal(1, 2, 2, seed=4) @ leading.mT
    expected, products = linear @ turns.mT, []
    for seed in range(runs):
        signs = 2.0 * torch.randint(0, 2, (rank, 1), generator=torch.Generator().manual_seed(seed)) - 1
        coloured = torch.nn.functional.one_hot(colour) * signs.double()
        directions = Directions.of(layout, leading, (coloured, coloured), leading)
        factor = torch.zeros(1, 3, layout.total, dtype=torch.float64)
        factor[..., :rank], factor[..., layout.turns] = linear, directions.followed(turns)
        products.append(directions.half_turns(factor))
    found = torch.cat(products)
    assert_close(found[:, :2], expected[:, :2].expand(runs, -1, -1), rtol=1e-12, atol=1e-12)
    assert_within_standard_errors(found[:, 2].mean(0), expected[0, 2], found[:, 2].std(0) / math.sqrt(runs))


def test_products_of_quadratic_rows_are_half_the_inner_products():
    matrices = symmetric(5, 7)
    rows = as_rows(matrices)
    assert_close(rows @ rows.mT, 0.5 * torch.einsum("aij,bij->ab", matrices, matrices), rtol=1e-13, atol=1e-12)
    assert_close(as_matrices(rows, 7), matrices, rtol=1e-13)


@pytest.mark.parametrize("leading", [0, 3])
def test_some_directions_give_the_inner_product_without_bias(leading):
    """Over random bases beside the leading directions. The matrices have traces, which weights r/K would get wrong."""
    rank, paired, runs = 12, 7, 4000
    first, second = symmetric(2, rank) + torch.eye(rank, dtype=torch.float64)
    weights = inner_product_weights(rank, leading, paired, first)
    basis, upper = torch.linalg.qr(normal(runs, rank - leading, rank - leading, seed=1))
    turn = torch.eye(rank, dtype=torch.float64).repeat(runs, 1, 1)
    turn[:, leading:, leading:] = basis * upper.diagonal(dim1=1, dim2=2).sign().unsqueeze(1)
    one, other = ((turn.mT @ matrix @ turn)[:, :paired, :paired] for matrix in (first, second))
    found = (weights * one * other).sum((1, 2))
    assert_within_standard_errors(found.mean(), (first * second).sum(), found.std() / math.sqrt(runs))


def test_random_numbers_are_the_same_at_every_call():
    like = torch.zeros((), dtype=torch.float64)
    normals = random_normals(9, 4, like.dtype, like.device)
    assert normals.shape == (9, 4)
    assert torch.equal(normals, random_normals(9, 4, like.dtype, like.device))
    signs = random_signs(64, 10, 3, like)
    assert bool((signs.abs() == 1 / 8).all())
    assert torch.equal(signs, random_signs(64, 10, 3, like))
    assert not torch.equal(signs, random_signs(64, 10, 4, like))
