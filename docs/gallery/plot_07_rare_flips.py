"""
Rare flips
==========

How often does noise change the network's answer, when that happens one time in a million or less? Plain sampling never
sees it, and a Gaussian fitted to the scores can be wrong by orders of magnitude. ``nm.flip_probability`` estimates it,
with an interval, in a few thousand runs.
"""

import matplotlib.pyplot as plt
import torch

import netmoments as nm

network, data = nm.zoo.pretrained("digits"), nm.data.load("digits")
image = data.images[3]

# %%
# The same image at smaller and smaller noise.

levels = [0.2, 0.17, 0.14, 0.1, 0.08]
flips = [nm.flip_probability(network, nm.Gaussian(image, std=level), seed=0) for level in levels]
for level, flip in zip(levels, flips, strict=True):
    low, high = flip.interval
    print(f"σ = {level}: {flip.probability:.1e}, 95 % between {low:.1e} and {high:.1e}, {int(flip.runs):,} runs")

# %%
# For comparison, a Gaussian with the right moments. It is close where flips are common, and an extrapolation where they
# are rare.

answer = int(network(image.unsqueeze(0)).argmax())
fitted = [
    float(nm.output_moments(network, nm.Gaussian(image, std=level), nm.Layerwise()).flip_probability(answer))
    for level in levels
]
figure, panel = plt.subplots()
found = torch.tensor([float(flip.probability) for flip in flips])
reach = torch.tensor([[float(end) for end in flip.interval] for flip in flips])
bars = torch.stack([found - reach[:, 0], reach[:, 1] - found]).clamp(min=0)
panel.errorbar(levels, found, bars, fmt="o-", label="flip_probability, 95 %")
panel.plot(levels, fitted, "s--", label="a Gaussian fitted to the scores")
panel.axhspan(1e-300, 1e-4, color="#7d7d7d", alpha=0.12, label="out of reach of 10,000 samples")
panel.set(yscale="log", xlabel="σ", title="probability that the answer flips", ylim=(1e-16, 1))
panel.legend(fontsize=8)
plt.show()

# %%
# An interval is not a certificate: it covers the flips that two independent searches and the samples met. The result
# also has what a second estimate says.

print(flips[-1])
