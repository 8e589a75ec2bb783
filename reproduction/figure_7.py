"""The paper's Figure 7: sparse and smooth noise that turns the mean 4 into a chosen digit."""

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
    answers_of,
    both_ways,
    listed,
    mean_images,
    picture_rows,
)
from reproduction.experiment import BesidePaper, Drawing, Outcome, Settings
from reproduction.lenet_on_mnist import chosen_network

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "figure-7"
DIGIT = 4
TARGETS = (5, 8, 9)


def reproduce(settings: Settings) -> Outcome:
    start = time.perf_counter()
    network = chosen_network(settings).to(settings.here)
    image = mean_images(settings)[DIGIT : DIGIT + 1]
    seen = int(answers_of(network, image))
    if seen != DIGIT:
        raise ValueError(f"{NAME}: the network takes the mean {DIGIT} for a {seen} without noise; give other --weights")
    images = image.expand(len(TARGETS), -1, -1, -1).contiguous()
    found = both_ways(NAME, network, images, torch.tensor([DIGIT] * len(TARGETS)), torch.tensor(TARGETS), settings)
    seconds = time.perf_counter() - start
    caption = (
        f"Columns: the mean {DIGIT}, |μ|, its positive and its negative part, and a noisy sample that gets the answer "
        f"of most samples; left, how many of {found.paper.samples:,} samples get the target."
    )
    reached = int((found.confident.many > 0.5).sum())
    return Outcome(
        name=NAME,
        title=f"Figure 7: sparse and smooth noise that turns the mean {DIGIT} into {listed(TARGETS)}",
        reading=_words(found),
        comparisons=(
            BesidePaper("targets that most samples get, as the paper", sum(found.seen), len(TARGETS)),
            BesidePaper("targets that most samples get, with confidence", reached, len(TARGETS)),
        ),
        panels=found.panels(DIGITS),
        drawings=(
            Drawing(
                NAME,
                f"As the paper: γ = 0, the formula alone, no bounds. {caption}",
                partial(draw, network, found.paper, settings.seed),
            ),
            Drawing(
                f"{NAME}-confidence",
                f"With 95 % confidence, in [0, 1], the network followed. {caption}",
                partial(draw, network, found.confident, settings.seed),
            ),
        ),
        numbers=found.records(),
        seconds=seconds,
    )


def draw(network: nn.Module, attacked: Attacked, seed: int) -> Figure:
    notes = [f"to {target}" for target in TARGETS]
    return draw_rows(picture_rows(network, attacked, DIGITS, seed, notes))


def _words(found: TwoWays) -> tuple[str, ...]:
    answers = [f"{target}: {int(answer)}" for target, answer in zip(TARGETS, found.paper.answers, strict=True)]
    return (
        f"{WHAT} Here the target's expected score has to be level with the best other one.",
        f"The image is the mean of MNIST's test images of {DIGIT}; the targets are the paper's, {listed(TARGETS)}, all "
        f"of which it reaches. What most samples get here, as the paper, by target: {', '.join(answers)}.",
        found.comparison_in_words(),
    )
