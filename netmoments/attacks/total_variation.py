"""Isotropic total variation of images: forward differences, their adjoint, and the sum of their lengths.

Images have shape (..., H, W); a pair of differences is stacked in front, (2, ..., H, W). Channels count apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST_SQUARE = 8.0
"""‖D‖² is below this for images of any size: a pixel is in at most two differences of each direction."""


def forward_differences(image: Tensor) -> Tensor:
    """D μ: right neighbour less pixel, and lower neighbour less pixel; 0 in the last column, and in the last row.

    >>> forward_differences(torch.tensor([[1.0, 3.0], [4.0, 8.0]]))
    tensor([[[2., 0.],
             [4., 0.]],
    <BLANKLINE>
            [[3., 5.],
             [0., 0.]]])
    """
    differences = image.new_zeros(2, *image.shape)
    torch.sub(image[..., 1:], image[..., :-1], out=differences[0, ..., :-1])
    torch.sub(image[..., 1:, :], image[..., :-1, :], out=differences[1, ..., :-1, :])
    return differences


def adjoint_differences(pair: Tensor) -> Tensor:
    """Dᵀ p, for which ⟨D μ, p⟩ = ⟨μ, Dᵀ p⟩."""
    across, down = pair[0], pair[1]
    image = torch.zeros_like(across)
    image[..., :-1] -= across[..., :-1]
    image[..., 1:] += across[..., :-1]
    image[..., :-1, :] -= down[..., :-1, :]
    image[..., 1:, :] += down[..., :-1, :]
    return image


def total_variation(image: Tensor) -> Tensor:
    """Σ √(dx² + dy²) over the pixels and channels of (..., C, H, W), the paper's Ω; shape (...)."""
    return forward_differences(image).pow(2).sum(0).sqrt().sum((-3, -2, -1))
