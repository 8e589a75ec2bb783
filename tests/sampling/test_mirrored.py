"""A few mirrored pairs of samples: unbiased, with errors that hold, whatever the network and the noise."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import netmoments as nm
from netmoments.network.model import NetworkModel
from netmoments.sampling import mirrored
from netmoments.sampling.estimate import PairEstimate
from netmoments.sampling.mirrored import mirrored_moments, moments_of_sums, regressed_on_control, sums_of
from tests.closeness import assert_close
from tests.gaussians import KINDS, SIZE, structures
from tests.networks import seeded
from tests.sampling.kinds import KIND, Called, model_of

RUNS, SEEDS = 512, 60


def moments_of(network: nn.Module, noise: nm.Gaussian, runs: int = RUNS, seed: int = 1, **options) -> PairEstimate:
    flat = noise.flattened()
    model = NetworkModel.of_any(network, flat.mean, "test")
    options = {"outputs": None, "products": True, **options}
    return mirrored_moments(model, flat, runs=runs, seed=seed, **options)[0]


@pytest.mark.parametrize("kind", KIND)
def test_estimates_are_as_far_from_the_truth_as_their_errors_say(kind):
    """Their average over seeds against 300,000 plain samples, with the errors of both; and how many are within two of
    their errors of that average: 95 %, less what chance allows (four deviations of a binomial).
    """
    model, noise = model_of(kind)
    truth = nm.monte_carlo(model.network, noise, 300_000, seed=99)
    runs = [mirrored_moments(model, noise, None, RUNS, products=True, seed=seed)[0] for seed in range(SEEDS)]
    for name in ("mean", "variance"):
        values, squares = (
            torch.cat([getattr(run, which) for run in runs]) for which in (name, f"{name}_error_squared")
        )
        of_truth = getattr(truth, f"{name}_standard_error") ** 2
        z = (values.mean(0) - getattr(truth, name)) / (squares.mean(0) / SEEDS + of_truth).sqrt()
        assert float(z.abs().max()) < 4.5, (name, z)
        within = ((values - values.mean(0)).abs() <= 2 * squares.sqrt()).double().mean(0)
        assert float(within.min()) > 0.95 - 4 * math.sqrt(0.95 * 0.05 / SEEDS), (name, within)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("products", [True, False])
def test_every_structure_of_covariance(kind, products):
    """One ReLU, where the truth is known: within 5 errors, and 0 where there is no noise."""
    given = structures((3,))[kind]
    net = seeded(lambda: nn.Sequential(nn.Linear(SIZE, 9), nn.ReLU(), nn.Linear(9, 2)))
    exact = nm.output_moments(net, given, "two-stage", check=0)
    found = moments_of(net, given, products=products)
    assert found.second.shape == ((3, 2, 2) if products else (3, 2))
    second = exact.covariance if products else exact.variance
    for value, truth, squared in (
        (found.mean, exact.mean, found.mean_error_squared),
        (found.second, second, found.second_error_squared),
    ):
        assert bool(((value - truth).abs() <= 5 * squared.sqrt() + 1e-12).all())


def test_variances_are_those_in_the_covariances():
    (model, noise) = model_of("residual")
    whole, alone = (mirrored_moments(model, noise, None, 256, products=wanted, seed=3)[0] for wanted in (True, False))
    for name in ("mean", "variance", "mean_error_squared", "variance_error_squared"):
        assert_close(getattr(whole, name), getattr(alone, name), rtol=1e-4, what=name)


def test_an_affine_network_has_no_error_but_for_what_samples_cannot_have_shown():
    net = seeded(lambda: nn.Linear(SIZE, 3))
    given = structures()["dense"]
    found, exact = moments_of(net, given), nm.output_moments(net, given)
    assert_close(found.mean[0], exact.mean, rtol=1e-12, atol=1e-12)
    assert_close(found.second[0], exact.covariance, rtol=1e-9, atol=1e-12)
    deviation = exact.variance.sqrt()
    assert_close(found.mean_error_squared[0].sqrt(), deviation / RUNS, rtol=1e-6)


def test_sums_of_blocks_are_the_sums_of_all():
    """And the estimate from them is that of the formulas, written for single pairs."""
    torch.manual_seed(2)
    first, second, linear = torch.randn(3, 40, 2, 3, dtype=torch.float64) ** 3
    centre, known = torch.randn(2, 3, dtype=torch.float64), torch.rand(2, 3, 3, dtype=torch.float64)
    blocks = [sums_of(*(x[span] for x in (first, second, linear)), centre, True) for span in (slice(7), slice(7, 40))]
    total = mirrored.MirroredSums(*map(torch.add, *blocks))
    for part, whole in zip(total, sums_of(first, second, linear, centre, True), strict=True):
        assert_close(part, whole, rtol=1e-12, atol=1e-12)
    found = moments_of_sums(total, 40, centre, known)
    e, o = (first + second) / 2 - centre, (first - second) / 2
    target = (o.unsqueeze(-1) * o.unsqueeze(-2) + e.unsqueeze(-1) * e.unsqueeze(-2)).flatten(1)
    control = (linear.unsqueeze(-1) * linear.unsqueeze(-2)).flatten(1)
    mean, error = regressed(target, control, known.flatten())
    squares = torch.einsum("pei,qej->pqeij", e, e)
    squares = squares.sum((0, 1)) - squares.diagonal().sum(-1)
    assert_close(found.second, mean.reshape(2, 3, 3) - squares / (40 * 39), rtol=1e-9, atol=1e-12)
    assert_close(found.second_error_squared, error.reshape(2, 3, 3), rtol=1e-9)
    mean, error = regressed(e.flatten(1), linear.flatten(1) ** 2, known.diagonal(dim1=1, dim2=2).flatten())
    assert_close(found.mean, mean.reshape(2, 3) + centre, rtol=1e-9)
    assert_close(found.mean_error_squared, error.reshape(2, 3), rtol=1e-9)


def regressed(y: Tensor, u: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """The fitted value of y where u is `known`, and the squared error of its mean, by torch's least squares."""
    values, errors = [], []
    for target, control, at in zip(y.T, u.T, known, strict=True):
        design = torch.stack([torch.ones_like(control), control - at], 1)
        fit = torch.linalg.lstsq(design, target.unsqueeze(1)).solution
        values.append(fit[0, 0])
        errors.append((target - (design @ fit).squeeze(1)).square().mean() / (len(target) - 2))
    return torch.stack(values), torch.stack(errors)


def test_a_control_that_does_not_vary_is_none():
    y = torch.tensor([1.0, 2.0, 4.0, 5.0], dtype=torch.float64)
    constant = 3.0 * torch.ones_like(y)
    sums = y.sum(), (y * y).sum(), (y * constant).sum(), constant.sum(), (constant**2).sum()
    mean, error = regressed_on_control(4, *sums, torch.tensor(7.0))
    assert float(mean) == 3.0
    assert float(error) == pytest.approx(float(y.var(correction=0)) / 2)


def test_many_inputs_and_pairs_in_pieces(monkeypatch):
    """A piece of work that takes one pair of one input at a time gives other samples of the same moments."""
    net, given = (
        seeded(lambda: nn.Sequential(nn.Linear(SIZE, 9), nn.Tanh(), nn.Linear(9, 2))),
        structures((3,))["dense"],
    )
    together = moments_of(net, given)
    monkeypatch.setattr(mirrored, "elements_together", lambda kind, like, each: 1)
    apart = moments_of(net, given)
    assert apart.mean.shape == (3, 2)
    error = (together.mean_error_squared + apart.mean_error_squared).sqrt()
    assert bool(((together.mean - apart.mean).abs() < 5 * error).all())
    assert not torch.equal(together.mean, apart.mean)


def test_infinite_outputs_are_counted():
    net = seeded(lambda: Called(lambda z: torch.where(z > 2.5, torch.inf, z)), torch.float32)
    with pytest.raises(ValueError, match=r"[1-9]\d* of 480 samples gave NaN or infinite outputs \(output 0, 1, 2\)"):
        moments_of(net, nm.Gaussian(torch.zeros(6), std=2.0))


class Bounded(nn.Module):
    """A network that refuses inputs beyond 5."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        if bool((x.abs() > 5).any()):
            raise ValueError("beyond the range of the sensor")
        return self.last(x)


def test_a_network_may_refuse_wider_noise():
    found = moments_of(seeded(Bounded, torch.float32), nm.Gaussian(torch.zeros(6), std=0.8))
    assert bool((found.mean_error_squared > 0).all())


def test_few_runs_are_none_at_wider_noise(monkeypatch):
    drawn = []
    monkeypatch.setattr(mirrored.MirroredPairs, "residuals_at_wider_noise", lambda self: drawn.append(1))
    net, given = seeded(Bounded, torch.float32), nm.Gaussian(torch.zeros(6), 0.1)
    moments_of(net, given, runs=16)
    assert not drawn
    moments_of(net, given, runs=128)
    assert drawn


def test_gradients_that_are_not_finite_are_no_control():
    """√z, whose gradient torch multiplies with 0 where another branch is taken: 0·∞."""
    net = seeded(lambda: Called(lambda z: torch.where(z > 0, z.sqrt(), 0 * z)), torch.float32)
    given = nm.Gaussian(torch.zeros(6), std=2.0)
    found, truth = moments_of(net, given), nm.monte_carlo(net, given, 100_000)
    for name in ("mean", "variance"):
        off = (getattr(found, name)[0] - getattr(truth, name)).abs()
        assert bool((off < 5 * getattr(found, f"{name}_error_squared")[0].sqrt()).all())


def test_numbers_near_the_end_of_their_range():
    """Scores whose squares, or the sum of two of them, are beyond float32."""
    net = seeded(lambda: nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 2)), torch.float32)
    with torch.no_grad():
        for scale in (1e15, 1e38):
            net[-1].bias.fill_(2.0 * scale)
            net[-1].weight.copy_(net[-1].weight / net[-1].weight.abs().max() * 0.01 * scale)
            found = moments_of(net, nm.Gaussian(torch.zeros(6), std=1.0))
            assert bool(torch.isfinite(found.second_error_squared).all())
            assert bool((found.variance > 0).all())


def test_what_it_took_is_counted():
    model, noise = model_of("perceptron")
    assert [mirrored_moments(model, noise, None, runs, products=False, seed=0)[1] for runs in (16, 257)] == [16, 258]
    model, noise = model_of("without a gradient")
    assert mirrored_moments(model, noise, None, 256, products=False, seed=0)[1] == 256
