import math
from dataclasses import replace

import pytest
import torch

import netmoments as nm
from netmoments.flips.guide import guide
from netmoments.flips.importance import LineEstimation
from netmoments.flips.lines import REACH, WORTH, Faces, direction, line_variance, runs_for_unit_error
from netmoments.flips.search import Search
from tests.flips.classifiers import Ball, Corner, at_distance, linear, noisy_network, run_alone, tail
from tests.flips.test_guide import SIZE, surrogate


def two_faces(constant=4.0):
    """A guide of two curved surrogates, and points of it."""
    generator = torch.Generator().manual_seed(0)
    made = guide((surrogate(constant), surrogate(constant + 0.3, rival=2, seed=1)), generator)
    normal = torch.randn(40, SIZE, generator=generator)
    return made, made.draw(normal), generator


def estimation_of(network, noise, lines, rounds=1):
    """An estimate from so many lines, with the same guide for both searches and for all they know."""
    noisy = noisy_network(network, noise)
    search = run_alone(Search.from_noise(noisy))
    for _ in range(rounds):
        run_alone(search.advance())
    estimation = LineEstimation(noisy, (search.guide,) * 3)
    run_alone(estimation.run(lines))
    return estimation, search


def test_lines_go_against_the_slope():
    alpha = direction(surrogate(curved=0.0))
    torch.testing.assert_close(alpha, -surrogate().basis[:, 0].double())
    assert float(alpha.norm()) == pytest.approx(1)


def test_margins_along_lines_are_those_at_their_points():
    made, white, generator = two_faces()
    faces = Faces.of(made)
    face = faces.chosen(white, generator)
    starts = faces.starts(white, face)
    t = torch.linspace(-3, 5, len(white), dtype=torch.float64)
    along = faces.surrogate_margins_along(made.surrogates, starts, face, t.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(along, faces.surrogate_margins(faces.at(starts, face, t)), rtol=1e-4, atol=1e-4)


def test_the_density_of_lines_is_an_integral():
    """ρ_j by another rule on ten times as many places, with ρ and ω at each point; all faces together have ∫ φρ dt."""
    made, white, _ = two_faces()
    faces, white = Faces.of(made), white[:3]
    places = torch.linspace(-REACH, REACH, 4801, dtype=torch.float64)
    phi = torch.exp(-0.5 * places**2) / math.sqrt(2 * math.pi)
    for number in range(2):
        face = torch.full((3,), number)
        starts = faces.starts(white, face)
        points = [faces.at(start.expand(4801, -1), face[:1].expand(4801), places) for start in starts]
        values = [phi * made.ratio(x) * faces.belonging(faces.surrogate_margins(x))[:, number] for x in points]
        expected = torch.stack([torch.trapezoid(value, places) for value in values])
        torch.testing.assert_close(faces.line_ratio(made, white, face), expected, rtol=2e-3, atol=0.0)


@pytest.mark.parametrize("wrong", [0.0, 2.0, -2.0])
def test_what_a_line_shows_is_unbiased_whatever_was_expected(wrong):
    """Half of a line leaves a ball: P = Φ(−√(r² − |e|²)), whatever the surrogate and the first run say of where."""
    made = guide((surrogate(2.5, curved=0.0),), torch.Generator().manual_seed(0))
    faces, generator = Faces.of(made), torch.Generator().manual_seed(1)
    white = torch.randn(1, SIZE, generator=generator).expand(4_000, -1)
    lines = faces.lines((made,), (1.0,), white, torch.zeros(4_000, dtype=torch.long))
    cell = lines.first_places()
    here = faces.surrogate_margins(lines.at(faces.places[cell]))
    seen = torch.stack([torch.full((4_000,), torch.inf, dtype=torch.float64), here[:, 0] + wrong], 1)
    t, weight = lines.drawn(lines.second_chances(cell, seen), generator)
    start = lines.starts[0].double()
    radius = math.sqrt(float(start.square().sum()) + 1.5**2)
    values = torch.where((lines.at(t).norm(dim=1) > radius) & (t > 0), weight, 0.0)
    error = float(values.std()) / math.sqrt(len(values))
    assert abs(float(values.mean()) - tail(1.5)) < 5 * error


@pytest.mark.parametrize("distance", [3.0, 7.9])
def test_a_linear_classifier_by_lines(distance):
    network = linear()
    estimation, _ = estimation_of(network, nm.Gaussian(at_distance(network, distance), std=1.0), 400)
    found = estimation.estimate()
    assert abs(found.probability - tail(distance)) < 5 * found.careful_error
    assert found.error < 0.1 * tail(distance)
    assert estimation.network.runs >= 2 * 400


def test_flips_on_all_sides_by_lines():
    """Outside of a ball: P(χ²₃ > r²) = 2Φ(−r) + √(2/π) r exp(−r²/2)."""
    estimation, _ = estimation_of(Ball(5.0).eval(), nm.Gaussian(torch.full((3,), 1e-3), std=1.0), 1000)
    truth, found = 2 * tail(5) + math.sqrt(2 / math.pi) * 5 * math.exp(-12.5), estimation.estimate()
    assert abs(found.probability - truth) < 5 * found.careful_error


def test_lines_keep_counting_with_new_guides():
    """The estimate is that of the mixture of old and new guides, along the lines of the first."""
    estimation, search = estimation_of(Corner(4.0, 4.1).eval(), nm.Gaussian(torch.zeros(6), std=1.0), 400)
    run_alone(search.advance())
    estimation.go_on_with((search.guide,) * 3)
    run_alone(estimation.run(600))
    assert estimation.samples == 1000
    flipped = torch.cat(estimation.flips) > 0
    white, face = torch.cat(estimation.flipped), torch.cat(estimation.faces_of_flips)
    shares = torch.tensor([0.08, 0.08, 0.24, 0.12, 0.12, 0.36]).double()
    ratios = [estimation.faces.line_ratio(guide, white, face) for guide in estimation.guides]
    torch.testing.assert_close(estimation.mixture_ratios()[flipped], torch.stack(ratios, 1) @ shares, rtol=1e-3, atol=0)
    found, truth = estimation.estimate(), Corner.probability(4.0, 4.1)
    assert abs(found.probability - truth) < 5 * found.careful_error
    assert float(estimation.wins(2).sum()) == pytest.approx(found.probability)
    for number in (0, 1):
        alone = estimation.estimate_of_search(number)
        assert abs(alone.probability - truth) < 5 * alone.careful_error


def test_lines_where_they_pay():
    assert runs_for_unit_error(WORTH) == WORTH
    assert runs_for_unit_error(100.0) == 2 * line_variance(100.0) < 100.0


def test_a_first_run_says_nothing_of_the_other_face_of_its_rival():
    """Two faces at z = ±4 of one rival: second runs are near 4 on lines of the first, where the first run was right."""
    one = surrogate(curved=0.0)
    two = replace(one, slope=-one.slope)
    generator = torch.Generator().manual_seed(0)
    made = guide((one, two), generator)
    faces = Faces.of(made)
    white = made.draw(torch.randn(200, SIZE, generator=generator))
    lines = faces.lines((made,), (1.0,), white, faces.chosen(white, generator))
    cell = lines.first_places()
    strongest = faces.surrogate_margins(lines.at(faces.places[cell])).amin(1, keepdim=True)
    t, _ = lines.drawn(
        lines.second_chances(cell, torch.cat([torch.full_like(strongest, 9.0), strongest], 1)), generator
    )
    assert float(((t > 3.9) & (t < 5.5)).double().mean()) > 0.6
