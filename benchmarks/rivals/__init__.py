"""Published sparse attacks, written from their papers, for comparison only: `RIVALS[name](problem)` gives μ.

Every attack comes as published and again with total variation in its objective. All get the same help: a feasible
start, the best iterate ever seen by ‖μ‖₁ + TV(μ), and a last step back to the boundary (`problem.Best`).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from benchmarks.rivals.ead import ead, ead_tv
from benchmarks.rivals.pdpgd import pdpgd_l1, pdpgd_l1_tv
from benchmarks.rivals.problem import Problem
from benchmarks.rivals.sparse_fool import sparse_fool, sparse_fool_tv
from benchmarks.rivals.str_attack import str_attack, str_attack_tv

RIVALS: dict[str, Callable[[Problem], Tensor]] = {
    "PDPGD": pdpgd_l1,
    "PDPGD + TV": pdpgd_l1_tv,
    "EAD": ead,
    "EAD + TV": ead_tv,
    "StrAttack": str_attack,
    "StrAttack + TV": str_attack_tv,
    "SparseFool": sparse_fool,
    "SparseFool + TV": sparse_fool_tv,
}

__all__ = [
    "RIVALS",
    "Problem",
    "ead",
    "ead_tv",
    "pdpgd_l1",
    "pdpgd_l1_tv",
    "sparse_fool",
    "sparse_fool_tv",
    "str_attack",
    "str_attack_tv",
]
