"""Weights in files: read as plain tensors only, written whole or not at all, and explained where they do not fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import netmoments as nm
from netmoments.network.weights import load_weights, read_tensors, read_weights, write_tensors
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
