"""AlexNet in the usual ImageNet layout, and the variant for 48×48 faces."""

from __future__ import annotations

from torch import Tensor, nn


class AlexNet(nn.Module):
    """Five convolutions, three fully connected layers, seven ReLUs; parameter names as in torchvision's state dicts.

    Takes 224×224 RGB images normalised by ImageNet's mean and deviation, see `ImageNetInput`.
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

    Smaller kernels and strides for the smaller image, batch normalisation after the convolutions (affine once trained),
    5.2 million parameters.
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
