"""AlexNet's layout at ImageNet's size, with random weights, end to end in a process of its own: it fits into 16 GB."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import netmoments as nm
from netmoments.network.weights import write_tensors

ROOT = Path(__file__).parents[2]
MEMORY = 16 * 2**30
MOMENTS = """
import sys, torch, netmoments as nm
network = nm.zoo.pretrained("alexnet", sys.argv[1])
image = torch.rand(3, 224, 224, generator=torch.Generator().manual_seed(0))
found = nm.output_moments(network, nm.Gaussian(image, std=1 / 255), nm.TwoStage(layer=6), outputs=range(5))
assert found.mean.dtype == torch.float32 and bool(torch.isfinite(found.mean).all()), found.mean
assert bool((found.variance > 0).all()), found.variance
"""


@pytest.mark.slow
def test_alexnet_by_two_stages_the_attack_on_few_pixels_and_the_report(tmp_path):
    torch.manual_seed(0)
    weights, pictures = tmp_path / "alexnet.safetensors", tmp_path / "pictures.npz"
    write_tensors(weights, nm.zoo.entry("alexnet").network().state_dict(), {})
    pixels = np.random.default_rng(0).integers(0, 256, (1, 224, 224, 3), dtype=np.uint8)
    np.savez(pictures, images=pixels)
    report = tmp_path / "report"
    attack = [
        "-m", "netmoments", "attack", "alexnet", pictures, "--weights", weights, "--kind", "pixels", "--percent", "2",
        "--layer", "6", "--iterations", "30", "--polish", "5", "--samples", "10", "--device", "cpu", "--out", report,
    ]  # fmt: skip
    for arguments in (["-c", MOMENTS, weights], attack):
        command = [sys.executable, *map(str, arguments)]
        result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ})
        assert result.returncode == 0, result.stderr
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    assert peak < MEMORY, f"{peak / 2**30:.1f} GB"
    record = json.loads((report / "attack.json").read_text())
    assert len(record["images"]) == 1
    assert (report / "attack.html").stat().st_size > 10_000
