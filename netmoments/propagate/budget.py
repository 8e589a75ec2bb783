"""What carrying the joint covariance through a network takes, told before anything is computed."""

from __future__ import annotations

from typing import NamedTuple

from netmoments.network.graph import shape_of
from netmoments.propagate.layerwise import DIRECTION_ELEMENTS, TILE_ELEMENTS
from netmoments.propagate.piecewise_linear import PiecewiseLinear
from netmoments.propagate.plan import Plan


class Need(NamedTuple):
    """The layer that takes most, and how many bytes."""

    layer: str
    bytes: int


def layerwise_need(plan: Plan, rank: int, itemsize: int, device: str) -> Need:
    """The most memory that any layer takes, `rank` being the noise's.

    For a layer with p inputs and n outputs, after live tensors of m numbers in all: factors of r·(p + n + m), the
    residual covariances p² (if its input has any; once more window by window), p·m and m², those of the output with the
    scratch to make them, 4n² (elementwise layers another 2p²), and tiles of fixed size.
    """
    tiles = 6 * min(_of(TILE_ELEMENTS, device), max(_squares(plan))) + 8 * _of(DIRECTION_ELEMENTS, device)
    worst = Need("the scores", 0)
    for place, stage in enumerate(plan.stages):
        p = sum(shape_of(node).numel() for node in stage.before.results)
        n = stage.rule.units
        live = {node for node in (*plan.needed_after(place - 1), *plan.needed_after(place)) if node is not stage.output}
        sizes = [shape_of(node).numel() for node in live if node is not plan.image]
        m = sum(sizes)
        factors = rank * (p + n + m + shape_of(plan.image).numel())
        residual = 2 * p * p + p * m + m * m if sizes else 0
        output = 4 * n * n + (2 * p * p if isinstance(stage.rule, PiecewiseLinear) else 0)
        needed = itemsize * (factors + residual + output)
        if needed > worst.bytes:
            worst = Need(stage.name, needed)
    return Need(worst.layer, worst.bytes + itemsize * min(tiles, 4 * worst.bytes // itemsize + 1))


def _squares(plan: Plan) -> list[int]:
    return [(stage.rule.units * stage.rule.width) ** 2 for stage in plan.stages] or [1]


def _of(by_device: dict[str, int], device: str) -> int:
    return by_device.get(device, by_device["cpu"])
