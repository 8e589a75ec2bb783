"""`load`, the one way to get images, from the name of a dataset or from a path; and the named datasets themselves.

MNIST, FER2013 and scikit-learn's digits are found and read here, and MNIST is downloaded.
"""

from __future__ import annotations

import dataclasses
import hashlib
import http.client
import os
import re
import urllib.error
import urllib.request
import warnings
from pathlib import Path

import numpy as np
import torch

from netmoments.data.formats import (
    IMAGE_SUFFIXES,
    looks_like_idx,
    read_idx,
    read_image_files,
    read_image_folder,
    read_npz,
)
from netmoments.data.images import (
    DEFAULT_SPLIT,
    FER2013_CLASSES,
    FER2013_USAGES,
    LabelledImages,
    fer2013_split,
    images_from_array,
    labelled_arrays,
    numbered,
    require_no_split,
    require_plausible_count,
    require_size,
    require_split,
    resize_and_crop,
)
from netmoments.files import made_if_needed, open_regular, require_regular, require_room
from netmoments.progress import progress_bar

NAMES = ("mnist", "fer2013", "digits")
"""The named datasets."""
HOW_TO_GET = {
    "mnist": "`netmoments download mnist` fetches it",
    "fer2013": "get fer2013.csv from Kaggle (Facial Expression Recognition Challenge) and put it, or an .npz of it "
    "called fer2013.npz, in one of these folders",
}


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


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/netmoments, or ~/.cache/netmoments."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "netmoments"


def data_folders(name: str, data_dir: str | Path | None) -> list[Path]:
    """Where a dataset is looked for: `data_dir`, $NETMOMENTS_DATA, the cache, and a subfolder `name` of each."""
    chosen = [Path(place) for place in (data_dir, os.environ.get("NETMOMENTS_DATA")) if place]
    return [folder for place in (*chosen, cache_folder()) for folder in (place, place / name)]


def find(name: str, data_dir: str | Path | None = None) -> Path:
    """The path of a dataset: the folder of MNIST's IDX files, or fer2013.npz or fer2013.csv.

    Looks in `data_dir`, then $NETMOMENTS_DATA, then the cache; in each, directly and in a subfolder called `name`.
    """
    if name not in HOW_TO_GET:
        raise ValueError(f"find: the datasets kept in files are {', '.join(HOW_TO_GET)}; got {name!r}")
    if data_dir is not None and not Path(data_dir).is_dir():
        raise FileNotFoundError(f"there is no folder {data_dir} to look for {name} in")
    folders = data_folders(name, data_dir)
    for folder in folders:
        path = _path_inside(folder, name)
        if path is not None:
            return path
    listed = "".join(f"\n  {folder}" for folder in folders)
    raise FileNotFoundError(
        f"{name} is not in any of{listed}\n{HOW_TO_GET[name]}; or name the folder it is in (data_dir, --data-dir)"
    )


def _path_inside(folder: Path, name: str) -> Path | None:
    """The path of a dataset if a folder holds it."""
    if name == "mnist":
        return folder if holds_idx_images(folder) else None
    files = (folder / "fer2013.npz", folder / "fer2013.csv")
    return next((path for path in files if path.is_file()), None)


DEFAULT_MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist/"
MNIST_MD5 = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}
TIMEOUT = 30.0
"""Seconds that a server has to answer."""
CHUNK = 2**16
"""Bytes that are read at a time."""


class DownloadError(OSError):
    """A file did not arrive whole; the message says which one, from where, and what to do."""


def download_mnist(data_dir: str | Path | None = None, *, mirror: str = DEFAULT_MIRROR) -> Path:
    """Download the four original files into `data_dir`/mnist (by default in the cache), and return that folder.

    Existing files with the right checksum are not fetched again; others are replaced, with a warning. A file that does
    not arrive whole leaves nothing behind and raises a `DownloadError`; those before it are kept.
    """
    if not mirror.startswith(("http://", "https://")):
        raise ValueError(f"download_mnist: mirror must be an http:// or https:// address, got {mirror!r}")
    folder = Path(data_dir or cache_folder()).expanduser() / "mnist"
    for name, md5 in MNIST_MD5.items():
        path = folder / name
        if path.is_file():
            if _md5(path) == md5:
                continue
            warnings.warn(f"{path} is damaged (its md5 is not {md5}); replacing it", stacklevel=2)
        with made_if_needed(folder):
            _fetch(f"{mirror.rstrip('/')}/{name}", path, md5)
    return folder


def _fetch(url: str, path: Path, md5: str) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        _stream(url, part)
        received = _md5(part)
        if received != md5:
            raise DownloadError(f"its md5 is {received} instead of {md5}")
        os.replace(part, path)
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # this error is also the server's response
        raise DownloadError(
            f"{path.name} could not be downloaded from {url}: {error}. Try again, name another mirror, or put the file "
            f"in {path.parent} yourself."
        ) from error
    finally:
        part.unlink(missing_ok=True)


def _stream(url: str, part: Path) -> None:
    with urllib.request.urlopen(url, timeout=TIMEOUT) as response, part.open("wb") as file:
        length = response.headers.get("Content-Length")
        wanted = int(length) if length and length.isdigit() else None
        received = 0
        with progress_bar(f"downloading {url.rpartition('/')[2]}", wanted or 0) as show:
            while chunk := response.read(CHUNK):
                file.write(chunk)
                received += len(chunk)
                show(received)
    if wanted is not None and received != wanted:
        raise DownloadError(f"the connection ended after {received} of {wanted} bytes")


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


DIGIT_CLASSES = tuple("0123456789")
"""The classes of MNIST and of scikit-learn's digits."""
SPLIT_PREFIXES = {"train": ("train",), "test": ("t10k", "test")}
"""How the names of IDX files begin, by split."""


def idx_images_file(folder: Path, split: str) -> Path | None:
    """The file of a split's images in a folder of IDX files: train-images-idx3-ubyte, t10k-images.idx3-ubyte.gz, ..."""
    for prefix in SPLIT_PREFIXES[split]:
        for path in sorted(folder.glob(f"{prefix}-images[-.]idx3-ubyte*")):
            if path.name.endswith(("ubyte", ".gz")):
                return path
    return None


def holds_idx_images(folder: Path) -> bool:
    """Whether a folder has an IDX file of images of any split."""
    return any(idx_images_file(folder, split) for split in SPLIT_PREFIXES)


def idx_labels_file(images_file: Path) -> Path | None:
    """The file of labels, gzipped or not, beside an IDX file of images; None if there is none."""
    name = re.sub(r"images([-.])idx3", r"labels\1idx1", images_file.name)
    if name == images_file.name:
        return None
    plain = images_file.with_name(name.removesuffix(".gz"))
    candidates = (images_file.with_name(name), plain, plain.with_name(plain.name + ".gz"))
    return next((path for path in candidates if path.is_file()), None)


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
    require_plausible_count(len(pixels), str(path))
    return labelled_arrays(path, pixels, labels, numbered(prefix, len(pixels)), classes)


SIDE = 48
"""Pixels of a face on each side."""
HEADER = b"emotion,pixels,Usage"
"""The first line of the file."""
LONGEST_LINE = 20_000
"""Bytes of a line that are read at a time. A face takes little more than 9,216; a longer line is split and refused."""


def read_fer2013_csv(path: Path, split: str) -> LabelledImages:
    """One split of Kaggle's fer2013.csv, read line by line; the pixels of other splits are skipped."""
    split = fer2013_split(str(path), split)
    wanted = FER2013_USAGES[split].encode()
    usages = {usage.encode() for usage in FER2013_USAGES.values()}
    pixels, labels = bytearray(), []
    with open_regular(path) as file, progress_bar("reading the file", path.stat().st_size) as show:
        header = file.readline(1000).rstrip(b"\r\n")
        if header != HEADER:
            raise ValueError(
                f"{path}: the first line must be {HEADER.decode()}, got {header[:40]!r}; is it fer2013.csv?"
            )
        for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE), b""), start=2):
            show(file.tell())
            fields = line.rstrip(b"\r\n").split(b",")
            if fields == [b""]:
                continue
            if len(fields) != 3 or fields[2] not in usages:
                raise _malformed(
                    path, number, f"{HEADER.decode()} with Usage {', '.join(FER2013_USAGES.values())}", line
                )
            if fields[2] == wanted:
                labels.append(_label(path, number, fields[0]))
                pixels += _pixels(path, number, fields[1])
                require_room(4 * len(pixels), f"{path}: its images, as float32,")
    if not labels:
        raise ValueError(f"{path}: no rows with Usage {wanted.decode()}, which split={split!r} asks for")
    images = np.frombuffer(pixels, np.uint8).reshape(-1, SIDE, SIDE)
    names = numbered(split, len(labels))
    return LabelledImages(images_from_array(images), torch.tensor(labels), names, FER2013_CLASSES)


def _label(path: Path, number: int, field: bytes) -> int:
    if not field.isdigit() or int(field) >= len(FER2013_CLASSES):
        raise _malformed(path, number, f"an emotion from 0 to {len(FER2013_CLASSES) - 1}", field)
    return int(field)


def _pixels(path: Path, number: int, field: bytes) -> bytes:
    wanted = f"{SIDE * SIDE} pixels from 0 to 255"
    if field.translate(None, b"0123456789 ") or not field.strip():
        raise _malformed(path, number, wanted, field)
    values = np.fromstring(field, np.int64, sep=" ")
    if values.size != SIDE * SIDE or values.max() > 255:
        raise _malformed(path, number, f"{wanted}, not {values.size} up to {values.max()}", field)
    return values.astype(np.uint8).tobytes()


def _malformed(path: Path, number: int, wanted: str, got: bytes) -> ValueError:
    shown = got if len(got) <= 40 else got[:40] + b"..."
    return ValueError(f"{path}, line {number}: need {wanted}, got {shown!r}; get the file again")


BRIGHTEST = 16
"""The largest pixel value of the digits."""
TEST_STRIDE = 4
"""One in so many images of each class is a test image."""


def read_digits(split: str) -> LabelledImages:
    """scikit-learn's digits, 1×8×8, scaled from 0 … 16 to [0, 1]: 1,352 training images and 445 test images.

    Every fourth image of each class is a test image.
    """
    require_split("digits", split, SPLIT_PREFIXES)
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError('the digits come with scikit-learn: pip install "netmoments[data]"') from error
    digits = load_digits()
    labels = torch.from_numpy(digits.target.astype(np.int64))
    images = torch.from_numpy(digits.images.astype(np.float32))[:, None] / BRIGHTEST
    held_out = _every_fourth_of_each_class(labels)
    chosen = (held_out if split == "test" else ~held_out).nonzero().squeeze(1)
    return LabelledImages(images[chosen], labels[chosen], numbered(split, len(chosen)), DIGIT_CLASSES)


def _every_fourth_of_each_class(labels: torch.Tensor) -> torch.Tensor:
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(len(DIGIT_CLASSES)):
        members = (labels == label).nonzero().squeeze(1)
        held_out[members[TEST_STRIDE - 1 :: TEST_STRIDE]] = True
    return held_out
