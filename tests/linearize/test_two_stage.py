"""Two-stage linearizations: exact Jacobians in every way of computing them, paths around the cut, units, values."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import jacrev
from torch.nn import functional

import netmoments as nm
from netmoments.linearize import two_stage as module
from netmoments.linearize.two_stage import (
    by_forward_mode,
    by_reverse_mode,
    scores_and_jacobians,
    tangent_at,
)
from netmoments.network.model import NetworkModel
from netmoments.network.relu_calls import Cut
from netmoments.network.zoo import LeNet
from tests.closeness import assert_close, assert_within_standard_errors
from tests.linearize.same import PARTS, assert_same_network
from tests.networks import FACTORIES, Residual, inputs, network, seeded

# against Jacobians of a network taken apart by hand


class TakenApart(nn.Module):
    """A network written as head(x, relu(stem(x))), nonlinear on both sides and around; all units matter."""

    def __init__(self, sizes: tuple[int, int] = (5, 7)) -> None:
        super().__init__()
        size, units = sizes
        self.size = size
        self.before, self.first = nn.Linear(size, 11), nn.Linear(11, units)
        self.around, self.joint, self.last = nn.Linear(size, 6), nn.Linear(units, 6), nn.Linear(6, 3)

    def stem(self, x: Tensor) -> Tensor:
        return self.first(functional.leaky_relu(self.before(x)))

    def head(self, x: Tensor, y: Tensor) -> Tensor:
        return self.last(functional.leaky_relu(self.joint(y) + self.around(x).abs()))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x, torch.relu(self.stem(x)))


@pytest.mark.parametrize("sizes", [(5, 7), (7, 5)], ids=["forward mode", "reverse mode"])
def test_the_matrices_are_the_jacobians(sizes, monkeypatch):
    used = []
    for name in ("by_forward_mode", "by_reverse_mode"):
        monkeypatch.setattr(module, name, _noting(used, getattr(module, name)))
    net = seeded(lambda: TakenApart(sizes))
    points = torch.randn(4, sizes[0], dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    g = nm.two_stage(net, points)
    assert ("by_forward_mode" in used) == (sizes == (5, 7))
    for i, x in enumerate(points):
        z = net.stem(x)
        y = torch.relu(z)
        A, B, D = jacrev(net.stem)(x), jacrev(net.head, 1)(x, y), jacrev(net.head, 0)(x, y)
        expected = nm.AffineReluAffine(A, z - A @ x, B, net(x) - B @ y - D @ x, D)
        assert_same_network(g.entries(i), expected, atol=1e-14 * 20)


def _noting(used: list[str], function: Callable[..., object]) -> Callable[..., object]:
    def noting(*args, **kwargs):
        used.append(function.__name__)
        return function(*args, **kwargs)

    return noting


@pytest.mark.parametrize("name", [name for name in FACTORIES if name != "only backward"])
def test_forward_and_reverse_mode_agree_in_chunks_of_any_size(name):
    net, x = network(name), inputs(name, 3)
    for relu in nm.relus(net, x):
        cut = Cut(net, relu)
        leaf = x.clone().requires_grad_()
        z = cut.stem(leaf)
        rows = torch.arange(relu.size).expand(3, -1)
        (reverse,) = by_reverse_mode(z, (leaf,), rows, 64)
        assert reverse is not None
        for chunk in (5, 1000):
            assert_close(by_forward_mode(cut.stem, x, None, chunk), reverse, atol=1e-13, what=relu.name)
        few = torch.tensor([[0, 2], [1, 0], [2, 1]])
        expected = reverse.gather(1, few.unsqueeze(2).expand(-1, -1, reverse.shape[2]))
        assert_close(by_forward_mode(cut.stem, x, few, 7), expected, atol=1e-13)
        (few_reverse,) = by_reverse_mode(z, (leaf,), few, 1)
        assert_close(few_reverse, expected, atol=1e-13)


@pytest.mark.parametrize("name", FACTORIES)
def test_slope_and_value_at_the_point_are_the_networks(name):
    """The chain rule: B 1[z > 0] A + D is the network's Jacobian at the point, and g(x) = network(x)."""
    net, x = network(name), inputs(name, 2)
    _, expected = scores_and_jacobians(net, x, torch.arange(net(x.clone()).shape[1]).expand(2, -1), 2)
    for relu in nm.relus(net, x):
        g = nm.two_stage(net, x, relu.name)
        assert_close(g(x), net(x.clone()), rtol=1e-12, atol=1e-13, what=relu.name)
        z = (g.A @ x.flatten(1).unsqueeze(-1)).squeeze(-1) + g.c1
        slope = g.B * (z > 0).unsqueeze(-2) @ g.A + (0 if g.D is None else g.D)
        assert_close(slope, expected, atol=1e-12, what=relu.name)


def test_a_path_around_is_there_only_where_there_is_one():
    net, x = network("residual"), inputs("residual", 1)[0]
    around = {relu.name: nm.two_stage(net, x, relu.index).D is not None for relu in nm.relus(net, x[None])}
    assert around == {
        "relu": False, "block1.relu1": True, "block1.relu2": False, "block2.relu1": True, "block2.relu2": False,
    }  # fmt: skip


@pytest.mark.parametrize("which", ["lenet", "residual"])
def test_the_output_is_reproduced_in_float32(which):
    """To 1e-5 of the largest score, for every ReLU of the paper's LeNet and of a small residual network."""
    if which == "lenet":
        net, x = nm.zoo.pretrained("lenet"), torch.rand(2, 1, 28, 28, generator=torch.Generator().manual_seed(2))
    else:
        net, x = network("residual", torch.float32), inputs("residual", 2, torch.float32)
    expected = net(x).detach()
    for relu in nm.relus(net, x):
        g = nm.two_stage(net, x, relu.name)
        assert g.A.dtype == torch.float32
        assert_close(g(x), expected, atol=1e-5 * float(expected.abs().max()), what=relu.name)


def test_the_paper_s_lenet_by_its_shapes():
    """Layer 2 of the default LeNet is the paper's l = 3: 1024 units, all of which matter."""
    net = seeded(LeNet, torch.float32)
    g = nm.two_stage(net, torch.rand(1, 28, 28, generator=torch.Generator().manual_seed(1)))
    assert g.A.shape == (1024, 784)
    assert g.B.shape == (10, 1024)
    assert g.D is None


# batches, chunks, memory


@pytest.mark.parametrize("name", ["lenet", "residual", "folded", "transposed"])
def test_a_batch_is_a_loop(name):
    net, x = network(name), inputs(name, 6)
    for layer in range(len(nm.relus(net, x))):
        together = nm.two_stage(net, x, layer)
        event = x.shape[1:]
        shaped = nm.two_stage(net, x.reshape(2, 3, *event), layer, event_ndim=len(event))
        assert shaped.batch_shape == (2, 3)
        for i in range(6):
            alone = nm.two_stage(net, x[i], layer)
            assert alone.batch_shape == ()
            noise = nm.Gaussian(x[i], std=0.3)
            assert_close(together.entries(i).covariance(noise), alone.covariance(noise), atol=1e-12)
            assert_close(shaped.entries(i // 3).entries(i % 3).mean(noise), alone.mean(noise), atol=1e-12)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_the_memory_budget_changes_nothing(layer):
    net, x = network("lenet"), inputs("lenet", 5)
    g = nm.two_stage(net, x, layer)
    least = (g.A.numel() + 3 * x.numel() * 10) * 8 // 5 * 5
    for budget in (least, 4 * least):
        assert_same_network(nm.two_stage(net, x, layer, memory_budget=budget), g, what=f"{budget} bytes")


def test_groups_with_other_numbers_of_live_units_and_without_a_path_around():
    """Groups are joined with zero rows and columns: matrices differ, but not what each point's network computes."""

    class Gated(nn.Module):
        """Coordinates behind two ReLUs, the second of which drops small ones; and the first coordinate by itself."""

        def forward(self, x: Tensor) -> Tensor:
            kept = functional.relu(functional.relu(x) - 0.5)
            return torch.stack([kept.sum(1), functional.relu(x[:, 0] - 1)], 1)

    net = Gated().eval()
    x = torch.tensor([[1.0, 1, 1, 1], [0, 0, 0, 1], [2, 0, 0, 0]], dtype=torch.float64)
    together = nm.two_stage(net, x, 0)
    apart = nm.two_stage(net, x, 0, memory_budget=4 * 4 * 8 * 3 + 300)
    assert apart.batch_shape == together.batch_shape == (3,)
    around = nm.two_stage(net, x[2], 0).D
    assert nm.two_stage(net, x[0], 0).D is None
    assert around is not None
    assert_close(apart(x), net(x), atol=1e-15)
    for i in range(3):
        noise = nm.Gaussian(x[i], std=0.7)
        expected = nm.two_stage(net, x[i], 0).covariance(noise)
        for g in (together, apart):
            assert_close(g.entries(i).covariance(noise), expected, atol=1e-15)


def test_chosen_outputs_are_the_rows_of_all():
    net, x = network("residual"), inputs("residual", 3)
    all_outputs = nm.two_stage(net, x, 1)
    assert_same_network(nm.two_stage(net, x, 1, outputs=[2, 0]), all_outputs.outputs(torch.tensor([2, 0])))
    assert_same_network(nm.two_stage(net, x, 1, outputs=[-1, 0]), all_outputs.outputs(torch.tensor([2, 0])))
    rows = torch.tensor([[0], [2], [1]])
    assert_same_network(nm.two_stage(net, x, 1, outputs=rows), all_outputs.outputs(rows))


BUDGETS = {
    "B does not fit": (100, r"10 outputs × \(48 units of 'relu1' \+ 64 inputs\) for 2 images take 0\.018 MB"),
    "A does not fit": (
        20_000,
        r"'relu1' is 48 × 64, 0\.025 MB for each image, and 0\.01 MB may be used for each; choose",
    ),
}


@pytest.mark.parametrize("case", BUDGETS)
def test_too_small_a_budget_is_refused_with_the_estimate(case):
    budget, message = BUDGETS[case]
    with pytest.raises(MemoryError, match=message):
        nm.two_stage(network("lenet"), inputs("lenet", 2), 0, memory_budget=budget)


# units that do not matter


class Pooled(nn.Module):
    """Convolution, ReLU, max-pool, linear: of the four units in a window at most one matters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool, self.last = nn.Conv2d(1, 3, 3, padding=1), nn.MaxPool2d(2), nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.pool(functional.relu(self.conv(x))).flatten(1))


def test_units_behind_a_max_pool_are_dropped():
    net = seeded(Pooled)
    x = torch.randn(3, 1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    g = nm.two_stage(net, x)
    assert g.A.shape[-2] <= 12 < 48
    noise = nm.Gaussian(x, std=0.2)
    for i in range(3):
        y = functional.relu(net.conv(x[i : i + 1])).detach()
        A = jacrev(lambda v: net.conv(v.reshape(1, 1, 4, 4)).flatten())(x[i].flatten())
        B = jacrev(lambda v: net.last(net.pool(v.reshape(1, 3, 4, 4)).flatten()))(y.flatten())
        whole = nm.AffineReluAffine(
            A, net.conv(x[i : i + 1]).flatten() - A @ x[i].flatten(), B, net(x[i : i + 1])[0] - B @ y.flatten()
        )
        alone = nm.Gaussian(x[i], std=0.2)
        assert_close(g.mean(noise)[i], whole.mean(alone), atol=1e-14)
        assert_close(g.variance(noise)[i], whole.variance(alone), atol=1e-14)
        pushed = 0.04 * A @ A.mT
        pairs = nm.relu_covariance(net.conv(x[i : i + 1]).flatten(), 0.5 * (pushed + pushed.mT))
        assert_close(g.covariance(noise)[i], B @ pairs @ B.mT, atol=1e-14)


def test_rows_of_a_behind_dead_columns_are_never_computed(monkeypatch):
    shapes = []

    def noting(outputs, inputs, rows, chunk):
        shapes.append(tuple(rows.shape))
        return by_reverse_mode(outputs, inputs, rows, chunk)

    monkeypatch.setattr(module, "by_reverse_mode", noting)
    g = nm.two_stage(seeded(Pooled), torch.randn(1, 4, 4, generator=torch.Generator().manual_seed(5)).double())
    assert shapes == [(1, 2), (1, g.A.shape[-2])]


def test_a_relu_that_does_not_matter_and_an_output_that_is_constant():
    class Constant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.relu(x)
            return torch.ones(len(x), 2, dtype=x.dtype) + (0 * torch.relu(x[:, :1])).detach()

    g = nm.two_stage(Constant().eval(), torch.ones(4, dtype=torch.float64), 0)
    assert g.D is None
    noise = nm.Gaussian(torch.ones(4, dtype=torch.float64), std=1.0)
    assert_close(g.mean(noise), [1.0, 1.0], atol=0)
    assert_close(g.variance(noise), [0.0, 0.0], atol=0)
    assert_close(nm.output_moments(Constant().eval(), noise, "linear").variance, [0.0, 0.0], atol=0)


class OneUnit(nn.Module):
    """Its ReLU takes one number of each input, as (N,)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 1), nn.Linear(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x).squeeze(1)).unsqueeze(1))


def test_a_relu_of_one_number_for_each_input():
    net = seeded(OneUnit)
    points = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    g = nm.two_stage(net, points)
    assert_close(g.A, net.first.weight.expand(3, 1, 4), rtol=1e-12, atol=1e-15)
    assert_close(g(points), net(points), rtol=1e-12, atol=1e-15)
    for batch in (points, points[:1]):
        assert nm.output_moments(net, nm.Gaussian(batch, std=0.1), "two-stage").mean.shape == (len(batch), 2)


# network, input and surroundings are left as they were


def test_the_network_and_the_input_are_untouched():
    net = network("mutating", torch.float32)
    net.last.bias.requires_grad_(False)
    requires_grad = [parameter.requires_grad for parameter in net.parameters()]
    before = copy.deepcopy(net.state_dict())
    x = inputs("mutating", 2, torch.float32).requires_grad_()
    x_before, random = x.detach().clone(), torch.get_rng_state()
    for layer in (0, 1):
        g = nm.two_stage(net, x, layer)
        assert not any(getattr(g, part).requires_grad for part in PARTS[:4])
    nm.output_moments(net, nm.Gaussian(x, std=0.1), "linear")
    assert torch.equal(x, x_before)
    assert x.grad is None
    assert torch.equal(random, torch.get_rng_state())
    assert [parameter.requires_grad for parameter in net.parameters()] == requires_grad
    assert all(parameter.grad is None for parameter in net.parameters())
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert not any(m.training or m._forward_hooks or m._forward_pre_hooks for m in net.modules())


@pytest.mark.parametrize("name", ["lenet", "residual", "mutating"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_and_in_inference_mode(name, mode):
    expected = nm.two_stage(network(name), inputs(name, 2), 0)
    linear = nm.output_moments(network(name), nm.Gaussian(inputs(name, 2), std=0.1), "linear")
    with mode():
        net, x = network(name).requires_grad_(False) if mode is torch.no_grad else SHARED[name], inputs(name, 2)
        assert_same_network(nm.two_stage(net, x, 0), expected)
        assert_close(
            nm.output_moments(net, nm.Gaussian(x, std=0.1), "linear").covariance, linear.covariance, atol=1e-14
        )
        assert nm.output_moments(net, nm.Gaussian(x, std=0.1), "two-stage").mean.shape == linear.mean.shape
    assert_same_network(nm.two_stage(net, inputs(name, 2), 0), expected)


SHARED = {name: network(name) for name in ("lenet", "residual", "mutating")}


def test_autocast_changes_nothing():
    net, x = network("lenet", torch.float32), inputs("lenet", 2, torch.float32)
    expected = nm.two_stage(net, x, 1)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_network(nm.two_stage(net, x, 1), expected, atol=0)


# moments


def test_moments_of_a_linearized_residual_network():
    """With a path around the ReLU: formulas against samples of g itself."""
    net, x = network("residual"), inputs("residual", 1)[0]
    noise = nm.Gaussian(x, std=0.8)
    for layer in ("block1.relu1", "block2.relu1"):
        g = nm.two_stage(net, x, layer)
        sampled = nm.monte_carlo(g, noise, 40_000, seed=3)
        assert_within_standard_errors(sampled.mean, g.mean(noise), sampled.mean_standard_error)
        assert_within_standard_errors(sampled.variance, g.variance(noise), sampled.variance_standard_error)
        assert_within_standard_errors(sampled.covariance, g.covariance(noise), sampled.covariance_standard_error)


class SkipNetwork(nn.Module):
    """C (x + V relu(U x)) + the input's first coordinates: exactly affine, ReLU, affine with a path around."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.last = nn.Linear(5, 12), nn.Linear(12, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.down(functional.relu(self.up(x)))) + x[:, :3]


def test_one_block_with_a_skip_connection_is_exact():
    """Large noise, where a linearization would be far off; without D the variance is wrong by a third."""
    net = seeded(SkipNetwork)
    noise = nm.Gaussian(torch.zeros(5, dtype=torch.float64), std=2.0)
    found = nm.output_moments(net, noise, "two-stage")
    sampled = nm.monte_carlo(net, noise, 200_000, seed=1)
    report = found.compare(sampled)
    assert float(report.mean.abs().max()) < 5
    assert float(report.variance.abs().max()) < 5
    assert float(report.covariance.abs().max()) < 5
    g = nm.two_stage(net, noise.mean)
    without = nm.AffineReluAffine(g.A, g.c1, g.B, g.c2).variance(noise)
    assert float(nm.relative_difference(without, found.variance).min()) > 0.3


def test_a_residual_network_sampled_and_its_linearization_agree_for_little_noise():
    """The two-stage linearization is right to first order, so its moments are the true ones as σ → 0."""
    net, x = seeded(Residual), inputs("residual", 1)[0]
    noise = nm.Gaussian(x, std=1e-4)
    sampled = nm.monte_carlo(net, noise, 20_000)
    for layer in range(5):
        moments = nm.output_moments(net, noise, nm.TwoStage(layer))
        assert_within_standard_errors(sampled.variance, moments.variance, sampled.variance_standard_error)


# bad input


BAD_OUTPUTS: dict[str, tuple[object, str]] = {
    "too large": ([0, 10], r"outputs must be from 0 to 9, got \[0, 10\]"),
    "too small": ([-11], r"outputs must be from 0 to 9"),
    "fractions": ([0.5], r"must be indices of scores, \(k,\) or \(N, k\), got a float32"),
    "a mask": (torch.ones(10, dtype=torch.bool), r"must be indices"),
    "none": ([], r"must be indices"),
    "for another batch": ([[0], [1], [2]], r"outputs has 3 rows for 2 points"),
}


@pytest.mark.parametrize("case", BAD_OUTPUTS)
def test_bad_outputs(case):
    outputs, message = BAD_OUTPUTS[case]
    for call in (
        lambda: nm.two_stage(network("lenet"), inputs("lenet", 2), outputs=outputs),
        lambda: nm.output_moments(network("lenet"), nm.Gaussian(inputs("lenet", 2), std=0.1), "two-stage", outputs),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("budget", [0, -1, 1e9, True, "1 GB"])
def test_bad_budgets(budget):
    with pytest.raises(ValueError, match="memory_budget must be a positive number of bytes"):
        nm.two_stage(network("shared"), inputs("shared", 1)[0], memory_budget=budget)


SMALL = seeded(lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), torch.float32)
BAD_POINTS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "integer point": (
        lambda: nm.two_stage(SMALL, torch.zeros(4, dtype=torch.int64)),
        TypeError,
        r"at must be float32 or float64",
    ),
    "nan point": (lambda: nm.two_stage(SMALL, torch.full((4,), torch.nan)), ValueError, "at must be finite"),
    "no point": (lambda: nm.two_stage(SMALL, torch.zeros(0, 4)), ValueError, "at least one point"),
    "point of five dimensions": (
        lambda: nm.two_stage(SMALL, torch.zeros(1, 1, 1, 1, 4)),
        ValueError,
        r"must return scores of shape \(batch, classes\), .* for one input of shape \(1, 1, 1, 4\)",
    ),
}


@pytest.mark.parametrize("case", BAD_POINTS)
def test_bad_points(case):
    call, error, message = BAD_POINTS[case]
    with pytest.raises(error, match=message):
        call()


def test_a_tangent_is_the_jacobian_at_the_point():
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double().eval()
    points = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    indices = torch.tensor([[2, 0]]).expand(5, -1)
    found = tangent_at(NetworkModel.of(network, points, "test"), points, indices)
    for point, D, c2 in zip(points, found.D, found.c2, strict=True):
        jacobian = torch.autograd.functional.jacobian(network, point)[[2, 0]]
        torch.testing.assert_close(D, jacobian)
        torch.testing.assert_close(c2 + D @ point, network(point)[[2, 0]])
    torch.testing.assert_close(found(points), network(points)[:, [2, 0]])


class ExitsEarly(nn.Module):
    """How each row is computed depends on its values, which torch's `vmap` cannot follow."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.scores = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        hidden = torch.relu(self.first(x))
        rows = [row if row.sum() > 1e3 else torch.relu(self.second(row)) for row in hidden]
        return self.scores(torch.stack(rows))


class Mapped(nn.Module):
    """Gradients of single rows, many at once."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)

    def forward(self, x):
        return torch.func.vmap(torch.func.grad(lambda row: torch.relu(self.first(row)).sum() * row.sum()))(x)


def test_failed_assertions_of_torch_are_not_quoted():
    torch.manual_seed(0)
    expected = r"cannot be linearized: an assertion inside torch fails \(.*; use method='auto' or 'sampling'"
    with pytest.raises(ValueError, match=expected):
        nm.output_moments(Mapped().eval(), nm.Gaussian(torch.ones(4), std=0.1), "two-stage")


def test_what_torch_cannot_derive_in_many_directions_is_said():
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=r"cannot be linearized: vmap: [^.]* \(.*; use method='auto' or 'sampling'"):
        nm.output_moments(ExitsEarly().eval(), nm.Gaussian(torch.ones(4), std=0.1), "two-stage")
