"""Networks from `torch.export`: programs that may have been written for one image at a time."""

from __future__ import annotations

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
        if self.batch is None or x.shape[0] == 1:
            return self.program(x)
        return torch.func.vmap(lambda image: self.program(image.unsqueeze(0)).squeeze(0))(x)

    def train(self, mode: bool = True) -> Self:
        """Exported programs are what they were when exported."""
        return self


def _fixed_batch(program: fx.GraphModule) -> int | None:
    """The batch size that an exported program insists on, None if it takes any."""
    for node in program.graph.nodes:
        if node.op == "placeholder" and isinstance(node.meta.get("val"), Tensor):
            first = node.meta["val"].shape[0]
            return first if isinstance(first, int) else None
    return None
