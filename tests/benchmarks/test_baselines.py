"""What the field uses instead: known values, exact cases, Monte Carlo, and how they stand beside each other."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import netmoments as nm
from benchmarks.baselines import BASELINES, MOST_POINTS, adf, four_term_series, unscented
from netmoments.network.model import NetworkModel
from netmoments.normal import density, distribution
from netmoments.propagate.plan import plan_of
from netmoments.propagate.rows import carried
from tests.closeness import assert_close, assert_within_standard_errors


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x).flatten(1)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def waves(count: int, frequency: float, phase: float = 0.0) -> Tensor:
    """Numbers that are the same with every version of a random generator."""
    return torch.sin(torch.arange(count, dtype=torch.float64) * frequency + phase)


def deep() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 3)
        return nn.Sequential(*layers).double().eval()


def noise(std: float = 0.3) -> nm.Gaussian:
    return nm.Gaussian(normal(2, 6, seed=1), std=std)


KNOWN = {
    "ADF (diagonal)": (
        [-0.166004418716, 0.316149614327, -0.236590275609, -0.240937060984],
        [0.00024808397183, 0.000213371324161, 0.000193747508209, 0.000208337778722],
    ),
    "unscented": (
        [-0.165723930964, 0.316107706457, -0.235919452745, -0.241461267667],
        [8.55298772906e-05, 5.56710625781e-05, 0.000191918118436, 0.000239754141306],
    ),
    "series, 4 terms": (
        [-0.165753215492, 0.316251091304, -0.235190711747, -0.242407558638],
        [0.000118403106869, 9.41500782269e-05, 0.000182294524715, 0.000226001957735],
    ),
}


class TestKnownValues:
    """Scores 0 and 2 of the first image, 1 and 0 of the second: what the code gave before it came here.

    The series' are those of noise whose 36 directions are followed in all their pairs; before, 32 random ones were.
    """

    @staticmethod
    def network() -> nn.Module:
        layers = nn.Sequential(
            nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(3, 4, 2), nn.LeakyReLU(0.1),
            nn.Flatten(), nn.Linear(16, 8), nn.ReLU6(), nn.Linear(8, 3),
        ).double()  # fmt: skip
        with torch.no_grad():
            for place, weight in enumerate(layers.parameters()):
                wave = waves(weight.numel(), 1.7 + 0.3 * place, place) / (weight.numel() / len(weight)) ** 0.5
                weight.copy_(wave.reshape(weight.shape))
        return layers.eval()

    @pytest.mark.parametrize("name", BASELINES)
    def test_they_stay(self, name):
        factor = 0.1 * waves(36 * 4, 2.3).reshape(36, 4)
        covariance = nm.Dense(factor @ factor.T + 0.01 * torch.eye(36, dtype=torch.float64))
        given = nm.Gaussian(waves(72, 1.0).reshape(2, 1, 6, 6), covariance, event_ndim=3)
        mean, variance = BASELINES[name](self.network(), given, torch.tensor([[0, 2], [1, 0]]))
        expected_mean, expected_variance = KNOWN[name]
        assert_close(mean.flatten(), expected_mean, rtol=1e-9)
        assert_close(variance.flatten(), expected_variance, rtol=1e-9)


KERNEL, BACK, MATRIX, SQUARE = normal(3, 2, 3, 3), normal(2, 3, 3, 3), normal(4, 72), normal(6, 6)
PLANES = normal(4, 6, 6)
TWO, SPREAD, THREE, FOUR, SIX = normal(2), normal(2, seed=1).exp(), normal(3), normal(4), normal(6)


def from_the_left(x: Tensor) -> Tensor:
    """A product of matrices with the constant first."""
    return (SQUARE[:5] @ x[:, 0].transpose(0, 1).reshape(6, -1)).reshape(5, len(x), 6).transpose(0, 1)


OPERATIONS = {
    "convolution": lambda x: functional.conv2d(x, KERNEL, THREE, stride=2, padding=1),
    "transposed convolution": lambda x: functional.conv_transpose2d(x, BACK),
    "linear": lambda x: functional.linear(x.flatten(1), MATRIX, FOUR),
    "matmul": lambda x: x @ SQUARE[:, :5],
    "from the left": from_the_left,
    "batch norm": lambda x: functional.batch_norm(x, TWO, SPREAD, TWO + 1, FOUR[:2]),
    "factors": lambda x: x * SIX / 3,
    "broadcast": lambda x: x[:, :1] * PLANES,
    "negative": lambda x: -x,
    "sum of two": lambda x: torch.add(x[:, :1], x[:, 1:], alpha=0.3),
    "difference": lambda x: 1 - x[:, :1] - 2 * x[:, 1:],
    "mean": lambda x: x.mean((2, 3)),
    "mean of all": lambda x: x.mean(3, keepdim=True),
    "sum": lambda x: x.sum(1),
    "average pool": lambda x: functional.avg_pool2d(x, 3, 2, padding=1),
    "average pool, oblong": lambda x: functional.avg_pool2d(x, (2, 3), divisor_override=5),
    "average pool of lines": lambda x: functional.avg_pool1d(x[:, :, 0], 2),
    "adaptive, even": lambda x: functional.adaptive_avg_pool2d(x, 3),
    "adaptive, uneven": lambda x: functional.adaptive_avg_pool2d(x, (4, 5)),
    "concatenated": lambda x: torch.cat([x[:, 1:], x.flip(-1)], 1),
    "padded": lambda x: functional.pad(x, (1, 0, 2, 1), value=3.0),
    "reflected": lambda x: functional.pad(x, (1, 1, 2, 2), mode="reflect"),
    "moved": lambda x: x.permute(0, 2, 3, 1).reshape(len(x), 12, -1).transpose(1, 2),
    "split": lambda x: torch.stack(x.split(1, 1), 2).roll(1, -1),
    "running sum": lambda x: x.cumsum(2),
    "upsampled": lambda x: functional.interpolate(x, scale_factor=2, mode="nearest"),
    "shuffled": lambda x: functional.pixel_unshuffle(x, 2),
    "chosen": lambda x: x[:, :, [0, 2, 5]].tril(),
}


class TestAdf:
    @pytest.mark.parametrize("name", OPERATIONS)
    def test_variances_of_affine_operations_by_the_squared_jacobian(self, name):
        # each function uses an input at most once an output before it is summed, so that its steps are independent
        image, variance = normal(1, 2, 6, 6, seed=3), normal(72, seed=4).square()
        network = Function(OPERATIONS[name])
        jacobian = torch.func.jacrev(lambda x: network(x).flatten())(image).reshape(-1, 72)
        given = nm.Gaussian(image, nm.Diagonal(variance), event_ndim=3)
        mean, found = adf(network, given, torch.arange(len(jacobian)).unsqueeze(0))
        assert_close(mean, network(image), atol=1e-12)
        assert_close(found[0], jacobian.square() @ variance, rtol=1e-12, atol=1e-14)

    def test_exact_where_no_two_paths_meet(self):
        """ReLUs of independent inputs, summed: E relu and E relu² in closed form, and by Monte Carlo."""
        scale, means, variances = normal(5), normal(2, 5, seed=1), normal(2, 5, seed=2).square()
        ones = torch.ones(5, 1, dtype=torch.float64)
        network, given = Function(lambda x: torch.relu(x * scale) @ ones), nm.Gaussian(means, nm.Diagonal(variances))
        mean, found = adf(network, given, torch.zeros(2, 1, dtype=torch.int64))
        m, s = scale * means, scale.abs() * variances.sqrt()
        first = m * distribution(m / s) + s * density(m / s)
        second = (m.square() + s.square()) * distribution(m / s) + m * s * density(m / s)
        assert_close(mean, first.sum(1, keepdim=True), rtol=1e-12)
        assert_close(found, (second - first.square()).sum(1, keepdim=True), rtol=1e-10)
        sampled = nm.monte_carlo(network, given, 20_000, seed=3)
        assert_within_standard_errors(sampled.mean, mean, sampled.mean_standard_error)
        assert_within_standard_errors(sampled.variance, found, sampled.variance_standard_error)

    def test_correlations_of_the_noise_do_not_count(self):
        factor = normal(6, 6, seed=5)
        covariance = factor @ factor.T
        means = normal(1, 6, seed=6)
        every = torch.arange(3).unsqueeze(0)
        dense = adf(deep(), nm.Gaussian(means, nm.Dense(covariance)), every)
        diagonal = adf(deep(), nm.Gaussian(means, nm.Diagonal(covariance.diagonal())), every)
        for one, other in zip(dense, diagonal, strict=True):
            assert torch.equal(one, other)

    def test_it_follows_weights_that_have_changed(self):
        network, every = deep(), torch.arange(3).expand(2, -1)
        before = adf(network, noise(), every)[1]
        network[-1].weight.data *= 2
        assert_close(adf(network, noise(), every)[1], 4 * before, rtol=1e-12)

    def test_an_operator_outside_the_table_is_an_error(self):
        given = nm.Gaussian(normal(1, 2, 6, 6), std=1.0)
        network = Function(lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear"))
        with pytest.raises(ValueError, match="no rule for the variances of upsample_bilinear2d"):
            adf(network, given, torch.zeros(1, 1, dtype=torch.int64))
        uneven = Function(lambda x: functional.avg_pool2d(x, 3, 2, ceil_mode=True))
        with pytest.raises(ValueError, match="same divisor"):
            adf(uneven, given, torch.zeros(1, 1, dtype=torch.int64))


class TestUnscented:
    def test_means_of_cubic_polynomials_and_variances_of_linear_functions_are_exact(self):
        """E[xᵢxⱼxₖ] = mᵢmⱼmₖ + mᵢCⱼₖ + mⱼCᵢₖ + mₖCᵢⱼ, and Var wᵀx = wᵀCw, for a dense covariance."""
        matrix, factor, weights = normal(4, 4, seed=3), normal(4, 4, seed=4), normal(4, seed=5)
        cubic, mean = normal(4, 4, 4, seed=6), normal(1, 4, seed=7)
        covariance = factor @ factor.T

        def polynomial(x: Tensor) -> Tensor:
            third = torch.einsum("ijk,ni,nj,nk->n", cubic, x, x, x)
            return torch.stack([third + ((x @ matrix) * x).sum(-1) + 1, x @ weights], 1)

        given = nm.Gaussian(mean, nm.Dense(covariance))
        found, variance = unscented(Function(polynomial), given, torch.tensor([[0, 1]]))
        m = mean[0]
        mixed = torch.einsum("ijk,i,jk->", cubic, m, covariance)
        mixed = mixed + torch.einsum("ijk,j,ik->", cubic, m, covariance)
        mixed = mixed + torch.einsum("ijk,k,ij->", cubic, m, covariance)
        expected = torch.einsum("ijk,i,j,k->", cubic, m, m, m) + mixed + m @ matrix @ m + (matrix * covariance).sum()
        assert float(found[0, 0]) == pytest.approx(float(expected) + 1, rel=1e-11)
        assert float(variance[0, 1]) == pytest.approx(float(weights @ covariance @ weights), rel=1e-12)

    def test_points_are_counted_by_the_rank_of_the_noise(self):
        seen = []

        def counted(x: Tensor) -> Tensor:
            seen.append(len(x))
            return x[:, :2]

        given = nm.Gaussian(normal(1, 9), nm.LowRank(normal(9, 3, seed=1)))
        unscented(Function(counted), given, torch.tensor([[0, 1]]))
        assert sum(seen) == 2 * 3

    def test_too_many_points_are_an_error(self):
        inputs = MOST_POINTS // 2 + 1
        given = nm.Gaussian(torch.zeros(1, inputs), std=0.1)
        with pytest.raises(ValueError, match="100,002 points"):
            unscented(Function(lambda x: x[:, :1]), given, torch.tensor([[0]]))


class TestFourTermSeries:
    @staticmethod
    def pair(rho: float) -> tuple[nn.Module, nm.Gaussian, Tensor]:
        """Two ReLUs of unit variance and correlation ρ, summed; and their means h, k."""
        means = torch.tensor([[0.7, -0.4]], dtype=torch.float64)
        covariance = torch.tensor([[1.0, rho], [rho, 1.0]], dtype=torch.float64)
        network = Function(lambda x: torch.relu(x).sum(1, keepdim=True))
        return network, nm.Gaussian(means, nm.Dense(covariance)), means[0]

    @pytest.mark.parametrize("rho", [-0.9, -0.3, 0.0, 0.5, 1.0])
    def test_two_units_by_the_formula(self, rho):
        network, given, (h, k) = self.pair(rho)
        _, variance = four_term_series(network, given, torch.tensor([[0]]))
        bells = density(h) * density(k)
        beyond = bells * (rho**2 / 2 + h * k * rho**3 / 6 + (h**2 - 1) * (k**2 - 1) * rho**4 / 24)
        own = nm.relu_variance(given.mean, torch.ones_like(given.mean)).sum()
        expected = own + 2 * (rho * distribution(h) * distribution(k) + beyond)
        assert_close(variance.flatten(), expected.reshape(1), rtol=1e-12)

    def test_what_is_cut_off_is_of_fifth_order_in_the_correlation(self):
        errors = []
        for rho in (0.2, 0.1):
            network, given, _ = self.pair(rho)
            _, variance = four_term_series(network, given, torch.tensor([[0]]))
            errors.append(float(variance[0, 0] - nm.output_moments(network, given).variance[0, 0]))
        assert errors[0] / errors[1] == pytest.approx(2**5, rel=0.1)  # the next term is a tenth of it at most

    def test_a_deep_network_is_near_the_exact_kernel(self):
        """Correlations of some tenths, so that what is cut off is small; means are those of Gaussian layers exactly."""
        every, given, network = torch.arange(3).expand(2, -1), noise(), deep()
        mean, variance = four_term_series(network, given, every)
        plan = plan_of(NetworkModel.of(network, given.mean, "test"))
        with torch.no_grad():
            exact_mean, exact = carried(plan, given.mean, given.covariance, every, None)
        assert_close(mean, exact_mean, rtol=1e-12)
        assert_close(variance, exact.diagonal(dim1=-2, dim2=-1), rtol=0.02)

    def test_what_does_not_fit_the_memory_is_an_error(self):
        with pytest.raises(ValueError, match=r"four_term_series: .* needs .* is the limit"):
            four_term_series(deep(), noise(), torch.arange(3).expand(2, -1), memory_budget=10_000)


@pytest.fixture(scope="module")
def table() -> nm.Tightness:
    return nm.tightness(deep(), noise(), methods={"layerwise": nm.Layerwise(), **BASELINES}, samples=50_000)


class TestTable:
    def test_all_have_numbers(self, table):
        assert [row.method for row in table.rows] == ["layerwise", *BASELINES]
        assert all(row.note == "" for row in table.rows)

    def test_errors_against_samples_are_as_they_must_be(self, table):
        ours = table["layerwise"].variance_error
        assert table["ADF (diagonal)"].variance_error > 5 * ours
        assert table["unscented"].variance_error > ours
        assert table["series, 4 terms"].variance_error < table["unscented"].variance_error
        assert table["series, 4 terms"].mean_error < table["ADF (diagonal)"].mean_error

    def test_what_cannot_be_done_has_a_note(self):
        small = partial(four_term_series, memory_budget=10_000)
        found = nm.tightness(deep(), noise(), methods={"series": small, "ADF": adf}, samples=100)
        assert "needs" in found["series"].note
        assert found["ADF"].note == ""
