"""Arrays of pixels to float32 images in [0, 1], and to another size."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

CHANNELS = (1, 3)


def images_from_array(array: np.ndarray[Any, Any]) -> Tensor:
    """(N, C, H, W) float32 from uint8 (N, H, W) or (N, H, W, C), divided by 255, or from floats (N, [C,] H, W).

    C is 1 or 3: an array that has its channels elsewhere is an error, not a picture.
    """
    eight_bit = array.dtype == np.uint8
    if not eight_bit and array.dtype.kind != "f":
        raise ValueError(
            f"images must be uint8, or floats in [0, 1], got {array.dtype}; convert them with .astype(...)"
        )
    if array.ndim == 3:
        channels_first = array[:, None]
    elif array.ndim == 4 and array.shape[3 if eight_bit else 1] in CHANNELS:
        channels_first = np.moveaxis(array, 3, 1) if eight_bit else array
    else:
        layout = "(N, H, W) or (N, H, W, C)" if eight_bit else "(N, H, W) or (N, C, H, W)"
        raise ValueError(
            f"{'uint8' if eight_bit else 'float'} images must be {layout} with C 1 or 3, got shape {array.shape}; "
            f"move the channels with np.moveaxis"
        )
    images = torch.from_numpy(channels_first.astype(np.float32, order="C"))
    return images.div_(255) if eight_bit else images


def require_size(size: int | None) -> None:
    """A ValueError unless `size` is None or a whole number of pixels."""
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise ValueError(f"size must be a number of pixels, 1 or more, got {size!r}")


def resize_and_crop(images: Tensor, size: int) -> Tensor:
    """(N, C, size, size): the shorter side brought to `size` (bicubic, antialiased), then the centre cut out."""
    height, width = images.shape[-2:]
    shorter = min(height, width)
    scaled = [round(side * size / shorter) for side in (height, width)]
    if shorter != size:
        images = functional.interpolate(images, size=scaled, mode="bicubic", antialias=True).clamp(0, 1)
    top, left = ((side - size) // 2 for side in scaled)
    return images[..., top : top + size, left : left + size].contiguous()
