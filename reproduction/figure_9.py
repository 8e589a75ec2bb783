"""The paper's Figure 9: sparse and smooth noise that turns a face's emotion into another one.

FER2013's photographs have no stated licence. The drawing "figure-9" shows the noise alone and may be passed on;
"figure-9-faces" contains the photographs and is meant only for whoever made it, on their own machine.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

from netmoments.report.pictures import INK, SMALL, PictureRow, draw_picture, draw_rows, new_figure
from reproduction.attack_rows import GREY_LEVELS, WHAT, Attacked, TwoWays, both_ways, listed, picture_rows
from reproduction.experiment import BesidePaper, Drawing, Outcome, Settings
from reproduction.faces import EMOTIONS, faces_network, one_face_a_class

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "figure-9"
PAPER_ANSWERS = ("Neutral", "Fear", "Neutral", "Sadness", "Neutral", "Fear", "Sadness")
"""The paper's answer for each of `EMOTIONS`."""
SAMPLES = {"cpu": 200, "cuda": 1000}
"""Samples of each face's noise; on one core the network takes some 10 ms per image."""
PARTS = ("|μ|", "μ⁺", "μ⁻")


def reproduce(settings: Settings) -> Outcome:
    start = time.perf_counter()
    network = faces_network().to(settings.here)
    places, images, labels = one_face_a_class(network, settings)
    found = both_ways(NAME, network, images, labels, None, settings, SAMPLES[settings.here.type])
    seconds = time.perf_counter() - start
    printed = _paper_answers(labels)
    same, same_confident = (
        sum(answer == paper for answer, paper in zip(_answers(one), printed, strict=True))
        for one in (found.paper, found.confident)
    )
    noise = "|μ|, its positive and its negative part, white at the largest |μ|; the photographs are left out."
    faces = "the face, |μ|, its positive and its negative part, and a noisy sample that gets the most frequent answer."
    return Outcome(
        name=NAME,
        title="Figure 9: sparse and smooth noise on faces",
        reading=_words(found, places),
        comparisons=(
            BesidePaper("faces that most samples misclassify, as the paper", sum(found.seen), len(EMOTIONS)),
            BesidePaper("of these answers, the same as the paper's", same, len(EMOTIONS)),
            BesidePaper("answers with confidence that are the paper's", same_confident, len(EMOTIONS)),
            BesidePaper("faces fooled with confidence", int(found.confident.result.fooled.sum()), None),
        ),
        panels=found.panels(EMOTIONS),
        drawings=(
            Drawing(
                NAME,
                f"Noise with 95 % confidence, in [0, 1], the network followed: {noise}",
                partial(draw_noise, network, found.confident, settings.seed),
            ),
            Drawing(
                f"{NAME}-paper",
                f"Noise as the paper has it, γ = 0, the formula alone, no bounds: {noise}",
                partial(draw_noise, network, found.paper, settings.seed),
            ),
            Drawing(
                f"{NAME}-faces",
                f"With 95 % confidence: {faces} Not to be passed on: the photographs have no stated licence.",
                partial(draw, network, found.confident, settings.seed),
            ),
        ),
        numbers={"places": places, **found.records()},
        seconds=seconds,
    )


def draw(network: nn.Module, attacked: Attacked, seed: int) -> Figure:
    """Draw the figure with the photographs."""
    return draw_rows(picture_rows(network, attacked, EMOTIONS, seed))


def draw_noise(network: nn.Module, attacked: Attacked, seed: int) -> Figure:
    """Draw three pictures of μ for each face, one face per column; of the photographs they show only where the noise
    is.
    """
    rows = picture_rows(network, attacked, EMOTIONS, seed)
    figure = new_figure(1.3 * len(rows) + 0.3, 5.0)
    axes = figure.subplots(len(PARTS), len(rows), squeeze=False)
    for column, row in zip(axes.T, rows, strict=True):
        for axis, picture in zip(column, _parts(row), strict=True):
            draw_picture(axis, picture)
        column[0].set_title(f"{row.before}\n→ {row.after}", fontsize=SMALL, color=INK)
        levels = float(row.mu.abs().amax()) * GREY_LEVELS
        column[-1].set_xlabel(f"{row.note}\n≤ {levels:.0f} grey levels", fontsize=SMALL, color=INK)
    for axis, part in zip(axes[:, 0], PARTS, strict=True):
        axis.set_ylabel(part, fontsize=SMALL, color=INK, rotation=0, ha="right", va="center")
    return figure


def _parts(row: PictureRow) -> tuple[Tensor, ...]:
    return row.panels()[1 : 1 + len(PARTS)]


def _answers(attacked: Attacked) -> list[str]:
    return [EMOTIONS[int(answer)] for answer in attacked.answers]


def _paper_answers(labels: Tensor) -> list[str]:
    return [PAPER_ANSWERS[int(label)] for label in labels]


def _words(found: TwoWays, places: list[int]) -> tuple[str, ...]:
    result = found.paper.result
    pairs = [
        f"{EMOTIONS[int(label)]} → {answer}" for label, answer in zip(result.labels, _answers(found.paper), strict=True)
    ]
    confident = [
        f"{EMOTIONS[int(label)]} → {answer}"
        for label, answer in zip(found.confident.result.labels, _answers(found.confident), strict=True)
    ]
    paper = listed([f"{a} → {b}" for a, b in zip(EMOTIONS, PAPER_ANSWERS, strict=True)])
    return (
        WHAT,
        "The network is the AlexNet for faces that comes with the library. One face of each emotion from FER2013's "
        f"private test images that it gets right, drawn by the seed: {listed(places)}. The paper: {paper}. What most "
        f"samples get here, as the paper: {listed(pairs)}; with confidence: {listed(confident)}. Which class is the "
        "cheapest depends on the photograph, so the classes need not be the paper's.",
        found.comparison_in_words(),
        "The photographs have no stated licence. figure-9-faces shows them and is to stay with whoever made it; the "
        "other drawings show the noise alone.",
    )
