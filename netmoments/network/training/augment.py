"""Random changes to training images that keep their meaning, a batch at a time on any device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor
from torch.nn.functional import affine_grid, grid_sample

Augmentation = Callable[[Tensor, Generator], Tensor]


def unchanged(images: Tensor, generator: Generator) -> Tensor:
    return images


def random_mirror(images: Tensor, generator: Generator) -> Tensor:
    """Every other image left to right."""
    mirrored = _uniform(images, generator) < 0.5
    return torch.where(mirrored[:, None, None, None], images.flip(-1), images)


def random_affine(images: Tensor, generator: Generator, *, degrees: float, shift: float, scale: float) -> Tensor:
    """Rotated by up to ±degrees, moved by up to ±shift of the side, scaled by up to 1 ± scale; borders are repeated."""
    angle, by_x, by_y, size = (2 * _uniform(images, generator) - 1 for _ in range(4))
    angle, size = torch.deg2rad(degrees * angle), 1 + scale * size
    cos, sin = size * angle.cos(), size * angle.sin()
    rows = [torch.stack([cos, -sin, 2 * shift * by_x], -1), torch.stack([sin, cos, 2 * shift * by_y], -1)]
    grid = affine_grid(torch.stack(rows, 1), list(images.shape), align_corners=False)
    return grid_sample(images, grid, padding_mode="border", align_corners=False)


def random_erasing(images: Tensor, generator: Generator, *, share: float) -> Tensor:
    """In half of the images a square of `share` of the side is set to the image's mean."""
    side = images.shape[-1]
    corner = [(_uniform(images, generator) * (1 - share) * side)[:, None, None] for _ in range(2)]
    rows = torch.arange(side, device=images.device)[None, :, None] - corner[0]
    columns = torch.arange(side, device=images.device)[None, None, :] - corner[1]
    inside = (rows >= 0) & (rows < share * side) & (columns >= 0) & (columns < share * side)
    inside = inside & (_uniform(images, generator) < 0.5)[:, None, None]
    return torch.where(inside.unsqueeze(1), images.mean((1, 2, 3), keepdim=True), images)


def shifted_digits(images: Tensor, generator: Generator) -> Tensor:
    return random_affine(images, generator, degrees=8, shift=0.06, scale=0.08)


def varied_faces(images: Tensor, generator: Generator) -> Tensor:
    images = random_mirror(images, generator)
    images = random_affine(images, generator, degrees=15, shift=0.08, scale=0.12)
    return random_erasing(images, generator, share=0.3)


def _uniform(images: Tensor, generator: Generator) -> Tensor:
    """One number in [0, 1) an image, drawn on the CPU so that every device sees the same."""
    return torch.rand(len(images), generator=generator).to(images.device)
