"""The delta method: the whole network made affine at a point."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from netmoments.linearize.jacobian import by_reverse_mode
from netmoments.precision import full_precision


def linearized(network: nn.Module, points: Tensor, rows: Tensor, working: int) -> tuple[Tensor, Tensor]:
    """The chosen scores (N, k) at points (N, *event), and their Jacobian (N, k, n)."""
    with torch.inference_mode(False), full_precision(), torch.enable_grad():
        x = points.detach().clone().requires_grad_()
        out = network(x.clone())
        rows = rows.to(points.device)
        (jacobian,) = by_reverse_mode(out, (x,), rows, working) if out.requires_grad else (None,)
    if jacobian is None:
        jacobian = points.new_zeros(*rows.shape, points[0].numel())
    return out.detach().gather(1, rows), jacobian
