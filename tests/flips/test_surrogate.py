import pytest
import torch

from netmoments.flips.surrogate import (
    CAUTION,
    RIDGES,
    Evidence,
    fitted,
    leading_directions,
    means_of,
    principal_directions,
    regressed_slopes,
    regressed_values,
    relevance,
    ridge,
    split_by_face,
    surrogates_of,
    symmetric_ridge,
)


def quadratic_evidence(count=200, size=15, rank=4, noise=0.0, seed=0):
    """Runs of f = a + b·ε + ½ εᵀHε with H of low rank; the rest of the gradient is noise."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.linalg.qr(torch.randn(size, rank, generator=generator, dtype=torch.float64)).Q
    values = torch.tensor([0.8, -0.5, 0.4, 0.3], dtype=torch.float64)[:rank]
    hessian = (directions * values) @ directions.mT
    slope = torch.randn(size, generator=generator, dtype=torch.float64)
    white = torch.randn(count, size, generator=generator, dtype=torch.float64)
    margin = 3.0 + white @ slope + 0.5 * ((white @ hessian) * white).sum(1)
    gradients = slope + white @ hessian + noise * torch.randn(count, size, generator=generator, dtype=torch.float64)
    margins = torch.stack([torch.full_like(margin, torch.inf), margin], 1)
    return Evidence(white, margins, gradients, torch.ones(count, dtype=torch.long)), slope, hessian


def test_a_quadratic_margin_is_found_exactly():
    evidence, slope, hessian = quadratic_evidence()
    found = fitted(evidence, 1, 10)
    basis = found.basis
    torch.testing.assert_close(basis @ found.slope, slope, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(basis * found.curvature @ basis.mT, hessian, rtol=1e-2, atol=1e-2)
    fresh = torch.randn(50, 15, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    exact = 3.0 + fresh @ slope + 0.5 * ((fresh @ hessian) * fresh).sum(1)
    torch.testing.assert_close(found.at(found.coordinates(fresh)), exact, rtol=2e-2, atol=5e-2)
    assert found.spread <= 0.021 * found.deviation


def test_the_deviation_of_a_surrogate_under_the_noise():
    """√(|b|² + ½|H|²): the standard deviation of q, from 100,000 samples within five standard errors (1 %)."""
    found = fitted(quadratic_evidence()[0], 1, 10)
    z = torch.randn(100_000, len(found.slope), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert abs(float(found.at(z).std()) / found.deviation - 1) < 0.015


def test_a_basis_is_orthonormal_and_holds_the_mean_gradient():
    gradients = torch.randn(40, 20, generator=torch.Generator().manual_seed(0)) + 1
    basis = leading_directions(gradients, torch.ones(40, dtype=torch.float64), 6)
    assert basis.shape == (20, 6)
    torch.testing.assert_close(basis.mT @ basis, torch.eye(6), rtol=0, atol=1e-5)
    mean = gradients.mean(0)
    torch.testing.assert_close(basis @ (basis.mT @ mean), mean, rtol=1e-4, atol=1e-5)


def test_subspace_iteration_finds_what_a_decomposition_does():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(120, 90, generator=generator) * torch.logspace(0, -3, 90)
    found = principal_directions(rows, 5)
    right = torch.linalg.svd(rows.double()).Vh[:5].mT
    overlap = torch.linalg.svdvals(found.mT @ right)
    assert float(overlap.min()) > 0.99


def test_without_gradients_there_is_no_direction():
    assert principal_directions(torch.zeros(30, 8), 3).shape == (8, 0)
    basis = leading_directions(torch.zeros(30, 8), torch.ones(30, dtype=torch.float64), 3)
    assert not bool(basis.any())


def test_ridge_error_is_what_new_data_show():
    """The residual variance 0.25, from 400 rows: its own standard error is 0.25·√(2/400), five of them 0.09."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 10, generator=generator, dtype=torch.float64)
    truth = torch.randn(10, generator=generator, dtype=torch.float64)
    y = x @ truth + 0.5 * torch.randn(400, generator=generator, dtype=torch.float64)
    found, error = ridge(x, y, torch.full((400,), 1 / 400, dtype=torch.float64))
    assert abs(error - 0.25) < 0.09
    torch.testing.assert_close(found, truth, rtol=0, atol=5 * 0.5 / 20 * 1.1)


def symmetric_rows(count, size, noise):
    """Weighted rows x, and y = W x with a symmetric W, with noise."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, size, generator=generator, dtype=torch.float64)
    square = torch.randn(size, size, generator=generator, dtype=torch.float64)
    truth = 0.5 * (square + square.mT)
    share = torch.rand(count, generator=generator, dtype=torch.float64)
    y = x @ truth + noise * torch.randn(count, size, generator=generator, dtype=torch.float64)
    return x, y, share / share.sum(), truth


def test_symmetric_ridge_solves_its_equation_for_one_of_the_penalties():
    """CW + WC + 2λW = R + Rᵀ: what makes Σ share |y − W x|² + λ|W|² least among symmetric W."""
    x, y, share, _ = symmetric_rows(60, 8, noise=1.0)
    found = symmetric_ridge(x, y, share)
    square, product = x.mT @ (share.unsqueeze(1) * x), x.mT @ (share.unsqueeze(1) * y)
    torch.testing.assert_close(found, found.mT)
    left = product + product.mT - square @ found - found @ square
    penalties = left / (2 * found) / (square.trace() / 8)
    assert float((penalties / penalties.mean() - 1).abs().max()) < 1e-6
    assert min(abs(float(penalties.mean()) / each - 1) for each in RIDGES) < 1e-6


def test_what_is_seen_of_one_direction_counts_for_the_others():
    """25 points in 40 directions show all of W but its block of 15 by 15, which has (15/40)² of its square."""
    x, y, share, truth = symmetric_rows(25, 40, noise=0.0)
    missed = float((symmetric_ridge(x, y, share) - truth).square().sum() / truth.square().sum())
    assert missed < 1.5 * (15 / 40) ** 2


def test_relevance_falls_with_the_distance():
    margin = torch.tensor([0.0, 1.0, 5.0])
    assert relevance(margin, torch.zeros(3), 1.0).tolist() == pytest.approx([1.0, 0.5, 1 / 26])
    assert float(relevance(torch.zeros(1), torch.tensor([1.0]), 1.0)) == 0.5


def test_two_faces_of_a_boundary_are_told_apart():
    evidence = quadratic_evidence(noise=0.05)[0]
    assert len(split_by_face(evidence)) == 1
    two = torch.zeros(60, 15, dtype=torch.float64)
    two[:20, 0], two[20:, 1] = 1.0, 1.0
    found = split_by_face(Evidence(two, two, two, torch.ones(60, dtype=torch.long)))
    assert sorted(map(len, found)) == [20, 40]


@pytest.mark.parametrize("faces", [3, 7, 20])
def test_many_faces_are_told_apart(faces):
    """Gradients that point along as many axes, with a little noise."""
    normal = torch.eye(faces, 25, dtype=torch.float64).repeat(6, 1)
    normal += 0.01 * torch.randn(normal.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = split_by_face(Evidence(normal, normal, normal, torch.ones(len(normal), dtype=torch.long)))
    assert len(found) == faces
    for face in found:
        assert len(face) == 6
        assert float(face.gradients.std(0).max()) < 0.1


def test_means_are_those_of_what_is_nearest():
    rows = torch.tensor([[0.0, 5.0], [0.2, 5.0], [-3.0, 0.0], [-3.0, 0.4]], dtype=torch.float64)
    nearest, left = means_of(rows, 2)
    assert nearest[0] == nearest[1] != nearest[2] == nearest[3]
    assert left == pytest.approx(0.02 + 0.08)


def evidence_of(white, margin, gradients):
    """Runs with one rival, of number 1."""
    margins = torch.stack([torch.full_like(margin, torch.inf), margin], 1)
    return Evidence(white, margins, gradients, torch.ones(len(white), dtype=torch.long))


def test_two_faces_are_two_surrogates_where_these_tell_the_values():
    """The margin 2 − |ε₀| has two faces."""
    white = torch.randn(60, 15, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gradients = torch.zeros_like(white)
    gradients[:, 0] = -white[:, 0].sign()
    found = surrogates_of(evidence_of(white, 2 - white[:, 0].abs(), gradients), 1)
    assert len(found) == 2
    lowest = torch.stack([each.at(each.coordinates(white)) for each in found]).amin(0)
    torch.testing.assert_close(lowest, 2 - white[:, 0].abs(), rtol=0, atol=0.01)


def test_gradients_that_point_two_ways_are_one_surrogate_where_values_say_so():
    """A margin 4 − ε₀ with a small wiggle: a third of the runs are where it is steep, and say nothing of elsewhere."""
    white = torch.randn(60, 15, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    white[::3, 1] *= 0.02
    gradients = torch.zeros_like(white)
    gradients[:, 0] = -1
    gradients[::3, 1] = -3
    evidence = evidence_of(white, 4 - white[:, 0], gradients)
    assert len(split_by_face(evidence)) == 2
    assert len(surrogates_of(evidence, 1)) == 1


def test_the_spread_is_that_of_runs_near_the_boundary():
    """Half of 400 values have noise of deviation 0.3, the others, with a seventh of the weight, of deviation 3."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(400, 3, generator=generator, dtype=torch.float64)
    far = torch.arange(400) % 2 == 1
    noise = torch.where(far, 3.0, 0.3) * torch.randn(400, generator=generator, dtype=torch.float64)
    weight = torch.where(far, 1 / 7, 1.0).double()
    *_, spread = regressed_values(z, 1 + z[:, 0] + noise, weight)
    of_all, squares = (float((w * noise.square()).sum() / w.sum()) ** 0.5 for w in (weight, weight.square()))
    assert abs(spread / (CAUTION**0.5 * squares) - 1) < 0.1
    assert spread < 0.7 * of_all


def test_slopes_that_vary_more_may_bend_more():
    """H with eigenvalues 1, 1/2, 1/3, … from fewer gradients than it has numbers.

    In ten draws of slopes with noise of deviation 0.5 it comes nearer on average than with one penalty for all.
    """
    shares = []
    for seed in range(10):
        generator = torch.Generator().manual_seed(seed)
        hessian = torch.diag(1 / torch.arange(1.0, 41.0, dtype=torch.float64))
        z = torch.randn(100, 40, generator=generator, dtype=torch.float64)
        slopes = z @ hessian + 0.5 * torch.randn(100, 40, generator=generator, dtype=torch.float64)
        weight = torch.full((100,), 0.01, dtype=torch.float64)
        found, _ = regressed_slopes(z, slopes, weight)
        plain = symmetric_ridge(z - z.mean(0), slopes - slopes.mean(0), weight)
        shares.append(float((found - hessian).norm() / (plain - hessian).norm()))
    assert sum(shares) / 10 < 0.97


def test_slopes_in_other_units_bend_in_these():
    """H and b are proportional to the slopes, even where some of these never change."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(60, 5, generator=generator, dtype=torch.float64)
    slopes = z @ torch.diag(torch.tensor([1.0, 0.5, 0.1, 0.0, 0.0], dtype=torch.float64)) + 2.0
    weight = torch.ones(60, dtype=torch.float64)
    one, two = regressed_slopes(z, slopes, weight), regressed_slopes(z, 1e-6 * slopes, weight)
    for first, second in zip(one, two, strict=True):
        torch.testing.assert_close(1e6 * second, first, rtol=1e-9, atol=1e-9)
    flat, level = regressed_slopes(z, torch.full_like(z, 3.0), weight)
    assert float(flat.abs().max()) < 1e-12
    torch.testing.assert_close(level, torch.full((5,), 3.0, dtype=torch.float64))


def test_values_where_other_margins_were_differentiated_count():
    """Values vary by more than a quadratic function of the directions.

    Place and tilt of the boundary are known as well as all runs tell, not only the few with gradients of this margin.
    """
    every, slope, hessian = quadratic_evidence(count=600)
    generator = torch.Generator().manual_seed(5)
    every.margins[:, 1] += 2.0 * torch.randn(600, generator=generator, dtype=torch.float64)
    few, many = (Evidence(*(x[part] for x in vars(every).values())) for part in (slice(30), slice(30, None)))
    beside = Evidence(many.white, many.margins, torch.zeros_like(many.gradients), torch.zeros_like(many.rivals))
    fresh = torch.randn(400, 15, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    exact = 3.0 + fresh @ slope + 0.5 * ((fresh @ hessian) * fresh).sum(1)
    found = [fitted(few, 1, 8, more) for more in (beside, None)]
    errors = [float((one.at(one.coordinates(fresh)) - exact).square().mean().sqrt()) for one in found]
    assert errors[0] < 0.5 * errors[1]
    assert beside.without_rival(1).white.equal(beside.white)
    assert len(beside.without_rival(0)) == 0
