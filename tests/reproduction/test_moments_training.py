"""Training on the expected loss beside noisy copies: a small run on the digits that come with scikit-learn."""

from __future__ import annotations

import json

import pytest
import torch

import netmoments as nm
from reproduction import moments_training
from reproduction.moments_training import MOMENTS, PLAIN, Subject
from reproduction.training import Recipe
from tests.reproduction.small import drawn, settings_for

SMALL = Subject("digits", Recipe("digits", "digits", epochs=6, batch=64, rate=3e-3), 0.5, (0.25, 0.5))


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    out = tmp_path_factory.mktemp("moments")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moments_training, "SUBJECTS", (SMALL,))
        patch.setattr(moments_training, "FOLDS", (1, 2))
        yield moments_training.reproduce(settings_for(out, images=25)), out


def test_every_kind_is_trained_once_and_timed(outcome):
    found, out = outcome
    numbers = found.numbers["digits"]
    assert [trial["kind"] for trial in numbers["trials"]] == [PLAIN, "1 fold", "2 folds", MOMENTS]
    assert numbers["relative_step_time"][PLAIN] == 1
    assert all(time > 0 for time in numbers["relative_step_time"].values())
    names = sorted(path.name for path in (out / "trained").iterdir())
    assert names == [f"digits-{kind}-0.safetensors" for kind in ("1-fold", "2-folds", "expected-loss", "plain")]
    json.dumps(found.numbers, allow_nan=False)
    assert drawn(found.drawings[0].draw(), out)


def test_both_ways_help_under_noise(outcome):
    """By far more than five standard errors of 450 images with five draws each."""
    right = {trial["kind"]: trial["right"] for trial in outcome[0].numbers["digits"]["trials"]}
    assert right["2 folds"][-1] > right[PLAIN][-1] + 0.1
    assert right[MOMENTS][-1] > right[PLAIN][-1] + 0.1
    assert right[PLAIN][0] > 0.8


def test_all_networks_see_the_same_noise():
    digits = nm.data.load("digits").first(20)
    network = nm.zoo.pretrained("digits").float()
    sweep = moments_training.UnderNoise("u", network, digits, (0.3,), 0)
    first, second = (sweep.prepare("cpu")(0) for _ in range(2))
    assert (first["right"] == second["right"]).all()
    assert len(first["right"]) == 20 * (1 + moments_training.DRAWS)
    assert first["right"][first["sigma"] == 0].mean() == float(
        (network(digits.images).argmax(1) == digits.labels).double().mean()
    )


def test_the_time_is_the_relative_one():
    digits = nm.data.load("digits", split="train")
    state = torch.random.get_rng_state()
    times = moments_training.relative_times({PLAIN: SMALL.recipe}, digits, torch.device("cpu"), 2)
    assert times == {PLAIN: 1.0}
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ((0.90, 0.90), "as good as 3 folds"),
        ((0.94, 0.96), "as good as 21 folds within the spread of the seeds"),
        ((0.70, 0.70), "not as good as one fold"),
    ],
)
def test_what_it_is_worth_in_folds(own, words):
    """Two seeds each: one fold 0.8, three 0.9, 21 folds 0.96, all without spread but ours."""
    subject = moments_training.SUBJECTS[0]
    rates = {"plain": (0.5, 0.5), "1 fold": (0.8, 0.8), "3 folds": (0.9, 0.9), "21 folds": (0.96, 0.96),
             moments_training.MOMENTS: own}  # fmt: skip
    trials = [moments_training.Trial(kind, seed, (rate,) * 6, 0.0)
              for kind, both in rates.items() for seed, rate in enumerate(both)]  # fmt: skip
    one = moments_training.Trained(subject, trials, dict.fromkeys(rates, 1.0), 100, 100)
    assert moments_training.worth(one) == words
