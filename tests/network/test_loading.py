"""Networks from files and from the zoo: factories, exported programs, and what is refused."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import netmoments as nm
from tests.network.small import POINT, small
from tests.networks import seeded

FACTORY = """
from __future__ import annotations
from dataclasses import dataclass
from torch import nn

@dataclass
class Sizes:
    hidden: int = 5

class Small(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, Sizes().hidden), nn.ReLU(), nn.Dropout(), nn.Linear(5, 3))

def make():
    return Small()

def nothing():
    return 7
"""


@pytest.fixture
def factory_file(tmp_path) -> Path:
    path = tmp_path / "small_network.py"
    path.write_text(FACTORY)
    return path


@pytest.mark.parametrize("name", ["make", "Small"])
def test_a_factory_in_a_file_with_weights(factory_file, tmp_path, name):
    trained = seeded(small, torch.float32, seed=4)
    save_file(trained.state_dict(), tmp_path / "weights.safetensors")
    net = nm.load_network(f"{factory_file}:{name}", tmp_path / "weights.safetensors")
    assert not any(module.training for module in net.modules())
    assert torch.equal(net(POINT), trained(POINT))
    assert not nm.load_network(f"{factory_file}:{name}").training


BAD_SOURCES: dict[str, tuple[str, type[Exception], str]] = {
    "pickle": ("network.pt", ValueError, r"is a pickle, .*refused; export the network with torch\.export\.save"),
    "checkpoint": ("network.ckpt", ValueError, r"is a pickle"),
    "unknown word": ("resnet50", ValueError, r"'resnet50' is not a network: wanted a \.pt2 file, .*\(digits, lenet"),
    "file without factory": ("{file}", ValueError, r"which network\? .*small_network\.py:factory"),
    "unknown factory": ("{file}:build", ValueError, r"has no function or class 'build'; it has .*Small, make, nothing"),
    "no such file": ("elsewhere.py:make", FileNotFoundError, r"no file elsewhere\.py"),
    "not a module": ("{file}:nothing", TypeError, r"nothing must return a torch\.nn\.Module, got 7"),
    "file that fails": ("{tmp}/broken.py:make", ValueError, r"broken\.py could not be run: ZeroDivisionError"),
    "no such program": ("{tmp}/none.pt2", FileNotFoundError, r"no exported network at .*none\.pt2"),
    "not an archive": ("{tmp}/text.pt2", ValueError, r"is not an archive written by torch\.export\.save"),
    "damaged archive": ("{tmp}/damaged.pt2", ValueError, r"damaged"),
    "another archive": ("{tmp}/other.pt2", ValueError, r"not a plain archive of torch\.export\.save, and is refused"),
    "weights not shipped": ("alexnet", ValueError, r"no weights come with 'alexnet' \(they do with digits, lenet"),
}


@pytest.fixture
def bad_files(tmp_path, factory_file) -> Path:
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "text.pt2").write_text("no archive")
    with zipfile.ZipFile(tmp_path / "other.pt2", "w") as archive:
        archive.writestr("something", "else" * 100)
    whole = (tmp_path / "other.pt2").read_bytes()
    (tmp_path / "damaged.pt2").write_bytes(whole[: len(whole) // 2])
    return tmp_path


@pytest.mark.parametrize("case", BAD_SOURCES)
def test_bad_sources(case, bad_files, factory_file):
    source, error, message = BAD_SOURCES[case]
    with pytest.raises(error, match=message):
        nm.load_network(source.format(file=factory_file, tmp=bad_files))


def test_bad_weights(tmp_path, factory_file):
    source = f"{factory_file}:make"
    state = seeded(small, torch.float32).state_dict()
    path = tmp_path / "weights.safetensors"
    save_file({"0.weight": state["0.weight"], "0.bias": torch.zeros(7), "extra": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match=r"does not fit Small: 0\.bias is \(7,\), wanted \(5,\); missing 3\.bias"):
        nm.load_network(source, path)
    with pytest.raises(ValueError, match="unknown extra"):
        nm.load_network(source, path)
    with pytest.raises(ValueError, match=r"does not fit LeNet: .*; …"):
        nm.load_network("lenet", path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="is not a safetensors file, or is damaged"):
        nm.load_network(source, path)
    with pytest.raises(FileNotFoundError, match="no weights at"):
        nm.load_network(source, tmp_path / "none.safetensors")
    with pytest.raises(ValueError, match=r"is a pickle.*save_file"):
        nm.load_network(source, tmp_path / "weights.pth")
    (tmp_path / "weights.npz").write_text("no archive")
    with pytest.raises(ValueError, match="does not hold plain arrays"):
        nm.load_network(source, tmp_path / "weights.npz")


def test_weights_for_an_exported_program_are_refused(bad_files):
    with pytest.raises(ValueError, match="has its weights inside"):
        nm.load_network(bad_files / "text.pt2", bad_files / "weights.safetensors")
