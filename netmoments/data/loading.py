"""`load`, the one way to get images: from the name of a dataset, or from a path."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from netmoments.data.datasets import (
    DIGIT_CLASSES,
    find,
    holds_idx_images,
    read_digits,
    read_fer2013_csv,
    read_idx_folder,
    read_idx_images,
)
from netmoments.data.formats import IMAGE_SUFFIXES, looks_like_idx, read_image_files, read_image_folder, read_npz
from netmoments.data.images import DEFAULT_SPLIT, LabelledImages, require_no_split, require_size, resize_and_crop
from netmoments.files import require_regular

NAMES = ("mnist", "fer2013", "digits")
"""The named datasets."""


def load(
    source: str | Path, *, split: str = DEFAULT_SPLIT, data_dir: str | Path | None = None, size: int | None = None
) -> LabelledImages:
    """Load images, with labels if the source has them.

    Args:
        source: a name, "mnist", "fer2013" or "digits"; or a path (write "./mnist" for a folder called like a dataset):
            a folder of IDX files, an IDX file of images (its labels are looked for beside it), fer2013.csv, an .npz
            with `images` and perhaps `labels`, `names`, `classes`, `usage`; a folder of images, with a subfolder for
            each class or none; one image file.
        split: "train" or "test"; of FER2013, "train", "public-test" or "private-test", which is also "test".
        data_dir: where `find` looks first for a named dataset.
        size: resize the shorter side to this many pixels, and cut out the centre square.

    Images are float32 (N, C, H, W) with pixels in [0, 1], labels int64 (N,).

    >>> digits = load("digits")
    >>> digits.images.shape[1:], len(digits.labels) == len(digits.images)
    (torch.Size([1, 8, 8]), True)
    """
    require_size(size)
    if source in NAMES and isinstance(source, str):
        loaded = _load_name(source, split, data_dir)
    elif Path(source).exists():
        loaded = _load_path(Path(source), split, size)
    else:
        raise FileNotFoundError(
            f"load: {str(source)!r} is neither a dataset ({', '.join(NAMES)}) nor a file or folder that exists"
        )
    if size is None or loaded.event_shape[1:] == (size, size):
        return loaded
    return dataclasses.replace(loaded, images=resize_and_crop(loaded.images, size))


def _load_name(name: str, split: str, data_dir: str | Path | None) -> LabelledImages:
    if name == "digits":
        return read_digits(split)
    path = find(name, data_dir)
    return read_idx_folder(path, split, DIGIT_CLASSES) if name == "mnist" else _load_path(path, split, None)


def _load_path(path: Path, split: str, size: int | None) -> LabelledImages:
    suffix = path.suffix.lower()
    if path.is_dir():
        return read_idx_folder(path, split) if holds_idx_images(path) else read_image_folder(path, split, size)
    require_regular(path)
    if suffix == ".npz":
        return read_npz(path, split)
    if suffix == ".csv":
        return read_fer2013_csv(path, split)
    require_no_split(str(path), split)
    if suffix in IMAGE_SUFFIXES:
        return read_image_files([path], path.parent, size)
    if looks_like_idx(path):
        return read_idx_images(path, path.name.removesuffix(".gz"))
    raise ValueError(
        f"{path}: need an IDX file, fer2013.csv, an .npz, an image ({', '.join(IMAGE_SUFFIXES)}) or a folder of these"
    )
