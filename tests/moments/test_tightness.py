"""`tightness`: all methods beside Monte Carlo in one table, those of others too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import netmoments as nm
from netmoments.moments.tightness import our_methods
from tests.networks import seeded

OURS = {
    "auto", "layerwise", "sketch", "two-stage", "sampling, 10,000", "sampling, 1,000",
    "sampling, 1,000, control sketch", "sampling, 1,000, control two-stage", "sampling, 1,000, control linear",
    "linear (delta method)",
}  # fmt: skip


def by_the_paper(network: nn.Module, noise: nm.Gaussian, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Someone else's method: moments of the chosen scores by the exact formulas at the mean."""
    g = nm.two_stage(network, noise.mean, outputs=indices)
    return g.mean(noise), g.variance(noise)


def refusing(network: nn.Module, noise: nm.Gaussian, indices: Tensor) -> tuple[Tensor, Tensor]:
    raise ValueError("not for such a network; use another")


@pytest.fixture(scope="module")
def network() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 3)))


@pytest.fixture(scope="module")
def noise() -> nm.Gaussian:
    mean = torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return nm.Gaussian(mean, std=0.3)


@pytest.fixture(scope="module")
def table(network, noise) -> nm.Tightness:
    others = {"the paper's": by_the_paper, "refusing": refusing}
    return nm.tightness(network, noise, methods={**our_methods(1), **others}, samples=50_000)


def test_every_method_is_in_the_table(table):
    assert {row.method for row in table.rows} == {*OURS, "the paper's", "refusing"}
    assert set(our_methods()) == OURS
    for row in table.rows:
        assert row.method in str(table)
        assert row.note == "" or row.method == "refusing"
        assert row.seconds is None or row.seconds >= 0
    assert str(table).splitlines()[0].split("  ")[0] == "method"
    assert "floor of 50,000 samples" in str(table)


def test_the_errors_are_as_they_must_be(table):
    assert table["layerwise"].variance_error < 0.5 * table["linear (delta method)"].variance_error
    assert table["sampling, 1,000, control sketch"].variance_error < table["sampling, 1,000"].variance_error


def test_someone_else_s_method_has_a_row(table):
    ours, theirs = table["two-stage"], table["the paper's"]
    assert theirs.variance_error == pytest.approx(ours.variance_error, rel=1e-9)
    assert theirs.mean_error == pytest.approx(ours.mean_error, rel=1e-9)
    assert (table["refusing"].mean_error, table["refusing"].note) == (None, "not for such a network")
    assert "not for such a network" in str(table)


def test_the_floor_is_that_of_the_samples(table):
    """Gaussian scores would have 2|δ|/… ≈ √(2/n)·√(2/π) on average; these are near that."""
    assert table.variance_floor == pytest.approx((2 / 50_000) ** 0.5 * (2 / torch.pi) ** 0.5, rel=0.3)


def test_methods_of_one_s_own_choice(network, noise):
    found = nm.tightness(network, noise, 2, methods=["linear", nm.Sketch(probes=32), nm.Layerwise()], samples=2000)
    assert [row.method for row in found.rows] == ["linear", "Sketch(probes=32, seed=0)", "layerwise"]
    sampled = nm.output_moments(network, noise, nm.Sampling(2000), 2)
    linear = nm.output_moments(network, noise, "linear", sampled.outputs)
    error = float(nm.relative_difference(linear.variance, sampled.variance).mean())
    assert found["linear"].variance_error == pytest.approx(error, rel=1e-9)
    assert nm.tightness(nm.NetworkModel(network, noise.mean), noise, 2, methods=["linear"], samples=2000)[
        "linear"
    ].variance_error == pytest.approx(error, rel=1e-9)


def test_short_names_by_the_name_of_a_row_or_alone(network, noise):
    assert nm.tightness(network, noise, methods={"at the mean": "linear"}, samples=2000)["at the mean"].note == ""
    assert [row.method for row in nm.tightness(network, noise, methods="linear", samples=2000).rows] == ["linear"]


class Sorted(nn.Module):
    """An operator without a rule."""

    def forward(self, x):
        return x.sort(1).values


def test_what_cannot_be_done_has_a_note(noise):
    network = seeded(lambda: nn.Sequential(nn.Linear(6, 5), Sorted(), nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 2)))
    found = nm.tightness(network, noise, samples=2000)
    assert "no rule for sort" in found["layerwise"].note
    assert found["sketch"].note == ""
    assert "no rule for sort" in str(found)
    with pytest.raises(KeyError, match="is not among"):
        found["two stages"]


def test_what_does_not_fit_has_a_note(network, noise):
    found = nm.tightness(network, noise, methods=["layerwise", "two-stage", "sketch"], samples=2000, memory_budget=1000)
    assert "needs" in found["layerwise"].note
    assert "may be used" in found["two-stage"].note
    assert found["sketch"].note == ""


def test_bad_input(network, noise):
    with pytest.raises(
        TypeError, match=r"tightness: noise must be a netmoments\.Gaussian, or .*, got a float32 tensor"
    ):
        nm.tightness(network, torch.zeros(6))
    with pytest.raises(ValueError, match=r"tightness: method must be one of .*got 'exact'"):
        nm.tightness(network, noise, methods=["exact"])
    with pytest.raises(ValueError, match=r"samples must be an integer of at least 2"):
        nm.tightness(network, noise, samples=1)
