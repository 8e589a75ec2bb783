"""
A vision transformer
====================

Attention and layer norms need no special treatment: the default method runs the network, with fewer and faster samples
than a plain loop, until the answer is as exact as asked.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

import netmoments as nm

torch.manual_seed(0)


class TinyViT(nn.Module):
    """Patches of 2×2 and two transformer blocks; the mean token decides."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.place = nn.Parameter(0.1 * torch.randn(1, 16, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.place
        return self.head(self.blocks(tokens).mean(1))


train, test = nm.data.load("digits", split="train"), nm.data.load("digits")
network = TinyViT()
optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
for _ in range(12):
    for batch in torch.randperm(len(train.images)).split(64):
        loss = nn.functional.cross_entropy(network(train.images[batch]), train.labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
network.eval()
print(f"accuracy without noise: {(network(test.images).argmax(1) == test.labels).float().mean():.3f}")

# %%
# A batch of images, one call
# ---------------------------

images = test.images[:6]
moments = nm.output_moments(network, nm.Gaussian(images, std=0.1), tolerance=0.02)
print(f"{moments.method}, tolerance met: {moments.met}")
print("largest error of a mean, in deviations:", f"{(moments.error.mean / moments.variance.sqrt()).max():.3f}")

# %%
# Against plain samples
# ---------------------
#
# Ten thousand plain samples are the reference that everyone understands.

sampled = nm.monte_carlo(network, nm.Gaussian(images, std=0.1), samples=10_000, seed=1)
print(moments.compare(sampled))

# %%
# Which digits are settled
# ------------------------
#
# Rows are images and columns are classes; the colour is the probability that a class wins under noise of σ = 0.3.

winners = nm.class_probabilities(network, nm.Gaussian(images, std=0.3), absolute_error=0.02)
figure, (pictures, chances) = plt.subplots(1, 2, figsize=(8, 4), width_ratios=[1, 5])
pictures.imshow(torch.cat(list(images[:, 0])), cmap="gray", aspect="auto")
pictures.set_axis_off()
shown = chances.imshow(winners.probability, vmin=0, vmax=1, aspect="auto")
chances.set(xticks=range(10), yticks=[], xlabel="class")
figure.colorbar(shown, label="probability to win")
plt.show()
