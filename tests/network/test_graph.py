"""Graphs: where an operation is, and networks that have none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import netmoments as nm
from netmoments.network.graph import traced_graph
from tests.networks import Residual, inputs, network, seeded


def test_graphs_say_where_an_operation_is():
    graph = traced_graph(seeded(Residual), image(2, 6, 6), "test")
    places = {graph.where(node) for node in graph.nodes if node in graph.noisy}
    assert {"stem", "block1.conv1", "block2.norm2"} <= places


@pytest.mark.parametrize("method", ["auto", *PROPAGATED])
def test_a_network_without_a_fixed_graph_is_refused(method):
    for function in (lambda z: z if z.sum() > 0 else -z, lambda z: z * z.sum().item()):
        net = seeded(lambda function=function: Around(each(function)))
        with pytest.raises(ValueError, match=r"decides by the values it computes .*an if or a loop .*'sampling'"):
            nm.output_moments(net, noise(), method)


def test_an_autograd_function_of_the_old_style_is_recorded_as_what_it_does():
    given = nm.Gaussian(inputs("only backward", 1), std=0.1)
    found = nm.output_moments(network("only backward"), given)
    sampled = nm.monte_carlo(network("only backward"), given, 100_000, seed=2)
    assert float(found.compare(sampled).mean.abs().max()) < 5
    assert float(found.compare(sampled).covariance.abs().max()) < 6
