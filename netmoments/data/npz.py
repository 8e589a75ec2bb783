"""Images in a NumPy .npz file."""

from __future__ import annotations

import math
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from netmoments.data.fer2013 import FER2013_CLASSES, FER2013_USAGES, fer2013_split
from netmoments.data.images import LabelledImages
from netmoments.data.pixels import images_from_array
from netmoments.data.splits import require_no_split

Arrays = dict[str, np.ndarray[Any, Any]]
PER_IMAGE = ("images", "labels", "names", "usage")
KEYS = (*PER_IMAGE, "classes")


def read_npz(path: Path, split: str) -> LabelledImages:
    """The arrays `images` and, where present, `labels`, `names` and `classes`; other keys are passed over.

    A file with `usage` (0 training, 1 public test, 2 private test) is FER2013 and has its splits; others have none.
    """
    arrays = _arrays(path)
    prefix = path.stem
    if "usage" in arrays:
        prefix = fer2013_split(str(path), split)
        arrays = _of_usage(path, arrays, list(FER2013_USAGES).index(prefix))
    else:
        require_no_split(str(path), split)
    count = math.prod(arrays["images"].shape[:1])
    names = arrays["names"].astype(str).tolist() if "names" in arrays else [f"{prefix}/{i}" for i in range(count)]
    classes = arrays["classes"].astype(str).tolist() if "classes" in arrays else ()
    if "usage" in arrays and not classes:
        classes = FER2013_CLASSES
    labels = arrays.get("labels")
    if labels is not None and labels.dtype.kind not in "iu":
        raise ValueError(f"{path}: labels must be whole numbers, got {labels.dtype}")
    try:
        return LabelledImages(
            images_from_array(arrays["images"]),
            None if labels is None else torch.from_numpy(labels.astype(np.int64)),
            tuple(names),
            tuple(classes),
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _arrays(path: Path) -> Arrays:
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            arrays = {key: file[key] for key in KEYS if key in file}
            held = list(file)
    except (
        ValueError,
        OSError,
        EOFError,
        KeyError,
        AttributeError,
        TypeError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise ValueError(f"{path}: cannot be read as an .npz file of plain arrays ({error})") from error
    if "images" not in arrays:
        raise ValueError(f"{path}: need an array called images, the file holds {', '.join(held) or 'none'}")
    count = arrays["images"].shape[:1]
    for key in PER_IMAGE[1:]:
        if key in arrays and arrays[key].shape != count:
            raise ValueError(f"{path}: {key} must have shape {count}, one entry an image, got {arrays[key].shape}")
    if "classes" in arrays and arrays["classes"].ndim != 1:
        raise ValueError(f"{path}: classes must be a list of names, got shape {arrays['classes'].shape}")
    return arrays


def _of_usage(path: Path, arrays: Arrays, code: int) -> Arrays:
    usage = arrays["usage"]
    if usage.ndim != 1 or not np.isin(usage, range(len(FER2013_USAGES))).all():
        raise ValueError(f"{path}: usage must be 0 (training), 1 (public test) or 2 (private test) for each image")
    if not (usage == code).any():
        raise ValueError(f"{path}: no image has usage {code} ({list(FER2013_USAGES)[code]})")
    return {key: array[usage == code] if key in PER_IMAGE else array for key, array in arrays.items()}
