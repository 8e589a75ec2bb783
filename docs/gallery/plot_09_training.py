"""
Expected scores in a training loop
==================================

A formula gives what a network says under noise *on average*, with derivatives in the network's weights. Put it between
the network and the loss, and the network learns to be right under noise without any noise being drawn. With the
deviations of the scores as well, it learns to be certain.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

import netmoments as nm

train, test = nm.data.load("digits", split="train"), nm.data.load("digits")
SIGMA = 0.3


class Network(nn.Module):
    """One hidden layer of ReLUs, for which the moments are exact."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(images.flatten(1)).relu())

    @property
    def formula(self) -> nm.AffineReluAffine:
        return nm.AffineReluAffine(self.first.weight, self.first.bias, self.last.weight, self.last.bias)


# %%
# Three trainings that differ only in the loss: the cross entropy of the scores; of the expected scores; and of the
# expected scores shrunk where they are uncertain, mean/√(1 + π/8 variance), the usual approximation of an expected
# softmax.


def plain(network: Network, images: torch.Tensor) -> torch.Tensor:
    return network(images)


def expected(network: Network, images: torch.Tensor) -> torch.Tensor:
    return nm.ExpectedLogits(network.formula, SIGMA)(images.flatten(1))


def cautious(network: Network, images: torch.Tensor) -> torch.Tensor:
    noise, formula = nm.Gaussian(images.flatten(1), std=SIGMA), network.formula
    return formula.mean(noise) / (1 + torch.pi / 8 * formula.variance(noise)).sqrt()


def trained(scores) -> Network:
    torch.manual_seed(1)
    network = Network()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for _ in range(6):
        for batch in torch.randperm(len(train.images)).split(64):
            loss = nn.functional.cross_entropy(scores(network, train.images[batch]), train.labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return network


# %%
# Accuracy over the level of the noise.


def accuracy(network: nn.Module, level: float) -> float:
    noise = torch.randn(20, *test.images.shape, generator=torch.Generator().manual_seed(2))
    answers = network((test.images + level * noise).flatten(0, 1)).argmax(1).reshape(20, -1)
    return float((answers == test.labels).float().mean())


levels = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
figure, panel = plt.subplots()
for scores in (plain, expected, cautious):
    network = trained(scores)
    curve = [accuracy(network, level) for level in levels]
    panel.plot(levels, curve, "o-", label=scores.__name__)
    print(f"{scores.__name__}: {[round(each, 3) for each in curve]}")
panel.set(xlabel="σ of the noise at test time", ylabel="accuracy")
panel.legend()
plt.show()

# %%
# For a deeper network, ``nm.ExpectedLogits(network, sigma, method=nm.Layerwise())`` is the same module with formulas at
# every layer, at the cost of many runs of the network.
