"""Sparse and smooth noise in two ways, as the paper has it and with confidence: what Figures 6, 7 and 9 share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from netmoments import data
from netmoments.attacks.sparse_smooth import SparseSmooth
from reproduction.attack_rows import Attacked, asked_again, grey, listed, rows_panel, share
from reproduction.outcome import Panel
from reproduction.settings import Settings

DIGITS = tuple(map(str, range(10)))
ITERATIONS, POLISH = 500, 100
CONFIDENCE = 0.95
SAMPLES = 1000
"""During the attack with confidence, and after both: with 200 the quantile aimed at errs by more than a percent."""
WHAT = (
    "The least ‖μ‖₁ + TV(μ) for which the network is fooled, noise of one grey level on every pixel (Σ = I). As the "
    "paper has it: γ = 0, so the expected scores of the network, linearized at the image at its last ReLU, have to be "
    "level, and nothing keeps M + μ a picture. With confidence: 95 % of the samples have to be fooled, M + μ stays in "
    "[0, 1], and after the formula the network itself is followed, with what the noise adds to its scores measured by "
    "sampling."
)


@dataclass(frozen=True, eq=False)
class TwoWays:
    """The same images attacked in both ways."""

    paper: Attacked
    confident: Attacked

    def records(self) -> dict[str, Any]:
        return {
            "as_the_paper": self.paper.records(),
            "with_confidence": self.confident.records(),
            "skipped": [skipped._asdict() for skipped in self.paper.result.skipped],
        }

    @property
    def seen(self) -> list[bool]:
        """Of the paper's way: whether most samples get another class than the label, or the target."""
        result = self.paper.result
        answers = self.paper.answers
        return (answers != result.labels if result.targets is None else answers == result.targets).tolist()

    def panels(self, classes: Sequence[str]) -> tuple[Panel, Panel]:
        """The first without the legend, which the second has."""
        first = rows_panel("As the paper: γ = 0, formula alone, no bounds", self.paper, classes)
        second = rows_panel("With 95 % confidence, in [0, 1], network followed", self.confident, classes)
        return replace(first, caption=""), second

    def comparison_in_words(self) -> str:
        """What came out, in numbers."""
        paper, confident = self.paper, self.confident
        if not len(paper.result):
            return "The network classifies none of the images correctly; nothing was attacked."
        count = len(paper.result)
        error = float(paper.result.surrogate_error.abs().median())
        sparsity = " and ".join(share(one.result.sparsity.mean(), 1) for one in (paper, confident))
        lengths = " and ".join(grey((one.result.l1 + one.result.tv).median()) for one in (paper, confident))
        return (
            f"As the paper, the problem is solved for {int(paper.result.feasible.sum())} of {count}, but the formula "
            f"is not the network: at its solutions the expected margin is off by {error:.1f} (median, in logits), and "
            f"most samples do what was asked for {sum(self.seen)} of {count}; cut to [0, 1], for "
            f"{int((paper.clipped > 0.5).sum())}. With the network followed the share of samples is "
            f"{share(confident.many.min())} to {share(confident.many.max())}, {share(confident.many.mean(), 1)} on "
            f"average (cut to [0, 1] {share(confident.clipped.mean(), 1)}); by the attack's own "
            f"{confident.result.success.samples} samples, {int(confident.result.fooled.sum())} of {count} are at 95 % "
            f"within sampling error. Pixels left unchanged, as the paper and with confidence: {sparsity}; ‖μ‖₁ + TV "
            f"(median): {lengths} grey levels."
        )


def both_ways(
    name: str,
    network: nn.Module,
    images: Tensor,
    labels: Tensor,
    targets: Tensor | None,
    settings: Settings,
    samples: int | None = None,
) -> TwoWays:
    """Every image attacked as the paper does, and with confidence; then sampled again, `SAMPLES` unless told."""
    samples = SAMPLES if samples is None else samples
    attacks = (
        SparseSmooth(gamma=0.0, polish=0, bounds=None, iterations=ITERATIONS, seed=settings.seed),
        SparseSmooth(confidence=CONFIDENCE, polish=POLISH, iterations=ITERATIONS, samples=samples, seed=settings.seed),
    )
    found = []
    for number, attack in enumerate(attacks):
        settings.require_time(name, number, len(attacks), "attacks")
        found.append(asked_again(network, attack(network, images, labels, targets), settings.seed, samples))
    return TwoWays(*found)


def mean_images(settings: Settings) -> Tensor:
    """The mean of MNIST's test images of each digit, (10, 1, 28, 28)."""
    everything = data.load("mnist", data_dir=settings.data_dir)
    assert everything.labels is not None
    absent = sorted(set(range(10)) - set(everything.labels.tolist()))
    if absent:
        raise ValueError(f"MNIST's test set here has no image of {listed(absent)}")
    means = [everything.images[everything.labels == digit].mean(0) for digit in range(10)]
    return torch.stack(means).to(settings.here)


def skipped_in_words(found: TwoWays, classes: Sequence[str]) -> str:
    """Which images were left out; a sentence, or nothing."""
    skipped = found.paper.result.skipped
    if not skipped:
        return ""
    words = listed([f"{classes[one.label]} (taken for {classes[one.predicted]})" for one in skipped])
    return f" Left out, as the network gets them wrong without noise: {words}."
