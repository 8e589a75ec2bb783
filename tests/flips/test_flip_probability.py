import importlib
import math

import pytest
import torch
from torch import Tensor, nn

import netmoments as nm
from netmoments.flips.flip_probability import BOUND_RUNS, FlipGoal, require_positive
from netmoments.flips.noisy_network import OutOfTime, seed_of_input
from netmoments.flips.result import EntryResult, FlipEstimate, Tolerance
from netmoments.flips.search import START
from tests.flips.classifiers import Corner, Rounded, at_distance, linear, noisy_network, run_alone, tail
from tests.networks import seeded

flip_probability = importlib.import_module("netmoments.flips.flip_probability")


@pytest.mark.parametrize("distance", [0.0, 1.0, 2.2, 3.0, 4.5, 6.0, 7.94])
def test_linear_classifiers_from_one_half_to_1e_15(distance):
    network = linear()
    found = nm.flip_probability(network, nm.Gaussian(at_distance(network, distance), std=1.0), label=0)
    truth = tail(distance)
    assert abs(float(found.probability) - truth) < 5 * float(found.standard_error)
    assert float(found.standard_error) <= 0.1 * float(found.probability)
    assert bool(found.met)
    assert bool(found.agreed)
    assert int(found.rival) == 1
    if not 0.005 < truth < 0.05:  # in between, the first samples decide
        assert found.route == ["importance" if truth < 0.005 else "frequencies"]
    assert int(found.runs) < 4000


@pytest.mark.parametrize(("first", "second"), [(1.0, 2.0), (3.2, 3.0), (5.0, 5.2)])
def test_networks_of_two_layers(first, second):
    found = nm.flip_probability(Corner(first, second).eval(), nm.Gaussian(torch.zeros(6), std=1.0))
    truth = Corner.probability(first, second)
    assert abs(float(found.probability) - truth) < 5 * float(found.standard_error)


class Faces(nn.Module):
    """Scores 0 and max_i (|x_i| − t_i), or without `both` max_i (x_i − t_i): as many faces of one boundary."""

    def __init__(self, *thresholds: float, both: bool) -> None:
        super().__init__()
        self.thresholds, self.both = torch.tensor(thresholds), both

    def forward(self, x: Tensor) -> Tensor:
        ahead = ((x.abs() if self.both else x) - self.thresholds).amax(1)
        return torch.stack([torch.zeros_like(ahead), ahead], 1)

    @property
    def truth(self) -> float:
        sides = 2 if self.both else 1
        return -math.expm1(sum(math.log1p(-sides * tail(float(t))) for t in self.thresholds))


@pytest.mark.parametrize(
    "network",
    [Faces(4.0, 4.3, 4.3, 4.3, 4.3, both=True), Faces(6.0, 6.2, 6.4, both=True), Faces(*[5.0] * 10, both=False)],
    ids=["ten", "six", "one side"],
)
def test_many_faces_of_one_rival(network):
    """Both searches used to find the nearest faces only, and to agree on half of the probability or less."""
    mean = torch.zeros(5, len(network.thresholds))
    found = nm.flip_probability(network.eval(), nm.Gaussian(mean + 1e-6 * torch.arange(5.0).unsqueeze(1), std=1.0), 0)
    assert bool(((found.probability - network.truth).abs() < 5 * found.standard_error).all())
    assert int(found.met.sum()) >= 3
    assert int(found.runs.median()) < 10_000  # one in 40 takes 90,000


class Band(nn.Module):
    """The second score is the larger one where x₀ is in a narrow band, about which gradients far away say little."""

    def forward(self, x: Tensor) -> Tensor:
        ahead = 0.01 - (x[:, 0] - 0.7).abs()
        return torch.stack([torch.zeros_like(ahead), ahead], 1)


def test_what_importance_sampling_cannot_settle_is_counted():
    """Even if searches expect no flips at all: as soon as the samples that should bound them show some."""
    truth = tail(0.69) - tail(0.71)
    mean = torch.arange(6.0).unsqueeze(1) * torch.tensor([0.0, 1.0])
    found = nm.flip_probability(Band().eval(), nm.Gaussian(mean, std=1.0), 0)
    assert int(found.met.sum()) >= 5
    assert bool(((found.probability - truth).abs() < 5 * found.standard_error).all())
    assert int(found.runs.median()) < 100_000


def test_what_was_found_is_kept_if_the_time_ends_while_it_is_counted(monkeypatch):
    """The estimate stays, and the interval holds that of what was counted until then."""
    network = noisy_network(linear(), nm.Gaussian(at_distance(linear(), 2.5), std=1.0))
    found = EntryResult(FlipEstimate(0.006, 0.001, 500), None, True, "importance", torch.tensor([0, 0.006]), False)
    goal = FlipGoal(Tolerance(0.1), 10**6, None, 0)

    async def out_of_time(*given):
        raise OutOfTime

    monkeypatch.setattr(flip_probability, "plain_wins", out_of_time)
    assert run_alone(flip_probability._by_another_route(network, found, goal)) is found
    monkeypatch.undo()

    async def partly(network, tolerance, limit, before):
        return EntryResult(FlipEstimate(0.0, 0.02, 64), None, True, "frequencies", torch.zeros(2), False, (0.0, 0.05))

    monkeypatch.setattr(flip_probability, "by_frequencies", partly)
    kept = run_alone(flip_probability._by_another_route(network, found, goal))
    assert kept.probability == 0.006
    assert not kept.agreed


@pytest.mark.parametrize("runs", [100, 1000, 5000])
@pytest.mark.parametrize("network", [linear(), Rounded(6.0).eval()], ids=["gradients", "none"])
def test_the_limit_on_runs_holds(network, runs):
    size = 12 if isinstance(network, nn.Linear) else 2
    mean = at_distance(network, 4.5) if isinstance(network, nn.Linear) else torch.zeros(size)
    found = nm.flip_probability(network, nm.Gaussian(mean, std=1.0), 0, runs=runs)
    assert int(found.runs) <= runs
    assert float(found.interval[0]) <= tail(4.5) if isinstance(network, nn.Linear) else True


@pytest.mark.parametrize(
    "covariance",
    [
        nm.Diagonal(torch.linspace(0.2, 2, 12)),
        nm.Dense(torch.eye(12) + 0.5),
        nm.LowRank(torch.randn(12, 3, generator=torch.Generator().manual_seed(0))),
    ],
    ids=["diagonal", "dense", "low rank"],
)
def test_any_covariance(covariance):
    """The margin w·x has variance wᵀΣw: the mean is put so that p = Φ(−4)."""
    network = linear()
    normal = (network.weight[0] - network.weight[1]).detach()
    spread = float(covariance.push(normal.unsqueeze(0)).sqrt())
    mean = 4 * spread * normal / normal.square().sum()
    found = nm.flip_probability(network, nm.Gaussian(mean, covariance=covariance))
    assert abs(float(found.probability) - tail(4)) < 5 * float(found.standard_error)


def test_a_batch_has_its_shape_and_every_entry_its_own_answer():
    network = linear()
    mean = torch.stack([at_distance(network, d) for d in (1.0, 3.5, 5.0, -2.0)]).reshape(2, 2, 12)
    found = nm.flip_probability(network, nm.Gaussian(mean, std=1.0, event_ndim=1))
    assert found.probability.shape == found.label.shape == found.runs.shape == (2, 2)
    assert found.interval.shape == (2, 2, 2)
    assert found.label.tolist() == [[0, 0], [0, 1]]
    assert len(found.route) == 4
    truth = torch.tensor([tail(1.0), tail(3.5), tail(5.0), tail(2.0)]).reshape(2, 2).double()
    assert bool(((found.probability - truth).abs() < 5 * found.standard_error).all())
    assert len(str(found).splitlines()) == 6


def test_one_rare_flip_among_the_first_samples_does_not_make_it_common():
    """Of flips of 1 in 4,300 one is among the first 32 samples now and then; counting would take tens of thousands."""
    network = linear()
    mean = at_distance(network, 3.5)
    normal = (network.weight[0] - network.weight[1]).detach()

    def first_flips(seed: int) -> bool:
        generator = torch.Generator().manual_seed(seed_of_input(seed, "flips", mean))
        return bool(((mean + torch.randn(START, 12, generator=generator)) @ normal < 0).any())

    seed = next(filter(first_flips, range(2000)))
    found = nm.flip_probability(network, nm.Gaussian(mean, std=1.0), seed=seed)
    assert found.route == ["importance"]
    assert int(found.runs) < 4000
    assert float(found.interval[0]) < tail(3.5) < float(found.interval[1])


def test_an_input_has_the_same_answer_alone_and_among_others():
    network = linear().double()
    mean = torch.stack([at_distance(network, d) for d in (4.0, 1.0, -2.0)]).double()
    every = nm.flip_probability(network, nm.Gaussian(mean, std=1.0))
    for place in range(3):
        apart = nm.flip_probability(network, nm.Gaussian(mean[place], std=1.0))
        assert float(apart.probability) == pytest.approx(float(every.probability[place]), rel=1e-9)
        assert int(apart.runs) == int(every.runs[place])


def test_the_same_seed_gives_the_same_answer():
    network = linear()
    noise = nm.Gaussian(at_distance(network, 4.0), std=1.0)
    one, two, other = (nm.flip_probability(network, noise, seed=seed) for seed in (1, 1, 2))
    assert float(one.probability) == float(two.probability) != float(other.probability)


def test_intervals_cover():
    """Of 16 intervals 95 % should cover; fewer than 12 have a chance of 1e-4."""
    network = Corner(3.0, 3.3).eval()
    truth, covered = Corner.probability(3.0, 3.3), 0
    for seed in range(16):
        found = nm.flip_probability(network, nm.Gaussian(torch.zeros(6), std=1.0), 0, 0.15, seed=seed)
        covered += bool(found.interval[0] <= truth <= found.interval[1])
    assert covered >= 12


def test_a_network_without_gradients():
    found = nm.flip_probability(Rounded(3.5).eval(), nm.Gaussian(torch.zeros(3), std=1.0), runs=60_000)
    assert found.route == ["splitting"]
    assert float(found.interval[0]) < tail(3.5) < float(found.interval[1])


def test_what_cannot_be_found_is_bounded():
    network = nn.Linear(3, 2)
    network.weight.data.zero_()
    network.bias.data = torch.tensor([1.0, 0.0])
    found = nm.flip_probability(network.eval(), nm.Gaussian(torch.zeros(3), std=1.0), runs=100_000)
    assert float(found.probability) == 0
    assert 0 < float(found.interval[1]) < 1e-3
    assert not bool(found.met)
    assert "below" in repr(found)


def test_without_noise_it_is_exact():
    network = linear()
    found = nm.flip_probability(network, nm.Gaussian(at_distance(network, 1.0), std=0.0))
    assert found.route == ["exact"]
    assert float(found.probability) == 0
    assert bool(found.met)


def test_an_absolute_error_is_enough():
    network = linear()
    noise = nm.Gaussian(at_distance(network, 4.0), std=1.0)
    found = nm.flip_probability(network, noise, absolute_error=0.01)
    assert bool(found.met)
    assert int(found.runs) < 300
    assert float(found.interval[1] - found.interval[0]) < 0.02


def test_seconds_are_a_limit():
    network = linear()
    found = nm.flip_probability(network, nm.Gaussian(at_distance(network, 4.0), std=1.0), seconds=1e-6)
    assert not bool(found.met)
    assert found.interval.tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"relative_error": 0}, ValueError, "relative_error must be a number above 0"),
        ({"relative_error": -1.0}, ValueError, "relative_error"),
        ({"relative_error": math.nan}, ValueError, "relative_error"),
        ({"absolute_error": 0.0}, ValueError, "absolute_error"),
        ({"seconds": -1}, ValueError, "seconds"),
        ({"runs": 3}, ValueError, "runs must be an integer of at least 100"),
        ({"seed": -1}, ValueError, "seed"),
        ({"label": 7}, ValueError, "label must be a class from 0 to 1, got 7"),
        ({"label": -1}, ValueError, "from 0 to 1"),
        ({"label": 0.5}, TypeError, "label must be an integer"),
        ({"label": torch.tensor([0, 1])}, ValueError, "batch shape"),
        ({"noise": torch.zeros(12)}, TypeError, "noise must be a netmoments.Gaussian"),
        ({"network": linear(classes=1)}, ValueError, "at least two scores"),
        ({"network": nn.Sequential(linear(), nn.Dropout()).train()}, ValueError, "training mode"),
    ],
)
def test_what_is_refused(changed, error, words):
    arguments = {"network": linear(), "noise": nm.Gaussian(torch.zeros(12), std=1.0), **changed}
    with pytest.raises(error, match=words):
        nm.flip_probability(**arguments)


def test_a_random_network_is_refused():
    class Random(nn.Module):
        def forward(self, x):
            return x[:, :2] + torch.rand_like(x[:, :2])

    with pytest.raises(ValueError, match="flip_probability"):
        nm.flip_probability(Random().eval(), nm.Gaussian(torch.zeros(12), std=1.0))


def test_outputs_that_are_no_numbers_are_refused():
    class Root(nn.Module):
        def forward(self, x):
            return torch.cat([x[:, :1].sqrt(), x[:, 1:]], 1)

    with pytest.raises(ValueError, match="NaN or infinite"):
        nm.flip_probability(Root().eval(), nm.Gaussian(torch.ones(3), std=2.0))


def test_numbers_above_zero():
    require_positive("caller", "name", 0.1, "0.1")
    with pytest.raises(ValueError, match=r"caller: name must be a number above 0, such as 0\.1, got 'x'"):
        require_positive("caller", "name", "x", "0.1")
    assert FlipGoal.read("caller", 0.1, None, 100, None, 0).tolerance.relative == 0.1


@pytest.mark.parametrize("distance", [36.0, 37.0, 39.0, 500.0])
def test_flips_that_are_too_rare_for_float64(distance):
    """Nothing is NaN, and no runs are spent on them but those that an absolute error asks for."""
    network = linear()
    noise = nm.Gaussian(at_distance(network, distance), std=1.0)
    found = nm.flip_probability(network, noise, absolute_error=0.003)
    low, high = found.interval.tolist()
    assert low == 0
    assert float(found.probability) <= high < 0.006
    assert bool(found.met)
    assert int(found.runs) < 4000
    classes = nm.class_probabilities(network, noise)
    assert float(classes.probability[0]) == 1
    assert int(nm.flip_probability(network, noise, runs=2000).runs) <= 2000
    by_default = nm.flip_probability(network, noise)
    assert int(by_default.runs) < 2 * BOUND_RUNS
    assert float(by_default.interval[1]) <= 4 / BOUND_RUNS


def test_what_is_negligible_is_not_searched_for():
    network = linear()
    found = nm.flip_probability(network, nm.Gaussian(at_distance(network, 30.0), std=1.0))
    assert 0 < float(found.probability) < 1e-190
    assert int(found.runs) < 10_000


class Decides(nn.Module):
    """Its answer is a decision, without gradients: it flips where the first input is negative."""

    def forward(self, x):
        return torch.where(x[:, :1] > 0, torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))


def test_decisions_without_gradients_are_counted():
    found = nm.flip_probability(Decides().eval(), nm.Gaussian(torch.full((6,), 0.2), std=0.1))
    assert abs(float(found.probability) - tail(2.0)) < 5 * float(found.standard_error)
    assert bool(found.met)
    assert int(found.runs) < 50_000
    farther = nm.flip_probability(Decides().eval(), nm.Gaussian(torch.ones(6), std=0.1), runs=10_000)
    assert float(farther.interval[1]) < 1e-3  # 3 over the half of the runs that is not for splitting
    nm.nearest_flip(Decides().eval(), nm.Gaussian(torch.ones(6), std=0.1))
    nm.class_probabilities(Decides().eval(), nm.Gaussian(torch.ones(6), std=0.1))


@pytest.mark.parametrize("scale", [1e20, 1e36])
@pytest.mark.parametrize("distance", [1.0, 5.0])
def test_scores_whose_squares_are_no_numbers(scale, distance):
    """Flips, common or rare, do not depend on the scale of the scores."""
    network = linear()
    noise = nm.Gaussian(at_distance(network, distance), std=1.0)
    network.weight.data.mul_(scale)
    found = nm.flip_probability(network, noise)
    assert bool(found.met)
    assert float(found.interval[0]) <= tail(distance) <= float(found.interval[1])


def test_batches_keep_to_the_callers_memory():
    """With gradients and without, in searches too; the answer is the same, as samples do not depend on batches."""
    network, noise, seen = linear(), nm.Gaussian(torch.stack([torch.zeros(12)] * 3), std=1.0), []
    network.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    budget = 2 * 20 * nm.NetworkModel(network, noise.mean[:1]).pass_size * 4
    for function in (nm.flip_probability, nm.class_probabilities, nm.nearest_flip):
        seen.clear()
        function(network, noise, memory_budget=budget)
        assert seen
        assert max(seen) <= 20, function.__name__


@pytest.mark.parametrize("distance", [0.0, 1.5])
def test_class_probabilities_two_classes(distance):
    network = linear()
    found = nm.class_probabilities(network, nm.Gaussian(at_distance(network, distance), std=1.0))
    truth = tail(distance)
    assert float(found.probability.sum()) == pytest.approx(1)
    assert abs(float(found.probability[1]) - truth) < 5 * float(found.standard_error[1])
    assert bool(found.met)
    assert int(found.runs) <= 0.5 * truth * (1 - truth) * 196**2


def test_class_probabilities_many_classes_as_plain_samples_have_them():
    """Four classes, against 50,000 plain samples: five standard errors of the difference."""
    network = linear(classes=4, seed=1)
    noise = nm.Gaussian(torch.zeros(2, 12), std=1.0)
    found = nm.class_probabilities(network, noise)
    assert found.probability.shape == (2, 4)
    assert found.interval.shape == (2, 4, 2)
    x = torch.randn(50_000, 12, generator=torch.Generator().manual_seed(5))
    shares = network(x).argmax(1).bincount(minlength=4) / 50_000
    error = torch.hypot(found.standard_error[0], (shares * (1 - shares) / 50_000).sqrt())
    assert bool(((found.probability[0] - shares).abs() < 5 * error).all())
    assert bool((found.interval[..., 0] <= found.probability).all())
    assert bool((found.probability <= found.interval[..., 1]).all())


def test_class_probabilities_two_layers_and_no_gradients():
    noise = nm.Gaussian(torch.zeros(6), std=1.0)
    for network, truth in ((Corner(0.5, 1.0), Corner.probability(0.5, 1.0)), (Rounded(1.0), tail(1.0))):
        found = nm.class_probabilities(network.eval(), noise)
        assert abs(float(found.probability[1]) - truth) < 5 * float(found.standard_error[1])


def test_class_probabilities_without_noise_one_class_wins():
    network = linear()
    found = nm.class_probabilities(network, nm.Gaussian(at_distance(network, 1.0), std=0.0))
    assert found.probability.tolist() == [1.0, 0.0]


def test_class_probabilities_what_is_refused():
    noise = nm.Gaussian(torch.zeros(12), std=1.0)
    with pytest.raises(ValueError, match="absolute_error must be a number above 0"):
        nm.class_probabilities(linear(), noise, absolute_error=-0.1)
    with pytest.raises(ValueError, match=r"absolute_error must be below 0.5, such as 0.01 for one point, got 1"):
        nm.class_probabilities(linear(), noise, absolute_error=1)
    with pytest.raises(ValueError, match="at least two scores"):
        nm.class_probabilities(linear(classes=1), noise)


def test_class_probabilities_time_that_is_over_before_anything_was_found():
    """All classes are alike, from 0 to 1; `OutOfTime` stays inside."""
    found = nm.class_probabilities(torch.nn.Identity().eval(), nm.Gaussian(torch.eye(4), std=1.0), seconds=1e-9)
    assert found.probability.sum(1).tolist() == [1.0] * 4
    assert bool((found.interval == torch.tensor([0.0, 1.0], dtype=torch.float64)).all())
    assert not bool(found.met.any())


class RootOfPositive(nn.Module):
    """√z where z > 0: values are fine, gradients are 0·∞ wherever some z is negative."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x)
        return self.last(torch.where(z > 0, z.sqrt(), torch.zeros_like(z)))


@pytest.mark.filterwarnings("ignore:.* which is smooth")
def test_gradients_that_are_not_finite_do_not_matter():
    net, noise = seeded(RootOfPositive, torch.float32), nm.Gaussian(torch.zeros(6), std=0.5)
    label = int(net(torch.zeros(1, 6)).argmax())
    found, counted = (
        nm.flip_probability(net, noise),
        nm.monte_carlo(lambda x: (net(x).argmax(1) != label).float(), noise, 50_000),
    )
    low, high = found.interval.tolist()
    assert low - 0.01 <= float(counted.mean) <= high + 0.01
    with pytest.raises(ValueError, match="derivative is NaN or infinite at the point"):
        nm.output_moments(net, noise, "linear")


def test_an_absolute_error_alone_is_what_is_reached():
    """Common flips, where a tenth of the probability would be reached much sooner; and of both, the first is enough."""
    net, noise = Corner(0.3, 0.5).eval(), nm.Gaussian(torch.zeros(6), std=1.0)
    for asked, both in ((0.01, False), (0.05, True)):
        options = {"relative_error": 0.3} if both else {}
        found = nm.flip_probability(net, noise, 0, absolute_error=asked, **options)
        low, high = found.interval.tolist()
        assert bool(found.met)
        assert ((high - low) / 2 <= asked * 1.001) != both
