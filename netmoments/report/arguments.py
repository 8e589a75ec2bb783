"""What the words of the command line mean: a network with images, and what a report is to say of them."""

from __future__ import annotations

import dataclasses
import math
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from netmoments import data as datasets
from netmoments.data.images import LabelledImages, correct, evenly_spread
from netmoments.files import open_regular, printable, read_array
from netmoments.gaussian import Gaussian
from netmoments.moments.methods import method_named
from netmoments.network import zoo
from netmoments.network.loading import load_network, with_preprocessing


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


@dataclass(frozen=True)
class Subject:
    """A network and images, in the words of a command line; any process can load them."""

    model: str
    data: str
    weights: Path | None = None
    images: int | None = None
    """At most so many, evenly spread."""
    split: str = "test"
    data_dir: Path | None = None
    size: int | None = None
    grey: bool = False
    mean: str | None = None
    std: str | None = None

    def load(self) -> tuple[nn.Module, LabelledImages]:
        """The network with its preprocessing, and the images with the channels that it takes."""
        chosen = images_for(self.model, self.data, self.split, self.data_dir, self.size)
        chosen = chosen if self.images is None else spread(chosen, self.images)
        return prepared(load_network(self.model, self.weights), chosen, self.grey, self.mean, self.std)

    @property
    def title(self) -> str:
        return Path(self.model).name

    @property
    def source(self) -> str:
        return Path(self.data).name if Path(self.data).exists() else self.data


RELATIVE_LEVELS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
"""Noise levels of the accuracy curve, in units of the chosen one."""


@dataclass(frozen=True)
class StudyConfig:
    """How much noise, and how well its effect is to be known."""

    sigma: float
    tolerance: float = 0.01
    """Half-width of the 95 % intervals of flip probabilities."""
    samples: int = 10_000
    """Samples of each image for that, at most."""
    rare: int | None = 24
    """Images nearest to flipping whose flip probability is found to 10 % of itself; None for all."""
    seconds: float | None = None
    """That the whole may take; None for half a minute and a tenth of a second an image."""
    method: str = "auto"
    """Of the scores: "auto" for those that were sampled anyway, or a formula."""
    covariance: Tensor | None = None
    """Of the noise, in place of sigma² on every pixel: of the shape of an image, or (n, n)."""
    seed: int = 0
    scores: int = 10
    """How many of the largest scores are shown when there are many classes."""
    examples: int = 6
    """Images that are shown with noisy copies and scores."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    attacks: int = 4
    """Images that noise is made for, to fool the network."""
    layer: int | str = -1
    """The ReLU that these attacks keep exactly."""

    def __post_init__(self) -> None:
        if not 0 < self.sigma < float("inf"):
            raise ValueError(f"report: sigma must be a positive number (pixels are in [0, 1]), got {self.sigma}")
        if not 0 < self.tolerance < 0.5:
            raise ValueError(f"report: tolerance must be between 0 and 0.5 (0.01 for a point), got {self.tolerance}")
        method_named(self.method, "report")
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise ValueError(f"report: seconds must be a positive number, got {self.seconds}")
        least = {"samples": 2, "scores": 2, "examples": 0, "attacks": 0, "rare": 0}
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise ValueError(f"report: {name} must be at least {bound}, got {value}")

    @property
    def levels(self) -> tuple[float, ...]:
        return tuple(self.sigma * level for level in RELATIVE_LEVELS)

    def noise(self, pixels: Tensor, level: float = 1.0) -> Gaussian:
        """On images (N, ...), at a level relative to the chosen one."""
        if self.covariance is None:
            return Gaussian(pixels, std=level * self.sigma, event_ndim=pixels.dim() - 1)
        covariance = level**2 * self.covariance.to(pixels.device, pixels.dtype)
        return Gaussian(pixels, covariance, event_ndim=pixels.dim() - 1)

    def allowance(self, images: int) -> float:
        """Seconds for so many images."""
        return 30 + 0.1 * images if self.seconds is None else self.seconds


LARGEST = 1e9
"""Of the numbers of a preprocessing."""


def numbers_in(option: str, text: str | None) -> tuple[float, ...] | None:
    """One number, or one for each channel, with commas between them.

    >>> numbers_in("--mean", "0.485,0.456,0.406")
    (0.485, 0.456, 0.406)
    """
    if text is None:
        return None
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{option} {text!r}: give a number, or one for each channel, such as 0.5,0.5,0.5") from None
    if not all(abs(number) < LARGEST for number in numbers):
        raise ValueError(f"{option} {text[:60]!r}: give numbers below {LARGEST:g}; pixels are in [0, 1]")
    return numbers


def prepared(
    network: nn.Module, images: LabelledImages, grey: bool, mean: str | None, std: str | None
) -> tuple[nn.Module, LabelledImages]:
    """The network with its preprocessing before it, and the images with the channels that it takes.

    Pixels stay in [0, 1]: that is where the noise is added. Images in colour are brought to grey if asked, or if the
    network takes nothing else.
    """
    network = with_preprocessing(network, numbers_in("--mean", mean), numbers_in("--std", std))
    if images.event_shape[0] == 1:
        return network, images
    in_grey = dataclasses.replace(images, images=grey_of(images.images))
    if grey:
        return network, in_grey
    if not _takes(network, images) and _takes(network, in_grey):
        warnings.warn(
            "the images are in colour and the network takes one channel: they are brought to grey", stacklevel=2
        )
        return network, in_grey
    return network, images


def grey_of(images: Tensor) -> Tensor:
    """(N, 1, H, W): the brightness of RGB images (ITU-R BT.601)."""
    weights = torch.tensor([0.299, 0.587, 0.114], dtype=images.dtype, device=images.device)
    return (images * weights.reshape(3, 1, 1)).sum(1, keepdim=True)


def _takes(network: nn.Module, images: LabelledImages) -> bool:
    """Whether a network runs on the first of the images."""
    first = next((x for x in network.parameters() if x.is_floating_point()), images.images)
    try:
        with torch.no_grad():
            network(images.images[:1].to(first.device, first.dtype))
    except (RuntimeError, ValueError, IndexError):
        return False
    return True


def covariance_in(path: Path | None) -> Tensor | None:
    """A covariance from an .npy file: the shape of an image, or (n, n)."""
    if path is None:
        return None
    if not path.is_file():
        raise FileNotFoundError(f"no file with a covariance at {path}")
    try:
        with open_regular(path) as file:
            array = read_array(file, path.stat().st_size, path.name)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{path} is no .npy file of numbers: {error}") from error
    if array.dtype.kind != "f":
        raise ValueError(f"{path}: wanted one array of floating-point numbers, the variance of every pixel or (n, n)")
    return torch.from_numpy(np.ascontiguousarray(array))


def count_or_all(option: str, text: str) -> int | None:
    """A number, or None for "all"."""
    if text == "all":
        return None
    if not text.isdecimal():
        raise ValueError(f"{option} {text!r}: give a number, or all")
    return int(text)


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
    if path.stat().st_size > MOST_NAMES:
        raise ValueError(
            f"{path} has {path.stat().st_size:,} bytes, more than the {MOST_NAMES:,} of class names allowed"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be a text in UTF-8 with a class name a line: {error.reason}") from None
    return tuple(line.strip() for line in text.splitlines() if line.strip())


MOST_NAMES = 2**24
"""Bytes of a file of class names."""


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
                f"{caller}: the images have {len(own)} classes "
                f"({printable(', '.join(own[:4]))}{', …' if len(own) > 4 else ''}) "
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
    listed = f", or a name: {printable(', '.join(names[:SHOWN]))}{', …' if len(names) > SHOWN else ''}" if names else ""
    raise ValueError(f"{option} {text!r} is no class of the network; give a number from 0 to {count - 1}{listed}")


def _require_labels(images: LabelledImages, count: int, caller: str) -> None:
    if images.labels is not None and int(images.labels.max()) >= count:
        worst = int(images.labels.argmax())
        raise ValueError(
            f"{caller}: the label of {printable(images.names[worst])} is {int(images.labels.max())}, but the network "
            f"has {count} scores, 0 to {count - 1}; are these images for this network?"
        )
