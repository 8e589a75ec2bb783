"""The sweep of Figure 5: natural images, each with noise on a few random pixels; an item is an image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from netmoments.attacks.box import PixelSupport
from netmoments.sampling.evaluation import random_seed
from netmoments.sweep.item import Columns
from reproduction.attack_rows import GREY_LEVELS, answers_of, asked_again
from reproduction.over_images import BlocksOfImages, Subjects, same_bits

NAME = "few-pixels"
PERCENT = 2
BETA = 75
"""Grey levels."""
ITERATIONS, POLISH = 200, 100


@dataclass(frozen=True, eq=False)
class FewPixelsSweep(BlocksOfImages):
    """A row for each value that may change, with what is known of the image repeated in every row of it."""

    samples: int
    layer: int | str = -1

    @property
    def configuration(self) -> Mapping[str, Any]:
        return {
            **{key: value for key, value in self.subjects.description().items() if key != "sigmas"},
            "block": self.block,
            "samples": self.samples,
            "layer": self.layer,
            "percent": PERCENT,
            "beta": BETA,
            "iterations": ITERATIONS,
            "polish": POLISH,
        }

    def rows_of(self, subjects: Subjects, places: range) -> Columns:
        with same_bits():
            parts = [self._image(subjects, place) for place in places]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _image(self, subjects: Subjects, place: int) -> dict[str, np.ndarray]:
        number = int(subjects.numbers[place])
        image = subjects.images[place : place + 1]
        label = answers_of(subjects.network, image)
        seed = random_seed(subjects.seed, NAME, number) % 2**31
        attack = PixelSupport(
            percent=PERCENT, beta=BETA / GREY_LEVELS, layer=self.layer, samples=self.samples, seed=seed,
            iterations=ITERATIONS, polish=POLISH,
        )  # fmt: skip
        result = attack(subjects.network, image, label)
        found = asked_again(subjects.network, result, seed, self.samples)
        mu = result.mu[0].flatten()
        changed = (mu.abs() > 0).nonzero().flatten()
        if not len(changed):
            changed = torch.zeros(1, dtype=torch.int64, device=mu.device)
        (record,) = found.records()
        rows = len(changed)
        summary = {
            name: np.full(rows, np.nan if record[name] is None else record[name]) for name in SUMMARY if name in record
        }
        return {
            "image": np.full(rows, number),
            "pixel": changed.cpu().numpy(),
            "mu": mu[changed].cpu().numpy(),
            **summary,
        }


SUMMARY = (
    "label", "towards", "answer", "sigma", "margin", "network_margin", "success_10", "success_samples",
    "success_samples_clipped", "sparsity", "l1", "tv", "linf", "ssim", "gap", "feasible", "fooled", "polished",
)  # fmt: skip
"""What is kept of an image, as in `Attacked.records`."""
