"""What carrying the noise of an image through a network takes, told before anything is computed."""

from __future__ import annotations

from typing import NamedTuple

from netmoments.network.graph import Node, shape_of
from netmoments.propagate.plan import Plan, Stage
from netmoments.propagate.scores import PAIRED, has_exact_pairs
from netmoments.propagate.spread import Rows, rows_for
from netmoments.propagate.third_order import MOST_DIRECTIONS


class Need(NamedTuple):
    """The layer that takes most, and how many bytes."""

    layer: str
    bytes: int


def layerwise_need(plan: Plan, rank: int, itemsize: int) -> Need:
    """The most memory that any layer takes for one image, `rank` being the noise's.

    What is kept for the pass back is counted with the layers that come after it.
    """
    rows = rows_for(rank, 1)
    kept, worst = 0, Need("the scores", itemsize * rank * shape_of(plan.image).numel())
    for place, stage in enumerate(plan.stages):
        live = sum(_rows_of(node, plan, rows) * shape_of(node).numel() for node in plan.needed_after(place - 1))
        needed = itemsize * (kept + live + _numbers(stage, plan, rows) + _kept(stage, rows))
        if needed > worst.bytes:
            worst = Need(stage.name, needed)
        kept += _kept(stage, rows)
    return worst


def _rows_of(node: Node, plan: Plan, rows: Rows) -> int:
    """The image has linear rows only."""
    return rows.rank if node is plan.image else rows.count


def _numbers(stage: Stage, plan: Plan, rows: Rows) -> int:
    """What a layer with p inputs and n units of w inputs works on.

    Rows of the input (in parts, put together, and by unit), by window and once more with places beyond it masked, of
    the output twice, matrices of pairs of directions for the output, and for third cumulants where there are any, and
    four squares where pairs are exact.
    """
    p = sum(shape_of(node).numel() for node in stage.before.results)
    n, w = stage.rule.units, stage.rule.width
    before = max(_rows_of(node, plan, rows) for node in stage.before.sources)
    skewed = min(w, MOST_DIRECTIONS) if before > rows.rank else 0
    spreads = before * (3 * p + (2 * n * w if w > 1 else 0)) + 2 * rows.count * n
    matrices = rows.paired**2 * n * (2 + 2 * skewed)
    return spreads + matrices + (4 * n * n if has_exact_pairs(stage.rule) else 0)


def _kept(stage: Stage, rows: Rows) -> int:
    """What is kept of a layer for the pass back."""
    n, w = stage.rule.units, stage.rule.width
    pairs = n * n if has_exact_pairs(stage.rule) else 0
    return n * w * (min(rows.rank, PAIRED) + w + 1) + pairs
