"""Third and fourth cumulants of all live tensors in factored form, which `squares` carries beside the covariance.

Cumulants come from the bent units of earlier layers. Such a unit (or a direction of its window) is a *centre*, a. With
y = f(z) its output and u = (z − m)/s its standardized input, it has four rows, a number for every live number each:

    e    the response to y;
    v    the covariance with u;
    b    half the unit's bend E[f He₂(u)], times v;
    x    what is known of κ(y, y, ·) beyond these.

Third cumulants are κ_ijk = Σₐ P(e, v, b) + ½P(e, e, x), where P sums over the six orders of i, j, k: trees with the
unit in the middle, and the unit with itself. To leading order in the correlations between units that is all there is
(McCullagh, "Tensor Methods in Statistics", 1987, chapter 7). Affine parts act on the rows as on inputs, gains multiply
them, and only κ_iii and κ_iij are ever formed, by a few products of matrices.

Fourth cumulants κ_iiii and κ_iijj follow from the same rows, with a few numbers more for centres and pairs of them:
from single units, from pairs with correlated inputs, in one layer or in two, and from pairs whose variances move
together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class OwnCumulants(NamedTuple):
    """Numbers of single centres, (N, A) each; c₂, c₃, c₄ are the cumulants of y, and a prime is a derivative in u."""

    third_bend: Tensor
    """E[f He₃(u)]."""
    variance_bend: Tensor
    """c₂″."""
    skew_slope: Tensor
    """c₃′."""
    fourth: Tensor
    """c₄."""


class FourthOrder(NamedTuple):
    """What fourth cumulants need to know of A centres beside their rows."""

    own: OwnCumulants
    between: Tensor
    """Correlations Ω of the centres' inputs, (N, A, A), 0 on the diagonal."""
    variances: Tensor
    """V = κ(y, y, y', y') of two centres beyond what their rows give, (N, A, A), 0 on the diagonal."""
    responses: Tensor
    """How much a centre's standardized input responds to an earlier centre, E (N, A, A), 0 elsewhere."""


class FourthCumulants(NamedTuple):
    """Fourth cumulants of n numbers."""

    own: Tensor
    """κ_iiii, (N, n)."""
    pairs: Tensor
    """κ_iijj, (N, n, n); the diagonal means nothing."""
    by_one: Tensor
    """The part of κ_iijj that comes from single centres, (N, n, n)."""
    with_centres: Tensor
    """How the variances of numbers and of centres move together beyond the rows, (N, n, A)."""


class Cumulants(NamedTuple):
    """Third cumulants of P numbers as rows of centres, and what fourth cumulants need if they are kept."""

    rows: Tensor
    """e, v, b and x of A centres, for each of the P numbers: (N, 4, A, P)."""
    fourth: FourthOrder | None

    @classmethod
    def none(cls, like: Tensor, *, fourth: bool) -> Cumulants:
        """The cumulants of Gaussian numbers (N, P): no centres."""
        rows = like.new_zeros(len(like), 4, 0, like.shape[-1])
        square, each = like.new_zeros(len(like), 0, 0), like.new_zeros(len(like), 0)
        further = FourthOrder(OwnCumulants(each, each, each, each), square, square, square) if fourth else None
        return cls(rows, further)

    def through(self, linear: Callable[[Tensor], Tensor]) -> Cumulants:
        """The cumulants after a linear map of the numbers, which acts on rows (N, ..., P)."""
        return self._replace(rows=linear(self.rows))

    def kappa_iij(self, n: int) -> Tensor:
        """κ_iij for i among the first n numbers and all P numbers j: (N, n, P)."""
        e, v, b, x = self.rows[..., :n].unbind(1)
        return self._times_rows([2 * e * v, 2 * e * b, 2 * torch.addcmul(v * b, e, x), e * e])

    def of_windows(self, along: list[Tensor], bend: Tensor) -> tuple[Tensor, Tensor]:
        """Third cumulants of windows along q directions t of each, from the four rows along these, (N, n, q, A) each.

        They are κ of every window's directions, (N, n, q, q, q), and Σ bendₖₗ κ(tₖ, tₗ, ·) with all P numbers, (N, n,
        P), for symmetric bends (N, n, q, q).
        """
        e, v, b, x = along
        bent_e, bent_v = bend @ e, bend @ v
        left = [2 * bent_e * v, 2 * bent_e * b, 2 * (bent_v * b + bent_e * x), bent_e * e]
        with_all = self._times_rows([part.sum(2).mT for part in left])
        third = v.new_zeros(*v.shape[:3], v.shape[2], v.shape[2])
        for first, second, last in ((e, v, b), (e, b, v), (v, b, e), (0.5 * e, e, x), (e, x, e)):
            third = third + _symmetric_products(first, second, last)
        return third, with_all

    def _times_rows(self, left: list[Tensor]) -> Tensor:
        """Σₐ of four factors (N, A, n) times the rows b, v, e, x, in this order: (N, n, P)."""
        e, v, b, x = self.rows.unbind(1)
        total = left[0].mT @ b
        for part, rows in zip(left[1:], (v, e, x), strict=True):
            total = torch.baddbmm(total, part.mT, rows)
        return total

    def fourths(self, n: int) -> FourthCumulants | None:
        """Fourth cumulants of the first n numbers, if they are kept.

        With r = 4eb, what a shift of u does to κ_ii, and Ω, V, E of `FourthOrder`:

            κ_iiii = Σ (e⁴c₄ + 4e³v c₃′ + 6e²v² c₂″ + 4ev³ E[f He₃]) + 3 rΩr + 3 e²Ve² + 6 rE(2bv + 2ex).

        κ_iijj has the same terms with i and j twice each, except that of the three pairings in rΩr and e²Ve² it has
        only ii with jj, and that it lacks the last term.
        """
        if self.fourth is None:
            return None
        own, between, variances, responses = self.fourth
        e, v, b, x = self.rows[..., :n].unbind(1)
        ee, ev, vv, shift = e * e, e * v, v * v, 4 * e * b
        third_bend, variance_bend, skew_slope, fourth = (part.unsqueeze(-1) for part in own)
        with_ee = torch.addcmul((0.5 * fourth) * ee, 2 * skew_slope, ev).addcmul(variance_bend, vv)
        with_ev = torch.addcmul((2 * third_bend) * vv, 2 * variance_bend, ev)
        half = torch.baddbmm(ee.mT @ with_ee, ev.mT, with_ev)
        by_one = half + half.mT
        shifted, with_centres = shift.mT @ between, ee.mT @ variances
        by_responses = torch.addcmul(b * v, e, x).mT @ responses.mT
        by_two = torch.baddbmm(shifted @ shift, with_centres, ee)
        kappa_iiii = by_one.diagonal(dim1=-2, dim2=-1) + 3 * by_two.diagonal(dim1=-2, dim2=-1)
        kappa_iiii = kappa_iiii + 12 * (by_responses * shift.mT).sum(-1)
        return FourthCumulants(kappa_iiii, torch.add(by_one, by_two + by_two.mT, alpha=0.5), by_one, with_centres)


def _symmetric_products(first: Tensor, second: Tensor, last: Tensor) -> Tensor:
    """Σₐ (first_k second_l + second_k first_l) last_m, (N, n, q, q, q), from factors (N, n, q, A)."""
    pairs = first.unsqueeze(-2) * second.unsqueeze(-3)
    products = pairs.flatten(-3, -2) @ last.mT
    products = products.unflatten(-2, pairs.shape[-3:-1])
    return products + products.transpose(-3, -2)
