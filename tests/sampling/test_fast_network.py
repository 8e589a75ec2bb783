"""A network's private copy for sampling: the network's values, whatever is folded, and the network left alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import netmoments as nm
from netmoments.network.model import NetworkModel
from netmoments.network.replica import replica
from netmoments.sampling.fast_network import (
    AttentionByProducts,
    FastNetwork,
    fast_network,
    foldable,
    half_network,
    rectified,
)
from tests.closeness import assert_close
from tests.networks import FACTORIES, Residual, inputs, network, seeded


def normed(factory: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    """A network whose normalisations have statistics and weights, of both signs."""

    def made() -> nn.Module:
        net = factory()
        for module in net.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
                if module.track_running_stats:
                    nn.init.normal_(module.running_mean)
                    nn.init.uniform_(module.running_var, 0.5, 2.0)
                if module.affine:
                    nn.init.normal_(module.weight)
                    nn.init.normal_(module.bias)
        return net

    return seeded(made, dtype)


class Steps(nn.Module):
    """Layers by name, and what is done with them."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def linear() -> dict[str, nn.Module]:
    return {"a": nn.Linear(5, 6), "n": nn.BatchNorm1d(6), "last": nn.Linear(6, 3)}


def image_by_image(net: Any, x: Tensor) -> Tensor:
    """Which layers an input goes through depends on it."""
    rows = x.split(1)
    return torch.cat([net.n(net.a(row)) if bool(row.sum() < 9) else net.a(row) for row in rows])


def with_hook(net: nn.Module, place: str) -> nn.Module:
    net.get_submodule(place).register_forward_hook(lambda module, args, output: output.tanh())
    return net


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "Conv1d": (lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU()), (2, 7), 1),
    "Conv2d": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), (2, 5, 5), 1),
    "Conv3d": (lambda: nn.Sequential(nn.Conv3d(2, 4, 2), nn.BatchNorm3d(4), nn.ReLU()), (2, 3, 3, 3), 1),
    "Conv2d without bias": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4)), (2, 5, 5), 1),
    "Conv2d in groups": (lambda: nn.Sequential(nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d(6)), (4, 5, 5), 1),
    "ConvTranspose1d": (lambda: nn.Sequential(nn.ConvTranspose1d(2, 4, 3), nn.BatchNorm1d(4)), (2, 5), 1),
    "ConvTranspose2d": (lambda: nn.Sequential(nn.ConvTranspose2d(3, 4, 3), nn.BatchNorm2d(4)), (3, 4, 4), 1),
    "ConvTranspose3d": (lambda: nn.Sequential(nn.ConvTranspose3d(2, 3, 2), nn.BatchNorm3d(3)), (2, 2, 2, 2), 1),
    "ConvTranspose2d in groups": (
        lambda: nn.Sequential(nn.ConvTranspose2d(4, 6, 3, groups=2, bias=False), nn.BatchNorm2d(6)),
        (4, 4, 4),
        1,
    ),
    "Linear": (lambda: nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)), (5,), 1),
    "without weights": (lambda: nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6, affine=False)), (5,), 1),
    "in place": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)), (2, 5, 5), 1),
    "two": (
        lambda: nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3), nn.BatchNorm1d(3)),
        (5,),
        2,
    ),
    "residual": (Residual, (2, 6, 6), 4),
    "norm first": (lambda: nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3)), (5,), 0),
    "instance norm": (lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.InstanceNorm1d(4)), (2, 7), 0),
    "other channels": (  # the norm is of the second of three dimensions, the layer's outputs are the last
        lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(3), nn.Flatten()),
        (3, 4),
        0,
    ),
    "other channels, as many": (lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Flatten()), (3, 4), 0),
    "layer called twice": (
        lambda: Steps(lambda s, x: s.n(s.a(x)) + s.a(x), a=nn.Linear(5, 6), n=nn.BatchNorm1d(6)),
        (5,),
        0,
    ),
    "norm called twice": (
        lambda: Steps(lambda s, x: s.last(s.n(s.a(x))) + s.last(s.n(2 * s.a(x))), **linear()),
        (5,),
        0,
    ),
    "norm of two layers": (
        lambda: Steps(
            lambda s, x: s.n(s.a(x)) + s.n(s.b(x)), a=nn.Linear(5, 6), b=nn.Linear(5, 6), n=nn.BatchNorm1d(6)
        ),
        (5,),
        0,
    ),
    "output of the layer taken twice": (
        lambda: Steps(lambda s, x: (lambda z: s.last(s.n(z) + z))(s.a(x)), **linear()),
        (5,),
        0,
    ),
    "taken twice, which shows elsewhere only": (
        lambda: Steps(lambda s, x: (lambda z: s.last(s.n(z) + functional.relu(z - 9)))(s.a(x)), **linear()),
        (5,),
        0,
    ),
    "taken by two norms": (
        lambda: Steps(lambda s, x: (lambda z: s.n(z) + s.m(z))(s.a(x)), m=nn.BatchNorm1d(6), **linear()),
        (5,),
        0,
    ),
    "ReLU in place before the norm": (
        lambda: nn.Sequential(nn.Linear(5, 6), nn.ReLU(inplace=True), nn.BatchNorm1d(6)),
        (5,),
        0,
    ),
    "weights taken elsewhere": (
        lambda: Steps(
            lambda s, x: s.n(s.a(x)) + functional.relu(functional.linear(x, s.a.weight) - 9),
            **linear(),
        ),
        (5,),
        0,
    ),
    "hook on the layer": (lambda: with_hook(nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6)), "0"), (5,), 0),
    "hook on the norm": (lambda: with_hook(nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6)), "1"), (5,), 0),
    "an own forward": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(5, 6)), nn.BatchNorm1d(6)),
        (5,),
        0,
    ),
    "one input at a time": (lambda: Steps(image_by_image, **linear()), (5,), 0),
}


def fast(net: nn.Module, example: Tensor) -> FastNetwork:
    return fast_network(NetworkModel.of_any(net, example, "test"))


def spread_inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    """70 inputs, far enough from the example at 0 that other ReLUs are open; more than one batch of the least size."""
    return 5 * torch.randn(70, *shape, dtype=dtype, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("case", CASES)
def test_the_copy_has_the_network_s_values(case):
    """To the rounding of a few dozen products in float64; what cannot be folded is not."""
    factory, shape, folds = CASES[case]
    net, x = normed(factory), spread_inputs(shape)
    example = torch.zeros(1, *shape, dtype=torch.float64)
    with torch.no_grad():
        assert len(foldable(replica(net), example)) == folds
        expected = net(x.clone()).flatten(1)
    found = fast(net, example).values(x)
    assert_close(found, expected, atol=1e-12 * float(expected.abs().max()))


@pytest.mark.parametrize("case", [case for case, (_, _, folds) in CASES.items() if folds])
def test_what_is_folded_does_not_run(case):
    """A folded layer's copy has another weight, and its norm hands on what it is given."""
    factory, shape, folds = CASES[case]
    net = normed(factory)
    copied = fast(net, torch.zeros(1, *shape, dtype=torch.float64)).run
    assert isinstance(copied, nn.Module)
    x = torch.randn(3, 4)
    silent = [m for m in copied.modules() if "BatchNorm" in type(m).__name__ and "forward" in vars(m)]
    assert len(silent) == folds
    assert all(m(x) is x for m in silent)


@pytest.mark.parametrize("name", FACTORIES)
def test_networks_that_are_harder_than_they_look(name):
    net, x = network(name), inputs(name, 9)
    with torch.no_grad():
        expected = net(x.clone())
    assert_close(fast(net, x[:1]).values(x), expected, atol=1e-12 * float(expected.abs().max()))


def test_float32_and_channels_last():
    """Inputs and weights of either layout, within the rounding of float32."""
    net = normed(Residual, torch.float32)
    x = spread_inputs((2, 6, 6), torch.float32)
    with torch.no_grad():
        expected = net.double()(x.double())
    net = net.float()
    for layout in (torch.contiguous_format, torch.channels_last):
        laid_out = copy.deepcopy(net).to(memory_format=layout)
        copied = fast(laid_out, x[:1].to(memory_format=layout))
        for own in (torch.contiguous_format, torch.channels_last):
            found = copied.values(x.to(memory_format=own))
            assert found.dtype == torch.float32
            assert_close(found, expected, atol=1e-5 * float(expected.abs().max()))


def test_values_are_the_same_in_any_number():
    net = normed(Residual)
    copied, x = fast(net, torch.zeros(1, 2, 6, 6, dtype=torch.float64)), spread_inputs((2, 6, 6))
    together = copied.values(x)
    for count in (1, 7, 64):
        assert_close(copied.values(x[:count]), together[:count], atol=1e-12 * float(together.abs().max()))
    assert not together.requires_grad


def test_pairs_are_the_values_on_both_sides_of_the_mean():
    """Mirrored ones and others, of all outputs or of those that each input names."""
    generator, net = torch.Generator().manual_seed(0), normed(Residual)
    mean = torch.randn(3, 2, 6, 6, dtype=torch.float64, generator=generator)
    deviations, others = torch.randn(2, 4, 3, 72, dtype=torch.float64, generator=generator)
    copied = fast(net, mean[:1])
    outputs = torch.tensor([[1, 0], [2, 2], [0, 1]])
    for second, given in ((-deviations, None), (others, others)):
        every = copied.pairs(mean, deviations, given, None)
        some = copied.pairs(mean, deviations, given, outputs)
        for found, picked, moved in zip(every, some, (deviations, second), strict=True):
            inputs = (mean.flatten(1) + moved).reshape(-1, 2, 6, 6)
            expected = net(inputs).reshape(4, 3, -1)
            assert_close(found, expected, atol=1e-12 * float(expected.detach().abs().max()))
            assert_close(picked, found.gather(2, outputs.expand(4, -1, -1)), atol=1e-12)


def test_work_is_recorded_by_its_kind_and_by_what_is_missing(monkeypatch):
    """As on a GPU, where what was recorded for inputs of some shapes is done again, whatever is given now."""
    kept: dict[Any, Any] = {}

    def recorded(known: dict[Any, Any], work: Callable[..., tuple[Tensor, ...]], *given: Tensor) -> tuple[Tensor, ...]:
        assert all(isinstance(x, Tensor) for x in given)
        return known.setdefault(tuple(x.shape for x in given), work)(*given)

    monkeypatch.setattr("netmoments.sampling.fast_network.recorded", recorded)
    copied = replace(fast(nn.Linear(2, 1).double().eval(), torch.zeros(1, 2, dtype=torch.float64)), recordings=kept)

    def difference(x: Tensor | None, y: Tensor | None) -> tuple[Tensor, ...]:
        return ((0 if x is None else x) - (0 if y is None else y),)  # type: ignore[return-value]

    one, two = torch.ones(1), 2 * torch.ones(1)
    assert copied.replayed("difference", difference, one, None)[0] == 1
    assert copied.replayed("difference", difference, None, one)[0] == -1
    assert copied.replayed("difference", difference, two, one)[0] == 1
    assert copied.replayed("difference", lambda x, y: (y,), two, None)[0] == 2  # from the first recording
    assert copied.replayed("second", lambda x, y: (y,), two, one)[0] == 1


@pytest.mark.parametrize("name", ["residual", "mutating"])
def test_gradients_are_those_of_the_network(name):
    net, x = network(name), inputs(name, 4)
    which = torch.tensor([[0], [2], [1], [0]])
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(net(leaf.clone()).gather(1, which).sum(), leaf)
    with torch.no_grad():
        found = fast(net, x[:1]).gradients(x, which)
    assert_close(found, expected, atol=1e-12 * float(expected.abs().max()))


def state_of(net: nn.Module) -> list[Any]:
    """All that a user could notice a change of."""
    tensors = [*net.named_parameters(), *net.named_buffers()]
    return [
        [(name, x.data_ptr(), x._version, x.stride(), x.requires_grad, x.dtype) for name, x in tensors],
        [x.clone() for _, x in tensors],
        [None if p.grad is None else p.grad.clone() for p in net.parameters()],
        [
            (name, id(m), m.training, list(m._forward_hooks), list(m._forward_pre_hooks), sorted(vars(m)))
            for name, m in net.named_modules()
        ],
    ]


def assert_equal(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_equal(a, b)
    elif isinstance(one, Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_network_stays_as_it_is(layout):
    net = normed(Residual).to(memory_format=layout)
    net.relu.register_forward_hook(lambda module, args, output: None)
    x = spread_inputs((2, 6, 6))[:3]
    net(x).sum().backward()
    before = state_of(net)
    model = NetworkModel.of_any(net, x[:1], "test")
    with torch.no_grad():
        copied = fast_network(model)
    copied.values(x)
    copied.gradients(x, torch.zeros(3, 1, dtype=torch.int64))
    nm.output_moments(net, nm.Gaussian(x, std=0.1), tolerance=0.1)
    assert_equal(state_of(net), before)


def test_the_copy_shares_no_weights():
    net = normed(Residual)
    copied = fast(net, torch.zeros(1, 2, 6, 6, dtype=torch.float64)).run
    assert isinstance(copied, nn.Module)
    theirs = {x.untyped_storage().data_ptr() for x in (*net.parameters(), *net.buffers())}
    assert not theirs & {x.untyped_storage().data_ptr() for x in (*copied.parameters(), *copied.buffers())}
    assert not any(x.requires_grad for x in copied.parameters())


def scale(net: nn.Module) -> None:
    with torch.no_grad():
        net.fc.weight.mul_(3)


def scale_data(net: nn.Module) -> None:
    net.fc.weight.data.mul_(3)


def new_weight(net: nn.Module) -> None:
    net.fc.weight = nn.Parameter(3 * net.fc.weight.detach())


def loaded(net: nn.Module) -> None:
    net.load_state_dict({name: 3 * x if name == "fc.weight" else x for name, x in net.state_dict().items()})


def statistics(net: nn.Module) -> None:
    net.block1.norm1.running_mean.add_(1)


def statistics_data(net: nn.Module) -> None:
    net.block1.norm1.running_var.data.mul_(4)


def another_layer(net: nn.Module) -> None:
    net.block2.norm2 = nn.Identity().eval()


CHANGES = [scale, scale_data, new_weight, loaded, statistics, statistics_data, another_layer]
AUTO, PLAIN = nm.Auto(tolerance=0.1), nm.Sampling(100)


@pytest.mark.parametrize(("method", "change"), [*((AUTO, change) for change in CHANGES), (PLAIN, scale_data)])
def test_the_copy_is_made_anew_when_the_network_changes(method, change):
    """Then the answer is that for a network which was never asked about before."""
    net, noise = normed(Residual), nm.Gaussian(inputs("residual", 2), std=0.1)
    before = nm.output_moments(net, noise, method)
    change(net)
    after, fresh = (nm.output_moments(which, noise, method) for which in (net, copy.deepcopy(net)))
    assert_close(after.mean, fresh.mean, atol=1e-12)
    assert_close(after.covariance, fresh.covariance, atol=1e-12)
    assert float((after.mean - before.mean).abs().max()) > 1e-3


def test_the_copy_is_kept_while_nothing_changes():
    model = NetworkModel.of_any(normed(Residual), inputs("residual", 1), "test")
    first = fast_network(model)
    assert fast_network(model) is first
    scale(model.network)
    assert fast_network(model) is not first


def test_a_budget_of_memory_bounds_the_batch():
    """Of six copies of the largest activation for each input, in half of the budget; the copy itself is the same."""
    model = NetworkModel.of_any(normed(Residual), inputs("residual", 1), "test")
    free = fast_network(model)
    model.memory_budget = 2 * 6 * model.largest * 8 * 3
    bound = fast_network(model)
    assert bound.batch == 3 < free.batch
    assert bound.run is free.run
    model.memory_budget = 2**40
    assert fast_network(model).batch == free.batch


def test_half_precision_is_for_a_gpu():
    assert half_network(NetworkModel.of_any(normed(Residual, torch.float32), torch.zeros(1, 2, 6, 6), "test")) is None


def test_a_norm_without_statistics_is_not_folded():
    """It takes those of the batch, for which a network is refused."""
    net = normed(lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4, track_running_stats=False), nn.Flatten()))
    with torch.no_grad():
        assert foldable(replica(net), torch.ones(1, 2, 7, dtype=torch.float64)) == []
    with pytest.raises(ValueError, match="depends on the other images of the batch"):
        nm.output_moments(net, nm.Gaussian(spread_inputs((2, 7))[:2], std=0.1, event_ndim=2))


class Rectified(nn.Module):
    """Convolutions with a ReLU behind them, in place or not, one that another layer takes too, one without."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.inplace, self.shared, self.bare = (nn.Conv2d(2, 2, 3, padding=1) for _ in range(4))
        self.last = nn.Linear(2 * 36, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.plain(x))
        x = torch.relu_(self.inplace(x))
        both = self.shared(x)
        x = torch.relu(both) + both
        return self.last(self.bare(x).flatten(1))


def test_convolutions_whose_positive_part_alone_is_used():
    net = Rectified().eval()
    with torch.no_grad():
        found = rectified(net, torch.ones(1, 2, 6, 6))
    assert found == [net.plain, net.inplace]
    net.plain.register_forward_hook(lambda module, args, output: None)
    with torch.no_grad():
        assert rectified(net, torch.ones(1, 2, 6, 6)) == [net.inplace]
    assert "forward" not in vars(net.inplace)


class Viewed(nn.Module):
    """Flattens with `view`, which channels last do not allow."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(1, 3, 3), nn.Linear(27, 2)

    def forward(self, x):
        return self.last(torch.relu(self.conv(x)).view(-1, 27))


class Strided(Viewed):
    """Takes numbers as they lie in memory: with channels last, others."""

    def forward(self, x):
        y = torch.relu(self.conv(x))
        return self.last(torch.as_strided(y, (len(y), 27), (27, 1)))


@pytest.mark.parametrize("kind", [Viewed, Strided])
def test_networks_that_mind_how_images_lie_in_memory(kind):
    network = seeded(kind, torch.float32)
    noise = nm.Gaussian(torch.linspace(0, 1, 25).reshape(1, 5, 5), std=0.3)
    fast = fast_network(nm.NetworkModel(network, noise.mean))
    assert fast.layout == torch.contiguous_format
    x = noise.sample(5)
    torch.testing.assert_close(fast.values(x), network(x))
    for method in ("auto", "layerwise", "sketch", "linear"):
        assert nm.output_moments(network, noise, method).mean.shape == (2,)


class Switched(nn.Module):
    """One convolution and two norms, of which the brightness of an image chooses one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(1, 4, 3), nn.Linear(4 * 16, 3)
        self.dark, self.bright = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        for norm in (self.dark, self.bright):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.1, 2)

    def forward(self, x: Tensor) -> Tensor:
        dark, y = x.mean((1, 2, 3)) < 0.9, x.new_zeros(len(x), 4, 4, 4)
        for norm, chosen in ((self.dark, dark), (self.bright, ~dark)):
            if chosen.any():
                y = y.index_put((chosen.nonzero()[:, 0],), norm(self.conv(x[chosen])))
        return self.last(torch.relu(y).flatten(1))


def test_a_norm_that_only_some_images_meet_is_not_folded():
    net, x = seeded(Switched, torch.float32), torch.full((1, 1, 6, 6), 0.2)
    fast = fast_network(NetworkModel.of_any(net, x, "test"))
    images = torch.cat([x, x + 1])
    assert_close(fast.values(images), net(images).detach(), rtol=1e-4, atol=1e-5)


class Crowded(nn.Module):
    """Every expert takes 16 images of a batch, and no more."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 2), nn.ModuleList(nn.Linear(4, 3) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        choice, y = self.gate(x).argmax(1), x.new_zeros(len(x), 3)
        for number, expert in enumerate(self.experts):
            taken = (choice == number).nonzero()[:, 0][:16]
            y = y.index_copy(0, taken, expert(x[taken]))
        return y


def test_a_capacity_shared_by_a_batch_is_refused():
    net, noise = seeded(Crowded, torch.float32), nm.Gaussian(torch.ones(4), std=0.1)
    with pytest.raises(ValueError, match=r"depends on the other images of a batch of \d+ \(a capacity"):
        nm.output_moments(net, noise)


class Attending(nn.Module):
    """Attention between the five parts of an input of 40 numbers, with these further arguments."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.parts, self.last, self.arguments = nn.Linear(8, 3 * 8), nn.Linear(40, 3), arguments

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.parts(x.reshape(-1, 5, 8)).unflatten(-1, (6, 4)).transpose(1, 2).chunk(3, 1)
        y = functional.scaled_dot_product_attention(query, key, value, **self.arguments)
        return self.last(y.transpose(1, 2).flatten(1))


@pytest.mark.parametrize(
    ("arguments", "by_products"),
    [
        ({}, True),
        ({"attn_mask": None, "is_causal": False}, True),
        ({"is_causal": True}, False),
        ({"scale": 0.3}, False),
        ({"attn_mask": torch.eye(5, dtype=torch.bool)}, False),
    ],
    ids=["plain", "plain, in words", "causal", "scaled", "masked"],
)
def test_attention_by_products(arguments, by_products):
    """Plain attention has the same values and derivatives by matrix products; any other is left to torch."""
    net, x = seeded(lambda: Attending(**arguments)), spread_inputs((40,)).requires_grad_()
    expected = net(x)
    with AttentionByProducts() as attention:
        values = net(x)
    assert attention.seen is by_products
    assert_close(values, expected, atol=1e-14, what="values")
    slopes = (torch.autograd.grad(each[:, 0].sum(), x)[0] for each in (values, expected))
    assert_close(*slopes, atol=1e-14, what="derivatives")
