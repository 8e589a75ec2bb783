"""Plans made before, for networks that have not changed since: making one takes several runs of the network."""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from netmoments.network.graph import NetworkGraph
from netmoments.propagate.plan import Plan
from netmoments.propagate.planner import Otherwise, planned, planned_with
from netmoments.propagate.rules import registered_rules


class _Known(NamedTuple):
    plan: Plan
    weights: Tensor
    rules: tuple[object, ...]


_known: WeakKeyDictionary[NetworkGraph, dict[Otherwise | None, _Known]] = WeakKeyDictionary()


def plan_for(
    graph: NetworkGraph, network: nn.Module, like: Tensor, caller: str, otherwise: Otherwise | None = None
) -> Plan:
    """`planned`, or `planned_with`, for the network's present weights.

    A plan holds numbers that were computed from the weights, so it is used again only where they and the registered
    rules are the same, and where no derivative in them is wanted. Anything else that changes what a network computes
    changes its graph.
    """
    if torch.is_grad_enabled():
        return _made(graph, network, like, caller, otherwise)
    weights, rules = _weights(network), registered_rules()
    found = _known.setdefault(graph, {}).get(otherwise)
    if found is None or found.rules != rules or not torch.equal(found.weights, weights):
        found = _known[graph][otherwise] = _Known(_made(graph, network, like, caller, otherwise), weights, rules)
    return found.plan


def _made(graph: NetworkGraph, network: nn.Module, like: Tensor, caller: str, otherwise: Otherwise | None) -> Plan:
    if otherwise is None:
        return planned(graph, network, like, caller)
    return planned_with(graph, network, like, caller, otherwise)


def _weights(network: nn.Module) -> Tensor:
    """A copy of all parameters and buffers, end to end."""
    given = [x.detach().flatten() for x in (*network.parameters(), *network.buffers())]
    return torch.cat(given) if given else torch.zeros(0)
