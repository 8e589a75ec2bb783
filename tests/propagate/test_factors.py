"""Factors: which rows stand for what."""

from __future__ import annotations

from torch import Tensor

from netmoments.propagate.factors import FactorLayout
from tests.networks import seeded
from tests.propagate.small import SMALL, image, isotropic, moments


def test_leading_directions_reduce_the_chance_error(monkeypatch):
    """Variances with 32 of 72 directions, some of them those the scores depend on or all at random, against all 72."""
    make, shape = SMALL["residual"]
    network, x = seeded(make), image(*shape)

    def variance() -> Tensor:
        return moments(network, x, isotropic(0.5, x))[1].diagonal()

    leading = variance()
    monkeypatch.setattr("netmoments.propagate.layerwise.layout_for", lambda rank, scores: FactorLayout(rank, 32, 64, 0))
    at_random = variance()
    monkeypatch.undo()
    monkeypatch.setattr("netmoments.propagate.factors.PAIRED", 128)
    every = variance()
    errors = [float((some / every - 1).abs().max()) for some in (leading, at_random)]
    assert errors[0] < 0.01
    assert errors[0] < errors[1] / 3
