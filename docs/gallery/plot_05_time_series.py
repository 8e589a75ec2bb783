"""
A time series
=============

A recurrent network forecasts a series from its last values. Sensor noise is rarely white. A slow drift may be just as
large at every moment, yet it affects the forecast differently. Any covariance over time is allowed.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

import netmoments as nm

torch.manual_seed(0)
LENGTH, AHEAD = 24, 8


class Forecast(nn.Module):
    """A GRU that maps (batch, time) to the next values."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.head = nn.GRU(1, 24, batch_first=True), nn.Linear(24, AHEAD)

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        return self.head(self.state(series.unsqueeze(-1))[0][:, -1])


def waves(count: int) -> torch.Tensor:
    """(count, time): a sum of two waves of random phase."""
    time, phase = torch.arange(LENGTH + AHEAD), 6.3 * torch.rand(count, 2, 1)
    return torch.sin(0.5 * time + phase[:, 0]) + 0.5 * torch.sin(0.23 * time + phase[:, 1])


network = Forecast()
optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
for _ in range(150):
    series = waves(64)
    loss = (network(series[:, :LENGTH]) - series[:, LENGTH:]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
network.eval()
print(f"root mean square error without noise: {loss.sqrt():.3f}")

# %%
# Two kinds of noise, both with a deviation of 0.2 at every moment: white noise, and a drift whose correlation falls by
# 5 % per step.

series = waves(1)[0]
steps = torch.arange(LENGTH)
drift = 0.2**2 * 0.95 ** (steps[:, None] - steps).abs()
white = nm.output_moments(network, nm.Gaussian(series[:LENGTH], std=0.2))
slow = nm.output_moments(network, nm.Gaussian(series[:LENGTH], covariance=drift))
for name, moments in {"white": white, "drift": slow}.items():
    print(f"{name}: deviations {[round(float(each), 3) for each in moments.variance.sqrt()]}, {moments.method}")

# %%
# The forecast, with an uncertainty band for each kind of noise.

ahead = torch.arange(LENGTH, LENGTH + AHEAD)
figure, panel = plt.subplots()
panel.plot(series, color="#7d7d7d", label="the series")
for name, moments in {"drift": slow, "white": white}.items():
    deviation = moments.variance.sqrt()
    (line,) = panel.plot(ahead, moments.mean, ".-", label=f"forecast, {name} noise")
    low, high = moments.mean - 2 * deviation, moments.mean + 2 * deviation
    panel.fill_between(ahead, low, high, alpha=0.2, color=line.get_color())
panel.axvline(LENGTH - 0.5, color="#7d7d7d", linewidth=0.7)
panel.set(xlabel="time")
panel.legend(fontsize=8)
plt.show()

# %%
# The errors of neighbouring forecasts are correlated, which matters to anyone who adds the forecasts up. Here is the
# deviation of the sum of all eight, with their covariance and as if they were independent.

for name, moments in {"white": white, "drift": slow}.items():
    print(f"{name}: {moments.covariance.sum().sqrt():.2f}, as if independent {moments.variance.sum().sqrt():.2f}")
