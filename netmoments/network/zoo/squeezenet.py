"""SqueezeNet 1.0 in the conventions of its authors' Caffe model."""

from __future__ import annotations

import torch
from torch import Tensor, nn


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
    """SqueezeNet 1.0: 227×227 images, BGR, 0–255 minus (104, 117, 123), see `CaffeInput`; 1000 classes.

    As in the Caffe model, max-pools are 3 with stride 2 in ceil mode, `conv10` has padding 1, and the scores are the
    mean over positions of its ReLU. Parameters: `conv1`, `fire2` … `fire9` (`squeeze`, `expand1x1`, `expand3x3`),
    `conv10`.
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
