"""Affine parts of networks as maps: their linear parts, transposes, and what they carry along."""

from __future__ import annotations

import pytest
import torch

from netmoments.network.graph import shape_of
from tests.networks import seeded
from tests.propagate.small import SMALL, image, plan_for


@pytest.mark.parametrize("name", SMALL)
def test_the_linear_part_of_every_segment_is_its_derivative(name):
    make, shape = SMALL[name]
    network = seeded(make)
    plan = plan_for(network, image(*shape))
    for segment in [stage.before for stage in plan.stages] + [plan.last]:
        points = {node: torch.randn(shape_of(node), dtype=torch.float64) for node in segment.sources}
        steps = {node: torch.randn(shape_of(node), dtype=torch.float64) for node in segment.sources}
        moved = {node: points[node] + steps[node] for node in segment.sources}
        change = segment.value(moved) - segment.value(points)
        linear = segment.linears({node: step.flatten(1) for node, step in steps.items()})[0]
        torch.testing.assert_close(linear, change, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", SMALL)
def test_pulling_back_is_the_transpose(name):
    """⟨w, A x⟩ = ⟨Aᵀ w, x⟩, and weights that tensors have already are added to."""
    make, shape = SMALL[name]
    plan = plan_for(seeded(make), image(*shape))
    generator = torch.Generator().manual_seed(1)
    for segment in [stage.before for stage in plan.stages] + [plan.last]:
        x = {
            node: torch.randn(1, shape_of(node).numel(), dtype=torch.float64, generator=generator)
            for node in segment.sources
        }
        weights = torch.randn(1, 2, segment.size, dtype=torch.float64, generator=generator)
        before = {node: torch.ones(1, 2, shape_of(node).numel(), dtype=torch.float64) for node in segment.sources}
        pulled = segment.pull_back(weights, before)
        inner = sum((((pulled[node] - 1) * x[node].unsqueeze(1)).sum(-1) for node in x), torch.zeros(1, 2))
        torch.testing.assert_close(inner, (weights * segment.linears(x).unsqueeze(1)).sum(-1), rtol=1e-9, atol=1e-9)


def test_passages_carry_all_live_numbers_along():
    """The numbers that a residual adds later pass a layer unchanged; there may be no rows of numbers at all."""
    make, shape = SMALL["residual"]
    x = image(*shape)
    plan = plan_for(seeded(make), x)
    assert plan.passages[0].before == x[0].numel()
    for passage, stage, following in zip(plan.passages, plan.stages, plan.passages[1:], strict=False):
        assert following.before == passage.after - stage.before.size + stage.rule.units
        numbers = torch.randn(2, 3, passage.before, dtype=x.dtype, generator=torch.Generator().manual_seed(0))
        moved = passage.values(numbers) - passage.values(torch.zeros_like(numbers))
        torch.testing.assert_close(passage.linears(numbers), moved)
        for place, kept in enumerate(passage.kept):
            start = passage.segment.size + sum(other.stop - other.start for other in passage.kept[:place])
            assert torch.equal(moved[..., start : start + kept.stop - kept.start], numbers[..., kept])
        assert passage.linears(numbers[:, :0]).shape == (2, 0, passage.after)
    assert any(passage.kept for passage in plan.passages)
    assert plan.passages[-1].after == plan.last.size
