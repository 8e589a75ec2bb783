"""Margins of the expected scores of a group of images, and their spread, from one linearization."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from netmoments.affine_relu_affine import AffineReluAffine
from netmoments.attacks.margins import Contest
from netmoments.attacks.subjects import Subjects
from netmoments.attacks.surrogate import ExpectedMargins, Surrogate
from netmoments.gaussian import Gaussian


@dataclass(frozen=True, eq=False)
class Formula:
    """The expected scores of a group of images.

    `followed` (N, F) are the classes that the linearized networks have; `free` (N, m) the coordinates that shifts are
    about, all if None.
    """

    linearized: AffineReluAffine
    subjects: Subjects
    followed: Tensor
    free: Tensor | None = None

    def margins(self, contest: Contest) -> ExpectedMargins:
        larger, smaller = (places_of(classes, self.followed) for classes in contest)
        return ExpectedMargins.between(self._surrogate, larger, smaller)

    @cached_property
    def _surrogate(self) -> Surrogate:
        return Surrogate.of(self.linearized, self.subjects.images, self.free)

    def spread(self, contest: Contest, sigma: Tensor, shift: Tensor) -> Tensor:
        """Standard deviations of the margins (N, R, K) under N(M + μ, σ²I) for shifts (N, R, n) of all coordinates."""
        margins = self.margins(contest)
        columns = []
        for problem in range(shift.shape[1]):
            around = None if margins.around is None else margins.around[:, problem]
            net = AffineReluAffine(
                self.linearized.A, self.linearized.c1, margins.weights[:, problem], margins.offset[:, problem], around
            )
            noise = Gaussian(self.subjects.images.flatten(1) + shift[:, problem], std=sigma.unsqueeze(1))
            columns.append(net.variance(noise).sqrt())
        return torch.stack(columns, 1)


def places_of(classes: Tensor, followed: Tensor) -> Tensor:
    """Where classes (N, R, K) are among the followed ones (N, F)."""
    found = classes.unsqueeze(-1) == followed[:, None, None, :]
    return found.to(torch.int64).argmax(-1)
