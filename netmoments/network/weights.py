"""Weights in safetensors files: nothing is ever unpickled, and no half-written file is left behind."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor, nn

from netmoments.files import open_regular, read_arrays, require_regular, whole_file

PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")
"""Suffixes of files that are refused."""


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, or arrays of an `.npz` file; those in half precision become float32."""
    tensors = _read_arrays(Path(path)) if Path(path).suffix == ".npz" else read_tensors(path)[0]
    return {name: x.float() if x.dtype in (torch.float16, torch.bfloat16) else x for name, x in tensors.items()}


def read_tensors(path: str | Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a safetensors file, in the dtypes that they have, and its metadata."""
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if path.suffix in PICKLES:
        raise ValueError(
            f"{path} is a pickle, which runs code when it is loaded, and is refused; save the weights with "
            f"safetensors.torch.save_file(network.state_dict(), 'weights.safetensors'), "
            f"or the whole network with torch.export.save(torch.export.export(network, (example,)), 'network.pt2'), "
            f"which is looked through and runs none"
        )
    _require_there(path)
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file, or is damaged: {error}") from None


def _require_there(path: Path) -> None:
    """Require that a path is a regular file: reading another one may never end."""
    if not path.exists():
        raise FileNotFoundError(f"no weights at {path}")
    require_regular(path)


def _read_arrays(path: Path) -> dict[str, Tensor]:
    _require_there(path)
    try:
        with open_regular(path) as file:
            arrays, _ = read_arrays(file, lambda name: True)
        return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    except (ValueError, OSError, EOFError, BadZipFile, TypeError, zlib.error) as error:
        raise ValueError(f"{path} does not hold plain arrays, or is damaged: {error}") from None


def write_tensors(path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file whole or not at all."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with whole_file(path) as temporary:
            temporary.touch()
            mode = temporary.stat().st_mode  # as the user's umask wants it, while save_file makes private files
            save_file({name: x.detach().cpu().contiguous() for name, x in tensors.items()}, temporary, dict(metadata))
            temporary.chmod(mode)
    except SafetensorError as error:
        raise OSError(f"{path} could not be written: {error}") from error


def load_weights(network: nn.Module, path: str | Path) -> None:
    """Fill a network from a file for `read_weights`; an error lists names, shapes and kinds of numbers that differ.

    Floats of any size fill floats of any other. Complex numbers, whole numbers and floats do not fill one another.
    """
    tensors = read_weights(path)
    wanted = network.state_dict()
    missing = (name for name in wanted.keys() - tensors.keys() if not name.endswith("num_batches_tracked"))
    problems = [f"missing {name}" for name in missing]
    problems += [f"unknown {name}" for name in tensors.keys() - wanted.keys()]
    problems += [
        f"{name} is {tuple(tensors[name].shape)}, wanted {tuple(wanted[name].shape)}"
        for name in wanted.keys() & tensors.keys()
        if tensors[name].shape != wanted[name].shape
    ]
    problems += [
        f"{name} is {_kind(tensors[name])}, wanted {_kind(wanted[name])}"
        for name in wanted.keys() & tensors.keys()
        if _kind(tensors[name]) != _kind(wanted[name])
    ]
    if problems:
        shown = "; ".join(sorted(problems)[:6]) + ("; …" if len(problems) > 6 else "")
        raise ValueError(f"{path} does not fit {type(network).__name__}: {shown}")
    network.load_state_dict(tensors, strict=False)


def _kind(tensor: Tensor) -> str:
    """The kind of a tensor's numbers, in words."""
    if tensor.is_complex():
        return "complex"
    return "of floats" if tensor.is_floating_point() else "of booleans" if tensor.dtype == torch.bool else "of integers"


def digest_of(*tensors: Tensor) -> str:
    """16 hexadecimal digits of the SHA-256 of tensors in order, with their shapes and dtypes: for configurations."""
    digest = hashlib.sha256()
    for tensor in tensors:
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
