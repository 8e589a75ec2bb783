"""What the words of the command line mean."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch
from torch import nn

from netmoments import data as datasets
from netmoments.data.images import LabelledImages, correct, evenly_spread
from netmoments.network import zoo


def accuracy_in_words(
    network: nn.Module, held_out: LabelledImages, training: LabelledImages, device: torch.device
) -> str:
    """The accuracy on held-out images, and without those that are also in the training set."""
    right = correct(network, held_out, device=device)
    said = f"test accuracy {float(right.double().mean()):.2%} of {len(right):,} images"
    known = datasets.duplicates_of(held_out.images, training.images)
    if not bool(known.any()):
        return said
    rest = float(right[~known].double().mean())
    return f"{said}; {rest:.2%} without the {int(known.sum())} that are also in the training set"


def device_named(name: str) -> torch.device:
    """cpu, cuda (with a number or not), or auto: a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"no device {name!r}; give cpu, cuda or auto") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"no device {name!r}; give cpu, cuda or auto")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("no CUDA device is available here; give --device cpu")
    if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
        raise ValueError(f"no device {name!r}: there are {torch.cuda.device_count()} GPUs here, from cuda:0")
    return device


def images_for(model: str, data: str, split: str, data_dir: Path | None, size: int | None) -> LabelledImages:
    """The images, brought to the size of a zoo network if they are a folder of any sizes."""
    if size is None and model in zoo.ZOO and Path(data).is_dir():
        size = zoo.entry(model).input_shape[-1]
    return datasets.load(data, split=split, data_dir=data_dir, size=size)


def spread(images: LabelledImages, count: int) -> LabelledImages:
    """At most `count` images, evenly spread."""
    if len(images) <= count:
        return images
    return images.take(evenly_spread(len(images), count))


def layer_named(text: str) -> int | str:
    """A number if it is one, else a name."""
    return int(text) if text.removeprefix("-").isdigit() else text


def class_names_in(path: Path | None) -> tuple[str, ...]:
    """The lines of a file, none without one."""
    if path is None:
        return ()
    if not path.is_file():
        raise FileNotFoundError(f"no file of class names at {path}")
    return tuple(line.strip() for line in path.read_text().splitlines() if line.strip())


SHOWN = 12
"""Class names in an error message, at most."""


def with_classes_of(
    images: LabelledImages, classes: tuple[str, ...], count: int, caller: str
) -> tuple[LabelledImages, tuple[str, ...]]:
    """The images with labels that are the network's, and the names of its `count` classes, () if unknown."""
    if classes and len(classes) != count:
        raise ValueError(f"{caller}: {len(classes)} class names for a network with {count} scores")
    own = images.classes
    if own and images.labels is not None and len(own) != count:
        unknown = [name for name in own if name not in classes]
        if unknown:
            raise ValueError(
                f"{caller}: the images have {len(own)} classes ({', '.join(own[:4])}{', …' if len(own) > 4 else ''}) "
                f"and the network {count} scores: which is which? name the folders by the numbers of the scores, or "
                f"give the names of all {count} classes (--classes), or put the images in one folder without labels"
            )
        places = torch.tensor([classes.index(name) for name in own])
        images = dataclasses.replace(images, labels=places[images.labels], classes=classes)
    _require_labels(images, count, caller)
    return images, classes or (own if len(own) == count else ())


def class_numbered(option: str, text: str, names: tuple[str, ...], count: int) -> int:
    """The class that an option means: by its name, else by its number.

    >>> class_numbered("--target", "dog", ("cat", "dog"), 2), class_numbered("--target", "0", (), 2)
    (1, 0)
    """
    if text in names:
        return names.index(text)
    if text.isdecimal() and int(text) < count:
        return int(text)
    listed = f", or a name: {', '.join(names[:SHOWN])}{', …' if len(names) > SHOWN else ''}" if names else ""
    raise ValueError(f"{option} {text!r} is no class of the network; give a number from 0 to {count - 1}{listed}")


def _require_labels(images: LabelledImages, count: int, caller: str) -> None:
    if images.labels is not None and int(images.labels.max()) >= count:
        worst = int(images.labels.argmax())
        raise ValueError(
            f"{caller}: the label of {images.names[worst]} is {int(images.labels.max())}, but the network has {count} "
            f"scores, 0 to {count - 1}; are these images for this network?"
        )
