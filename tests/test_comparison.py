"""`tightness`: all methods beside Monte Carlo in one table; and expected scores by every method."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import netmoments as nm
from benchmarks.baselines import by_series, unscented
from netmoments.covariances import Dense, Isotropic
from netmoments.moments.output_moments import plan_of
from netmoments.propagate.layerwise import gaussian_layerwise

METHODS = {
    "layerwise", "sketch", "two-stage", "sampling, 10,000", "sampling, 1,000",
    "sampling, 1,000, control sketch", "sampling, 1,000, control two-stage", "sampling, 1,000, control linear",
    "linear (delta method)", "ADF (diagonal)", "unscented", "series, 4 terms",
}  # fmt: skip


def deep() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 3)
    return nn.Sequential(*layers).double().eval()


def noise(std: float = 0.3) -> nm.Gaussian:
    mean = torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return nm.Gaussian(mean, std=std)


@pytest.fixture(scope="module")
def table() -> nm.Tightness:
    return nm.tightness(deep(), noise(), samples=50_000)


def test_every_method_is_in_the_table(table):
    assert {row.method for row in table.rows} == METHODS
    assert all(row.note == "" and row.seconds >= 0 for row in table.rows)
    for row in table.rows:
        assert row.method in str(table)


def test_the_errors_are_as_they_must_be(table):
    assert table["layerwise"].variance_error < 0.5 * table["linear (delta method)"].variance_error
    assert table["sampling, 1,000, control sketch"].variance_error < table["sampling, 1,000"].variance_error
    assert table["ADF (diagonal)"].variance_error > 5 * table["layerwise"].variance_error


def test_the_floor_is_that_of_the_samples(table):
    """Gaussian scores would have 2|δ|/… ≈ √(2/n)·√(2/π) on average; these are near that."""
    assert table.variance_floor == pytest.approx((2 / 50_000) ** 0.5 * (2 / torch.pi) ** 0.5, rel=0.3)


def test_what_cannot_be_done_has_a_note():
    network = nn.Sequential(nn.Linear(6, 5), nn.Softmax(1), nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 2)).double().eval()
    with pytest.warns(UserWarning, match="smooth"):
        found = nm.tightness(network, noise(), samples=2000)
    assert "no rule for softmax" in found["layerwise"].note
    assert found["sketch"].note == ""
    assert "no rule for softmax" in str(found)
    with pytest.raises(KeyError, match="is not among"):
        found["two stages"]
    with pytest.raises(TypeError, match=r"noise must be a netmoments\.Gaussian"):
        nm.tightness(network, torch.zeros(6))


def test_the_unscented_transform_is_exact_for_quadratic_functions_in_the_mean():
    """E[xᵀMx] for a dense covariance, and the covariance of a linear function."""
    generator = torch.Generator().manual_seed(3)
    matrix, factor = (torch.randn(4, 4, dtype=torch.float64, generator=generator) for _ in range(2))
    mean = torch.randn(1, 4, dtype=torch.float64, generator=generator)
    covariance = factor @ factor.T

    def function(x: Tensor) -> Tensor:
        return torch.stack([((x @ matrix) * x).sum(-1), x[:, 0]], 1)

    found, spread = unscented(function, mean, Dense(covariance), torch.arange(2))
    expected = (mean[0] @ matrix @ mean[0]) + (matrix * covariance).sum()
    assert float(found[0]) == pytest.approx(float(expected), rel=1e-12)
    assert float(spread[1, 1]) == pytest.approx(float(covariance[0, 0]), rel=1e-12)


def test_four_terms_of_the_series_are_near_the_kernel_for_small_correlations():
    """What is cut off is of order ρ⁵: a hundredth of a per cent of the variance here."""
    network, x = deep(), noise().mean[:1]
    structure = Isotropic(torch.tensor(0.09, dtype=torch.float64), 6)
    plan, rows = plan_of(network, x, "test"), torch.arange(3)
    with torch.no_grad():
        _, series = by_series(plan, x, structure, rows)
        _, kernel = gaussian_layerwise(plan, x, structure, rows.unsqueeze(0))
    torch.testing.assert_close(series, kernel[0], rtol=0.02, atol=1e-4)
    assert not torch.equal(series, kernel[0])


@pytest.mark.parametrize("method", ["layerwise", "sketch"])
def test_expected_logits_by_other_methods(method):
    network, given = deep(), noise(0.2)
    model = nm.ExpectedLogits(network, 0.2, method=method)
    expected = nm.output_moments(network, given, method).mean
    torch.testing.assert_close(model(given.mean).detach(), expected, rtol=1e-12, atol=1e-12)
    shift = torch.zeros_like(given.mean).requires_grad_()
    slope, weight = torch.autograd.grad(model(given.mean, shift)[:, 1].sum(), (shift, network[0].weight))
    towards = torch.randn(shift.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        ahead, behind = (model(given.mean, sign * 1e-5 * towards)[:, 1].sum() for sign in (1, -1))
    assert float((slope * towards).sum()) == pytest.approx(float(ahead - behind) / 2e-5, rel=1e-5)
    assert bool(weight.any())


def test_expected_logits_refuse_what_does_not_go_together():
    with pytest.raises(ValueError, match="method must be one of two-stage, layerwise, sketch"):
        nm.ExpectedLogits(deep(), 0.1, method="exact")
    with pytest.raises(ValueError, match=r'are for method="two-stage"'):
        nm.ExpectedLogits(deep(), 0.1, at=noise().mean, method="layerwise")
