"""Reading files that hold images: IDX, .npz, image files such as PNG or JPEG, and folders of these."""

from __future__ import annotations

import gzip
import math
import struct
import warnings
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from netmoments.data.images import (
    FER2013_CLASSES,
    FER2013_USAGES,
    MOST_PIXELS,
    LabelledImages,
    Skipped,
    fer2013_split,
    labelled_arrays,
    numbered,
    require_no_split,
    require_plausible_count,
    require_split,
    resize_and_crop,
)
from netmoments.files import open_regular, printable, read_arrays, require_room
from netmoments.precision import quietly
from netmoments.progress import progress_bar

if TYPE_CHECKING:
    from PIL import Image

GZIP_MAGIC = b"\x1f\x8b"
IDX_MAGIC = b"\x00\x00"
DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
"""The dtype for each type byte of an IDX file."""
MOST_DIMENSIONS = 4
"""Dimensions that an IDX array may have."""
CHUNK = 2**20
"""Bytes that are read at a time."""


def looks_like_idx(path: Path) -> bool:
    """Whether a file has "idx" in its name, or begins like an IDX or a gzip file."""
    if "idx" in path.name.lower():
        return True
    with open_regular(path) as file:
        return file.read(2) in (IDX_MAGIC, GZIP_MAGIC)


def read_idx(path: str | Path) -> np.ndarray[Any, Any]:
    """The array in an IDX file of 1 to 4 dimensions, in the machine's byte order; the file may be gzipped.

    The header is two zero bytes, the type, the number of dimensions, and each dimension as a big-endian uint32. A file
    that is no IDX file, is cut short or has too many bytes raises a ValueError; of a gzip file no more is unpacked than
    the size that the header declares.
    """
    path = Path(path)
    with open_regular(path) as file:
        zipped = file.read(2) == GZIP_MAGIC
        file.seek(0)
        if not zipped:
            return _read_idx(file, path, path.stat().st_size)
        try:
            with gzip.GzipFile(fileobj=file) as stream:
                return _read_idx(stream, path, None)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: the gzip file is cut short or damaged ({error}); get it again") from error


def _read_idx(file: IO[bytes] | gzip.GzipFile, path: Path, size: int | None) -> np.ndarray[Any, Any]:
    """The array in an open file of `size` bytes; None if the size is unknown, as in a gzip stream."""
    begin = file.read(4)
    if len(begin) < 4 or begin[:2] != IDX_MAGIC or begin[2] not in DTYPES:
        raise ValueError(
            f"{path}: not an IDX file: it must begin with 00 00 and a type ({', '.join(f'{t:02x}' for t in DTYPES)}), "
            f"got {begin.hex(' ') or 'an empty file'}"
        )
    dimensions = begin[3]
    if not 1 <= dimensions <= MOST_DIMENSIONS:
        raise ValueError(
            f"{path}: an IDX array must have 1 to {MOST_DIMENSIONS} dimensions, the header says {dimensions}"
        )
    header = file.read(4 * dimensions)
    start = 4 + 4 * dimensions
    if len(header) < 4 * dimensions:
        raise ValueError(
            f"{path}: the file ends inside its header, after {4 + len(header)} of {start} bytes; get it again"
        )
    shape = struct.unpack(f">{dimensions}I", header)
    dtype = np.dtype(DTYPES[begin[2]])
    wanted = start + math.prod(shape) * dtype.itemsize
    if size is not None and size != wanted:
        raise _wrong_size(path, shape, wanted, size)
    require_room(wanted, f"{path}, of shape {shape},")
    content = _at_most(file, wanted - start)
    if len(content) < wanted - start or file.read(1):
        raise _wrong_size(path, shape, wanted, start + len(content))
    return np.frombuffer(content, dtype).reshape(shape).astype(dtype.newbyteorder("="))


def _at_most(file: IO[bytes] | gzip.GzipFile, count: int) -> bytearray:
    """The next `count` bytes of a file, or as many as there are; memory is taken only as they come."""
    content = bytearray()
    while len(content) < count and (part := file.read(min(CHUNK, count - len(content)))):
        content += part
    return content


def _wrong_size(path: Path, shape: tuple[int, ...], wanted: int, got: int) -> ValueError:
    problem, more = ("cut short", "") if got < wanted else ("too long", "more than " if got == wanted else "")
    return ValueError(
        f"{path}: the file is {problem}: shape {shape} needs {wanted} bytes, got {more}{got}; get it again"
    )


Arrays = dict[str, np.ndarray[Any, Any]]
PER_IMAGE = ("images", "labels", "names", "usage")
"""Arrays of an .npz file that have an entry for each image."""
KEYS = (*PER_IMAGE, "classes")
"""All arrays that are read from an .npz file."""


def read_npz(path: Path, split: str) -> LabelledImages:
    """The images of an .npz file with an array `images` and perhaps `labels`, `names` and `classes`.

    A file with `usage` (0 training, 1 public test, 2 private test) is FER2013 and has its splits; others have none.
    Other arrays are ignored.
    """
    arrays = _checked_arrays(path)
    prefix = path.stem
    if "usage" in arrays:
        prefix = fer2013_split(str(path), split)
        arrays = _of_usage(path, arrays, list(FER2013_USAGES).index(prefix))
    else:
        require_no_split(str(path), split)
    count = math.prod(arrays["images"].shape[:1])
    require_plausible_count(count, str(path))
    names = tuple(_texts(path, arrays, "names")) if "names" in arrays else numbered(prefix, count)
    classes = tuple(_texts(path, arrays, "classes")) if "classes" in arrays else ()
    if "usage" in arrays and not classes:
        classes = FER2013_CLASSES
    labels = arrays.get("labels")
    if labels is not None and labels.dtype.kind not in "iu":
        raise ValueError(f"{path}: labels must be whole numbers, got {labels.dtype}")
    return labelled_arrays(path, arrays["images"], labels, names, classes)


def _texts(path: Path, arrays: Arrays, key: str) -> list[str]:
    """The texts in an array; bytes are read as UTF-8, and numbers become their digits."""
    array = arrays[key]
    try:
        return (np.char.decode(array, "utf-8") if array.dtype.kind == "S" else array.astype(str)).tolist()
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {key} must be texts, in UTF-8, got {array.dtype} ({error})") from error


def _checked_arrays(path: Path) -> Arrays:
    """The arrays of an .npz file that are in `KEYS`, with shapes that fit together."""
    try:
        with open_regular(path) as file:
            arrays, names = read_arrays(file, lambda name: name in KEYS)
    except (ValueError, OSError, EOFError, TypeError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        raise ValueError(f"{path}: cannot be read as an .npz file of plain arrays ({error})") from error
    if "images" not in arrays:
        raise ValueError(f"{path}: need an array called images, the file holds {', '.join(names) or 'none'}")
    count = arrays["images"].shape[:1]
    for key in PER_IMAGE[1:]:
        if key in arrays and arrays[key].shape != count:
            raise ValueError(f"{path}: {key} must have shape {count}, one entry an image, got {arrays[key].shape}")
    if "classes" in arrays and arrays["classes"].ndim != 1:
        raise ValueError(f"{path}: classes must be a list of names, got shape {arrays['classes'].shape}")
    return arrays


def _of_usage(path: Path, arrays: Arrays, code: int) -> Arrays:
    """The entries of FER2013's images with this usage."""
    usage = arrays["usage"]
    if usage.ndim != 1 or not np.isin(usage, range(len(FER2013_USAGES))).all():
        raise ValueError(f"{path}: usage must be 0 (training), 1 (public test) or 2 (private test) for each image")
    if not (usage == code).any():
        raise ValueError(f"{path}: no image has usage {code} ({list(FER2013_USAGES)[code]})")
    return {key: array[usage == code] if key in PER_IMAGE else array for key, array in arrays.items()}


IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".pgm", ".ppm", ".tif", ".tiff")
EIGHT_BIT_GREY = ("L", "1", "LA")
"""Pillow's modes of images with 8 bits or fewer of grey."""
SIXTEEN_BIT_GREY = ("I", "I;16", "I;16B", "I;16L", "I;16N")
"""Pillow's modes of images that are read as 16 bits of grey."""


class UnreadableImage(ValueError):
    """A file is no image, is damaged, or is too large to be honest."""


def require_pillow() -> None:
    """Raise an ImportError that says how to get Pillow if it is missing."""
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise ImportError('reading image files needs Pillow: pip install "netmoments[data]"') from error


def read_picture(path: Path) -> Tensor:
    """An image file as (1, H, W) if it is grey, else (3, H, W), float32 in [0, 1].

    The picture is turned upright as EXIF says, transparency is dropped, and of an animation the first frame is taken.
    Anything wrong with the file raises an `UnreadableImage`, whatever Pillow raised; so do more pixels than
    `MOST_PIXELS` or than Pillow's own limit, and anything but a regular file.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        # Pillow warns of damaged metadata, which the pixels do not depend on, and of its own limit
        with quietly(), open_regular(path) as file, Image.open(file) as image:
            _require_few_pixels(image)
            return _pixels(ImageOps.exif_transpose(image))
    except UnidentifiedImageError as error:
        raise UnreadableImage(f"cannot identify image file {path.name!r}") from error
    except Exception as error:
        raise UnreadableImage(f"{type(error).__name__}: {error}".replace(str(path), path.name)) from error


def _require_few_pixels(image: Image.Image) -> None:
    from PIL.Image import MAX_IMAGE_PIXELS

    most = min(MOST_PIXELS, MAX_IMAGE_PIXELS or MOST_PIXELS)
    if image.width * image.height > most:
        raise ValueError(f"{image.height}×{image.width} pixels, more than the {most:,} allowed")


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


SPLIT_FOLDERS = {"train", "test", "val", "validation"}
"""Names that subfolders have if they are splits and not classes."""
FEW = 3
"""Unreadable files that an error message lists."""


def read_image_folder(folder: Path, split: str, size: int | None) -> LabelledImages:
    """The images of a folder; with `size`, each is resized and cropped to a square.

    Subfolders are classes, numbered in sorted order, or by their names if those are numbers; an empty one keeps its
    number and is listed in `skipped`. If all subfolders are splits (train, test, val, validation), the one called
    `split` is read. Hidden files and files without the suffix of an image are ignored; unreadable images are listed in
    `skipped`.
    """
    subfolders = _subfolders(folder)
    splits = [subfolder.name for subfolder in subfolders if subfolder.name in SPLIT_FOLDERS]
    if subfolders and len(splits) == len(subfolders) and not _image_files(folder):
        folder = folder / require_split(str(folder), split, splits)
        subfolders = _subfolders(folder)
    else:
        require_no_split(str(folder), split)
    flat = _image_files(folder)
    by_class = [_image_files(subfolder) for subfolder in subfolders]
    if flat and any(by_class):
        inside = next(files for files in by_class if files)[0].relative_to(folder).as_posix()
        raise ValueError(
            f"{folder} has images both beside and inside its subfolders ({printable(f'{flat[0].name}, {inside}')}); "
            f"move one kind away"
        )
    if flat:
        return read_image_files(flat, folder, size)
    if not any(by_class):
        raise ValueError(f"{folder} has no images ({', '.join(IMAGE_SUFFIXES)}), nor have its subfolders")
    return _read_classes(folder, subfolders, by_class, size)


def _read_classes(
    folder: Path, subfolders: Sequence[Path], by_class: Sequence[Sequence[Path]], size: int | None
) -> LabelledImages:
    """The images of a folder whose subfolders are classes, given the image files in each."""
    read = read_image_files([path for files in by_class for path in files], folder, size)
    names = tuple(subfolder.name for subfolder in subfolders)
    numbers = _labels_of(names)
    classes = names if sorted(numbers.values()) == list(range(len(names))) else ()
    classes = tuple(sorted(classes, key=lambda name: numbers[name]))
    empty = [
        Skipped(str(subfolder), "no images in this class folder")
        for subfolder, files in zip(subfolders, by_class, strict=True)
        if not files
    ]
    labels = torch.tensor([numbers[name.split("/")[0]] for name in read.names])
    return LabelledImages(read.images, labels, read.names, classes, (*read.skipped, *empty))


def _labels_of(names: Sequence[str]) -> dict[str, int]:
    """The label of each class folder: its name if all names are numbers, else its place in sorted order."""
    if all(name.isdecimal() for name in names) and len({int(name) for name in names}) == len(names):
        return {name: int(name) for name in names}
    return {name: label for label, name in enumerate(names)}


def read_image_files(paths: Sequence[Path], folder: Path, size: int | None) -> LabelledImages:
    """The images in these files, without labels and named by their paths in `folder`: grey if all are, else RGB."""
    require_pillow()
    require_plausible_count(len(paths), str(folder))
    pictures: dict[str, Tensor] = {}
    skipped = []
    with progress_bar("reading images", len(paths)) as show:
        for place, path in enumerate(paths):
            show(place)
            try:
                picture = read_picture(path) if size is None else _resized(read_picture(path), size)
            except UnreadableImage as error:
                skipped.append(Skipped(str(path), str(error)))
            else:
                name = path.relative_to(folder).as_posix()
                pictures[name] = picture
                _require_one_size(folder, pictures, name)
                require_room(len(pictures) * _bytes_in_colour(pictures[name]), f"{folder}: its images")
    if not pictures:
        listed = printable("; ".join(f"{Path(path).name}: {reason}" for path, reason in skipped[:FEW]))
        raise ValueError(f"{folder}: none of {len(skipped)} image files can be read: {listed}")
    channels = max(picture.shape[0] for picture in pictures.values())
    coloured = [name for name, picture in pictures.items() if picture.shape[0] == 3]
    if 0 < len(coloured) < len(pictures):
        warnings.warn(
            f"{folder}: {len(coloured)} of {len(pictures)} images are in colour ({printable(coloured[0])}"
            f"{', …' if len(coloured) > 1 else ''}) and the others grey; all are read with three channels",
            stacklevel=2,
        )
    images = torch.stack([picture.expand(channels, -1, -1) for picture in pictures.values()])
    return LabelledImages(images, None, tuple(pictures), (), tuple(skipped))


def _resized(picture: Tensor, size: int) -> Tensor:
    """A picture as (C, size, size); one that is far longer than wide has too many pixels before it is cropped."""
    try:
        return resize_and_crop(picture[None], size)[0]
    except ValueError as error:
        raise UnreadableImage(str(error)) from error


def _bytes_in_colour(picture: Tensor) -> int:
    return 3 * picture.shape[1] * picture.shape[2] * picture.element_size()


def _require_one_size(folder: Path, pictures: dict[str, Tensor], name: str) -> None:
    first = next(iter(pictures))
    if pictures[name].shape[1:] != pictures[first].shape[1:]:
        sizes = [f"{printable(key)} is {pictures[key].shape[1]}×{pictures[key].shape[2]}" for key in (first, name)]
        raise ValueError(
            f"{folder}: images must share one size, but {' and '.join(sizes)}; pass size= (--size in a command) to "
            f"resize them"
        )


def _visible(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _subfolders(folder: Path) -> list[Path]:
    return [path for path in _visible(folder) if path.is_dir()]


def _image_files(folder: Path) -> list[Path]:
    return [path for path in _visible(folder) if path.suffix.lower() in IMAGE_SUFFIXES and not path.is_dir()]
