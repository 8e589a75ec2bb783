"""Layer by layer: the joint distribution of all live tensors, a Gaussian with cumulants beyond it, through a network.

A covariance is carried as a square (`squares`) where that fits the memory and the work that is worth it: all pairs of
units and the cumulants of nearly all of them, without any chance. Elsewhere it is carried as rows whose products it is
(`rows`), with third cumulants along some directions of the noise; on a CPU also where rows know nearly as much, and
squares would take much longer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from netmoments.covariances import Covariance, Dense
from netmoments.memory import gigabytes, memory_limit, piece_bytes
from netmoments.progress import progress_bar
from netmoments.propagate import rows, squares
from netmoments.propagate.plan import Plan
from netmoments.propagate.replay import replayed
from netmoments.propagate.rows import Need
from netmoments.propagate.sketch import REPLAYED_BYTES

IMAGES_TOGETHER = {"cpu": 1, "cuda": 32}
"""Images whose noise goes through a network together, at most: more do not pay."""
KEPT_COPIES = 3
"""Of what a layer takes for its square, what derivatives keep of it."""
DEARER = 2.0
"""Times the numbers of rows that squares may carry on a CPU where rows are as good as they, nearly."""
CHEAP = 2**24
"""Numbers that squares may carry in any case: they take less than a second."""
ASKED = 16
"""Units that are asked how many numbers of the image they look at."""


def layerwise(
    plan: Plan,
    mean: Tensor,
    covariance: Covariance,
    outputs: Tensor,
    memory_budget: int | None = None,
    caller: str = "layerwise",
) -> tuple[Tensor, Tensor]:
    """Means (N, k) and covariances (N, k, k) of the scores with indices `outputs` (N, k), for images (N, ...).

    Images go together as the memory allows; what does not fit for one is an error, before anything is computed.
    """
    limit = memory_limit(mean.device, memory_budget)
    itemsize = mean.element_size()
    kept = min(limit, piece_bytes("backward", mean.device)) if torch.is_grad_enabled() else limit
    as_squares = has_squares(plan, mean, kept)
    need = squares.need_of(plan, itemsize) if as_squares else rows.need_of(plan, covariance.rank, itemsize)
    if need.bytes > limit:
        raise ValueError(
            f'{caller}: method="layerwise" needs {gigabytes(need.bytes)} for the covariances at {need.layer}, but '
            f'{gigabytes(limit)} is the limit; raise memory_budget=, or use method="sketch" (any size) or "sampling"'
        )
    if not plan.last.sources:
        constant = plan.last.value({})[outputs]
        return constant, constant.new_zeros(*outputs.shape, outputs.shape[1])
    together = max(1, min(limit // need.bytes, IMAGES_TOGETHER.get(mean.device.type, 1), len(mean)))
    carried: Callable[[Plan, Tensor, Covariance, Tensor], tuple[Tensor, Tensor]]
    if not as_squares:
        carried = partial(rows.carried, beyond=rows.third_order)
    elif mean.is_cuda and not torch.is_grad_enabled() and together * need.bytes <= REPLAYED_BYTES:
        carried = _recorded_squares
    else:
        carried = squares.carried
    if together == len(mean):
        return carried(plan, mean, covariance, outputs)
    parts = []
    with progress_bar("images", len(mean)) as show:
        for start in range(0, len(mean), together):
            show(start)
            some = slice(start, start + together)
            parts.append(carried(plan, mean[some], covariance.entries(some), outputs[some]))
    means, covariances = zip(*parts, strict=True)
    return torch.cat(means), torch.cat(covariances)


def _recorded_squares(plan: Plan, mean: Tensor, covariance: Covariance, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """By squares on a GPU, recorded, and replayed from then on."""
    scores, every = replayed(plan.recordings, partial(_from_dense, plan), mean, covariance.dense(), outputs)
    return scores, every


def _from_dense(plan: Plan, mean: Tensor, covariance: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """The same from tensors alone."""
    return squares.carried(plan, mean, Dense(covariance), outputs)


def with_variances(
    found: tuple[Tensor, Tensor],
    plan: Plan,
    mean: Tensor,
    covariance: Covariance,
    outputs: Tensor,
    memory_budget: int | None,
) -> tuple[Tensor, Tensor]:
    """What `layerwise` found, but for images with a negative variance, which cumulants have made: without these.

    Their corrections are of first order, and may be larger than a variance of which little is left. What is negative
    among Gaussian layers is 0 but for rounding: scores of units that never move. Nor are there cumulants where their
    fourth powers are too large for the dtype; where variances are, too, that is an error.
    """
    scores, every = found
    failed = ~((every.diagonal(dim1=-2, dim2=-1) >= 0).all(-1) & _finite(scores, every))
    for place in failed.nonzero():
        some = slice(int(place), int(place) + 1)
        if has_squares(plan, mean, memory_limit(mean.device, memory_budget)):
            own = squares.carried(plan, mean[some], covariance.entries(some), outputs[some], [0] * len(plan.stages))
        else:
            own = scores[some], every[some]
        if not bool(_finite(*own)):
            name = str(mean.dtype).removeprefix("torch.")
            raise ValueError(
                f"layerwise: the variances on the way through the network are too large for {name}; take smaller units "
                f"of the input{'' if mean.dtype == torch.float64 else ', or network and noise in float64'}"
            )
        moves = own[1].diagonal(dim1=-2, dim2=-1) >= 0
        square = own[1] * (moves.unsqueeze(-1) & moves.unsqueeze(-2))
        scores, every = scores.index_copy(0, place, own[0]), every.index_copy(0, place, square)
    return scores, every


def _finite(scores: Tensor, every: Tensor) -> Tensor:
    """Of which images means (N, k) and covariances (N, k, k) are."""
    return scores.isfinite().all(-1) & every.isfinite().all(-1).all(-1)


def has_squares(plan: Plan, like: Tensor, limit: int) -> bool:
    """Whether covariances of numbers like those of the image are carried as squares: where they know more, and fit.

    With derivatives, those of all layers together must fit. On a CPU, squares that carry many more numbers than rows
    are not worth their time where the first layer's units look at few numbers each, so that rows know nearly as much.
    On a GPU squares are recorded and replayed, and take little time wherever they fit.
    """
    layout = plan.once(squares.layout_of)
    copies = KEPT_COPIES * len(plan.stages) if torch.is_grad_enabled() else 1
    if not layout.worthwhile or copies * squares.need_of(plan, like.element_size()).bytes > limit:
        return False
    dear = not like.is_cuda and layout.numbers > max(CHEAP, DEARER * plan.once(rows.numbers_carried))
    return not (dear and numbers_seen(plan, like) <= rows.PAIRED)


@torch.no_grad()
def numbers_seen(plan: Plan, like: Tensor) -> int:
    """How many numbers of the image a unit of the first layer looks at, the most of some units spread over it.

    If no more than rows have colours, a unit sees each colour about once, and its rows are nearly without chance.
    """
    first = plan.stages[0]
    units = torch.arange(0, first.rule.units, -(-first.rule.units // ASKED), device=like.device)
    chosen = torch.nn.functional.one_hot(units, first.rule.units).to(like.dtype).unsqueeze(0)
    slopes = (first.rule.windows >= 0).to(like.dtype).unsqueeze(0)
    every = first.pull_back(slopes, chosen, {})
    return int((every[plan.image] != 0).sum(-1).max())


def need_of(plan: Plan, rank: int, itemsize: int) -> Need:
    """The least memory that one image takes, `rank` being the noise's, at the layer that takes most of it."""
    ways = squares.need_of(plan, itemsize), rows.need_of(plan, rank, itemsize)
    return min(ways, key=lambda need: need.bytes)
