"""An attack in a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from netmoments.report.attack_study import AttackStudy, LeftOut
from netmoments.report.attack_wording import (
    clipped_in_words,
    followed_in_words,
    gap_in_words,
    in_grey_levels,
    size_in_words,
    success_in_words,
    summary_in_words,
    verdict_in_words,
)

SHOWN = 10
"""Images that were left out, by name."""
ANSWERS = (
    "image", "label", "towards", "answer", "samples fooled", "clipped", "network followed", "verdict",
)  # fmt: skip
NOISE = ("image", "sparsity", "|μ| up to", "‖μ‖₁ + TV", "SSIM", "gap")
FEW = ("image", "label", "answer", "samples fooled", "sparsity", "|μ| up to", "SSIM", "verdict")
TO_THE_LEFT = ("image", "verdict")


def draw_attack(found: AttackStudy) -> RenderableType:
    """What the network says, what the noise is, a summary, and what was left out."""
    clipped = "" if found.attack.bounds is None else ", as they are and clipped to [0, 1]"
    parts: list[RenderableType] = [
        Text(f"What the network says to {found.attack.samples:,} noisy copies{clipped}", style="bold"),
        _table(found, ANSWERS),
        Text("The noise; |μ| in grey levels", style="bold"),
        _table(found, NOISE),
        Text(summary_in_words(found), style="bold"),
        *_named("left out", found.left_out),
        *_named("could not be read", tuple(LeftOut(*item) for item in found.images.skipped)),
    ]
    return Group(*parts)


def draw_few(found: AttackStudy) -> RenderableType:
    """A short table, for a report on something else."""
    return Group(_table(found, FEW), Text(summary_in_words(found)))


def _table(found: AttackStudy, names: tuple[str, ...]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in names:
        table.add_column(name, justify="left" if name in TO_THE_LEFT else "right")
    for number in range(len(found)):
        cells = _cells(found, number)
        table.add_row(*(Text(cells[name]) for name in names))
    return table


def _cells(found: AttackStudy, number: int) -> dict[str, str]:
    result = found.result
    return {
        "image": found.name(number),
        "label": found.class_name(result.labels[number]),
        "towards": found.class_name(result.towards[number]),
        "answer": found.class_name(result.answers[number]),
        "samples fooled": success_in_words(found, number),
        "clipped": clipped_in_words(found, number),
        "sparsity": f"{float(result.sparsity[number]):.0%}",
        "|μ| up to": in_grey_levels(float(result.linf[number])),
        "‖μ‖₁ + TV": size_in_words(found, number),
        "SSIM": f"{float(result.ssim[number]):.3f}",
        "gap": gap_in_words(found, number),
        "network followed": followed_in_words(found, number),
        "verdict": verdict_in_words(found, number),
    }


def _named(what: str, items: tuple[LeftOut, ...]) -> list[RenderableType]:
    """Images and why, the first few by name."""
    lines = [Text(f"  {what}: {item.name}: {item.reason}", style="yellow") for item in items[:SHOWN]]
    if len(items) > SHOWN:
        lines.append(Text(f"  and {len(items) - SHOWN} more", style="yellow"))
    return list(lines)
