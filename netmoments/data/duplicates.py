"""Images that occur twice."""

from __future__ import annotations

import torch
from torch import Tensor

from netmoments.checks import describe


def duplicates_of(images: Tensor, reference: Tensor) -> Tensor:
    """Which `images` occur, pixel for pixel at 8 bits, in `reference`: a boolean mask (N,).

    Both are (N, C, H, W) in [0, 1] with the same image shape. In FER2013, 568 test images also occur in the training
    set: 280 of the 3,589 of the public test and 288 of the 3,589 of the private test, which are 531 distinct images.
    """
    if images.ndim != 4 or reference.ndim != 4 or images.shape[1:] != reference.shape[1:]:
        raise ValueError(
            f"duplicates_of: images and reference must be (N, C, H, W) with one image shape, "
            f"got {describe(images)} and {describe(reference)}"
        )
    known = set(_contents(reference))
    return torch.tensor([content in known for content in _contents(images)], dtype=torch.bool, device=images.device)


def _contents(images: Tensor) -> list[bytes]:
    eight_bit = images.detach().mul(255).round().to("cpu", torch.uint8).numpy()
    return [image.tobytes() for image in eight_bit]
