import math

import pytest
import torch

from netmoments.flips.guide import (
    FEW_DIRECTIONS,
    WIDE_DIRECTIONS,
    PlainNoise,
    Tilts,
    Widened,
    guide,
    joint_flip_chance,
    saddlepoint,
    stratified_choice,
    tilted_means,
    uncertainty,
)
from netmoments.flips.surrogate import Quadratic
from tests.flips.classifiers import tail

SIZE = 10


def surrogate(constant=4.0, spread=0.3, rival=1, seed=0, curved=0.2):
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(SIZE, 3, generator=generator)).Q
    slope = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    curvature = curved * torch.tensor([0.0, 1.0, -1.0], dtype=torch.float64)
    return Quadratic(rival, basis, constant, slope, curvature, spread)


def test_tilted_gaussians_have_the_density_they_say():
    """E_θ of exp(θq + K) over points of the tilted Gaussian is 1, and the mean of q there what is said."""
    quadratic = surrogate()
    thetas = torch.tensor([0.5, 1.0], dtype=torch.float64)
    tilts = Tilts.at(quadratic, thetas)
    for place in range(2):
        normal = torch.randn(200_000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(place))
        z = tilts.moved(torch.full((200_000,), place), normal)
        margin = quadratic.at(z)
        back = (-tilts.log_ratios(margin)[:, place]).exp()
        assert abs(float(back.mean()) - 1) < 5 * float(back.std()) / math.sqrt(len(back))
        error = 5 * float(margin.std()) / math.sqrt(len(margin))
        assert abs(float(margin.mean()) - float(tilted_means(quadratic, thetas)[place])) < error


@pytest.mark.parametrize("constant", [4.0, 0.5, -2.0])
def test_at_the_saddlepoint_the_surrogate_has_mean_zero(constant):
    quadratic = surrogate(constant)
    theta = saddlepoint(quadratic)
    assert math.copysign(1, theta) == math.copysign(1, constant)
    assert abs(float(tilted_means(quadratic, torch.tensor([theta], dtype=torch.float64)))) < 1e-6


def test_a_flat_surrogate_has_a_saddlepoint_all_the_same():
    flat = Quadratic(1, torch.zeros(SIZE, 1), 1.0, torch.zeros(1).double(), torch.zeros(1).double(), 1e-30)
    assert math.isfinite(saddlepoint(flat))


def test_expected_flips_of_a_linear_surrogate():
    """q = a + z with z ~ N(0, 1) and spread s: E Φ(−q/s) = Φ(−a/√(1 + s²))."""
    made = guide((surrogate(4.0, curved=0.0),), torch.Generator().manual_seed(0))
    assert abs(made.expected - tail(4 / math.sqrt(1.09))) < 5 * made.expected_error
    assert made.expected_error < 0.03 * made.expected
    assert made.shares == (1.0,)


def test_samples_have_the_density_they_say():
    """E_ρ[h/ρ] = E h, and E_ρ[1/ρ] is near 1 where plain samples can say so."""
    generator = torch.Generator().manual_seed(0)
    both = (surrogate(2.0), surrogate(2.5, rival=2, seed=1))
    made = guide(both, generator)
    white = made.draw(torch.randn(20_000, SIZE, generator=generator))
    terms = made.flip_chance(white) / made.ratio(white)
    error = math.hypot(float(terms.std()) / math.sqrt(len(terms)), made.expected_error)
    assert abs(float(terms.mean()) - made.expected) < 5 * error
    plain = torch.randn(100_000, SIZE, generator=generator)
    seen = made.flip_chance(plain)
    error = math.hypot(float(seen.std()) / math.sqrt(len(seen)), made.expected_error)
    assert abs(float(seen.mean()) - made.expected) < 5 * error
    assert abs(float(made.ratio(plain).mean()) - 1) < 0.05


def test_widened_noise_has_the_density_it_says():
    """The mean over widened points of the inverse ratio is 1, and their squared lengths c² as long along D."""
    directions = torch.linalg.qr(torch.randn(6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))).Q
    widened = Widened(directions, 2.0)
    normal = torch.randn(200_000, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    z = widened.moved(normal)
    back, squares = (-widened.log_ratios(widened.squares(z))).exp(), widened.squares(z)
    assert abs(float(back.mean()) - 1) < 5 * float(back.std()) / math.sqrt(len(back))
    assert abs(float(squares.mean()) - 8) < 5 * float(squares.std()) / math.sqrt(len(squares))
    assert torch.allclose(z - z @ directions @ directions.mT, normal - normal @ directions @ directions.mT)


def test_noise_is_widened_where_surrogates_vary_and_until_they_expect_flips():
    """By 2.5, q = 4 + z is below 0 for 5.5 % of the points; a spread of the surrogate adds a little."""
    made = guide((surrogate(4.0, curved=0.0),), torch.Generator().manual_seed(0))
    assert made.widened.factor == 2.5
    along = made.widened.directions.mT @ made.local_bases[0] @ made.surrogates[0].slope
    assert float(along.norm()) == pytest.approx(1, abs=1e-6)
    for size, wide in ((12, WIDE_DIRECTIONS), (FEW_DIRECTIONS + 1, 0)):
        slope = torch.arange(float(size), dtype=torch.float64)
        basis = torch.linalg.qr(
            torch.randn(50, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        ).Q
        many = guide((Quadratic(1, basis, 9.0, slope, 0 * slope, 0.1),), torch.Generator().manual_seed(0), 1000)
        assert many.widened.directions.shape == (size, wide)


def test_joint_failing_is_accurate_where_it_is_small():
    margins = torch.tensor([[8.0, 40.0], [8.0, 8.0]], dtype=torch.float64)
    found = joint_flip_chance(margins, torch.ones(2, dtype=torch.float64))
    assert float(found[0]) == pytest.approx(tail(8), rel=1e-9)
    assert float(found[1]) == pytest.approx(2 * tail(8), rel=1e-9)


def test_uncertainty_is_largest_in_between():
    chances = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    values = uncertainty(chances, common=False)
    assert values[0] == 0
    assert values[1] > values[2] > 0
    values = uncertainty(chances, common=True)
    assert values[0] == values[2] == 0
    assert values[1] == pytest.approx(math.sqrt(0.25 + 0.05))


def test_even_nets_know_how_often_flips_are_expected():
    """Φ(−a/√(1 + s²)) for a linear surrogate; for two, with curvature, as 400,000 plain points have it."""
    generator = torch.Generator().manual_seed(0)
    one = guide((surrogate(1.0, curved=0.0),), generator, 4000)
    sharp = one.averaged_over_nets()
    assert one.common
    assert abs(sharp.expected - tail(1 / math.sqrt(1.09))) < 5 * sharp.expected_error
    assert sharp.expected_error < 0.2 * one.expected_error
    two = guide((surrogate(1.0), surrogate(0.5, rival=2, seed=1)), generator, 4000)
    seen = two.flip_chance(torch.randn(400_000, SIZE, generator=generator))
    sharp = two.averaged_over_nets()
    error = math.hypot(float(seen.std()) / math.sqrt(len(seen)), sharp.expected_error)
    assert abs(sharp.expected - float(seen.mean())) < 5 * error


def test_choices_follow_their_chances():
    chance = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64)
    found = stratified_choice(chance, 1000, torch.Generator().manual_seed(0)).bincount(minlength=3)
    assert (found - torch.tensor([100, 200, 700])).abs().max() <= 1


def test_plain_noise_is_itself():
    normal = torch.randn(4, 3)
    assert PlainNoise().draw(normal) is normal
    assert PlainNoise().ratio(normal).tolist() == [1.0] * 4
    assert PlainNoise().flip_chance(normal).tolist() == [0.0] * 4


@pytest.mark.parametrize("above", [0.0, 0.4])
def test_surrogates_are_calibrated_by_plain_samples(above):
    """Margins that are above a linear surrogate q = 1 + z with mean m and deviation d: h = Φ(−(q + m)/d).

    Its mean is Φ(−(1 + m)/√(1 + d²)) to the rounding of the directions, 1e-6. Samples have the density they say.
    """
    generator = torch.Generator().manual_seed(0)
    fitted = guide((surrogate(1.0, curved=0.0),), generator)
    white = torch.randn(4000, SIZE, generator=generator)
    rest = torch.randn(4000, generator=generator, dtype=torch.float64)
    rest = above + 0.7 * (rest - rest.mean()) / rest.std()
    smallest = fitted.surrogate_margins(fitted.coordinates(white)).amin(1) + rest
    calibrated = fitted.calibrated(white, smallest).averaged_over_nets()
    assert calibrated.calibration == pytest.approx((above, 0.7), abs=1e-6)
    truth = tail((1 + above) / math.sqrt(1 + 0.7**2))
    assert abs(calibrated.calibrated_expected[0] - truth) < 5 * calibrated.calibrated_expected[1] + 1e-6
    assert calibrated.expected == pytest.approx(tail(1 / math.sqrt(1.09)), abs=5 * calibrated.expected_error + 1e-6)
    plain = torch.randn(100_000, SIZE, generator=generator)
    ratio = calibrated.ratio(plain)
    assert abs(float(ratio.mean()) - 1) < 0.03
    drawn = calibrated.draw(torch.randn(20_000, SIZE, generator=generator))
    terms = calibrated.calibrated_flip_chance(drawn) / calibrated.ratio(drawn)
    assert abs(float(terms.mean()) - truth) < 5 * float(terms.std()) / math.sqrt(len(terms))


def test_a_calibrated_deviation_is_within_its_limits():
    generator = torch.Generator().manual_seed(0)
    made = guide((surrogate(1.0, curved=0.0),), generator, 4000)
    white = torch.randn(64, SIZE, generator=generator)
    exact = made.surrogate_margins(made.coordinates(white)).amin(1)
    assert made.calibrated(white, exact).calibration == pytest.approx((0.0, made.spreads[0][1]), abs=1e-12)
    other = 0.1 * torch.randn(64, generator=generator, dtype=torch.float64)
    assert made.calibrated(white, other).calibration[1] == pytest.approx(max(float(other.std()), made.spreads[0][1]))


def test_a_guide_that_is_sure_of_everything_still_has_a_density():
    """Margins are so far above or below the surrogates that no point of the pool would flip, or every one."""
    generator = torch.Generator().manual_seed(0)
    made = guide((surrogate(1.0, curved=0.0),), generator, 4000)
    white = torch.randn(64, SIZE, generator=generator)
    for far in (-200.0, 200.0):
        sure = made.calibrated(white, made.surrogate_margins(made.coordinates(white)).amin(1) + far)
        assert bool((sure.ratio(white) > 0).all())
        assert bool(torch.isfinite(sure.ratio(white)).all())
        assert float(sure.chances.sum()) == pytest.approx(1)


def test_a_pool_that_is_filled_anew_has_other_points_of_the_same_density():
    """The mean of h/ρ over samples is E h, within five standard errors of samples and pool."""
    generator = torch.Generator().manual_seed(0)
    made = guide((surrogate(),), generator, 8000)
    again = made.refilled()
    assert again.pool.shape == made.pool.shape
    assert not torch.equal(again.pool, made.pool)
    white = again.draw(torch.randn(4000, SIZE, generator=generator))
    torch.testing.assert_close(again.ratio(white), made.ratio(white))
    terms = made.flip_chance(white) / made.ratio(white)
    error = math.hypot(float(terms.std()) / math.sqrt(4000), math.sqrt(2) * made.expected_error)
    assert abs(float(terms.mean()) - made.expected) < 5 * error
