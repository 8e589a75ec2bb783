"""What networks expect of their pixels, as an affine first layer, so that noise is always measured on RGB in [0, 1]."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ImageNetInput(nn.Module):
    """(x − mean)/deviation of ImageNet's channels, for RGB images in [0, 1]."""

    mean: Tensor
    deviation: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).reshape(3, 1, 1), persistent=False)
        self.register_buffer("deviation", torch.tensor([0.229, 0.224, 0.225]).reshape(3, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.deviation


class CaffeInput(nn.Module):
    """RGB in [0, 1] to BGR in 0–255 minus (104, 117, 123)."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([104.0, 117.0, 123.0]).reshape(3, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return 255 * x.flip(-3) - self.mean
