"""Images as PNG data that a page can hold."""

from __future__ import annotations

import base64
import io

from torch import Tensor


def png_data(image: Tensor) -> str:
    """A (C, H, W) image, cut to [0, 1], as a data URI; one channel is grey, three are RGB."""
    try:
        from PIL import Image
    except ImportError:
        raise ImportError('pictures need Pillow: pip install "netmoments[report]"') from None
    pixels = (image.clamp(0, 1) * 255).round().byte().cpu()
    array = pixels[0].numpy() if len(pixels) == 1 else pixels[:3].permute(1, 2, 0).contiguous().numpy()
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
