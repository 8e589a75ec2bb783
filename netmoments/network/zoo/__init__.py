"""Networks that come with the library: the paper's, and the small one that is the embedded default."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from netmoments.network.weights import load_weights
from netmoments.network.zoo.alexnet import AlexNet, FaceAlexNet
from netmoments.network.zoo.inputs import CaffeInput, ImageNetInput
from netmoments.network.zoo.lenet import DigitsLeNet, LeNet
from netmoments.network.zoo.squeezenet import SqueezeNet

__all__ = [
    "ZOO",
    "AlexNet",
    "CaffeInput",
    "DigitsLeNet",
    "FaceAlexNet",
    "ImageNetInput",
    "LeNet",
    "SqueezeNet",
    "ZooEntry",
    "build",
    "entry",
    "pretrained",
]

SHIPPED = Path(__file__).parent / "weights"


@dataclass(frozen=True)
class ZooEntry:
    """A network, what it takes, and whether its trained weights are shipped."""

    network: Callable[[], nn.Module]
    input_shape: tuple[int, int, int]
    description: str
    shipped: str | None = None
    preparation: Callable[[], nn.Module] | None = None
    """An affine first layer that turns RGB in [0, 1] into what the network was trained on."""


ZOO = {
    "digits": ZooEntry(DigitsLeNet, (1, 8, 8), "a small LeNet for scikit-learn's digits", "digits.safetensors"),
    "lenet": ZooEntry(LeNet, (1, 28, 28), "the paper's LeNet for MNIST", "lenet.safetensors"),
    "faces": ZooEntry(FaceAlexNet, (1, 48, 48), "AlexNet for FER2013's faces", "faces.safetensors"),
    "alexnet": ZooEntry(AlexNet, (3, 224, 224), "AlexNet for ImageNet; bring the weights", preparation=ImageNetInput),
    "squeezenet": ZooEntry(
        SqueezeNet, (3, 227, 227), "SqueezeNet 1.0 for ImageNet, Caffe's; bring the weights", preparation=CaffeInput
    ),
}


def entry(name: str) -> ZooEntry:
    if name not in ZOO:
        raise ValueError(f"no network {name!r} in the zoo; there are {', '.join(ZOO)}")
    return ZOO[name]


def build(name: str) -> nn.Module:
    """A fresh network of the zoo, untrained, in eval mode."""
    found = entry(name)
    return _prepared(found, found.network())


def pretrained(name: str, weights: str | Path | None = None) -> nn.Module:
    """A network of the zoo, in eval mode, with the weights that come with the library or those of a file of yours."""
    found = entry(name)
    if weights is None:
        if found.shipped is None:
            having = ", ".join(key for key, value in ZOO.items() if value.shipped)
            raise ValueError(f"no weights come with {name!r} (they do with {having}); give a file of your own")
        weights = SHIPPED / found.shipped
    with torch.random.fork_rng(devices=[]):  # initial weights are drawn, and overwritten
        network = found.network()
    load_weights(network, weights)
    return _prepared(found, network)


def _prepared(found: ZooEntry, network: nn.Module) -> nn.Module:
    whole = network if found.preparation is None else nn.Sequential(found.preparation(), network)
    return whole.eval()
