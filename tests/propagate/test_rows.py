"""Covariances as rows: how they pass layers, with third cumulants and without, and the worth of leading directions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from netmoments.covariances import Isotropic
from netmoments.propagate import rows as rows_module
from netmoments.propagate.directions import FactorLayout
from netmoments.propagate.rows import (
    Joint,
    Sums,
    carried,
    directions_for,
    layout_for,
    mixed_rows,
    mixed_sums,
    mixed_variance,
    need_of,
    scored_directions,
)
from netmoments.rules.base import Local
from tests.closeness import assert_close
from tests.networks import seeded
from tests.propagate.small import SMALL, image, isotropic, normal, plan_for, sampled, symmetric


def by_rows(network: nn.Module, x: Tensor, std: float, skewed: bool = True) -> tuple[Tensor, Tensor]:
    """Means (d,) and covariances (d, d) of all scores."""
    outputs = torch.arange(network(x).shape[1]).unsqueeze(0)
    mean, covariances = carried(plan_for(network, x), x, isotropic(std, x), outputs, skewed)
    return mean[0], covariances[0]


@pytest.mark.parametrize("name", ["residual", "2×2 pools", "leaky"])
def test_within_stated_bounds(name):
    """At a noise where the closure is off by less than 0.01 deviations and 2 % of a variance."""
    make, shape = SMALL[name]
    network, x = seeded(make), image(*shape)
    with torch.no_grad():
        mean, covariance = by_rows(network, x, 0.1)
    reference = sampled(network, x, 0.1, 100_000, seed=4)
    deviation = reference.variance.sqrt()
    slack = 5 * reference.mean_standard_error / deviation
    assert bool(((mean - reference.mean).abs() / deviation < 0.01 + slack).all())
    error = (covariance.diagonal() - reference.variance).abs() / reference.variance
    assert bool((error < 0.02 + 5 * reference.variance_standard_error / reference.variance).all()), error


@pytest.mark.parametrize("name", ["residual", "leaky"])
def test_third_cumulants_make_it_tighter(name):
    make, shape = SMALL[name]
    network, x = seeded(make), image(*shape)
    std = 0.5
    reference = sampled(network, x, std, 100_000, seed=4)
    with torch.no_grad():
        variances = [by_rows(network, x, std, skewed)[1].diagonal() for skewed in (True, False)]
    errors = [float(((found - reference.variance) / reference.variance).abs().max()) for found in variances]
    assert errors[0] < 0.6 * errors[1]


@torch.no_grad()
def test_corrections_that_are_not_small_are_left_out(monkeypatch):
    """The image with much noise is carried as Gaussian, its neighbour with little as it would be alone."""
    make, shape = SMALL["residual"]
    network, x = seeded(make), image(*shape).expand(2, *shape)
    plan, outputs = plan_for(network, x[:1]), torch.arange(2).expand(2, 2)
    noise = Isotropic(torch.tensor([0.01, 4.0], dtype=torch.float64), x[0].numel())
    corrected, gaussian = (carried(plan, x, noise, outputs, skewed) for skewed in (True, False))
    little, much = rows_module._carried(plan, x, noise, outputs, True)[2].tolist()
    assert 0 < little < much
    monkeypatch.setattr(rows_module, "MOST_TURNED", (little + much) / 2)
    found = carried(plan, x, noise, outputs, True)
    for part, expected, plain in zip(found, corrected, gaussian, strict=True):
        assert_close(part[0], expected[0], rtol=1e-12)
        assert_close(part[1], plain[1], rtol=1e-9)
    assert not torch.allclose(corrected[1][1], gaussian[1][1], rtol=1e-3)


def test_layers_lose_no_variance_on_the_way():
    """The variance of the third layer's input, summed over its units, of which `mixed_rows` are 7 %.

    What is still off are effects of second order in the cumulants, and the 0.3 % that 20,000 samples cannot tell.
    """
    make, shape = SMALL["2×2 pools"]
    network, x = seeded(make), image(*shape)
    plan, std = plan_for(network, x), 1.0
    samples = x + std * normal(20_000, *shape, seed=1)
    with torch.no_grad():
        image_factor = isotropic(std, x).root().mT.expand(1, -1, -1)
        joint = Joint(torch.zeros(1), {plan.image: x.flatten(1)}, {plan.image: image_factor})
        directions = directions_for(plan, joint.means, joint.factors[plan.image], torch.zeros(1, 1, dtype=torch.int64))
        sampled_values = {plan.image: samples.flatten(1)}
        for place, stage in enumerate(plan.stages[:-1]):
            rows_module._through(joint, plan, place, directions, True)
            z = stage.before.values(sampled_values)
            sampled_values[stage.output] = stage.rule.values(stage.rule.gathered(z))
        last = plan.stages[-1].before
        factor = rows_module._factor_after(joint, last, directions.layout)
        sampled_variance = last.values(sampled_values).var(0)
    half_turns = directions.half_turns(factor.mT).diagonal(dim1=-2, dim2=-1)
    variance = factor.square().sum(1) + 2 * half_turns
    assert float(variance.sum() / sampled_variance.sum()) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("name", ["2×2 pools", "residual"])
def test_sums_of_an_input_are_sums_of_its_windows(name):
    """Formed for a layer's input and then gathered, they equal sums of each window's own factor."""
    make, shape = SMALL[name]
    network, x = seeded(make), image(*shape)
    plan = plan_for(network, x)
    with torch.no_grad():
        root = isotropic(0.3, x).root().mT.expand(1, -1, -1)
        directions = directions_for(plan, {plan.image: x.flatten(1)}, root, torch.zeros(1, 1, dtype=torch.int64))
    layout = directions.layout
    for stage in plan.stages:
        factor = normal(1, layout.total, stage.before.size, seed=5)
        sums, windows = Sums.of(directions, stage.rule, factor), stage.rule.rows_at_windows(factor)
        assert_close(sums.followed, directions.followed(windows[..., : layout.rank]), rtol=1e-12, atol=1e-12)
        assert_close(sums.others, directions.with_other_signs(windows[..., : layout.rank]), rtol=1e-12, atol=1e-12)
        for found, wanted in zip(sums.mixed, mixed_sums(layout, windows), strict=True):
            assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_scores_have_more_directions_where_their_work_allows(monkeypatch):
    make, shape = SMALL["2×2 pools"]
    plan = plan_for(seeded(make), image(*shape))
    assert scored_directions(plan, 64, 10) == 64
    assert scored_directions(plan, 3000, 10) == rows_module.MOST_SCORED
    in_windows = sum(stage.rule.windows.numel() for stage in plan.stages)
    monkeypatch.setattr(rows_module, "SCORE_WORK", 200**2 * in_windows)
    assert scored_directions(plan, 3000, 10) == 200
    monkeypatch.setattr(rows_module, "SCORE_WORK", 0)
    assert scored_directions(plan, 3000, 10) == rows_module.FEWEST_SCORED


def test_mixed_variance_is_what_quadratic_parts_have_beyond_linear_rows():
    layout = FactorLayout.of(5, 5, 4, 0)
    curvature, factor = symmetric(6, 3), normal(6, 3, layout.total, seed=2)
    local = Local(normal(6), normal(6).square(), normal(6, 3), curvature)
    parts = [factor[..., rows] for rows in (slice(0, layout.total), slice(0, layout.rank))]
    whole, linear = (local.quadratic_variance(part @ part.mT) for part in parts)
    assert_close(mixed_variance(layout, local, factor), (whole - linear).clamp(min=0), rtol=1e-12, atol=1e-12)
    assert not bool(mixed_variance(layout, local, factor[..., : layout.rank]).any())


def test_mixed_rows_have_the_right_covariances():
    """Products of two units' rows against tr(HLH'N) + ½ tr(HNH'N), with as many signs as make the chance error small.

    A product of four sums with random signs has a second moment of at most 9 times the product of the squares, so five
    standard errors of 40,000 of them are 0.075 of the two units' deviations. A unit with itself has no chance error.
    """
    layout = FactorLayout.of(4, 2, 40_000, 0)
    factor = normal(5, 3, layout.quadratic.stop, seed=3)
    factor[0], factor[1] = factor[2] + 0.1 * factor[0], factor[2] + 0.1 * factor[1]  # units that go together
    curvature = symmetric(5, 3, seed=4)
    curvature[1] = curvature[0]
    local = Local(normal(5), normal(5).square(), normal(5, 3), curvature)
    rows = mixed_rows(layout, local, factor, mixed_sums(layout, factor))
    own = mixed_variance(layout, local, factor)
    assert_close(rows.square().sum(-1), own, rtol=1e-12)
    linear, others = (
        torch.einsum("iak,jbk->ijab", part, part) for part in (factor[..., : layout.rank], factor[..., layout.rank :])
    )
    h = local.curvature
    wanted = torch.einsum("iab,ijac,jcd,ijbd->ij", h, linear + 0.5 * others, h, others)
    scale = (own.unsqueeze(-1) * own).sqrt()
    assert float(((rows @ rows.mT - wanted) / scale).abs().max()) < 0.075
    assert float((wanted / scale)[0, 1]) > 0.5


@pytest.mark.parametrize("name", ["residual", "2×2 pools"])
def test_derivatives_with_some_of_the_pairs_are_near_those_with_all(name, monkeypatch):
    make, shape = SMALL[name]
    network, x = seeded(make), image(*shape)

    def slope() -> Tensor:
        at = x.clone().requires_grad_()
        mean, covariance = by_rows(network, at, 0.3)
        return torch.autograd.grad(mean.sum() + covariance.diagonal().sum(), at)[0]

    some_pairs = slope()
    monkeypatch.setattr("netmoments.propagate.rows.PAIRED", 128)
    all_pairs = slope()
    assert float((some_pairs - all_pairs).norm() / all_pairs.norm()) < 0.02


def test_the_need_grows_with_the_largest_layer_and_names_it():
    """In proportion to its width for layers that are too large for exact pairs; the squares of others count too."""

    def need(width: int) -> tuple[str, int]:
        layers = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2)
        network = seeded(lambda: nn.Sequential(*layers))
        return need_of(plan_for(network, image(4)), 4, 8, 2)

    assert need(1000)[0] == "3"
    assert need(2000)[1] > 3 * need(1000)[1]
    assert need(16000)[1] == pytest.approx(4 * need(4000)[1], rel=0.05)


def test_leading_directions_reduce_the_chance_error(monkeypatch):
    """Variances by 32 sums of 72 directions, with leading directions and without, against all 72 by themselves."""
    make, shape = SMALL["residual"]
    network, x = seeded(make), image(*shape)

    def variance() -> Tensor:
        with torch.no_grad():
            return by_rows(network, x, 0.5)[1].diagonal()

    leading = variance()
    with monkeypatch.context() as none_leads:
        none_leads.setattr("netmoments.propagate.rows.MOST_LEADING", 0)
        at_random = variance()
    monkeypatch.setattr("netmoments.propagate.rows.PAIRED", 128)
    exact = variance()
    errors = [float((found / exact - 1).abs().max()) for found in (leading, at_random)]
    assert errors[0] < 0.01
    assert errors[0] < errors[1] / 3


@pytest.mark.parametrize(("scores", "leading"), [(1, 1), (10, 10), (40, 16)])
def test_no_more_directions_lead_than_there_are_scores(scores, leading):
    assert layout_for((1, 28, 28), 784, scores).leading == leading
    assert layout_for((1, 28, 28), 784, scores).paired == 36 + leading
    assert layout_for((40,), 40, scores)[1:4] == (40, 64, 0)


def test_units_that_see_a_small_part_of_an_image_have_no_chance_error(monkeypatch):
    """Two convolutions see 5 × 5 of 12 × 12 numbers, each of its own colour: the same as with all 144 directions."""
    network = seeded(lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Conv2d(3, 2, 3), nn.ReLU(), nn.Flatten()))
    x = image(1, 12, 12)
    monkeypatch.setattr("netmoments.propagate.rows.MOST_LEADING", 0)

    def means() -> Tensor:
        with torch.no_grad():
            return by_rows(network, x, 0.5)[0]

    with_rest = means()
    monkeypatch.setattr("netmoments.propagate.rows.SIGNS", 0)  # no rows for the rest, which does have a chance error
    without = means()
    monkeypatch.setattr("netmoments.propagate.rows.PAIRED", 144)
    assert_close(without, means(), rtol=1e-12, atol=1e-12)
    assert float((with_rest - without).abs().max()) > 1e-6


def test_many_scores_have_fewer_directions_and_need_more_memory():
    """The matrices of all scores together are bounded; what they take is known beforehand."""
    make, shape = SMALL["2×2 pools"]
    plan = plan_for(seeded(make), image(*shape))
    assert scored_directions(plan, 3000, 10**3) ** 2 * 10**3 <= rows_module.SCORES_NUMBERS
    assert scored_directions(plan, 3000, 10**6) == rows_module.MANY_SCORED
    few, many = (need_of(plan, 64, 8, scores) for scores in (2, 10**4))
    assert many.layer == "the scores"
    assert many.bytes > 8 * 10**4 * rows_module.MANY_SCORED**2
    assert few.bytes < many.bytes
