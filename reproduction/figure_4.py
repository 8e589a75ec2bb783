"""The paper's Figure 4: four random sets of 4 % of the pixels of a 9, each of which turns it into another digit."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from netmoments.attacks.box import PixelSupport
from reproduction.attack_rows import (
    DIGITS,
    FEW,
    GREY_LEVELS,
    PIXELS,
    Attacked,
    Shown,
    answers_of,
    asked_again,
    draw_gallery,
    listed,
    panel_of,
    right_images,
    row_of,
    share,
    typical_sample,
)
from reproduction.experiment import BesidePaper, Drawing, Outcome, Panel, Settings
from reproduction.lenet_on_mnist import chosen_network

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "figure-4"
DIGIT = 9
PERCENT = 4
BETA = 550
"""The bound β of the shift, in grey levels; it is more than there are."""
PAPER_ANSWERS = (2, 4, 2, 2)
"""The digits that the paper's 9 becomes, for each choice of pixels."""
NINES = 20
"""How many nines are tried: the first that the network gets right."""
SURVEYED = 100
"""Samples for each nine; the one that is shown has more."""
ITERATIONS, POLISH = 200, 100
WAYS: dict[str, dict[str, Any]] = {
    "formula alone": {"bounds": None, "polish": 0},
    "network followed": {"bounds": None, "polish": POLISH},
    "within [0, 1]": {"bounds": PIXELS, "polish": POLISH},
}
"""The paper's attack; the attack with the network followed where that is not enough; and the latter with M + μ kept a
picture.
"""
PAPER, FOLLOWED, INSIDE = WAYS


@dataclass(frozen=True, eq=False)
class Support:
    """All nines with one random choice of pixels each, attacked in all ways."""

    seed: int
    ways: dict[str, Attacked]


def reproduce(settings: Settings) -> Outcome:
    start = time.perf_counter()
    network = chosen_network(settings).to(settings.here)
    places, nines = right_images(network, settings, DIGIT, min(NINES, settings.images))
    supports = []
    for number in range(len(PAPER_ANSWERS)):
        settings.require_time(NAME, number, len(PAPER_ANSWERS), "choices of pixels")
        supports.append(with_support(network, nines, settings.seed + number))
    chosen = most_fooled(supports)
    shown = [
        {way: asked_again(network, one.take([chosen]).result, settings.seed) for way, one in support.ways.items()}
        for support in supports
    ]
    seconds = time.perf_counter() - start
    return Outcome(
        name=NAME,
        title="Figure 4: a 9 with 4 % of its pixels changed",
        reading=_words(supports, shown, places, chosen),
        comparisons=_comparisons(supports, shown),
        panels=(_shown_panel(shown, places[chosen]), _survey_panel(supports)),
        drawings=(
            Drawing(
                NAME,
                f"MNIST's test image {places[chosen]} without noise, and a sample of the noise on each of four random "
                f"choices of {PERCENT} % of its pixels, |μ| ≤ {BETA} grey levels, the formula alone. The network sees "
                "the sample as it is, the picture cuts it to [0, 1]. Lower row: μ, grey is 0.",
                partial(draw, network, nines[chosen], [versions[PAPER] for versions in shown], settings.seed),
            ),
        ),
        numbers={
            "nines": places,
            "shown": places[chosen],
            "supports": [
                {
                    "seed": support.seed,
                    "shown": {way: attacked.records()[0] for way, attacked in versions.items()},
                    "ways": {way: attacked.records() for way, attacked in support.ways.items()},
                }
                for support, versions in zip(supports, shown, strict=True)
            ],
        },
        seconds=seconds,
    )


def with_support(network: nn.Module, images: Tensor, seed: int) -> Support:
    """Attack every image on pixels of its own, chosen by the seed."""
    ways = {}
    for way, changes in WAYS.items():
        attack = PixelSupport(
            percent=PERCENT, beta=BETA / GREY_LEVELS, samples=SURVEYED, seed=seed, iterations=ITERATIONS, **changes
        )
        ways[way] = asked_again(network, attack(network, images, DIGIT), seed, SURVEYED)
    return Support(seed, ways)


def most_fooled(supports: list[Support]) -> int:
    """The nine that the formula alone fools with the most choices of pixels; the first of equals."""
    return int(torch.stack([support.ways[PAPER].reached for support in supports]).sum(0).argmax())


def draw(network: nn.Module, image: Tensor, shown: list[Attacked], seed: int) -> Figure:
    """Draw the image and one noisy sample for each choice of pixels."""
    columns = [Shown(image.cpu(), str(DIGIT), "without noise")]
    for attacked in shown:
        result = attacked.result
        noisy = typical_sample(network, attacked, 0, seed)
        answer = int(answers_of(network, noisy.unsqueeze(0)))
        below = f"{share(attacked.many[0])} fooled\n{share(attacked.clipped[0])} cut to [0, 1]"
        columns.append(Shown(noisy.cpu(), f"taken for {answer}", below, result.mu[0].cpu()))
    return draw_gallery(columns)


def _fooled(shown: list[dict[str, Attacked]], way: str) -> int:
    return sum(bool(versions[way].reached[0]) for versions in shown)


def _rate(supports: list[Support], way: str) -> float:
    """The share of all nines and choices of pixels that pass the paper's check."""
    return float(torch.stack([support.ways[way].reached for support in supports]).double().mean())


def _comparisons(supports: list[Support], shown: list[dict[str, Attacked]]) -> tuple[BesidePaper, ...]:
    pairs = len(supports) * len(supports[0].ways[PAPER].few)
    first = tuple(
        BesidePaper(f"choices of pixels that fool, nine shown, {way}", _fooled(shown, way), paper)
        for way, paper in zip(WAYS, (len(PAPER_ANSWERS), None, None), strict=True)
    )
    rates = tuple(BesidePaper(f"share of {pairs} nines and choices, {way}", _rate(supports, way), None) for way in WAYS)
    return first + rates


def _shown_panel(shown: list[dict[str, Attacked]], place: int) -> Panel:
    rows = [
        row_of(attacked, 0, DIGITS, f"{number}, {way}")
        for number, versions in enumerate(shown, start=1)
        for way, attacked in versions.items()
    ]
    title = f"The 9 that is shown, test image {place}, by choice of pixels"
    return panel_of(title, rows, shown[0][PAPER].samples, tuple(range(len(WAYS), len(rows), len(WAYS))))


def _survey_panel(supports: list[Support]) -> Panel:
    count = len(supports[0].ways[PAPER].few)
    rows = []
    for way in WAYS:
        found = [support.ways[way] for support in supports]
        cells = [f"{int(attacked.reached.sum())} of {count}" for attacked in found]
        clipped = float(torch.stack([attacked.clipped for attacked in found]).mean())
        rows.append((way, *cells, share(_rate(supports, way)), share(clipped)))
    return Panel(
        title=f"All {count} nines: how many are fooled",
        columns=("", *(f"choice {number}" for number in range(1, len(supports) + 1)), "together", "samples, cut"),
        rows=tuple(rows),
        caption=f"Fooled: at least 90 % of {FEW} samples. Samples, cut: share of all samples that fool the network "
        "when they are cut to [0, 1].",
    )


def _words(
    supports: list[Support], shown: list[dict[str, Attacked]], places: list[int], chosen: int
) -> tuple[str, ...]:
    alone = [versions[PAPER] for versions in shown]
    answers = listed([int(attacked.answers[0]) for attacked in alone])
    pixels = int(alone[0].result.l0[0])
    clipped = float(torch.stack([support.ways[PAPER].clipped for support in supports]).mean())
    return (
        f"The paper's problem for few pixels: {PERCENT} % of the pixels ({pixels} of 784 at the one shown), chosen at "
        f"random and then fixed, get a mean of at most β = {BETA} grey levels; the noise, σ² ≤ 2, is on all pixels. "
        f"The first {len(places)} nines of MNIST's test set that the network gets right, four choices each. β is more "
        f"than the {GREY_LEVELS} grey levels that a pixel has, so the noisy images are not pictures; the paper sets no "
        "other bound, and neither do the first two ways here.",
        f"Shown is the nine that most choices fool by the formula alone, test image {places[chosen]}: "
        f"{_fooled(shown, PAPER)} of four, most samples taken for {answers} (the paper: {listed(PAPER_ANSWERS)}).",
        f"Over all nines and choices the formula alone fools {share(_rate(supports, PAPER))}, and with the network "
        f"followed where that is not enough {share(_rate(supports, FOLLOWED))}. Of the samples of the formula alone, "
        f"cut to [0, 1] so that they are pictures, {share(clipped)} fool. When M + μ has to stay within [0, 1] from "
        f"the start, {share(_rate(supports, INSIDE))} are fooled.",
    )
