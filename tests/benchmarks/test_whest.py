"""The random networks of WhestBench: what is measured of each way, on a small one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks import whest


def test_a_small_network(capsys, tmp_path):
    """Cumulants are worth more than a factor of 5 (24 at this width) and a thousand samples; the chart is drawn."""
    chart = tmp_path / "chart.png"
    whest.main(["--size", "24x3", "--truth", "400000", "--chart", str(chart)])
    shown = capsys.readouterr().out
    rows = [[part.strip() for part in line.strip().split("  ") if part] for line in shown.splitlines()]
    errors = {row[0]: float(row[1]) for row in rows if len(row) == 4 and "e" in row[1] and row[1][0].isdigit()}
    assert errors["layerwise"] < errors["covariances alone"] / 5
    assert errors["layerwise"] < errors["1,000 samples"] / 2
    assert chart.stat().st_size > 0


def test_a_truth_from_a_file(tmp_path):
    network = whest.random_mlp(8, 2)
    np.savez(tmp_path / "some.npz", **{"random-8x2/mean": np.arange(8.0)})
    truth = whest.truth_of(network, "8x2", tmp_path / "some.npz", 10)
    assert torch.equal(truth.mean, torch.arange(8, dtype=torch.float64))
    assert truth.error == 0
    assert whest.truth_of(network, "8x3", tmp_path / "some.npz", 1000).error > 0


def test_a_checkout_that_is_none_is_named(tmp_path):
    with pytest.raises(ValueError, match="checkout with src/mlp_kprop"):
        list(whest.cumulant_propagation(whest.random_mlp(4, 1), tmp_path))
