"""Banks: linearizations made once at representative points, the nearest of which answers for a new input.

The points are a user's own, the centres of k-means clusters of images, or, as in the paper's baseline, the member of
each cluster that is farthest from its centre.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from netmoments.affine_relu_affine import AffineReluAffine
from netmoments.checks import describe, require_finite, require_float_tensor, require_float_tensors, require_seed
from netmoments.linearize.two_stage import CALLER, linearized_at, output_indices, points_of
from netmoments.network.model import NetworkModel
from netmoments.network.weights import read_tensors, write_tensors


def k_means_centres(images: Tensor, count: int, *, seed: int = 0, initial: Tensor | None = None) -> Tensor:
    """The centres, (count, *event), of clusters of the images (N, *event), found by scikit-learn's k-means.

    It starts from the centres `initial`, (count, *event), or from those that k-means++ chooses.
    """
    images = _require_images("k_means_centres", images, count)
    seed = require_seed("k_means_centres", seed)
    start = "k-means++" if initial is None else initial.reshape(count, -1).cpu().double().numpy()
    with _random_state_kept():
        try:
            from sklearn.cluster import KMeans
        except ImportError:
            raise ImportError('k-means needs scikit-learn: pip install "netmoments[data]"') from None
        clusters = KMeans(count, init=start, n_init=1, random_state=seed % 2**32)
        clusters.fit(images.flatten(1).cpu().double().numpy())
    return torch.from_numpy(clusters.cluster_centers_).to(images).reshape(count, *images.shape[1:])


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """A block that leaves Python's and NumPy's random states as they were; even importing scikit-learn changes one."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def members_farthest_from(centres: Tensor, images: Tensor) -> Tensor:
    """For each centre, the farthest member of its cluster, which are the images nearest to it; if empty, the centre."""
    images = _require_images("members_farthest_from", images, 1)
    cluster, distance = nearest(images.flatten(1), centres.flatten(1))
    farthest = centres.clone()
    for number in cluster.unique().tolist():
        members = (cluster == number).nonzero().squeeze(1)
        farthest[number] = images[members[distance[members].argmax()]]
    return farthest


def nearest(inputs: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """For inputs (N, n): the number of the nearest of the points (k, n), and its distance, in float64.

    The nearest point is found by |x|² − 2x·p + |p|², and its distance then computed directly; 4096 inputs at a time.
    """
    points = points.double()
    squares = points.square().sum(1)
    results = []
    for part in inputs.double().split(4096):
        index = (squares - 2 * part @ points.T).argmin(1)
        results.append((index, (part - points[index]).norm(dim=1)))
    index, distance = (torch.cat(parts) for parts in zip(*results, strict=True))
    return index, distance


def _require_images(caller: str, images: Tensor, count: int) -> Tensor:
    require_float_tensor(caller, "images", images)
    require_finite(caller, "images", images)
    if images.dim() < 2:
        raise ValueError(f"{caller}: images must be (N, ...), got {describe(images)}")
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= len(images):
        raise ValueError(f"{caller}: count must be from 1 to the number of images, {len(images)}, got {count!r}")
    return images.detach()


FORMAT = "netmoments linearization bank 1"
"""What a bank's file says it is."""


@dataclass(frozen=True, eq=False)
class LinearizationBank:
    """Two-stage linearizations of one network at k points, (k, *event).

    Make a bank with `at` (points of your own), `k_means` (centres of clusters of images) or `farthest` (the member of
    each cluster farthest from its centre: the paper's baseline), and keep it with `save` and `load`. `TwoStage(bank=…)`
    answers from the nearest point, and the result's `distance` is how much longer that makes the Taylor step.

    >>> network = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)).eval()
    >>> bank = LinearizationBank.at(network, torch.eye(2))
    >>> number, distance = bank.nearest(torch.tensor([[1.0, 0.5]]))
    >>> number, distance
    (tensor([0]), tensor([0.5000], dtype=torch.float64))
    """

    points: Tensor
    networks: AffineReluAffine
    """The linearizations, with one batch dimension for the points."""
    relu: str
    """The name of the ReLU that was kept."""

    def __post_init__(self) -> None:
        require_float_tensors("LinearizationBank", points=self.points, A=self.networks.A)
        if self.networks.batch_shape != self.points.shape[:1]:
            raise ValueError(
                f"LinearizationBank: one linearization for each of the {len(self.points)} points is needed, got a "
                f"batch of {tuple(self.networks.batch_shape)}"
            )

    def __len__(self) -> int:
        return len(self.points)

    @classmethod
    def at(
        cls, network: Any, points: Tensor, layer: int | str = -1, *, memory_budget: int | None = None
    ) -> LinearizationBank:
        """Linearizations at your own points, (k, *event)."""
        points = require_float_tensor("LinearizationBank.at", "points", points).detach()
        if points.dim() < 2:
            raise ValueError(f"LinearizationBank.at: points must be (k, ...), got {describe(points)}")
        flat, _ = points_of(CALLER, points, points.dim() - 1)
        model = NetworkModel.of(network, flat, CALLER)
        model.memory_budget = memory_budget
        every = output_indices(None, len(flat), model.outputs, CALLER)
        return cls(flat, linearized_at(model, flat, layer, every), model.relu(layer).name)

    @classmethod
    def k_means(
        cls,
        network: Any,
        images: Tensor,
        count: int,
        layer: int | str = -1,
        *,
        seed: int = 0,
        memory_budget: int | None = None,
    ) -> LinearizationBank:
        """Linearizations at the centres of `count` clusters of the images, (N, *event)."""
        return cls.at(network, k_means_centres(images, count, seed=seed), layer, memory_budget=memory_budget)

    @classmethod
    def farthest(
        cls,
        network: Any,
        images: Tensor,
        count: int,
        layer: int | str = -1,
        *,
        seed: int = 0,
        memory_budget: int | None = None,
    ) -> LinearizationBank:
        """The paper's baseline: at the member of each cluster that is farthest from its centre."""
        centres = k_means_centres(images, count, seed=seed)
        return cls.at(network, members_farthest_from(centres, images), layer, memory_budget=memory_budget)

    def nearest(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """For inputs (..., *event): the number of the nearest point, and its Euclidean distance, both (...)."""
        _, inputs = require_float_tensors("LinearizationBank.nearest", points=self.points, inputs=inputs)
        event = self.points.shape[1:]
        if inputs.shape[max(0, inputs.dim() - len(event)) :] != event:
            raise ValueError(
                f"LinearizationBank.nearest: inputs must have shape (..., {', '.join(map(str, event))}), "
                f"got {describe(inputs)}"
            )
        batch = inputs.shape[: inputs.dim() - len(event)]
        flat = inputs.detach().reshape(-1, event.numel())
        index, distance = nearest(flat, self.points.flatten(1))
        return index.reshape(batch), distance.reshape(batch)

    def member(self, number: int) -> AffineReluAffine:
        """The linearization at one point."""
        return self.networks.entries(number)

    def to(self, *args: Any, **kwargs: Any) -> LinearizationBank:
        """Convert to another dtype or device, as `Tensor.to` does."""
        return LinearizationBank(self.points.to(*args, **kwargs), self.networks.to(*args, **kwargs), self.relu)

    def save(self, path: str | Path) -> None:
        """Write the bank to a safetensors file, whole or not at all."""
        g = self.networks
        tensors = {"points": self.points, "A": g.A, "c1": g.c1, "B": g.B, "c2": g.c2}
        if g.D is not None:
            tensors["D"] = g.D
        write_tensors(path, tensors, {"format": FORMAT, "relu": json.dumps(self.relu)})

    @classmethod
    def load(cls, path: str | Path) -> LinearizationBank:
        """Read a bank that `save` wrote."""
        tensors, facts = read_tensors(path)
        if facts.get("format") != FORMAT:
            raise ValueError(f"{path} is not a linearization bank (format {facts.get('format')!r}, wanted {FORMAT!r})")
        networks = AffineReluAffine(tensors["A"], tensors["c1"], tensors["B"], tensors["c2"], tensors.get("D"))
        return cls(tensors["points"], networks, json.loads(facts["relu"]))
