"""Readings of Table 2: the old variance in every reading, and the table by training recipe."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import netmoments as nm
from netmoments import paper
from netmoments.affine_relu_affine import AffineReluAffine
from netmoments.network.weights import write_tensors
from reproduction import readings_2, trained
from reproduction.image_sweeps import SIGMAS, random_factor
from reproduction.lenet_on_mnist import Errors
from reproduction.training import training_facts
from tests.reproduction.small import drawn, settings_for, shown, small_lenet


@pytest.fixture(scope="module")
def network() -> AffineReluAffine:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    return AffineReluAffine(normal(2, 7, 4), normal(2, 7), normal(2, 3, 7), normal(2, 3))


@pytest.fixture(scope="module")
def noise() -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.rand(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return images, torch.stack([random_factor(4, torch.Generator().manual_seed(k)) for k in range(2)])


@pytest.fixture(scope="module")
def values(network, noise) -> dict[str, torch.Tensor]:
    return readings_2.readings_at(network, *noise)


def test_every_reading_of_the_old_variance_is_there(values):
    assert set(readings_2.OLD) | {"mean", "variance"} <= set(values)
    assert all(value.shape == (2, len(SIGMAS), 3) for value in values.values())


@pytest.mark.parametrize("level", range(len(SIGMAS)))
def test_against_the_papers_expressions(network, noise, values, level):
    images, covariance = noise[0], nm.LowRank(SIGMAS[level] * noise[1])
    here = nm.Gaussian(images, covariance)
    wanted = {
        "theorem_2": paper.variance_zero_mean(network, here),
        "authors_old": paper.variance_zero_mean_pairs(network, here),
        "no_mean": network.variance(nm.Gaussian(torch.zeros_like(images), covariance)),
    }
    for name, value in wanted.items():
        torch.testing.assert_close(values[name][:, level], value, rtol=1e-9, atol=1e-15)
    # with c₂ = 0 it is the theorem less the mean's square
    bare = replace(network, c2=torch.zeros_like(network.c2))
    mixed = paper.second_moment_zero_mean(bare, here) - bare.mean(here).square()
    torch.testing.assert_close(values["mixed"][:, level], mixed, rtol=1e-8, atol=1e-12)


def test_one_unit_has_no_pairs():
    """There independent units are the theorem, and their own variances all there is."""
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    network = AffineReluAffine(one.expand(1, 1, 4), 0 * one[0], 2 * one, 0 * one[0])
    images = torch.rand(1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    values = readings_2.readings_at(network, images, torch.eye(4, dtype=torch.float64).unsqueeze(0))
    torch.testing.assert_close(values["independent_zero"], values["theorem_2"])
    torch.testing.assert_close(values["independent"], values["variance"])


def test_the_table(few, tmp_path, monkeypatch):
    """Networks that are not trained but drawn, one for each recipe."""

    def quickly(recipe, training, held_out, *, weights, seed, device, on_epoch):
        torch.manual_seed(seed + hash(repr(recipe)) % 1000)
        changed = {name: value + 0.1 * torch.randn_like(value) for name, value in small_lenet().state_dict().items()}
        write_tensors(weights, changed, training_facts(recipe, training, seed) | {"seconds": "1.5"})

    def as_trained(recipe, weights):
        network = small_lenet()
        network.load_state_dict(trained.read_tensors(weights)[0])
        return network

    everything = nm.data.load("mnist", data_dir=few)
    monkeypatch.setattr(nm.data, "load", lambda *_, **__: everything)
    monkeypatch.setattr(trained, "train", quickly)
    monkeypatch.setattr(readings_2, "network_as_trained", as_trained)
    monkeypatch.setattr(readings_2, "accuracy", lambda *_, **__: 0.9)
    outcome = readings_2.reproduce(settings_for(tmp_path, images=2, samples=20, data_dir=few))
    assert len(outcome.numbers["trials"]) == 4
    assert outcome.panels[0].rows[0][0] == "published"
    assert outcome.panels[0].rows[0][-1] == "0.205 / 0.153"
    assert [row[0] for row in outcome.panels[0].rows[1:]] == list(readings_2.TRAINED)[:4]
    assert "nan" not in shown(outcome)
    json.dumps(outcome.numbers, allow_nan=False)
    assert drawn(outcome.drawings[0].draw(), tmp_path)
    assert outcome.seconds > 4 * 1.5


def test_a_network_that_did_not_learn_is_listed_and_left_out(network, noise):
    sampled = {name: value.numpy() for name, value in readings_2.readings_at(network, *noise).items()}
    near = {name: Errors.between(value, 1.1 * value + 1e-6) for name, value in sampled.items()}
    far = {name: Errors.between(value, 9.0 * value + 1e-6) for name, value in sampled.items()}
    learned = readings_2.Trial("decay 1", 0, 0.98, near, 1.0)
    lost = readings_2.Trial("decay 1", 1, 0.11, far, 1.0)
    outcome = readings_2.outcome_of([learned, lost], 100, 20)
    alone = readings_2.outcome_of([learned], 100, 20)
    assert outcome.panels[:2] == alone.panels[:2]
    assert [row[:3] for row in outcome.panels[2].rows] == [("decay 1", "0", "98.00%"), ("decay 1", "1", "11.00%")]
    assert [trial["learned"] for trial in outcome.numbers["trials"]] == [True, False]
    assert any("decay 1, seed 1" in words for words in outcome.reading)


def test_units_that_see_no_input_change_no_reading(network, noise):
    """A row of A that is zero adds a constant, whatever the paper's expressions say of its deviation."""
    A, c1, B, c2 = (value.clone() for value in (network.A, network.c1, network.B, network.c2))
    A[:, 1] = 0
    dead = AffineReluAffine(A, c1, B, c2)
    others = [unit for unit in range(A.shape[-2]) if unit != 1]
    constant = B[..., 1] * c1[..., 1, None].relu()
    without = AffineReluAffine(A[:, others], c1[:, others], B[..., others], c2 + constant)
    found, wanted = (readings_2.readings_at(one, *noise) for one in (dead, without))
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], msg=name)


def test_recipes_are_ordinary():
    recipes = readings_2.TRAINED.values()
    assert {recipe.weight_decay for recipe in recipes} >= {0.0, 0.01, 0.1, 1.0}
    assert {recipe.epochs for recipe in recipes} >= {1, 3, 5, 10, 20}
    assert any(recipe.dropout for recipe in recipes)
    assert set(readings_2.OLD_FOR) <= set(readings_2.TRAINED)
