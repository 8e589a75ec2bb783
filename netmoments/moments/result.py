"""What comes out of the front door: moments of the chosen scores, and what follows from them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from netmoments.checks import describe
from netmoments.moments.class_probabilities import losing_probability, winning_probabilities
from netmoments.sampling.monte_carlo import SampledMoments, relative_difference


@dataclass(frozen=True, eq=False)
class OutputMoments:
    """Mean, variance and covariance of a network's scores under noise, and how they were computed.

    Shapes: (*batch, k), covariance (*batch, k, k), for the k chosen scores.
    """

    mean: Tensor
    variance: Tensor
    covariance: Tensor
    method: str
    cut: str | None = None
    """The ReLU that was kept, for method "two-stage"."""
    outputs: Tensor | None = None
    """Which scores these are, (*batch, k); None if all."""
    distance: Tensor | None = None
    """How far the point of linearization was from the input, for a bank, (*batch)."""
    mean_standard_error: Tensor | None = None
    variance_standard_error: Tensor | None = None
    covariance_standard_error: Tensor | None = None
    reason: str | None = None
    """Why this method, where `method="auto"` chose it."""

    def to(self, *args: Any, **kwargs: Any) -> OutputMoments:
        """Convert to another dtype or device, as `Tensor.to` does; which scores they are stays integer."""
        tensors: dict[str, Any] = {
            field.name: value.to(*args, **kwargs)
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), Tensor) and value.is_floating_point()
        }
        where = None if self.outputs is None else self.outputs.to(tensors["mean"].device)
        return dataclasses.replace(self, **tensors, outputs=where)

    def class_probabilities(self) -> Tensor:
        """How often each class would win, (*batch, k), if the scores were Gaussian with these moments.

        Of a choice of scores, how often each would win among them. They sum to 1, small ones are accurate relative to
        their size, they are in float64 (float32 ends at 1e-45) and carry no gradient.
        """
        return winning_probabilities(self.mean.detach().double(), self.covariance.detach().double())

    def flip_probability(self, label: int | Tensor) -> Tensor:
        """How often another class than `label` would win, (*batch); see `class_probabilities`.

        `label` is the class, an int or an int tensor of the batch's shape.
        """
        mean, covariance = self.mean.detach().double(), self.covariance.detach().double()
        return losing_probability(mean, covariance, self._position(label))

    def compare(self, other: OutputMoments | SampledMoments) -> Comparison:
        """The difference to sampled moments of the same scores, in units of those samples' standard errors."""
        if not isinstance(other, OutputMoments | SampledMoments):
            raise TypeError(f"compare: other must be moments, got {describe(other)}")
        if other.mean_standard_error is None:
            raise ValueError(
                'compare: other must be sampled (method="sampling", or monte_carlo), so that it has errors'
            )
        if self.mean.shape != other.mean.shape:
            raise ValueError(
                f"compare: both must be of the same scores, got shapes {tuple(self.mean.shape)} and "
                f"{tuple(other.mean.shape)}; give both the same outputs="
            )
        if isinstance(other, OutputMoments) and not torch.equal(self._scores(), other._scores()):
            raise ValueError("compare: both must be of the same scores; give both the same outputs=")
        parts: dict[str, Any] = {}
        for name in ("mean", "variance", "covariance"):
            mine, sampled = (getattr(moments, name).detach().double().cpu() for moments in (self, other))
            error = getattr(other, f"{name}_standard_error").double().cpu()
            parts[name] = _in_units_of(error, mine - sampled)
            if name != "covariance":
                parts[f"{name}_relative"] = relative_difference(mine, sampled)
        return Comparison(**parts)

    def _scores(self) -> Tensor:
        """Which scores these are, (*batch, k), on the CPU."""
        if self.outputs is None:
            return torch.arange(self.mean.shape[-1]).expand(self.mean.shape)
        return self.outputs.cpu()

    def _position(self, label: int | Tensor) -> int | Tensor:
        """Where the score of a class is among the chosen ones."""
        if self.outputs is None:
            return label
        wanted = torch.as_tensor(label, device=self.outputs.device)
        if wanted.is_floating_point() or wanted.dtype == torch.bool:
            raise TypeError(f"flip_probability: label must be an integer or a tensor of them, got {describe(label)}")
        batch = self.outputs.shape[:-1]
        try:
            wanted = wanted.expand(batch)
        except RuntimeError:
            raise ValueError(
                f"flip_probability: label must broadcast to the batch shape {tuple(batch)}, got {describe(label)}"
            ) from None
        hits = self.outputs == wanted.unsqueeze(-1)
        if not bool(hits.any(-1).all()):
            missing = wanted[~hits.any(-1)].flatten().tolist()
            raise ValueError(
                f"flip_probability: the score of class {missing[0]} is not among the chosen outputs; add it to outputs="
            )
        return hits.to(torch.uint8).argmax(-1)


@dataclass(frozen=True, eq=False)
class Comparison:
    """Differences to a sampled reference: in its standard errors, and relative, 2|x−y|/(|x|+|y|)."""

    mean: Tensor
    variance: Tensor
    covariance: Tensor
    mean_relative: Tensor
    variance_relative: Tensor

    def __str__(self) -> str:
        lines = []
        for name in ("mean", "variance"):
            relative, errors = getattr(self, f"{name}_relative"), getattr(self, name)
            lines.append(
                f"{name}: off by {float(relative.mean()):.2g} on average, {float(errors.abs().max()):.1f} SE at most"
            )
        return "; ".join(lines)


def _in_units_of(error: Tensor, difference: Tensor) -> Tensor:
    """difference/error; 0/0 is 0."""
    return torch.where(difference == 0, 0.0, difference / error)
