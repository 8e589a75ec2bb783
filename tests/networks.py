"""Small networks in eval mode, each with something that makes it harder than it looks; and a plain one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from netmoments.affine_relu_affine import AffineReluAffine
from netmoments.network.zoo import LeNet


class Block(nn.Module):
    """x + (convolution, normalisation, ReLU, convolution, normalisation), and a ReLU in place."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.relu2 = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(self.relu1(self.norm1(self.conv1(x)))))
        out += x
        return self.relu2(out)


class Residual(nn.Module):
    """A small residual network for (2, 6, 6) images."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.relu = nn.ReLU()
        self.block1, self.block2 = Block(4), Block(4)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.fc = nn.Linear(16, 3)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_()
                module.running_var.uniform_(0.5, 2.0)
                nn.init.uniform_(module.weight, 0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.pool(self.block2(self.block1(self.relu(self.stem(x))))).flatten(1))


class Concatenation(nn.Module):
    """Two branches, each with a ReLU of its own, side by side, and the input once more beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = nn.Linear(6, 5), nn.Linear(6, 4), nn.Linear(15, 3)

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([functional.relu(self.left(x)), self.right(x).clamp(min=0), x], 1)
        return self.last(joined)


class Shared(nn.Module):
    """One ReLU module called twice, and one linear layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.act, self.last = nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.layer(self.act(self.layer(x)))))


def rectified(x: Tensor) -> Tensor:
    return torch.relu(x)


def twice_rectified(x: Tensor, weight: Tensor) -> Tensor:
    return rectified(rectified(x) @ weight - 0.1)


class Nested(nn.Module):
    """ReLUs inside functions inside functions, and a module that hides one in its forward."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 5)

        def forward(self, x: Tensor) -> Tensor:
            return functional.relu(self.layer(x))

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = self.Inner(), nn.Linear(5, 3)
        self.weight = nn.Parameter(torch.randn(5, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(twice_rectified(self.inner(x) - 0.1, self.weight))


class Mutating(nn.Module):
    """Writes into its input, and uses a ReLU as a statement."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2.0)
        x += 0.1
        x.relu_()
        z = self.first(x)
        z.relu_()
        return self.last(z)


class ChangesTheReluOutput(nn.Module):
    """What a ReLU returned is changed in place afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).clamp(min=0)
        y *= 0.5
        y += 1.0
        return self.last(y)


class Folded(nn.Module):
    """The two halves of an input go through one layer as two rows: its ReLU sees (2N, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.last = nn.Linear(3, 4), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        halves = functional.relu(self.each(x.reshape(-1, 3)))
        return self.last(halves.reshape(len(x), 8))


class Transposed(Folded):
    """The same with the halves first: the ReLU sees (2, N, 4), a batch of 2 looking like the batch."""

    def forward(self, x: Tensor) -> Tensor:
        halves = functional.relu(self.each(x.reshape(len(x), 2, 3).transpose(0, 1)))
        return self.last(halves.transpose(0, 1).reshape(len(x), 8))


class ImageByImage(nn.Module):
    """Calls its layers once for each image of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.last(functional.relu(self.first(image))) for image in x])


class Doubling(torch.autograd.Function):
    """A function of the old style, which forward mode cannot differentiate."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return 2 * grad


class OnlyBackward(nn.Module):
    """More units than inputs behind a function without a forward-mode derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 9), nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(functional.relu(self.first(Doubling.apply(x))))


FACTORIES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "lenet": (lambda: LeNet(side=8, channels=(3, 4), hidden=12), (1, 8, 8)),
    "residual": (Residual, (2, 6, 6)),
    "concatenation": (Concatenation, (6,)),
    "shared": (Shared, (6,)),
    "nested": (Nested, (6,)),
    "mutating": (Mutating, (6,)),
    "changes the output": (ChangesTheReluOutput, (6,)),
    "folded": (Folded, (6,)),
    "transposed": (Transposed, (6,)),
    "image by image": (ImageByImage, (6,)),
    "only backward": (OnlyBackward, (6,)),
}


def network(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """A network of the table, always the same, in eval mode."""
    return seeded(FACTORIES[name][0], dtype, seed)


def inputs(name: str, count: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, *FACTORIES[name][1], dtype=dtype, generator=generator)


def seeded(factory: Callable[[], nn.Module], dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return factory().to(dtype).eval()


def random_network(
    inputs: int, units: int, outputs: int, seed: int, dtype: torch.dtype = torch.float64
) -> AffineReluAffine:
    """An (Affine, ReLU, Affine) of normal weights, whose pre-activations and outputs have variances about 1."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, generator=generator)

    return AffineReluAffine(
        normal(units, inputs) / inputs**0.5, normal(units), normal(outputs, units) / units**0.5, normal(outputs)
    )
