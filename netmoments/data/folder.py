"""A folder of image files: one subfolder for each class, or no subfolders and no labels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from netmoments.data.images import LabelledImages, Skipped
from netmoments.data.picture import IMAGE_SUFFIXES, UnreadableImage, read_picture, require_pillow
from netmoments.data.pixels import resize_and_crop
from netmoments.data.splits import require_no_split, require_split
from netmoments.progress import Progress

SPLIT_FOLDERS = {"train", "test", "val", "validation"}
FEW = 3


def read_image_folder(folder: Path, split: str, size: int | None) -> LabelledImages:
    """The images of a folder.

    Subfolders are classes, numbered in sorted order, or by their names if those are numbers; an empty one keeps its
    number and is listed in `skipped`. A folder whose only subfolders are splits (train, test, val, validation) is
    entered at `split`. Hidden files and files that are not images by their suffix are passed over; unreadable images
    are listed in `skipped`.
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
        raise ValueError(
            f"{folder} has images both beside and inside its subfolders ({flat[0].name}, "
            f"{next(files for files in by_class if files)[0].relative_to(folder).as_posix()}); move one kind away"
        )
    if flat:
        return read_image_files(flat, folder, size)
    if not any(by_class):
        raise ValueError(f"{folder} has no images ({', '.join(IMAGE_SUFFIXES)}), nor have its subfolders")
    return _read_classes(folder, subfolders, by_class, size)


def _read_classes(
    folder: Path, subfolders: Sequence[Path], by_class: Sequence[Sequence[Path]], size: int | None
) -> LabelledImages:
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
    """Folders named by numbers are those classes; others are numbered in sorted order."""
    if all(name.isdecimal() for name in names) and len({int(name) for name in names}) == len(names):
        return {name: int(name) for name in names}
    return {name: label for label, name in enumerate(names)}


def read_image_files(paths: Sequence[Path], folder: Path, size: int | None) -> LabelledImages:
    """Image files, without labels, named from `folder` on; grey if all are grey, RGB otherwise."""
    require_pillow()
    pictures: dict[str, Tensor] = {}
    skipped = []
    with Progress(f"reading {folder.name}", len(paths)) as progress:
        for path in paths:
            try:
                picture = read_picture(path)
            except UnreadableImage as error:
                skipped.append(Skipped(str(path), str(error)))
            else:
                name = path.relative_to(folder).as_posix()
                pictures[name] = picture if size is None else resize_and_crop(picture[None], size)[0]
                _require_one_size(folder, pictures, name)
            progress.advance(1)
    if not pictures:
        listed = "; ".join(f"{Path(path).name}: {reason}" for path, reason in skipped[:FEW])
        raise ValueError(f"{folder}: none of {len(skipped)} image files can be read: {listed}")
    channels = max(picture.shape[0] for picture in pictures.values())
    images = torch.stack([picture.expand(channels, -1, -1) for picture in pictures.values()])
    return LabelledImages(images, None, tuple(pictures), (), tuple(skipped))


def _require_one_size(folder: Path, pictures: dict[str, Tensor], name: str) -> None:
    first = next(iter(pictures))
    if pictures[name].shape[1:] != pictures[first].shape[1:]:
        sizes = [f"{key} is {pictures[key].shape[1]}×{pictures[key].shape[2]}" for key in (first, name)]
        raise ValueError(
            f"{folder}: images must share one size, but {' and '.join(sizes)}; pass size=... to resize them"
        )


def _visible(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _subfolders(folder: Path) -> list[Path]:
    return [path for path in _visible(folder) if path.is_dir()]


def _image_files(folder: Path) -> list[Path]:
    return [path for path in _visible(folder) if path.suffix.lower() in IMAGE_SUFFIXES and not path.is_dir()]
