"""Representative points of a set of images."""

from __future__ import annotations

import torch
from torch import Tensor

from netmoments.checks import describe, require_finite, require_float_tensor


def k_means_centres(images: Tensor, count: int, *, seed: int = 0, initial: Tensor | None = None) -> Tensor:
    """The centres, (count, *event), of `count` clusters of the images (N, *event), by scikit-learn's k-means.

    `initial` (count, *event) are the centres to start from; by default k-means++ chooses them.
    """
    try:
        from sklearn.cluster import KMeans
    except ImportError:
        raise ImportError('k-means needs scikit-learn: pip install "netmoments[data]"') from None
    images = _require_images("k_means_centres", images, count)
    start = "k-means++" if initial is None else initial.reshape(count, -1).cpu().double().numpy()
    clusters = KMeans(count, init=start, n_init=1, random_state=seed % 2**32)
    clusters.fit(images.flatten(1).cpu().double().numpy())
    return torch.from_numpy(clusters.cluster_centers_).to(images).reshape(count, *images.shape[1:])


def members_farthest_from(centres: Tensor, images: Tensor) -> Tensor:
    """Of each centre's cluster (the images nearest to it) the member farthest away; of an empty one, the centre."""
    images = _require_images("members_farthest_from", images, 1)
    cluster, own = nearest(images.flatten(1), centres.flatten(1))
    farthest = centres.clone()
    for number in cluster.unique().tolist():
        members = (cluster == number).nonzero().squeeze(1)
        farthest[number] = images[members[own[members].argmax()]]
    return farthest


def nearest(inputs: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """For inputs (N, n): the number of the nearest of the points (k, n), and its distance, in float64.

    The nearest by |x|² − 2x·p + |p|², then its exact distance; 4096 inputs at a time.
    """
    points = points.double()
    squares = points.square().sum(1)
    found = []
    for part in inputs.double().split(4096):
        index = (squares - 2 * part @ points.T).argmin(1)
        found.append((index, (part - points[index]).norm(dim=1)))
    index, distance = (torch.cat(parts) for parts in zip(*found, strict=True))
    return index, distance


def _require_images(caller: str, images: Tensor, count: int) -> Tensor:
    require_float_tensor(caller, "images", images)
    require_finite(caller, "images", images)
    if images.dim() < 2:
        raise ValueError(f"{caller}: images must be (N, ...), got {describe(images)}")
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= len(images):
        raise ValueError(f"{caller}: count must be from 1 to the number of images, {len(images)}, got {count!r}")
    return images.detach()
