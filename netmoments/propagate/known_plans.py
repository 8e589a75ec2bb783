"""Plans made before, for networks that have not changed since: making one takes several runs of the network."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from netmoments.network.graph import NetworkGraph, forget_graph, holds, known_graph
from netmoments.propagate.plan import Plan
from netmoments.propagate.planner import Otherwise, planned, planned_with
from netmoments.propagate.rules import registered_rules

Found = TypeVar("Found")
Versions = tuple[tuple[int, int], ...]


class _Known(NamedTuple):
    plan: Plan
    weights: Tensor
    versions: Versions
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
    if not _same_weights(graph, network):
        _known.pop(graph, None)
    return recorded_plan(graph, network, like, caller, otherwise)


def recorded_plan(
    graph: NetworkGraph, network: nn.Module, like: Tensor, caller: str, otherwise: Otherwise | None = None
) -> Plan:
    """The same where torch's counters of changes say that the weights are what they were: for `rechecked`."""
    if torch.is_grad_enabled():
        return _made(graph, network, like, caller, otherwise)
    rules, versions, plans = registered_rules(), _versions(network), _known.setdefault(graph, {})
    found = plans.get(otherwise)
    if found is None or found.rules != rules or not _same_places(found.versions, versions):
        found = _Known(_made(graph, network, like, caller, otherwise), _weights(network), versions, rules)
    elif found.versions != versions:
        weights = _weights(network)
        same = torch.equal(found.weights, weights)
        plan = found.plan if same else _made(graph, network, like, caller, otherwise)
        found = _Known(plan, weights, versions, rules)
    plans[otherwise] = found
    return found.plan


def rechecked(network: nn.Module, image: Tensor, compute: Callable[[], Found]) -> Found:
    """`compute()` from recorded graphs and plans, and once more if the network turns out to have changed since.

    The check comes last: on a GPU the host is then free for it while the answer is computed.
    """
    try:
        found = compute()
    except Exception:
        if not _forgotten(network, image):
            raise
    else:
        if not _forgotten(network, image):
            return found
    return compute()


def _forgotten(network: nn.Module, image: Tensor) -> bool:
    """Whether something known of a network for such images was out of date; it is forgotten then."""
    graph = known_graph(network, image)
    if graph is None:
        return False
    if not holds(graph, network, image):
        forget_graph(network, image)
    elif not _same_weights(graph, network):
        _known.pop(graph, None)
    else:
        return False
    return True


def _same_weights(graph: NetworkGraph, network: nn.Module) -> bool:
    """Whether the plans made from a graph are for the present weights."""
    plans = _known.get(graph)
    if not plans:
        return True
    now = _weights(network)
    return all(torch.equal(known.weights, now) for known in plans.values())


def _made(graph: NetworkGraph, network: nn.Module, like: Tensor, caller: str, otherwise: Otherwise | None) -> Plan:
    if otherwise is None:
        return planned(graph, network, like, caller)
    return planned_with(graph, network, like, caller, otherwise)


def _weights(network: nn.Module) -> Tensor:
    """A copy of all parameters and buffers, end to end."""
    given = [x.detach().flatten() for x in (*network.parameters(), *network.buffers())]
    return torch.cat(given) if given else torch.zeros(0)


def _same_places(before: Versions, now: Versions) -> bool:
    """Whether the weights are where they were: a recording of a plan's work reads them there."""
    return [place for place, _ in before] == [place for place, _ in now]


def _versions(network: nn.Module) -> Versions:
    """Where they are, and how often torch knows them to have changed: not by way of `.data`, nor in inference mode."""
    given = (*network.parameters(), *network.buffers())
    return tuple((x.data_ptr(), 0 if x.is_inference() else x._version) for x in given)
