"""The command line as a user meets it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import netmoments as nm

QUICK = ["--images", "12", "--check", "1", "--samples", "200"]
FACTORY = """
from torch import nn
def network():
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 3))
"""


def run(*arguments: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "netmoments", *map(str, arguments)]
    environment = {"COLUMNS": "100", "PATH": "", "HOME": "/nonexistent", "PYTHONPATH": os.getcwd()}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=cwd)


def test_help_is_instant():
    fastest = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        result = run("--help")
        fastest = min(fastest, time.perf_counter() - start)
    assert result.returncode == 0
    for command in ("report", "attack", "relus", "accuracy", "download"):
        assert command in result.stdout
    assert fastest < 0.5


def test_version():
    assert run("--version").stdout.strip() == nm.__version__


def test_report_on_the_embedded_default(tmp_path):
    result = run("report", "digits", "digits", "--sigma", "0.1", *QUICK, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "The most fragile images at σ = 0.1" in result.stdout
    record = json.loads((tmp_path / "noise-report" / "report.json").read_text())
    assert record["sigma"] == 0.1
    assert len(record["images"]) == 12
    assert record["provenance"]["command"].startswith("netmoments report digits digits --sigma 0.1")


@pytest.fixture
def own_network(tmp_path):
    """A factory, its weights, the same network exported, and a folder of coloured images with a broken one."""
    (tmp_path / "mine.py").write_text(FACTORY)
    torch.manual_seed(0)
    names: dict = {}
    exec(FACTORY, names)
    network = names["network"]().eval()
    save_file(network.state_dict(), tmp_path / "mine.safetensors")
    torch.export.save(torch.export.export(network, (torch.rand(1, 3, 8, 8),)), tmp_path / "mine.pt2")
    torch.save(network.state_dict(), tmp_path / "mine.pt")
    rng = np.random.default_rng(0)
    for name in ("cat", "dog", "emu"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(3):
            pixels = rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{number}.png")
    (tmp_path / "images" / "dog" / "broken.png").write_bytes(b"not a picture")
    return tmp_path


def test_report_on_a_network_and_images_of_ones_own(own_network):
    flips = []
    for model in (["mine.py:network", "--weights", "mine.safetensors"], ["mine.pt2"]):
        result = run("report", model[0], "images", *model[1:], *QUICK, "--out", "out", cwd=own_network)
        assert result.returncode == 0, result.stderr
        assert "broken.png" in result.stdout
        record = json.loads((own_network / "out" / "report.json").read_text())
        assert len(record["images"]) == 9
        assert len(record["skipped"]) == 1
        flips.append([image["flip_probability"] for image in record["images"]])
    assert flips[0] == pytest.approx(flips[1], rel=1e-4)


def test_a_factory_may_import_its_neighbours(own_network):
    (own_network / "neighbour.py").write_text("from mine import network as made\ndef network(): return made()")
    result = run("relus", "neighbour.py:network", "images", cwd=own_network)
    assert result.returncode == 0, result.stderr


def test_relus_are_listed(own_network):
    result = run("relus", "mine.pt2", "images", cwd=own_network)
    assert result.returncode == 0, result.stderr
    assert "16" in result.stdout


def test_accuracy_of_the_shipped_weights():
    result = run("accuracy", "digits", "digits")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "test accuracy 99.55% of 445 images"


BAD = {
    "command": (["nonsense"], "nonsense"),
    "model": (["report", "resnet", "digits"], "'resnet' is not a network: wanted a .pt2 file, file.py:factory, or one"),
    "pickle": (["report", "mine.pt", "images"], "is a pickle, which runs code when it is loaded, and is refused"),
    "pickled weights": (["report", "mine.py:network", "images", "--weights", "mine.pt"], "is a pickle"),
    "factory": (["report", "mine.py:net", "images"], "has no function or class 'net'; it has network"),
    "which factory": (["report", "mine.py", "images"], "name the function or class"),
    "no file": (["report", "nothing.pt2", "images"], "no exported network at nothing.pt2"),
    "no data": (["report", "digits", "nothing"], "'nothing' is neither a dataset"),
    "not found": (["report", "lenet", "mnist"], "netmoments download mnist"),
    "empty folder": (["report", "mine.pt2", "empty"], "empty"),
    "layer": (["report", "digits", "digits", "--layer", "relu9"], "no ReLU is named 'relu9'; the ReLUs are: 0 'relu1'"),
    "out is a file": (["report", "digits", "digits", "--out", "mine.py"], "mine.py is a file; give a folder"),
    "arguments": (["report", "needs.py:network", "images"], "needs.py:network() failed: TypeError"),
    "sigma": (["report", "digits", "digits", "--sigma", "0"], "sigma"),
    "device": (["report", "digits", "digits", "--device", "tpu9"], "no device 'tpu9'; give cpu, cuda or auto"),
    "mis-sized": (["report", "lenet", "digits"], "cannot take an input of shape (1, 8, 8)"),
    "download": (["download", "fer2013"], "only mnist can be downloaded"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_explained(own_network, name):
    arguments, message = BAD[name]
    (own_network / "empty").mkdir()
    (own_network / "needs.py").write_text("def network(size): ...")
    result = run(*arguments, cwd=own_network)
    said = " ".join((result.stdout + result.stderr).split())
    assert result.returncode != 0
    assert "Traceback" not in said
    assert message in said
    assert not (own_network / "noise-report").exists()


def test_a_smooth_activation_is_warned_about_once(own_network):
    (own_network / "smooth.py").write_text(FACTORY.replace("nn.ReLU()", "nn.ReLU(), nn.Linear(16, 16), nn.GELU()"))
    result = run("report", "smooth.py:network", "images", *QUICK, cwd=own_network)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("gelu") == 1
