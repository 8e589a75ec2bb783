"""MNIST and its relatives: an IDX file of images, with its labels beside it."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from netmoments.data.idx import read_idx
from netmoments.data.images import LabelledImages
from netmoments.data.pixels import images_from_array
from netmoments.data.splits import require_split

MNIST_CLASSES = tuple("0123456789")
SPLIT_PREFIXES = {"train": ("train",), "test": ("t10k", "test")}


def idx_images_file(folder: Path, split: str) -> Path | None:
    """The images of a split in a folder of IDX files: train-images-idx3-ubyte, t10k-images.idx3-ubyte.gz, ..."""
    for prefix in SPLIT_PREFIXES[split]:
        for path in sorted(folder.glob(f"{prefix}-images[-.]idx3-ubyte*")):
            if path.name.endswith(("ubyte", ".gz")):
                return path
    return None


def holds_idx_images(folder: Path) -> bool:
    """Whether a folder has the images of any split."""
    return any(idx_images_file(folder, split) for split in SPLIT_PREFIXES)


def idx_labels_file(images_file: Path) -> Path | None:
    """The labels beside an IDX file of images, gzipped or not; None if there are none."""
    name = re.sub(r"images([-.])idx3", r"labels\1idx1", images_file.name)
    if name == images_file.name:
        return None
    plain = images_file.with_name(name.removesuffix(".gz"))
    alternatives = (images_file.with_name(name), plain, plain.with_name(plain.name + ".gz"))
    return next((path for path in alternatives if path.is_file()), None)


def read_idx_folder(folder: Path, split: str, classes: tuple[str, ...] = ()) -> LabelledImages:
    """One split of a folder of IDX files."""
    require_split(str(folder), split, SPLIT_PREFIXES)
    path = idx_images_file(folder, split)
    if path is None:
        wanted = f"{SPLIT_PREFIXES[split][0]}-images-idx3-ubyte[.gz]"
        raise FileNotFoundError(f"{folder} has no {split} images: {wanted} is missing; `netmoments download mnist`")
    return read_idx_images(path, split, classes)


def read_idx_images(path: Path, prefix: str, classes: tuple[str, ...] = ()) -> LabelledImages:
    """The uint8 images of an IDX file, with the labels beside it if there are any; named "prefix/0", "prefix/1", ..."""
    pixels = read_idx(path)
    if pixels.ndim < 3:
        raise ValueError(
            f"{path}: images must be (N, H, W) or (N, H, W, C), got shape {pixels.shape}; are these labels?"
        )
    labels_file = idx_labels_file(path)
    labels = None if labels_file is None else read_idx(labels_file)
    if labels is not None and (labels.dtype.kind not in "iu" or labels.shape != pixels.shape[:1]):
        raise ValueError(
            f"{labels_file}: need one whole number for each of the {len(pixels)} images in {path}, "
            f"got {labels.dtype} of shape {labels.shape}; these files do not belong together"
        )
    try:
        return LabelledImages(
            images_from_array(pixels),
            None if labels is None else torch.from_numpy(labels.astype("int64")),
            tuple(f"{prefix}/{index}" for index in range(len(pixels))),
            classes,
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
