"""Compare our sparse and smooth noise with published sparse attacks, on the same expected logits of LeNet on MNIST.

`python -m benchmarks.rival_attacks [cpu|cuda] [DATA_DIR] [IMAGES]`: the mean of ‖μ‖₁ + TV(μ) in grey levels over images
that no setting of a rival was tuned on, γ = 0, within the bounds, all feasible by the same test.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.measure import machine
from benchmarks.rivals import RIVALS, Problem
from netmoments import data
from netmoments.attacks.expected_logits import ExpectedLogits
from netmoments.attacks.sparse_smooth import SparseSmooth
from netmoments.network import zoo

GREY = 1 / 255
FIRST = 1000
"""Number of the first image that is compared; the rivals' settings were chosen on images before it."""


def timed(work: Callable[[], Tensor], device: torch.device) -> tuple[Tensor, float]:
    start = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, time.perf_counter() - start


def main(device: torch.device, data_dir: str | None, count: int) -> None:
    where = f"{torch.cuda.get_device_name(device)}, " if device.type == "cuda" else ""
    print(f"{where}{machine()}")
    network = zoo.pretrained("lenet").float().to(device)
    chosen = data.load("mnist", data_dir=data_dir).take(slice(FIRST, FIRST + count))
    images = chosen.images.to(device)
    assert chosen.labels is not None
    right = network(images).argmax(1) == chosen.labels.to(device)
    images, labels = images[right], chosen.labels.to(device)[right]
    expected = ExpectedLogits(network, GREY, at=images)
    gamma = torch.zeros(len(images), device=device)
    problem = Problem(lambda mu: expected(images, mu), labels, -images, 1 - images, gamma)
    attack = SparseSmooth(gamma=0.0, polish=0)
    attack(network, images[:2], labels[:2])  # start-up
    ours, taken = timed(lambda: attack(network, images, labels).mu, device)
    cost = problem.objective(ours)
    print(f"{len(images)} images of MNIST from {FIRST} on; ‖μ‖₁ + TV in grey levels")
    _show("netmoments", problem, ours, cost, taken)
    for name, rival in RIVALS.items():
        theirs, taken = timed(lambda rival=rival: rival(problem), device)  # type: ignore[misc]
        _show(name, problem, theirs, cost, taken)


def _show(name: str, problem: Problem, mu: Tensor, ours: Tensor, taken: float) -> None:
    cost = problem.objective(mu)
    margin = problem.margin(mu).detach()
    sparsity = (mu.abs() <= 1e-3 * GREY).float().mean()
    print(
        f"{name:16} {255 * float(cost.mean()):9.1f}  {float((cost / ours).mean()):7.4f} × ours, ours lower for "
        f"{float((ours < cost * (1 - 1e-4)).float().mean()):4.0%}, equal to 1e-4 for "
        f"{float(((ours / cost - 1).abs() <= 1e-4).float().mean()):4.0%}; feasible (to 1e-4) "
        f"{int((margin <= 1e-4).sum())}, sparsity {float(sparsity):.3f}, {taken:.1f} s",
        flush=True,
    )


if __name__ == "__main__":
    place = sys.argv[1] if len(sys.argv) > 1 else "cuda" if torch.cuda.is_available() else "cpu"
    folder = sys.argv[2] if len(sys.argv) > 2 else None
    main(torch.device(place), folder, int(sys.argv[3]) if len(sys.argv) > 3 else 64)
