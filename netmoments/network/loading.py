"""`load_network`: a network from an exported program, from a factory in a Python file, or by its name in the zoo."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from netmoments.checks import describe
from netmoments.network import zoo
from netmoments.network.exported import load_exported
from netmoments.network.weights import PICKLES, load_weights


def load_network(source: str | Path, weights: str | Path | None = None) -> nn.Module:
    """Load a network, in eval mode.

    Args:
        source: `network.pt2` written by `torch.export.save`; `file.py:factory`, a function or class without arguments
            that makes a module; or the name of a network of the zoo.
        weights: a safetensors or `.npz` file for the factory's or the zoo's network.

    A `.py` file is run, so it must be one you trust. Nothing else runs code: weights are read as tensors, and a `.pt2`
    archive is refused unless all that it does is to compute with tensors (`netmoments.network.exported`).

    >>> import torch
    >>> load_network("digits")(torch.zeros(1, 1, 8, 8)).shape
    torch.Size([1, 10])
    """
    text = str(source)
    if text in zoo.ZOO:
        return zoo.pretrained(text, weights)
    path, _, factory = text.rpartition(":")
    if path.endswith(".py"):
        return _from_factory(Path(path), factory, weights)
    suffix = Path(text).suffix
    if suffix == ".py":
        raise ValueError(f"{text}: which network? name the function or class that makes it: {text}:factory")
    if suffix == ".pt2":
        if weights is not None:
            raise ValueError(f"{text} has its weights inside; leave out weights ({weights})")
        return _exported(Path(text))
    if suffix in PICKLES:
        raise ValueError(
            f"{text} is a pickle, which runs code when it is loaded, and is refused; export the network with "
            f"torch.export.save(torch.export.export(network, (example,)), 'network.pt2'), which is looked through and "
            f"runs none, or give file.py:factory, which is code and is run, and the weights saved by "
            f"safetensors.torch.save_file(network.state_dict(), 'weights.safetensors')"
        )
    raise ValueError(
        f"{text!r} is not a network: wanted a .pt2 file, file.py:factory, or one of the zoo ({', '.join(zoo.ZOO)})"
    )


def with_preprocessing(
    network: nn.Module, mean: Sequence[float] | None, deviation: Sequence[float] | None
) -> nn.Module:
    """The network with `zoo.Normalised` before it, unless both are None."""
    if mean is None and deviation is None:
        return network
    if deviation is not None and min(deviation) <= 0:
        raise ValueError(f"the deviations of the preprocessing must be above 0, got {min(deviation)}")
    return nn.Sequential(zoo.Normalised(mean or (0.0,), deviation or (1.0,)), network).eval()


def _exported(path: Path) -> nn.Module:
    if not path.is_file():
        raise FileNotFoundError(f"no exported network at {path}")
    return load_exported(path)


def _from_factory(path: Path, factory: str, weights: str | Path | None) -> nn.Module:
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    with _as_script(path):
        network = _call(path, factory, _attribute(path, factory))
    if not isinstance(network, nn.Module):
        raise TypeError(f"{path}:{factory} must return a torch.nn.Module, got {describe(network)}")
    if weights is not None:
        load_weights(network, weights)
    return network.eval()


def _call(path: Path, name: str, factory: Callable[[], Any]) -> Any:
    try:
        return factory()
    except Exception as error:
        raise ValueError(
            f"{path}:{name}() failed: {type(error).__name__}: {error}; it must work without arguments"
        ) from error


@contextmanager
def _as_script(path: Path) -> Iterator[None]:
    """Inside this block, code runs as by `python file.py`: it can import modules beside it, and has no arguments."""
    arguments, folder = sys.argv, str(path.resolve().parent)
    sys.argv = [str(path)]
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.argv = arguments
        sys.path.remove(folder)


def _attribute(path: Path, name: str) -> Any:
    """Run a Python file, and return its function or class of this name."""
    spec = importlib.util.spec_from_file_location(f"netmoments_user_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses, among others, look there
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{path} could not be run: {type(error).__name__}: {error}") from error
    factory = getattr(module, name, None)
    if not callable(factory):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ValueError(f"{path} has no function or class {name!r}; it has {', '.join(known) or 'none'}")
    return factory
