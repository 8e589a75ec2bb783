"""Networks that come with the library: those of the paper, and a small one for scikit-learn's digits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from netmoments.network.weights import load_weights


class LeNet(nn.Module):
    """The paper's LeNet: two stages of convolution 5×5, max-pool 2 and ReLU, and two fully connected layers.

    By default it has 32 and 64 channels and 1024 hidden units, as in the paper, and takes 28×28 images in [0, 1]. ReLUs
    0, 1, 2 are the paper's l = 1, 2, 3.
    """

    def __init__(self, side: int = 28, channels: tuple[int, int] = (32, 64), hidden: int = 1024) -> None:
        super().__init__()
        first, second = channels
        self.conv1 = nn.Conv2d(1, first, 5, padding=2)
        self.pool1 = nn.MaxPool2d(2)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(first, second, 5, padding=2)
        self.pool2 = nn.MaxPool2d(2)
        self.relu2 = nn.ReLU()
        self.fc1 = nn.Linear(second * (side // 4) ** 2, hidden)
        self.relu3 = nn.ReLU()
        self.fc2 = nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu1(self.pool1(self.conv1(x)))
        x = self.relu2(self.pool2(self.conv2(x)))
        return self.fc2(self.relu3(self.fc1(x.flatten(1))))


class DigitsLeNet(nn.Module):
    """A small LeNet for 8×8 digits in [0, 1]: convolutions 3×3, 12 and 24 channels, 64 hidden units."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 12, 3, padding=1)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(12, 24, 3, padding=1)
        self.pool2 = nn.MaxPool2d(2)
        self.relu2 = nn.ReLU()
        self.fc1 = nn.Linear(24 * 4 * 4, 64)
        self.relu3 = nn.ReLU()
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu1(self.conv1(x))
        x = self.relu2(self.pool2(self.conv2(x)))
        return self.fc2(self.relu3(self.fc1(x.flatten(1))))


class AlexNet(nn.Module):
    """Five convolutions, three fully connected layers, seven ReLUs; parameter names as in torchvision's state dicts.

    It takes 224×224 RGB images normalised by ImageNet's mean and deviation, see `ImageNetInput`.
    """

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 64, 11, stride=4, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(64, 192, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, 2),
            nn.Conv2d(192, 384, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(384, 256, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(256, 256, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(3, 2),
        )
        self.avgpool = nn.AdaptiveAvgPool2d(6)
        self.classifier = nn.Sequential(
            nn.Dropout(),
            nn.Linear(256 * 6 * 6, 4096),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(),
            nn.Linear(4096, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.avgpool(self.features(x)).flatten(1))


class FaceAlexNet(nn.Module):
    """AlexNet for 48×48 grey faces in [0, 1] and 7 emotions: five convolutions and three fully connected layers.

    It has smaller kernels and strides for the smaller image, batch normalisation after the convolutions (affine once
    trained), and 5.2 million parameters.
    """

    def __init__(self, classes: int = 7) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_stage(1, 64, 5),
            nn.MaxPool2d(3, 2),
            *_stage(64, 128, 5),
            nn.MaxPool2d(3, 2),
            *_stage(128, 256, 3),
            *_stage(256, 256, 3),
            *_stage(256, 256, 3),
            nn.MaxPool2d(3, 2),
        )
        self.classifier = nn.Sequential(
            nn.Dropout(0.5),
            nn.Linear(256 * 5 * 5, 512),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(512, 512),
            nn.ReLU(),
            nn.Linear(512, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


def _stage(inputs: int, outputs: int, kernel: int) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
    return convolution, nn.BatchNorm2d(outputs), nn.ReLU()


class Fire(nn.Module):
    """Squeeze by 1×1 convolutions, expand by 1×1 and 3×3 ones side by side, a ReLU after each."""

    def __init__(self, inputs: int, squeezed: int, expanded: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inputs, squeezed, 1)
        self.squeeze_relu = nn.ReLU()
        self.expand1x1 = nn.Conv2d(squeezed, expanded, 1)
        self.expand3x3 = nn.Conv2d(squeezed, expanded, 3, padding=1)
        self.expand_relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.squeeze_relu(self.squeeze(x))
        return self.expand_relu(torch.cat([self.expand1x1(x), self.expand3x3(x)], 1))


class SqueezeNet(nn.Module):
    """SqueezeNet 1.0 for 227×227 BGR images, 0–255 minus (104, 117, 123), see `CaffeInput`.

    As in the Caffe model, max-pools are 3 with stride 2 in ceil mode, `conv10` has padding 1, and the scores are the
    mean over positions of its ReLU. The parameters are called `conv1`, `fire2` … `fire9` (`squeeze`, `expand1x1`,
    `expand3x3`), `conv10`.
    """

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 96, 7, stride=2)
        self.relu1 = nn.ReLU()
        self.pool = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.fire2 = Fire(96, 16, 64)
        self.fire3 = Fire(128, 16, 64)
        self.fire4 = Fire(128, 32, 128)
        self.fire5 = Fire(256, 32, 128)
        self.fire6 = Fire(256, 48, 192)
        self.fire7 = Fire(384, 48, 192)
        self.fire8 = Fire(384, 64, 256)
        self.fire9 = Fire(512, 64, 256)
        self.conv10 = nn.Conv2d(512, classes, 1, padding=1)
        self.relu10 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.relu1(self.conv1(x)))
        x = self.pool(self.fire4(self.fire3(self.fire2(x))))
        x = self.pool(self.fire8(self.fire7(self.fire6(self.fire5(x)))))
        return self.relu10(self.conv10(self.fire9(x))).mean((2, 3))


class Normalised(nn.Module):
    """A first layer that normalises each channel, (x − mean)/deviation, as most networks were trained."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, mean: Sequence[float], deviation: Sequence[float]) -> None:
        super().__init__()
        for name, values in (("mean", mean), ("deviation", deviation)):
            self.register_buffer(name, torch.tensor(values).reshape(-1, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.deviation


class ImageNetInput(Normalised):
    """Normalisation by the means and deviations of ImageNet's channels, for RGB images in [0, 1]."""

    def __init__(self) -> None:
        super().__init__((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class CaffeInput(nn.Module):
    """A first layer that turns RGB in [0, 1] into BGR in 0–255 minus (104, 117, 123)."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([104.0, 117.0, 123.0]).reshape(3, 1, 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return 255 * x.flip(-3) - self.mean


__all__ = [
    "ZOO",
    "AlexNet",
    "CaffeInput",
    "DigitsLeNet",
    "FaceAlexNet",
    "ImageNetInput",
    "LeNet",
    "Normalised",
    "SqueezeNet",
    "ZooEntry",
    "build",
    "entry",
    "pretrained",
]

SHIPPED = Path(__file__).parent / "shipped"
"""The folder of trained weights that come with the library."""


@dataclass(frozen=True)
class ZooEntry:
    """A network of the zoo, what it takes, and where its trained weights are."""

    network: Callable[[], nn.Module]
    input_shape: tuple[int, int, int]
    description: str
    shipped: str | None = None
    """The file of trained weights in `SHIPPED`; None if the user must bring them."""
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
    """The entry of this name in `ZOO`, else a ValueError that lists all names."""
    if name not in ZOO:
        raise ValueError(f"no network {name!r} in the zoo; there are {', '.join(ZOO)}")
    return ZOO[name]


def build(name: str) -> nn.Module:
    """A fresh network of the zoo, untrained, in eval mode.

    >>> sum(x.numel() for x in build("lenet").parameters())
    3274634
    """
    chosen = entry(name)
    return _prepared(chosen, chosen.network())


def pretrained(name: str, weights: str | Path | None = None) -> nn.Module:
    """A network of the zoo, in eval mode, with the weights that come with the library, or with those in your file.

    >>> pretrained("digits")(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """
    chosen = entry(name)
    if weights is None:
        if chosen.shipped is None:
            shipped = ", ".join(key for key, value in ZOO.items() if value.shipped)
            raise ValueError(f"no weights come with {name!r} (they do with {shipped}); give a file of your own")
        weights = SHIPPED / chosen.shipped
    with torch.random.fork_rng(devices=[]):  # initial weights are drawn, and overwritten
        network = chosen.network()
    load_weights(network, weights)
    return _prepared(chosen, network)


def _prepared(chosen: ZooEntry, network: nn.Module) -> nn.Module:
    """The network in eval mode, with the first layer that it needs, if any."""
    whole = network if chosen.preparation is None else nn.Sequential(chosen.preparation(), network)
    return whole.eval()
