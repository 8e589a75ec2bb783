"""Networks that share modules or tensors or keep them in unusual places, each with an equal one of plain modules.

All are in float64 and eval mode, for vectors of 3, with 2 scores. `Untouched` checks that a network stays as it was.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from tests.networks import seeded


class Held(nn.Module):
    """`first`, `layer`, which is called through whatever `keep` makes of it, and `last`, with ReLUs between them."""

    def __init__(self, keep: Callable[[nn.Module, nn.Module], Any]) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.call = keep(self, self.layer)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.first(x))
        for function in self.call if isinstance(self.call, list | tuple) else [self.call]:
            y = functional.relu(function(y))
        return self.last(y)


class Pointer:
    """An object that holds a module, and calls it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, x: Tensor) -> Tensor:
        return self.module(x)


def closing_over(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: layer(x)


def closing_over_a_list(layers: list[nn.Module]) -> Callable[[Tensor], Tensor]:
    return lambda x: layers[0](x)


def with_a_default(layer: nn.Module) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor, own: nn.Module = layer) -> Tensor:
        return own(x)

    return function


def applied(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


class Hidden(nn.Module):
    """Its layers are in a Python list only, so that torch does not know them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(3, 4).double(), nn.ReLU(), nn.Linear(4, 2).double()]
        for layer in self.layers:
            layer.eval()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Transposed(nn.Module):
    """One weight matrix, used as it is and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.last = nn.Linear(3, 5), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(functional.relu(functional.relu(self.up(x)) @ self.up.weight))


class Normalised(nn.Module):
    """A batch normalisation that is called twice, and another that shares its running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.other, self.last = (
            nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.Linear(4, 2),
        )  # fmt: skip
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2.0)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm(self.first(x)))
        return self.last(functional.relu(self.other(self.norm(y))))


def used_twice() -> nn.Module:
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.ReLU(), nn.Linear(3, 2))


def tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    net[2].weight, net[2].bias = net[0].weight, net[0].bias
    return net


def normed() -> nn.Module:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(3, 4)), nn.ReLU(), parametrizations.spectral_norm(nn.Linear(4, 2))
    )


def hooked() -> nn.Module:
    """Three hooks: one changes the output of a layer, one its input, and one records an output."""
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    seen: list[Tensor] = []
    net[0].register_forward_hook(lambda module, args, output: 2 * output)
    net[2].register_forward_pre_hook(lambda module, args: (args[0] + 0.5,))
    net[1].register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    return net


def with_itself() -> nn.Module:
    net = Held(lambda network, layer: layer)
    net.everyone = {"network": net, "parts": [net.first, (net.layer, {"last": net.last})]}
    return net


SHARING: dict[str, Callable[[], nn.Module]] = {
    "a module used twice": used_twice,
    "tied parameters": tied,
    "a transposed weight": Transposed,
    "normalisation used twice, and a shared buffer": Normalised,
    "a list": lambda: Held(lambda network, layer: [layer]),
    "a list, twice": lambda: Held(lambda network, layer: [layer, layer]),
    "a tuple": lambda: Held(lambda network, layer: (layer, network.layer)),
    "a bound method": lambda: Held(lambda network, layer: layer.forward),
    "a bound method of its own": lambda: Held(lambda network, layer: network._modules["layer"].__call__),
    "a closure": lambda: Held(lambda network, layer: closing_over(layer)),
    "a list in a closure": lambda: Held(lambda network, layer: closing_over_a_list([layer])),
    "a default argument": lambda: Held(lambda network, layer: with_a_default(layer)),
    "a partial function": lambda: Held(lambda network, layer: functools.partial(applied, layer)),
    "a partial function of a closure": lambda: Held(lambda network, layer: functools.partial(closing_over(layer))),
    "an object": lambda: Held(lambda network, layer: Pointer(layer)),
    "an attribute that holds the network": with_itself,
    "modules torch does not know": Hidden,
    "parametrized weights": normed,
    "hooks": hooked,
}


def shared(name: str) -> nn.Module:
    """A network of `SHARING`, always with the same weights; its biases are raised, so that few units are dead."""
    net = seeded(SHARING[name])
    for parameter in {key: value for key, value in net.named_parameters() if key.endswith("bias")}.values():
        parameter.data += 0.3
    if isinstance(net, Normalised):
        net.other.running_mean = net.norm.running_mean  # converting it to float64 has made two of one
    return net


def unshared(name: str) -> nn.Module:
    """A network of plain modules, none of them twice, that computes the same."""
    net = shared(name)
    if name in ("a module used twice", "tied parameters"):
        return nn.Sequential(*(copy.deepcopy(module) for module in net)).eval()
    if name == "a transposed weight":
        assert isinstance(net, Transposed)
        down = nn.Linear(5, 3, bias=False).double()
        down.weight = nn.Parameter(net.up.weight.detach().T.clone())
        return nn.Sequential(copy.deepcopy(net.up), nn.ReLU(), down, nn.ReLU(), copy.deepcopy(net.last)).eval()
    if name.startswith("normalisation"):
        assert isinstance(net, Normalised)
        parts = (net.first, net.norm, nn.ReLU(), net.norm, net.other, nn.ReLU(), net.last)
        return nn.Sequential(*(copy.deepcopy(module) for module in parts)).eval()
    if name == "modules torch does not know":
        assert isinstance(net, Hidden)
        return nn.Sequential(*(copy.deepcopy(module) for module in net.layers)).eval()
    if name == "parametrized weights":
        plain = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
        for place in (0, 2):
            plain[place].weight = nn.Parameter(net[place].weight.detach().clone())
            plain[place].bias = nn.Parameter(net[place].bias.detach().clone())
        return plain.eval()
    if name == "hooks":
        plain = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
        plain.load_state_dict(net.state_dict())
        with torch.no_grad():
            plain[2].bias += 0.5 * plain[2].weight.sum(1)
            plain[0].weight *= 2
            plain[0].bias *= 2
        return plain.eval()
    assert isinstance(net, Held)
    times = 2 if name in ("a list, twice", "a tuple") else 1
    middle = [copy.deepcopy(module) for _ in range(times) for module in (net.layer, nn.ReLU())]
    return nn.Sequential(copy.deepcopy(net.first), nn.ReLU(), *middle, copy.deepcopy(net.last)).eval()


class Untouched:
    """A block that must leave a network and the global state bit for bit as they were.

    Every parameter gets a gradient first, so that there is one to be lost.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        for parameter in network.parameters():
            parameter.grad = torch.full_like(parameter, 0.25)

    def __enter__(self) -> Untouched:
        torch.manual_seed(99)
        self._structure, self._values = self._found()
        self._global = self._global_state()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        structure, values = self._found()
        assert structure == self._structure
        assert values.keys() == self._values.keys()
        for name, value in values.items():
            assert torch.equal(value, self._values[name]), f"{name} has changed"
        for name, value in self._global_state().items():
            assert np.array_equal(value, self._global[name]), f"{name} has changed"

    def _found(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The structure of the network, with objects by their identity, and the values of its tensors."""
        structure: dict[str, Any] = {"keys": list(self.network.state_dict()), "modules": []}
        for name, module in self.network.named_modules(remove_duplicate=False):
            structure["modules"].append((name, id(module), type(module), module.training))
            for key, value in vars(module).items():
                structure[f"{name}.{key}"] = _identity(value)
        values = {}
        tensors = [*self.network.named_parameters(), *self.network.named_buffers()]
        for name, tensor in tensors:
            structure[f"tensor {name}"] = (
                id(tensor), type(tensor), tensor.requires_grad, tensor.is_leaf, tensor.data_ptr(), id(tensor.grad),
            )  # fmt: skip
            values[name] = tensor.detach().clone()
            if tensor.grad is not None:
                values[f"gradient of {name}"] = tensor.grad.clone()
        return structure, values

    @staticmethod
    def _global_state() -> dict[str, Any]:
        return {
            "torch's random state": torch.get_rng_state().numpy(),
            "numpy's random state": np.random.get_state()[1],  # noqa: NPY002
            "Python's random state": np.array(random.getstate()[1]),
            "grad mode": torch.is_grad_enabled(),
            "default dtype": str(torch.get_default_dtype()),
            "precision": str(torch.backends.mkldnn.matmul.fp32_precision),
        }


def _identity(value: Any) -> Any:
    """What tells an attribute from any other: the identity of objects, also in containers, and the value of numbers."""
    if isinstance(value, dict):
        return [(key, id(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [id(item) for item in value]
    if isinstance(value, int | float | str | bool | None):
        return value
    return id(value)
