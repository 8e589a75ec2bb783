"""Datasets are found only where a test puts them."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_datasets_but_the_tests_own(monkeypatch, tmp_path):
    monkeypatch.delenv("NETMOMENTS_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
