"""Blocks of pairs: each pair once, nothing but rounding depends on how they are cut, and what is not differentiable."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import netmoments as nm
from netmoments.covariances import square_root
from netmoments.normal import distribution
from netmoments.relu.bivariate import (
    Units,
    active,
    dead,
    deep_layers,
    nonlinear_part,
    noticeable,
    saturation,
    units_of,
)
from netmoments.relu.covariance import layer_covariance, mirror_
from netmoments.relu.tiles import (
    Tile,
    chunks,
    height_root,
    tail_excess,
    tail_nonlinear_part,
    tail_sums,
    tile_elements,
    triangle,
)
from tests.closeness import assert_close, assert_within_standard_errors
from tests.fuzz.oracle import pair
from tests.reference.bivariate_integrals import hard_points
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


TAIL_POINTS = list(itertools.product((-4.0, -7.0, -13.0, -36.0), (0.0, -0.03, -1.0, 3.0), (-0.9, 0.05, 0.6, 0.97, 1.0)))


def test_tails_to_forty_digits():
    """J to 1e-13 of itself and D up to |ρ| = 0.99; pairs of one dead unit and one of any kind."""
    places = [(h, h + more, rho) for h, more, rho in TAIL_POINTS[::3]] + [(-7.0, 7.0, -0.6), (-9.0, 0.0, 0.5)]
    h, k, rho = torch.tensor(places, dtype=torch.float64).T
    exact = [pair(*place) for place in places]
    height = height_root(h, k).square()
    assert_close(tail_nonlinear_part(h, k, rho) * height, [float(x.nonlinear) for x in exact], rtol=1e-13)
    moderate = rho.abs() < 0.99
    excess = torch.tensor([float(x.excess) for x in exact], dtype=torch.float64)
    assert_close((tail_excess(h, k, rho) * height)[moderate], excess[moderate], rtol=1e-13)
    assert_close(tail_excess(h, k, rho) * height, excess, rtol=1e-8)
    sums = tail_sums(h, k, rho)
    assert_close(sums.nonlinear, tail_nonlinear_part(h, k, rho), rtol=1e-14)
    assert_close(sums.excess, tail_excess(h, k, rho), rtol=1e-14)


def test_the_rule_of_the_tails_serves_the_middle_too():
    h, k, rho = (torch.tensor(x) for x in hard_points(200))
    height = height_root(h, k).square()
    assert_close(tail_nonlinear_part(h, k, rho) * height, nonlinear_part(h, k, rho), atol=3e-15)


def test_derivatives_in_the_tails_are_those_of_the_integral():
    places = [(h, h + more, rho) for h, more, rho in TAIL_POINTS if abs(rho) < 1 and h > -30]
    h, k, rho = torch.tensor(places, dtype=torch.float64).T
    step = 1e-4
    sums, height = tail_sums(h, k, rho), height_root(h, k).square()

    def moved(in_h: float, in_k: float) -> Tensor:
        return tail_nonlinear_part(h + in_h, k + in_k, rho) * height_root(h + in_h, k + in_k).square() / height

    # a central difference is off by step²/6 of a third derivative, h² times the first at most
    scale = h.square() * step**2 * (sums.by_first.abs() + sums.by_second.abs()) + 1e-10 * sums.nonlinear
    assert bool((((moved(step, 0) - moved(-step, 0)) / (2 * step) - sums.by_first).abs() <= scale).all())
    assert bool((((moved(0, step) - moved(0, -step)) / (2 * step) - sums.by_second).abs() <= scale).all())


def deep_layer(units: int, depth: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Units that are all dead, about `depth` deviations below 0, strongly and weakly correlated."""
    mean, matrix = random_layer(units, seed=3, rank=3)
    s = matrix.diagonal().sqrt()
    return (-depth * s + 0.3 * mean * s).to(dtype), matrix.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("depth", [3.5, 7.0, 12.0])
def test_dead_layers_keep_relative_accuracy(dtype, depth):
    mean, matrix = deep_layer(5, depth, dtype)
    found = nm.relu_covariance(mean, matrix)
    s = matrix.double().diagonal().sqrt()
    for i, j in itertools.combinations(range(5), 2):
        scale = float(s[i] * s[j])
        exact = pair(*(mean.double() / s)[[i, j]].tolist(), float(matrix[i, j]) / scale)
        size = scale * float(abs(exact.separable) + exact.nonlinear)
        allowed = (1e-6 if dtype == torch.float32 else 1e-12) * size + torch.finfo(dtype).tiny
        assert abs(float(found[i, j]) - scale * float(exact.separable + exact.nonlinear)) <= allowed


def test_a_dead_layer_of_any_size_and_a_form_of_it_agree():
    """Above and below the size up to which all pairs are evaluated at once, and with a live image in the batch."""
    for units in (20, 200):
        mean, matrix = deep_layer(units, 9.0, torch.float64)
        means = torch.stack([mean, torch.zeros_like(mean)])
        weights = torch.randn(2, units, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        root = square_root(matrix)
        network = nm.AffineReluAffine(root, torch.zeros(units, dtype=torch.float64), weights, torch.zeros(2).double())
        for each, layer in zip(means, nm.relu_covariance(means, matrix.expand(2, -1, -1)), strict=True):
            network = nm.AffineReluAffine(root, each, weights, torch.zeros(2, dtype=torch.float64))
            noise = nm.Gaussian(torch.zeros(units, dtype=torch.float64), std=1.0)
            exact = weights @ layer @ weights.mT
            assert_close(network.covariance(noise), exact, atol=1e-12 * float(exact.diagonal().max()))
            again = layer_covariance(each[None], matrix[None])[0]
            assert_close(again, layer, atol=1e-12 * float(layer.diagonal().max()))


def test_gradients_of_dead_layers():
    mean, matrix = deep_layer(4, 6.5, torch.float64)
    size = nm.relu_covariance(mean, matrix).diagonal().max()

    def layer(mean: Tensor, matrix: Tensor) -> Tensor:
        return nm.relu_covariance(mean, 0.5 * (matrix + matrix.mT)) / size

    assert torch.autograd.gradcheck(layer, (mean.requires_grad_(), matrix.requires_grad_()), rtol=1e-4, atol=1e-7)

    def variance(A: Tensor, c1: Tensor, B: Tensor) -> Tensor:
        network = nm.AffineReluAffine(A, c1, B, torch.zeros(2, dtype=torch.float64))
        return network.variance(nm.Gaussian(torch.zeros(4, dtype=torch.float64), std=1.0)) / size

    weights = torch.tensor([[1.0, 2.0, -1.0, 0.5], [0.3, 0.0, 1.0, 1.0]], dtype=torch.float64)
    inputs = (square_root(matrix.detach() + 1e-3 * torch.eye(4)), mean.detach(), weights)
    assert torch.autograd.gradcheck(variance, tuple(x.clone().requires_grad_() for x in inputs), rtol=1e-4, atol=1e-7)


def test_tails_by_importance_sampling(generator):
    """A seeded sample of N(0, S) weighted to N(m, S), which plain sampling would never reach."""
    mean = torch.tensor([-5.0, -5.5], dtype=torch.float64)
    matrix = torch.tensor([[1.0, 0.6], [0.6, 1.2]], dtype=torch.float64)
    z = torch.randn(400_000, 2, dtype=torch.float64, generator=generator) @ torch.linalg.cholesky(matrix).mT
    inverse = torch.linalg.inv(matrix)
    weight = torch.exp(z @ inverse @ mean - 0.5 * mean @ inverse @ mean)
    products = weight * z.relu().prod(-1)
    error = products.std() / len(products) ** 0.5
    exact = nm.relu_covariance(mean, matrix)[0, 1] + nm.relu_mean(mean, matrix.diagonal().sqrt()).prod()
    assert_within_standard_errors(products.mean(), exact, error)


def test_which_layers_are_deep():
    h = torch.tensor([[-8.0, -8.0, 0.0], [-8.0, -9.0, -4.0], [40.0, -8.0, -8.0]], dtype=torch.float64)
    units = Units(h, torch.ones_like(h))
    assert deep_layers(units, None).tolist() == [False, True, False]
    weights = torch.tensor([[[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]]], dtype=torch.float64)
    assert deep_layers(units, weights).tolist() == [True, True, True]
    assert deep_layers(units, torch.ones_like(weights)).tolist() == [False, True, False]
    assert not bool(deep_layers(Units(h, torch.zeros_like(h)), None).any())
    assert bool(noticeable(units, None).all())
    deeper = Units(torch.tensor([[-8.0, -14.0, -16.0]], dtype=torch.float64), torch.ones(1, 3, dtype=torch.float64))
    assert noticeable(deeper, None).tolist() == [[True, True, False]]
    assert noticeable(deeper, torch.tensor([[[1.0, 1.0, 1e9]]]).double()).tolist() == [[True, True, True]]
    assert dead(units).tolist() == [[True, True, False], [True, True, True], [False, True, True]]


@pytest.mark.parametrize("units", [1, 7, 128, 300])
def test_the_lower_triangle_is_mirrored(units):
    square = torch.randn(2, units, units, generator=torch.Generator().manual_seed(0))
    lower = square.tril()
    mirrored = mirror_(square.clone())
    assert torch.equal(mirrored.tril(), lower)
    assert torch.equal(mirrored, mirrored.mT)
