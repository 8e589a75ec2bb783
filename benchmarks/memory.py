"""Peak memory of one way to the output variance.

`python -m benchmarks.memory METHOD UNITS INPUTS BATCH DTYPE [NOISE]`, the noise `isotropic` (shared by the batch, the
default), `diagonal` or `dense` (one for each entry).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
from torch import Tensor

import netmoments as nm
from benchmarks.measure import extra_mebibytes
from netmoments.covariances import Covariance
from reproduction.engine import random_network

OUTPUTS = 10
METHODS: dict[str, Callable[[nm.AffineReluAffine, nm.Gaussian], Tensor]] = {
    "exact": lambda network, noise: network.variance(noise),
    "series": lambda network, noise: nm.paper.variance_series(network, noise, terms=5),
    "sampling": lambda network, noise: nm.monte_carlo(network, noise, samples=10_000).variance,
}


def problem(
    units: int, inputs: int, batch: int, dtype: torch.dtype, noise: str = "isotropic"
) -> tuple[nm.AffineReluAffine, nm.Gaussian]:
    """A random network with every unit active, and noise about `batch` points."""
    network = random_network(inputs, units, OUTPUTS, seed=0, dtype=dtype)
    mean = torch.randn(batch, inputs, dtype=dtype, generator=torch.Generator().manual_seed(1))
    variances = torch.ones(batch, inputs, dtype=dtype)
    covariances: dict[str, Callable[[], float | Covariance]] = {
        "isotropic": lambda: 1.0,
        "diagonal": lambda: nm.Diagonal(variances),
        "dense": lambda: nm.Dense(torch.diag_embed(variances)),
    }
    return network, nm.Gaussian(mean, covariances[noise]())


def main() -> None:
    method, units, inputs, batch, dtype, *noise = sys.argv[1:]
    torch.set_num_threads(2)
    kind = getattr(torch, dtype)
    METHODS[method](*problem(50, 20, 2, kind))  # libraries loaded, thread pools started
    network, gaussian = problem(int(units), int(inputs), int(batch), kind, *noise)
    print(json.dumps(extra_mebibytes(lambda: METHODS[method](network, gaussian))))


if __name__ == "__main__":
    main()
