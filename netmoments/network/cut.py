"""A network cut at one of its ReLUs: what comes before it, and what comes after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.func import vmap
from torch.overrides import TorchFunctionMode

from netmoments.network.activations import is_in_place, is_relu, pre_activations
from netmoments.network.exported import ExportedNetwork
from netmoments.network.tracing import Relu


@dataclass(frozen=True, eq=False)
class Cut:
    """network(x) = head(x, relu(stem(x))).

    `stem` gives the pre-activations z of the chosen ReLU, (N, *relu.shape); `head` runs the network with y in place of
    that ReLU's output. The head depends on x itself only through paths around the cut (skip connections).
    """

    network: nn.Module
    relu: Relu

    def stem(self, x: Tensor) -> Tensor:
        if self.relu.batched:
            return self._stem(x)
        return vmap(lambda image: self._stem(image.unsqueeze(0)).reshape(self.relu.shape))(x)

    def head(self, x: Tensor, y: Tensor) -> Tensor:
        if self.relu.batched:
            return self._head(x, y)
        return vmap(lambda image, own: self._head(image.unsqueeze(0), own).squeeze(0))(x, y)

    @property
    def _runs(self) -> nn.Module:
        return self.network.program if isinstance(self.network, ExportedNetwork) else self.network

    def _stem(self, x: Tensor) -> Tensor:
        try:
            with _AtRelu(self.relu.index, _stop):
                self._runs(x.clone())  # a copy: the first call may be in place
        except _Reached as reached:
            return reached.value
        raise RuntimeError(
            f"the network never reached its ReLU {self.relu.name!r}: it does not always do the same calls"
        )

    def _head(self, x: Tensor, y: Tensor) -> Tensor:
        with _AtRelu(self.relu.index, _replaced_by(y)):
            return self._runs(x.clone())


def find_relu(relus: Sequence[Relu], layer: int | str) -> Relu:
    """The ReLU that `layer` names: a number counted from either end, or a name."""
    listed = ", ".join(f"{relu.index} {relu.name!r}" for relu in relus)
    if not relus:
        raise ValueError(
            "the network has no ReLU (nn.ReLU, relu(), clamp(min=0) were looked for; scripted modules cannot be looked "
            "into); without one, use method='linear' or method='sampling'"
        )
    if isinstance(layer, bool) or not isinstance(layer, int | str):
        raise TypeError(f"layer must be a number or a name, got {layer!r}; the ReLUs are: {listed}")
    if isinstance(layer, int):
        if not -len(relus) <= layer < len(relus):
            raise ValueError(f"layer {layer} is not one of the network's {len(relus)} ReLUs: {listed}")
        return relus[layer]
    for relu in relus:
        if relu.name == layer:
            return relu
    calls = [relu.name for relu in relus if relu.name.rsplit("#", 1)[0] == layer]
    if calls:
        raise ValueError(f"{layer!r} calls a ReLU {len(calls)} times; choose one of {', '.join(calls)}")
    raise ValueError(f"no ReLU is named {layer!r}; the ReLUs are: {listed}")


class _Reached(BaseException):
    """Not an Exception: a network that catches those must not catch this."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class _AtRelu(TorchFunctionMode):
    """Counts ReLU calls and has the chosen one done by `treat(pre-activations, in place or not)`."""

    def __init__(self, index: int, treat: Callable[[Tensor, bool], Tensor]) -> None:
        super().__init__()
        self._left = index
        self._treat = treat

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_relu(func, args, kwargs):
            self._left -= 1
            if self._left == -1:
                return self._treat(pre_activations(args, kwargs), is_in_place(func, args, kwargs))
        return func(*args, **kwargs)


def _stop(z: Tensor, in_place: bool) -> Tensor:
    raise _Reached(z)


def _replaced_by(y: Tensor) -> Callable[[Tensor, bool], Tensor]:
    def treat(z: Tensor, in_place: bool) -> Tensor:
        value = y.reshape(z.shape)
        if in_place:  # code may go on with z itself
            return z.copy_(value)
        return value.clone()  # code may go on to change it

    return treat
