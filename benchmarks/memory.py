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
from benchmarks.problems import random_problem

METHODS: dict[str, Callable[[nm.AffineReluAffine, nm.Gaussian], Tensor]] = {
    "exact": lambda network, noise: network.variance(noise),
    "series": lambda network, noise: nm.paper.variance_series(network, noise, terms=5),
    "sampling": lambda network, noise: nm.monte_carlo(network, noise, samples=10_000).variance,
}


def main() -> None:
    method, units, inputs, batch, dtype, *noise = sys.argv[1:]
    torch.set_num_threads(2)
    kind = getattr(torch, dtype)
    METHODS[method](*random_problem(50, 20, 2, kind))  # libraries loaded, thread pools started
    network, gaussian = random_problem(int(units), int(inputs), int(batch), kind, *noise)
    print(json.dumps(extra_mebibytes(lambda: METHODS[method](network, gaussian))))


if __name__ == "__main__":
    main()
