"""Methods on a gallery: errors are those against its references, in the units that are printed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import netmoments as nm
from benchmarks.gallery import figures, processor_seconds


class OneLayer:
    """A gallery of one network, whose moments are known; its references may be off on purpose."""

    def __init__(self, off: float, wider: float) -> None:
        torch.manual_seed(0)
        self.made = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
        self.off, self.wider = off, wider

    def network(self, name: str) -> nn.Module:
        return self.made

    def numbers(self, name: str) -> list[int]:
        return [0, 1, 2]

    def images(self, name: str, numbers: list[int]) -> Tensor:
        return torch.tensor([[float(number), 0.5, -0.5] for number in numbers])

    def truth(self, name: str, number: int, sigma: float) -> tuple[Tensor, Tensor]:
        image = self.images(name, [number])[0].double()
        first, _, last = self.made
        exact = nm.AffineReluAffine(*(x.detach().double() for x in (first.weight, first.bias, last.weight, last.bias)))
        noise = nm.Gaussian(image, std=sigma)
        variance = exact.variance(noise)
        return exact.mean(noise) + self.off * variance.sqrt(), variance / (1 + self.wider)


def test_errors_are_in_deviations_and_relative():
    row = figures(OneLayer(0.25, 0.5), "one", 0.1, "layerwise", images=2)
    # the reference's deviation is that of the truth by √1.5
    assert row["mean"] == pytest.approx(0.25 * 1.5**0.5, rel=1e-4)
    assert row["variance"] == pytest.approx(0.5, rel=1e-3)
    assert row["time"] > 0


def test_what_is_exact_has_no_error():
    row = figures(OneLayer(0.0, 0.0), "one", 0.1, "auto", images=3)
    assert row["mean"] < 1e-5
    assert row["variance"] < 1e-4


def test_processor_time_is_that_of_the_work():
    idle, busy = processor_seconds(lambda: None), processor_seconds(lambda: sum(range(10**6)))
    assert 0 <= idle < busy
