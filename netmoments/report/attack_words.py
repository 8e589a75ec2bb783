"""The results of an attack study in words, the same in the terminal and on the page; and its tables."""

from __future__ import annotations

import math

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from netmoments.attacks.base import GREY_LEVELS, Attack
from netmoments.attacks.box import BoxAttack, PixelSupport
from netmoments.attacks.sparse_smooth import SparseSmooth
from netmoments.files import printable
from netmoments.report.attack_study import AttackStudy, LeftOut
from netmoments.report.words import in_words


def in_grey_levels(value: float) -> str:
    """A difference of pixels in [0, 1] as steps of 1/255.

    >>> in_grey_levels(0.2), in_grey_levels(9.1)
    ('51', '2,320')
    """
    return in_words(GREY_LEVELS * value)


def share_asked(attack: Attack) -> float | None:
    """The share of the samples that are to be fooled; None where a margin was asked for instead."""
    if isinstance(attack, SparseSmooth):
        return attack.share
    return attack.wanted if isinstance(attack, BoxAttack) else None


def asked_in_words(attack: Attack) -> str:
    """What "fooled as asked" means for an attack."""
    share = share_asked(attack)
    if share is not None:
        return f"{100 * share:.3g}% of the samples"
    assert isinstance(attack, SparseSmooth)
    return f"a mean margin of at most {-(attack.gamma or 0.0):g}"


def verdict_in_words(study: AttackStudy, number: int) -> str:
    """Whether the network is fooled as asked, and if not, what is missing."""
    result = study.result
    if bool(result.fooled[number]):
        return "fooled as asked"
    if not bool(result.feasible[number]):
        return "no: no such noise found"
    if share_asked(study.attack) is None:
        return f"no: mean margin {float(result.network_margin[number]):.3g}"
    return "no: too few samples"


def limits_in_words(attack: Attack) -> str:
    """The limits of μ, for attacks that have any."""
    if not isinstance(attack, BoxAttack):
        return ""
    pixels = f" on {attack.percent:g}% of the pixels" if isinstance(attack, PixelSupport) else ""
    return f" with |μ| ≤ {in_grey_levels(attack.reach)} grey levels{pixels}"


def success_in_words(study: AttackStudy, number: int) -> str:
    """The share of an image's samples that fool the network, with its 95 % interval."""
    success = study.result.success
    rate, low, high = (float(end[number]) for end in (success.rate, success.low, success.high))
    return f"{rate:.0%} ({math.floor(100 * low)}–{math.ceil(100 * high)})"


def clipped_in_words(study: AttackStudy, number: int) -> str:
    """The share of samples that fool the network when they are cut to the bounds."""
    clipped = study.result.success_clipped
    return "—" if clipped is None else f"{float(clipped.rate[number]):.0%}"


def gap_in_words(study: AttackStudy, number: int) -> str:
    """How much better the noise could be at most."""
    gap = float(study.result.gap[number])
    return f"{gap:.1%}" if gap <= 1 else "> 100%"


def followed_in_words(study: AttackStudy, number: int) -> str:
    """How many steps were made on the network itself."""
    return f"{int(study.result.polished[number])}"


def size_in_words(study: AttackStudy, number: int) -> str:
    """‖μ‖₁ + TV(μ), in grey levels."""
    return in_grey_levels(float(study.result.l1[number] + study.result.tv[number]))


def summary_in_words(study: AttackStudy) -> str:
    """How many images are fooled, and how many were left out."""
    summary = (
        f"{study.fooled} of {len(study)} images are fooled as asked ({asked_in_words(study.attack)})"
        f"{limits_in_words(study.attack)}."
    )
    if study.left_out:
        summary += f" {len(study.left_out)} of {len(study) + len(study.left_out)} chosen images were left out."
    return f"{summary} {answers_in_words(study)}".strip()


def answers_in_words(study: AttackStudy) -> str:
    """A sentence on the labels, where they are the network's own answers."""
    return "The images have no labels: the network's own answers stand for them." if study.labels_are_answers else ""


def headline_in_words(attack: Attack) -> str:
    """The kind of noise, as the beginning of a headline."""
    if isinstance(attack, SparseSmooth):
        return "Sparse and smooth noise made to fool"
    return "Noise on few pixels made to fool" if isinstance(attack, PixelSupport) else "Noise made to fool"


def method_in_words(study: AttackStudy) -> str:
    """The problem that was solved, how it was solved, and what the numbers mean, in a paragraph."""
    attack = study.attack
    problem = _sparse_smooth(attack) if isinstance(attack, SparseSmooth) else _box(attack, study.result.targets is None)
    how = "linearized at the image, as it has no ReLU"
    if study.relu is not None:
        how = (
            f"linearized before and after the ReLU {study.relu!r} at the image (two-stage linearization), with that "
            f"ReLU treated exactly"
        )
    return (
        f"Noise is Gaussian, N(μ, σ²I), added to pixels in [0, 1]; a grey level is 1/255. {problem} The expected "
        f"scores are those of the network {how}. {_bounds(attack)} What counts is the network itself: it is asked "
        f"about {attack.samples:,} noisy copies of each image, and fooled as asked means {asked_in_words(attack)}, to "
        f"within the error of sampling."
    )


def few_in_words(study: AttackStudy) -> str:
    """What a report says above its few attacked images."""
    return (
        f"The noise above has mean 0. Here its mean was chosen for each image, so that the answer changes for "
        f"{asked_in_words(study.attack)}, with as few pixels in as smooth patches as possible. {study.fooled} of "
        f"{len(study)} images are fooled as asked; the command netmoments attack does this for more of them."
    )


def _sparse_smooth(attack: SparseSmooth) -> str:
    polished = (
        " Then more steps were made on the network itself, with what noise adds to its margins measured from samples."
        if attack.polish
        else ""
    )
    return (
        f"σ is {in_grey_levels(attack.noise_level)} grey levels. μ has the least ‖μ‖₁ + TV(μ), few changed pixels in "
        f"smooth patches, that fools the network: found by a primal–dual method on the expected scores, in "
        f"{attack.iterations} steps.{polished} “Better by at most” says how much smaller ‖μ‖₁ + TV could be, by "
        f"duality, with the margins linearized at the solution."
    )


def _box(attack: Attack, untargeted: bool) -> str:
    assert isinstance(attack, BoxAttack)
    pixels = f" of {attack.percent:g}% of the pixels, drawn at random," if isinstance(attack, PixelSupport) else ""
    aim = "the label's expected score below a rival's" if untargeted else "all other expected scores below the target's"
    polished = (
        f" Where too few samples were fooled, {attack.polish} steps were made on the network itself, if it helped."
        if attack.polish
        else ""
    )
    return (
        f"The mean{pixels} changes by at most {in_grey_levels(attack.reach)} grey levels, and σ is at most "
        f"{in_grey_levels(attack.most_noise)}; both were chosen to bring {aim} by as much as possible, in "
        f"{attack.iterations} steps.{polished} “Better by at most” says by what share of its fall the margin could "
        f"fall further."
    )


def _bounds(attack: Attack) -> str:
    if attack.bounds is None:
        return "Pixels of image + μ may leave [0, 1]."
    return "Pixels of image + μ stay in [0, 1]; noisy copies do not, unless they are cut to it."


SHOWN = 10
"""At most so many of the images that were left out are named."""
ANSWERS = (
    "image", "label", "towards", "answer", "samples fooled", "clipped", "steps on the network", "verdict",
)  # fmt: skip
"""Columns of the table of what the network says."""
NOISE = ("image", "sparsity", "|μ| up to", "‖μ‖₁ + TV", "SSIM", "better by at most")
"""Columns of the table of what the noise is."""
FEW = ("image", "label", "answer", "samples fooled", "sparsity", "|μ| up to", "SSIM", "verdict")
"""Columns of the short table inside a report."""
TO_THE_LEFT = ("image", "verdict")
"""Columns that are aligned to the left; the others are to the right."""


def draw_attack(study: AttackStudy) -> RenderableType:
    """An attack study for the terminal: what the network says, what the noise is, a summary, and what was left out."""
    clipped = "" if study.attack.bounds is None else ", as they are and clipped to [0, 1]"
    parts: list[RenderableType] = [
        Text(f"What the network says to {study.attack.samples:,} noisy copies{clipped}", style="bold"),
        _table(study, ANSWERS),
        Text("The noise; |μ| in grey levels", style="bold"),
        _table(study, NOISE),
        Text(summary_in_words(study), style="bold"),
        *_named("left out", study.left_out),
        *_named("could not be read", tuple(LeftOut(*item) for item in study.images.skipped)),
    ]
    return Group(*parts)


def draw_few(study: AttackStudy) -> RenderableType:
    """An attack study as a short table with a summary, for the report of a noise study."""
    return Group(_table(study, FEW), Text(summary_in_words(study)))


def empty_table() -> Table:
    """A table for the terminal, with a line below its head."""
    return Table(box=box.SIMPLE_HEAD, pad_edge=False)


def _table(study: AttackStudy, names: tuple[str, ...]) -> Table:
    table = empty_table()
    for name in names:
        table.add_column(name, justify="left" if name in TO_THE_LEFT else "right")
    for number in range(len(study)):
        cells = _cells(study, number)
        table.add_row(*(Text(printable(cells[name])) for name in names))
    return table


def _cells(study: AttackStudy, number: int) -> dict[str, str]:
    result = study.result
    return {
        "image": study.name(number),
        "label": study.class_name(result.labels[number]),
        "towards": study.class_name(result.towards[number]),
        "answer": study.class_name(result.answers[number]),
        "samples fooled": success_in_words(study, number),
        "clipped": clipped_in_words(study, number),
        "sparsity": f"{float(result.sparsity[number]):.0%}",
        "|μ| up to": in_grey_levels(float(result.linf[number])),
        "‖μ‖₁ + TV": size_in_words(study, number),
        "SSIM": f"{float(result.ssim[number]):.3f}",
        "better by at most": gap_in_words(study, number),
        "steps on the network": followed_in_words(study, number),
        "verdict": verdict_in_words(study, number),
    }


def _named(what: str, items: tuple[LeftOut, ...]) -> list[RenderableType]:
    """A line for each of the first few images, with the reason why it is listed."""
    lines = [Text(printable(f"  {what}: {item.name}: {item.reason}"), style="yellow") for item in items[:SHOWN]]
    if len(items) > SHOWN:
        lines.append(Text(f"  and {len(items) - SHOWN} more", style="yellow"))
    return list(lines)
