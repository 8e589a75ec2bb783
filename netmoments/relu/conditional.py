"""One of two correlated units given that the other is exactly 0, and the orthant probability that follows from it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from netmoments.normal import distribution, owen_t
from netmoments.relu.scratch import Scratch, common_shape


class Conditional(NamedTuple):
    """Standardized means (h−ρk)/q and (k−ρh)/q of each unit given that the other is 0; q = √(1−ρ²) is their deviation.

    At ρ = ±1 they are huge, so that Φ gives 0 or 1, unless the numerator is 0, when they are 0.
    """

    first: Tensor
    second: Tensor
    deviation: Tensor


def conditional(h: Tensor, k: Tensor, rho: Tensor, scratch: Scratch) -> Conditional:
    """The numerators are written (h∓k) ± (1−|ρ|)k, so that nothing cancels near ρ = ±1."""
    one, pairs = rho.new_ones(()), common_shape(h, k, rho)
    size = torch.abs(rho, out=scratch.take("size", rho.shape))
    gap = torch.sub(one, size, out=scratch.take("gap", rho.shape))
    deviation = torch.addcmul(gap, gap, size, out=scratch.take("deviation", rho.shape)).sqrt_()
    flip = torch.copysign(one, rho, out=scratch.take("flip", rho.shape))
    slack = gap.mul_(flip)
    divisor = torch.clamp(deviation, min=torch.finfo(rho.dtype).tiny, out=size)
    first = torch.addcmul(h, flip, k, value=-1, out=scratch.take("first", pairs)).addcmul_(slack, k).div_(divisor)
    second = torch.addcmul(k, flip, h, value=-1, out=scratch.take("second", pairs)).addcmul_(slack, h).div_(divisor)
    return Conditional(first, second, deviation)


def excess_by_owen(h: Tensor, k: Tensor, rho: Tensor, scratch: Scratch) -> Tensor:
    """P(z₁>0, z₂>0) − Φ(h)Φ(k) for any ρ in [−1, 1], to rounding:

    P = Φ(h)/2 + Φ(k)/2 − T(h, (k−ρh)/hq) − T(k, (h−ρk)/kq) − [h and k on different sides of 0]/2   (Owen 1956)
    """
    h, k, rho = torch.broadcast_tensors(h, k, rho)
    origin = (h.abs() < 1e-30) & (k.abs() < 1e-30)  # here the two directions are lost; P itself is continuous: step off
    h = torch.where(origin, 1e-30, h)
    k = torch.where(origin, 1e-30, k)
    given = conditional(h, k, rho, scratch)
    below_h, below_k = distribution(h), distribution(k)
    opposite = 0.5 * ((h < 0) != (k < 0)).to(h.dtype)
    probability = 0.5 * (below_h + below_k) - owen_t(h, given.second) - owen_t(k, given.first) - opposite
    return probability - below_h * below_k
