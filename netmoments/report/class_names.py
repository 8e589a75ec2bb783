"""Which label of the images is which score of the network, and what a class is called."""

from __future__ import annotations

import dataclasses

import torch

from netmoments.data import LabelledImages

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
