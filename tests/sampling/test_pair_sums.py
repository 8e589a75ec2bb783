"""Sums over pairs against all values kept; unbiased and honest estimates with any control; corrected low precision."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

import netmoments as nm
from netmoments.sampling.estimate import (
    SQUARES,
    WIDE_PAIRS,
    WIDENING,
    PairEstimate,
    allowing_for_skewness,
    allowing_for_the_unseen,
    tolerance_met,
)
from netmoments.sampling.pair_sums import (
    FOLDS,
    HEAVY,
    SHRINKING,
    Decisions,
    FirstSums,
    PairSums,
    block_sums,
    chosen,
    combined,
    first_sums,
    mirrored_share,
    of_one_kind,
    pair_costs,
    pair_weights,
)
from netmoments.sampling.two_level import corrected, correction_from
from tests.closeness import assert_close
from tests.networks import random_network

STD = 0.8
NETWORK = random_network(inputs=5, units=12, outputs=2, seed=0)
POINT = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
NOISE = nm.Gaussian(POINT, std=STD)
MEAN, COVARIANCE = NETWORK.mean(NOISE), NETWORK.covariance(NOISE)
SLOPES = (
    NETWORK.B * torch.special.ndtr((NETWORK.A @ POINT + NETWORK.c1) / (STD * NETWORK.A.norm(dim=1)))
) @ NETWORK.A  # B diag(Φ) A, what the network does on average
CONTROLS = {
    "none": None,
    "expected slopes": SLOPES,
    "random slopes": torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(8)),
    "slopes of another scale": 1000 * SLOPES,
    "outputs in another order": SLOPES.flip(0),
    "slopes of zero": torch.zeros_like(SLOPES),
}


@dataclass(frozen=True, eq=False)
class Pairs:
    """Values (p, E, d) at both samples of each pair, and the control at both, (2, p, E, d)."""

    first: Tensor
    second: Tensor
    linear: Tensor | None
    known: Tensor | None
    mirrored: bool = True

    def controls(self, span: slice, entries: Tensor | slice = slice(None)) -> tuple[Tensor, Tensor | None] | None:
        if self.linear is None:
            return None
        one, other = self.linear[:, span][:, :, entries]
        return one, None if self.mirrored else other

    def sums(self, centre: Tensor, products: bool, blocks: list[int], known: Tensor | None = None) -> PairSums:
        """All of them, so many at a time."""
        sums, start = PairSums(centre, self.first.dtype, products, known), 0
        for count in blocks:
            span, start = slice(start, start + count), start + count
            found = block_sums(self.first[span], self.second[span], self.controls(span), centre, products)
            sums.add(self.mirrored, None, found)
        return sums

    def estimate(
        self, products: bool = True, blocks: list[int] | None = None, off: float = 0.1, heavy: float = 0.0
    ) -> PairEstimate:
        """About a centre that is off by a fraction of a standard deviation."""
        centre = (MEAN + off * COVARIANCE.diagonal().sqrt()).expand(self.first.shape[1:])
        known = self.known
        if known is not None:
            known = (known if products else known.diagonal()).expand(len(centre), *known.shape[: 1 + products])
        sums = self.sums(centre.clone(), products, blocks or [len(self.first)]).sums[self.mirrored]
        return of_one_kind(centre, sums, known, products, self.mirrored, heavy)


def draw(pairs: int, entries: int, control: str = "none", *, mirrored: bool = True, seed: int = 1) -> Pairs:
    generator = torch.Generator().manual_seed(seed)
    deviations = STD * torch.randn(2, pairs, entries, 5, dtype=torch.float64, generator=generator)
    others = -deviations[0] if mirrored else deviations[1]
    first, second = (NETWORK((POINT + x).reshape(-1, 5)).reshape(pairs, entries, 2) for x in (deviations[0], others))
    slopes = CONTROLS[control]
    if slopes is None:
        return Pairs(first, second, None, None, mirrored)
    lines = torch.stack([deviations[0], others]) @ slopes.T
    return Pairs(first, second, lines, STD**2 * slopes @ slopes.T, mirrored)


def at_once(kind: object, work: Callable[..., tuple[Tensor, ...]], *inputs: Tensor | None) -> tuple[Tensor, ...]:
    """As `FastNetwork.replayed` without recordings."""
    return work(*inputs)


# against all values kept


def by_hand(pairs: Pairs, entry: int, centre: np.ndarray, blocks: list[int]) -> tuple[np.ndarray, ...]:
    """The same estimates from a loop over all pairs of values: mean, covariance, and their squared errors."""
    first, second = (x[:, entry].numpy() - centre for x in (pairs.first, pairs.second))
    fold = np.concatenate([np.repeat(np.arange(FOLDS), count // FOLDS) for count in blocks])
    even, odd = (first + second) / 2, (first - second) / 2
    count, outputs = even.shape

    def controlled(target: np.ndarray, u: np.ndarray, expected: tuple[float, float]) -> tuple[float, float]:
        """With u and, for mirrored pairs, its square as controls, the latter's slope shrunk by the pairs it is from."""
        left = target.copy()
        if u.any():
            for k in range(FOLDS):
                own, others = fold == k, fold != k
                bend = np.polyfit(u[others], target[others], 2)[0] if pairs.mirrored else 0.0
                bend *= others.sum() / (others.sum() + SHRINKING)
                slope = np.polyfit(u[others], target[others] - bend * u[others] ** 2, 1)[0]
                left[own] -= slope * (u[own] - expected[0]) + bend * (u[own] ** 2 - expected[1])
        return left.mean(), left.var(ddof=1) / count

    mean, mean_error_squared = np.zeros(outputs), np.zeros(outputs)
    second_moment, second_error_squared = np.zeros((outputs, outputs)), np.zeros((outputs, outputs))
    lines, known = np.zeros((2, count, outputs)), np.zeros((outputs, outputs))
    if pairs.linear is not None and pairs.known is not None:
        lines, known = pairs.linear[:, :, entry].numpy(), pairs.known.numpy()
    for i in range(outputs):
        for j in range(outputs):
            u = (lines[:, :, i] * lines[:, :, j]).mean(0)
            expected = known[i, j], known[i, i] * known[j, j] + 2 * known[i, j] ** 2
            value, error = controlled(odd[:, i] * odd[:, j] + even[:, i] * even[:, j], u, expected)
            if i == j:
                own = (u, expected) if pairs.mirrored else (lines[:, :, i].mean(0), (0.0, 0.0))
                mean[i], mean_error_squared[i] = controlled(even[:, i], *own)
            different = [even[p, i] * even[q, j] for p in range(count) for q in range(count) if p != q]
            spread = [float((even[:, a] * even[:, b]).mean()) for a, b in ((i, i), (j, j), (i, j))]
            second_moment[i, j] = value - np.mean(different)
            second_error_squared[i, j] = error + (spread[0] * spread[1] + spread[2] ** 2) / len(different)
    return centre + mean, second_moment, mean_error_squared, second_error_squared


@pytest.mark.parametrize("mirrored", [True, False])
@pytest.mark.parametrize("control", CONTROLS)
def test_sums_give_what_all_values_give(control, mirrored):
    """In blocks of different sizes; the sums cancel a few digits of float64's sixteen."""
    blocks = [8, 20, 4]
    pairs = draw(sum(blocks), 2, control, mirrored=mirrored)
    found = pairs.estimate(blocks=blocks)
    centre = (MEAN + 0.1 * COVARIANCE.diagonal().sqrt()).numpy()
    for entry in range(2):
        expected = by_hand(pairs, entry, centre, blocks)
        for name, value in zip(("mean", "second", "mean_error_squared", "second_error_squared"), expected, strict=True):
            size = float(np.abs(value).max())
            assert_close(getattr(found, name)[entry], torch.tensor(value), atol=1e-9 * size, what=name)


@pytest.mark.parametrize("mirrored", [True, False])
@pytest.mark.parametrize("control", CONTROLS)
def test_squares_alone_are_the_diagonal_of_all_products(control, mirrored):
    pairs = draw(64, 3, control, mirrored=mirrored)
    every, squares = pairs.estimate(), pairs.estimate(products=False)
    assert squares.second.shape == (3, 2)
    for name in ("mean", "mean_error_squared", "variance", "variance_error_squared"):
        assert_close(getattr(squares, name), getattr(every, name), rtol=1e-10, what=name)
    assert_close(every.second, every.second.mT, atol=1e-15)


@pytest.mark.parametrize("products", [True, False])
def test_values_in_float32(products):
    """As of the rounded values, but for sums of products in float32 where only squares are wanted."""
    exact = draw(256, 2, "expected slopes")
    rounded = Pairs(exact.first.float(), exact.second.float(), exact.linear.float(), exact.known)
    found, expected = (pairs.estimate(products, off=0.0) for pairs in (rounded, exact))
    for name in ("mean", "mean_error_squared", "second", "second_error_squared"):
        size = float(getattr(expected, name).abs().max())
        assert_close(getattr(found, name), getattr(expected, name), atol=1e-4 * size, what=name)
        assert getattr(found, name).dtype == torch.float64


def test_what_the_samples_cannot_have_shown():
    """With every sample explained, 128 of them leave a deviation and √2 variances of one sample more."""
    mean, second = torch.tensor([[3.0, 0.0]]), torch.tensor([[[4.0, 1.0], [1.0, 0.0]]])
    none = PairEstimate(mean, second, torch.zeros_like(mean), torch.zeros_like(second))
    found = allowing_for_the_unseen(none, torch.tensor([128.0]))
    assert found.mean_error_squared.sqrt().tolist() == [[2 / 128, 0.0]]
    assert_close(found.variance_error_squared.sqrt(), torch.tensor([[4 * 2**0.5 / 128, 0.0]]), rtol=1e-6)
    alone = none._replace(second=torch.tensor([[4.0, 0.0]]), second_error_squared=torch.zeros_like(mean))
    alone = allowing_for_the_unseen(alone, torch.tensor([128.0]))
    assert_close(alone.variance_error_squared, found.variance_error_squared, rtol=1e-6)


def test_what_wider_noise_shows_is_in_the_errors():
    """A share of its spread by the pairs there are; and its samples count among those that saw nothing."""
    mean, second = torch.tensor([[3.0, 0.0]]), torch.tensor([[[4.0, 1.0], [1.0, 1.0]]])
    samples, wide = torch.tensor([96.0]), torch.tensor([[[5.0, 0.0]], [[7.0, 2.0]]])
    small = PairEstimate(mean, second, torch.full_like(mean, 1e-9), torch.full_like(second, 1e-9))
    found = allowing_for_the_unseen(small, samples, wide)
    share, one_more = 96 ** (1 / WIDENING**2 - 1) / 48, 1 / (96 + 2 * WIDE_PAIRS)
    assert_close(found.mean_error_squared, [[5 * share + 4 * one_more**2, 1e-9 + one_more**2]], rtol=1e-5)
    expected = [[[7.0, math.sqrt(14)], [math.sqrt(14), 2.0]]]
    own = torch.tensor([[[4.0, 2.0], [2.0, 1.0]]])
    assert_close(
        found.second_error_squared, torch.tensor(expected) * share / SQUARES + 2 * (own * one_more) ** 2, rtol=1e-5
    )
    large = small._replace(mean_error_squared=torch.ones_like(mean), second_error_squared=torch.ones_like(second))
    found = allowing_for_the_unseen(large, samples, wide)
    assert_close(found.mean_error_squared, [[1 + 4 * one_more**2, 1 + one_more**2]], rtol=1e-6)


@pytest.mark.parametrize("mirrored", [True, False])
def test_errors_that_are_badly_known_are_larger(mirrored):
    """By 1 + heavy·q², q from the variances of the folds about the mean of all, without a control as it is here."""
    pairs = draw(64, 2, mirrored=mirrored)
    plain, found = (pairs.estimate(off=0.0, heavy=heavy) for heavy in (0.0, 7.0))
    assert torch.equal(plain.mean, found.mean)
    assert torch.equal(plain.second, found.second)
    even = ((pairs.first + pairs.second) / 2).unflatten(0, (FOLDS, -1))
    folds = (even - even.mean((0, 1))).square().mean(1)
    q = (folds / folds.mean(0) - 1).square().sum(0) / (FOLDS * (FOLDS - 1))
    assert_close(found.mean_error_squared / plain.mean_error_squared, 1 + 7 * q**2, rtol=1e-8)
    assert bool((found.second_error_squared >= plain.second_error_squared).all())


def test_one_value_that_is_all_of_the_spread():
    """q is 1: the squared error is 1 + heavy times as large."""
    first = torch.zeros(64, 1, 2, dtype=torch.float64)
    first[5] = 1000.0
    plain, found = (Pairs(first, first, None, None).estimate(False, heavy=heavy, off=0.0) for heavy in (0.0, 7.0))
    # of its fold 15 values and of the others all are at the mean, but for 1/64 of the largest
    assert_close(found.mean_error_squared / plain.mean_error_squared, torch.full((1, 2), 8.0), rtol=0.1)


def test_some_entries_may_have_more_pairs():
    pairs = draw(96, 3, "expected slopes")
    centre, known = MEAN.expand(3, 2).clone(), pairs.known.expand(3, 2, 2)
    sums = PairSums(centre, torch.float64, products=True, known=known)
    early, late, some = slice(32), slice(32, None), torch.tensor([2, 0])
    found = block_sums(pairs.first[early], pairs.second[early], pairs.controls(early), centre, True)
    sums.add(True, None, found)
    rest = pairs.first[late][:, some], pairs.second[late][:, some], pairs.controls(late, some)
    sums.add(True, some, block_sums(*rest, centre[some], True))
    assert sums.wins.sum(-1).tolist() == [192, 64, 192]
    standing = sums.standing(at_once, torch.tensor([7.0]))
    assert standing.pairs.tolist() == [96, 32, 96]
    assert (standing.infinite, standing.decisions.tolist()) == (0, [7.0])
    found = of_one_kind(centre, sums.sums[True], known, True, True, HEAVY)
    stated = allowing_for_the_unseen(found, torch.tensor([192, 64, 192], dtype=torch.float64))
    assert torch.equal(standing.reached, tolerance_met(stated, torch.float64))
    assert all(map(torch.equal, standing.estimate, allowing_for_skewness(stated)))
    for entries, count, blocks in (([0, 2], 96, [32, 64]), ([1], 32, [32])):
        values = [x[:count, entries] for x in (pairs.first, pairs.second)]
        alone = Pairs(*values, pairs.linear[:, :count, entries], pairs.known)
        expected = alone.estimate(blocks=blocks, off=0.0, heavy=HEAVY)
        for name in ("mean", "second", "mean_error_squared", "second_error_squared"):
            assert_close(getattr(found, name)[entries], getattr(expected, name), rtol=1e-9, atol=1e-15, what=name)


def test_winners_are_counted_in_both_samples():
    pairs = draw(32, 4)
    sums = pairs.sums(MEAN.expand(4, 2).clone(), products=False, blocks=[12, 20])
    both = torch.cat([pairs.first, pairs.second]).argmax(-1)
    assert torch.equal(sums.wins, torch.stack([(both == k).sum(0) for k in range(2)], -1).double())
    assert sums.wins.sum(-1).tolist() == [64.0] * 4


# estimates over many runs


def assert_unbiased(found: Tensor, truth: Tensor, what: str) -> None:
    """The mean over runs within 5 of its standard errors."""
    score = (found.mean(0) - truth) / (found.std(0) / len(found) ** 0.5)
    assert float(score.abs().max()) < 5, (what, score)


def assert_honest(found: Tensor, squared_error: Tensor, truth: Tensor, share: float, what: str) -> None:
    """Squared deviations are on average what they are said to be: within 5 standard errors and a share of it."""
    off = (found - truth) ** 2 - squared_error
    allowed = 5 * off.std(0) / len(off) ** 0.5 + share * squared_error.mean(0)
    assert bool((off.mean(0).abs() <= allowed).all()), (what, off.mean(0) / squared_error.mean(0))


@pytest.mark.parametrize(
    ("control", "mirrored"), [(control, mirrored) for mirrored in (True, False) for control in CONTROLS]
)
def test_unbiased_and_honest(control, mirrored):
    """The variance of what a fitted control leaves is a fraction 1/pairs too small: 3 % are allowed for it."""
    found = draw(128, 2000, control, mirrored=mirrored).estimate(blocks=[64, 64])
    for name, truth in (("mean", MEAN), ("second", COVARIANCE)):
        value, error = getattr(found, name), getattr(found, f"{name}_error_squared")
        assert_unbiased(value, truth, name)
        assert_honest(value, error, truth, 0.03, name)


@pytest.mark.parametrize("control", ["none", "expected slopes", "random slopes"])
def test_unbiased_from_few_pairs(control):
    """Eight pairs, two a fold, are few for an error, and enough for a mean."""
    found = draw(8, 20_000, control).estimate()
    assert_unbiased(found.mean, MEAN, "mean")
    assert_unbiased(found.second, COVARIANCE, "covariance")


def test_a_good_control_helps_and_a_bad_one_costs_little():
    """Of the variance of t, a share of that of ℓ² is explained; a useless coefficient costs 1/pairs."""
    errors = {control: draw(128, 500, control).estimate() for control in CONTROLS}
    plain = errors["none"]
    for name in ("mean_error_squared", "variance_error_squared"):
        without = getattr(plain, name).mean(0)
        ratio = {control: getattr(found, name).mean(0) / without for control, found in errors.items()}
        assert bool((ratio["random slopes"] < 1.05).all()), name
        assert_close(ratio["slopes of another scale"], ratio["expected slopes"], rtol=1e-9)
        assert_close(ratio["slopes of zero"], torch.ones(2), rtol=1e-9)
    assert bool(
        (errors["expected slopes"].variance_error_squared.mean(0) < 0.5 * plain.variance_error_squared.mean(0)).all()
    )
    independent = draw(128, 500, mirrored=False).estimate().mean_error_squared.mean(0)
    assert_close(independent, COVARIANCE.diagonal() / 256, rtol=0.05)  # 128 000 samples say it to 5·√(4/128 000)
    assert bool((plain.mean_error_squared.mean(0) < 0.7 * independent).all())


# low precision


def low(values: Tensor) -> Tensor:
    """Values that are off by a smooth function of them and by rounding to steps of 1/64."""
    return torch.round((1.02 * values + 0.03 * torch.sin(3 * values) + 0.01) * 64) / 64


@pytest.mark.parametrize("products", [True, False])
@pytest.mark.parametrize("control", ["none", "expected slopes"])
def test_corrected_values_of_low_precision_are_unbiased(control, products):
    """The correction is from the first of the pairs, which count in the sums of low precision too."""
    pairs, entries = 256, 2000
    exact = draw(pairs, entries, control, seed=3)
    cheap = Pairs(low(exact.first), low(exact.second), exact.linear, exact.known)
    centre = (MEAN + 0.1 * COVARIANCE.diagonal().sqrt()).expand(entries, 2)
    correction = correction_from(
        centre, (exact.first[:64], exact.second[:64]), (cheap.first[:64], cheap.second[:64]), products
    )
    before = cheap.estimate(products)
    found = corrected(before, centre, correction)
    truth = COVARIANCE if products else COVARIANCE.diagonal()
    assert float(((before.mean - MEAN).mean(0) / (before.mean.std(0) / entries**0.5)).abs().max()) > 20
    assert float(((before.second - truth).mean(0) / (before.second.std(0) / entries**0.5)).abs().max()) > 10
    assert_unbiased(found.mean, MEAN, "mean")
    assert_unbiased(found.second, truth, "second")
    # the first pairs are in both terms, whose covariance the errors leave out: 64/256 of that of values and differences
    assert_honest(found.mean, found.mean_error_squared, MEAN, 0.15, "mean")
    assert_honest(found.second, found.second_error_squared, truth, 0.15, "second")


@pytest.mark.parametrize("products", [True, False])
def test_a_correction_knows_its_own_error(products):
    exact = draw(64, 1000, seed=4)
    centre = MEAN.expand(1000, 2)
    values = (exact.first, exact.second)
    correction = correction_from(centre, values, (low(exact.first), low(exact.second)), products)
    many = draw(200_000, 1, seed=5)
    truth = correction_from(centre[:1], (many.first, many.second), (low(many.first), low(many.second)), products)
    assert_honest(correction.even, correction.even_error_squared, truth.even, 0.02, "even")
    assert_honest(correction.target, correction.target_error_squared, truth.target, 0.02, "target")


def test_exact_values_need_no_correction():
    exact = draw(64, 3)
    centre, values = MEAN.expand(3, 2), (exact.first, exact.second)
    correction = correction_from(centre, values, values, True)
    before = exact.estimate(off=0.0)
    found = corrected(before, centre, correction)
    for name in ("mean", "second", "mean_error_squared", "second_error_squared"):
        assert torch.equal(getattr(found, name), getattr(before, name))


def test_errors_allow_for_the_skewness_of_variances_that_are_known_badly():
    """Two standard errors up are v e^{2r}; small errors stay, and means do; no variance has no error."""
    variance = torch.tensor([[2.0, 2.0, 2.0, 0.0]], dtype=torch.float64)
    share = torch.tensor([[1e-4, 0.3, 5.0, 0.0]], dtype=torch.float64)
    mean_error_squared = torch.full_like(variance, 0.1)
    found = allowing_for_skewness(PairEstimate(variance, variance, mean_error_squared, (share * variance) ** 2))
    assert torch.equal(found.mean_error_squared, mean_error_squared)
    assert torch.equal(found.second, variance)
    expected = [2e-4 * (1 + 1e-4), math.expm1(0.6), 10 * math.expm1(2) / 2, 0.0]
    assert_close(found.second_error_squared.sqrt(), [expected], rtol=1e-7)
    dense = PairEstimate(
        variance[:, :2], torch.diag_embed(variance[:, :2]), mean_error_squared[:, :2],
        torch.diag_embed((share * variance)[:, :2] ** 2) + 0.01 * (1 - torch.eye(2, dtype=torch.float64)),
    )  # fmt: skip
    found = allowing_for_skewness(dense)
    assert_close(found.variance_error_squared.sqrt(), [expected[:2]], rtol=1e-7)
    grown = found.second_error_squared / dense.second_error_squared
    assert_close(grown[0, 0, 1], (grown[0, 0, 0] * grown[0, 1, 1]).sqrt(), rtol=1e-12)


# both kinds together


def test_two_kinds_of_pairs_are_one_estimate():
    """Unbiased, with the error that it states, and smaller than each; weights by what other pairs showed."""
    other = draw(2000, 1, "expected slopes", seed=8)
    costs = pair_costs(other.first, other.second, other.linear[0])
    kinds = [
        draw(96, 4000, "expected slopes", mirrored=mirrored, seed=seed).estimate()
        for mirrored, seed in ((True, 6), (False, 7))
    ]
    count = torch.full((4000,), 96.0, dtype=torch.float64)
    found = combined(*kinds, *pair_weights(costs, count, count))
    for name, truth in (("mean", MEAN), ("second", COVARIANCE)):
        value, error = getattr(found, name), getattr(found, f"{name}_error_squared")
        assert_unbiased(value, truth, name)
        assert_honest(value, error, truth, 0.05, name)
        for kind in kinds:
            assert float(error.mean()) < float(getattr(kind, f"{name}_error_squared").mean())


def test_what_the_first_pairs_may_have_missed_is_in_the_costs():
    """Of mirrored samples and of independent ones alike: a pair of either sees an event as often."""
    seen = draw(64, 1, "expected slopes", seed=9)
    values = seen.first, seen.second, seen.linear[0]
    wide = torch.tensor([[[5.0, 0.0]], [[0.0, 2.0]]], dtype=torch.float64)
    missed = pair_costs(*values, wide) - pair_costs(*values)
    even = (seen.first + seen.second) / 2
    variance = (((seen.first - seen.second) / 2) ** 2 + (even - even.mean(0)) ** 2).mean(0)[0]
    share = 128 ** (1 / WIDENING**2 - 1)
    of_mean, of_second = 5 * share / variance[0], 2 * share / SQUARES / variance[1] ** 2
    assert_close(missed, torch.stack([of_mean, of_second / 2]).expand(2, 2), rtol=1e-8)


def test_costs_are_what_pairs_leave():
    """Of a sample, half a pair: the errors of estimates, in units of the variance and of its square."""
    pairs = 4000
    seen = draw(pairs, 1, "expected slopes", seed=9)
    costs = pair_costs(seen.first, seen.second, seen.linear[0]).tolist()
    variance = COVARIANCE.diagonal()
    for mirrored, (of_mean, of_variance) in zip((True, False), costs, strict=True):
        found = draw(pairs, 1, "expected slopes", mirrored=mirrored, seed=10).estimate()
        assert of_mean == pytest.approx(float(2 * pairs * (found.mean_error_squared / variance).mean()), rel=0.1)
        assert of_variance == pytest.approx(
            float(pairs * (found.variance_error_squared / variance**2).mean()), rel=0.15
        )


def test_an_estimate_is_chosen_by_input():
    one, other = (draw(16, 3, seed=seed).estimate() for seed in (1, 2))
    found = chosen(torch.tensor([True, False, True]), one, other)
    for name in ("mean", "second", "mean_error_squared", "second_error_squared"):
        expected = torch.stack([getattr(x, name)[k] for k, x in enumerate((one, other, one))])
        assert torch.equal(getattr(found, name), expected)


@pytest.mark.parametrize(
    ("mirrored", "independent", "share"),
    [
        ((0.4, 0.3), (0.5, 0.6), 1.0),  # better in both
        ((1.0, 0.9), (0.4, 0.5), 0.0),
        ((0.8, 0.5), (0.5, 0.7), 0.4324),  # n₁/0.8 + n₂/0.5 = n₁/0.5 + n₂/0.7 = 1
        ((0.5, 0.4), (0.5, 0.4), 0.0),  # the same: where both hold is nowhere
        ((0.5, 0.5), (0.5, 0.6), 1.0),
    ],
)
def test_the_cheapest_share_of_mirrored_pairs(mirrored, independent, share):
    found = float(mirrored_share(torch.tensor([mirrored, independent], dtype=torch.float64)))
    assert found == pytest.approx(share, abs=1e-4)

    def cost(part: float) -> float:
        return max(1 / (part / a + (1 - part) / b) for a, b in zip(mirrored, independent, strict=True))

    assert all(cost(found) <= cost(part) + 1e-12 for part in torch.linspace(0, 1, 101).tolist())


def test_linear_functions_are_mirrored_and_even_ones_are_not():
    noise = torch.randn(256, 1, 3, generator=torch.Generator().manual_seed(0))
    assert float(mirrored_share(pair_costs(noise + 0.05 * noise**2, -noise + 0.05 * noise**2, noise))) > 0.9
    assert float(mirrored_share(pair_costs(noise**2, noise**2, None))) == 0.0


# the first pairs


def first_pairs(low_by: float) -> FirstSums:
    """What `first_sums` gives for pairs of two inputs with slopes, and low precision that is off by noise."""
    generator = torch.Generator().manual_seed(3)
    deviations = STD * torch.randn(64, 2, 5, dtype=torch.float64, generator=generator)
    values = [NETWORK((POINT + x).reshape(-1, 5)).reshape(64, 2, 2) for x in (deviations, -deviations)]
    low = [x + low_by * torch.randn(x.shape, dtype=torch.float64, generator=generator) for x in values]
    return first_sums(True, True, 0.1, SLOPES.expand(2, -1, -1), None, deviations, *values, *low)


def test_first_pairs_decide_whether_low_precision_is_used():
    """Where it is far off, everything is as without; where it is near, the sums are of its values."""
    *near, rough = (first_pairs(low_by) for low_by in (0.0, 1e-3, 10.0))
    for found, used in zip((*near, rough), (1, 1, 0), strict=True):
        assert torch.equal(found.centre, rough.centre)
        assert torch.equal(found.costs, rough.costs)
        assert found.block.bad.tolist() == [0, 0, 0]
        assert found.block.wins.sum(-1).tolist() == [128.0, 128.0]
        assert found.decisions.tolist() == list(Decisions(float(mirrored_share(found.costs)), used, 1.0))
        assert found.correction is not None
        assert bool(used) or not any(bool(part.any()) for part in found.correction)
        assert torch.equal(found.block.sums, rough.block.sums) == (
            used == 0 or torch.equal(near[0].block.sums, found.block.sums)
        )
    assert torch.equal(near[0].block.sums, rough.block.sums)  # exact values as values of low precision
    assert not torch.equal(near[1].block.sums, rough.block.sums)


def test_first_sums_are_the_same_after_they_were_tensors_in_a_row():
    found = first_pairs(1e-3)
    again = FirstSums.of(found.flat)
    assert torch.equal(torch.cat([x.flatten() for x in again.flat]), torch.cat([x.flatten() for x in found.flat]))
    assert FirstSums.of(found._replace(correction=None).flat).correction is None


def test_samples_that_are_not_finite_are_counted():
    """In how many samples, and how often each output."""
    pairs = draw(8, 2)
    first, second = pairs.first.clone(), pairs.second.clone()
    first[0, 0, 1], first[3, 1], second[0, 0, 1] = math.nan, math.inf, -math.inf
    bad = block_sums(first, second, None, MEAN.expand(2, 2), True).bad
    assert bad.tolist() == [3, 1, 3]


def test_the_tolerance_that_an_estimate_meets():
    """Errors of means in standard deviations, relative ones of variances by √2: the larger average over outputs."""
    variance = torch.tensor([[4.0, 1.0], [4.0, 1.0], [0.0, 0.0]])
    mean_error_squared = torch.tensor([[0.2, 0.3], [0.0, 0.0], [0.0, 0.0]]) ** 2
    second_error_squared = torch.tensor([[0.4, 0.1], [0.4, 0.3], [0.0, 0.0]]) ** 2
    found = tolerance_met(PairEstimate(variance, variance, mean_error_squared, second_error_squared), torch.float32)
    assert_close(found, [0.2, 0.2 / math.sqrt(2), 0.0], rtol=1e-6)
    matrix, errors = torch.diag_embed(variance), torch.diag_embed(second_error_squared) + 9 * (1 - torch.eye(2))
    dense = tolerance_met(PairEstimate(variance, matrix, mean_error_squared, errors), torch.float32)
    assert_close(dense, found.double(), rtol=1e-6)


def test_what_varies_within_rounding_is_taken_not_to_vary():
    """In the last digit of a mean of 1 in float32, more samples say nothing more; in float64 they do."""
    eps = torch.finfo(torch.float32).eps
    estimate = PairEstimate(*(torch.tensor([[x]], dtype=torch.float64) for x in (1.0, eps**2, eps**2 / 64, eps**4)))
    single, double = (float(tolerance_met(estimate, dtype)) for dtype in (torch.float32, torch.float64))
    assert single == pytest.approx(1 / (8 * 16))
    assert double == pytest.approx(1 / math.sqrt(2))


def test_an_output_that_only_second_samples_move():
    """A unit that hardly ever opens: sums in float32 are in units of the larger deviation of both samples."""
    first = torch.zeros(8, 1, 3)
    second = first.clone()
    second[5, 0, 1] = 2.0
    centre = torch.zeros(1, 3, dtype=torch.float64)
    for control in (None, (torch.linspace(-1, 1, 8).reshape(8, 1, 1).expand(8, 1, 3), None)):
        single, double = (block_sums(a, b, c, centre, False).sums for a, b, c in (
            (first, second, control),
            (first.double(), second.double(), None if control is None else (control[0].double(), None)),
        ))  # fmt: skip
        assert_close(single, double, rtol=1e-6, atol=1e-12)
