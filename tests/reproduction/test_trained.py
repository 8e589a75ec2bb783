"""Networks that an experiment trains: once in a folder, stopped after an epoch where the time is over."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

import netmoments as nm
from netmoments.network.weights import read_tensors
from reproduction import trained
from reproduction.experiment import Settings, Unfinished
from reproduction.training import Recipe
from tests.reproduction.small import settings_for

RECIPE = Recipe("digits", "digits", epochs=3, batch=64, rate=3e-3)


@pytest.fixture(scope="module")
def digits():
    return nm.data.load("digits", split="train").first(100), nm.data.load("digits").first(50)


def test_it_stops_after_an_epoch_and_goes_on(digits, tmp_path, monkeypatch):
    whole, _ = trained.trained_once(settings_for(tmp_path / "whole"), "digits", RECIPE, 0, digits)
    settings = settings_for(tmp_path / "slices")

    def over_after_two(self, name, done, total, unit):
        if done == 2:
            raise Unfinished(name, done, total, unit, 1.0)

    monkeypatch.setattr(Settings, "require_time", over_after_two)
    with pytest.raises(Unfinished, match=r"training digits-0: 2 of 3 epochs"):
        trained.trained_once(settings, "digits", RECIPE, 0, digits)
    monkeypatch.undo()
    assert not (tmp_path / "slices" / "trained" / "digits-0.safetensors").exists()
    weights, seconds = trained.trained_once(settings, "digits", RECIPE, 0, digits)
    assert seconds >= 0  # to a tenth of a second
    one, other = (read_tensors(path)[0] for path in (whole, weights))
    assert all(torch.equal(one[name], other[name]) for name in one)
    over = replace(settings, deadline=time.monotonic() - 1)
    again = trained.trained_once(over, "digits", RECIPE, 0, digits)
    assert again == (weights, seconds)  # nothing is trained, so time does not matter


def test_other_weights_in_its_place_are_refused(digits, tmp_path):
    settings = settings_for(tmp_path)
    trained.trained_once(settings, "digits", RECIPE, 0, digits)
    with pytest.raises(ValueError, match=r"digits-0\.safetensors was trained otherwise \(recipe"):
        trained.trained_once(settings, "digits", replace(RECIPE, optimizer="sgd"), 0, digits)


def test_a_network_of_images_sees_them_as_its_recipe_says(digits, tmp_path):
    recipe = replace(RECIPE, centre=0.5, spread=0.5)
    weights, _ = trained.trained_once(settings_for(tmp_path), "digits", recipe, 0, digits)
    images = digits[1].images
    whole, bare = trained.network_as_trained(recipe, weights), nm.zoo.pretrained("digits", weights).float()
    torch.testing.assert_close(whole(images), bare(2 * images - 1))


def test_few_images_are_trained_on_few(tmp_path):
    training, held_out = trained.splits(settings_for(tmp_path, images=2), "digits")
    assert (len(training), len(held_out)) == (200, 200)
    assert len(trained.splits(settings_for(tmp_path, images=25), "digits")[0]) > 1000
