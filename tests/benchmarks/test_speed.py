"""The benchmark of speed: that every figure can be computed, what it says of a ratio, and what it keeps."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import pytest
import torch

import netmoments as nm
from benchmarks import speed
from benchmarks.speed import Bench, Figure, engine_figures, growth_exponent, lenet_figures

SLOW = Figure("    ours / theirs", 0.5, 0.4, at_most=True, detail="3 ms")
FAST = Figure("theirs / ours", 50.0, 20.0, at_most=False)


class Once(Bench):
    """Runs the work once, and says that it took a second."""

    def time(self, work: Callable[[], object], patience: float = 6.0) -> float:
        work()
        return 1.0


def test_growth_exponents():
    assert growth_exponent((1, 2, 4, 8), [3.0, 12.0, 48.0, 192.0]) == pytest.approx(2.0)


def test_a_figure_says_whether_it_is_reached_and_how_it_stands_to_another():
    assert not SLOW.reached
    assert FAST.reached
    assert Figure("nothing asked", 9.0, None, at_most=True).reached
    assert SLOW.beside(0.4) == "then 0.4, now 25% worse"
    assert FAST.beside(25.0) == "then 25, now 50% better"


def test_every_figure_of_the_engine_and_of_the_lenet_can_be_computed(monkeypatch):
    monkeypatch.setattr(speed, "SAMPLES", 20)
    monkeypatch.setattr(speed, "random_factor", lambda size, generator: torch.eye(size))
    images = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    network = nm.zoo.LeNet(channels=(2, 2), hidden=8).eval()  # small: what is asked is whether everything runs
    found = [*engine_figures(Once("cpu"), 64), *lenet_figures(Once("cpu"), network, images)]
    assert [figure.name.strip() for figure in found] == [
        "exact variance, p = 64, 100 inputs / exp of p×p",
        "Lemma 4, 5 terms / exact variance, p = 64, 100 inputs",
        "exact variance, p = 64, 784 inputs / exp of p×p",
        "Lemma 4, 5 terms / exact variance, p = 64, 784 inputs",
        "A Aᵀ alone, 784 inputs / exp of p×p",
        "LeNet two-stage l = 3, all moments / 10⁴ samples",
        "each further σ of σ²I / 10⁴ samples",
        "LeNet sketch, K = 64 / 10⁴ samples",
        "LeNet layerwise / 10⁴ samples",
        "one image alone / 10⁴ samples",
    ]


def test_a_record_is_written_and_compared_with(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(speed, "figures", lambda bench, data_dir: iter([SLOW, FAST]))
    path = tmp_path / "speed.json"
    monkeypatch.setattr(sys, "argv", ["speed", "--without-growth", "--record", str(path)])
    speed.main()
    record = json.loads(path.read_text())
    assert record["ratios"] == {"ours / theirs": 0.5, "theirs / ours": 50.0}
    assert "torch" in record["machine"]
    path.write_text(json.dumps({"ratios": {"ours / theirs": 0.25}}))
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["speed", "--without-growth", "--against", str(path)])
    speed.main()
    _, _, slow, fast = capsys.readouterr().out.splitlines()
    assert "missed" in slow
    assert "(then 0.25, now 100% worse)" in slow
    assert "reached" in fast
    assert "then" not in fast
