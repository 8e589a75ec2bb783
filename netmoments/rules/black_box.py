"""The rule of last resort: an operation without a formula, known from a sketch's samples only.

Its mean is an average over the samples, and weights are pulled back through its derivatives at them. An operation with
jumps, or of another dtype, is no black box either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from netmoments.files import first_line
from netmoments.memory import elements_together
from netmoments.network.graph import Node, call, shape_of
from netmoments.rules.base import Local, Nonlinearity, SketchedLayer, ThirdCumulants
from netmoments.rules.registry import RuledCall, operator_name

DISCONTINUOUS = {
    "hardshrink", "threshold", "remainder", "fmod", "frac", "floor_divide", "heaviside", "sign", "sgn", "bernoulli",
}  # fmt: skip
"""Operations with jumps, which derivatives do not see. (Rounding, whose derivative is 0, is noticed when it runs.)"""

IN_MEMORY = {"as_strided", "as_strided_copy", "as_strided_scatter"}
"""Operations whose result depends on where numbers lie in memory, which a function of numbers does not know."""


@dataclass(frozen=True, eq=False)
class BlackBox(Nonlinearity):
    """y = function(z), any differentiable function from (p,) to (n,)."""

    name: str
    function: Callable[[Tensor], Tensor]
    windows: Tensor
    """(n, 0): no unit has a window."""

    @property
    def has_formula(self) -> bool:
        return False

    def local(self, mean: Tensor, covariance: Tensor, cumulants: ThirdCumulants | None = None) -> Local:
        self._refuse()

    def values(self, z: Tensor) -> Tensor:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise NotImplementedError(f"{self.name} has no formula; it is known from samples only")

    def in_sketch(self, mean: Tensor, samples: Tensor) -> SketchedLayer:
        """Mean and expected slopes are averages over the samples, shifted so that their mean is right."""
        shifted = mean.unsqueeze(1) + (samples - samples.mean(1, keepdim=True)).detach()
        together = elements_together("pass", samples, max(samples.shape[-1], self.units))
        values, shifted_values = (
            self._at(x.flatten(0, 1), together).unflatten(0, samples.shape[:2]) for x in (samples, shifted)
        )
        varies = values.detach().std(1).any(-1)
        shifted = shifted.detach()

        def pull_back(weights: Tensor) -> Tensor:
            pulled = torch.stack([self._expected_pull(z, a, together) for z, a in zip(shifted, weights, strict=True)])
            lost = varies & weights.flatten(1).any(-1) & ~pulled.flatten(1).any(-1)
            if bool(lost.any()):
                raise ValueError(
                    f"sketch: {self.name} changes with its input, but its derivative is zero (rounding?), so that "
                    f'nothing can be said from it; use method="sampling"'
                )
            return pulled

        return SketchedLayer(shifted_values.mean(1), values, pull_back, None)

    def _at(self, z: Tensor, together: int) -> Tensor:
        """The values (K, n) at samples (K, p)."""
        with self._named_failure():
            return torch.func.vmap(self.function, chunk_size=together)(z)

    def _expected_pull(self, samples: Tensor, weights: Tensor, together: int) -> Tensor:
        """aᵀ E[∂f], the mean over samples (K, p), for rows of weights a (k, n): (k, p)."""
        total = weights.new_zeros(len(weights), samples.shape[1])
        with self._named_failure():
            for sample in samples:
                back = torch.func.vjp(self.function, sample)[1]
                total += torch.func.vmap(lambda row, back=back: back(row)[0], chunk_size=together)(weights)
        return total / len(samples)

    @contextmanager
    def _named_failure(self) -> Iterator[None]:
        """Name the operation in errors that torch raises where it cannot differentiate it, or map it over samples."""
        try:
            yield
        except (RuntimeError, NotImplementedError) as error:
            raise ValueError(
                f"sketch: {self.name} has no rule, and cannot be differentiated over samples: {first_line(error)}; use "
                f'method="sampling"'
            ) from error


def black_box(
    node: Node, constants: Mapping[Node, Any], noisy: frozenset[Node], like: Tensor, name: str
) -> RuledCall | None:
    """A node as a function of its noisy arguments, flattened and put end to end; None for jumps or another dtype."""
    inputs = tuple(argument for argument in node.all_input_nodes if argument in noisy)
    if operator_name(node) in DISCONTINUOUS | IN_MEMORY:
        return None
    value = node.meta["val"]
    first = value if isinstance(value, Tensor) else value[0]
    sizes = [shape_of(argument).numel() for argument in inputs]
    if first.dtype != like.dtype or not all(_is_tensor_of(argument, like.dtype) for argument in inputs):
        return None

    def function(z: Tensor) -> Tensor:
        parts = z.split(sizes)
        noisy_values = {x: part.reshape(shape_of(x)) for x, part in zip(inputs, parts, strict=True)}
        result = call(node, {**constants, **noisy_values})
        return (result if isinstance(result, Tensor) else result[0]).reshape(-1).clone()

    windows = torch.zeros(first.numel(), 0, dtype=torch.int64, device=like.device)
    return RuledCall(BlackBox(name, function, windows), inputs)


def _is_tensor_of(node: Node, dtype: torch.dtype) -> bool:
    value = node.meta["val"]
    return isinstance(value, Tensor) and value.dtype == dtype
