"""Expected logits as a module, which any attack library takes for a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from netmoments.affine_relu_affine import AffineReluAffine
from netmoments.checks import describe, require_float_tensor, require_sigma
from netmoments.covariances import Isotropic
from netmoments.gaussian import Gaussian
from netmoments.linearize.two_stage import two_stage
from netmoments.moments.methods import Layerwise, Method, Sketch, TwoStage, method_named
from netmoments.network.model import NetworkModel, network_of
from netmoments.precision import matvec
from netmoments.propagate.layerwise import layerwise
from netmoments.propagate.plan import plan_of
from netmoments.propagate.sketch import sketched
from netmoments.relu.marginal import relu_mean
from netmoments.rules.black_box import black_box

CALLER = "ExpectedLogits"


class ExpectedLogits(nn.Module):
    """E g(x + ε) for ε ~ N(0, σ²I): maps images (N, ...), and a shift μ of their shape, to expected scores (N, d).

    Args:
        network: an `AffineReluAffine`, for which this is exact, or any network.
        sigma: standard deviation of the noise on every pixel: a number, or a tensor () or (N,).
        at: the images (N, ...) at which a network is linearized once, as the paper does. Later calls use these
            linearizations and must have as many images. Without it every call linearizes at its own images.
        method: for a network, `TwoStage(layer)` (the linearization, as the paper does), `Layerwise()` or
            `Sketch(probes, seed)`, or their short names: see `output_moments`. The last two are tighter, and slower;
            they follow the network wherever images go.
        memory_budget: see `output_moments`.

    Differentiable in the images, in μ and in a sigma that is a tensor; with "layerwise" and "sketch" in the network's
    weights too. Where a call linearizes at its own images, the derivative is the expected slope B diag(Φ(h)) A + D.

    >>> network = AffineReluAffine(torch.eye(2), torch.zeros(2), torch.ones(1, 2), torch.zeros(1))
    >>> ExpectedLogits(network, sigma=1.0)(torch.zeros(1, 2))
    tensor([[0.7979]])
    """

    def __init__(
        self,
        network: Any,
        sigma: float | Tensor,
        *,
        at: Tensor | None = None,
        method: Method | str = "two-stage",
        memory_budget: int | None = None,
    ) -> None:
        super().__init__()
        self.method = method_named(method, CALLER)
        self.sigma = require_sigma(CALLER, sigma)
        self.memory_budget = memory_budget
        if not isinstance(self.method, TwoStage | Layerwise | Sketch):
            raise ValueError(f"{CALLER}: method must be two-stage, layerwise or sketch, got {method!r}")
        if not isinstance(self.method, TwoStage) and (at is not None or isinstance(network, AffineReluAffine)):
            raise ValueError(f'{CALLER}: at=, and an AffineReluAffine, are for method="two-stage", got {method!r}')
        if isinstance(self.method, TwoStage) and self.method.bank is not None:
            raise ValueError(f"{CALLER}: a bank is for output_moments; give at=, the images to linearize at")
        self.network: nn.Module | None = None
        self._fixed: tuple[AffineReluAffine, Tensor] | None = None  # a linearization for all calls
        if isinstance(network, AffineReluAffine):
            if at is not None:
                raise ValueError(f"{CALLER}: an AffineReluAffine is linearized already; leave out at=")
            self._fixed = _with_row_lengths(network)
        else:
            self.network = network_of(network, CALLER)
            self._fixed = None if at is None else self._linearized(at, self.method)
        self.train(False)

    def _linearized(self, at: Tensor, method: Method) -> tuple[AffineReluAffine, Tensor]:
        assert isinstance(method, TwoStage)
        event_ndim = at.dim() - 1 if at.dim() > 1 else None
        linearized = two_stage(self.network, at, method.layer, event_ndim=event_ndim, memory_budget=self.memory_budget)
        return _with_row_lengths(linearized)

    def forward(self, images: Tensor, mu: Tensor | None = None) -> Tensor:
        require_float_tensor(CALLER, "images", images)
        if not isinstance(self.method, TwoStage):
            return self._propagated(images if mu is None else images + mu)
        network, row_lengths = self._fixed or self._linearized(images.detach(), self.method)
        if network.batch_shape and images.shape[0] != network.batch_shape[0]:
            raise ValueError(f"{CALLER}: linearized at {network.batch_shape[0]} images, got {describe(images)}")
        shifted = images if mu is None else images + mu
        shifted = shifted.flatten(shifted.dim() - images.dim() + 1) if images.dim() > 1 else shifted
        sigma = torch.as_tensor(self.sigma, dtype=images.dtype, device=images.device)
        expected = relu_mean(network.pre_activation(shifted), sigma.unsqueeze(-1) * row_lengths)
        scores = matvec(network.B, expected) + network.c2
        return scores if network.D is None else scores + matvec(network.D, shifted)

    def _propagated(self, images: Tensor) -> Tensor:
        """Expected scores (N, d) by a method that propagates moments through the network's layers."""
        model = NetworkModel.of(self.network, images.detach(), CALLER)
        outputs = torch.arange(model.outputs, device=images.device).expand(len(images), -1)
        sigma = torch.as_tensor(self.sigma, dtype=images.dtype, device=images.device).expand(len(images))
        Gaussian(images.detach(), Isotropic(sigma.detach() ** 2, images[0].numel()), event_ndim=images.dim() - 1)
        covariance = Isotropic(sigma**2, images[0].numel())
        if isinstance(self.method, Sketch):
            plan = plan_of(model, black_box)
            options = {"probes": self.method.probes, "seed": self.method.seed, "memory_budget": self.memory_budget}
            return sketched(plan, images, covariance, outputs, **options).mean  # type: ignore[arg-type]
        plan = plan_of(model)
        return layerwise(plan, images, covariance, outputs, self.memory_budget, CALLER)[0]


def _with_row_lengths(network: AffineReluAffine) -> tuple[AffineReluAffine, Tensor]:
    """A linearized network and the lengths of the rows of its A, which are its units' deviations for σ = 1."""
    return network, torch.linalg.vector_norm(network.A, dim=-1)
