"""What the backward passes of the dense covariance and of its products share."""

from __future__ import annotations

from typing import NoReturn

from netmoments.relu.pairs import Tile, TileGradient, Units


class UnitGradients:
    """Derivatives in each unit's mean and variance, summed over the pairs it is part of: (images, units)."""

    def __init__(self, images: int, units: Units) -> None:
        self.by_mean = units.h.new_zeros(images, units.h.shape[1])
        self.by_variance = units.h.new_zeros(images, units.h.shape[1])

    def add_tile(self, slopes: TileGradient, tile: Tile) -> None:
        """A tile of pairs."""
        self.by_mean[:, tile.rows] += slopes.by_row_mean
        self.by_mean[:, tile.columns] += slopes.by_column_mean
        self.by_variance[:, tile.rows] += slopes.by_row_variance
        self.by_variance[:, tile.columns] += slopes.by_column_variance


def refuse_second_derivative() -> NoReturn:
    raise RuntimeError(
        "second derivatives of the exact ReLU covariance are not available: differentiate it once only, "
        "or differentiate an output mean, which has all derivatives"
    )


def refuse_forward_mode() -> NoReturn:
    raise RuntimeError(
        "forward-mode derivatives (torch.func.jvp, jacfwd) of the exact ReLU covariance are not available: "
        "use reverse mode (backward, torch.func.grad, vjp or jacrev)"
    )
