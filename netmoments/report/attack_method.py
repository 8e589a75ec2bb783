"""How noise was made, in words."""

from __future__ import annotations

from netmoments.attacks import PixelSupport, SparseSmooth
from netmoments.attacks.attack import Attack
from netmoments.attacks.box_attacks import BoxAttack
from netmoments.report.attack_study import AttackStudy
from netmoments.report.attack_wording import asked_in_words, in_grey_levels


def headline_in_words(attack: Attack) -> str:
    """What kind of noise it is."""
    if isinstance(attack, SparseSmooth):
        return "Sparse and smooth noise made to fool"
    return "Noise on few pixels made to fool" if isinstance(attack, PixelSupport) else "Noise made to fool"


def method_in_words(found: AttackStudy) -> str:
    """What was solved, how, and what the numbers mean."""
    attack = found.attack
    own = _sparse_smooth(attack) if isinstance(attack, SparseSmooth) else _box(attack, found.result.targets is None)
    return (
        f"Noise is Gaussian, N(μ, σ²I), added to pixels in [0, 1]; a grey level is 1/255. {own} The expected scores "
        f"are those of the network linearized before and after the ReLU {found.relu!r} at the image (two-stage "
        f"linearization), with that ReLU treated exactly. {_bounds(attack)} What counts is the network itself: it is "
        f"asked about {attack.samples:,} noisy copies of each image, and fooled as asked means "
        f"{asked_in_words(attack)}, to within the error of sampling."
    )


def few_in_words(found: AttackStudy) -> str:
    """What a report says above its few attacked images."""
    return (
        f"The noise above is the same on every pixel. Here its mean μ was chosen for each image, so that the answer "
        f"changes for {asked_in_words(found.attack)} with as few pixels in as smooth patches as possible (least "
        f"‖μ‖₁ + TV(μ)). {found.fooled} of {len(found)} images are fooled as asked; the command netmoments "
        f"attack makes more."
    )


def _sparse_smooth(attack: SparseSmooth) -> str:
    followed = (
        " Then the network itself was followed, with what noise adds to its margins measured from samples."
        if attack.polish
        else ""
    )
    return (
        f"σ is {in_grey_levels(attack.noise_level)} grey levels. μ has the least ‖μ‖₁ + TV(μ), few changed pixels in "
        f"smooth patches, that fools the network: found by a primal–dual method on the expected scores, "
        f"{attack.iterations} steps.{followed} The gap says by how much ‖μ‖₁ + TV could be smaller at most, by "
        f"duality, with the margins linearized at the solution."
    )


def _box(attack: Attack, untargeted: bool) -> str:
    assert isinstance(attack, BoxAttack)
    pixels = f" of {attack.percent:g}% of the pixels, drawn at random," if isinstance(attack, PixelSupport) else ""
    aim = "the label's expected score below a rival's" if untargeted else "all other expected scores below the target's"
    followed = (
        f" Where too few samples were fooled, the network itself was followed for {attack.polish} steps, if it helped."
        if attack.polish
        else ""
    )
    return (
        f"The mean{pixels} changes by at most {in_grey_levels(attack.reach)} grey levels, and σ is at most "
        f"{in_grey_levels(attack.most_noise)}; both were chosen to bring {aim} by as much as possible, in "
        f"{attack.iterations} steps.{followed} The gap says what share of the fall of the margin may be missing."
    )


def _bounds(attack: Attack) -> str:
    if attack.bounds is None:
        return "Pixels of image + μ may leave [0, 1]."
    return "Pixels of image + μ stay in [0, 1]; noisy copies do not, unless they are cut to it."
