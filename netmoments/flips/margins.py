"""What a network says about one noisy input, in whitened noise: its scores, its margins, their gradients, and the count
of runs.

An input is x = mean + L ε with ε ~ N(0, I), whatever the covariance L Lᵀ is: isotropic, diagonal, dense or of low rank.
The margin of a rival is f_j(ε) = score_label − score_j; noise flips the answer where some margin is negative.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from netmoments.gaussian import Gaussian, random_seed
from netmoments.memory import directions_at_once, elements_together
from netmoments.network.model import NetworkModel
from netmoments.precision import full_precision, without_cudnn
from netmoments.sampling.fast_network import FastNetwork, fast_network

LOOKED_AT = 7
"""Samples, beside the mean, at which outputs must be probabilities to be taken for such."""
BACKWARD = 2
"""What a gradient costs beside the run it belongs to, in runs of the network."""


class OutOfTime(Exception):
    """The seconds that a caller allowed are over."""


@dataclass(eq=False)
class Clock:
    """When work must end; asked before every piece of it."""

    seconds: float | None = None
    start: float = field(default_factory=time.perf_counter)

    @property
    def over(self) -> bool:
        return self.seconds is not None and time.perf_counter() - self.start > self.seconds

    def require_time(self) -> None:
        if self.over:
            raise OutOfTime


@dataclass(eq=False)
class NoisyMargins:
    """The margins of one label against all others, for one entry of the noise, with the number of runs they took."""

    model: NetworkModel
    noise: Gaussian
    """One entry: its batch is (1,)."""
    label: int
    generator: torch.Generator
    clock: Clock = field(default_factory=Clock)
    caller: str = "flip_probability"
    advance: Callable[[int], None] = lambda count: None
    """Told how many runs were made: for a progress bar."""
    runs: int = field(default=0, init=False)
    """Of the network, but for the eight that tell what its outputs are; a backward pass counts two."""

    def __post_init__(self) -> None:
        self.fast: FastNetwork = fast_network(self.model)
        self.covariance = self.noise.covariance.entries(0)
        self.mean = self.noise.flat_mean[0]
        self.differentiable = self.model.differentiable and not any(
            x.is_inference() for x in self.model.network.parameters()
        )
        own = torch.Generator(self.mean.device).manual_seed(random_seed(0, "looked at", 0))
        with torch.no_grad():
            looked_at = self.inputs(
                torch.randn(LOOKED_AT, self.dimension, dtype=self.mean.dtype, device=self.mean.device, generator=own)
            )
            self.probabilities = are_probabilities(self.fast.values(torch.cat([self.noise.mean, looked_at])))

    @property
    def dimension(self) -> int:
        """How many standard normal numbers make a sample."""
        return self.covariance.normals

    @property
    def rivals(self) -> int:
        return self.model.outputs

    def normal(self, count: int) -> Tensor:
        """Standard normal numbers (count, n)."""
        return torch.randn(
            (count, self.dimension), dtype=self.mean.dtype, device=self.mean.device, generator=self.generator
        )

    def inputs(self, white: Tensor) -> Tensor:
        """x = mean + L ε for ε (N, n): (N, *event)."""
        coloured = self.covariance.coloured(white)
        return (self.mean + coloured).reshape(len(white), *self.noise.event_shape)

    def of(self, white: Tensor) -> Tensor:
        """The margins (N, d) at ε (N, n), in float64; the label's own is +∞."""
        piece = elements_together("pass", white, 2 * self.noise.size + self.dimension)
        parts = []
        for part in white.split(max(1, piece)):
            self.clock.require_time()
            parts.append(self._margins(self._comparable(self.fast.values(self.inputs(part)))))
            self._count(len(part))
        return torch.cat(parts)

    def with_gradients(self, white: Tensor, rivals: Tensor) -> tuple[Tensor, Tensor]:
        """The margins (N, d), and the gradient (N, n) in ε of the margin of one rival (N,) of each sample: Lᵀ∇f.

        A rival of −1 is the strongest one at that sample.
        """
        together = min(self.fast.batch, directions_at_once(self.mean.device, self.model.largest, 4, None))
        found = []
        for part, which in zip(white.split(together), rivals.split(together), strict=True):
            self.clock.require_time()
            found.append(self._with_gradients(part, which))
            self._count((1 + BACKWARD) * len(part))
        return torch.cat([x for x, _ in found]), torch.cat([x for _, x in found])

    def _with_gradients(self, white: Tensor, rivals: Tensor) -> tuple[Tensor, Tensor]:
        label = self.label

        def work(x: Tensor, which: Tensor) -> tuple[Tensor, ...]:
            with torch.enable_grad(), full_precision():
                x = x.detach().requires_grad_()
                scores = self._comparable(self.fast(x.clone()))  # which it may write into
                others = scores.detach().clone()
                others[:, label] = -torch.inf
                which = torch.where(which < 0, others.argmax(1), which)
                margin = scores[:, label] - scores.gather(1, which.unsqueeze(1)).squeeze(1)
                (slope,) = torch.autograd.grad(margin.sum(), x)
            return scores.detach(), slope

        with torch.enable_grad():
            leaf = white.detach().requires_grad_()
            x = self.inputs(leaf)
            try:
                scores, slope = self.fast.replayed(("margin", label, self.probabilities), work, x.detach(), rivals)
            except RuntimeError:
                with without_cudnn():
                    scores, slope = work(x.detach(), rivals)
            (pulled,) = torch.autograd.grad(x, leaf, slope.to(x.dtype))
        return self._margins(scores), pulled

    def _comparable(self, scores: Tensor) -> Tensor:
        """The scores, of a softmax their logarithms: the same one is the largest, and margins are nearer to linear."""
        return scores.clamp(min=torch.finfo(scores.dtype).tiny).log() if self.probabilities else scores

    def _margins(self, scores: Tensor) -> Tensor:
        scores = scores.double()
        if not bool(torch.isfinite(scores).all()):
            bad = int((~torch.isfinite(scores)).any(1).sum())
            raise ValueError(
                f"{self.caller}: {bad} of {len(scores)} samples gave NaN or infinite outputs, so that no class is the "
                f"largest; use less noise, clamp the network's input, or choose another output with key="
            )
        margins = scores[:, self.label].unsqueeze(1) - scores
        margins[:, self.label] = torch.inf
        return margins

    def _count(self, runs: int) -> None:
        self.runs += runs
        self.advance(runs)


def are_probabilities(scores: Tensor) -> bool:
    """Whether scores (N, d) are not negative and sum to 1, as those of a softmax."""
    return bool((scores >= 0).all()) and bool(((scores.sum(1) - 1).abs() < 1e-3).all())
