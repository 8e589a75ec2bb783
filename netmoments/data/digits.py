"""The 1,797 handwritten digits that come with scikit-learn: no download, a second to train on."""

from __future__ import annotations

import numpy as np
import torch

from netmoments.data.images import LabelledImages
from netmoments.data.splits import require_split

DIGITS_CLASSES = tuple("0123456789")
DIGITS_SPLITS = ("train", "test")
BRIGHTEST = 16
TEST_STRIDE = 4


def read_digits(split: str) -> LabelledImages:
    """1×8×8 images, 0 to 16 scaled to [0, 1]; every fourth image of each class is a test image: 1,352 and 445."""
    require_split("digits", split, DIGITS_SPLITS)
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError('the digits come with scikit-learn: pip install "netmoments[data]"') from error
    digits = load_digits()
    labels = torch.from_numpy(digits.target.astype(np.int64))
    images = torch.from_numpy(digits.images.astype(np.float32))[:, None] / BRIGHTEST
    held_out = _every_fourth_of_each_class(labels)
    chosen = (held_out if split == "test" else ~held_out).nonzero().squeeze(1)
    names = tuple(f"{split}/{index}" for index in range(len(chosen)))
    return LabelledImages(images[chosen], labels[chosen], names, DIGITS_CLASSES)


def _every_fourth_of_each_class(labels: torch.Tensor) -> torch.Tensor:
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(len(DIGITS_CLASSES)):
        members = (labels == label).nonzero().squeeze(1)
        held_out[members[TEST_STRIDE - 1 :: TEST_STRIDE]] = True
    return held_out
