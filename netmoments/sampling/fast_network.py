"""A network's values as fast as this machine can compute them, on a private copy that is tuned for speed.

A sampler runs a network thousands of times on inputs of one shape. Several things can make that faster: batch
normalisations folded into the layers before them, convolutions with channels last, batches that stay in the cache of a
CPU or fill a GPU, attention of short sequences as matrix products, low precision (corrected by whoever uses it, see
`two_level`), and on a GPU runs that are recorded once and replayed. Which of them pay for a network is measured when it
is first sampled, and kept with its model.
"""

from __future__ import annotations

import math
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from netmoments.memory import elements_together
from netmoments.network.model import NetworkModel
from netmoments.network.replica import TensorSlots, replica
from netmoments.network.validate import another_image, same_values
from netmoments.precision import full_precision, without_cudnn
from netmoments.propagate.replay import recorded

LEAST_BATCH, MOST_BATCH = 8, 512
"""The batch sizes tried on a CPU, in inputs: larger ones never paid, and a batch should take less than a second."""
BATCH_TRIED = 64
"""The batch in which images must be treated as in smaller ones; a smaller one if that is what is used."""
DECIDED_BY_ROUNDING = 2
"""Images of these that may have other values nevertheless."""
PATIENCE = 0.25
"""No larger batch is tried once a batch takes so many seconds."""
FASTER = 0.9
"""Low precision is used only if it takes less than this share of the time of float32."""
GPU_BYTES, GPU_SHARE = 2**28, 128
"""The largest tensor of a batch on a GPU may take so many bytes, and one in so many of its memory: enough to fill it.
"""

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True, eq=False)
class FastNetwork:
    """A copy of a network that maps inputs (N, ...) to outputs (N, d), a batch at a time.

    Its values are those of the network up to rounding in `dtype`. It shares nothing with the network but what cannot be
    copied, and its weights take no gradient.
    """

    run: Callable[[Tensor], Tensor]
    dtype: torch.dtype
    layout: torch.memory_format
    batch: int
    cost: float
    """Seconds that one input took when the batch was chosen."""
    recordings: dict[Any, dict[Any, Any]] | None = None
    """The recordings of work on a GPU, by kind and shapes; None on a CPU."""
    derivatives: Callable[[], AbstractContextManager[None]] = nullcontext
    """The context in which the copy can be differentiated (see `without_cudnn`)."""

    def __call__(self, inputs: Tensor) -> Tensor:
        """Outputs (N, d) of inputs (N, ...), which are converted to the copy's dtype and layout; differentiable in
        them.
        """
        if self.layout == torch.contiguous_format:
            return self.run(inputs.to(self.dtype))
        return self.run(inputs.to(self.dtype, memory_format=self.layout))

    def values(self, inputs: Tensor) -> Tensor:
        """Outputs (N, d) without derivatives, a batch at a time."""
        with torch.no_grad(), full_precision():
            if len(inputs) <= self.batch:
                return self._batch(inputs)
            return torch.cat(list(map(self._batch, inputs.split(self.batch))))

    def _batch(self, inputs: Tensor) -> Tensor:
        """One batch. On a GPU it is replayed, filled up to a power of two inputs so that few recordings are needed."""
        if self.recordings is None or torch.cuda.is_current_stream_capturing():
            return self(inputs)
        count = len(inputs)
        missing = 2 ** (count - 1).bit_length() - count
        if missing > 0:
            inputs = torch.cat([inputs, inputs[:1].expand(missing, *inputs.shape[1:])])
        return self.replayed("values", lambda x: (self(x),), inputs)[0][:count]

    def pairs(
        self, mean: Tensor, deviations: Tensor, others: Tensor | None, outputs: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Outputs (p, A, d) at both inputs of p pairs for each of A means (A, ...), in the dtype of the means.

        The first inputs are mean + deviation, with deviations (p, A, n). The second are mean + `others`, or mirrored,
        mean − deviation, without these. `outputs` (A, d) are the indices of the wanted outputs, None for all.
        """
        flat = mean.flatten(1)
        inputs = torch.stack([flat + deviations, flat - deviations if others is None else flat + others])
        values = self.values(inputs.reshape(-1, *mean.shape[1:])).reshape(*inputs.shape[:3], -1)
        if outputs is not None:
            values = values.gather(3, outputs.expand(*inputs.shape[:2], -1, -1))
        return values[0].to(mean.dtype), values[1].to(mean.dtype)

    def replayed(
        self, kind: Any, work: Callable[..., tuple[Tensor, ...]], *inputs: Tensor | None
    ) -> tuple[Tensor, ...]:
        """`work(*inputs)`; on a GPU recorded at the first call of this kind and these shapes, and replayed afterwards.

        The work must depend on nothing but the kind and the inputs; which of the inputs are None is part of the kind.
        """
        if self.recordings is None:
            return work(*inputs)
        gaps = tuple(x is None for x in inputs)

        def with_gaps(*tensors: Tensor) -> tuple[Tensor, ...]:
            given = iter(tensors)
            return work(*(None if gap else next(given) for gap in gaps))

        known = self.recordings.setdefault((kind, gaps), {})
        return recorded(known, with_gaps, *(x for x in inputs if x is not None))

    def gradients(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        """The gradient (N, ...) of one output of each input; `outputs` (N, 1) says which."""

        def work(x: Tensor, which: Tensor) -> tuple[Tensor, ...]:
            with torch.enable_grad(), self.derivatives():
                x = x.detach().requires_grad_()
                return torch.autograd.grad(self(x.clone()).gather(1, which).sum(), x)

        return self.replayed("gradients", work, inputs, outputs)[0]


def fast_network(model: NetworkModel) -> FastNetwork:
    """The fast copy of a model's network in its own dtype, made and tuned once, and again when the weights change.

    Its batches are as large as is fastest, or as fit into the model's budget of memory.
    """
    with torch.no_grad():
        network = model.kept("fast network", lambda: _tuned(model, model.image.dtype))
    return _within_budget(network, model)


def half_network(model: NetworkModel) -> FastNetwork | None:
    """The fast copy in float16 on a GPU, if that is faster. The caller corrects its values."""
    if model.image.device.type != "cuda" or model.image.dtype != torch.float32:
        return None
    return _lower(model, torch.float16)


def low_network(model: NetworkModel) -> FastNetwork | None:
    """The fast copy in bfloat16 on a CPU that has it, if that is faster. The caller corrects its values."""
    if model.image.device.type != "cpu" or model.image.dtype != torch.float32 or not has_bfloat16():
        return None
    return _lower(model, torch.bfloat16)


def _lower(model: NetworkModel, dtype: torch.dtype) -> FastNetwork | None:
    """The fast copy in low precision; None if that is no faster, or if the network cannot run in it."""

    def made() -> FastNetwork | None:
        try:
            low = _tuned(model, dtype)
        except Exception:  # an operation without this dtype, numpy, or whatever the network itself raises
            return None
        return low if low.cost < FASTER * fast_network(model).cost else None

    with torch.no_grad():
        network = model.kept(("lower", dtype), made)
    return None if network is None else _within_budget(network, model)


def has_bfloat16() -> bool:
    """Whether torch has products of bfloat16 for this processor."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _within_budget(network: FastNetwork, model: NetworkModel) -> FastNetwork:
    """The fast copy with batches that fit into the model's budget of memory, counted in the dtype of the model."""
    if model.memory_budget is None:
        return network
    fitting = elements_together("backward", model.image, model.pass_size, model.memory_budget)
    return replace(network, batch=min(network.batch, fitting))


def _tuned(model: NetworkModel, dtype: torch.dtype) -> FastNetwork:
    """The fastest copy of a model's network in a dtype, with its fastest batch size."""
    with torch.inference_mode(False), torch.no_grad(), full_precision():
        image = model.image.detach().clone()
        twins = {torch.contiguous_format: _copy(model, image, dtype, torch.contiguous_format)}
        last = _with_channels_last(model, image, dtype) if image.dim() == 4 else None
        if last is not None:
            twins[torch.channels_last] = last
        if image.device.type == "cuda":
            room = min(GPU_BYTES, torch.cuda.get_device_properties(image.device).total_memory // GPU_SHARE)
            fitting = room // max(1, model.largest * dtype.itemsize)
            batch = min(2 ** max(3, min(15, fitting.bit_length() - 1)), model.most_images)
            tried = min(batch, 2048)
            copies = [FastNetwork(run, dtype, layout, batch, math.inf, {}) for layout, run in twins.items()]
            timed = [replace(copy, cost=_seconds(copy, image, tried) / tried) for copy in copies]
            chosen = min(timed, key=lambda copy: copy.cost)
            require_rows_alone(chosen, model, image)
            return _differentiable(chosen, image)
        start = min(LEAST_BATCH, model.most_images)
        copies = [FastNetwork(run, dtype, layout, start, math.inf) for layout, run in twins.items()]
        tried = min(64, model.most_images)
        if len(copies) > 1 and _seconds(copies[0], image, start) > PATIENCE:
            tried = start
        chosen = min(copies, key=lambda copy: _seconds(copy, image, tried))
        size = start
        while size <= min(MOST_BATCH, model.most_images):
            seconds = _seconds(chosen, image, size)
            if seconds / size < 0.98 * chosen.cost:
                chosen = replace(chosen, batch=size, cost=seconds / size)
            if seconds > PATIENCE:
                break
            size *= 2
        chosen = _attending_fast(chosen, image)
        require_rows_alone(chosen, model, image)
        return chosen


class AttentionByProducts(TorchFunctionMode):
    """Inside this block, softmax(q kᵀ/√d) v is computed by matrix products where nothing is masked.

    torch's kernel for a CPU never holds the matrix q kᵀ, which pays for long sequences only.
    """

    seen = False
    """Whether there was any attention in the block."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        if len(args) != 3 or any(isinstance(value, Tensor) or value for value in kwargs.values()):  # a mask, a scale
            return func(*args, **kwargs)
        self.seen = True
        query, key, value = args
        return (query @ key.mT / math.sqrt(query.shape[-1])).softmax(-1) @ value


def _attending_fast(network: FastNetwork, image: Tensor) -> FastNetwork:
    """The network with attention by products if it has attention, and is faster so."""
    run = network.run

    def by_products(inputs: Tensor) -> Tensor:
        with AttentionByProducts():
            return run(inputs)

    with AttentionByProducts() as attention:
        network(image)
    if not attention.seen:
        return network
    other = replace(network, run=by_products)
    seconds = _seconds(other, image, network.batch)
    return replace(other, cost=seconds / network.batch) if seconds < network.cost * network.batch else network


def require_rows_alone(network: FastNetwork, model: NetworkModel, image: Tensor) -> None:
    """Refuse a network whose values depend on the batch only where this is large, as with a capacity for each expert.

    Images between two that the network was tried on go through it in one batch, and in quarters of that. A few may
    differ, where rounding, which depends on the batch, decides between two ways through the network.
    """
    if network.dtype != image.dtype:
        return
    count = min(network.batch, BATCH_TRIED)
    shares = torch.linspace(0, 1, count, dtype=image.dtype, device=image.device)
    images = torch.lerp(image, another_image(image), shares.reshape(-1, *(1,) * (image.dim() - 1)))
    quarters = [network(part.clone()) for part in images.split(-(-count // 4))]
    pairs = zip(network(images.clone()), torch.cat(quarters), strict=True)
    if sum(not same_values(together, alone) for together, alone in pairs) > DECIDED_BY_ROUNDING:
        raise ValueError(
            f"{model.caller}: the network's output for an image depends on the other images of a batch of {count} "
            f"(a capacity that they share?); netmoments needs each image treated by itself"
        )


def _differentiable(network: FastNetwork, image: Tensor) -> FastNetwork:
    """The fast copy, differentiated without cuDNN if it cannot be differentiated with it."""
    try:
        with warnings.catch_warnings():  # cuBLAS says so when a thread of autograd uses it for the first time
            warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")
            first = torch.zeros(1, 1, dtype=torch.int64, device=image.device)
            replace(network, recordings=None).gradients(image, first)
    except RuntimeError:
        return replace(network, derivatives=without_cudnn)
    return network


def _seconds(network: FastNetwork, image: Tensor, count: int) -> float:
    """How long a batch takes: the shortest of three runs after a first one; the first one if it takes long."""
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


def _with_channels_last(model: NetworkModel, image: Tensor, dtype: torch.dtype) -> Callable[[Tensor], Tensor] | None:
    """A copy for images with channels last; None if the network cannot take these, or gives other values for them.

    A network that calls `x.view(n, -1)` after a convolution cannot take them.
    """
    images = torch.cat([image, another_image(image)])
    try:
        twin = _copy(model, image, dtype, torch.channels_last)
        values = twin(images.to(dtype, copy=True, memory_format=torch.channels_last))
    except RuntimeError:
        return None
    return twin if dtype != image.dtype or same_values(model.network(images.clone()), values) else None


def _copy(
    model: NetworkModel, image: Tensor, dtype: torch.dtype, layout: torch.memory_format
) -> Callable[[Tensor], Tensor]:
    """A copy with weights of its own, with batch normalisations folded if that leaves the values as they are.

    Nothing is folded where the network may do something else for other inputs, with the same layers.
    """
    folded = None if model.reads_values else _with_own_weights(model.network, image, dtype, layout, fold=True)
    if folded is not None:
        examples = (image, another_image(image))
        if dtype != image.dtype or all(
            same_values(model.network(x.clone()), folded(x.clone(memory_format=layout))) for x in examples
        ):
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
            _switch_off(twin, {id(norm) for _, norm in pairs})
    if dtype != image.dtype and image.device.type == "cuda":  # only its values are used
        for layer in rectified(twin, image):
            vars(layer)["forward"] = partial(_convolution_relu, layer)
    slots = TensorSlots(twin)
    own = image.dtype
    # batch normalisations keep their dtype: their variances can be tiny or huge
    exact = {id(x) for module in twin.modules() if type(module) in _NORMS for x in _own_tensors(module)}
    slots.fill(
        {
            name: _laid_out(x.detach(), dtype if x.dtype == own and id(x) not in exact else x.dtype, layout)
            for name, x in slots.tensors.items()
        }
    )
    return twin


def _own_tensors(module: nn.Module) -> list[Tensor]:
    """The parameters and buffers of a module itself, without those of its children."""
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _laid_out(x: Tensor, dtype: torch.dtype, layout: torch.memory_format) -> Tensor:
    if x.dim() == 4:
        return x.to(dtype, copy=True, memory_format=layout)
    return x.to(dtype, copy=True)


class _Consumers(TorchDispatchMode):
    """Records which modules and operations use the watched tensors, by the id of these."""

    def __init__(self) -> None:
        super().__init__()
        self.running: nn.Module | None = None
        """The module that is running; None between modules."""
        self.modules: dict[int, set[nn.Module | None]] = {}
        """The modules that used each tensor; only tensors that are keys here are watched."""
        self.operations: dict[int, list[Any]] = {}
        """The operations that used each tensor, in order."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if id(leaf) in self.modules:
                self.modules[id(leaf)].add(self.running)
                self.operations.setdefault(id(leaf), []).append(func)
        return func(*args, **(kwargs or {}))


def foldable(twin: nn.Module, image: Tensor) -> list[tuple[nn.Module, nn.Module]]:
    """The pairs of a layer and a batch normalisation that can become one layer.

    Each must be called once in a run of two inputs, nothing but the normalisation may use the layer's output, and
    nothing but the layer its weights. Two inputs, because some networks call a layer once for each input.
    """
    calls: Counter[nn.Module] = Counter()
    outputs: list[tuple[Any, Tensor]] = []  # held, so that no other tensor gets one of their ids
    consumers = _Consumers()

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        consumers.running = module

    def after(module: Any, args: tuple[Any, ...], output: Any) -> None:
        calls[module] += 1
        consumers.running = None
        if type(module) not in _NORMS and isinstance(output, Tensor) and output.dim() == module.weight.dim():
            outputs.append((module, output))  # (N, channels, ...)
            consumers.modules[id(output)] = set()

    candidates = [module for module in twin.modules() if _may_fold(module)]
    layers = [module for module in candidates if type(module) not in _NORMS]
    consumers.modules = {id(weight): set() for layer in layers for weight in layer.parameters(recurse=False)}
    with ExitStack() as hooks, consumers:
        for module in candidates:
            hooks.enter_context(module.register_forward_hook(after))
            hooks.enter_context(module.register_forward_pre_hook(before))
        twin(torch.cat([image, another_image(image)]))
    pairs: list[tuple[nn.Module, nn.Module]] = []
    for layer, output in outputs:
        norm, *others = consumers.modules[id(output)] or [None]
        alone = all(consumers.modules[id(weight)] == {layer} for weight in layer.parameters(recurse=False))
        if isinstance(norm, _NORMS) and not others and alone and calls[layer] == calls[norm] == 1:
            pairs.append((layer, norm))
    return pairs


def rectified(twin: nn.Module, image: Tensor) -> list[nn.Conv2d]:
    """The convolutions whose every output goes into a ReLU, which alone uses it or overwrites it in place."""
    consumers, outputs = _Consumers(), list[tuple[nn.Conv2d, Tensor]]()

    def after(layer: Any, args: tuple[Any, ...], output: Tensor) -> None:
        outputs.append((layer, output))
        consumers.modules[id(output)] = set()

    layers = [module for module in twin.modules() if _may_rectify(module)]
    with ExitStack() as hooks, consumers:
        for layer in layers:
            hooks.enter_context(layer.register_forward_hook(after))
        twin(image.clone())
    aten = torch.ops.aten
    suitable = {layer for layer, _ in outputs}
    for layer, output in outputs:
        operations = consumers.operations.get(id(output), [])
        if not (operations[:1] == [aten.relu_.default] or operations == [aten.relu.default]):
            suitable.discard(layer)
    return [layer for layer in layers if layer in suitable]


def _may_rectify(module: nn.Module) -> bool:
    if type(module) is not nn.Conv2d or module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
        return False
    return module.bias is not None and module.padding_mode == "zeros" and not isinstance(module.padding, str)


def _convolution_relu(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """relu(W x + b) in one step of cuDNN instead of three; it has no derivative."""
    padding = cast(tuple[int, ...], layer.padding)
    return torch.cudnn_convolution_relu(
        x, layer.weight, layer.bias, layer.stride, padding, layer.dilation, layer.groups
    )


def _may_fold(module: nn.Module) -> bool:
    if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
        return False
    if type(module) in _NORMS:
        return module.running_mean is not None and module.running_var is not None
    return type(module) in (nn.Linear, *_CONVOLUTIONS, *_TRANSPOSED) and module._parameters.get("weight") is not None


def _fold(layer: Any, norm: Any) -> None:
    """Make the layer compute γ(Wx + b − μ)/√(v + ε) + β: W and b of each output channel are scaled, in float64."""
    scale = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight.detach().double()
    shift = -norm.running_mean.double() * scale
    if norm.bias is not None:
        shift = shift + norm.bias.detach().double()
    weight = layer.weight.detach()
    if type(layer) in _TRANSPOSED:  # (in, out / groups, ...)
        by_channel = scale.reshape(layer.groups, 1, -1, *(1,) * (weight.dim() - 2))
        folded = (weight.double().unflatten(0, (layer.groups, -1)) * by_channel).flatten(0, 1)
    else:
        folded = weight.double() * scale.reshape(-1, *(1,) * (weight.dim() - 1))
    bias = shift if layer.bias is None else shift + layer.bias.detach().double() * scale
    layer._parameters["weight"] = nn.Parameter(folded.to(weight.dtype), requires_grad=False)
    layer._parameters["bias"] = nn.Parameter(bias.to(weight.dtype), requires_grad=False)


def _switch_off(twin: nn.Module, norms: set[int]) -> None:
    """Make the folded normalisations, given by their ids, return their input, wherever the twin holds them."""
    for module in twin.modules():
        if id(module) in norms:
            vars(module)["forward"] = _unchanged


def _unchanged(x: Tensor) -> Tensor:
    return x
