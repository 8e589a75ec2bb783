"""
A network of your own
=====================

Train a small convolutional network and ask what noise does to it: what the scores are and how exactly they are known,
which class wins, and which method is worth its time. Nothing about the network is special; any ``nn.Module`` in eval
mode works the same way.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

import netmoments as nm

torch.manual_seed(0)
train, test = nm.data.load("digits", split="train"), nm.data.load("digits")
network = nn.Sequential(
    nn.Conv2d(1, 12, 3, padding=1),
    nn.BatchNorm2d(12),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(12, 24, 3, padding=1),
    nn.BatchNorm2d(24),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(24 * 16, 10),
)
optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
for _ in range(5):
    for batch in torch.randperm(len(train.images)).split(64):
        loss = nn.functional.cross_entropy(network(train.images[batch]), train.labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
network.eval()
print(f"accuracy without noise: {(network(test.images).argmax(1) == test.labels).float().mean():.3f}")

# %%
# One image
# ---------
#
# ``output_moments`` samples until the means are within 0.01 standard deviations, and says what it reached.

margins = network(test.images).softmax(1).detach()[torch.arange(len(test.images)), test.labels]
image = test.images[(margins - 0.9).abs().argmin()]  # right without noise, but not by a wide margin
moments = nm.output_moments(network, nm.Gaussian(image, std=0.1))
print(moments)

# %%
# More noise
# ----------
#
# As the noise grows, the means shift, the deviations increase, and the class of the picture loses its lead.

levels = torch.linspace(0.01, 0.5, 8)
noises = [nm.Gaussian(image, std=float(level)) for level in levels]
found = [nm.output_moments(network, noise, tolerance=0.03) for noise in noises]
best = moments.mean.topk(3).indices
figure, (picture, scores, winners) = plt.subplots(1, 3, figsize=(9, 3), width_ratios=[1, 2, 2])
picture.imshow(image[0], cmap="gray")
picture.set_axis_off()
for index in best:
    mean = torch.stack([each.mean[index] for each in found])
    deviation = torch.stack([each.variance[index].sqrt() for each in found])
    (line,) = scores.plot(levels, mean, label=f"{int(index)}")
    scores.fill_between(levels, mean - deviation, mean + deviation, color=line.get_color(), alpha=0.2)
    winners.plot(levels, [each.class_probabilities()[index] for each in found], color=line.get_color())
scores.set(xlabel="σ", title="score ± its deviation")
winners.set(xlabel="σ", title="probability to win", ylim=(0, 1.02))
scores.legend()
plt.show()

# %%
# Which method?
# -------------
#
# ``tightness`` compares all methods with plain samples, on this network and this noise.

print(nm.tightness(network, nm.Gaussian(image, std=0.1), samples=10_000))
