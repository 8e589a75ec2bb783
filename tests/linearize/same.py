"""Compare two linearizations."""

from __future__ import annotations

import netmoments as nm
from tests.closeness import assert_close

PARTS = ("A", "c1", "B", "c2", "D")


def assert_same_network(g: nm.AffineReluAffine, h: nm.AffineReluAffine, *, atol: float = 1e-13, what: str = "") -> None:
    assert (g.D is None) == (h.D is None), what
    for part in PARTS if g.D is not None else PARTS[:4]:
        assert_close(getattr(g, part), getattr(h, part), atol=atol, what=f"{what} {part}")
