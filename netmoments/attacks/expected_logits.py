"""Expected logits as a module: what any attack library takes for a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from netmoments.affine_relu_affine import AffineReluAffine
from netmoments.checks import describe, require_float_tensor
from netmoments.gaussian import Gaussian, Isotropic
from netmoments.linearize.two_stage import two_stage
from netmoments.moments.propagated import expected_layerwise, plan_of, require_fitting, sketch_plan_of
from netmoments.network.inspection import as_network, inspect
from netmoments.precision import matvec
from netmoments.propagate.sketch import PROBES, sketched
from netmoments.relu.marginal import relu_mean

CALLER = "ExpectedLogits"


class ExpectedLogits(nn.Module):
    """E g(x + ε) for ε ~ N(0, σ²I): from images (N, ...), and a shift μ of their shape, to expected scores (N, d).

    Args:
        network: an `AffineReluAffine`, for which this is exact, or any network.
        sigma: standard deviation of the noise on every pixel: a number, or a tensor () or (N,), through which it is
            differentiable too.
        at: the images (N, ...) at which a network is linearized, once, as the paper does: later images are then
            looked at from there, and there must be as many. Without it every call linearizes at its own images.
        method: for a network, "two-stage" (the linearization, as the paper does), "layerwise" or "sketch": see
            `output_moments`. The last two are tighter, and slower; they follow the network wherever images go.
        layer: for "two-stage", the ReLU that is kept; see `two_stage`.
        probes, seed: for "sketch".
        memory_budget: see `output_moments`.

    Differentiable in the images, in μ and in sigma; by "layerwise" and "sketch" in the network's weights too. Where a
    call linearizes at its own images, the derivative is the expected slope B diag(Φ(h)) A + D there.

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
        method: str = "two-stage",
        layer: int | str = -1,
        probes: int = PROBES,
        seed: int = 0,
        memory_budget: int | None = None,
    ) -> None:
        super().__init__()
        if method not in METHODS:
            raise ValueError(f"{CALLER}: method must be one of {', '.join(METHODS)}, got {method!r}")
        if method != "two-stage" and (at is not None or isinstance(network, AffineReluAffine)):
            raise ValueError(f'{CALLER}: at=, and an AffineReluAffine, are for method="two-stage", got {method!r}')
        self.sigma = require_sigma(CALLER, sigma)
        self.method, self.layer, self.memory_budget = method, layer, memory_budget
        self.probes, self.seed = probes, seed
        self.network: nn.Module | None = None
        self._fixed: tuple[AffineReluAffine, Tensor] | None = None
        if isinstance(network, AffineReluAffine):
            if at is not None:
                raise ValueError(f"{CALLER}: an AffineReluAffine is linearized already; leave out at=")
            self._fixed = _with_reach(network)
        else:
            self.network = as_network(network, CALLER)
            self._fixed = None if at is None else _with_reach(self._linearized(at))
        self.train(False)

    def _linearized(self, at: Tensor) -> AffineReluAffine:
        return two_stage(self.network, at, self.layer, memory_budget=self.memory_budget)

    def forward(self, images: Tensor, mu: Tensor | None = None) -> Tensor:
        require_float_tensor(CALLER, "images", images)
        if self.method != "two-stage":
            return self._propagated(images if mu is None else images + mu)
        flat, reach = self._fixed or _with_reach(self._linearized(images.detach()))
        if flat.batch_shape and images.shape[0] != flat.batch_shape[0]:
            raise ValueError(f"{CALLER}: linearized at {flat.batch_shape[0]} images, got {describe(images)}")
        shifted = images if mu is None else images + mu
        sigma = torch.as_tensor(self.sigma, dtype=images.dtype, device=images.device)
        expected = relu_mean(flat.pre_activation(shifted), sigma.unsqueeze(-1) * reach)
        scores = matvec(flat.B, expected) + flat.c2
        return scores if flat.D is None else scores + matvec(flat.D, shifted.flatten(shifted.dim() - images.dim() + 1))

    def _propagated(self, images: Tensor) -> Tensor:
        """Expected scores by a method that goes through the network's layers, image by image."""
        network = self.network
        assert network is not None
        count = inspect(network, images.detach(), CALLER).output.shape[1]
        plan = (plan_of if self.method == "layerwise" else sketch_plan_of)(network, images, CALLER)
        rows = torch.arange(count, device=images.device)
        sigma = torch.as_tensor(self.sigma, dtype=images.dtype, device=images.device).expand(len(images))
        levels = Isotropic(sigma.detach() ** 2, images[0].numel())
        noise = Gaussian(images.detach(), levels, event_ndim=images.dim() - 1)
        if self.method == "layerwise":
            require_fitting(plan, noise, self.memory_budget, CALLER)
            followed = Gaussian._trusted(images, Isotropic(sigma**2, images[0].numel()), images.dim() - 1)
            return expected_layerwise(plan, followed, rows.expand(len(images), -1), self.memory_budget)[0]
        found = sketched(
            plan, images, Isotropic(sigma**2, images[0].numel()), rows.expand(len(images), -1),
            probes=self.probes, seed=self.seed, memory_budget=self.memory_budget,
        )  # fmt: skip
        return found.mean


METHODS = ("two-stage", "layerwise", "sketch")


def require_sigma(caller: str, sigma: float | Tensor) -> float | Tensor:
    """A noise level above 0."""
    if isinstance(sigma, bool) or not isinstance(sigma, int | float | Tensor):
        raise TypeError(f"{caller}: sigma must be a number or a tensor, got {sigma!r}")
    if not bool((torch.as_tensor(sigma) > 0).all()) or not bool(torch.isfinite(torch.as_tensor(sigma)).all()):
        raise ValueError(f"{caller}: sigma must be a standard deviation above 0, got {sigma!r}")
    return sigma


def _with_reach(network: AffineReluAffine) -> tuple[AffineReluAffine, Tensor]:
    """A linearized network and the lengths of the rows of its A, a unit's deviation for σ = 1."""
    return network, torch.linalg.vector_norm(network.A, dim=-1)
