"""Any network as a function of rows: one tensor in, one row of numbers for each input out.

Networks take one tensor or several arguments, some noisy and some constant; they return scores, images, tuples or
dictionaries of tensors, some in half precision. `FlatNetwork` wraps such a network: its input is one tensor (N, n) or
(N, ...), its output (N, d), and `OutputPart`s say which of the d numbers belong to which tensor of the network's.
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
"""Dtypes in which weights may be less precise than the input, which is then converted to that of the first weights."""
ROWS = 3
"""Size of the batch that shows which outputs have a row for each input."""


@dataclass(frozen=True)
class NoisyArgument:
    """A noisy argument of the network: numbers `start`, `start` + 1, … of a row, in this shape."""

    start: int
    shape: torch.Size


@dataclass(frozen=True, eq=False)
class Arguments:
    """The arguments a network is called with, as a tuple or as a dictionary by name.

    Noisy ones are `NoisyArgument`s, all others constants. `repeated` says whether constant tensors are repeated for
    each input.
    """

    structure: tuple[Any, ...] | dict[str, Any]
    repeated: bool = True

    @property
    def key(self) -> Any:
        """A value that is equal for calls that differ in the values of constant tensors only."""

        def kind(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value.shape, value.dtype, value.device
            return value if isinstance(value, NoisyArgument) else repr(value)

        if isinstance(self.structure, dict):
            return tuple((name, kind(value)) for name, value in self.structure.items()), self.repeated
        return tuple(map(kind, self.structure)), self.repeated

    def call(self, network: nn.Module, rows: Tensor) -> Any:
        """Run the network with the noisy numbers of each input in a row, (N, n)."""
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
    """One tensor among the outputs: its name, its shape for one input, and where it begins among the d numbers."""

    name: str
    shape: torch.Size
    start: int
    half: bool = False
    """Whether the network returns it in half precision, as inside autocast; it is then converted."""

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel()


class FlatNetwork(nn.Module):
    """A network as a function of rows, which returns (N, d); it adds no parameters to the network's.

    `key` chooses one of several outputs, by name, position or the beginning of a path; None takes them all.
    """

    def __init__(self, network: nn.Module, arguments: Arguments | None, key: str | int | None) -> None:
        super().__init__()
        self.network, self.arguments, self.key = network, arguments, key
        self.training = False
        first = next((p.dtype for p in network.parameters() if p.is_floating_point()), None)
        self.dtype = first if first in HALVES else None
        """The dtype that inputs are converted to, if any."""

    def forward(self, x: Tensor) -> Tensor:
        rows = [value.reshape(len(x), -1).to(x.dtype) for _, value in self.outputs(x)]
        return rows[0] if len(rows) == 1 else torch.cat(rows, 1)

    def outputs(self, x: Tensor) -> list[tuple[str, Tensor]]:
        """The chosen outputs, (N, ...), each with its name."""
        x = x if self.dtype is None else x.to(self.dtype)
        result = self.network(x) if self.arguments is None else self.arguments.call(self.network, x)
        named = list(tensors_inside(result))
        if self.key is None:
            return named
        key = str(self.key)
        return [(name, value) for name, value in named if name == key or name.startswith(f"{key}.")]


def tensors_inside(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every floating-point tensor inside tuples, lists, dictionaries and dataclasses, named by its path: "boxes.0"."""
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
    """The parts of a network's output, from a run of its replica on ROWS copies of an image (1, ...)."""
    with torch.inference_mode(False), torch.no_grad():
        twin: Any = replica(flat)
        outputs = twin.outputs(image.detach().repeat(ROWS, *(1,) * (image.dim() - 1)))
        if not outputs:
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
    for name, value in outputs:
        if value.dim() == 0 or value.shape[0] != ROWS:
            called = f"output {name!r}" if name else "the output"
            others = [other for other, x in outputs if x.dim() > 0 and x.shape[0] == ROWS]
            fix = f"; choose another with key=, such as {others[0]!r}" if others else ""
            raise ValueError(
                f"{caller}: {called} must have one row for each input, got {describe(value)} for {ROWS} inputs of "
                f"shape {tuple(image.shape[1:])}{fix}"
            )
        if value.numel() == 0:
            raise ValueError(f"{caller}: the network must return at least one number, got {describe(value)}")
        part = OutputPart(name, value.shape[1:], start, value.dtype in HALVES)
        start = part.stop
        parts.append(part)
    return tuple(parts)


def needs_flattening(parts: tuple[OutputPart, ...], flat: FlatNetwork) -> bool:
    """Whether the network inside is not yet a function that takes one tensor and returns scores (N, d)."""
    if flat.arguments is not None or flat.key is not None or flat.dtype is not None:
        return True
    first = parts[0]
    return len(parts) > 1 or first.name != "" or len(first.shape) != 1 or first.half
