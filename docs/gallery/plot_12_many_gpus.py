"""
A dataset on many GPUs, with Ray
================================

Work over a dataset is a *sweep*: numbered items that can be computed anywhere and in any order. An engine says where:
in this process, in one process for each GPU, or on a Ray cluster. Finished items are kept, so that the same call
continues after an interruption, and the result is the same wherever it was computed.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import netmoments as nm
from netmoments.sweep import LocalEngine, run_sweep


@dataclass(frozen=True)
class Spread:
    """The deviation of the winning score of every image, in items of 16 images."""

    images: int
    sigma: float
    name: str = "spread"
    unit: str = "images"

    @property
    def configuration(self) -> dict[str, object]:
        return {"images": self.images, "sigma": self.sigma, "network": "digits"}

    @property
    def counts(self) -> list[int]:
        return [min(16, self.images - first) for first in range(0, self.images, 16)]

    def prepare(self, device: str):  # called once in each process
        network, images = nm.zoo.pretrained("digits").to(device), nm.data.load("digits").images.to(device)

        def compute(item: int) -> dict[str, np.ndarray]:
            part = images[: self.images].split(16)[item]
            moments = nm.output_moments(network, nm.Gaussian(part, std=self.sigma), nm.Sketch(), outputs=1, check=0)
            return {"score": moments.mean[:, 0].cpu().numpy(), "std": moments.variance[:, 0].sqrt().cpu().numpy()}

        return compute


# %%
# On this machine, in this process:

with tempfile.TemporaryDirectory() as folder:
    found = run_sweep(Spread(images=64, sigma=0.1), Path(folder), LocalEngine(["cpu"]))
print({name: column.shape for name, column in found.columns.items()})

# %%
# On all GPUs of a machine, or on a Ray cluster, it is the same line with another engine:
#
# .. code-block:: python
#
#     run_sweep(sweep, folder, LocalEngine(["cuda:0", "cuda:1", "cuda:2", "cuda:3"]))
#
#     from netmoments.sweep import RayEngine
#     run_sweep(sweep, folder, RayEngine("cuda"))                                  # starts Ray for this run
#     run_sweep(sweep, folder, RayEngine("cuda", address="ray-head:6379"))         # uses a running cluster
#
# Reports can use it too: ``netmoments report MODEL DATA --engine ray``. Here is what was computed:

figure, panel = plt.subplots()
panel.scatter(found.columns["score"], found.columns["std"], s=14)
panel.set(xlabel="winning score", ylabel="its deviation under σ = 0.1")
plt.show()
