"""Graphs: the module of each operation, weights that change, and networks without a fixed graph."""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import netmoments as nm
from netmoments.network.graph import shape_of, traced_graph
from tests.closeness import assert_close
from tests.networks import FACTORIES, Residual, inputs, network, seeded


@pytest.mark.parametrize("name", FACTORIES)
def test_a_graph_computes_what_the_network_computes(name):
    """Also for another image than the one it was recorded with, and after the weights have changed in place."""
    net, x = network(name), inputs(name, 2)
    graph = traced_graph(net, x[:1], "test")
    for _ in range(2):
        with torch.no_grad():
            values = graph.values(graph.constants(net), x[1:])
            assert_close(values[graph.output], net(x[1:].clone()), rtol=1e-13, atol=1e-14)
            for parameter in net.parameters():
                parameter.mul_(1.1).add_(0.01)


def test_graphs_say_where_an_operation_is():
    graph = traced_graph(seeded(Residual), inputs("residual", 1), "test")
    places = {graph.where(node) for node in graph.nodes if node in graph.noisy}
    assert {"stem", "block1.conv1", "block2.norm2"} <= places


def test_a_graph_leaves_nothing_in_the_store_of_sources():
    """Torch remembers the source of every graph it compiles, for as long as the process lives."""
    before = len(linecache.cache), len(torch.fx.graph_module._loader.eval_cache)
    traced_graph(seeded(Residual), inputs("residual", 1), "test")
    assert (len(linecache.cache), len(torch.fx.graph_module._loader.eval_cache)) == before


class ByImage(nn.Module):
    """Linear, a function of one image at a time, ReLU, Linear."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.function, self.last = nn.Linear(4, 5), function, nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(functional.relu(torch.stack([self.function(z) for z in self.first(x)])))


NOISE = nm.Gaussian(torch.tensor([0.3, -1.0, 0.7, 0.2], dtype=torch.float64), std=0.3)


@pytest.mark.parametrize("method", ["layerwise", "sketch"])
def test_a_network_without_a_fixed_graph_is_refused(method):
    """Methods by formulas refuse it; sampling needs no graph."""
    for function in (lambda z: z if z.sum() > 0 else -z, lambda z: z * z.sum().item()):
        net = seeded(lambda function=function: ByImage(function))
        with pytest.raises(ValueError, match=r"decides by what it computes from its input .*an if .*'sampling'"):
            nm.output_moments(net, NOISE, method)
        for sampling in (nm.Sampling(100), nm.Auto(tolerance=0.1)):
            assert nm.output_moments(net, NOISE, sampling).mean.shape == (3,)


class Masked(nn.Module):
    """A Transformer encoder and decoder with causal masks, which torch looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 1)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, 8, batch_first=True), 1)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(3))

    def forward(self, x: Tensor) -> Tensor:
        made = nn.Transformer.generate_square_subsequent_mask(3).to(x)
        return self.decoder(self.encoder(x, mask=made), x, tgt_mask=self.mask)[:, -1]


class Hot(nn.Module):
    """A place as a vector of zeros and a one, whose numbers torch looks at."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1).relu() * functional.one_hot(torch.arange(12) % 3, 5).argmax(1).to(x)


class Packed(nn.Module):
    """Two sequences of constant lengths in each image, which a recurrent layer takes without their padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.GRU(2, 4, batch_first=True)
        self.register_buffer("lengths", torch.tensor([1, 3]))

    def forward(self, x: Tensor) -> Tensor:
        y, lengths = x.reshape(2 * len(x), 3, 2), self.lengths.repeat(len(x))
        packed = nn.utils.rnn.pack_padded_sequence(y, lengths, batch_first=True, enforce_sorted=False)
        padded = nn.utils.rnn.pad_packed_sequence(self.words(packed)[0], batch_first=True)[0]
        return padded.sum(1).reshape(len(x), 8)


@pytest.mark.parametrize("kind", [Masked, Hot, Packed])
def test_values_that_do_not_depend_on_the_input_may_be_read(kind):
    """Masks, places and lengths; 10⁵ samples know a variance to 0.5 %, and formulas are nearer than 10 %."""
    net = seeded(kind)
    mean = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    given = nm.Gaussian(mean, std=0.05, event_ndim=2)
    sampled = nm.monte_carlo(net, given, 100_000)
    moved = sampled.variance > 0
    for method in (nm.Layerwise(), nm.Sketch(probes=256)):
        found = nm.output_moments(net, given, method)
        assert float((found.variance / sampled.variance - 1)[moved].abs().max()) < 0.1


class ByWeight(nn.Module):
    """Decides by a weight, and takes one for a number."""

    def __init__(self) -> None:
        super().__init__()
        self.threshold, self.scale = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return (x.relu() if self.threshold > 0 else x.abs()) * self.scale.item()


def test_a_network_that_decides_by_a_weight_is_recorded_anew_when_that_changes():
    net, x, std = seeded(ByWeight), NOISE.mean, torch.full_like(NOISE.mean, 0.3)
    for threshold, scale in ((1.0, 2.0), (-1.0, 2.0), (-1.0, 3.0)):
        with torch.no_grad():
            net.threshold.fill_(threshold)
            net.scale.fill_(scale)
        wanted = nm.relu_mean(x, std) + (0 if threshold > 0 else nm.relu_mean(-x, std))
        assert_close(nm.output_moments(net, NOISE, "layerwise").mean, scale * wanted, rtol=1e-9)


class Keeping(nn.Module):
    """Decides by a buffer that was computed from the image."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.kept[:2] = x[0, :2]
        return x.relu() if self.kept.sum() > -100 else x.abs()


def test_values_kept_from_the_input_may_not_be_read():
    graph_error = r"decides by what it computes from its input|cannot be recorded"
    with pytest.raises(ValueError, match=graph_error):
        traced_graph(seeded(Keeping), NOISE.mean.unsqueeze(0), "test")


def test_a_scripted_part_is_recorded_and_its_relu_is_none_to_cut_at():
    """Nothing stops a scripted module in the middle, so that no ReLU of it is listed; its operations are known."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = [torch.jit.script(seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU())))]
    net = nn.Sequential(*parts, seeded(lambda: nn.Linear(4, 2))).eval()
    assert nm.relus(net, NOISE.mean.unsqueeze(0)) == ()
    with pytest.raises(ValueError, match=r"has no ReLU .* scripted modules cannot be looked into"):
        nm.output_moments(net, NOISE, "two-stage")
    for scale in (1.0, 2.0):
        with torch.no_grad():
            net[0][0].weight.mul_(scale)
        found, sampled = nm.output_moments(net, NOISE), nm.monte_carlo(net, NOISE, 100_000)
        assert found.method == "exact"
        assert float(found.compare(sampled).covariance.abs().max()) < 5


def test_an_autograd_function_of_the_old_style_is_recorded_as_what_it_does():
    given = nm.Gaussian(inputs("only backward", 1), std=0.1)
    found = nm.output_moments(network("only backward"), given)
    assert found.method == "exact"
    sampled = nm.monte_carlo(network("only backward"), given, 100_000, seed=2)
    assert float(found.compare(sampled).mean.abs().max()) < 5
    assert float(found.compare(sampled).covariance.abs().max()) < 6


class Unusual(nn.Module):
    """Two dimensions exchanged in place, and a quotient by an expanded tensor."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.stack([x.sin(), x.cos()]).transpose_(0, 1)
        return (y / (1 + y.square().sum(-1, keepdim=True)).expand_as(y)).flatten(1)


def test_dimensions_exchanged_in_place_and_quotients_by_what_was_expanded():
    """The first becomes an operation that returns a new tensor; the second has one reciprocal for each sum."""
    net, x = Unusual(), torch.randn(1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    graph = traced_graph(net, x, "test")
    targets = {str(node.target): shape_of(node) for node in graph.nodes if node in graph.noisy}
    assert "aten.transpose.int" in targets
    assert "aten.transpose_.default" not in targets
    assert targets["aten.reciprocal.default"] == (1, 2, 1)
    another = torch.ones(1, 4, dtype=torch.float64)
    values = graph.values(graph.constants(net), another)
    assert_close(values[graph.output], net(another), rtol=1e-13, atol=1e-14)
    assert all(shape_of(node) == values[node].shape for node in graph.nodes if node in graph.noisy)


def test_layers_are_found_where_nodes_were_put_between_the_recorded_ones():
    """Circular padding writes into slices, which become new tensors; the pool after it is still one layer."""
    layers = nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), nn.ReLU(), nn.LPPool2d(2, 2), nn.Flatten()
    net = seeded(lambda: nn.Sequential(*layers, nn.Linear(18, 2)), torch.float32)
    given = nm.Gaussian(torch.rand(1, 6, 6, generator=torch.Generator().manual_seed(1)), std=0.1)
    truth = nm.monte_carlo(net, given, 20_000)
    for method in ("layerwise", "sketch"):
        found = nm.output_moments(net, given, method)
        off = (found.mean - truth.mean).abs() / (found.error.mean**2 + truth.mean_standard_error**2).sqrt()
        assert float(off.max()) < 5
