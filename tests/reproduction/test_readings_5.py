"""Readings of the sparse and smooth attacks: ways to pose the problem, ways to count, and the table of both."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from netmoments.attacks.margins import contrast
from netmoments.attacks.sparse_smooth import SparseSmooth
from netmoments.sweep.run import run_sweep
from reproduction import readings_5
from reproduction.attack_readings import (
    FREE,
    NO_TARGET,
    TARGETED,
    Cases,
    ReadingsSweep,
    Way,
    counted,
    pairs_away,
    pairs_towards,
    solutions,
)
from reproduction.faces import Faces
from tests.reproduction.small import drawn, settings_for

QUICK = 60
WAYS = {
    "last ReLU": Way(iterations=QUICK, scales=(1.0, 2.0)),
    "l = 1": Way(layer=0, iterations=QUICK),
    "linearized again": Way(again=2, iterations=QUICK),
    "pixels in [0, 255], σ = 1": Way(white=255.0, sigma=1.0, iterations=QUICK),
}


@pytest.fixture(scope="module")
def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Flatten(), nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3)
    return nn.Sequential(*layers).eval()


@pytest.fixture(scope="module")
def toys(network) -> Faces:
    """Three images, called what the network calls them, which is all three classes."""
    images = torch.rand(60, 1, 6, 6, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        network[-1].bias -= network(images).mean(0)
        answers = network(images).argmax(1)
    places = torch.stack([(answers == label).nonzero()[0, 0] for label in range(3)])
    return Faces(network, images[places], torch.arange(3), places, ("one", "two", "three"), 0)


def cases_of(toys: Faces) -> Cases:
    return Cases(toys.network, toys.images, toys.labels, torch.full_like(toys.labels, NO_TARGET))


def test_pairs_of_classes():
    towards = pairs_towards(torch.tensor([1]), 3)
    assert towards.larger.tolist() == [[[1, 2], [0, 1]]]
    assert towards.smaller.tolist() == [[[0, 0], [2, 2]]]
    away = pairs_away(torch.tensor([[5.0, 1.0, 2.0]]), torch.tensor([0]))
    assert away.larger.tolist() == [[[0], [0]]]
    assert away.smaller.tolist() == [[[2], [1]]]


@pytest.mark.parametrize("task", [TARGETED, FREE])
def test_the_first_way_is_the_attack_of_the_library(toys, task):
    """The same problem, posed one target at a time by `SparseSmooth`, solved by the same steps."""
    ((_, own, solution),) = solutions(cases_of(toys), Way(iterations=QUICK), task)
    attack = SparseSmooth(gamma=0.0, polish=0, bounds=None, iterations=QUICK, samples=10)
    targets = own.targets if task == TARGETED else None
    result = attack(toys.network, own.images, own.labels, targets)
    assert torch.equal(result.labels, own.labels)
    torch.testing.assert_close(solution.shift, result.mu.flatten(1), rtol=1e-3, atol=1e-5)
    holds = solution.problem.excess(solution.iterate.shift).squeeze(1) <= 0
    assert torch.equal(holds, result.feasible)


def test_the_second_linearization_is_at_the_first_solution(toys):
    """There it is the network: its expected margins without noise are the network's own."""
    (_, own, first), *_ = solutions(cases_of(toys), Way(iterations=QUICK), TARGETED)
    ((_, _, second),) = solutions(cases_of(toys), Way(again=1, iterations=QUICK), TARGETED)
    margins = second.problem.margins.at(first.iterate.shift, torch.full((len(own.images), 1), 1e-6))
    pairs = pairs_towards(toys.labels, 3)
    places, chosen = torch.arange(3).repeat_interleave(2), torch.arange(2).repeat(3)
    with torch.no_grad():
        scores = toys.network(own.images + first.shift.unflatten(1, (1, 6, 6))).unsqueeze(1)
    own_margins = contrast(scores, *(part[places, chosen].unsqueeze(1) for part in pairs))
    torch.testing.assert_close(margins, own_margins, rtol=1e-4, atol=1e-5)


def test_a_network_with_one_relu_is_its_linearization():
    torch.manual_seed(2)
    network = nn.Sequential(nn.Flatten(), nn.Linear(36, 20), nn.ReLU(), nn.Linear(20, 3)).eval()
    images = torch.rand(2, 1, 6, 6)
    labels = network(images).argmax(1)
    cases = Cases(network, images, labels, torch.full_like(labels, NO_TARGET))
    ((_, own, solution),) = solutions(cases, Way(sigma=0.02, iterations=200), TARGETED)
    rows = counted(own, solution, Way(sigma=0.02), 1.0, 2000, seed=0)
    assert rows["expected"].all()
    assert np.abs(rows["linearized"] - rows["share"]).max() < 5 * (2 * 0.25 / 2000) ** 0.5  # two runs of samples
    assert np.abs(rows["share"] - 0.5).max() < 0.2  # γ = 0 asks for no more


def test_units_of_pixels_do_not_matter(toys):
    sweep = ReadingsSweep("r", toys, WAYS, {}, 3, 20)
    columns = [sweep.rows_of(toys, name, range(3)) for name in ("last ReLU", "pixels in [0, 255], σ = 1")]
    plain = {name: values[columns[0]["reading"] == "last ReLU"] for name, values in columns[0].items()}
    np.testing.assert_allclose(plain["length"], columns[1]["length"], rtol=0.02)
    assert (plain["expected"] == columns[1]["expected"]).all()


def test_rows_do_not_depend_on_slices_and_have_every_reading(toys, tmp_path):
    settings = settings_for(tmp_path)
    sweep = ReadingsSweep("r", toys, WAYS, {"l = 1": 1}, 2, 20)
    assert sweep.counts == [2, 1, 1, 2, 1, 2, 1]
    columns = run_sweep(sweep, tmp_path, settings.engine).columns
    seen = dict.fromkeys(columns["reading"].tolist())
    wanted = [way.called(name, *one) for name, way in WAYS.items() for one in way.wanted]
    assert list(seen) == wanted
    assert wanted[:2] == ["last ReLU", "last ReLU, around 2 μ"]
    assert wanted[-3:-1] == ["linearized again, 1 ×", "linearized again, 2 ×"]
    early = columns["reading"] == "l = 1"
    assert early.sum() == 2 + 1  # one image: two targets, and any other class
    assert set(columns["target"][columns["task"] == FREE]) == {NO_TARGET}


def test_the_table(toys, tmp_path):
    sweep = ReadingsSweep("r", toys, WAYS, {}, 3, 20)
    results = run_sweep(sweep, tmp_path, settings_for(tmp_path).engine)
    one = readings_5.Studied("toys", results.columns, WAYS, 3, 1.0, {TARGETED: 0.914, FREE: 1.0})
    panel = readings_5._panel(one, TARGETED)
    assert [row[0] for row in panel.rows] == ["published", *readings_5.readings_of(one)]
    assert panel.rows[0][1] == "0.914"
    assert {row[-1] for row in panel.rows[1:]} == {"6"}
    base = readings_5.rates(readings_5.rows_of(one, TARGETED, "last ReLU"))
    assert panel.rows[1][1] == f"{base['expected']:.3f}"
    json.dumps(readings_5._numbers(one), allow_nan=False)
    assert drawn(readings_5.draw_rates(one, TARGETED), tmp_path)
    assert readings_5.dials(one) == {"last ReLU, around 2 μ"}
    exact = replace(one, paper={TARGETED: base["expected"], FREE: 2.0})
    assert any(text.startswith("last ReLU, problem solved") for text in readings_5.near_published(exact, TARGETED))
    assert readings_5.near_published(exact, FREE) == []


def test_faces_need_an_image_of_each_emotion(tmp_path, monkeypatch):
    monkeypatch.setattr(readings_5.data, "load", lambda name, **options: name)
    monkeypatch.setattr(readings_5, "studied_faces", lambda settings, *given: given)
    assert readings_5.faces(settings_for(tmp_path, images=6)) == []
    ((name, title, weights, ways, _),) = readings_5.faces(settings_for(tmp_path, images=7))
    assert (name, title, weights) == ("readings-5-faces", "the shipped face network", None)
    assert ways is readings_5.FACE_WAYS
    own = replace(settings_for(tmp_path, images=1000), weights=tmp_path / "mine.safetensors")
    ((_, title, weights, *_),) = readings_5.faces(own)
    assert (title, weights) == ("the face network mine", tmp_path / "mine.safetensors")
