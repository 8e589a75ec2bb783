"""Which face networks are trained as in 2019, and when."""

from __future__ import annotations

import torch

from netmoments import data
from reproduction import readings_5, readings_2019
from reproduction.experiment import Origin
from reproduction.writing import as_markdown, summary_of
from tests.reproduction.small import settings_for


def test_three_networks_are_trained_by_plain_sgd_and_attacked(tmp_path, monkeypatch):
    asked, studied = [], []

    def trained(settings, label, recipe, seed, images):
        asked.append((recipe, seed, images))
        return tmp_path / f"{label}-{seed}.safetensors", 1.0

    monkeypatch.setattr(data, "load", lambda name, **options: name)
    monkeypatch.setattr(readings_2019, "splits", lambda settings, name: (name, name))
    monkeypatch.setattr(readings_2019, "accuracy", lambda network, images: 0.64)
    monkeypatch.setattr(readings_2019.zoo, "pretrained", lambda name, weights: torch.nn.Identity())
    monkeypatch.setattr(readings_2019, "trained_once", trained)
    monkeypatch.setattr(readings_2019, "studied_faces", lambda settings, *given: studied.append(given))
    assert len(readings_2019.networks(settings_for(tmp_path, images=1000))) == 3
    assert [seed for _, seed, _ in asked] == [0, 1, 2]
    assert {recipe.optimizer for recipe, *_ in asked} == {"sgd"}
    assert {images for *_, images in asked} == {("fer2013", "fer2013")}
    assert all("64.0%" in title for _, title, *_ in studied)
    assert [name for name, *_ in studied] == ["readings-2019-0", "readings-2019-1", "readings-2019-2"]
    assert [weights.stem for _, _, weights, *_ in studied] == ["faces-2019-0", "faces-2019-1", "faces-2019-2"]
    assert all(ways.items() <= readings_5.FACE_WAYS.items() for *_, ways, _ in studied)


def test_a_run_with_few_images_says_that_it_trained_nothing(tmp_path):
    settings = settings_for(tmp_path, images=999)
    outcome = readings_2019.reproduce(settings)
    assert "--images was 999" in as_markdown(summary_of(outcome, Origin.of(settings, "a command")))
