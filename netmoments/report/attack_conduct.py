"""Carrying out an attack: which images, with which labels, and a noisy sample of each to show."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from netmoments.attacks.attack import Attack
from netmoments.data import LabelledImages
from netmoments.network.cut import find_relu
from netmoments.network.inspection import as_network, inspect
from netmoments.precision import full_precision
from netmoments.report.arguments import spread
from netmoments.report.attack_study import AttackStudy, NotAttacked
from netmoments.report.class_names import class_numbered, with_classes_of

CALLER = "attack"
QUICK = {"cpu": 5e7, "cuda": 2e9}
"""Numbers of all linearized networks together up to which attacks take seconds: a report does no more."""


@dataclass(frozen=True)
class Choice:
    """Which images, and what they are to be taken for; classes by number or name."""

    count: int
    label: str | None = None
    target: str | None = None


def conduct_attack(
    network: Any,
    images: LabelledImages,
    attack: Attack,
    choice: Choice,
    classes: tuple[str, ...] = (),
    device: torch.device | None = None,
) -> AttackStudy:
    """An `AttackStudy` of the chosen images; an error if none of them can be attacked."""
    device = torch.device("cpu") if device is None else device
    network = as_network(network.to(device) if isinstance(network, nn.Module) else network, CALLER)
    count = inspect(network, images.images[:1].to(device), CALLER).output.shape[1]
    known, names = with_classes_of(images, classes, count, CALLER)
    label, target = (
        None if text is None else class_numbered(option, text, names, count)
        for option, text in (("--label", choice.label), ("--target", choice.target))
    )
    if target is not None and label == target:
        raise ValueError(f"--label and --target are both {choice.target}: give a target that the images are not")
    chosen = _chosen(network, known, names, label, choice.count, device)
    aims, others = _apart(chosen, target)
    study = _attacked(network, others, names, attack, target, device)
    study = dataclasses.replace(study, labels_are_answers=images.labels is None, of_the_target=aims)
    if not len(study):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in study.left_out[:3])
        raise ValueError(
            f"none of the {len(chosen)} chosen images can be attacked ({reasons}{'; …' if len(chosen) > 3 else ''}); "
            f"choose more (--images) or others (--label), or check that the labels are the network's classes"
        )
    return study


def few_attacks(
    network: nn.Module,
    images: LabelledImages,
    classes: tuple[str, ...],
    answers: Tensor,
    attack: Attack,
    count: int,
    device: torch.device,
) -> AttackStudy | NotAttacked:
    """A few of the images whose label the network answers (N,), evenly spread; or why not, and never an error."""
    right = torch.ones_like(answers, dtype=torch.bool) if images.labels is None else answers == images.labels
    if not bool(right.any()):
        return NotAttacked("The network gets none of these images right by itself, so there is nothing to fool.")
    few = spread(dataclasses.replace(images, labels=answers, classes=classes).take(right), count)
    try:
        units, size = _relu(network, few, attack, device).size, few.event_shape.numel()
        if len(few) * units * size > QUICK.get(device.type, QUICK["cpu"]):
            return NotAttacked(
                f"Linearizing {len(few)} images takes {units:,} × {size:,} numbers each, which takes long here; "
                f"the command netmoments attack does it."
            )
        study = _attacked(network, few, classes, attack, None, device)
        return dataclasses.replace(study, labels_are_answers=images.labels is None)
    except (MemoryError, ValueError, TypeError, RuntimeError) as error:
        return NotAttacked(f"No noise could be made: {next(iter(str(error).splitlines()), type(error).__name__)}")


def _chosen(
    network: nn.Module,
    images: LabelledImages,
    names: tuple[str, ...],
    label: int | None,
    count: int,
    device: torch.device,
) -> LabelledImages:
    """At most `count` images, evenly spread, of one class or of all; labels are the network's answers if unknown."""
    if label is None:
        images = spread(images, count)
    if images.labels is None:
        images = dataclasses.replace(images, labels=_answers(network, images, device), classes=names)
    if label is None:
        return images
    assert images.labels is not None
    mine = images.labels == label
    if not bool(mine.any()):
        said = names[label] if names else label
        raise ValueError(f"none of the {len(images)} images is of the class {said} (--label); choose another")
    return spread(images.take(mine), count)


def _apart(images: LabelledImages, target: int | None) -> tuple[tuple[str, ...], LabelledImages]:
    """Names of the images whose label is the target, and the other images."""
    if target is None:
        return (), images
    assert images.labels is not None
    aims = images.labels == target
    if bool(aims.all()):
        raise ValueError(
            f"the label of all {len(images)} chosen images is the target: give another --target, or choose others "
            f"(--images, --label)"
        )
    return images.take(aims).names if bool(aims.any()) else (), images.take(~aims)


def _attacked(
    network: nn.Module,
    images: LabelledImages,
    names: tuple[str, ...],
    attack: Attack,
    target: int | None,
    device: torch.device,
) -> AttackStudy:
    relu = _relu(network, images, attack, device)
    result = attack(network, images.images.to(device), images.labels, target)
    noisy = result.samples(1, attack.seed)[0] if len(result) else result.images
    with torch.no_grad(), full_precision():
        classes = network(noisy).argmax(1) if len(result) else result.labels
    return AttackStudy(attack, images, names, False, relu.name, result.to("cpu"), noisy.cpu(), classes.cpu())


def _relu(network: nn.Module, images: LabelledImages, attack: Attack, device: torch.device) -> Any:
    """The ReLU that the linearization keeps."""
    return find_relu(inspect(network, images.images[:1].to(device), CALLER).relus, attack.layer)


def _answers(network: nn.Module, images: LabelledImages, device: torch.device) -> Tensor:
    """What the network takes the images for, on the CPU."""
    with torch.no_grad(), full_precision():
        return torch.cat([network(part.to(device)).argmax(1).cpu() for part in images.images.split(256)])
