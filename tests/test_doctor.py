"""What is said of an installation and its machine."""

from __future__ import annotations

import os
import re

import numpy as np
import torch

import netmoments
from netmoments.doctor import installed_in_words, machine_in_words, speed_in_words


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
