"""
Correlated noise and ``LowRank``
================================

White noise on every pixel is one thing; a flickering lamp that brightens the whole picture, or a shadow that moves
across it, is another. Such noise has only a few directions. ``nm.LowRank(factor, diagonal)`` stands for the covariance
F Fᵀ + diag(d), which is never formed as a dense matrix.
"""

import matplotlib.pyplot as plt
import torch

import netmoments as nm

torch.manual_seed(0)
network, data = nm.zoo.pretrained("digits"), nm.data.load("digits")
image = data.images[392]
pixels = image.numel()

# %%
# The first noise has two directions, a lamp and a gradient from left to right, with a little white noise on top. The
# second is white noise of the same total variance.

x = torch.linspace(-1, 1, 8).expand(8, 8).flatten()
factor = torch.stack([0.25 * torch.ones(pixels), 0.25 * x], 1)  # (pixels, directions)
lighting = nm.LowRank(factor, diagonal=0.02**2)
total = factor.square().sum() + pixels * 0.02**2
white = nm.Gaussian(image, std=float((total / pixels).sqrt()))
lit = nm.Gaussian(image, covariance=lighting)

for name, noise in {"white": white, "lighting": lit}.items():
    moments, flip = nm.output_moments(network, noise), nm.flip_probability(network, noise)
    print(f"{name}: score of 8 is {moments.mean[8]:.2f} ± {moments.variance[8].sqrt():.2f}, ", end="")
    print(f"the answer flips with probability {flip.probability:.3f}")

# %%
# Draws of both, white noise in the first row and lighting in the second.

figure, panels = plt.subplots(2, 6, figsize=(8, 2.9))
for row, noise in zip(panels, (white, lit), strict=True):
    for panel, draw in zip(row, noise.sample(6, generator=torch.Generator().manual_seed(1)), strict=True):
        panel.imshow(draw[0], cmap="gray", vmin=-0.3, vmax=1.3)
        panel.set_axis_off()
plt.show()

# %%
# With few directions "layerwise" is at its best: it carries a row for each of them, and pairs of up to 32 exactly.

found = nm.output_moments(network, lit, nm.Layerwise())
exact = nm.output_moments(network, lit, tolerance=0.003)
print("layerwise against the default at a tolerance of 0.003: means off by at most ", end="")
print(f"{((found.mean - exact.mean).abs() / exact.variance.sqrt()).max():.3f} deviations")
