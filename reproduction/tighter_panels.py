"""What the sweep `tighter` found, as Table 2 shows it: two panels, words, numbers."""

from __future__ import annotations

from typing import Any

from reproduction.errors import Errors
from reproduction.outcome import Panel
from reproduction.over_images import SIGMAS
from reproduction.tighter import ASSISTED, METHODS, MOMENTS, ONE_IN, PLAIN, PROBES, Tighter

LABELS = {
    "two_stage": "two-stage",
    "delta": "delta method",
    "sketch": f"sketch, {PROBES} probes",
    "assisted": f"{ASSISTED:,} assisted samples",
    "layerwise": "layerwise",
    "plain": f"{PLAIN:,} samples",
}
SEEN = 1.5
"""An error of less than so many floors cannot be told from none."""


def panels(found: Tighter) -> tuple[Panel, ...]:
    """One for the mean, one for the variance: noise levels down, methods across."""
    caption = (
        f"Averages over {_images(found)} and logits, against {found.reference:,} assisted samples: unbiased, corrected "
        f"by a sketch of {PROBES} probes. The floor is what exact values would show against these."
    )
    return tuple(
        Panel(
            f"Every method: error of the {moment}",
            ("σ", *(LABELS[name] for name in METHODS), "floor"),
            tuple(_row(found, moment, level) for level in range(len(SIGMAS))),
            caption,
            emphasis=(1 + METHODS.index("layerwise"),),
        )
        for moment in MOMENTS
    )


def _row(found: Tighter, moment: str, level: int) -> tuple[str, ...]:
    errors = (found.errors[moment][name].average(level) for name in METHODS)
    return (f"{SIGMAS[level]}", *(f"{error:.2g}" for error in errors), f"{found.floor(moment, level):.2g}")


def reading(found: Tighter | None) -> tuple[str, ...]:
    """What each error is made of, and which are seen at all."""
    if found is None:
        return (
            "The other methods (layer by layer, sketch, assisted sampling) are compared on a GPU, or on a CPU from "
            f"--images {ONE_IN['cpu']} on, one image in {ONE_IN['cpu']}: that takes minutes an image.",
        )
    return (
        f"Every method on {_images(found)}, with a reference of its own, {found.reference:,} assisted samples in two "
        "independent halves: their difference says what the reference itself is worth (the floor). What the errors are "
        "made of: two-stage and delta method take the slopes at the image, where the expected slopes under the noise "
        "are wanted: a bias that no kernel removes. A sketch has the expected slopes, from "
        f"{PROBES} probes: what is left is the randomness of these, and a bias where deep tensors are "
        "not Gaussian. Assisted samples have no bias; their error "
        "is the sampling error of what the linear surrogate leaves over. Layer by layer, what is left is of second "
        "order in the third cumulants of deeper layers, and beyond these. "
        f"{PLAIN:,} samples err by chance alone.",
        _seen(found),
    )


def _seen(found: Tighter) -> str:
    """Where the error of the tightest method is, beside the floor and beside plain sampling."""
    sentences = []
    for moment in MOMENTS:
        below, better = [], []
        for level, sigma in enumerate(SIGMAS):
            error = found.errors[moment]["layerwise"].average(level)
            if error < SEEN * found.floor(moment, level):
                below.append(f"{sigma}")
            if error < found.errors[moment]["plain"].average(level):
                better.append(f"{sigma}")
        bound = f"; at {_levels(below)} it is less than {SEEN} times the floor, so only a bound on it is known"
        sentences.append(
            f"Of the {moment}, layerwise's error is below that of {PLAIN:,} samples at {_levels(better)}"
            f"{bound if below else ''}."
        )
    return " ".join(sentences)


def _levels(sigmas: list[str]) -> str:
    return f"σ = {', '.join(sigmas)}" if sigmas else "no noise level"


def _images(found: Tighter) -> str:
    return "one image" if found.images == 1 else f"{found.images} images"


def numbers(found: Tighter | None) -> dict[str, Any] | None:
    """For machines."""
    if found is None:
        return None
    return {
        "images": found.images,
        "reference_samples": found.reference,
        "plain_samples": PLAIN,
        "assisted_samples": ASSISTED,
        "probes": PROBES,
        "levels": [
            {
                "sigma": sigma,
                **{
                    moment: {
                        "floor": found.floor(moment, level),
                        **{name: _number(found.errors[moment][name], level) for name in METHODS},
                    }
                    for moment in MOMENTS
                },
            }
            for level, sigma in enumerate(SIGMAS)
        ],
    }


def _number(errors: Errors, level: int) -> dict[str, Any]:
    several = errors.images > 1
    return {
        "average": errors.average(level),
        "standard_error": errors.standard_error(level) if several else None,
        "spread": errors.average_spread(level) if several else None,
        "not_finite": errors.beyond(level),
    }
