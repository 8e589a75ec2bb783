"""The rule of last resort: operations without a formula, known from a sketch's samples only.

Their mean is an average over the samples, and weights are pulled back through their derivatives at them. A black box is
the smallest part of the graph that takes real tensors and returns one: a Fourier transform goes up to where its numbers
are real again, and a singular value decomposition to the factor that is used. Operations with jumps are in none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from netmoments.files import first_line
from netmoments.memory import elements_together
from netmoments.network.graph import Node, Values, call, dtype_of, shape_of
from netmoments.precision import SUPPORTED_DTYPES
from netmoments.rules.base import Local, Nonlinearity, SketchedLayer, ThirdCumulants
from netmoments.rules.registry import RuledCall, operator_name

DISCONTINUOUS = {
    "hardshrink", "threshold", "remainder", "fmod", "frac", "floor_divide", "heaviside", "sign", "sgn", "bernoulli",
    "angle", "atan2",
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
    nodes: Sequence[Node], constants: Mapping[Node, Any], noisy: frozenset[Node], like: Tensor, name: str
) -> RuledCall | None:
    """Some nodes in order, of which only the last is used elsewhere, as one function of the noisy tensors they take.

    Between them there may be complex numbers and lists of results. None if there are jumps, whole numbers, truth values
    or numbers of a low precision, or if the function takes or returns anything but real tensors.
    """
    taken = dict.fromkeys(x for node in nodes for x in node.all_input_nodes if x in noisy and x not in nodes)
    inputs, last = tuple(taken), nodes[-1]
    if any(operator_name(node) in DISCONTINUOUS | IN_MEMORY or not _is_smooth(node) for node in nodes):
        return None
    if not all(is_real_tensor(node) for node in (*inputs, last)):
        return None
    sizes = [shape_of(node).numel() for node in inputs]

    def function(z: Tensor) -> Tensor:
        values: Values = dict(constants)
        for node, part in zip(inputs, z.split(sizes), strict=True):
            values[node] = part.reshape(shape_of(node)).to(dtype_of(node))
        for node in nodes:
            values[node] = call(node, values)
        return values[last].reshape(-1).to(z.dtype, copy=True)

    windows = torch.zeros(shape_of(last).numel(), 0, dtype=torch.int64, device=like.device)
    return RuledCall(BlackBox(name, function, windows), inputs)


def is_real_tensor(node: Node) -> bool:
    """Whether a node's value is one tensor of real numbers, as rules take and return them."""
    value = node.meta["val"]
    return isinstance(value, Tensor) and value.dtype in SUPPORTED_DTYPES


def _is_smooth(node: Node) -> bool:
    """Whether a node's value may be inside a black box: several results, or numbers that are not rounded."""
    value = node.meta["val"]
    return not isinstance(value, Tensor) or value.dtype in (*SUPPORTED_DTYPES, torch.complex64, torch.complex128)
