"""How long commands take: each is a process of its own, timed by the clock and by the processor."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.startup import COMMANDS, once


def test_a_process_that_sleeps_takes_time_but_no_processor():
    clock, processor = once([sys.executable, "-S", "-c", "import time; time.sleep(1.0)"])
    assert clock >= 1.0
    assert 0 < processor < clock


def test_a_command_that_fails_is_not_timed():
    with pytest.raises(subprocess.CalledProcessError):
        once([sys.executable, "-c", "raise SystemExit(3)"])


def test_help_is_among_the_commands():
    assert COMMANDS["netmoments --help"][-1] == "--help"
