"""The measurements themselves: all can be imported, and their parts give what they say on small problems."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import benchmarks
import netmoments as nm
from benchmarks import attacks, engine, networks, nodes, rival_attacks, winners
from benchmarks.measure import seconds
from benchmarks.problems import photograph, random_covariance, random_factor, random_problem, squeezenet

CPU = torch.device("cpu")
ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("name", [found.name for found in pkgutil.walk_packages(benchmarks.__path__, "benchmarks.")])
def test_every_module_can_be_imported(name):
    assert importlib.import_module(name).__doc__


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_a_large_tensor_is_seen_in_the_peak():
    """In a process of its own: what others have freed, or the system takes back meanwhile, would be counted too."""
    code = (
        "import torch; from benchmarks.measure import measured; cpu = torch.device('cpu');"
        "result, cost = measured(lambda: float(torch.ones(2**24).sum()), cpu);"
        "print(result, cost.bytes, measured(lambda: 1, cpu)[1].bytes)"
    )
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT).stdout
    result, large, nothing = (float(number) for number in shown.split())
    size = 64 * 2**20
    assert result == size / 4
    assert 0.9 * size < large < 2 * size
    assert nothing < size / 8


def test_the_work_is_repeated_after_two_calls_for_warming_up():
    calls = []
    assert seconds(lambda: calls.append(1), repeats=4, patience=0.0) >= 0
    assert len(calls) == 2 + 3


def test_random_covariances_are_those_of_the_paper():
    factor = random_factor(60, torch.Generator().manual_seed(0))
    values = torch.linalg.eigvalsh(factor @ factor.T)
    assert float(values.sum()) == pytest.approx(60, rel=1e-12)
    assert float(values.min()) > 0
    assert 1.5 < float(values.max()) < 2.5  # uniform on (0, 1] but for the scale: the largest is near twice the mean
    again = random_covariance(60, 0.1, torch.Generator().manual_seed(0))
    torch.testing.assert_close(again, 0.01 * factor @ factor.T)


@pytest.mark.parametrize("noise", ["isotropic", "diagonal", "dense"])
def test_problems_with_every_structure_are_the_same_noise(noise):
    network, given = random_problem(20, 7, 3, torch.float64, noise)
    plain = random_problem(20, 7, 3, torch.float64)[1]
    torch.testing.assert_close(network.variance(given), network.variance(plain))


def test_squeezenet_and_its_photograph(data_dir):
    if not (data_dir / "squeezenet").is_dir() or not (data_dir / "natural").is_dir():
        pytest.skip(f"no squeezenet or natural in {data_dir}")
    image = photograph(str(data_dir))
    assert image.shape == (1, 3, 227, 227)
    with torch.no_grad():
        assert squeezenet(str(data_dir))(image).shape == (1, 1000)


def test_what_is_missing_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("NETMOMENTS_DATA", raising=False)
    for load in (squeezenet, photograph):
        with pytest.raises(FileNotFoundError, match="is in none of"):
            load(str(tmp_path))


def test_the_engine_reaches_its_accuracy():
    for what, wanted, found in (*engine.accuracy(), *engine.series_agreement(), *engine.small_noise()):
        assert not wanted or float(found) <= float(wanted), what


def test_cross_moments_of_a_fully_correlated_pair():
    """E[relu(x)²] = Var + mean²."""
    mean, std = torch.tensor([0.3, -1.0], dtype=torch.float64), torch.tensor([0.5, 2.0], dtype=torch.float64)
    expected = nm.relu_variance(mean, std) + nm.relu_mean(mean, std).square()
    torch.testing.assert_close(engine.cross_moment(mean, mean, std, std, torch.ones_like(mean)), expected)


def test_linearizations_reproduce_the_network_at_the_point():
    network, images = nm.zoo.pretrained("digits"), torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    rows = networks.reproduction(network, images)
    assert len(rows) == len(nm.relus(network, images))
    assert all(float(found) <= float(wanted) for _, wanted, found in rows)


def test_rules_are_as_exact_as_they_say(capsys):
    nodes.main()
    errors = [float(text.split()[-1]) for text in capsys.readouterr().out.splitlines() if text.startswith("  ")]
    assert len(errors) > 20
    assert max(errors) < 1e-7


def test_winners(monkeypatch, capsys):
    monkeypatch.setattr(winners, "seconds", lambda work, repeats: 0.0)
    scores = winners.scores
    monkeypatch.setattr(winners, "scores", lambda *options, **named: scores(*options, **{**named, "images": 1}))
    winners.main()
    assert "largest error" in capsys.readouterr().out


@pytest.mark.slow
def test_attacks_and_rivals_run_on_a_few_images(mnist, monkeypatch, capsys):
    for name, value in (("TIMED", 2), ("JUDGED", 2), ("SAMPLES", 20)):
        monkeypatch.setattr(attacks, name, value)
    monkeypatch.setattr(attacks, "SparseSmooth", lambda **_: nm.attacks.SparseSmooth(iterations=5, polish=2, samples=5))
    monkeypatch.setattr(attacks, "monte_carlo", lambda network, noise, samples: None)
    attacks.main(CPU, str(mnist))
    monkeypatch.setattr(rival_attacks, "SparseSmooth", lambda **_: nm.attacks.SparseSmooth(iterations=5, polish=0))
    monkeypatch.setattr(rival_attacks, "RIVALS", {"dense start": lambda problem: problem.upper})
    rival_attacks.main(CPU, str(mnist), 2)
    written = capsys.readouterr().out
    assert "2 images" in written
    assert "dense start" in written
