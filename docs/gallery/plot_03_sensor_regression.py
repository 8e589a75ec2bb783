"""
Regression behind a noisy sensor
================================

A network predicts a force from two measured angles. What does the sensor's error do to the prediction? It does not only
spread it: where the function bends, the *mean* prediction is shifted as well, and no amount of averaging removes that.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

import netmoments as nm

torch.manual_seed(0)


def force(angles: torch.Tensor) -> torch.Tensor:
    return (torch.sin(2 * angles[:, :1]) + 0.5 * torch.cos(3 * angles[:, 1:])).relu()


network = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
for _ in range(800):
    angles = 4 * torch.rand(256, 2) - 2
    loss = (network(angles) - force(angles)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
network.eval()
print(f"root mean square error of the network: {loss.sqrt():.3f}")

# %%
# According to its data sheet, the sensor has deviations of 0.15 and 0.1, correlated because both angles share a
# reference.

sensor = torch.tensor([[0.15**2, 0.6 * 0.15 * 0.1], [0.6 * 0.15 * 0.1, 0.1**2]])
sweep = torch.stack([torch.linspace(-2, 2, 60), torch.full((60,), 0.4)], 1)
moments = nm.output_moments(network, nm.Gaussian(sweep, covariance=sensor), nm.Layerwise())
linear = nm.output_moments(network, nm.Gaussian(sweep, covariance=sensor), nm.Linear())

prediction, mean, deviation = network(sweep).detach()[:, 0], moments.mean[:, 0], moments.variance[:, 0].sqrt()
shift = (mean - prediction).abs()
print(f"largest shift of the mean: {shift.max():.3f}, at an angle of {sweep[shift.argmax(), 0]:.2f}")
print(f"error bars by the delta method: {(linear.variance[:, 0].sqrt() / deviation).min():.2f} to ", end="")
print(f"{(linear.variance[:, 0].sqrt() / deviation).max():.2f} times the right ones")

# %%
# The delta method uses the slope at the measured point. Near a bend it is therefore more confident than it should be.

figure, (curve, bars) = plt.subplots(1, 2, figsize=(9, 3.4))
curve.plot(sweep[:, 0], prediction, "--", label="prediction without noise")
curve.plot(sweep[:, 0], mean, label="mean under the sensor's noise")
low, high = mean - 2 * deviation, mean + 2 * deviation
curve.fill_between(sweep[:, 0], low, high, alpha=0.2, color="C1", label="± 2 deviations")
curve.set(xlabel="first angle", title="force")
curve.legend(fontsize=8)
bars.plot(sweep[:, 0], deviation, color="C1", label="layerwise")
bars.plot(sweep[:, 0], linear.variance[:, 0].sqrt(), "--", color="C2", label="delta method")
bars.set(xlabel="first angle", title="its deviation")
bars.legend(fontsize=8)
plt.show()

# %%
# To say how far it can be trusted, a formula's answer is compared with a few hundred runs of the network.

print(f"stated error of the means: at most {moments.error.mean.max():.4f}, of {deviation.median():.3f} deviation")
