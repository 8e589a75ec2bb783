"""Layerwise moments: the joint distribution of all live tensors, a Gaussian with cumulants, carried layer by layer.

There are two ways to carry it, and this module chooses. As squares (`squares`), the covariance is a matrix, with the
cumulants of nearly all units and no chance error: for networks where these matrices fit into memory and know more than
rows. As rows (`rows`), the covariance is products of a few hundred rows, with third cumulants along some directions of
the noise: for larger networks, and on a CPU also where rows know nearly as much and squares would take much longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from netmoments.covariances import Covariance, Dense
from netmoments.memory import gigabytes, memory_limit, piece_bytes
from netmoments.progress import progress_bar
from netmoments.propagate import rows, squares
from netmoments.propagate.plan import Plan
from netmoments.propagate.replay import REPLAYED_BYTES, replayed
from netmoments.propagate.rows import Need
from netmoments.relu.bivariate import NoMoments

IMAGES_TOGETHER = {"cpu": 1, "cuda": 32}
"""Images that go through a network together, at most; more would gain nothing."""
KEPT_COPIES = 3
"""With derivatives, so many times the memory of a layer's squares is kept for every layer."""
DEARER = 2.0
"""On a CPU, where rows know nearly as much, squares may carry at most so many times the numbers of rows."""
CHEAP = 2**24
"""Squares that carry no more numbers than this are used in any case: they take less than a second."""
NO_ANSWER = torch.linalg.LinAlgError, NoMoments  # type: ignore[attr-defined]
"""Errors where moments on the way are not numbers, or a covariance has no root."""
UNITS_TRIED = 16
"""How many units of the first layer `numbers_seen` looks at."""


def layerwise(
    plan: Plan,
    mean: Tensor,
    covariance: Covariance,
    outputs: Tensor,
    memory_budget: int | None = None,
    caller: str = "layerwise",
    meanwhile: Callable[[], None] = lambda: None,
) -> tuple[Tensor, Tensor]:
    """Means (N, k) and covariances (N, k, k) of the scores with indices `outputs` (N, k), for images (N, ...).

    As many images go together as the memory allows. If not even one fits, that is an error, before anything is
    computed. `meanwhile` is called when all work was given to the device, which a GPU is then still at. Where
    corrections by cumulants went wrong, images are computed again without (`without_negative_variances`).
    """
    try:
        moments = _carried(plan, mean, covariance, outputs, memory_budget, caller)
    except NO_ANSWER:
        count = outputs.shape[1]
        moments = mean.new_full(outputs.shape, math.nan), mean.new_full((*outputs.shape, count), math.nan)
    meanwhile()
    try:
        return without_negative_variances(moments, plan, mean, covariance, outputs, memory_budget)
    except NO_ANSWER as error:
        raise too_large(mean.dtype) from error


def _carried(
    plan: Plan, mean: Tensor, covariance: Covariance, outputs: Tensor, memory_budget: int | None, caller: str
) -> tuple[Tensor, Tensor]:
    """The moments as squares or rows, all images together or some at a time."""
    limit = memory_limit(mean.device, memory_budget)
    itemsize = mean.element_size()
    squares_limit = min(limit, piece_bytes("backward", mean.device)) if torch.is_grad_enabled() else limit
    as_squares = has_squares(plan, mean, squares_limit)
    need = (
        squares.need_of(plan, itemsize)
        if as_squares
        else rows.need_of(plan, covariance.rank, itemsize, outputs.shape[1])
    )
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
        carried = partial(rows.carried, skewed=True)
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
            images = slice(start, start + together)
            parts.append(carried(plan, mean[images], covariance.entries(images), outputs[images]))
    means, covariances = zip(*parts, strict=True)
    return torch.cat(means), torch.cat(covariances)


def _recorded_squares(plan: Plan, mean: Tensor, covariance: Covariance, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """`squares.carried` on a GPU, recorded once and replayed from then on."""
    scores, covariances = replayed(plan.recordings, partial(_from_dense, plan), mean, covariance.dense(), outputs)
    return scores, covariances


def _from_dense(plan: Plan, mean: Tensor, covariance: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """`squares.carried` as a function of tensors alone, which can be recorded."""
    return squares.carried(plan, mean, Dense(covariance), outputs)


def without_negative_variances(
    moments: tuple[Tensor, Tensor],
    plan: Plan,
    mean: Tensor,
    covariance: Covariance,
    outputs: Tensor,
    memory_budget: int | None,
) -> tuple[Tensor, Tensor]:
    """The moments that were carried, with those of images that have a negative variance computed again.

    Corrections by cumulants are of first order, and can be larger than what is left of a variance; without cumulants no
    variance is negative, except by rounding where it is 0, as for scores of units that never move: these are set to 0.
    Images whose moments are not finite are computed again too, as the fourth powers in cumulants may be too large for
    the dtype. If the variances themselves are too large, that is an error.
    """
    scores, covariances = moments
    failed = ~((covariances.diagonal(dim1=-2, dim2=-1) >= 0).all(-1) & _finite(scores, covariances))
    for place in failed.nonzero():
        image = slice(int(place), int(place) + 1)
        if has_squares(plan, mean, memory_limit(mean.device, memory_budget)):
            followed = [0] * len(plan.stages)
            again = squares.carried(plan, mean[image], covariance.entries(image), outputs[image], followed)
        else:
            again = rows.carried(plan, mean[image], covariance.entries(image), outputs[image], skewed=False)
        if not bool(_finite(*again)):
            raise too_large(mean.dtype)
        moves = again[1].diagonal(dim1=-2, dim2=-1) >= 0
        square = again[1] * (moves.unsqueeze(-1) & moves.unsqueeze(-2))
        scores, covariances = scores.index_copy(0, place, again[0]), covariances.index_copy(0, place, square)
    return scores, covariances


def too_large(dtype: torch.dtype) -> ValueError:
    """The error for variances that are infinite in a dtype, or so large that no covariance of theirs has a root."""
    name = str(dtype).removeprefix("torch.")
    return ValueError(
        f"layerwise: the variances on the way through the network are too large for {name}; take smaller units of the "
        f'input{"" if dtype == torch.float64 else ", or network and noise in float64"}, or method="auto" if the '
        f"network is very steep at the mean"
    )


def _finite(scores: Tensor, covariances: Tensor) -> Tensor:
    """For which images all means (N, k) and covariances (N, k, k) are finite: (N,)."""
    return scores.isfinite().all(-1) & covariances.isfinite().all(-1).all(-1)


def has_squares(plan: Plan, like: Tensor, limit: int) -> bool:
    """Whether covariances are carried as squares: where these know more than rows, fit `limit` bytes, and are fast.

    `like` is an image. With derivatives, the squares of all layers must fit together. On a CPU, squares that carry many
    more numbers than rows are not worth their time where each unit of the first layer looks at few numbers, because
    rows then know nearly as much. On a GPU squares are recorded and replayed, and take little time wherever they fit.
    """
    layout = plan.once(squares.layout_of)
    copies = KEPT_COPIES * len(plan.stages) if torch.is_grad_enabled() else 1
    if not layout.worthwhile or copies * squares.need_of(plan, like.element_size()).bytes > limit:
        return False
    dear = not like.is_cuda and layout.numbers > max(CHEAP, DEARER * plan.once(rows.numbers_carried))
    return not (dear and numbers_seen(plan, like) <= rows.PAIRED)


@torch.no_grad()
def numbers_seen(plan: Plan, like: Tensor) -> int:
    """How many numbers of the image a unit of the first layer looks at: the most among some units spread over it.

    If rows have at least so many colours, a unit sees each colour about once, and rows have hardly any chance error.
    """
    first = plan.stages[0]
    units = torch.arange(0, first.rule.units, -(-first.rule.units // UNITS_TRIED), device=like.device)
    chosen = torch.nn.functional.one_hot(units, first.rule.units).to(like.dtype).unsqueeze(0)
    slopes = (first.rule.windows >= 0).to(like.dtype).unsqueeze(0)
    weights = first.pull_back(slopes, chosen, {})
    return int((weights[plan.image] != 0).sum(-1).max())


def need_of(plan: Plan, rank: int, itemsize: int, scores: int) -> Need:
    """The memory that one image with noise of `rank` directions needs at least, as squares or as rows."""
    needs = squares.need_of(plan, itemsize), rows.need_of(plan, rank, itemsize, scores)
    return min(needs, key=lambda need: need.bytes)
