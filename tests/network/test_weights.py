"""Weights in files: read as plain tensors only, written whole or not at all; errors explain what does not fit."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import netmoments as nm
from netmoments.network.weights import load_weights, read_tensors, read_weights, write_tensors
from tests.data.files import claiming_npz
from tests.network.small import small
from tests.networks import seeded


def test_weights_in_half_precision_and_from_numpy(tmp_path):
    trained = seeded(small, torch.float32, seed=4)
    save_file({k: v.half() for k, v in trained.state_dict().items()}, tmp_path / "half.safetensors")
    assert all(x.dtype == torch.float32 for x in read_weights(tmp_path / "half.safetensors").values())
    np.savez(tmp_path / "weights.npz", **{k: v.numpy() for k, v in trained.state_dict().items()})
    assert all(torch.equal(read_weights(tmp_path / "weights.npz")[k], v) for k, v in trained.state_dict().items())


def test_weights_that_do_not_fit_are_explained(tmp_path):
    network = nm.zoo.build("digits")
    state = {name: x.clone() for name, x in network.state_dict().items()}
    state["fc2.weight"] = torch.zeros(3, 64)
    state["extra"] = torch.zeros(1)
    del state["conv1.bias"]
    save_file(state, tmp_path / "w.safetensors")
    with pytest.raises(
        ValueError, match=r"does not fit DigitsLeNet: fc2.weight is \(3, 64\), wanted \(10, 64\); missing "
    ):
        load_weights(network, tmp_path / "w.safetensors")


@pytest.mark.parametrize(
    ("dtype", "said"), [(torch.complex64, "complex"), (torch.int64, "of integers"), (torch.bool, "of booleans")]
)
def test_only_floats_fill_floats(tmp_path, dtype, said):
    """Torch itself drops imaginary parts, with no more than a warning."""
    network = nm.zoo.build("digits")
    before = {name: x.clone() for name, x in network.state_dict().items()}
    save_file({**before, "fc2.bias": torch.ones(10, dtype=dtype)}, tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match=rf"does not fit DigitsLeNet: fc2.bias is {said}, wanted of floats"):
        load_weights(network, tmp_path / "w.safetensors")
    assert all(torch.equal(x, before[name]) for name, x in network.state_dict().items())
    save_file({**before, "fc2.bias": torch.ones(10, dtype=torch.float64)}, tmp_path / "w.safetensors")
    load_weights(network, tmp_path / "w.safetensors")
    assert bool((network.state_dict()["fc2.bias"] == 1).all())


def test_arrays_that_claim_more_than_they_have(tmp_path):
    path = claiming_npz(tmp_path / "w.npz", a=(10_000_000, 1_000_000))
    with pytest.raises(ValueError, match=r"plain arrays.*a claims the shape \(10000000, 1000000\), .* and has 16"):
        read_weights(path)


@pytest.mark.parametrize("name", ["w.safetensors", "w.npz"])
def test_weights_that_are_no_file(tmp_path, name):
    with pytest.raises(FileNotFoundError, match="no weights at"):
        read_weights(tmp_path / name)
    os.mkfifo(tmp_path / name)
    with pytest.raises(OSError, match="is a FIFO, and not a regular file"):
        read_weights(tmp_path / name)


def test_weights_are_never_unpickled(tmp_path):
    torch.save(nm.zoo.build("digits").state_dict(), tmp_path / "w.pt")
    with pytest.raises(ValueError, match=r"pickle.*refused.*save_file"):
        read_weights(tmp_path / "w.pt")
    np.savez(tmp_path / "w.npz", a=np.array([{}], dtype=object))
    with pytest.raises(ValueError, match="does not hold plain arrays"):
        read_weights(tmp_path / "w.npz")


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    target = tmp_path / "w.safetensors"
    write_tensors(target, {"a": torch.ones(3)}, {"what": "first"})

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="no space"):
        write_tensors(target, {"a": torch.zeros(3)}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]
    tensors, facts = read_tensors(target)
    assert facts == {"what": "first"}
    assert bool((tensors["a"] == 1).all())
