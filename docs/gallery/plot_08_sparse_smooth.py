"""
Noise that fools: sparse and smooth
===================================

The other way round: find the least Gaussian noise, on few pixels and without rough edges, that makes the network
misclassify a digit in 95 % of the draws.
"""

import matplotlib.pyplot as plt
import torch

import netmoments as nm

network, data = nm.zoo.pretrained("digits"), nm.data.load("digits")
images, labels = data.images[:4], data.labels[:4]
attack = nm.attacks.SparseSmooth(confidence=0.95, samples=500, polish=60)
result = attack(network, images, labels)
print(result)

# %%
# The success rate that was reached on the network itself, with an interval.

for place in range(len(result)):
    rate, low, high = (each[place] for each in (result.success.rate, result.success.low, result.success.high))
    print(f"{int(result.labels[place])} taken for {int(result.answers[place])} in {rate:.0%} of the draws ", end="")
    print(f"({low:.0%} to {high:.0%}), {int(result.l0[place])} of 64 pixels changed")

# %%
# The images, the shifts μ (red adds, blue takes away), and one noisy draw each.

draws = result.noise.sample(1, generator=torch.Generator().manual_seed(0))[0]
figure, panels = plt.subplots(3, len(result), figsize=(7, 5))
for column, (image, mu, draw) in enumerate(zip(result.images, result.mu, draws, strict=True)):
    panels[0, column].imshow(image[0], cmap="gray", vmin=0, vmax=1)
    panels[1, column].imshow(mu[0], cmap="RdBu_r", vmin=-1, vmax=1)
    panels[2, column].imshow(draw[0], cmap="gray", vmin=0, vmax=1)
    panels[0, column].set_title(f"{int(result.labels[column])}")
    panels[2, column].set_title(f"taken for {int(result.answers[column])}")
for panel in panels.flat:
    panel.set_axis_off()
plt.show()

# %%
# ``result.gap`` bounds how much smaller ‖μ‖₁ + TV(μ) could have been, for margins linearized at the solution.

print("gap:", [f"{float(gap):.3f}" for gap in result.gap])
