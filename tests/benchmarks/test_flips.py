"""Measurements of flips: networks whose flips are known, the search for σ, and the tables."""

from __future__ import annotations

import json
import math

import pytest
import torch

import netmoments as nm
from benchmarks import flips
from benchmarks.flips import SHAPES, Case, flips_of, mass_between, next_inverse, normal_quantile, threshold_at

NAMED = {shape.name: shape for shape in SHAPES}


def tail(x: float) -> float:
    """Φ(−x)."""
    return 0.5 * math.erfc(x / math.sqrt(2))


@pytest.mark.parametrize("x", [0.0, 1.0, 3.0, 5.0, 7.9])
@pytest.mark.parametrize(
    ("name", "expected", "accuracy"),
    [
        ("linear", tail, 1e-12),
        ("both sides", lambda x: 2 * tail(x), 1e-6),
        ("both sides, uneven", lambda x: tail(x) + tail(x / 0.9), 1e-5),
        ("steeper at 3", lambda x: tail(min(5 * x, (x + 3) / 1.2)), 1e-10),
        ("flatter at 3", lambda x: tail(x if x < 3 else 3 + (x - 3) / 0.3), 1e-10),
        ("larger of two", lambda x: tail(x) * (2 - tail(x)), 1e-5),
        ("smaller of two", lambda x: tail(x) ** 2, 1e-3),
    ],
)
def test_known_flips_by_the_normal_distribution(name, expected, accuracy, x):
    """Quadrature over panels of 0.04 meets a kink in one of them: its error is of second order in that."""
    assert flips_of(NAMED[name], x) == pytest.approx(expected(x), rel=accuracy)


@pytest.mark.parametrize("name", ["sum of two", "random 0", "random 1"])
def test_known_flips_by_samples_of_the_network(name):
    shape, samples = NAMED[name], 100_000
    network = shape.network(threshold_at(shape, 0.03))
    noise = torch.randn(samples, flips.SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        scores = network(noise)
    share = float((scores[:, 1] > scores[:, 0]).double().mean())
    assert abs(share - 0.03) < 5 * math.sqrt(0.03 / samples)


@pytest.mark.parametrize("probability", [0.3, 1e-3, 1e-9, 1e-15])
def test_thresholds(probability):
    assert threshold_at(NAMED["linear"], probability) == pytest.approx(-normal_quantile(probability), rel=1e-9)
    assert flips_of(NAMED["random 1"], threshold_at(NAMED["random 1"], probability)) == pytest.approx(probability)


def test_mass_in_both_tails():
    ends = torch.tensor([[7.0, 8.0], [-8.0, -7.0], [-1.0, 1.0]], dtype=torch.float64)
    expected = [tail(7) - tail(8), tail(7) - tail(8), 1 - 2 * tail(1)]
    assert mass_between(*ends.T).tolist() == pytest.approx(expected, rel=1e-12)


def test_the_next_noise_lies_on_the_line_through_points_on_both_sides():
    assert next_inverse([(2.0, -1.0), (6.0, -5.0)], -3.0) == pytest.approx(4.0)
    assert next_inverse([(2.0, -1.0), (9.0, -9.0), (6.0, -5.0)], -3.0) == pytest.approx(4.0)
    assert next_inverse([(2.0, -1.0)], -1.5) == pytest.approx(2 * 1.5 * 1.05)  # through 0, and a little further
    assert next_inverse([(2.0, -1.0)], -30.0) == pytest.approx(4.0)
    assert next_inverse([(2.0, 0.5)], 1.0) == pytest.approx(1.0)


def linear_case(sigma: float) -> Case:
    """Flips where the first input is above 1."""
    network = torch.nn.Linear(3, 2).eval()
    network.weight.data = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    network.bias.data = torch.tensor([1.0, 0.0])
    return Case("linear", 0, network, torch.zeros(3), sigma)


def test_noise_is_found_at_which_flips_are_as_rare_as_wanted():
    for wanted, start in ((0.3, 1.0), (1e-6, 0.3)):
        found = flips.with_flips(linear_case(start), wanted)
        assert found is not None
        assert abs(normal_quantile(tail(1 / found.sigma)) - normal_quantile(wanted)) < 2 * flips.NEAR


class OneSubject:
    """In place of `Subjects`."""

    def __init__(self, *_: object) -> None:
        pass

    def cases(self, *_: object):
        yield linear_case(0.3)


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["table", "--networks", "linear", "--decades", "4", "--particles", "20"], "linear, 1e-4 … 1e-9: median"),
        (["coverage", "--shapes", "linear", "--probabilities", "1e-6", "--seeds", "2"], "of 2 intervals hold"),
        (["coverage", "--networks", "linear", "--truth", "20000", "--decades", "2", "9"], "of 1 intervals hold"),
        (["common", "--networks", "linear"], "of plain sampling's runs"),
        (["common", "--networks", "linear", "--truth", "20000"], "intervals hold the share of plain samples"),
    ],
)
def test_tables(words, shown, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(flips, "Subjects", OneSubject)
    monkeypatch.setattr(flips, "COMMON", (0.1, 0.3))
    flips.main([str(tmp_path), *words, "--record", str(tmp_path / "record.json")])
    assert shown in capsys.readouterr().out
    assert json.loads((tmp_path / "record.json").read_text())["rows"]


def test_an_error_is_printed_and_its_seed_left_out(capsys):
    def estimate(seed: int) -> nm.FlipProbability:
        if seed == 0:
            raise ZeroDivisionError("of nothing")
        return linear_case(1.0).estimate(seed)

    assert list(flips.answers(estimate, 2)) == [1]
    assert "seed 0: ZeroDivisionError: of nothing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("shape", "probability", "seed"),
    [("random 0", 1e-6, 4), ("random 0", 1e-4, 28), ("sum of two", 1e-9, 26), ("steeper at 3", 1e-12, 0)],
)
def test_pools_that_once_overflowed_hold_the_truth(shape, probability, seed):
    """Surrogates that bend down far away made ratios of densities infinite, and estimates wrong by up to 300."""
    (truth,) = flips.known_truths([shape], [probability])
    found = truth.estimate(seed)
    assert float(found.interval[0]) <= truth.probability <= float(found.interval[1])
    assert float(found.probability) == pytest.approx(probability, rel=0.3)
    assert bool(found.met)


def test_a_label_that_always_loses_takes_few_runs():
    network = torch.nn.Linear(2, 2, bias=False).eval()
    network.weight.data = torch.eye(2)
    found = nm.flip_probability(network, nm.Gaussian(torch.tensor([0.0, 200.0]), std=1.0), 0)
    assert float(found.probability) == 1.0
    assert float(found.interval[0]) > 0.9
    assert int(found.runs) < 1000
