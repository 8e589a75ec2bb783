"""Numbers and facts as they are shown; more examples are in the docstrings."""

from __future__ import annotations

import math
import sys

import pytest
import torch

import netmoments
from netmoments.report.words import (
    Provenance,
    in_words,
    seconds_in_words,
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
