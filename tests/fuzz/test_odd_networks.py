"""Networks whose weights are not plain tensors of one dtype, and inputs that share memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import netmoments as nm
from tests.fuzz.workloads import METHODS

NOISE = nm.Gaussian(torch.linspace(-1, 1, 3), std=0.1)


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).eval()


class Shifted(nn.Module):
    """Adds a buffer, in float64, to what a float32 layer returns."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("shift", torch.zeros(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.shift


class Mixed(Shifted):
    """Has a product with it instead, which torch refuses."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) @ self.shift.diag()


def sparse() -> nn.Module:
    network = perceptron()
    network[0].weight = nn.Parameter(network[0].weight.detach().to_sparse())
    return network


def quantized() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(perceptron(), {nn.Linear}, dtype=torch.qint8).eval()


BAD = {
    "a buffer that changes the dtype": (
        Shifted,
        ValueError,
        r"returns torch.float64 for an input of torch.float32; it has shift \(float64\).*network.to\(torch.float32\)",
    ),
    "a buffer of another dtype": (
        Mixed,
        ValueError,
        r"cannot take an input .*; it has shift \(float64\) for",
    ),
    "sparse weights": (sparse, TypeError, r"the network's 0.weight must be a plain tensor, got one that is sparse_coo"),
    "no weights yet": (
        lambda: perceptron().to("meta"),
        TypeError,
        r"the network's 0.weight has no values.*meta",
    ),
    "packed weights": (quantized, TypeError, r"0 is quantized \(Linear\) .*pass the float network it was made from"),
}


@pytest.mark.filterwarnings("ignore:.*([Qq]uantiz|[Ss]parse|TypedStorage)")
@pytest.mark.parametrize("case", BAD)
def test_odd_weights(case):
    make, kind, words = BAD[case]
    with pytest.raises(kind, match=words):
        nm.output_moments(make().eval(), NOISE)


@pytest.mark.parametrize("method", METHODS)
def test_memory_that_entries_share(method):
    """Expanded and overlapping inputs, and expanded weights, are those numbers and nothing else."""
    network = perceptron()
    network[2].weight = nn.Parameter(torch.linspace(-1, 1, 4).expand(2, 4))
    for mean in (torch.ones(1).expand(3), torch.ones(3).expand(2, 3), torch.arange(5.0).as_strided((3, 3), (1, 1))):
        before = mean.clone()
        found = nm.output_moments(network, nm.Gaussian(mean, std=0.1), METHODS[method]())
        copied = nm.output_moments(network, nm.Gaussian(mean.clone(), std=0.1), METHODS[method]())
        torch.testing.assert_close(found.mean, copied.mean)
        torch.testing.assert_close(found.variance, copied.variance)
        assert torch.equal(mean, before)
    matrix = torch.ones(1, 1).expand(3, 3)
    shared = nm.output_moments(network, nm.Gaussian(NOISE.mean, covariance=matrix), METHODS[method]())
    alone = nm.output_moments(network, nm.Gaussian(NOISE.mean, covariance=matrix.clone()), METHODS[method]())
    torch.testing.assert_close(shared.variance, alone.variance)
