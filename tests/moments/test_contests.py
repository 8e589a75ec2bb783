"""Winning probabilities against exact integrals, other implementations, samples, and what must be true of them."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from netmoments.moments.contests import Contest, corner_distance, losing_probability, winning_probabilities
from tests.closeness import assert_close, assert_within_standard_errors

QMC = 1e-2
"""Relative error allowed to 2048 quasi-random points: the worst of 7200 probabilities with 9 rivals was 7e-3."""


F64 = torch.float64


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def random_problem(seed: int, classes: int, *batch: int, spread: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(*batch, classes, classes, generator=generator, dtype=F64) / math.sqrt(classes)
    return torch.randn(*batch, classes, generator=generator, dtype=F64) * spread, root @ root.mT


def random_noise_everywhere(seed: int, classes: int, spread: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A problem far from singular, whose tails are accurate."""
    mean, covariance = random_problem(seed, classes, spread=spread)
    return mean, covariance + 0.05 * torch.eye(classes, dtype=F64)


def one_factor_winners(mean: np.ndarray, loading: np.ndarray, std: np.ndarray) -> list[float]:
    """P(k) for y = mean + loading·f + std·e by quadrature over f and y_k: ∫∫ φ(f) φ(e_k) Π_j Φ(...)."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(120 if loading.any() else 1)
    result = np.zeros(len(mean))
    for f, weight in zip(nodes, weights / math.sqrt(2 * math.pi), strict=True):
        result += weight * np.array([independent_winner(mean + loading * f, std, k) for k in range(len(mean))])
    return result.tolist()


def independent_winner(mean: np.ndarray, std: np.ndarray, k: int) -> float:
    """∫ φ(e) Π_{j≠k} Φ((m_k + s_k e − m_j)/s_j) de, by the trapezoidal rule: it converges geometrically."""
    e = np.linspace(-14, 14, 2001)
    others = [j for j in range(len(mean)) if j != k]
    reach = (mean[k] + std[k] * e[:, None] - mean[others]) / std[others]
    return float(np.exp(stats.norm.logpdf(e) + stats.norm.logcdf(reach).sum(1)).sum() * (e[1] - e[0]))


def test_one_class_always_wins():
    assert winning_probabilities(tensor([[3.0], [-1.0]]), tensor([[2.0]])).tolist() == [[1.0], [1.0]]


@pytest.mark.parametrize("gap", [0.0, 0.3, 3.0, 9.0, 15.0])
def test_two_classes_are_a_normal_distribution(gap):
    covariance = tensor([[1.0, 0.3], [0.3, 2.0]])
    z = mpmath.mpf(gap) / mpmath.sqrt(mpmath.mpf(3) - mpmath.mpf("0.6"))
    expected = [float(mpmath.ncdf(z)), float(mpmath.ncdf(-z))]
    # the standardized gap has an error of about 2 eps, which Φ's tail multiplies by gap²
    assert_close(winning_probabilities(tensor([gap, 0.0]), covariance), expected, rtol=1e-15 * (2 + 2 * gap**2))


@pytest.mark.parametrize("seed", range(5))
def test_three_classes_against_scipy(seed):
    mean, covariance = random_problem(seed, 3)
    for k, actual in enumerate(winning_probabilities(mean, covariance)):
        others = [j for j in range(3) if j != k]
        contrast = torch.zeros(2, 3, dtype=F64)
        contrast[[0, 1], others], contrast[:, k] = 1.0, -1.0
        pushed = (contrast @ covariance @ contrast.T).numpy()
        expected = stats.multivariate_normal.cdf((-contrast @ mean).numpy(), cov=pushed)
        assert_close(actual, tensor(float(expected)), rtol=1e-4, atol=1e-14)  # scipy to 1e-14; midpoints below 1e-4


def test_three_classes_in_the_tail_against_mpmath():
    mean, std = tensor([0.0, 8.0, 7.0]), tensor([1.0, 0.5, 1.2])
    with mpmath.workdps(30):

        def integrand(e):
            return mpmath.npdf(e) * mpmath.ncdf((e - 8) / 0.5) * mpmath.ncdf((e - 7) / mpmath.mpf(1.2))

        expected = float(mpmath.quad(integrand, [-10, 2, 5, 7, 9, 12, 20]))
    assert 1e-15 < expected < 1e-12
    # 2048 midpoints of a one-dimensional integral with mild singularities at its ends: 1/2048 of a cell's share
    assert_close(winning_probabilities(mean, torch.diag(std**2))[0], tensor(expected), rtol=1e-4)


@pytest.mark.parametrize("classes", [3, 4, 6, 10, 30])
@pytest.mark.parametrize("lead", [0.0, 3.0, 8.0])
def test_independent_logits(classes, lead):
    std = np.linspace(0.5, 1.5, classes)
    mean = np.linspace(-1.0, 1.0, classes)
    mean[0] += 1.5 * lead
    expected = [independent_winner(mean, std, k) for k in range(classes)]
    actual = winning_probabilities(tensor(mean.tolist()), torch.diag(tensor(std.tolist()) ** 2))
    assert lead < 8 or min(expected) < 1e-12
    assert_close(actual, expected, rtol=QMC, atol=1e-30)  # below, upper bounds
    assert bool((actual >= tensor(expected) * (1 - QMC)).all())


def test_tails_of_many_classes():
    """A class that wins once in 1e9, or in 1e20, has as many digits as the others."""
    mean = tensor([9.0, 0.0, 1.0, 2.0, 3.0, -4.0, 0.5, 0.2, 0.1, 0.0])
    expected = tensor([independent_winner(mean.numpy(), np.ones(10), k) for k in range(10)])
    actual = winning_probabilities(mean, torch.eye(10, dtype=F64))
    assert float(expected.min()) < 1e-19
    assert_close(actual, expected, rtol=1e-3)
    assert_close(losing_probability(mean, torch.eye(10, dtype=F64), 0), expected[1:].sum(), rtol=1e-3)


@pytest.mark.parametrize("common", [0.5, 0.99])
def test_equicorrelated_logits_are_independent_logits(common):
    """Common noise moves all logits alike: with covariance (1−c)I + c·11ᵀ only the first part decides."""
    mean = np.array([0.0, 1.0, 0.5, -0.2, 0.2])
    covariance = (1 - common) * torch.eye(5, dtype=F64) + common
    expected = one_factor_winners(mean, np.zeros(5), np.full(5, math.sqrt(1 - common)))
    assert_close(winning_probabilities(tensor(mean.tolist()), covariance), expected, rtol=QMC)


def test_one_factor_covariance():
    mean, loading = np.array([0.0, 1.0, -2.0, 0.3, 0.1, -1.0]), np.array([1.0, -0.5, 0.8, 0.0, -1.0, 0.3])
    std = np.array([1.0, 0.7, 0.5, 1.2, 0.9, 0.6])
    covariance = torch.outer(tensor(loading.tolist()), tensor(loading.tolist())) + torch.diag(
        tensor(std.tolist()).square()
    )
    expected = one_factor_winners(mean, loading, std)
    assert_close(winning_probabilities(tensor(mean.tolist()), covariance), expected, rtol=QMC)


def test_tail_with_opposed_rivals():
    """Rivals 1 and 2 move against each other, so that beating both is far rarer than beating either."""
    covariance = tensor([[0.1, 0.0, 0.0, 0.0], [0.0, 1.0, -0.9, 0.0], [0.0, -0.9, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    mean = tensor([0.0, 2.0, 2.0, 1.0])
    root = float(np.sqrt(0.19))

    def given_first(y1, y0):
        second = stats.norm.cdf((y0 - 2 + 0.9 * (y1 - 2)) / root) * stats.norm.cdf(y0 - 1)
        return stats.norm.pdf(y1, 2, 1) * stats.norm.pdf(y0, 0, math.sqrt(0.1)) * second

    expected, _ = integrate.dblquad(given_first, 0, 5, lambda _: -2, lambda y0: y0, epsabs=0, epsrel=1e-5)
    assert expected < 1e-7
    assert_close(winning_probabilities(mean, covariance)[0], tensor(expected), rtol=1e-3)


def test_more_points_are_more_accurate():
    mean, std = np.linspace(-0.5, 0.5, 10), np.linspace(0.5, 1.5, 10)
    expected = tensor([independent_winner(mean, std, k) for k in range(10)])
    problem = tensor(mean.tolist()), torch.diag(tensor(std.tolist()) ** 2)
    errors = [float((winning_probabilities(*problem, points=n) - expected).abs().max()) for n in (128, 16384)]
    assert errors[1] < errors[0] / 10


@pytest.mark.parametrize("classes", [3, 5, 10])
def test_against_samples(classes):
    count = 2**18
    mean, covariance = random_problem(classes, classes, spread=0.5)
    noise = torch.randn(count, classes, dtype=F64, generator=torch.Generator().manual_seed(7))
    winner = (mean + noise @ torch.linalg.cholesky(covariance).T).argmax(-1)
    sampled = torch.bincount(winner, minlength=classes).double() / count
    exact = winning_probabilities(mean, covariance, points=8192)
    # 8192 points add an error of at most 2e-3 of P, a fraction of a standard error of the samples
    assert_within_standard_errors(sampled, exact, (exact * (1 - exact) / count).sqrt() + 2e-3 * exact / 5)


PROBLEMS = st.builds(
    random_noise_everywhere,
    st.integers(0, 10**6),
    st.integers(2, 7),
    st.floats(0.0, 4.0),
)


@settings(max_examples=25, deadline=None)
@given(PROBLEMS)
def test_probabilities_sum_to_one_and_do_not_depend_on_the_order(problem):
    mean, covariance = problem
    chance = winning_probabilities(mean, covariance)
    assert bool((chance >= 0).all())
    assert_close(chance.sum(), tensor(1.0), atol=1e-15 * len(mean))
    order = torch.randperm(len(mean), generator=torch.Generator().manual_seed(1))
    assert_close(winning_probabilities(mean[order], covariance[order][:, order]), chance[order], rtol=2 * QMC)


@settings(max_examples=25, deadline=None)
@given(PROBLEMS, st.floats(-5, 5), st.floats(0, 3), st.floats(0.1, 10))
def test_common_shifts_common_noise_and_scale_change_nothing(problem, shift, common, scale):
    mean, covariance = problem
    moved = winning_probabilities(scale * (mean + shift), scale**2 * (covariance + common))
    # rounding may change which of two equally likely rivals comes first, and with it every point: two errors
    assert_close(moved, winning_probabilities(mean, covariance), rtol=2 * QMC, atol=1e-30)


@settings(max_examples=25, deadline=None)
@given(PROBLEMS, st.integers(0, 6), st.floats(0.1, 2))
def test_raising_a_mean_helps_its_class(problem, raised, by):
    mean, covariance = problem
    raised %= len(mean)
    higher = mean.clone()
    higher[raised] += by
    before, after = winning_probabilities(mean, covariance), winning_probabilities(higher, covariance)
    assert float(after[raised]) >= float(before[raised]) * (1 - 2 * QMC)


@settings(max_examples=100, deadline=None)
@given(st.floats(-5, 5), st.floats(-5, 5), st.floats(-0.99, 0.99))
def test_corner_distance_is_the_smallest_distance(a, b, rho):
    """On a grid of the quadrant nothing is nearer, and something is nearly as near."""
    x, y = np.meshgrid(a + np.linspace(0, 12, 601), b + np.linspace(0, 12, 601))
    nearest = np.sqrt(((x * x - 2 * rho * x * y + y * y) / (1 - rho**2)).min())
    distance = float(corner_distance(tensor(a), tensor(b), tensor(rho)))
    assert distance <= nearest + 1e-9
    assert distance >= nearest - 0.02 * 2 / math.sqrt(1 - rho**2)  # a grid step, in the metric's largest scale


def test_dropping_rivals_changes_nothing(monkeypatch):
    mean, covariance = random_problem(3, 12, 5, spread=3.0)
    dropped = winning_probabilities(mean, covariance)
    monkeypatch.setattr(Contest, "relevance", lambda self: (self.lead < math.inf).to(F64))
    kept = winning_probabilities(mean, covariance)
    assert_close(dropped, kept, rtol=QMC, atol=1e-30)


def test_without_noise_the_first_largest_wins():
    mean = tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0], [5.0, -1.0, 4.0, 4.0]])
    chance = winning_probabilities(mean, torch.zeros(4, 4, dtype=F64))
    assert chance.tolist() == torch.nn.functional.one_hot(mean.argmax(-1), 4).tolist()


def test_common_noise_alone_decides_nothing():
    assert winning_probabilities(tensor([1.0, 1.5, 1.5]), torch.full((3, 3), 2.0, dtype=F64)).tolist() == [0, 1, 0]


def test_twins_share_one_probability_and_the_first_takes_it():
    mean, covariance = random_problem(4, 4)
    twin = [0, 1, 2, 3, 1]
    chance = winning_probabilities(mean, covariance)
    expected = torch.cat([chance, tensor([0.0])])
    assert_close(winning_probabilities(mean[twin], covariance[twin][:, twin]), expected, rtol=QMC)


def test_one_noise_direction_is_a_maximum_of_lines():
    """y = mean + slope·f: class k wins on an interval of f."""
    mean, slope = tensor([0.0, 0.5, -1.0, 0.3, -0.2]), tensor([0.0, 1.0, 2.0, -1.0, -3.0])
    f = torch.linspace(-9, 9, 2_000_001, dtype=F64)
    best = (mean[:, None] + slope[:, None] * f).argmax(0)
    edges = tensor([-math.inf, *((f[1:] + f[:-1]) / 2)[best[1:] != best[:-1]].tolist(), math.inf])
    expected = torch.zeros(5, dtype=F64)
    owners = torch.cat([best[:1], best[1:][best[1:] != best[:-1]]])
    expected[owners] = torch.special.ndtr(edges[1:]) - torch.special.ndtr(edges[:-1])
    assert_close(winning_probabilities(mean, torch.outer(slope, slope)), expected, atol=1e-5)  # the grid's step


@pytest.mark.parametrize("rank", [2, 3, 5])
def test_low_rank_covariance_against_samples(rank):
    generator, count = torch.Generator().manual_seed(rank), 2**18
    factor = torch.randn(10, rank, dtype=F64, generator=generator)
    mean = 0.5 * torch.randn(10, dtype=F64, generator=generator)
    winner = (mean + torch.randn(count, rank, dtype=F64, generator=generator) @ factor.T).argmax(-1)
    sampled = torch.bincount(winner, minlength=10).double() / count
    exact = winning_probabilities(mean, factor @ factor.T, points=8192)
    error = (exact * (1 - exact) / count).sqrt() + 2e-3 * exact / 5 + 1 / count  # as above; and a class never drawn
    assert_within_standard_errors(sampled, exact, error)


@pytest.mark.parametrize("jitter", [1e-4, 1e-8, 1e-12, 1e-16])
def test_almost_singular_is_close_to_singular(jitter):
    mean, factor = tensor([0.0, 0.5, -0.5, 0.2, 0.1]), random_problem(9, 5)[1][:, :2]
    singular = winning_probabilities(mean, factor @ factor.T)
    near = winning_probabilities(mean, factor @ factor.T + jitter * torch.eye(5, dtype=F64))
    assert_close(near, singular, rtol=QMC, atol=QMC + math.sqrt(jitter))


@pytest.mark.parametrize("classes", [2, 3, 8])
def test_a_batch_is_its_images(classes):
    mean, covariance = random_problem(0, classes, 2, 3, spread=2.0)
    chance = winning_probabilities(mean, covariance, memory_budget=2**20)
    assert chance.shape == mean.shape
    for at in np.ndindex(2, 3):
        assert_close(winning_probabilities(mean[at], covariance[at]), chance[at], rtol=1e-10, atol=1e-300)
    shared = winning_probabilities(mean, covariance[0, 0])
    assert_close(shared[1, 2], winning_probabilities(mean[1, 2], covariance[0, 0]), rtol=1e-10, atol=1e-300)


def test_the_same_whatever_the_random_state():
    problem = random_problem(1, 6, 4)
    torch.manual_seed(1)
    first, state = winning_probabilities(*problem), torch.get_rng_state()
    torch.manual_seed(2)
    assert torch.equal(first, winning_probabilities(*problem))
    torch.manual_seed(1)
    assert torch.equal(state, torch.get_rng_state())


def test_float32_is_rounded_float64():
    mean, covariance = random_problem(2, 5, 3, spread=2.0)
    mean, covariance = mean.float(), covariance.float()
    single = winning_probabilities(mean, covariance)
    assert single.dtype == torch.float32
    assert_close(single, winning_probabilities(mean.double(), covariance.double()), rtol=1e-5)


def test_losing_is_not_winning():
    mean, covariance = random_problem(5, 6, 4, spread=2.0)
    chance, label = winning_probabilities(mean, covariance), torch.tensor([0, 5, 2, 3])
    expected = 1 - chance.gather(-1, label[:, None]).squeeze(-1)
    assert_close(losing_probability(mean, covariance, label), expected, atol=1e-14)
    assert_close(losing_probability(mean, covariance, 3), 1 - chance[:, 3], atol=1e-14)


def test_a_thousand_classes():
    mean = torch.linspace(0, 30, 1000, dtype=F64)
    chance = winning_probabilities(mean, 0.04 * torch.eye(1000, dtype=F64), points=128)
    std, top = np.full(60, 0.2), mean[-60:].numpy()
    expected = [independent_winner(top, std, k) for k in range(40, 60)]
    assert_close(chance[-20:], expected, rtol=0.1)  # 128 points
    assert float(chance[0]) == 0


def test_there_are_no_gradients():
    mean, covariance = random_problem(0, 3)
    assert not winning_probabilities(mean.requires_grad_(), covariance).requires_grad


M, EYE = torch.zeros(3), torch.eye(3)
BAD = {
    "list": (lambda: winning_probabilities([0.0, 1.0], EYE), TypeError, "mean must be a torch tensor, got a list"),
    "half": (lambda: winning_probabilities(M.half(), EYE), TypeError, "float32 or float64"),
    "dtypes": (lambda: winning_probabilities(M, EYE.double()), TypeError, "must have one dtype"),
    "no classes": (lambda: winning_probabilities(M[:0], EYE[:0, :0]), ValueError, r"d ≥ 1, got .*\(0,\)"),
    "scalar": (lambda: winning_probabilities(M[0], EYE), ValueError, r"mean must have shape \(\.\.\., d\)"),
    "sizes": (lambda: winning_probabilities(M, torch.eye(4)), ValueError, r"\(\.\.\., 3, 3\).*got .*\(4, 4\)"),
    "batches": (lambda: winning_probabilities(torch.zeros(2, 3), EYE.expand(4, 3, 3)), ValueError, "broadcast"),
    "empty batch": (lambda: winning_probabilities(torch.zeros(0, 3), EYE), ValueError, "must not be empty"),
    "nan": (lambda: winning_probabilities(M * math.nan, EYE), ValueError, "mean must be finite, got 3 NaN"),
    "infinite": (lambda: winning_probabilities(M, EYE * math.inf), ValueError, "covariance must be finite"),
    "asymmetric": (
        lambda: winning_probabilities(M, EYE + 0.1 * torch.ones(3, 3).triu(1)),
        ValueError,
        "symmetric.*0.1",
    ),
    "negative": (lambda: winning_probabilities(M, -EYE), ValueError, "variances ≥ 0 on its diagonal, got -1"),
    "indefinite": (lambda: winning_probabilities(M, 4 - 3 * EYE), ValueError, "semidefinite, got .* variance -6"),
    "points": (lambda: winning_probabilities(M, EYE, points=0), ValueError, "points must be a positive integer, got 0"),
    "budget": (lambda: winning_probabilities(M, EYE, memory_budget=3), ValueError, "at least 65536, got 3"),
    "label": (lambda: losing_probability(M, EYE, 3), ValueError, "label must be between 0 and 2, got 3"),
    "negative label": (lambda: losing_probability(M, EYE, -1), ValueError, "between 0 and 2, got -1"),
    "float label": (lambda: losing_probability(M, EYE, 1.0), TypeError, "label must be an integer .*, got 1.0"),
    "label shape": (lambda: losing_probability(M, EYE, torch.tensor([0, 1])), ValueError, r"batch shape \(\)"),
    "losing": (lambda: losing_probability(M, torch.eye(4), 0), ValueError, "losing_probability: covariance"),
}


@pytest.mark.parametrize("case", list(BAD))
def test_bad_input(case):
    call, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        call()
