"""What an attack was asked and what came of it, in the same words in the terminal and on the page."""

from __future__ import annotations

import math

from netmoments.attacks import PixelSupport, SparseSmooth
from netmoments.attacks.attack import GREY_LEVELS, Attack
from netmoments.attacks.box_attacks import BoxAttack
from netmoments.report.attack_study import AttackStudy
from netmoments.report.numbers import in_words


def in_grey_levels(value: float) -> str:
    """A difference of pixels in [0, 1] as steps of 1/255.

    >>> in_grey_levels(0.2), in_grey_levels(9.1)
    ('51', '2,320')
    """
    return in_words(GREY_LEVELS * value)


def share_asked(attack: Attack) -> float | None:
    """Of the samples, to be fooled; None where a margin was asked for instead."""
    if isinstance(attack, SparseSmooth):
        return attack.share
    return attack.wanted if isinstance(attack, BoxAttack) else None


def asked_in_words(attack: Attack) -> str:
    """What "as asked" means."""
    share = share_asked(attack)
    if share is not None:
        return f"{100 * share:.3g}% of the samples"
    assert isinstance(attack, SparseSmooth)
    return f"a mean margin of at most {-(attack.gamma or 0.0):g}"


def verdict_in_words(found: AttackStudy, number: int) -> str:
    """Whether the network is fooled as asked, and if not, what is missing."""
    result = found.result
    if bool(result.fooled[number]):
        return "fooled as asked"
    if not bool(result.feasible[number]):
        return "no: no such noise found"
    if share_asked(found.attack) is None:
        return f"no: mean margin {float(result.network_margin[number]):.3g}"
    return "no: too few samples"


def limits_in_words(attack: Attack) -> str:
    """What μ may be, if little."""
    if not isinstance(attack, BoxAttack):
        return ""
    pixels = f" on {attack.percent:g}% of the pixels" if isinstance(attack, PixelSupport) else ""
    return f" with |μ| ≤ {in_grey_levels(attack.reach)} grey levels{pixels}"


def success_in_words(found: AttackStudy, number: int) -> str:
    """The share of fooled samples with its 95 % interval."""
    success = found.result.success
    rate, low, high = (float(end[number]) for end in (success.rate, success.low, success.high))
    return f"{rate:.0%} ({math.floor(100 * low)}–{math.ceil(100 * high)})"


def clipped_in_words(found: AttackStudy, number: int) -> str:
    clipped = found.result.success_clipped
    return "—" if clipped is None else f"{float(clipped.rate[number]):.0%}"


def gap_in_words(found: AttackStudy, number: int) -> str:
    gap = float(found.result.gap[number])
    return f"{gap:.1%}" if gap <= 1 else "> 100%"


def followed_in_words(found: AttackStudy, number: int) -> str:
    """How long the network itself was followed."""
    steps = int(found.result.polished[number])
    return f"{steps} steps" if steps else "no"


def size_in_words(found: AttackStudy, number: int) -> str:
    """‖μ‖₁ + TV(μ), in grey levels."""
    return in_grey_levels(float(found.result.l1[number] + found.result.tv[number]))


def summary_in_words(found: AttackStudy) -> str:
    """How many were fooled, and what was left out."""
    said = (
        f"{found.fooled} of {len(found)} images are fooled as asked ({asked_in_words(found.attack)})"
        f"{limits_in_words(found.attack)}."
    )
    if found.left_out:
        said += f" {len(found.left_out)} of {len(found) + len(found.left_out)} chosen images were left out."
    return f"{said} {answers_in_words(found)}".strip()


def answers_in_words(found: AttackStudy) -> str:
    """Where the labels are from, if not from the data."""
    return "The images have no labels: the network's own answers stand for them." if found.labels_are_answers else ""
