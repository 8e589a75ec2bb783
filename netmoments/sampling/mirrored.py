"""Moments from a few mirrored pairs of samples: what a formula's answer is compared with.

A pair is y₊ = f(m + δ) and y₋ = f(m − δ). About a centre a near the mean, with e = (y₊ + y₋)/2 − a and o = (y₊ − y₋)/2,

    E e = μ − a,        E t = Cov f + (μ − a)(μ − a)ᵀ for t = o oᵀ + e eᵀ.

The controls are products ℓᵢℓⱼ of the linear functions ℓ = S δ, with known means (S Σ Sᵀ)ᵢⱼ: ℓᵢ² for eᵢ, ℓᵢℓⱼ for tᵢⱼ.
The slopes S are gradients of the network. The coefficients are fitted to the same pairs, which biases an estimate by
1/pairs of the spread that the control leaves: far less than its error, which is 1/√pairs of that. `adaptive` is for
more samples; it fits across folds, and draws until a tolerance is met.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Generator, Tensor

from netmoments.gaussian import Gaussian
from netmoments.memory import elements_together, inputs_together
from netmoments.network.model import NetworkModel
from netmoments.precision import full_precision
from netmoments.progress import progress_bar
from netmoments.sampling.estimate import (
    PILOT,
    WIDE_PAIRS,
    WIDENING,
    PairEstimate,
    allowing_for_skewness,
    allowing_for_the_unseen,
    counts_of_infinite,
    infinite_outputs,
    wide_residuals,
)
from netmoments.sampling.fast_network import FastNetwork, fast_network
from netmoments.sampling.slopes import GRADIENT_RUNS, gradients_under_noise, linear_controls

GRADIENTS_SHARE = 0.25
"""Gradients may cost so much of the runs; they are taken at two mirrored points, at the mean, or not at all."""


def mirrored_moments(
    model: NetworkModel,
    noise: Gaussian,
    outputs: Tensor | None,
    runs: int,
    *,
    products: bool,
    seed: int,
) -> tuple[PairEstimate, int]:
    """Moments of the outputs (all, or those with indices (E, k)) for noise with one batch dimension, E inputs.

    They come from about so many runs of the network for each input, and a few gradients; how many that were, a gradient
    counted as one, is returned too. `products` asks for all covariances, else there are variances only. As many inputs
    and pairs go together as fit into a piece of work. The errors allow for what so few samples cannot have shown, and
    for skewness (see `estimate`).
    """
    count, pairs = model.outputs if outputs is None else outputs.shape[1], runs // 2
    together = inputs_together(noise.mean, pairs, count, products, len(MirroredSums._fields))
    points = min(2, int(GRADIENTS_SHARE * runs / (GRADIENT_RUNS * count) + 0.5))
    generator = Generator(noise.device).manual_seed(seed)
    estimates, taken = [], 2 * pairs
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        full_precision(),
        progress_bar("comparing", len(noise.mean)) as show,
    ):
        network = fast_network(model)
        for start in range(0, len(noise.mean), together):
            show(start)
            entries = slice(start, start + together)
            inputs = noise if together >= len(noise.mean) else noise.entries(entries)
            chosen = None if outputs is None else outputs[entries]
            slopes = gradients_under_noise(model, network, inputs, chosen, points, generator)
            taken = 2 * pairs + (0 if slopes is None else points)
            estimates.append(MirroredPairs(network, inputs, chosen, slopes, generator).estimate(pairs, count, products))
    return PairEstimate(*map(torch.cat, zip(*estimates, strict=True))), taken


class MirroredPairs(NamedTuple):
    """Mirrored pairs of samples of E inputs: how they are drawn, and what follows from them."""

    network: FastNetwork
    noise: Gaussian
    outputs: Tensor | None
    """Indices (E, d) of the wanted outputs; None for all."""
    slopes: Tensor | None
    """S, (E, d, n)."""
    generator: Generator

    def drawn(self, pairs: int, widening: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
        """Values (p, E, d) at both samples of so many pairs, at noise of so many times the deviation, and ℓ (p, E, d).

        Without slopes ℓ is 0.
        """
        deviations = widening * self.noise.covariance.draw((pairs, len(self.noise.mean)), self.generator)
        first, second = self.network.pairs(self.noise.mean.detach(), deviations, None, self.outputs)
        control = linear_controls(self.slopes, deviations, None)
        return first, second, torch.zeros_like(first) if control is None else control[0]

    def estimate(self, pairs: int, count: int, products: bool) -> PairEstimate:
        """The moments of `count` outputs from so many pairs, of which some are at wider noise if there are enough."""
        mean = self.noise.mean
        wide = self.residuals_at_wider_noise() if pairs >= PILOT else None
        if wide is not None:
            pairs -= WIDE_PAIRS
        numbers_each = 2 * (self.noise.size + len(MirroredSums._fields) * count)
        together = elements_together("pass", mean, len(mean) * numbers_each)
        first, second, linear = self.drawn(min(together, pairs))
        centre = (0.5 * (first.double() + second.double())).mean(0)
        sums = sums_of(first, second, linear, centre, products)
        for begun in range(together, pairs, together):
            block = sums_of(*self.drawn(min(together, pairs - begun)), centre, products)
            sums = MirroredSums(*map(torch.add, sums, block))
        if bool(sums.infinite.any()):
            raise infinite_outputs(sums.infinite, 2 * pairs * len(mean))
        estimate = moments_of_sums(sums, pairs, centre, self.mean_of_control(centre, products))
        samples = torch.full((len(mean),), 2.0 * pairs, dtype=torch.float64, device=mean.device)
        return allowing_for_skewness(allowing_for_the_unseen(estimate, samples, wide))

    def residuals_at_wider_noise(self) -> Tensor | None:
        """`wide_residuals`; None if the network refuses inputs that the noise itself would hardly produce."""
        try:
            return wide_residuals(*self.drawn(WIDE_PAIRS, WIDENING))
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception:
            return None

    def mean_of_control(self, like: Tensor, products: bool) -> Tensor:
        """The mean of ℓᵢℓⱼ, (E, d, d), or of ℓᵢ², (E, d), in float64; `like` is (E, d)."""
        if self.slopes is None:
            return torch.zeros_like(like.unsqueeze(-1).expand(*like.shape, like.shape[1]) if products else like)
        covariance, size = self.noise.covariance, self.slopes.abs().amax(-1).clamp(min=1e-30)
        slopes, size = self.slopes / size.unsqueeze(-1), size.double()  # squares of slopes may be beyond float32
        if products:
            return covariance.push(slopes).double() * size.unsqueeze(-1) * size.unsqueeze(-2)
        return covariance.push_diagonal(slopes).double() * size.square()


class MirroredSums(NamedTuple):
    """Sums over p pairs of E inputs: of e, (E, d); and of products, for all pairs of d outputs or for each alone."""

    e: Tensor
    e_control: Tensor
    """Of eᵢℓᵢ², (E, d)."""
    e_e: Tensor
    """Of eᵢeⱼ, (E, d, d), or eᵢ², (E, d); the following are alike."""
    target: Tensor
    """Of tᵢⱼ."""
    target_square: Tensor
    target_control: Tensor
    """Of tᵢⱼℓᵢℓⱼ."""
    control: Tensor
    """Of ℓᵢℓⱼ."""
    control_square: Tensor
    infinite: Tensor
    """`counts_of_infinite`."""


def sums_of(first: Tensor, second: Tensor, linear: Tensor, centre: Tensor, products: bool) -> MirroredSums:
    """The sums over pairs with values (p, E, d) and ℓ (p, E, d), about a centre (E, d)."""

    def squares(x: Tensor) -> Tensor:
        """The sum over the pairs of x xᵀ, or of the squares alone."""
        return x.movedim(0, 1).mT @ x.movedim(0, 1) if products else x.square().sum(0)

    infinite = counts_of_infinite(torch.cat([first, second]))
    first, second, linear = first.double() - centre, second.double() - centre, linear.double()
    e, o = 0.5 * (first + second), 0.5 * (first - second)
    e_e = squares(e)
    return MirroredSums(
        e=e.sum(0),
        e_control=(e * linear.square()).sum(0),
        e_e=e_e,
        target=squares(o) + e_e,
        target_square=squares(o.square()) + squares(e.square()) + 2 * squares(o * e),
        target_control=squares(o * linear) + squares(e * linear),
        control=squares(linear),
        control_square=squares(linear.square()),
        infinite=infinite,
    )


def moments_of_sums(sums: MirroredSums, pairs: int, centre: Tensor, known: Tensor) -> PairEstimate:
    """The moments from sums over so many pairs about a centre, with `known` the mean of ℓᵢℓⱼ."""
    products = known.dim() == 3
    of_each = torch.stack([sums.e_e, sums.control, sums.control_square, known])
    e_e, control, control_square, mean_of_control = of_each.diagonal(dim1=-2, dim2=-1) if products else of_each
    mean, mean_error = regressed_on_control(
        pairs, sums.e, e_e, sums.e_control, control, control_square, mean_of_control
    )
    second, second_error = regressed_on_control(
        pairs, sums.target, sums.target_square, sums.target_control, sums.control, sums.control_square, known
    )
    # subtract an unbiased estimate of (μ − a)(μ − a)ᵀ, from products of different pairs
    square = sums.e.unsqueeze(-1) * sums.e.unsqueeze(-2) if products else sums.e.square()
    second = second - (square - sums.e_e) / (pairs * (pairs - 1))
    return PairEstimate(centre + mean, second, mean_error, second_error)


def regressed_on_control(
    count: int,
    total: Tensor,
    square: Tensor,
    with_control: Tensor,
    control: Tensor,
    control_square: Tensor,
    known: Tensor,
) -> tuple[Tensor, Tensor]:
    """The mean of y with a control u of mean `known`, and its squared error, from sums of y, y², yu, u and u².

    The mean is that of the regression at u = `known`. Two coefficients are fitted, which the squared error allows for.
    """
    mean, middle = total / count, control / count
    varies, shared = control_square / count - middle.square(), with_control / count - mean * middle
    useful = varies > 1e-12 * control_square / count
    slope = torch.where(useful, shared / torch.where(useful, varies, 1.0), 0.0)
    residual = (square / count - mean.square() - slope * shared).clamp(min=0)
    return mean - slope * (middle - known), residual / (count - 2)
