"""Measure the peak memory of one method for the output variance, in a process of its own.

`python -m benchmarks.memory METHOD UNITS INPUTS BATCH DTYPE [NOISE]`, the noise `isotropic` (shared by the batch, the
default), `diagonal` or `dense` (one for each entry).
"""

from __future__ import annotations

import json
import os
import subprocess
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


def in_a_process_of_its_own(*arguments: object) -> float:
    """What this module prints for such arguments, in MiB."""
    command = [sys.executable, "-m", "benchmarks.memory", *map(str, arguments)]
    environment = os.environ | {"MALLOC_TRIM_THRESHOLD_": "131072"}  # memory given back counts as given back
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    method, units, inputs, batch, dtype, *noise = sys.argv[1:]
    torch.set_num_threads(min(2, torch.get_num_threads()))
    kind = getattr(torch, dtype)
    METHODS[method](*random_problem(50, 20, 2, kind))  # libraries loaded, thread pools started
    network, gaussian = random_problem(int(units), int(inputs), int(batch), kind, *noise)
    print(json.dumps(extra_mebibytes(lambda: METHODS[method](network, gaussian))))


if __name__ == "__main__":
    main()
