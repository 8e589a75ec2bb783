"""The paper's Figure 5: fool an ImageNet network by changing 2 % of the pixels of natural images.

The paper uses AlexNet, whose weights have no licence that lets us ship them. The default here is SqueezeNet, whose
weights are free; with `model="alexnet"` and its weights, AlexNet is used at the paper's l = 7, the last ReLU.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from netmoments import data
from netmoments.attacks.box import PixelSupport
from netmoments.checks import random_seed
from netmoments.data.datasets import data_folders
from netmoments.data.images import LabelledImages, evenly_spread
from netmoments.network import zoo
from netmoments.report.page import finite
from netmoments.sweep.item import Columns
from reproduction.attack_rows import (
    FEW,
    GREY_LEVELS,
    WANTED,
    Shown,
    a_sample,
    answers_of,
    asked_again,
    draw_gallery,
    gap_in_words,
    grey,
    listed,
    panel_of,
    share,
    yes,
)
from reproduction.experiment import BesidePaper, Drawing, Outcome, Panel, Settings
from reproduction.image_sweeps import BlocksOfImages, StudiedImages, same_bits

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "figure-5"
SWEEP = "few-pixels"
"""The folder of the sweep, and the name from which its random numbers derive."""
PERCENT = 2
BETA = 75
"""The bound β of the shift, in grey levels."""
ITERATIONS, POLISH = 200, 100
IMAGES = {"cpu": 2, "cuda": 6}
"""The most images that are attacked on each kind of device."""
SAMPLES = {"cpu": 50, "cuda": 1000}
"""Samples for each image; a network for ImageNet takes about 0.1 s per image on one core."""
LAYER = -1
TITLE = 24
"""The most letters of a picture's title."""
SQUEEZENET = "squeezenet_v1.0_deepcompressed.npz"
WORDS = "imagenet_synset_words.txt"
SUMMARY = (
    "label", "towards", "answer", "sigma", "margin", "network_margin", "success_10", "success_samples",
    "success_samples_clipped", "sparsity", "l1", "tv", "linf", "ssim", "gap", "feasible", "fooled", "polished",
)  # fmt: skip
"""The fields of `Attacked.records` that are kept of an image."""


@dataclass(frozen=True, eq=False)
class PhotographNetwork:
    """A network for ImageNet, the side of its images, and the names of its classes (none if they are unknown)."""

    name: str
    network: nn.Module
    side: int
    classes: Sequence[str]

    def called(self, label: int) -> str:
        return self.classes[label] if label < len(self.classes) else f"class {label}"


@dataclass(frozen=True, eq=False)
class AttackedPhotograph:
    """What the sweep found for one image."""

    number: int
    name: str
    image: Tensor
    mu: Tensor
    summary: dict[str, Any]


def reproduce(settings: Settings) -> Outcome:
    model = chosen_model(settings)
    natural = natural_images(settings, model.side)
    kind = settings.device.type
    numbers = evenly_spread(len(natural), 1 if settings.few else min(IMAGES[kind], len(natural)))
    studied = StudiedImages(model.network, natural.images[numbers], numbers, settings.seed)
    results = settings.run(FewPixelsSweep(SWEEP, studied, 1, SAMPLES[kind], LAYER))
    found = rows_from(results.columns, studied, [natural.names[k] for k in numbers.tolist()])
    reached = [row.summary["success_10"] >= WANTED - 1e-9 for row in found]
    return Outcome(
        name=NAME,
        title=f"Figure 5: natural images with {PERCENT} % of their pixels changed",
        reading=_words(model, found, reached, SAMPLES[kind]),
        comparisons=(
            BesidePaper(f"images fooled (90 % of {FEW} samples), of {len(found)}", sum(reached), None),
            BesidePaper("mean share of samples that fool", _mean(found, "success_samples"), None),
            BesidePaper("the same, cut to [0, 1]", _mean(found, "success_samples_clipped"), None),
        ),
        panels=(_panel(model, found, SAMPLES[kind]),),
        drawings=(
            Drawing(
                NAME,
                f"Natural images with noise whose mean is on {PERCENT} % of the pixels, |μ| ≤ {BETA} grey levels, σ² ≤ "
                f"2: above what {model.name} says to image and sample. Lower row: μ, grey is 0.",
                partial(draw, model, found, settings),
            ),
        ),
        numbers={
            "network": model.name,
            "images": [{"image": row.number, "name": row.name, **_plain(row.summary)} for row in found],
        },
        seconds=results.seconds,
    )


def chosen_model(settings: Settings) -> PhotographNetwork:
    """AlexNet if its weights are given, else SqueezeNet."""
    words = _of_squeezenet(settings, WORDS)
    classes = () if words is None else tuple(map(_short, words.read_text(encoding="utf-8").splitlines()))
    if settings.model == "alexnet":
        if settings.weights is None:
            raise ValueError(f"{NAME}: give --weights, a safetensors file for AlexNet; none come with the library")
        name, weights = "alexnet", settings.weights
    else:
        found = _of_squeezenet(settings, SQUEEZENET)
        if found is None:
            raise FileNotFoundError(
                f"{NAME} needs SqueezeNet's weights: put {SQUEEZENET} into one of"
                f"{_listed(data_folders('squeezenet', settings.data_dir))}\n(and {WORDS} beside it for the names of "
                "the classes); or give --model alexnet and its --weights"
            )
        name, weights = "squeezenet", found
    network = zoo.pretrained(name, weights).float()
    title = {"alexnet": "AlexNet", "squeezenet": "SqueezeNet"}[name]
    return PhotographNetwork(title, network, zoo.entry(name).input_shape[-1], classes)


def natural_images(settings: Settings, side: int) -> LabelledImages:
    """The .npz in a folder called natural, or the image files there."""
    folders = [folder for folder in data_folders("natural", settings.data_dir) if folder.name == "natural"]
    for folder in folders:
        if folder.is_dir():
            archives = sorted(folder.glob("*.npz"))
            return data.load(archives[0] if archives else folder, size=side)
    raise FileNotFoundError(
        f"{NAME} needs photographs: put image files, or an .npz with `images`, into one of{_listed(folders)}"
    )


def _of_squeezenet(settings: Settings, name: str) -> Path | None:
    """A file that comes with SqueezeNet, in one of the data folders."""
    places = data_folders("squeezenet", settings.data_dir)
    return next((place / name for place in places if (place / name).is_file()), None)


def _listed(folders: Sequence[Path]) -> str:
    return "".join(f"\n  {folder}" for folder in folders)


@dataclass(frozen=True, eq=False)
class FewPixelsSweep(BlocksOfImages):
    """A sweep with a row for each value that may change; the facts about an image are repeated in all of its rows."""

    samples: int
    layer: int | str = -1

    @property
    def configuration(self) -> Mapping[str, Any]:
        return {
            **{key: value for key, value in self.studied.description().items() if key != "sigmas"},
            "block": self.block,
            "samples": self.samples,
            "layer": self.layer,
            "percent": PERCENT,
            "beta": BETA,
            "iterations": ITERATIONS,
            "polish": POLISH,
        }

    def rows_of(self, studied: StudiedImages, places: range) -> Columns:
        with same_bits():
            parts = [self._image(studied, place) for place in places]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _image(self, studied: StudiedImages, place: int) -> dict[str, np.ndarray]:
        number = int(studied.numbers[place])
        image = studied.images[place : place + 1]
        label = answers_of(studied.network, image)
        seed = random_seed(studied.seed, SWEEP, number) % 2**31
        attack = PixelSupport(
            percent=PERCENT, beta=BETA / GREY_LEVELS, layer=self.layer, samples=self.samples, seed=seed,
            iterations=ITERATIONS, polish=POLISH,
        )  # fmt: skip
        result = attack(studied.network, image, label)
        found = asked_again(studied.network, result, seed, self.samples)
        mu = result.mu[0].flatten()
        changed = (mu.abs() > 0).nonzero().flatten()
        if not len(changed):
            changed = torch.zeros(1, dtype=torch.int64, device=mu.device)
        (record,) = found.records()
        rows = len(changed)
        summary = {
            name: np.full(rows, np.nan if record[name] is None else record[name]) for name in SUMMARY if name in record
        }
        return {
            "image": np.full(rows, number),
            "pixel": changed.cpu().numpy(),
            "mu": mu[changed].cpu().numpy(),
            **summary,
        }


def rows_from(columns: Columns, studied: StudiedImages, names: Sequence[str]) -> list[AttackedPhotograph]:
    """One for each image, in the order in which they were studied."""
    found = []
    for place, number in enumerate(studied.numbers.tolist()):
        mine = np.flatnonzero(columns["image"] == number)
        image = studied.images[place]
        mu = torch.zeros(image.numel(), dtype=image.dtype)
        mu[torch.from_numpy(columns["pixel"][mine])] = torch.from_numpy(columns["mu"][mine])
        summary = {name: columns[name][mine[0]].item() for name in SUMMARY}
        found.append(AttackedPhotograph(number, names[place], image, mu.reshape(image.shape), summary))
    return found


def draw(model: PhotographNetwork, found: Sequence[AttackedPhotograph], settings: Settings) -> Figure:
    """Draw the noisy images above and the noise below."""
    network = model.network.to("cpu")
    columns = []
    for row in found:
        noisy = a_sample(row.image + row.mu, row.summary["sigma"], settings.seed + row.number)
        answer = int(answers_of(network, noisy.unsqueeze(0)))
        before, after = (textwrap.fill(model.called(int(k)), TITLE) for k in (row.summary["label"], answer))
        title = f"{before}\n→ {after}"
        columns.append(Shown(noisy, title, f"{share(row.summary['success_samples'])} fooled", row.mu))
    return draw_gallery(columns, side=1.7)


def _short(line: str) -> str:
    """Of "n01440764 tench, Tinca tinca" the tench."""
    return line.split(" ", 1)[-1].split(",")[0].strip()


def _mean(found: Sequence[AttackedPhotograph], name: str) -> float:
    return float(np.mean([row.summary[name] for row in found]))


def _plain(summary: dict[str, Any]) -> dict[str, Any]:
    return {name: finite(value) for name, value in summary.items()}


def _panel(model: PhotographNetwork, found: Sequence[AttackedPhotograph], samples: int) -> Panel:
    rows = []
    for row in found:
        of = row.summary
        rows.append(
            (
                f"{row.name}: {model.called(of['label'])}",
                model.called(of["towards"]),
                model.called(of["answer"]),
                share(of["success_10"]),
                share(of["success_samples"]),
                share(of["success_samples_clipped"]),
                share(of["sparsity"], 1),
                grey(of["l1"] + of["tv"]),
                grey(of["linf"]),
                f"{of['sigma'] * GREY_LEVELS:.2f}",
                gap_in_words(of["gap"]),
                yes(of["feasible"]),
                yes(of["fooled"]),
            )
        )
    return panel_of("By image", rows, samples)


def _words(
    model: PhotographNetwork, found: Sequence[AttackedPhotograph], reached: Sequence[bool], samples: int
) -> tuple[str, ...]:
    pairs = listed([f"{model.called(row.summary['label'])} → {model.called(row.summary['answer'])}" for row in found])
    followed = sum(row.summary["polished"] > 0 for row in found)
    return (
        f"The paper's problem for few pixels on photographs: {PERCENT} % of the pixels, chosen at random, all "
        f"channels, get a mean of at most {BETA} grey levels, and M + μ stays a picture; noise with σ² ≤ 2 is on all "
        f"pixels. {len(found)} photographs, labelled by what the network says to them, and {model.name}, linearized at "
        "the image at its last ReLU. The paper has AlexNet on images of ImageNet, and gives no numbers.",
        f"{sum(reached)} of {len(found)} are fooled in at least 90 % of {FEW} samples; over {samples:,} samples each, "
        f"{share(_mean(found, 'success_samples'))} are fooled, cut to [0, 1] "
        f"{share(_mean(found, 'success_samples_clipped'))}. What most samples are taken for: {pairs}. What the "
        f"formula found, linearized at the image, was kept for {len(found) - followed}; for {followed} following the "
        f"network itself for {POLISH} steps did better.",
    )
