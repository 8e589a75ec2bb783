"""Networks from `torch.export`: programs that may have been written for one image at a time."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, fx, nn


class ExportedNetwork(nn.Module):
    """An exported program as a network of any batch size.

    A program exported with a batch of 1 takes nothing else; it is then mapped over the images of a batch.
    """

    largest: int | None
    """The largest batch that the program takes, if it has one."""

    def __init__(self, program: fx.GraphModule) -> None:
        super().__init__()
        self.program = program
        self.training = False
        batch = _batch_dimension(program)
        self.largest = _largest_value(batch) if isinstance(batch, torch.SymInt) else None
        self.batch = batch if isinstance(batch, int) else None
        if self.batch is not None and self.batch != 1:
            raise ValueError(
                f"the exported network takes batches of exactly {self.batch}; export it with a batch of 1, or with a "
                f"free one: torch.export.export(network, (example,), dynamic_shapes=({{0: torch.export.Dim.AUTO}},))"
            )

    def forward(self, x: Tensor) -> Tensor:
        if self.largest is not None and len(x) > self.largest:
            return torch.cat([self.program(part) for part in x.split(self.largest)])
        if self.batch is None or x.shape[0] == 1:
            return self.program(x)
        return torch.func.vmap(lambda image: self.program(image.unsqueeze(0)).squeeze(0))(x)

    def train(self, mode: bool = True) -> Self:
        """Exported programs are what they were when exported."""
        return self


def exported_network(program: torch.export.ExportedProgram) -> ExportedNetwork:
    """An exported program as a network, with the bounds of its batch respected."""
    return ExportedNetwork(program.module())


def _batch_dimension(program: fx.GraphModule) -> int | torch.SymInt | None:
    """The first dimension of a program's input: a number that it insists on, or a symbol."""
    for node in program.graph.nodes:
        if node.op == "placeholder" and isinstance(node.meta.get("val"), Tensor):
            return node.meta["val"].shape[0]
    return None


def _largest_value(symbol: torch.SymInt) -> int | None:
    """The upper end of the range that a symbol was exported with."""
    bounds = symbol.node.shape_env.var_to_range.get(symbol.node.expr)
    return int(bounds.upper) if bounds is not None and getattr(bounds.upper, "is_Integer", False) else None
