"""Blocks of pairs: each pair once, nothing but rounding depends on how they are cut, and what is not differentiable."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import netmoments as nm
from netmoments.normal import distribution
from netmoments.relu.bivariate import units_of
from netmoments.relu.tiles import Tile, active, chunks, saturation, tile_elements, triangle
from tests.closeness import assert_close
from tests.relu.layers import hard_layer, random_layer


@pytest.mark.parametrize("units", [1, 2, 7, 150])
@pytest.mark.parametrize("elements", [1, 30, 1000, 10**6])
def test_every_pair_is_in_one_tile(units, elements):
    seen = torch.zeros(units, units, dtype=torch.int64)
    for tile in triangle(units, elements):
        part = torch.ones_like(seen[tile.rows, tile.columns])
        assert part.numel() <= max(elements, units)
        seen[tile.rows, tile.columns] += tile.keep_lower_(part)
    assert torch.equal(seen, torch.ones_like(seen).tril(-1))


def test_a_tile_keeps_what_is_below_the_diagonal():
    whole = torch.ones(8, 8)
    for tile in (Tile(slice(3, 6), slice(0, 4)), Tile(slice(3, 6), slice(3, 6)), Tile(slice(6, 8), slice(0, 2))):
        kept = tile.keep_lower_(torch.ones(tile.rows.stop - tile.rows.start, tile.columns.stop - tile.columns.start))
        assert torch.equal(kept, whole.tril(-1)[tile.rows, tile.columns])


@pytest.mark.parametrize("elements", [1, 40, 10**6])
def test_chunks_hold_every_image_with_the_units_that_matter(elements):
    relevant = torch.tensor([[True, True, False, False], [False, True, False, False], [False] * 4, [True] * 4])
    met = torch.zeros_like(relevant)
    for chunk in chunks(relevant, 4, elements, shared=False):
        assert chunk.every_unit == (len(chunk.units) == 4)
        met[chunk.images, chunk.units] = True
    assert bool(met[relevant].all())
    together = [chunk.count for chunk in chunks(relevant[:1], 20, 1, shared=True)]
    assert together == [16, 4]


def test_a_chunk_picks_and_adds():
    relevant = torch.tensor([[True, False, True], [True, False, False]])
    (chunk,) = chunks(relevant, 2, 10**6, shared=False)
    values = torch.arange(6.0).reshape(2, 3)
    assert chunk.pick(values).tolist() == [[0.0, 2.0], [3.0, 5.0]]
    target = torch.zeros(1, 3)
    chunk.add(target, chunk.pick(values))
    assert target.tolist() == [[3.0, 0.0, 7.0]]
    square = torch.arange(9.0).reshape(1, 3, 3).repeat(2, 1, 1)
    assert chunk.block(square, slice(1, 2), slice(0, 2)).tolist() == [[[6.0, 8.0]]] * 2
    chunk.add_block(square, slice(1, 2), slice(0, 2), torch.ones(2, 1, 2))
    assert square[1].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0], [7.0, 7.0, 9.0]]


def test_certain_and_saturated_units_are_not_active():
    for dtype in (torch.float32, torch.float64):
        edge = saturation(dtype)
        mean = torch.tensor([[0.0, edge + 0.1, -edge - 0.1, edge - 0.1, 1.0]], dtype=dtype)
        variance = torch.tensor([[1.0, 1.0, 1.0, 1.0, 0.0]], dtype=dtype)
        assert active(units_of(mean, variance)).tolist() == [[True, False, False, True, False]]
    assert tile_elements(2**20, torch.float32) // 2 == tile_elements(2**20, torch.float64) > 2**20 // 8 // 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saturated_units_are_linear_or_dead_to_rounding(dtype):
    """The active set changes nothing beyond rounding: move units across its edge."""
    mean, matrix = random_layer(12, seed=9)
    s = matrix.diagonal().sqrt()
    edge = saturation(dtype)
    for height in (edge - 1e-3, edge + 1e-3, -edge - 1e-3):
        mean[::2] = height * s[::2]
        exact = nm.relu_covariance(mean, matrix)
        value = nm.relu_covariance(mean.to(dtype), matrix.to(dtype))
        assert_close(value / s.outer(s).to(dtype), exact / s.outer(s), atol=5e-7 if dtype == torch.float32 else 1e-15)


def test_pairs_with_a_saturated_unit_are_separable():
    mean, matrix = random_layer(12, seed=9)
    s = matrix.diagonal().sqrt()
    mean[::2] = -8.6 * s[::2]
    gate = distribution(mean / s)
    off = ~torch.eye(12, dtype=torch.bool)
    off[1::2, 1::2] = False
    assert_close(nm.relu_covariance(mean, matrix)[off], (matrix * gate.outer(gate))[off], atol=2e-16)


@pytest.mark.parametrize("memory_budget", [2**16, 2**20, None])
def test_tiles_and_batches_change_nothing(memory_budget):
    mean, matrix = random_layer(150, seed=10, batch=(3,))
    mean[1] *= 20  # most of the second image's units are saturated
    weight = torch.randn(3, 150, 150, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def evaluate(mean: Tensor, matrix: Tensor, weight: Tensor, budget: int | None) -> list[Tensor]:
        mean, matrix = mean.clone().requires_grad_(), matrix.clone().requires_grad_()
        value = nm.relu_covariance(mean, matrix, memory_budget=budget)
        return [value, *torch.autograd.grad((value * weight).sum(), (mean, matrix))]

    together = evaluate(mean, matrix, weight, memory_budget)
    for i in range(3):
        alone = evaluate(mean[i], matrix[i], weight[i], 2**30)
        for name, one, all_of in zip(("value", "by mean", "by matrix"), alone, together, strict=True):
            assert_close(all_of[i], one, atol=2e-13, what=f"{name} of image {i}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_unit_that_is_certain_in_one_image_only(dtype):
    mean, _, matrix = hard_layer(30, 5, dtype)
    together = nm.relu_covariance(mean, matrix)
    apart = torch.stack([nm.relu_covariance(m, s) for m, s in zip(mean, matrix, strict=True)])
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-6 if dtype == torch.float32 else 2e-14)


def test_what_is_not_available_says_so():
    mean, matrix = random_layer(3, seed=13)
    with pytest.raises(RuntimeError, match=r"forward-mode .* use reverse mode"):
        torch.func.jacfwd(nm.relu_covariance)(mean, matrix)
    mean.requires_grad_()
    (gradient,) = torch.autograd.grad(nm.relu_covariance(mean, matrix).sum(), mean, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives"):
        gradient.sum().backward()
