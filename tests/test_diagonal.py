"""Propagation of variances with correlations dropped, against squared Jacobians and exact cases."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.baselines import diagonal
from netmoments.covariances import Diagonal
from netmoments.network.graph import traced_graph
from netmoments.normal import density, distribution
from netmoments.propagate.plan import Plan, planned
from tests.closeness import assert_close


def plan_of(network: nn.Module, image: Tensor) -> Plan:
    return planned(traced_graph(network, image, "test"), network, image, "test")


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x).flatten(1)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


KERNEL, BACK, MATRIX, SQUARE = normal(3, 2, 3, 3), normal(2, 3, 3, 3), normal(4, 72), normal(6, 6)
PLANES = normal(4, 6, 6)
TWO, SPREAD, THREE, FOUR, SIX = normal(2), normal(2, seed=1).exp(), normal(3), normal(4), normal(6)

OPERATIONS = {
    "convolution": lambda x: functional.conv2d(x, KERNEL, THREE, stride=2, padding=1),
    "transposed convolution": lambda x: functional.conv_transpose2d(x, BACK),
    "linear": lambda x: functional.linear(x.flatten(1), MATRIX, FOUR),
    "matmul": lambda x: x @ SQUARE[:, :5],
    "from the left": lambda x: (SQUARE[:5] @ x.squeeze(0)[0]).unsqueeze(0),
    "batch norm": lambda x: functional.batch_norm(x, TWO, SPREAD, TWO + 1, FOUR[:2]),
    "factors": lambda x: x * SIX / 3,
    "broadcast": lambda x: x[:, :1] * PLANES,
    "negative": lambda x: -x,
    "sum of two": lambda x: torch.add(x[:, :1], x[:, 1:], alpha=0.3),
    "difference": lambda x: 1 - x[:, :1] - 2 * x[:, 1:],
    "mean": lambda x: x.mean((2, 3)),
    "mean of all": lambda x: x.mean(3, keepdim=True),
    "sum": lambda x: x.sum(1),
    "average pool": lambda x: functional.avg_pool2d(x, 3, 2, padding=1),
    "average pool, oblong": lambda x: functional.avg_pool2d(x, (2, 3), divisor_override=5),
    "average pool of lines": lambda x: functional.avg_pool1d(x[:, :, 0], 2),
    "adaptive, even": lambda x: functional.adaptive_avg_pool2d(x, 3),
    "adaptive, uneven": lambda x: functional.adaptive_avg_pool2d(x, (4, 5)),
    "concatenated": lambda x: torch.cat([x[:, 1:], x.flip(-1)], 1),
    "padded": lambda x: functional.pad(x, (1, 0, 2, 1), value=3.0),
    "reflected": lambda x: functional.pad(x, (1, 1, 2, 2), mode="reflect"),
    "moved": lambda x: x.permute(0, 2, 3, 1).reshape(1, 12, -1).transpose(1, 2),
    "split": lambda x: torch.stack(x.split(1, 1), 2).roll(1, -1),
    "running sum": lambda x: x.cumsum(2),
    "upsampled": lambda x: functional.interpolate(x, scale_factor=2, mode="nearest"),
    "shuffled": lambda x: functional.pixel_unshuffle(x, 2),
    "chosen": lambda x: x[:, :, [0, 2, 5]].tril(),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_variances_of_affine_operations_by_the_squared_jacobian(name):
    # each function uses an input at most once an output before it is summed, so that its steps are independent
    image = normal(1, 2, 6, 6, seed=3)
    network = Function(OPERATIONS[name]).eval()
    variance = normal(72, seed=4).square()
    jacobian = torch.func.jacrev(lambda x: network(x).flatten())(image).reshape(-1, 72)
    rows = torch.arange(len(jacobian))
    mean, found = diagonal(plan_of(network, image), image, Diagonal(variance), rows)
    assert_close(mean, network(image).flatten(), atol=1e-12)
    assert_close(found, jacobian.square() @ variance, rtol=1e-12, atol=1e-14)


def test_exact_for_units_that_share_nothing():
    scale, image, variance = normal(5), normal(1, 5, seed=1), normal(5, seed=2).square()

    def one(x: Tensor) -> Tensor:
        return torch.relu(x * scale) @ torch.ones(5, 1, dtype=x.dtype)

    mean, found = diagonal(plan_of(Function(one).eval(), image), image, Diagonal(variance), torch.arange(1))
    m, s = (scale * image).squeeze(0), scale.abs() * variance.sqrt()
    h = m / s
    first = m * distribution(h) + s * density(h)
    second = (m.square() + s.square()) * distribution(h) + m * s * density(h)
    assert_close(mean, first.sum().reshape(1), rtol=1e-12)
    assert_close(found, (second - first.square()).sum().reshape(1), rtol=1e-10)


def test_an_operator_outside_the_table_is_an_error():
    network = Function(lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear")).eval()
    image = normal(1, 2, 6, 6)
    variance = torch.ones(72, dtype=torch.float64)
    with pytest.raises(ValueError, match="no rule for the variances of upsample_bilinear2d"):
        diagonal(plan_of(network, image), image, Diagonal(variance), torch.arange(2))
    uneven = Function(lambda x: functional.avg_pool2d(x, 3, 2, ceil_mode=True)).eval()
    with pytest.raises(ValueError, match="same divisor"):
        diagonal(plan_of(uneven, image), image, Diagonal(variance), torch.arange(2))
