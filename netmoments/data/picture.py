"""One image file to pixels."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL import Image

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".pgm", ".ppm", ".tif", ".tiff")
EIGHT_BIT_GREY = ("L", "1", "LA")
SIXTEEN_BIT_GREY = ("I", "I;16", "I;16B", "I;16L", "I;16N")


class UnreadableImage(ValueError):
    """A file that is no image, is damaged, or is too large to be honest."""


def require_pillow() -> None:
    """An ImportError that says how to get Pillow, if it is missing."""
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise ImportError('reading image files needs Pillow: pip install "netmoments[data]"') from error


def read_picture(path: Path) -> Tensor:
    """(1, H, W) of a grey image or (3, H, W) of any other, float32 in [0, 1]; transparency is dropped.

    Turned upright as EXIF says. Of an animation, the first frame. Anything wrong with the file is an
    `UnreadableImage`, whatever Pillow raised; so is what Pillow takes for a decompression bomb.
    """
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of damaged metadata, which is not the picture
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as image:
                return _pixels(ImageOps.exif_transpose(image))
    except Exception as error:
        raise UnreadableImage(f"{type(error).__name__}: {error}".replace(str(path), path.name)) from error


def _pixels(image: Image.Image) -> Tensor:
    if image.mode in EIGHT_BIT_GREY:
        return _scaled(np.asarray(image.convert("L")), 255)[None]
    if image.mode in SIXTEEN_BIT_GREY:
        return _scaled(np.asarray(image), 65535)[None]
    if image.mode == "F":
        raise ValueError("a floating-point image has no known white; save it with 8 or 16 bits")
    if image.mode == "P":
        image = image.convert("RGBA")  # a palette may hold transparency
    return _scaled(np.asarray(image.convert("RGB")), 255).permute(2, 0, 1)


def _scaled(values: np.ndarray[Any, Any], white: int) -> Tensor:
    if values.min() < 0 or values.max() > white:
        raise ValueError(f"grey values must be 0 to {white}, got {values.min()} to {values.max()}")
    return torch.from_numpy(values.astype(np.float32)).div_(white)
