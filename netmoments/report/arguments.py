"""What the words of the command line mean."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from netmoments import data as datasets
from netmoments.data import LabelledImages
from netmoments.data.images import evenly_spread
from netmoments.network import zoo
from netmoments.network.training import correct
from netmoments.sweep import Engine, LocalEngine, RayEngine

ENGINES = ("local", "ray")


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


def engine_named(name: str, device: torch.device, address: str | None = None) -> Engine:
    """local: this process, or every GPU here where the device is `cuda` without a number. ray: a Ray cluster."""
    if name not in ENGINES:
        raise ValueError(f"no engine {name!r}; there are {' and '.join(ENGINES)}")
    if name == "ray":
        return RayEngine(str(device), address, threads=torch.get_num_threads())
    if address is not None:
        raise ValueError(f"an address ({address}) is for the engine ray; give --engine ray too")
    return LocalEngine(_local_devices(device))


def _local_devices(device: torch.device) -> list[str]:
    if device.type == "cuda" and device.index is None and torch.cuda.device_count() > 1:
        return [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    return [str(device)]
