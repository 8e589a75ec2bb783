"""Table 5 on face networks trained as an author in 2019 would have: three seeds, plain SGD, images as they are."""

from __future__ import annotations

from netmoments import data
from netmoments.network import zoo
from reproduction.experiment import Outcome, Settings
from reproduction.readings_5 import FACE_WAYS, LAST, Studied, outcome_of, studied_faces
from reproduction.trained import splits, trained_once
from reproduction.training import RECIPES, accuracy

NAME = "readings-2019"
SEEDS = (0, 1, 2)
WAYS = {name: FACE_WAYS[name] for name in (LAST, "l = 3")}
LEAST = 1000
"""From so many images on the networks are trained: each took 100 s on an H200 that six processes shared, and takes
hours on a CPU."""


def reproduce(settings: Settings) -> Outcome:
    title = "Table 5 on face networks trained as in 2019"
    if settings.images >= LEAST:
        return outcome_of(NAME, title, networks(settings))
    words = f"Nothing was run: face networks are trained for {LEAST:,} images or more, --images was {settings.images}."
    return Outcome(NAME, title, (words,), (), (), (), {"studied": []}, 0.0)


def networks(settings: Settings) -> list[Studied]:
    """The network of each seed, trained and attacked."""
    images = splits(settings, "fer2013")
    everything = data.load("fer2013", data_dir=settings.data_dir)
    found = []
    for seed in SEEDS:
        weights, _ = trained_once(settings, "faces-2019", RECIPES["faces-plain"], seed, images)
        right = accuracy(zoo.pretrained("faces", weights).float(), images[1])
        title = f"a face network as of 2019, seed {seed}, right about {right:.1%}"
        found.append(studied_faces(settings, f"{NAME}-{seed}", title, weights, WAYS, everything))
    return found
