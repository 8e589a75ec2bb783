"""FER2013: 35,887 grey 48×48 faces and their expressions, from the Facial Emotion Recognition challenge on Kaggle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from netmoments.data.images import LabelledImages
from netmoments.data.pixels import images_from_array
from netmoments.data.splits import require_split
from netmoments.progress import Progress

FER2013_CLASSES = ("anger", "disgust", "fear", "happiness", "sadness", "surprise", "neutral")
FER2013_USAGES = {"train": "Training", "public-test": "PublicTest", "private-test": "PrivateTest"}
SIDE = 48
HEADER = b"emotion,pixels,Usage"


def fer2013_split(source: str, split: str) -> str:
    """The full name of a split; "test" is the private test, the one the challenge was decided on."""
    return "private-test" if split == "test" else require_split(source, split, FER2013_USAGES)


def read_fer2013_csv(path: Path, split: str) -> LabelledImages:
    """One split of Kaggle's fer2013.csv, read line by line; the pixels of other splits are passed over unread."""
    split = fer2013_split(str(path), split)
    wanted = FER2013_USAGES[split].encode()
    usages = {usage.encode() for usage in FER2013_USAGES.values()}
    pixels, labels = bytearray(), []
    with path.open("rb") as file, Progress(f"reading {path.name}", path.stat().st_size) as progress:
        header = file.readline(1000).rstrip(b"\r\n")
        if header != HEADER:
            raise ValueError(
                f"{path}: the first line must be {HEADER.decode()}, got {header[:40]!r}; is it fer2013.csv?"
            )
        for number, line in enumerate(file, start=2):
            progress.advance(len(line))
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
    if not labels:
        raise ValueError(f"{path}: no rows with Usage {wanted.decode()}, which split={split!r} asks for")
    images = np.frombuffer(pixels, np.uint8).reshape(-1, SIDE, SIDE)
    names = tuple(f"{split}/{index}" for index in range(len(labels)))
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
