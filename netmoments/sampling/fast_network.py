"""A network's values as fast as this machine gives them: on a private copy, folded and laid out for speed.

A sampler runs a network thousands of times on inputs of one shape. What pays is the same everywhere: batch
normalisations folded into the layers before them, convolutions with channels last, batches that stay in the cache of a
CPU or fill a GPU, and on a GPU half precision and runs that are recorded once. Which of these pay for a network is
measured when it is first sampled, and kept with what is known of it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from netmoments.network.model import NetworkModel
from netmoments.network.replica import TensorSlots, replica
from netmoments.network.validate import same_values
from netmoments.precision import full_precision
from netmoments.propagate.replay import replayed

LEAST_BATCH, MOST_BATCH = 8, 512
"""Inputs at a time on a CPU: more than the largest never paid, and a batch should end before a second is over."""
PATIENCE = 0.25
"""Seconds: no larger batch is tried once a batch takes this long."""
GPU_BYTES = 2**31
"""What the largest tensor of a batch may take on a GPU."""

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True, eq=False)
class FastNetwork:
    """A copy of a network that takes inputs (N, ...) and gives outputs (N, d), some inputs at a time.

    It shares nothing with the network but what cannot be copied, its weights take no gradient, and it gives the
    network's values to rounding, in `dtype`.
    """

    run: Callable[[Tensor], Tensor]
    dtype: torch.dtype
    layout: torch.memory_format
    batch: int
    recordings: dict[Any, Any] | None = None
    """Of runs on a GPU, by shape."""

    def prepared(self, inputs: Tensor) -> Tensor:
        """Inputs in the dtype and layout that the copy likes."""
        if self.layout == torch.contiguous_format:
            return inputs.to(self.dtype)
        return inputs.to(self.dtype, memory_format=self.layout)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Outputs (N, d); may be differentiated in the inputs."""
        return self.run(self.prepared(inputs))

    def values(self, inputs: Tensor) -> Tensor:
        """Outputs (N, d) without derivatives, a batch at a time."""
        with torch.no_grad(), full_precision():
            if len(inputs) <= self.batch:
                return self._batch(inputs)
            return torch.cat([self._batch(part) for part in inputs.split(self.batch)])

    def _batch(self, inputs: Tensor) -> Tensor:
        if self.recordings is None:
            return self(inputs)
        return replayed(self.recordings, lambda x: (self(x),), inputs)[0]


def fast_network(model: NetworkModel) -> FastNetwork:
    """The copy of a model's network for its dtype, made and tuned once, and again when the weights change."""
    with torch.no_grad():
        return model.kept("fast network", lambda: _tuned(model, model.image.dtype))


def low_precision_network(model: NetworkModel, dtype: torch.dtype) -> FastNetwork:
    """The same in half precision: not the network's values, so whoever uses it must correct them."""
    with torch.no_grad():
        return model.kept(("fast network", dtype), lambda: _tuned(model, dtype))


def _tuned(model: NetworkModel, dtype: torch.dtype) -> FastNetwork:
    """The fastest of the copies, with the batch it likes best."""
    with torch.inference_mode(False), torch.no_grad(), full_precision():
        image = model.image.detach().clone()
        twins = {torch.contiguous_format: _copy(model, image, dtype, torch.contiguous_format)}
        if image.dim() == 4:
            twins[torch.channels_last] = _copy(model, image, dtype, torch.channels_last)
        if image.device.type == "cuda":
            largest = model.largest * dtype.itemsize
            batch = 2 ** int(max(3, min(14, (GPU_BYTES // max(1, largest)).bit_length() - 1)))
            batch = min(batch, model.most_images)
            made = [FastNetwork(run, dtype, layout, batch, {}) for layout, run in twins.items()]
            return min(made, key=lambda one: _seconds(one, image, min(batch, 1024)))
        start = min(LEAST_BATCH, model.most_images)
        made = [FastNetwork(run, dtype, layout, start) for layout, run in twins.items()]
        chosen = min(made, key=lambda one: _seconds(one, image, min(64, model.most_images)))
        best, least, size = start, float("inf"), start
        while size <= min(MOST_BATCH, model.most_images):
            seconds = _seconds(chosen, image, size)
            if seconds / size < 0.98 * least:
                best, least = size, seconds / size
            if seconds > PATIENCE:
                break
            size *= 2
        return replace(chosen, batch=best)


def _seconds(network: FastNetwork, image: Tensor, count: int) -> float:
    """How long a batch takes: the least of three runs after a first one; of one alone where that takes long."""
    inputs = image.repeat(count, *(1,) * (image.dim() - 1))
    taken = []
    for _ in range(4):
        start = time.perf_counter()
        network(inputs)
        if inputs.device.type == "cuda":
            torch.cuda.synchronize(inputs.device)
        taken.append(time.perf_counter() - start)
        if taken[-1] > PATIENCE:
            return taken[-1]
    return min(taken[1:])


def _copy(
    model: NetworkModel, image: Tensor, dtype: torch.dtype, layout: torch.memory_format
) -> Callable[[Tensor], Tensor]:
    """A twin with weights of its own, folded where that changes nothing."""
    folded = _with_own_weights(model.network, image, dtype, layout, fold=True)
    if folded is not None:
        wanted = model.network(image.clone())
        exact = dtype != image.dtype or same_values(wanted, folded(image.to(memory_format=layout)))
        if exact:
            return folded
    plain = _with_own_weights(model.network, image, dtype, layout, fold=False)
    assert plain is not None
    return plain


def _with_own_weights(
    network: nn.Module, image: Tensor, dtype: torch.dtype, layout: torch.memory_format, fold: bool
) -> nn.Module | None:
    twin = replica(network)
    if fold:
        pairs = foldable(twin, image)
        if pairs:
            for layer, norm in pairs:
                _fold(layer, norm)
            _replace(twin, {id(norm) for _, norm in pairs})
    slots = TensorSlots(twin)
    own = image.dtype
    slots.fill(
        {name: _laid_out(x.detach(), dtype if x.dtype == own else x.dtype, layout) for name, x in slots.tensors.items()}
    )
    return twin


def _laid_out(x: Tensor, dtype: torch.dtype, layout: torch.memory_format) -> Tensor:
    if x.dim() == 4:
        return x.to(dtype, copy=True, memory_format=layout)
    return x.to(dtype, copy=True)


def foldable(twin: nn.Module, image: Tensor) -> list[tuple[nn.Module, nn.Module]]:
    """Pairs of a layer and a batch normalisation that takes exactly its output, each called once in a run."""
    calls: Counter[int] = Counter()
    made: dict[int, tuple[nn.Module, Tensor]] = {}
    found: list[tuple[nn.Module, nn.Module]] = []

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        calls[id(module)] += 1
        given = args[0] if args else None
        if type(module) in _NORMS and isinstance(given, Tensor) and id(given) in made:
            found.append((made[id(given)][0], module))
        if isinstance(output, Tensor) and type(module) not in _NORMS:
            made[id(output)] = module, output  # held, so that no other tensor gets its id

    candidates = [module for module in twin.modules() if _may_fold(module)]
    handles = [module.register_forward_hook(after) for module in candidates]
    try:
        twin(image.clone())
    finally:
        for handle in handles:
            handle.remove()
    return [pair for pair in found if all(calls[id(module)] == 1 for module in pair)]


def _may_fold(module: nn.Module) -> bool:
    if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
        return False
    if type(module) in _NORMS:
        return module.running_mean is not None and module.running_var is not None
    return type(module) in (nn.Linear, *_CONVOLUTIONS, *_TRANSPOSED) and module._parameters.get("weight") is not None


def _fold(layer: nn.Module, norm: nn.Module) -> None:
    """γ(Wx + b − μ)/√(v + ε) + β as one layer: W and b of each output channel scaled, in float64."""
    mean, variance = norm.running_mean.double(), norm.running_var.double()  # type: ignore[union-attr, operator]
    scale = (variance + norm.eps).rsqrt()  # type: ignore[operator]
    if norm.weight is not None:
        scale = scale * norm.weight.detach().double()  # type: ignore[operator]
    shift = -mean * scale
    if norm.bias is not None:
        shift = shift + norm.bias.detach().double()  # type: ignore[operator]
    weight = layer.weight.detach()
    assert isinstance(weight, Tensor)
    if type(layer) in _TRANSPOSED:
        groups = layer.groups
        grouped = weight.double().unflatten(0, (groups, -1))  # type: ignore[arg-type]
        by_channel = scale.reshape(groups, 1, -1, *(1,) * (weight.dim() - 2))  # type: ignore[arg-type, misc]
        folded = (grouped * by_channel).flatten(0, 1)
    else:
        folded = weight.double() * scale.reshape(-1, *(1,) * (weight.dim() - 1))
    bias = shift if layer.bias is None else shift + layer.bias.detach().double() * scale  # type: ignore[operator]
    layer._parameters["weight"] = nn.Parameter(folded.to(weight.dtype), requires_grad=False)
    layer._parameters["bias"] = nn.Parameter(bias.to(weight.dtype), requires_grad=False)


def _replace(twin: nn.Module, norms: set[int]) -> None:
    """Have the folded normalisations do nothing, wherever the twin holds them."""
    for module in twin.modules():
        if id(module) in norms:
            vars(module)["forward"] = _unchanged


def _unchanged(x: Tensor) -> Tensor:
    return x
