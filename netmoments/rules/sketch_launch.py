"""A layer of a sketch on a GPU: launches of the kernels of `sketch_kernels`, for which the host never waits.

The plain versions, which are used where Triton is missing or a derivative is wanted, save work by first picking out the
units that need it. The kernels work on all units, since picking would make the host wait.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from netmoments.covariances import FLOOR
from netmoments.precision import matmul
from netmoments.relu.triton.launch import available as kernels_available
from netmoments.rules import sketch_kernels as kernels
from netmoments.rules.base import PowerMoments, QuadraticForms, UnitMoments, paired
from netmoments.rules.maximum_lines import average_radius, direction_sets, frames_for

MOST_SAMPLES = 128
"""The most samples of an image with which the kernels are used."""
WIDEST = 9
"""The most inputs of a window: all that is known of a window stays in a thread's registers."""
PROGRAMS = 4224
"""Sums over units are split among at least so many programs, to fill a GPU."""
BLOCK, WINDOWS, ROWS, SIDE = 256, 64, 32, 64
"""Units with one input, windows, and inputs of units that one program takes; the side of a tile that is transposed."""
MOMENTS = 19
"""How many numbers `PowerMoments` has for each unit."""
SCORES = 5
"""The most scores whose forms one program sums."""
PRECISION = {torch.float32: "tf32x3", torch.float64: "ieee"}
"""How products of matrices are computed: float32 as three products in TF32, which keeps its precision."""


def available(samples: Tensor, *others: Tensor) -> bool:
    """Whether the kernels can take samples (N, K, ·): few of them, on a GPU, with no derivative wanted."""
    differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in (samples, *others))
    return not differentiated and samples.shape[1] <= MOST_SAMPLES and kernels_available(samples)


class _Forms(ABC):
    """The quadratic forms of a layer's units, as a function of scores' weights."""

    def __call__(self, weights: Tensor) -> QuadraticForms:
        """Σ_u a_iu z_uᵀ H_u z_u' for weights a on all units of the layer, (N, r, n)."""
        with torch.cuda.device_of(weights):
            return self._forms(weights.contiguous())

    @abstractmethod
    def _forms(self, weights: Tensor) -> QuadraticForms:
        """The same from contiguous weights, on the device that is current."""


@dataclass(frozen=True, eq=False)
class _SingleInputs(_Forms):
    """Those of units with one input each."""

    samples: Tensor
    """Samples of the layer's input, (N, K, n)."""
    curvature: Tensor
    """(N, n, 1, 1)."""

    def _forms(self, weights: Tensor) -> QuadraticForms:
        images, count, units = self.samples.shape
        scores = weights.shape[1]
        groups, blocks = -(-scores // 16), -(-units // ROWS)
        steps, parts = _split(blocks, images * groups)
        own = weights.new_empty(parts, images, scores, count)
        kernels.squares_kernel[(parts, images, groups)](
            self.samples, self.curvature, weights, own, units, scores, steps,
            COUNT=count, EVERY=_power(count), ROWS=ROWS, PRECISION=PRECISION[weights.dtype],
        )  # fmt: skip
        across = _across(self.samples, None, self.curvature, weights)
        return QuadraticForms(own.sum(0), across)


@dataclass(frozen=True, eq=False)
class _WindowInputs(_Forms):
    """Those of units with windows."""

    places: Tensor
    """The windows, (n, w), −1 for no input."""
    columns: Tensor
    """Samples of the layer's input, (N, p, K)."""
    curvature: Tensor
    """(N, n, w, w)."""

    def _forms(self, weights: Tensor) -> QuadraticForms:
        images, inputs, count = self.columns.shape
        units, width = self.places.shape
        few = paired(count)
        own, curved = weights.new_empty(images, units, count), weights.new_empty(images, units * width, few)
        kernels.curved_windows_kernel[(units, images)](
            self.columns, self.places, self.curvature, own, curved, inputs, units,
            COUNT=count, WIDTH=width, FEW=few, WIDE=_power(width), EVERY=_power(count),
            PRECISION=PRECISION[weights.dtype], num_warps=1,
        )  # fmt: skip
        across = _across(self.columns.mT, self.places, curved, weights)
        return QuadraticForms(matmul(weights, own), across)


def _across(samples: Tensor, places: Tensor | None, curved: Tensor, weights: Tensor) -> Tensor:
    """The forms between first and last samples, (N, r, k, k), of samples (N, K, p) of any strides."""
    images, count, _ = samples.shape
    scores, units = weights.shape[1:]
    width, few = 1 if places is None else places.shape[1], paired(count)
    groups = -(-scores // SCORES)
    steps, parts = _split(-(-units * width // ROWS), images * groups)
    across = weights.new_empty(parts, images, scores, few, few)
    kernels.forms_kernel[(groups, parts, images)](
        samples, places, curved, weights, across, units, scores, steps, *samples.stride(),
        COUNT=count, WIDTH=width, FEW=few, SOME=_power(few), SCORES=-(-scores // groups), ROWS=ROWS,
        PRECISION=PRECISION[weights.dtype], num_warps=2,
    )  # fmt: skip
    return across.sum(0)


def _split(count: int, times: int) -> tuple[int, int]:
    """How many of `count` steps a program takes, and how many programs that makes: times `times`, about `PROGRAMS`."""
    steps = max(1, count * times // PROGRAMS)
    return steps, -(-count // steps)


def _power(number: int, least: int = 16) -> int:
    """The next power of two, 16 at least: Triton multiplies no smaller matrices."""
    return max(least, 1 << (number - 1).bit_length())


def single_inputs(
    parts: tuple[Tensor, Tensor, Tensor, Tensor], mean: Tensor, samples: Tensor
) -> tuple[Tensor, UnitMoments, _SingleInputs]:
    """A layer of units f(z) = offset + slope·z + Σ bend relu(z − kink) with up to two kinks; `parts` are these four.

    Returns the values (N, K, n) at samples (N, K, n), the moments of the units, and their quadratic forms.
    """
    mean, samples = mean.contiguous(), samples.contiguous()
    images, count, units = samples.shape
    values = torch.empty_like(samples)
    expected, gain, curvature = mean.new_empty(3, images, units).unbind()
    with torch.cuda.device_of(samples):
        kernels.single_inputs_kernel[(-(-units // BLOCK), images)](
            samples, mean, *(x.contiguous() for x in parts), values, expected, gain, curvature,
            units, COUNT=count, TWO=len(parts[3]) == 2, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    curvature = curvature[..., None, None]
    return values, UnitMoments(expected, gain.unsqueeze(-1), curvature), _SingleInputs(samples, curvature)


def power_moments(parts: tuple[Tensor, Tensor, Tensor, Tensor], mean: Tensor, variance: Tensor) -> PowerMoments:
    """The power moments of such units with few sorted kinks (`one_number.MOST_KINKS`), from moments (N, n)."""
    images, units = mean.shape
    moments = mean.new_empty(MOMENTS, images, units)
    with torch.cuda.device_of(mean):
        kernels.power_moments_kernel[(-(-units // BLOCK), images)](
            mean, variance, *(x.contiguous() for x in parts), moments,
            images * units, units, *mean.stride(), *variance.stride(), KINKS=len(parts[3]), BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    centre, *rest = moments.unbind()
    return PowerMoments(centre, tuple(rest[:7]), tuple(rest[7:12]), tuple(rest[12:17]), rest[17])


def largest_of_windows(
    windows: Tensor, sign: int, with_zero: bool, mean: Tensor, samples: Tensor
) -> tuple[Tensor, UnitMoments, _WindowInputs]:
    """A layer of the largest (with sign −1, the smallest) input of windows (n, w), and of 0 if `with_zero`.

    Returns the values (N, K, n), the moments of the units, and their quadratic forms.
    """
    mean, samples = mean.contiguous(), samples.contiguous()
    images, count, inputs = samples.shape
    units, width = windows.shape
    places, columns = windows.to(torch.int32), _transposed(samples)
    values, covariance = mean.new_empty(images, units, count), mean.new_empty(images, units, width, width)
    expected, gain = mean.new_empty(images, units), mean.new_empty(images, units, width)
    curvature = torch.empty_like(covariance)
    directions = _directions(width, frames_for(units, count), mean.dtype, mean.device)
    with torch.cuda.device_of(samples):
        kernels.window_samples_kernel[(units, images)](
            columns, places, values, covariance, inputs, units, sign,
            COUNT=count, WIDTH=width, WITH_ZERO=with_zero, WIDE=_power(width), EVERY=_power(count),
            PRECISION=PRECISION[mean.dtype], num_warps=1,
        )  # fmt: skip
        kernels.largest_kernel[(-(-units // WINDOWS), images)](
            mean, places, covariance, directions, expected, gain, curvature,
            inputs, units, directions.shape[-1], len(directions), sign,
            WIDTH=width, WITH_ZERO=with_zero, SHARE=FLOOR[mean.dtype], AVERAGE=average_radius(width),
            BLOCK=WINDOWS, num_warps=WINDOWS // 32,
        )  # fmt: skip
    return _transposed(values), UnitMoments(expected, gain, curvature), _WindowInputs(places, columns, curvature)


def _transposed(matrices: Tensor) -> Tensor:
    """(N, a, b) as a contiguous (N, b, a)."""
    images, rows, columns = matrices.shape
    target = matrices.new_empty(images, columns, rows)
    grid = (-(-columns // SIDE) * -(-rows // SIDE), images)
    with torch.cuda.device_of(matrices):
        kernels.transposing_kernel[grid](matrices, target, rows, columns, SIDE=SIDE)
    return target


@cache
def _directions(width: int, frames: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`direction_sets` of a dtype on a device, made once."""
    with torch.inference_mode(False):
        return direction_sets(width, frames).to(device, dtype).contiguous()
