"""From the arguments of the command line to a network, its images, and the settings of a study."""

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
from netmoments.network.validate import REFUSALS

RELATIVE_LEVELS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
"""Noise levels of the accuracy curve, in units of the chosen one."""
LARGEST = 1e9
"""The numbers that a preprocessing subtracts and divides by must be below this."""
MOST_NAMES = 2**24
"""A file of class names may have at most so many bytes."""
SHOWN = 12
"""At most so many class names are in an error message."""


def accuracy_in_words(
    network: nn.Module, held_out: LabelledImages, training: LabelledImages, device: torch.device
) -> str:
    """The accuracy on held-out images, and without those that are also in the training set."""
    right = correct(network, held_out, device=device)
    accuracy = f"test accuracy {float(right.double().mean()):.2%} of {len(right):,} images"
    known = datasets.duplicates_of(held_out.images, training.images)
    if not bool(known.any()):
        return accuracy
    rest = float(right[~known].double().mean())
    return f"{accuracy}; {rest:.2%} without the {int(known.sum())} that are also in the training set"


def device_named(name: str) -> torch.device:
    """The device that `--device` means: cpu, cuda (with a number or not), or auto, a GPU if there is one."""
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
    """The images; those of a folder are brought to the size that a zoo network takes, unless a size is given."""
    if size is None and model in zoo.ZOO and Path(data).is_dir():
        size = zoo.entry(model).input_shape[-1]
    return datasets.load(data, split=split, data_dir=data_dir, size=size)


@dataclass(frozen=True)
class Subject:
    """A network and images by their arguments on the command line, so that any process can load them."""

    model: str
    data: str
    weights: Path | None = None
    images: int | None = None
    """At most so many of the images are taken, evenly spread; None for all."""
    split: str = "test"
    data_dir: Path | None = None
    size: int | None = None
    grey: bool = False
    mean: str | None = None
    std: str | None = None

    def load(self) -> tuple[nn.Module, LabelledImages]:
        """The network with its preprocessing, and the images with the channels that it takes."""
        images = images_for(self.model, self.data, self.split, self.data_dir, self.size)
        images = images if self.images is None else spread(images, self.images)
        return prepared(load_network(self.model, self.weights), images, self.grey, self.mean, self.std)

    @property
    def title(self) -> str:
        """The network's name on a page."""
        return Path(self.model).name

    @property
    def source(self) -> str:
        """The data's name on a page."""
        return Path(self.data).name if Path(self.data).exists() else self.data


@dataclass(frozen=True)
class StudyConfig:
    """How much noise, and how well its effect is to be known."""

    sigma: float
    tolerance: float = 0.01
    """Half-width of the 95 % intervals of flip probabilities."""
    samples: int = 10_000
    """At most so many samples of each image are taken for that."""
    rare: int | None = 24
    """For so many images nearest to flipping the flip probability is found to 10 % of itself; None for all."""
    seconds: float | None = None
    """Time for the whole study; None for half a minute and a tenth of a second an image."""
    method: str = "auto"
    """Where the scores' moments are from: "auto" for the samples that are there anyway, or the name of a formula."""
    covariance: Tensor | None = None
    """The covariance of the noise in place of sigma² on every pixel: variances of the shape of an image, or (n, n)."""
    seed: int = 0
    scores: int = 10
    """How many of the largest scores are shown when there are many classes."""
    examples: int = 6
    """So many images are shown with noisy copies and scores."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    attacks: int = 4
    """For at most so many images noise is made that fools the network."""
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
        for name, least in {"samples": 2, "scores": 2, "examples": 0, "attacks": 0, "rare": 0}.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"report: {name} must be at least {least}, got {value}")

    @property
    def levels(self) -> tuple[float, ...]:
        """The σ of every noise level of the curve."""
        return tuple(self.sigma * level for level in RELATIVE_LEVELS)

    def noise(self, pixels: Tensor, level: float = 1.0) -> Gaussian:
        """The noise on images (N, ...) at a level relative to the chosen one."""
        if self.covariance is None:
            return Gaussian(pixels, std=level * self.sigma, event_ndim=pixels.dim() - 1)
        covariance = level**2 * self.covariance.to(pixels.device, pixels.dtype)
        return Gaussian(pixels, covariance, event_ndim=pixels.dim() - 1)

    def allowance(self, images: int) -> float:
        """The seconds that a study of so many images may take."""
        return 30 + 0.1 * images if self.seconds is None else self.seconds


def numbers_in(option: str, text: str | None) -> tuple[float, ...] | None:
    """The numbers in a text: one, or one for each channel, with commas between them.

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

    Pixels stay in [0, 1], because that is where the noise is added. Images in colour are brought to grey if `grey` says
    so, or if the network takes nothing else.
    """
    shifts, scales = numbers_in("--mean", mean), numbers_in("--std", std)
    for option, numbers in (("--mean", shifts), ("--std", scales)):
        if numbers is not None and len(numbers) not in (1, 1 if grey else images.event_shape[0]):
            raise ValueError(
                f"{option} {','.join(f'{x:g}' for x in numbers)}: give one number, or one for each channel; the images "
                f"have {1 if grey else images.event_shape[0]}"
            )
    network = with_preprocessing(network, shifts, scales)
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
    """The brightness of RGB images (ITU-R BT.601), (N, 1, H, W)."""
    weights = torch.tensor([0.299, 0.587, 0.114], dtype=images.dtype, device=images.device)
    return (images * weights.reshape(3, 1, 1)).sum(1, keepdim=True)


def _takes(network: nn.Module, images: LabelledImages) -> bool:
    """Whether a network runs on the first of the images."""
    like = next((parameter for parameter in network.parameters() if parameter.is_floating_point()), images.images)
    try:
        with torch.no_grad():
            network(images.images[:1].to(like.device, like.dtype))
    except REFUSALS:
        return False
    return True


def covariance_in(path: Path | None) -> Tensor | None:
    """The covariance in an .npy file: variances of the shape of an image, or (n, n)."""
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
    """The number that an option's text means; None for "all"."""
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
    """The layer that `--layer` means: a number if the text is one, else a name."""
    return int(text) if text.removeprefix("-").isdigit() else text


def class_names_in(path: Path | None) -> tuple[str, ...]:
    """The class names in a text file, one a line; none without a file."""
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


def with_classes_of(
    images: LabelledImages, classes: tuple[str, ...], count: int, caller: str
) -> tuple[LabelledImages, tuple[str, ...]]:
    """The images with labels by the network's numbering, and the names of its `count` classes, () if unknown."""
    if classes and len(classes) != count:
        raise ValueError(f"{caller}: {len(classes)} class names for a network with {count} scores")
    image_classes = images.classes
    if image_classes and images.labels is not None and len(image_classes) != count:
        unknown = [name for name in image_classes if name not in classes]
        if unknown:
            raise ValueError(
                f"{caller}: the images have {len(image_classes)} classes "
                f"({printable(', '.join(image_classes[:4]))}{', …' if len(image_classes) > 4 else ''}) "
                f"and the network {count} scores: which is which? name the folders by the numbers of the scores, or "
                f"give the names of all {count} classes (--classes), or put the images in one folder without labels"
            )
        places = torch.tensor([classes.index(name) for name in image_classes])
        images = dataclasses.replace(images, labels=places[images.labels], classes=classes)
    _require_labels(images, count, caller)
    return images, classes or (image_classes if len(image_classes) == count else ())


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
