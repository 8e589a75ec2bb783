"""Numbers and facts as they are shown; more examples are in the docstrings."""

from __future__ import annotations

import math
import os
import re
import sys

import numpy as np
import pytest
import torch

import netmoments
from netmoments.report.words import (
    Machine,
    Provenance,
    in_words,
    installed_in_words,
    machine_in_words,
    seconds_in_words,
    speed_in_words,
)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (math.nan, "nan"),
        (math.inf, "∞"),
        (-math.inf, "-∞"),
        (-0.0, "0"),
        (0.0009996, "0.001"),
        (0.000999, "9.99e-4"),
        (999.4, "999"),
        (999.6, "1,000"),
        (1e9, "1e9"),
        (-2.5e-7, "-2.5e-7"),
    ],
)
def test_numbers(value, words):
    assert in_words(value) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.5, "0.5 s"), (59.96, "60 s"), (60, "1 min 0 s"), (3599.6, "1 h 0 min"), (90_000, "25 h 0 min")],
)
def test_durations(seconds, words):
    assert seconds_in_words(seconds) == words


def test_where_numbers_come_from(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/netmoments", "report", "my net.pt2", "digits"])
    found = Provenance.of_this_run(torch.device("cpu"), 7)
    assert found.command == "netmoments report 'my net.pt2' digits"
    assert (found.seed, found.netmoments, found.torch) == (7, netmoments.__version__, torch.__version__)
    assert found.device.startswith("CPU, ")
    machines = [Machine("H200", "2.11"), Machine("H200", "2.13"), Machine("CPU", "2.13")]
    several = Provenance.of_this_run(torch.device("cpu"), 0, "make it", machines)
    assert (several.command, several.device, several.torch) == ("make it", "H200 and CPU", "2.11 and 2.13")


def test_what_is_missing_is_named_with_its_extra():
    extras = {"data": (("numpy",), "images"), "other": (("numpy", "no-such-package"), "more")}
    first, data, other = installed_in_words(extras)
    assert first.startswith(f"netmoments {netmoments.__version__}, torch {torch.__version__}, numpy ")
    assert data == f"data, for images: numpy {np.__version__}"
    assert other.endswith('; missing: no-such-package (pip install "netmoments[other]")')


def test_the_machine_as_it_is(monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    cpu, busy, *rest = machine_in_words()
    assert cpu.startswith("CPU: ")
    assert f"torch uses {torch.get_num_threads()} thread" in cpu
    assert busy.startswith("busy: 99.0 processes")
    assert rest[0].startswith("GPU: ")
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert not any(line.startswith("busy") for line in machine_in_words())


def test_speed_is_measured_and_threads_stay_as_they_were():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        product, convolution, layout = speed_in_words()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert re.match(r"product of 1,024 × 1,024 matrices: \S+ ms", product)
    assert re.match(r"convolution of 64 small images: \S+ ms", convolution)
    if not torch.cuda.is_available():
        assert "with 2 threads" in product
    assert layout.startswith("channels last: the same convolution is ")
