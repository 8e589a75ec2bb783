"""Compound operators that are written out give the same results, and are recorded as elementary ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from netmoments.network.elementary import WRITTEN_OUT
from netmoments.network.graph import traced_graph
from tests.networks import seeded

aten = torch.ops.aten


class Function(nn.Module):
    """A function of inputs in some shape, as rows of numbers."""

    def __init__(self, function: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> None:
        super().__init__()
        self.function, self.shape = function, shape

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x.reshape(len(x), *self.shape)).flatten(1)


def affine_group_norm(x: Tensor) -> Tensor:
    return functional.group_norm(x, 2, torch.arange(1.0, 5).to(x), torch.arange(4.0).to(x))


def affine_instance_norm(x: Tensor) -> Tensor:
    return functional.instance_norm(x, weight=torch.arange(1.0, 5).to(x), bias=torch.arange(4.0).to(x))


WIDE = (4, 6, 6)
CASES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "layer norm": (lambda x: functional.layer_norm(x, (6, 6)), "native_layer_norm"),
    "group norm": (affine_group_norm, "native_group_norm"),
    "instance norm": (affine_instance_norm, "native_batch_norm"),
    "variance": (lambda x: x.var((1, 2)), "var"),
    "deviation": (lambda x: x.std(-1, correction=0), "std"),
    "variance and mean": (lambda x: torch.stack(torch.var_mean(x, -1)), "var_mean"),
    "length": (lambda x: x.flatten(1).norm(dim=1, keepdim=True), "linalg_vector_norm"),
    "unit vectors": (lambda x: functional.normalize(x.flatten(1)), "linalg_vector_norm"),
    "quotient": (lambda x: x / (3 + x.square().sum(-1, keepdim=True)), "div"),
    "gated": (lambda x: functional.glu(x, 1), "glu"),
    "log-softmax": (lambda x: x.log_softmax(1), "_log_softmax"),
    "log-sigmoid": (functional.logsigmoid, "log_sigmoid_forward"),
    "added product": (lambda x: torch.addcmul(x, x, x, value=0.5), "addcmul"),
    "added quotient": (lambda x: torch.addcdiv(x, x, 3 + x.square(), value=0.5), "addcdiv"),
    "between": (lambda x: torch.lerp(x, x.square(), x.sigmoid()), "lerp"),
    "added matrices": (lambda x: torch.baddbmm(x[:, 0], x[:, 1], x[:, 2], beta=0.5, alpha=2), "baddbmm"),
    "product": (lambda x: x.prod(1, keepdim=True), "prod"),
    "bilinear": (lambda x: functional.bilinear(x[:, 0], x[:, 1], torch.ones(3, 6, 6).to(x)), "_trilinear"),
    "distances": (lambda x: torch.cdist(x, x[:, :1] + 2), "_cdist_forward"),
    "places in memory": (lambda x: x.transpose(1, 2).as_strided((len(x), 3, 5), (144, 2, 7)), "as_strided"),
    "log(1 + x)": (lambda x: torch.log1p(x.square()), "log1p"),
}


@pytest.mark.parametrize("name", CASES)
def test_written_out_operators_give_what_they_give(name):
    function, operator = CASES[name]
    network = Function(function, WIDE)
    x = torch.randn(1, 144, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    graph = traced_graph(network, x, "test")
    kinds = {getattr(node.target, "overloadpacket", None) for node in graph.nodes}
    assert getattr(aten, operator) not in kinds
    another = torch.randn(1, 144, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    values = graph.values(graph.constants(network), another)
    torch.testing.assert_close(values[graph.output], network(another), rtol=1e-12, atol=1e-12)


NOT_WRITTEN_OUT: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "norms of few numbers": (lambda x: functional.layer_norm(x, (6,)), "native_layer_norm"),
    "groups of few": (lambda x: functional.group_norm(x[..., :2, :2], 4), "native_group_norm"),
    "maps of few": (lambda x: functional.instance_norm(x[..., :2, :2]), "native_batch_norm"),
    "lengths of few numbers": (lambda x: x.norm(dim=1), "linalg_vector_norm"),
    "another length": (lambda x: x.norm(1, dim=1), "linalg_vector_norm"),
    "other distances": (lambda x: torch.cdist(x, x[:, :1] + 2, p=1), "_cdist_forward"),
    "division by a number": (lambda x: x / 3, "div"),
    "places outside of a tensor": (lambda x: x[:, 1:].as_strided((len(x), 5), (144, 1), 0), "as_strided"),
    "many factors": (lambda x: x.flatten(1).prod(1, keepdim=True), "prod"),
}


@pytest.mark.parametrize("name", NOT_WRITTEN_OUT)
def test_others_are_left_as_they_are(name):
    function, operator = NOT_WRITTEN_OUT[name]
    x = torch.randn(1, 144, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    kinds = {
        getattr(node.target, "overloadpacket", None) for node in traced_graph(Function(function, WIDE), x, "test").nodes
    }
    assert getattr(aten, operator) in kinds


def test_batch_normalisation_with_learned_statistics_is_one_operator():
    network = seeded(lambda: nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Flatten()))
    kinds = [str(node.target) for node in traced_graph(network, torch.zeros(1, 1, 8, 8).double(), "test").nodes]
    assert any("batch_norm" in kind for kind in kinds)


def test_steps_of_recurrent_layers_as_a_gpu_does_them():
    """The fused operators that torch calls there without cuDNN, against torch's own cells."""
    generator = torch.Generator().manual_seed(0)
    x, h, c = (torch.randn(1, n, dtype=torch.float64, generator=generator) for n in (5, 4, 4))
    for cell, operator, states in (
        (nn.LSTMCell(5, 4), aten._thnn_fused_lstm_cell.default, (h, c)),
        (nn.GRUCell(5, 4), aten._thnn_fused_gru_cell.default, (h,)),
    ):
        cell = cell.double()
        with torch.no_grad():
            wanted = cell(x, states if len(states) > 1 else h)
            products = x @ cell.weight_ih.T, h @ cell.weight_hh.T
            found = WRITTEN_OUT[operator](*products, states[-1], cell.bias_ih, cell.bias_hh)
        for one, another in zip(found, wanted if isinstance(wanted, tuple) else (wanted,), strict=False):
            torch.testing.assert_close(one, another)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_recorded_step_by_step(layer):
    """Also in float32, for which a CPU has one kernel for a whole LSTM; the user's setting is restored."""
    network = seeded(lambda: nn.Sequential(layer(3, 4, batch_first=True, bidirectional=True), First(), nn.Flatten()))
    network, before = network.float(), torch._C._get_mkldnn_enabled()
    graph = traced_graph(network, torch.zeros(1, 6, 3), "test")
    assert torch._C._get_mkldnn_enabled() == before
    kinds = [str(node.target) for node in graph.nodes]
    assert sum("tanh" in kind for kind in kinds) >= 12
    assert not any("rnn_layer" in kind or "lstm" in kind for kind in kinds)


class First(nn.Module):
    """The outputs of a recurrent layer, without its last state."""

    def forward(self, found: tuple[Tensor, Tensor]) -> Tensor:
        return found[0]
