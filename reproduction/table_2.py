"""The paper's Table 2: how tight mean, old and new variance are on LeNet, for every logit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reproduction import lenet_on_mnist, tighter_panels
from reproduction.errors import Errors
from reproduction.outcome import Comparison, Drawing, Outcome, Panel
from reproduction.over_images import SIGMAS
from reproduction.published import TABLE_2
from reproduction.settings import Settings
from reproduction.table_2_chart import draw_errors
from reproduction.tighter import Tighter, sweep_of, tighter
from reproduction.tighter_chart import draw_methods

PAPER_COLUMN = {
    "mean": "mean_error",
    "variance": "variance_error_new",
    "series": "variance_error_new",
    "authors_old": "variance_error_old",
}
"""Which published column each of ours stands beside."""
NAMES = {
    "mean": "mean",
    "delta_mean": "mean, delta method",
    "theorem_2": "old variance, Theorem 2 to the letter",
    "authors_old": "old variance, as the authors ran it",
    "series": "new variance, 5 terms as the authors ran it",
    "variance": "new variance, exact kernel",
    "delta_variance": "variance, delta method",
}


def reproduce(settings: Settings) -> Outcome:
    on = lenet_on_mnist.shared_subjects(settings)
    sweep = sweep_of(settings, on)
    settings.check(*([] if sweep is None else [sweep]))
    first = lenet_on_mnist.sampled(settings, on)
    again = lenet_on_mnist.sampled_again(settings, on)
    found = lenet_on_mnist.tightness(settings, on, first)
    others = None if sweep is None else tighter(settings, sweep)
    errors, floor = found.errors, lenet_on_mnist.floor(first, again)
    return Outcome(
        name="table-2",
        title="Table 2: tightness of the moments on LeNet",
        reading=(*_reading(settings, errors, floor), *tighter_panels.reading(others)),
        comparisons=tuple(comparisons(errors)),
        panels=(
            mean_panel(errors, floor),
            variance_panel(errors, floor),
            *(() if others is None else tighter_panels.panels(others)),
        ),
        drawings=(
            Drawing(
                "table-2",
                f"Errors averaged over images and logits. Shaded: what {settings.samples:,} samples cannot tell apart.",
                lambda: draw_errors(errors, floor),
            ),
            *(() if others is None else (_drawing(others),)),
        ),
        numbers={
            "images": len(on.images),
            "images_sampled_twice": floor["mean"].images,
            "samples": settings.samples,
            "levels": [level_numbers(level, errors, floor) for level in range(len(SIGMAS))],
            "tighter": tighter_panels.numbers(others),
        },
        seconds=first.seconds + again.seconds + found.seconds + (0.0 if others is None else others.seconds),
        details=(_by_logit(errors, floor),),
    )


def _drawing(found: Tighter) -> Drawing:
    return Drawing(
        "table-2-methods",
        f"Errors of every method on {found.images} of the images, against {found.reference:,} samples. Shaded: below "
        "what 10,000 samples are off.",
        lambda: draw_methods(found),
    )


def comparisons(errors: Mapping[str, Errors]) -> list[Comparison]:
    """The average row of the paper's table, all noise levels."""
    return [
        Comparison(f"{NAMES[name]}, σ = {sigma}", errors[name].average(level), _published(sigma, "avg", column)[0])
        for name, column in PAPER_COLUMN.items()
        for level, sigma in enumerate(SIGMAS)
    ]


def mean_panel(errors: Mapping[str, Errors], floor: Mapping[str, Errors]) -> Panel:
    rows = []
    for level, sigma in enumerate(SIGMAS):
        paper = _published(sigma, "avg", "mean_error")
        ours = [_with_spread(errors[name], level) for name in ("mean", "delta_mean")]
        rows.append((f"{sigma}", _pair(*paper), *ours, f"{floor['mean'].resolution(level):.2g}"))
    return Panel(
        "Error of the mean, averaged over logits",
        ("σ", "paper", "two-stage", "delta method", "sampling's floor"),
        tuple(rows),
        "Mean over images and logits ± the mean over logits of the standard deviation over images, as in the paper.",
        emphasis=(2,),
    )


def variance_panel(errors: Mapping[str, Errors], floor: Mapping[str, Errors]) -> Panel:
    rows = []
    for level, sigma in enumerate(SIGMAS):
        old, new = (_published(sigma, "avg", f"variance_error_{which}") for which in ("old", "new"))
        shown = {name: _with_spread(errors[name], level) for name in errors}
        rows.append(
            (
                f"{sigma}", _pair(*old), shown["theorem_2"], shown["authors_old"], _pair(*new), shown["series"],
                shown["variance"], shown["delta_variance"], f"{floor['variance'].resolution(level):.4f}",
            )
        )  # fmt: skip
    headings = (
        "σ", "old: paper", "old: Theorem 2", "old: as run", "new: paper", "new: 5 terms, as run", "new: exact",
        "delta method", "sampling's floor",
    )  # fmt: skip
    return Panel("Error of the variance, averaged over logits", headings, tuple(rows), emphasis=(6,))


def _by_logit(errors: Mapping[str, Errors], floor: Mapping[str, Errors]) -> Panel:
    ours = ("mean", "theorem_2", "authors_old", "series", "variance", "delta_variance")
    rows: list[tuple[str, ...]] = []
    breaks = []
    for level, sigma in enumerate(SIGMAS):
        breaks.append(len(rows))
        for logit in range(errors["mean"].each.shape[2]):
            paper = [_pair(*published) for published in TABLE_2[sigma, str(logit)]]
            shown = [_pair(errors[name].mean(level, logit), errors[name].spread(level, logit)) for name in ours]
            again = f"{floor['variance'].mean(level, logit) / 2**0.5:.3f}"
            rows.append(
                (f"{sigma},\u00a0g{logit}", paper[0], shown[0], paper[1], *shown[1:3], paper[2], *shown[3:], again)
            )
    headings = (
        "σ, logit", "mean: paper", "mean", "old: paper", "old: Theorem 2", "old: as run", "new: paper",
        "new: 5 terms, as run", "new: exact", "delta method", "sampling's floor",
    )  # fmt: skip
    caption = "Mean ± standard deviation over images."
    return Panel("Every logit", headings, tuple(rows), caption, emphasis=(2, 8), breaks=tuple(breaks[1:]))


def level_numbers(level: int, errors: Mapping[str, Errors], floor: Mapping[str, Errors]) -> dict[str, Any]:
    """All averages at one noise level, for machines."""
    return {
        "sigma": SIGMAS[level],
        "sampling_floor": {name: floor[name].resolution(level) for name in ("mean", "variance")},
        **{
            name: {
                "average": error.average(level),
                "standard_error": error.standard_error(level),
                "spread": error.average_spread(level),
                "not_finite": error.beyond(level),
                "by_logit": [round(error.mean(level, logit), 6) for logit in range(error.each.shape[2])],
            }
            for name, error in errors.items()
        },
    }


def _reading(settings: Settings, errors: Mapping[str, Errors], floor: Mapping[str, Errors]) -> tuple[str, ...]:
    beyond = sum(errors["series"].beyond(level) for level in range(len(SIGMAS)))
    return (
        f"LeNet linearized at l = 3, at each of {errors['mean'].images:,} MNIST test images in [0, 1]; a random "
        "covariance for each (eigenvalues uniform on (0, 1], eigenvectors from a QR decomposition), scaled to the four "
        f"noise levels; {settings.samples:,} samples. Errors are 2|x−y|/(|x|+|y|) against the sampled value: smaller "
        "is better.",
        "Two readings of the old variance: Theorem 2 to the letter takes every unit as if its mean were zero; the "
        "authors' program takes the units' own variances exactly and only pairs as if their means were zero. The "
        "5-term series is run as they ran it, in float32, subtracting E[y₁]E[y₂] from E[y₁y₂] pair by pair"
        + (f" ({beyond} values were not finite and count as the largest error, 2)." if beyond else "."),
        f"Sampling's floor is the error that exact values would show against {settings.samples:,} samples, from a "
        f"second independent run on {floor['mean'].images:,} of the images. The delta method (scores and derivative "
        "at the image) shows how much of the error is the linearization itself: where it equals the exact kernel's, no "
        "kernel could do better.",
    )


def _published(sigma: float, logit: str, column: str) -> tuple[float, float]:
    return getattr(TABLE_2[sigma, logit], column)


def _pair(mean: float, spread: float) -> str:
    return f"{mean:.3f} ± {spread:.3f}"


def _with_spread(errors: Errors, level: int) -> str:
    return f"{errors.average(level):.4f} ± {errors.average_spread(level):.3f}"
