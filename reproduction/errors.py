"""The paper's measure of tightness, averaged as its tables average it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from netmoments.sampling.monte_carlo import relative_difference


@dataclass(frozen=True, eq=False)
class Errors:
    """Absolute relative differences 2|x−y|/(|x|+|y|) of one quantity: (images, noise levels, logits)."""

    each: np.ndarray
    finite: np.ndarray
    """Where the computed value was a number; elsewhere the error counts as the largest possible, 2."""

    @classmethod
    def between(cls, computed: np.ndarray, sampled: np.ndarray) -> Errors:
        """The sampled values must all be there."""
        if not np.isfinite(sampled).all():
            raise ValueError(f"{int((~np.isfinite(sampled)).sum())} sampled values are missing or not finite")
        finite = np.isfinite(computed)
        filled = np.where(finite, computed, sampled)
        error = relative_difference(torch.from_numpy(filled), torch.from_numpy(sampled)).numpy()
        return cls(np.where(finite, error, 2.0), finite)

    def beyond(self, level: int) -> int:
        """How many computed values at a noise level were NaN or infinite."""
        return int((~self.finite[:, level]).sum())

    @property
    def images(self) -> int:
        return len(self.each)

    def mean(self, level: int, logit: int) -> float:
        return float(self.each[:, level, logit].mean())

    def spread(self, level: int, logit: int) -> float:
        """Standard deviation over images."""
        return float(self.each[:, level, logit].std(ddof=1))

    def average(self, level: int) -> float:
        """The mean over images and logits: the paper's average row."""
        return float(self.each[:, level].mean())

    def average_spread(self, level: int) -> float:
        """The paper's average row gives the mean over logits of the standard deviations over images."""
        return float(self.each[:, level].std(axis=0, ddof=1).mean())

    def standard_error(self, level: int) -> float:
        """Of `average`, from the images."""
        return float(self.each[:, level].mean(axis=1).std(ddof=1) / self.images**0.5)

    def resolution(self, level: int) -> float:
        """For the differences of two runs of a sampling: the error that exact values would show against one of them.

        Two runs differ by √2 times as much as either differs from the truth.
        """
        return self.average(level) / 2**0.5
