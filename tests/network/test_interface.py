"""Networks of any arguments and outputs as functions of rows: containers, keys, shapes, constants, half precision."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import netmoments as nm
from netmoments.network.interface import (
    Arguments,
    FlatNetwork,
    NoisyArgument,
    OutputPart,
    needs_flattening,
    output_parts,
    tensors_inside,
)
from netmoments.network.model import NetworkModel
from tests.closeness import assert_close
from tests.networks import seeded


class Returning(nn.Module):
    """Returns two tensors in some container."""

    def __init__(self, together: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.last, self.together = nn.Linear(4, 6), nn.Linear(6, 3), together

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.first(x))
        return self.together(self.last(hidden), hidden.reshape(-1, 2, 3))


Pair = namedtuple("Pair", "scores image")


@dataclass
class Found:
    scores: Tensor
    image: Tensor
    count: int = 3


CONTAINERS: dict[str, tuple[Callable[[Tensor, Tensor], Any], tuple[str, str]]] = {
    "tuple": (lambda y, z: (y, z), ("0", "1")),
    "list": (lambda y, z: [y, z], ("0", "1")),
    "dictionary": (lambda y, z: {"scores": y, "image": z}, ("scores", "image")),
    "ordered dictionary": (lambda y, z: OrderedDict(out=y, aux=z), ("out", "aux")),
    "numbered dictionary": (lambda y, z: {7: y, 8: z}, ("7", "8")),
    "named tuple": (Pair, ("scores", "image")),
    "dataclass": (Found, ("scores", "image")),
    "nested": (lambda y, z: {"a": [y, None], "b": {"c": (z, "word", 3)}}, ("a.0", "b.c.0")),
    "beside integers": (lambda y, z: (y.argmax(1), y, z, z > 0), ("1", "2")),
}


def flat(net: nn.Module, key: str | int | None = None) -> FlatNetwork:
    return FlatNetwork(net, None, key)


def rows(count: int = 5, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("case", CONTAINERS)
def test_outputs_in_containers_side_by_side(case):
    together, names = CONTAINERS[case]
    net = seeded(lambda: Returning(together))
    parts = output_parts(flat(net), rows(1), "test")
    assert parts == (OutputPart(names[0], torch.Size([3]), 0), OutputPart(names[1], torch.Size([2, 3]), 3))
    assert needs_flattening(parts, flat(net))
    values = seeded(lambda: Returning(lambda y, z: torch.cat([y, z.flatten(1)], 1)))(rows())
    assert torch.equal(flat(net)(rows()), values)
    for name, part in zip(names, parts, strict=True):
        assert torch.equal(flat(net, name)(rows()), values[:, part.start : part.stop])


@pytest.mark.parametrize("case", CONTAINERS)
def test_moments_of_outputs_in_containers(case):
    """All outputs together, one of them picked from the result, and one asked for by key agree."""
    together, names = CONTAINERS[case]
    net, noise = seeded(lambda: Returning(together)), nm.Gaussian(rows(2), std=0.3)
    every = nm.output_moments(net, noise, tolerance=0.1)
    assert every.mean.shape == (2, 9)
    assert [part.name for part in every.parts] == list(names)
    plain = nm.output_moments(
        seeded(lambda: Returning(lambda y, z: torch.cat([y, z.flatten(1)], 1))), noise, tolerance=0.1
    )
    assert_close(every.mean, plain.mean, atol=1e-12)
    assert_close(every.covariance, plain.covariance, atol=1e-12)
    for name, shape, span in ((names[0], (3,), slice(3)), (names[1], (2, 3), slice(3, 9))):
        one = every[name]
        assert one.mean.shape == one.variance.shape == one.error.mean.shape == (2, *shape)
        assert torch.equal(one.mean.flatten(1), every.mean[:, span])
        assert torch.equal(one.covariance, every.covariance[:, span, span])
        assert torch.equal(one.error.covariance, every.error.covariance[:, span, span])
        alone = nm.output_moments(net, noise, tolerance=0.1, key=name)
        assert alone.mean.shape == (2, *shape)
        assert alone.covariance.shape == one.covariance.shape
        off = (alone.mean - one.mean).abs() / (alone.error.mean + one.error.mean)
        assert float(off.max()) < 5


def test_a_number_is_the_key_of_a_place():
    net, noise = seeded(lambda: Returning(lambda y, z: (y, z))), nm.Gaussian(rows(2), std=0.3)
    every = nm.output_moments(net, noise, tolerance=0.1)
    assert torch.equal(every[1].mean, every["1"].mean)
    first, same = (nm.output_moments(net, noise, tolerance=0.1, key=key) for key in (0, "0"))
    assert torch.equal(first.mean, same.mean)


def test_a_key_stands_for_all_below_it():
    net = seeded(lambda: Returning(lambda y, z: {"a": (y, z), "ab": y}))
    assert [name for name, _ in flat(net, "a").outputs(rows())] == ["a.0", "a.1"]
    found = nm.output_moments(net, nm.Gaussian(rows(2), std=0.3), tolerance=0.1, key="a")
    assert [part.name for part in found.parts] == ["a.0", "a.1"]
    assert found["a.1"].mean.shape == (2, 2, 3)


@pytest.mark.parametrize("method", ["layerwise", "sketch", "linear", nm.Sampling(100)])
def test_every_method_takes_them(method):
    net = seeded(lambda: Returning(lambda y, z: {"scores": y, "image": z.relu()}))
    same = seeded(lambda: Returning(lambda y, z: torch.cat([y, z.relu().flatten(1)], 1)))
    noise = nm.Gaussian(rows(2), std=0.3)
    with pytest.warns(UserWarning, match="tanh") if method == "linear" else nullcontext():
        found, expected = (nm.output_moments(which, noise, method) for which in (net, same))
    assert_close(found.mean, expected.mean, atol=1e-12)
    assert_close(found.covariance, expected.covariance, atol=1e-12)
    assert found["image"].mean.shape == (2, 2, 3)


def test_a_model_may_have_a_key():
    net, noise = seeded(lambda: Returning(lambda y, z: {"scores": y, "image": z})), nm.Gaussian(rows(2), std=0.3)
    model = nm.NetworkModel(net, rows(2), key="scores")
    assert (model.outputs, model.given) == (3, net)
    by_model, by_key = (
        nm.output_moments(which, noise, tolerance=0.1, key=key) for which, key in ((model, None), (net, "scores"))
    )
    assert_close(by_model.mean, by_key.mean, atol=1e-13)


# shapes


@pytest.mark.parametrize("shape", [(), (1,), (6,), (2, 3), (1, 2, 3), (1, 1, 2, 3)])
def test_outputs_of_any_shape(shape):
    """Results have the network's shapes; covariances are those of the numbers in order."""
    size = torch.Size(shape).numel()
    net = seeded(lambda: Mapped(lambda y: y[:, :size].reshape(len(y), *shape)))
    same = seeded(lambda: Mapped(lambda y: y[:, :size]))
    for batch in ((), (2,), (2, 1)):
        noise = nm.Gaussian(rows(2)[: max(1, len(batch) and 2)].reshape(*batch, 4), std=0.3, event_ndim=1)
        found, flat_found = (nm.output_moments(which, noise, tolerance=0.1) for which in (net, same))
        assert found.mean.shape == found.variance.shape == found.error.variance.shape == (*batch, *shape)
        assert found.covariance.shape == (*batch, size, size)
        assert found.batch_shape == batch
        assert found.outputs is None
        assert found.parts == ()
        assert_close(found.mean.reshape(flat_found.mean.shape), flat_found.mean, atol=1e-13)
        assert found.class_probabilities().shape == (*batch, size)
        assert found.flip_probability(0).shape == batch


class Mapped(nn.Module):
    """A layer of six units, and a function of its values."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.change = nn.Linear(4, 6), change

    def forward(self, x: Tensor) -> Any:
        return self.change(torch.tanh(self.layer(x)))


def test_scores_need_no_flattening():
    net = seeded(lambda: Mapped(lambda y: y))
    assert not needs_flattening(output_parts(flat(net), rows(1), "test"), flat(net))
    assert NetworkModel.of_any(net, rows(2), "test").network is net


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str | int | None, str]] = {
    "integers": (lambda y: y.argmax(1), None, r"must return a floating-point tensor.*got nothing of the kind"),
    "nothing": (lambda y: None, None, r"must return a floating-point tensor.*got nothing of the kind"),
    "no row": (lambda y: y.sum(), None, r"the output must have one row for each input, got .*shape \(\) for 3 inputs"),
    "one row of all": (lambda y: y.sum(0), None, r"the output must have one row for each input, got .*shape \(6,\)"),
    "a loss beside": (
        lambda y: {"loss": y.mean(), "scores": y},
        None,
        r"output 'loss' must have one row for each input, .*; choose another with key=, such as 'scores'",
    ),
    "no numbers": (lambda y: y[:, :0], None, r"must return at least one number"),
    "no such key": (
        lambda y: {"a": y, "b": [y]},
        "c",
        r"test: the network has no output 'c'; its outputs are: 'a', 'b\.0'$",
    ),
    "a key of one tensor": (lambda y: y, "c", r"no output 'c'; its outputs are: one tensor only, which has no key$"),
    "a number of one tensor": (lambda y: y, 0, r"no output 0; its outputs are: one tensor only, which has no key$"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_rows_is_refused(case):
    change, key, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        NetworkModel.of_any(seeded(lambda: Mapped(change)), rows(2), "test", key=key)


def test_tensors_by_the_path_of_their_keys():
    x, y = torch.zeros(1), torch.ones(2)
    assert list(tensors_inside(x)) == [("", x)]
    assert [name for name, _ in tensors_inside({"a": [x, (y,)], "b": Pair(x, "no"), "c": x.int()})] == [
        "a.0",
        "a.1.0",
        "b.scores",
    ]
    assert list(tensors_inside(Found)) == []  # a class is none
    assert list(tensors_inside("text")) == []


# arguments


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(2, 3)

    def forward(self, x: Tensor, y: Tensor, scale: Any = 1.0) -> Tensor:
        return scale * torch.tanh(self.a(x)) + self.b(y)


def test_calls_put_rows_constants_and_words_where_they_belong():
    net, joined = seeded(Two), torch.cat([rows(3), rows(3)[:, :2]], 1)
    expected = 2.0 * torch.tanh(net.a(rows(3))) + net.b(rows(3)[:, :2])
    x, y = NoisyArgument(0, torch.Size([4])), NoisyArgument(4, torch.Size([2]))
    for structure in ((x, y, 2.0), {"y": y, "x": x, "scale": 2.0}):
        assert_close(Arguments(structure).call(net, joined), expected, atol=0)
    constant = torch.tensor([0.5, -1.0], dtype=torch.float64)
    repeated = Arguments((x, constant)).call(net, rows(3))
    as_it_is = Arguments((x, constant), repeated=False).call(net, rows(3))
    assert_close(repeated, torch.tanh(net.a(rows(3))) + net.b(constant), atol=1e-15)
    assert_close(as_it_is, repeated, atol=1e-15)
    image = NoisyArgument(1, torch.Size([1, 3]))
    assert Arguments((image,)).call(nn.Identity(), rows(3)).shape == (3, 1, 3)


def test_the_key_of_a_call_is_its_form_not_its_numbers():
    x = NoisyArgument(0, torch.Size([4]))
    one, same = Arguments((x, torch.zeros(2), 1.0)), Arguments((x, torch.ones(2), 1.0))
    assert one.key == same.key
    others = [
        Arguments((x, torch.zeros(3), 1.0)),
        Arguments((x, torch.zeros(2), 2.0)),
        Arguments((x, torch.zeros(2).double(), 1.0)),
        Arguments((x, torch.zeros(2), 1.0), repeated=False),
        Arguments({"x": x, "y": torch.zeros(2), "scale": 1.0}),
    ]
    assert all(one.key != other.key for other in others)


# half precision


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_in_half_precision(dtype):
    """The values are the network's own, for inputs rounded to its dtype, and are returned in the noise's dtype."""
    net = seeded(lambda: Returning(lambda y, z: y), torch.float32).to(dtype)
    whole = flat(net)
    assert whole.dtype == dtype
    x = rows(5, torch.float32)
    with torch.no_grad():
        assert torch.equal(whole(x), net(x.to(dtype)).float())
    noise = nm.Gaussian(rows(2, torch.float32), std=0.3)
    found = nm.output_moments(net, noise, tolerance=0.05)
    assert found.mean.dtype == torch.float32
    reference = nm.monte_carlo(lambda x: net(x.to(dtype)).double(), noise, 20_000, seed=3)
    for name in ("mean", "variance"):
        off = getattr(found, name).double() - getattr(reference, name)
        error = (getattr(found.error, name).double() ** 2 + getattr(reference, f"{name}_standard_error") ** 2).sqrt()
        assert float((off / error).abs().max()) < 5, name
    assert {p.dtype for p in net.parameters()} == {dtype}


class Mixed(nn.Module):
    """Half precision except in the last layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6).half(), nn.LayerNorm(6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(torch.relu(self.first(x)).float()))


def test_half_precision_but_for_some_layers():
    net = Mixed().eval()
    x = rows(5, torch.float32)
    with torch.no_grad():
        assert torch.equal(flat(net)(x), net(x.half()))
    assert nm.output_moments(net, nm.Gaussian(x, std=0.1), tolerance=0.1).mean.shape == (5, 2)
    with pytest.raises(TypeError, match=r"the network is torch\.float32 \(norm.weight\) but the input torch\.float64"):
        nm.output_moments(net, nm.Gaussian(rows(2), std=0.1))


class InAutocast(nn.Module):
    """Float32 weights, and scores in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.layers(x)


def test_scores_in_half_precision_are_converted():
    net = seeded(InAutocast, torch.float32)
    noise = nm.Gaussian(torch.zeros(4), std=0.5)
    found, exact = (nm.output_moments(each, noise, tolerance=0.05) for each in (net, net.layers))
    assert found.mean.dtype == torch.float32
    # bfloat16 has 8 bits
    assert float(((found.mean - exact.mean) / exact.variance.sqrt()).abs().max()) < 0.3
    assert float((found.variance / exact.variance).log().abs().max()) < 0.3
    assert nm.class_probabilities(net, noise).probability.shape == (2,)
