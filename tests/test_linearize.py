"""Linearizations: exact Jacobians in every way of computing them, paths around the cut, dead units, banks."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.func import jacrev
from torch.nn import functional

import netmoments as nm
from netmoments.linearize import two_stage as module
from netmoments.linearize.bank import k_means_centres, members_farthest_from
from netmoments.linearize.jacobian import by_forward_mode, by_reverse_mode, linearized
from netmoments.network.relu_calls import Cut
from netmoments.network.zoo import LeNet
from reproduction.engine import random_network
from tests.closeness import assert_close, assert_within_standard_errors
from tests.networks import FACTORIES, inputs, network, seeded
from tests.test_affine_relu_affine import dense_covariance
from tests.test_gaussian import KINDS, SIZE, structures

PARTS = ("A", "c1", "B", "c2", "D")


def assert_same_network(g: nm.AffineReluAffine, h: nm.AffineReluAffine, *, atol: float = 1e-13, what: str = "") -> None:
    assert (g.D is None) == (h.D is None), what
    for part in PARTS if g.D is not None else PARTS[:4]:
        assert_close(getattr(g, part), getattr(h, part), atol=atol, what=f"{what} {part}")


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
        some = torch.tensor([[0, 2], [1, 0], [2, 1]])
        picked = reverse.gather(1, some.unsqueeze(2).expand(-1, -1, reverse.shape[2]))
        assert_close(by_forward_mode(cut.stem, x, some, 7), picked, atol=1e-13)
        (one,) = by_reverse_mode(z, (leaf,), some, 1)
        assert_close(one, picked, atol=1e-13)


@pytest.mark.parametrize("name", FACTORIES)
def test_slope_and_value_at_the_point_are_the_networks(name):
    """The chain rule: B 1[z > 0] A + D is the network's Jacobian at the point, and g(x) = network(x)."""
    net, x = network(name), inputs(name, 2)
    _, expected = linearized(net, x, torch.arange(net(x.clone()).shape[1]).expand(2, -1), 2)
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
    """Groups are joined with zero rows and columns: only what a point's own network computes is the same."""

    class Gated(nn.Module):
        """relu(x) of the coordinates, thrown away by a second ReLU where they are small; and x itself for one input."""

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
    everything = nm.two_stage(net, x, 1)
    assert_same_network(nm.two_stage(net, x, 1, outputs=[2, 0]), everything.outputs(torch.tensor([2, 0])))
    assert_same_network(nm.two_stage(net, x, 1, outputs=[-1, 0]), everything.outputs(torch.tensor([2, 0])))
    rows = torch.tensor([[0], [2], [1]])
    assert_same_network(nm.two_stage(net, x, 1, outputs=rows), everything.outputs(rows))


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
    """Convolution, ReLU, max-pool, linear: of four units at most one matters."""

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
        assert_close(g.covariance(noise)[i], dense_covariance(whole, alone), atol=1e-14)


def test_rows_of_a_behind_dead_columns_are_never_computed(monkeypatch):
    asked = []

    def noting(outputs, inputs, rows, chunk):
        asked.append(tuple(rows.shape))
        return by_reverse_mode(outputs, inputs, rows, chunk)

    monkeypatch.setattr(module, "by_reverse_mode", noting)
    g = nm.two_stage(seeded(Pooled), torch.randn(1, 4, 4, generator=torch.Generator().manual_seed(5)).double())
    assert asked == [(1, 2), (1, g.A.shape[-2])]


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


# what is left as it was


def test_the_network_and_the_input_are_untouched():
    net = network("mutating", torch.float32)
    net.last.bias.requires_grad_(False)
    needs = [parameter.requires_grad for parameter in net.parameters()]
    before = copy.deepcopy(net.state_dict())
    x = inputs("mutating", 2, torch.float32).requires_grad_()
    kept, random = x.detach().clone(), torch.get_rng_state()
    for layer in (0, 1):
        g = nm.two_stage(net, x, layer)
        assert not any(getattr(g, part).requires_grad for part in PARTS[:4])
    nm.output_moments(net, nm.Gaussian(x, std=0.1), "linear")
    assert torch.equal(x, kept)
    assert x.grad is None
    assert torch.equal(random, torch.get_rng_state())
    assert [parameter.requires_grad for parameter in net.parameters()] == needs
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


# D by itself


def with_path(network: nm.AffineReluAffine, seed: int = 8) -> nm.AffineReluAffine:
    shape = (*network.batch_shape, network.B.shape[-2], network.A.shape[-1])
    D = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return nm.AffineReluAffine(network.A, network.c1, network.B, network.c2, D)


def augmented(g: nm.AffineReluAffine, shift: float = 60.0) -> nm.AffineReluAffine:
    """The same without a path around: x = relu(x + shift) − shift where x + shift is never negative."""
    assert g.D is not None
    eye, n = torch.eye(g.A.shape[-1], dtype=torch.float64), g.A.shape[-1]
    return nm.AffineReluAffine(
        torch.cat([g.A, eye]),
        torch.cat([g.c1, torch.full((n,), shift, dtype=torch.float64)]),
        torch.cat([g.B, g.D], 1),
        g.c2 - shift * g.D.sum(1),
    )


def dense_with_path(g: nm.AffineReluAffine, noise: nm.Gaussian) -> Tensor:
    """B K Bᵀ + B diag(Φ) A Σ Dᵀ + its transpose + D Σ Dᵀ, as Cov(x, relu(z)) = Cov(x, z)Φ; Φ(0) = ½ for variance 0."""
    assert g.D is not None
    covariance = noise.covariance.dense()
    pushed = g.A @ covariance @ g.A.mT
    mean = (g.A @ noise.flat_mean.unsqueeze(-1)).squeeze(-1) + g.c1
    s = pushed.diagonal(dim1=-2, dim2=-1).clamp(min=1e-300).sqrt()
    cross = g.B @ (torch.special.ndtr(mean / s).unsqueeze(-1) * (g.A @ covariance)) @ g.D.mT
    return dense_covariance(g, noise) + cross + cross.mT + g.D @ covariance @ g.D.mT


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_path_around_against_the_dense_formula_and_an_augmented_network(kind, batch):
    """Rounding: the augmented network carries means of 60 where the others have 1, so 1e-14·60 a term."""
    noise = structures(batch)[kind]
    g = with_path(random_network(SIZE, 11, 3, seed=1))
    twin = augmented(g)
    expected = dense_with_path(g, noise).expand(*batch, 3, 3)
    size = max(1.0, float(expected.abs().max()))
    assert_close(g.covariance(noise), expected, atol=1e-13 * size)
    assert_close(g.variance(noise), expected.diagonal(dim1=-2, dim2=-1), atol=1e-13 * size)
    assert_close(g.covariance(noise), twin.covariance(noise), atol=1e-12 * size)
    assert_close(g.mean(noise), twin.mean(noise), atol=1e-11)
    x = noise.sample(4, generator=torch.Generator().manual_seed(1))
    assert_close(g(x), twin(x), atol=1e-11)


def test_gradients_in_d():
    noise = structures()["dense"]
    g = with_path(random_network(SIZE, 5, 2, seed=2))
    assert g.D is not None

    def moments(D: Tensor) -> tuple[Tensor, ...]:
        network = nm.AffineReluAffine(g.A, g.c1, g.B, g.c2, D)
        return network.mean(noise), network.variance(noise), network.covariance(noise)

    assert gradcheck(moments, (g.D.clone().requires_grad_(),))


def test_d_goes_along():
    """Conversion, batches, choices of outputs and of entries; float32."""
    g = with_path(random_network(SIZE, 5, 3, seed=2))
    assert g.D is not None
    batch = nm.AffineReluAffine(g.A, g.c1, g.B, g.c2, g.D.expand(4, -1, -1))
    assert batch.batch_shape == (4,)
    noise = nm.Gaussian(torch.zeros(SIZE, dtype=torch.float64), std=0.5)
    assert_close(batch.variance(noise), g.variance(noise).expand(4, -1), atol=1e-14)
    assert_close(g.outputs(torch.tensor([2, 0])).covariance(noise), g.covariance(noise)[[2, 0]][:, [2, 0]], atol=1e-15)
    assert_close(g.outputs(torch.tensor([[2], [0]])).mean(noise), g.mean(noise)[[2, 0]].unsqueeze(1), atol=1e-15)
    single = g.to(torch.float32)
    assert single.D is not None
    assert single.D.dtype == torch.float32
    assert_close(single.variance(noise.to(torch.float32)), g.variance(noise), rtol=1e-5)


BAD_D: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "transposed": (lambda: ones_with(torch.ones(3, 2)), ValueError, r"D must have shape \(\.\.\., 2, 3\), from inputs"),
    "a vector": (lambda: ones_with(torch.ones(3)), ValueError, r"D must have shape"),
    "another dtype": (lambda: ones_with(torch.ones(2, 3).double()), TypeError, r"A and D must have one dtype"),
    "a list": (lambda: ones_with([[1.0]]), TypeError, r"D must be a torch tensor, got a list"),
    "not finite": (lambda: ones_with(torch.full((2, 3), torch.inf)), ValueError, r"D must be finite, got 6"),
    "another batch": (
        lambda: nm.AffineReluAffine(
            torch.ones(5, 4, 3), torch.ones(4), torch.ones(2, 4), torch.ones(2), torch.ones(7, 2, 3)
        ),
        ValueError,
        r"shapes must broadcast, got A \(5,\), .*D \(7,\)",
    ),
}


def ones_with(D) -> nm.AffineReluAffine:
    return nm.AffineReluAffine(torch.ones(4, 3), torch.ones(4), torch.ones(2, 4), torch.ones(2), D)


@pytest.mark.parametrize("case", BAD_D)
def test_bad_paths_around(case):
    call, error, message = BAD_D[case]
    with pytest.raises(error, match=message):
        call()


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


# banks


@pytest.fixture
def bank() -> nm.LinearizationBank:
    return nm.LinearizationBank.at(network("residual"), inputs("residual", 4, seed=9), "block2.relu1")


def test_a_bank_knows_its_nearest_point_and_how_far_it_is(bank):
    assert len(bank) == 4
    assert bank.relu == "block2.relu1"
    x = inputs("residual", 6, seed=10).reshape(2, 3, 2, 6, 6)
    index, distance = bank.nearest(x)
    apart = torch.cdist(x.reshape(6, -1), bank.points.flatten(1))
    assert torch.equal(index, apart.argmin(1).reshape(2, 3))
    assert_close(distance, apart.min(1).values.reshape(2, 3), rtol=1e-12)
    index, distance = bank.nearest(bank.points[2])
    assert (int(index), float(distance)) == (2, 0.0)


def test_a_bank_answers_with_the_linearization_at_the_nearest_point(bank):
    net, points = network("residual"), inputs("residual", 4, seed=9)
    for i in range(4):
        assert_same_network(bank.member(i), nm.two_stage(net, points[i], "block2.relu1"))
    near = points[torch.tensor([3, 1, 1])] + 1e-3
    noise = nm.Gaussian(near, std=0.2)
    found = nm.output_moments(net, noise, bank=bank)
    assert found.cut == "block2.relu1"
    assert_close(found.distance, [1e-3 * 72**0.5] * 3, rtol=1e-9)
    for i, number in enumerate([3, 1, 1]):
        expected = nm.two_stage(net, points[number], "block2.relu1").covariance(nm.Gaussian(near[i], std=0.2))
        assert_close(found.covariance[i], expected, atol=1e-13)
    some = nm.output_moments(net, noise, outputs=[2, 0], bank=bank)
    assert_close(some.covariance, found.covariance[:, [2, 0]][:, :, [2, 0]], atol=1e-14)
    at_points = nm.output_moments(net, nm.Gaussian(points, std=0.2), bank=bank)
    assert_close(
        at_points.mean, nm.output_moments(net, nm.Gaussian(points, std=0.2), layer="block2.relu1").mean, atol=1e-13
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["residual", "lenet"])
def test_a_bank_is_saved_and_loaded_to_the_bit(name, dtype, tmp_path):
    bank = nm.LinearizationBank.at(network(name, dtype), inputs(name, 3, dtype), 1)
    assert (bank.networks.D is None) == (name == "lenet")
    bank.save(tmp_path / "folder" / "bank.safetensors")
    again = nm.LinearizationBank.load(tmp_path / "folder" / "bank.safetensors")
    assert again.relu == bank.relu
    assert torch.equal(again.points, bank.points)
    assert_same_network(again.networks, bank.networks, atol=0)
    assert again.points.dtype == again.networks.A.dtype == dtype
    assert again.to(torch.float64).points.dtype == torch.float64


def test_banks_of_clusters(generator):
    """Four clusters far apart: the centres are their means, the farthest members what brute force says."""
    net = network("shared")
    corners = 20 * torch.eye(6, dtype=torch.float64)[:4]
    x = (corners[:, None] + torch.randn(4, 15, 6, dtype=torch.float64, generator=generator)).reshape(60, 6)
    means = x.reshape(4, 15, 6).mean(1)
    bank = nm.LinearizationBank.k_means(net, x, 4, seed=1)
    order = torch.cdist(means, bank.points).argmin(1)
    assert_close(bank.points[order], means, atol=1e-10)
    farthest = nm.LinearizationBank.farthest(net, x, 4, seed=1)
    distance = (x.reshape(4, 15, 6) - means[:, None]).norm(dim=2)
    expected = x.reshape(4, 15, 6)[torch.arange(4), distance.argmax(1)]
    assert torch.equal(farthest.points[order], expected)
    assert_same_network(farthest.member(0), nm.two_stage(net, farthest.points[0]))
    started = k_means_centres(x, 4, initial=means)
    assert_close(started, means, atol=1e-10)
    assert torch.equal(k_means_centres(x, 4, seed=3), k_means_centres(x, 4, seed=3))
    nobody = torch.cat([means, 1e3 * torch.ones(1, 6, dtype=torch.float64)])
    assert torch.equal(members_farthest_from(nobody, x)[4], nobody[4])


def other_bank() -> nm.LinearizationBank:
    return nm.LinearizationBank.at(network("shared"), inputs("shared", 2))


BAD_BANKS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "another event shape": (
        lambda: other_bank().nearest(torch.zeros(3, 2, 6, 7, dtype=torch.float64)),
        ValueError,
        r"inputs must have shape \(\.\.\., 6\), got a float64 tensor of shape \(3, 2, 6, 7\)",
    ),
    "noise of another event shape": (
        lambda: nm.output_moments(network("lenet"), nm.Gaussian(inputs("lenet", 1), std=0.1), bank=wide_bank()),
        ValueError,
        r"inputs must have shape \(\.\.\., 6\)",
    ),
    "another dtype": (
        lambda: other_bank().nearest(torch.zeros(6)),
        TypeError,
        r"points and inputs must have one dtype",
    ),
    "another network": (
        lambda: nm.output_moments(
            nn.Sequential(nn.Linear(6, 4), nn.ReLU()).double().eval(),
            nm.Gaussian(inputs("shared", 1), std=0.1),
            bank=other_bank(),
        ),
        ValueError,
        r"the bank is of another network: its linearizations have 3 scores, the network 4",
    ),
    "bank for another method": (
        lambda: nm.output_moments(
            network("shared"), nm.Gaussian(inputs("shared", 1), std=0.1), "linear", bank=other_bank()
        ),
        ValueError,
        r'a bank is for method="two-stage"',
    ),
    "not a bank": (
        lambda: nm.output_moments(network("shared"), nm.Gaussian(inputs("shared", 1), std=0.1), bank=3),
        TypeError,
        r"bank must be a netmoments\.LinearizationBank, got 3",
    ),
    "one point": (
        lambda: nm.LinearizationBank.at(network("shared"), torch.zeros(6).double()),
        ValueError,
        r"points must be \(k, \.\.\.\)",
    ),
    "points as a list": (
        lambda: nm.LinearizationBank.at(network("shared"), [[0.0] * 6]),
        TypeError,
        r"points must be a torch tensor, got a list",
    ),
    "too many clusters": (
        lambda: nm.LinearizationBank.k_means(network("shared"), inputs("shared", 3), 4),
        ValueError,
        r"count must be from 1 to the number of images, 3, got 4",
    ),
    "integer images": (
        lambda: nm.LinearizationBank.farthest(network("shared"), torch.zeros(3, 6, dtype=torch.int64), 2),
        TypeError,
        r"images must be float32 or float64",
    ),
    "points without their networks": (
        lambda: nm.LinearizationBank(inputs("shared", 3), other_bank().networks, "act#1"),
        ValueError,
        r"one linearization for each of the 3 points is needed, got a batch of \(2,\)",
    ),
}


def wide_bank() -> nm.LinearizationBank:
    """A bank for vectors of 6 with as many scores as LeNet."""
    net = seeded(lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 10)))
    return nm.LinearizationBank.at(net, inputs("shared", 2))


@pytest.mark.parametrize("case", BAD_BANKS)
def test_bad_banks(case):
    call, error, message = BAD_BANKS[case]
    with pytest.raises(error, match=message):
        call()


def test_bad_bank_files(tmp_path):
    from safetensors.torch import save_file

    save_file({"points": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="is not a linearization bank"):
        nm.LinearizationBank.load(tmp_path / "other.safetensors")
    path = tmp_path / "bank.safetensors"
    other_bank().save(path)
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(ValueError, match="damaged"):
        nm.LinearizationBank.load(path)
    with pytest.raises(FileNotFoundError, match="no weights at"):
        nm.LinearizationBank.load(tmp_path / "none.safetensors")


def test_the_paper_s_lenet_by_its_shapes():
    """Layer 2 of the default LeNet is the paper's l = 3: 1024 units, all of which matter."""
    net = seeded(LeNet, torch.float32)
    g = nm.two_stage(net, torch.rand(1, 28, 28, generator=torch.Generator().manual_seed(1)))
    assert g.A.shape == (1024, 784)
    assert g.B.shape == (10, 1024)
    assert g.D is None
