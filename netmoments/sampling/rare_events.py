"""What so many samples cannot have shown: rare events, and how much of an error they may be.

A unit that opens at h deviations of its input is open in a share Φ(−h) of the samples. A hundred samples may well show
nothing of one that opens at 2.5, and if much hangs on it, a mean and a variance miss that part while the spread of the
samples says that all is known. Samples at s times the noise see it open at h/s: they are no samples of the outputs, but
they show what there is to be missed.

Events that n samples have seldom seen have h ≥ h(n), with Φ(−h(n)) = 5/n. Of the spread of relu(sz − h), z ~ N(0, 1),
there is left at the noise itself at most

    κ(n) = g(h(n)) / s²g(h(n)/s),     g(h) = E relu(z − h)² = (1 + h²)Φ(−h) − hφ(h)

and of the spread of its square, with g₄(h) = E relu(z − h)⁴ = (h⁴ + 6h² + 3)Φ(−h) − (h³ + 5h)φ(h) in place of g and s⁴
for s², again a tenth or less of that. Up to logarithms κ(n) goes with the ratio φ(h)/φ(h/s) of the densities, as
n^{1/s² − 1}. For s = 2.5 and n from 96 to 10 000 the power alone is 1.3 to 1.5 times κ(n), and that is taken; for
squares a sixth of it. Of a jump more is left than of a ReLU, at most 12 times as much as is taken, where it is about to
be seen.

What is smooth gives little alarm: the even part of a quadratic has s⁴ = 39 times the variance at s times the noise,
which is less than 1/κ; squares of it have s⁸, which at n = 96 is five times too much, and none from n = 800 on.
"""

from __future__ import annotations

import torch
from torch import Tensor

WIDENING = 2.5
"""Times the noise, for samples that look for rare events."""
WIDE_PAIRS = 16
"""Mirrored pairs of these: one that opens at 3 deviations, in a sample of 740, is seen in 98 of 100 cases."""
SQUARES = 6.0
"""By how much more the spread of squares is taken to fall than that of values, from the wider noise to the noise."""


def left_by_a_line(target: Tensor, control: Tensor) -> Tensor:
    """The variance of a target over the first dimension that is left by a regression on a control."""
    target, control = target - target.mean(0), control - control.mean(0)
    power = control.square().mean(0)
    with_control = (target * control).mean(0)
    explained = torch.where(power > 0, with_control**2 / torch.where(power > 0, power, 1.0), 0.0)
    return (target.square().mean(0) - explained).clamp(min=0)


def wide_spread(first: Tensor, second: Tensor, line: Tensor | None) -> Tensor:
    """Variances (2, E, d) that are left of e and of t (see `pair_sums`) at wider noise, about their own means.

    From values (p, E, d) of both samples of p mirrored pairs, and their control, if there is one: what goes with its
    square is explained, with any slope, as slopes at wider noise are others. 0 where a value is not a number.
    """
    odd, even = (first - second).double() / 2, (first + second).double() / 2
    even = even - even.mean(0)
    square = torch.zeros_like(odd) if line is None else line.double() ** 2
    left = left_by_a_line(torch.stack([even, odd**2 + even**2], 1), square.unsqueeze(1))
    return (left * (len(first) / (len(first) - 2))).nan_to_num(0.0, 0.0, 0.0)  # two numbers were fitted


def unseen_spread(wide: Tensor, samples: Tensor) -> Tensor:
    """What that many samples, (E,), may have missed of the variances (2, E, d) of e and t: a share of `wide_spread`,
    n^{1/s² − 1}, and of t by SQUARES.
    """
    share = samples.unsqueeze(-1) ** (WIDENING**-2 - 1)
    return torch.stack([share, share / SQUARES]) * wide
