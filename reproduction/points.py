"""Where to linearize: k points for all images instead of one for each (Table 4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from netmoments.affine_relu_affine import AffineReluAffine
from netmoments.linearize.bank import k_means_centres, members_farthest_from, nearest
from netmoments.linearize.two_stage import two_stage
from netmoments.network.weights import read_tensors, write_tensors
from netmoments.sweep.item import Columns
from netmoments.sweep.run import Watch
from reproduction.images import digest_of
from reproduction.over_images import Subjects, rows, same_bits
from reproduction.tightness import core_moments_at

COUNTS = (250, 500, 1000, 2500, 5000)
"""The paper's numbers of points; with one for each image it is Table 2."""
FARTHEST = (250, 500)
TOGETHER = 25
"""Images of a cluster whose moments are computed at once; the largest clusters have a hundred."""
"""Those for which the paper also linearizes at the member of each cluster farthest from its centre."""


@dataclass(frozen=True, eq=False)
class Bank:
    """Points of linearization, one for each cluster."""

    count: int
    farthest: bool
    points: Tensor
    """(count, *event)."""
    cluster: Tensor
    """Of each studied image, (N,)."""


def banks(images: Tensor, labels: Tensor, studied: Tensor, seed: int, cache: Path) -> list[Bank]:
    """The clusters of all `images`, and the cluster of each one studied. The centres are kept in the file `cache`.

    As in the paper: k-means from images taken round-robin over the labels, and two weak baselines.
    """
    made = []
    kept = _centres(images, labels, seed, cache)
    for count in COUNTS:
        centres = kept[str(count)]
        cluster, _ = nearest(studied.flatten(1), centres.flatten(1))
        made.append(Bank(count, False, centres, cluster))
        if count in FARTHEST:
            made.append(Bank(count, True, members_farthest_from(centres, images), cluster))
    return made


def round_robin(labels: Tensor) -> Tensor:
    """All indices: the first image of each label in turn, then the second of each, and so on."""
    turn = torch.zeros_like(labels)
    for label in labels.unique():
        own = labels == label
        turn[own] = torch.arange(int(own.sum()))
    return torch.argsort(turn * (int(labels.max()) + 1) + labels)


def _centres(images: Tensor, labels: Tensor, seed: int, cache: Path) -> dict[str, Tensor]:
    facts = {"images": digest_of(images, labels), "counts": str(COUNTS), "seed": str(seed)}
    if cache.exists():
        tensors, found = read_tensors(cache)
        if found != facts:
            raise ValueError(
                f"{cache} holds the clusters of another run ({found}, wanted {facts}); remove it or give another --out"
            )
        return tensors
    order = round_robin(labels)
    made = {}
    with Watch("clusters", "centres", sum(COUNTS), 0) as watch:
        for count in COUNTS:
            made[str(count)] = k_means_centres(images, count, seed=seed, initial=images[order[:count]])
            watch.advance(count)
    write_tensors(cache, made, facts)
    return made


class Piece(NamedTuple):
    """Some clusters of a bank: their points, and the images that use them."""

    bank: Bank
    points: Tensor
    """Numbers of points of the bank."""
    places: Tensor
    """Images, as places among those studied."""
    point_of: Tensor
    """For each of these images, which of `points` it uses."""


@dataclass(frozen=True, eq=False)
class PointsSweep:
    """Moments of every image by the linearization at its cluster's point, a few clusters at a time.

    Rows: points (k), farthest, and image, sigma, logit, mean, variance, authors_old.
    """

    name: str
    subjects: Subjects
    banks: Sequence[Bank]
    block: int
    """About how many images an item holds."""
    layer: int = -1
    unit: str = "images"

    @property
    def configuration(self) -> dict[str, Any]:
        points = {f"{bank.count}{' farthest' if bank.farthest else ''}": digest_of(bank.points) for bank in self.banks}
        return {**self.subjects.description(), "block": self.block, "layer": self.layer, "points": points}

    @property
    def counts(self) -> Sequence[int]:
        return [len(piece.places) for piece in self._pieces]

    @cached_property
    def _pieces(self) -> list[Piece]:
        return [piece for bank in self.banks for piece in pieces(bank, self.block)]

    def prepare(self, device: str) -> Callable[[int], Columns]:
        subjects = self.subjects.on(device)
        parts = self._pieces

        def work(item: int) -> Columns:
            piece = parts[item]
            points = piece.bank.points[piece.points].to(device)
            with same_bits():
                network = two_stage(subjects.network, points, self.layer)
            parts_of_it = [
                _moments(subjects, network, places, point_of)
                for places, point_of in zip(piece.places.split(TOGETHER), piece.point_of.split(TOGETHER), strict=True)
            ]
            values = {name: torch.cat([part[name] for part in parts_of_it]) for name in parts_of_it[0]}
            found = rows(subjects.numbers[piece.places].tolist(), values)
            count = len(found["image"])
            return {
                "points": np.full(count, piece.bank.count, dtype=np.int32),
                "farthest": np.full(count, piece.bank.farthest),
                **found,
            }

        return work


def _moments(subjects: Subjects, network: AffineReluAffine, places: Tensor, point_of: Tensor) -> dict[str, Tensor]:
    """Of some images, each by the linearization at its point."""
    device = subjects.images.device
    factors = torch.stack([subjects.factor(int(place)) for place in places])
    return core_moments_at(network.entries(point_of.to(device)), subjects.images[places.to(device)], factors)


def pieces(bank: Bank, block: int) -> list[Piece]:
    """The clusters that hold any studied image, whole ones together until they hold at least `block` images."""
    order = torch.argsort(bank.cluster, stable=True)
    sizes = torch.bincount(bank.cluster, minlength=bank.count)
    found, held = [], 0
    group: list[Tensor] = []
    for members in order.split(sizes[sizes > 0].tolist()):
        group.append(members)
        held += len(members)
        if held >= block:
            found.append(_piece(bank, torch.cat(group)))
            group, held = [], 0
    return [*found, _piece(bank, torch.cat(group))] if group else found


def _piece(bank: Bank, places: Tensor) -> Piece:
    points, point_of = bank.cluster[places].unique(return_inverse=True)
    return Piece(bank, points, places, point_of)
