"""The paper's Figure 6: sparse and smooth noise that turns the mean image of a digit into another digit."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from netmoments.report.pictures import draw_rows
from reproduction.attack_rows import (
    DIGITS,
    WHAT,
    Attacked,
    TwoWays,
    both_ways,
    listed,
    mean_images,
    picture_rows,
    skipped_in_words,
)
from reproduction.experiment import BesidePaper, Drawing, Outcome, Settings
from reproduction.lenet_on_mnist import chosen_network

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "figure-6"
ROWS = 5
NAMED = 3
"""The only one of the five digits that the paper's text names: a 3, which becomes a 9."""
PAPER_ANSWERS = (6, 8, 9, 9, 9)
"""The digits that the paper's five rows become."""


def reproduce(settings: Settings) -> Outcome:
    start = time.perf_counter()
    network = chosen_network(settings).to(settings.here)
    digits = sorted([NAMED, *(digit for digit in range(10) if digit != NAMED)][: settings.images])
    found = both_ways(NAME, network, mean_images(settings)[digits], torch.tensor(digits), None, settings)
    shown = five(found)
    seconds = time.perf_counter() - start
    caption = (
        "Columns: the mean image of a digit, |μ|, its positive and its negative part, and a noisy sample that gets the "
        f"answer of most samples; left, how many of {found.paper.samples:,} samples are not taken for the digit."
    )
    count = len(found.paper.result)
    return Outcome(
        name=NAME,
        title="Figure 6: sparse and smooth noise on the mean digits",
        reading=_words(found, shown),
        comparisons=(
            BesidePaper("mean digits that most samples misclassify, as the paper", sum(found.seen), None),
            BesidePaper(
                "rows shown that most samples misclassify, as the paper",
                sum(found.seen[place] for place in shown),
                ROWS,
            ),
            BesidePaper(
                f"mean digits fooled with confidence, of {count}", int(found.confident.result.fooled.sum()), None
            ),
        ),
        panels=found.panels(DIGITS),
        drawings=(
            Drawing(
                NAME,
                f"As the paper: γ = 0, the formula alone, no bounds. {caption}",
                partial(draw, network, found.paper.take(shown), settings.seed),
            ),
            Drawing(
                f"{NAME}-confidence",
                f"With 95 % confidence, in [0, 1], the network followed. {caption}",
                partial(draw, network, found.confident, settings.seed),
            ),
        ),
        numbers={"shown": found.paper.result.labels[shown].tolist(), **found.records()},
        seconds=seconds,
    )


def five(found: TwoWays) -> list[int]:
    """The digit that the paper names, and the four others that come closest to being fooled; in order of the digits."""
    result = found.paper.result
    if not len(result):
        raise ValueError(f"{NAME}: the network gets no mean digit right, so there is nothing to attack")
    rank = result.network_margin.clone()
    rank[result.labels == NAMED] = -torch.inf
    return sorted(rank.argsort()[:ROWS].tolist())


def draw(network: nn.Module, attacked: Attacked, seed: int) -> Figure:
    return draw_rows(picture_rows(network, attacked, DIGITS, seed))


def _words(found: TwoWays, shown: list[int]) -> tuple[str, ...]:
    result = found.paper.result
    pairs = [f"{int(result.labels[k])} → {int(found.paper.answers[k])}" for k in shown]
    confident = [f"{int(result.labels[k])} → {int(found.confident.answers[k])}" for k in shown]
    towards = listed([f"{int(result.labels[k])} → {int(result.towards[k])}" for k in shown])
    return (
        WHAT,
        "The images are the means of MNIST's test images of each digit, which the paper shows too (its text speaks of "
        f"random test images).{skipped_in_words(found, DIGITS)} Its five rows end as {listed(PAPER_ANSWERS)}; where "
        "they begin it does not say, but for a 3 that becomes a 9. Shown here: the 3, and the four other digits that "
        f"come closest to being fooled. The formula sends them {towards}; most samples go {listed(pairs)}; with "
        f"confidence {listed(confident)}.",
        found.comparison_in_words(),
    )
