"""Training: the same seed gives the same bits, an interrupted run goes on as if nothing had happened."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import netmoments as nm
from netmoments.network.weights import read_tensors
from reproduction.training import (
    RECIPES,
    accuracy,
    constant,
    one_cycle,
    random_affine,
    random_erasing,
    random_mirror,
    three_steps,
    train,
)

SHORT = dataclasses.replace(RECIPES["digits"], epochs=3)


@pytest.fixture(scope="module")
def digits():
    return nm.data.load("digits", split="train").first(300), nm.data.load("digits").first(100)


def trained(digits, path: Path, recipe=SHORT, **more):
    train(recipe, *digits, weights=path, **more)
    return read_tensors(path)[0]


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_seed_gives_the_same_bits_and_another_gives_others(digits, tmp_path):
    first = trained(digits, tmp_path / "a.safetensors")
    assert same(first, trained(digits, tmp_path / "b.safetensors"))
    assert not same(first, trained(digits, tmp_path / "c.safetensors", seed=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors", "c.safetensors"]


@pytest.mark.parametrize("stop_after", [1, 2])
def test_an_interrupted_run_goes_on_to_the_same_bits(digits, tmp_path, stop_after):
    whole = trained(digits, tmp_path / "whole.safetensors")

    def interrupt(epoch):
        if epoch.number == stop_after:
            raise KeyboardInterrupt

    path = tmp_path / "w.safetensors"
    with pytest.raises(KeyboardInterrupt):
        train(SHORT, *digits, weights=path, on_epoch=interrupt)
    assert not path.exists()
    assert (tmp_path / "w.checkpoint.safetensors").exists()
    seen = []
    train(SHORT, *digits, weights=path, on_epoch=lambda epoch: seen.append(epoch.number))
    assert seen == list(range(stop_after + 1, 4))
    assert same(whole, read_tensors(path)[0])
    assert not (tmp_path / "w.checkpoint.safetensors").exists()


def test_another_run_is_not_continued(digits, tmp_path):
    def interrupt(epoch):
        raise KeyboardInterrupt

    path = tmp_path / "w.safetensors"
    with pytest.raises(KeyboardInterrupt):
        train(SHORT, *digits, weights=path, on_epoch=interrupt)
    with pytest.raises(ValueError, match=r"of another run \(seed '0' there, '1' now\).*delete the file"):
        train(SHORT, *digits, weights=path, seed=1)
    (tmp_path / "w.checkpoint.safetensors").write_bytes(b"half")
    with pytest.raises(ValueError, match="not a safetensors file, or is damaged"):
        train(SHORT, *digits, weights=path)


def test_the_callers_random_state_and_settings_are_left_alone(digits, tmp_path):
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    trained(digits, tmp_path / "a.safetensors")
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_run_that_diverges_says_so(digits, tmp_path):
    with pytest.raises(FloatingPointError, match=r"diverged in epoch 1.*lower the rate"):
        trained(digits, tmp_path / "a.safetensors", dataclasses.replace(SHORT, rate=1e30))


def test_images_without_labels_are_refused(digits, tmp_path):
    bare = dataclasses.replace(digits[0], labels=None)
    with pytest.raises(ValueError, match="no labels"):
        trained((bare, digits[1]), tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="no labels"):
        accuracy(nm.zoo.pretrained("digits"), bare)


def test_schedules():
    assert constant(0.7) == 1.0
    assert one_cycle(0.0) == pytest.approx(0.05)
    assert one_cycle(0.2) == pytest.approx(1.0)
    assert one_cycle(1.0) == pytest.approx(0.0)
    assert [three_steps(done) for done in (0.0, 0.49, 0.5, 0.75, 1.0)] == [1.0, 1.0, 0.1, 0.01, 0.01]


def test_changes_to_images(generator):
    images = torch.rand(64, 1, 12, 12, generator=generator)
    assert random_affine(images, generator, degrees=0, shift=0, scale=0).allclose(images, atol=1e-5)
    mirrored = random_mirror(images, generator)
    kept = (mirrored == images).flatten(1).all(1)
    flipped = (mirrored == images.flip(-1)).flatten(1).all(1)
    assert bool((kept ^ flipped).all())
    assert 10 < int(kept.sum()) < 54
    erased = random_erasing(images, generator, share=0.5)
    changed = (erased != images).flatten(1).sum(1)
    assert set(changed.tolist()) <= {0, 25, 30, 36, 42, 49}
    assert 10 < int((changed == 0).sum()) < 54


@pytest.mark.parametrize(
    "changes",
    [{"optimizer": "sgd", "rate": 0.1}, {"dropout": 0.5}, {"centre": 0.5, "spread": 1.0, "rate": 1e-2},
     {"sigma": 0.2, "folds": 2}, {"sigma": 0.2, "moments": 1.0}],
)  # fmt: skip
def test_other_recipes_learn_and_go_on_to_the_same_bits(digits, tmp_path, changes):
    recipe = dataclasses.replace(SHORT, averaging=0.0, epochs=4, **changes)
    whole = trained(digits, tmp_path / "whole.safetensors", recipe)

    def interrupt(epoch):
        if epoch.number == 2:
            raise KeyboardInterrupt

    path, seen = tmp_path / "w.safetensors", []
    with pytest.raises(KeyboardInterrupt):
        train(recipe, *digits, weights=path, on_epoch=interrupt)
    train(recipe, *digits, weights=path, on_epoch=lambda epoch: seen.append(epoch.accuracy))
    assert same(whole, read_tensors(path)[0])
    assert seen[-1] > 0.2  # ten classes, a few steps


def test_recipes_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="no optimizer 'lbfgs'; there are adam, sgd"):
        dataclasses.replace(SHORT, optimizer="lbfgs")
    with pytest.raises(ValueError, match="not both"):
        dataclasses.replace(SHORT, sigma=0.1, folds=1, moments=1.0)
    with pytest.raises(ValueError, match="has a level, sigma"):
        dataclasses.replace(SHORT, folds=1)
    with pytest.raises(ValueError, match="leave out dropout"):
        dataclasses.replace(SHORT, sigma=0.1, moments=1.0, dropout=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits", "lenet"])
def test_training_again_gives_the_shipped_accuracy(name, data_dir, tmp_path):
    recipe = RECIPES[name]
    training, held_out = (nm.data.load(recipe.data, split=split, data_dir=data_dir) for split in ("train", "test"))
    again = train(recipe, training, held_out, weights=tmp_path / "w.safetensors")
    assert abs(accuracy(again, held_out) - accuracy(nm.zoo.pretrained(name), held_out)) <= 0.003
