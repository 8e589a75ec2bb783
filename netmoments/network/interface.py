"""Any network as a function of rows: one tensor in, one row of numbers for each input out.

Networks take one tensor or several arguments, noisy ones and constants; they return scores, images, tuples or
dictionaries of tensors, in half precision or not. `FlatNetwork` is such a network seen from outside: inputs (N, n) or
(N, ...), outputs (N, d), with `OutputPart`s that say what the d numbers are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from netmoments.checks import describe
from netmoments.network.replica import replica

HALVES = (torch.float16, torch.bfloat16)
"""Weights of less precision than inputs have; an input is converted to the first layer's."""
ROWS = 3
"""Copies of an image that say which outputs have a row for each input."""


@dataclass(frozen=True)
class NoisyArgument:
    """An argument of the network that is noisy: some of the numbers of a row, in their shape."""

    start: int
    shape: torch.Size


@dataclass(frozen=True, eq=False)
class Arguments:
    """What a network is called with: a tuple of arguments, or a dictionary of named ones, some of them noisy.

    Any other argument is a constant; a constant tensor is repeated for each input where the network takes it so.
    """

    structure: tuple[Any, ...] | dict[str, Any]
    repeated: bool = True

    @property
    def key(self) -> Any:
        """What makes two calls the same but for the values of constants."""

        def kind(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.shape, value.dtype, value.device
            return value if isinstance(value, NoisyArgument) else repr(value)

        if isinstance(self.structure, dict):
            return tuple((name, kind(value)) for name, value in self.structure.items()), self.repeated
        return tuple(map(kind, self.structure)), self.repeated

    def call(self, network: nn.Module, rows: Tensor) -> Any:
        if isinstance(self.structure, dict):
            return network(**{name: self._argument(value, rows) for name, value in self.structure.items()})
        return network(*(self._argument(value, rows) for value in self.structure))

    def _argument(self, value: Any, rows: Tensor) -> Any:
        if isinstance(value, NoisyArgument):
            return rows[:, value.start : value.start + value.shape.numel()].reshape(len(rows), *value.shape)
        if isinstance(value, Tensor) and self.repeated:
            return value.expand(len(rows), *value.shape)
        return value


@dataclass(frozen=True)
class OutputPart:
    """One tensor among the outputs: its name, its shape for one input, and which of the d numbers it is."""

    name: str
    shape: torch.Size
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel()


class FlatNetwork(nn.Module):
    """A network as a function of rows; see the module's docstring. It holds the network, and nothing of its own."""

    def __init__(self, network: nn.Module, arguments: Arguments | None, key: str | int | None) -> None:
        super().__init__()
        self.network, self.arguments, self.key = network, arguments, key
        self.training = False
        first = next((p.dtype for p in network.parameters() if p.is_floating_point()), None)
        self.dtype = first if first in HALVES else None

    def forward(self, x: Tensor) -> Tensor:
        rows = [value.reshape(len(x), -1).to(x.dtype) for _, value in self.outputs(x)]
        return rows[0] if len(rows) == 1 else torch.cat(rows, 1)

    def outputs(self, x: Tensor) -> list[tuple[str, Tensor]]:
        """The chosen outputs by name, (N, ...)."""
        given = x if self.dtype is None else x.to(self.dtype)
        result = self.network(given) if self.arguments is None else self.arguments.call(self.network, given)
        found = list(tensors_inside(result))
        if self.key is None:
            return found
        key = str(self.key)
        return [(name, value) for name, value in found if name == key or name.startswith(f"{key}.")]


def tensors_inside(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every floating-point tensor inside tuples, lists, dictionaries and dataclasses, by the path of its keys."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield name, value
        return
    if isinstance(value, Mapping):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        items = list(zip(value._fields, value, strict=True))
    elif isinstance(value, tuple | list):
        items = [(str(place), item) for place, item in enumerate(value)]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    else:
        return
    for key, item in items:
        yield from tensors_inside(item, f"{name}.{key}" if name else key)


def output_parts(flat: FlatNetwork, image: Tensor, caller: str) -> tuple[OutputPart, ...]:
    """What the outputs are, from a run on copies of an image (1, ...) that leaves the network as it is."""
    with torch.inference_mode(False), torch.no_grad():
        twin: Any = replica(flat)
        found = twin.outputs(image.detach().repeat(ROWS, *(1,) * (image.dim() - 1)))
        if not found:
            twin = replica(FlatNetwork(flat.network, flat.arguments, None))
            names = [name for name, _ in twin.outputs(image.detach().clone())]
            if flat.key is None or not names:
                raise ValueError(
                    f"{caller}: the network must return a floating-point tensor, or several in tuples or dictionaries, "
                    f"got nothing of the kind for an input of shape {tuple(image.shape[1:])}"
                )
            listed = ", ".join(repr(name) for name in names) if any(names) else "one tensor only, which has no key"
            raise ValueError(f"{caller}: the network has no output {flat.key!r}; its outputs are: {listed}")
    parts, start = [], 0
    for name, value in found:
        if value.dim() == 0 or value.shape[0] != ROWS:
            called = f"output {name!r}" if name else "the output"
            others = [other for other, x in found if x.dim() > 0 and x.shape[0] == ROWS]
            fix = f"; choose another with key=, such as {others[0]!r}" if others else ""
            raise ValueError(
                f"{caller}: {called} must have one row for each input, got {describe(value)} for {ROWS} inputs of "
                f"shape {tuple(image.shape[1:])}{fix}"
            )
        if value.numel() == 0:
            raise ValueError(f"{caller}: the network must return at least one number, got {describe(value)}")
        part = OutputPart(name, value.shape[1:], start)
        start = part.stop
        parts.append(part)
    return tuple(parts)


def needs_flattening(parts: tuple[OutputPart, ...], flat: FlatNetwork) -> bool:
    """Whether the network itself is not yet a function of rows, or its output is inside a container."""
    if flat.arguments is not None or flat.key is not None or flat.dtype is not None:
        return True
    one = parts[0]
    return len(parts) > 1 or one.name != "" or len(one.shape) != 1
