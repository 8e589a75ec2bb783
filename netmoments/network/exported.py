"""Networks from `torch.export`: programs that may have been written for one image at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Self

import torch
from torch import Tensor, fx, nn


class ExportedNetwork(nn.Module):
    """An exported program as a network of any batch size.

    A program exported with a batch of 1 takes nothing else; it is then mapped over the images of a batch.
    """

    def __init__(self, program: fx.GraphModule) -> None:
        super().__init__()
        self.program = program
        self.training = False
        self.batch = _fixed_batch(program)
        if self.batch is not None and self.batch != 1:
            raise ValueError(
                f"the exported network takes batches of exactly {self.batch}; export it with a batch of 1, or with a "
                f"free one: torch.export.export(network, (example,), dynamic_shapes=({{0: torch.export.Dim.AUTO}},))"
            )

    def forward(self, x: Tensor) -> Tensor:
        return each_image_apart(self, lambda program, x: program(x))(x)

    def train(self, mode: bool = True) -> Self:
        """Exported programs are what they were when exported."""
        return self


def each_image_apart(network: nn.Module, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """function(network, ·) of a batch; for a program that takes one image, mapped over the batch."""
    if not isinstance(network, ExportedNetwork):
        return partial(function, network)
    if network.batch is None:
        return partial(function, network.program)

    def one(*values: Tensor) -> Tensor:
        return function(network.program, *(x.unsqueeze(0) for x in values)).squeeze(0)

    return torch.func.vmap(one)


def _fixed_batch(program: fx.GraphModule) -> int | None:
    """The batch size that an exported program insists on, None if it takes any."""
    for node in program.graph.nodes:
        if node.op == "placeholder" and isinstance(node.meta.get("val"), Tensor):
            first = node.meta["val"].shape[0]
            return first if isinstance(first, int) else None
    return None
