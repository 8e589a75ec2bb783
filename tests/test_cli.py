"""The command line as a user meets it."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "netmoments", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={"COLUMNS": "100", "PATH": ""})


def test_help_is_instant():
    fastest = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        result = run("--help")
        fastest = min(fastest, time.perf_counter() - start)
    assert result.returncode == 0
    assert "demo" in result.stdout
    assert fastest < 0.5


def test_version():
    import netmoments

    assert run("--version").stdout.strip() == netmoments.__version__


def test_demo_shows_exact_beside_sampled_and_the_series():
    result = run("demo", "--samples", "2000", "--seed", "3")
    assert result.returncode == 0, result.stderr
    for text in ("exact mean", "sampled ± s.e.", "times as long", "series, 50 terms", "netmoments, against 160 nodes"):
        assert text in result.stdout


@pytest.mark.parametrize("arguments", [["demo", "--samples", "1"], ["demo", "--seed", "-1"], ["nonsense"]])
def test_bad_arguments_are_explained(arguments):
    result = run(*arguments)
    assert result.returncode != 0
    assert "Traceback" not in result.stdout + result.stderr
    assert (result.stdout + result.stderr).strip()
