"""Functions that are like a network and whose moments are known exactly: what sampling is corrected with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from netmoments.affine_relu_affine import AffineReluAffine
from netmoments.checks import describe, require_broadcastable, require_finite
from netmoments.gaussian import Gaussian
from netmoments.gaussian.gaussian import require_matrix_for
from netmoments.precision import matvec
from netmoments.sampling.evaluation import for_entries


class Surrogate(Protocol):
    """A function ℓ of d outputs, with its exact moments under the noise that the samples are drawn from."""

    @property
    def mean(self) -> Tensor:
        """E ℓ(x), (*batch, d)."""
        ...

    @property
    def covariance(self) -> Tensor:
        """Cov ℓ(x), (*batch, d, d)."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """ℓ of samples (samples, *noise's batch, *event), as (samples, *batch, d)."""
        ...


@dataclass(frozen=True, eq=False)
class LinearSurrogate:
    """ℓ(x) = S (x − m) for slopes S (*batch, d, n) and noise N(m, Σ): mean 0, covariance S Σ Sᵀ; all in float64.

    S is the network's Jacobian at m or, better, its expected slope under the noise. Any S is right: a poor one helps
    less. An offset would not matter.
    """

    slopes: Tensor
    noise: Gaussian

    def __post_init__(self) -> None:
        _require_noise("LinearSurrogate", self.noise)
        require_matrix_for(self.noise, "LinearSurrogate", "slopes", self.slopes)
        require_finite("LinearSurrogate", "slopes", self.slopes)

    @property
    def batch_shape(self) -> torch.Size:
        return torch.broadcast_shapes(self.slopes.shape[:-2], self.noise.batch_shape)

    @cached_property
    def mean(self) -> Tensor:
        return self._slopes.new_zeros(*self.batch_shape, self.slopes.shape[-2])

    @cached_property
    def covariance(self) -> Tensor:
        outputs = self.slopes.shape[-2]
        pushed = self.noise.covariance.to(torch.float64).push(self._slopes).detach()
        return pushed.expand(*self.batch_shape, outputs, outputs)

    def __call__(self, x: Tensor) -> Tensor:
        deviation = x.double() - self.noise.mean.double()
        return matvec(self._slopes, for_entries(deviation, self.noise, self.batch_shape))

    @cached_property
    def _slopes(self) -> Tensor:
        return self.slopes.detach().double()


@dataclass(frozen=True, eq=False)
class TwoStageSurrogate:
    """ℓ(x) = B relu(A x + c₁) + c₂ (+ D x), a two-stage linearization, with its exact moments in float64.

    Values are in the network's dtype, which must be the noise's.
    """

    network: AffineReluAffine
    noise: Gaussian

    def __post_init__(self) -> None:
        _require_noise("TwoStageSurrogate", self.noise)
        if not isinstance(self.network, AffineReluAffine):
            raise TypeError(
                f"TwoStageSurrogate: network must be an AffineReluAffine, such as two_stage(network, image) gives, "
                f"got {describe(self.network)}"
            )
        require_matrix_for(self.noise, "TwoStageSurrogate", "A", self.network.A)
        _ = self.batch_shape

    @property
    def batch_shape(self) -> torch.Size:
        return require_broadcastable(
            "TwoStageSurrogate", network=self.network.batch_shape, noise=self.noise.batch_shape
        )

    @cached_property
    def mean(self) -> Tensor:
        mean = self._precise.mean(self.noise.to(torch.float64)).detach()
        return mean.expand(*self.batch_shape, mean.shape[-1])

    @cached_property
    def covariance(self) -> Tensor:
        covariance = self._precise.covariance(self.noise.to(torch.float64)).detach()
        return covariance.expand(*self.batch_shape, *covariance.shape[-2:])

    def __call__(self, x: Tensor) -> Tensor:
        return self.network(for_entries(x, self.noise, self.batch_shape))

    @property
    def _precise(self) -> AffineReluAffine:
        return self.network.to(torch.float64)


def _require_noise(caller: str, noise: Gaussian) -> None:
    if not isinstance(noise, Gaussian):
        raise TypeError(f"{caller}: noise must be a netmoments.Gaussian, got {describe(noise)}")
