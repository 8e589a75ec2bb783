"""Networks that an experiment trains itself, once in an output folder, resuming after the last finished epoch."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from netmoments import data
from netmoments.data.images import LabelledImages
from netmoments.network import zoo
from netmoments.network.weights import read_tensors
from netmoments.sweep.run import Watch
from reproduction.experiment import Settings
from reproduction.training import Epoch, Recipe, train, training_facts

TRAINED = "trained"
"""The name of their folder in the output folder."""


EACH = 100
"""Training images for each image that is studied, in a run with few images."""


def splits(settings: Settings, name: str) -> tuple[LabelledImages, LabelledImages]:
    """The training and test images of a dataset; only some of both in a run with few images."""
    training, held_out = (data.load(name, split=split, data_dir=settings.data_dir) for split in ("train", "test"))
    if not settings.few:
        return training, held_out
    most = EACH * settings.images
    return training.first(min(most, len(training))), held_out.first(min(most, len(held_out)))


def trained_once(
    settings: Settings, label: str, recipe: Recipe, seed: int, images: tuple[LabelledImages, LabelledImages]
) -> tuple[Path, float]:
    """The weights of a recipe and seed, `trained/<label>-<seed>.safetensors`, and the seconds that training took.

    Weights from an earlier run are used if they have this recipe, seed and number of images. They are written whole at
    the end; an interrupted training continues from its last epoch. When the time is over it stops after an epoch.
    """
    training, held_out = images
    weights = settings.out / TRAINED / f"{label}-{seed}.safetensors"
    wanted = training_facts(recipe, training, seed)
    if not weights.exists():
        settings.require_time(f"training {weights.stem}", 0, recipe.epochs, "epochs")
        with Watch(f"training {weights.stem}", "epochs", recipe.epochs, 0) as watch:
            done = 0

            def advance(epoch: Epoch) -> None:
                nonlocal done
                watch.advance(epoch.number - done)
                done = epoch.number
                if epoch.number < recipe.epochs:
                    settings.require_time(f"training {weights.stem}", epoch.number, recipe.epochs, "epochs")

            train(recipe, training, held_out, weights=weights, seed=seed, device=settings.here, on_epoch=advance)
    there = read_tensors(weights)[1]
    others = [
        f"{key}: wanted {value}, there {there.get(key)}" for key, value in wanted.items() if there.get(key) != value
    ]
    if others:
        raise ValueError(f"{weights} was trained otherwise ({'; '.join(others)}); remove it and run again")
    return weights, float(there["seconds"])


def network_as_trained(recipe: Recipe, weights: Path) -> nn.Module:
    """The network for images in [0, 1], in eval mode and float32, with the recipe's scaling of images in front."""
    return recipe.of_images(zoo.pretrained(recipe.network, weights).float())
