"""
An uncertainty map from a U-Net
===============================

A network that returns an image has an uncertainty for every pixel. Where does noise on the input change the
segmentation?
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

import netmoments as nm

torch.manual_seed(0)


def discs(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures of two discs of different brightness, and the mask of both."""
    y, x = torch.meshgrid(torch.arange(24.0), torch.arange(24.0), indexing="ij")
    images, masks = torch.zeros(count, 1, 24, 24), torch.zeros(count, 1, 24, 24)
    for brightness in (1.0, 0.35):
        centre, radius = 5 + 14 * torch.rand(count, 2, 1, 1), 3 + 3 * torch.rand(count, 1, 1)
        distance = (y - centre[:, 0]).square() + (x - centre[:, 1]).square()
        inside = (distance < radius.square()).unsqueeze(1)
        images, masks = torch.where(inside, brightness, images), torch.where(inside, 1.0, masks)
    return images, masks


class UNet(nn.Module):
    """One level down and up again, with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU())
        self.below = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.last = nn.Sequential(nn.Conv2d(16, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        first = self.first(images)
        return self.last(torch.cat([first, self.up(self.below(first))], 1))


network = UNet()
optimizer = torch.optim.Adam(network.parameters(), lr=5e-3)
for _ in range(150):
    images, masks = discs(16)
    scores = network(images + 0.05 * torch.randn_like(images))
    loss = nn.functional.binary_cross_entropy_with_logits(scores, masks)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
network.eval()
print(f"loss {loss:.3f}")

# %%
# Outputs keep their shape: means, variances and errors are maps. For 576 outputs a full covariance would be too large,
# and it is left out unless asked for.

images, masks = discs(1)
moments = nm.output_moments(network, nm.Gaussian(images[0], std=0.2), tolerance=0.03)
deviation = moments.variance[0].sqrt()
print(tuple(moments.mean.shape), f"largest deviation of a logit: {deviation.max():.2f}, by {moments.method}")

# %%
# How certain each pixel is, in units of its own deviation: near zero it may change sides. The rims are in doubt, most
# of all that of the dim disc. The logits of the background vary most, but they are far from zero.

sure = moments.mean[0] / deviation
figure, panels = plt.subplots(1, 4, figsize=(10, 2.8))
views = {"input": images[0, 0], "mean logit": moments.mean[0], "its deviation": deviation}
views["in doubt"] = sure.abs()
for panel, (title, view) in zip(panels, views.items(), strict=True):
    limits = {"vmin": 0, "vmax": 4, "cmap": "magma"} if title == "in doubt" else {}
    figure.colorbar(panel.imshow(view, **limits), ax=panel, shrink=0.7)
    panel.set_title(title)
    panel.set_axis_off()
plt.show()

# %%
# The share of pixels that noise may well flip:

print(f"within two deviations of changing sides: {(sure.abs() < 2).float().mean():.1%} of the pixels")
