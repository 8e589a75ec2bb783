"""Shared fixtures: reference digits, a generator, where the development data is, a Ray; and what can be collected."""

from __future__ import annotations

import csv
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).parent.parent


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False


MISSING = [package for package in ("cyclopts", "hypothesis", "PIL", "rich", "scipy") if not _is_there(package)]
"""Of what `pip install netmoments[all,test]` brings; a machine lent for its GPU may have little more than torch."""

if "hypothesis" not in MISSING:
    from hypothesis import settings

    settings.register_profile("seeded", derandomize=True, deadline=None, max_examples=60)
    settings.load_profile("seeded")


def has_tests_for_a_gpu(path: Path) -> bool:
    """A file with the mark, or a folder with such a file somewhere."""
    files = path.rglob("*.py") if path.is_dir() else [path]
    return any(re.search(r"^(@|pytestmark = \[?| +)pytest\.mark\.gpu", file.read_text(), re.M) for file in files)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Where packages are missing, only files with tests for a GPU, which need torch, numpy and safetensors alone."""
    return True if MISSING and not has_tests_for_a_gpu(collection_path) else None


LONGEST = ("report", "test_readme", "fuzz", "test_cli", "test_affine_relu_affine", "network", "sweep", "reproduction")
"""Files and rooms whose tests take longest."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first: of several processes none is left alone with it at the end."""

    def place(item: pytest.Item) -> int:
        parts = item.path.relative_to(ROOT).with_suffix("").parts
        return next((number for number, name in enumerate(LONGEST) if name in parts), len(LONGEST))

    items.sort(key=place)


class Reference(NamedTuple):
    """25-digit values, rounded to long double: covariance and orthant probability of unit-variance pairs."""

    h: Tensor
    k: Tensor
    rho: Tensor
    covariance: np.ndarray
    orthant: np.ndarray

    @property
    def mean(self) -> Tensor:
        return torch.stack([self.h, self.k], -1)

    @property
    def matrix(self) -> Tensor:
        one = torch.ones_like(self.rho)
        return torch.stack([torch.stack([one, self.rho], -1), torch.stack([self.rho, one], -1)], -2)


@pytest.fixture(scope="session")
def reference() -> Reference:
    with (ROOT / "tests" / "reference" / "relu_covariance.csv").open() as file:
        rows = list(csv.DictReader(file))
    places = [
        torch.tensor([float.fromhex(row[name]) for row in rows], dtype=torch.float64)
        for name in ("h_hex", "k_hex", "rho_hex")
    ]
    digits = [np.array([np.longdouble(row[name]) for row in rows]) for name in ("covariance", "orthant_probability")]
    return Reference(*places, *digits)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(20261115)


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The development datasets, mnist/ and fer2013/ and others; none of them is in the repository."""
    folder = os.environ.get("NETMOMENTS_DATA")
    path = Path(folder) if folder else ROOT.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip(f"no data at {path}; set NETMOMENTS_DATA to its folder")
    return path


@pytest.fixture(scope="session")
def mnist(data_dir: Path) -> Path:
    if not (data_dir / "mnist").is_dir():
        pytest.skip(f"no mnist in {data_dir}")
    return data_dir / "mnist"


@pytest.fixture(scope="session")
def fer2013_npz(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if (data_dir / "fer2013" / "fer2013.npz").exists():
        return data_dir / "fer2013" / "fer2013.npz"
    unpack = data_dir / "fer2013" / "unpack.py"
    if not unpack.exists():
        pytest.skip(f"no fer2013 in {data_dir}")
    path = tmp_path_factory.mktemp("fer2013") / "fer2013.npz"
    subprocess.run([sys.executable, str(unpack), str(path)], check=True)
    return path


@pytest.fixture(scope="session")
def two_workers() -> Iterator[ModuleType]:
    """A Ray of two workers on this machine, one for all tests: it takes seconds to start."""
    ray = pytest.importorskip("ray", reason="ray is not installed")
    settings = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_worker_niceness": "0",  # 15 unless told: a minute for importing torch where others are at work
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
        yield ray
        ray.shutdown()


@pytest.fixture(autouse=True)
def _gradients_stay_on() -> Iterator[None]:
    """Whatever a test did, the next one finds torch as it comes: with gradients, not in inference mode."""
    yield
    on, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    torch.set_grad_enabled(True)
    assert on
    assert not inference
