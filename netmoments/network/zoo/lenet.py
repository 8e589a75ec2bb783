"""The paper's LeNet, and a small one for scikit-learn's 8×8 digits."""

from __future__ import annotations

from torch import Tensor, nn


class LeNet(nn.Module):
    """Two (convolution 5×5, max-pool 2, ReLU) stages and two fully connected layers.

    ReLUs 0, 1, 2 are the paper's l = 1, 2, 3. For 28×28 images in [0, 1] with the default sizes: 32 and 64 channels,
    1024 hidden units, as in the paper.
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
    """A LeNet for 8×8 digits in [0, 1]: convolutions 3×3, 12 and 24 channels, 64 hidden units."""

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
