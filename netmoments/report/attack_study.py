"""The attack study behind `netmoments attack`: noise that is made to fool a network on chosen images.

`AttackOptions` are the command's options, `conduct_attack` is the study, and `few_attacks` is the short one inside a
report.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from netmoments.attacks.base import FOLLOWED, Attack
from netmoments.attacks.box import PixelSupport, Targeted
from netmoments.attacks.result import AttackResult
from netmoments.attacks.sparse_smooth import SparseSmooth
from netmoments.data.images import LabelledImages, evenly_spread
from netmoments.files import first_line
from netmoments.network.model import NetworkModel, network_of
from netmoments.network.relu_calls import Relu
from netmoments.precision import full_precision
from netmoments.report.arguments import class_numbered, spread, with_classes_of
from netmoments.report.pictures import PictureRow


class LeftOut(NamedTuple):
    """An image that was chosen but not attacked, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class NotAttacked:
    """The reason why there is no noise to show, in a sentence."""

    reason: str


@dataclass(frozen=True, eq=False)
class AttackStudy:
    """Everything that is shown of an attack on N images, on the CPU."""

    attack: Attack
    images: LabelledImages
    """The images that were given to the attack, with labels."""
    classes: tuple[str, ...]
    """Names of the network's classes, () if unknown."""
    labels_are_answers: bool
    """Whether the images came without labels, and the network's own answers were taken."""
    relu: str | None
    """The name of the ReLU that the linearization keeps; None for a network without one."""
    result: AttackResult
    noisy: Tensor
    """A sample of each image's noise, (N, C, H, W), not cut to the bounds."""
    noisy_classes: Tensor
    """The classes that the network takes these samples for, (N,)."""
    of_the_target: tuple[str, ...] = ()
    """Names of chosen images whose label is the target, so that there is nothing to attack."""

    def __len__(self) -> int:
        return len(self.result)

    def name(self, number: int) -> str:
        """The name of an attacked image."""
        return self.images.names[int(self.result.places[number])]

    def class_name(self, number: int | Tensor) -> str:
        return self.classes[int(number)] if self.classes else str(int(number))

    @property
    def fooled(self) -> int:
        """How many images are fooled as asked."""
        return int(self.result.fooled.sum())

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """The chosen images that were not attacked: of the target's class, or wrong without any noise."""
        of_the_target = [LeftOut(name, "its label is the target") for name in self.of_the_target]
        wrong = [
            LeftOut(
                self.images.names[place],
                f"the network takes it for {self.class_name(predicted)}, its label is {self.class_name(label)}",
            )
            for place, label, predicted in self.result.skipped
        ]
        return (*of_the_target, *wrong)

    def row(self, number: int, note: str = "") -> PictureRow:
        """The row of pictures of an attacked image, with a note beside them."""
        result = self.result
        before, after = self.class_name(result.labels[number]), self.class_name(self.noisy_classes[number])
        return PictureRow(result.images[number], result.mu[number], self.noisy[number], before, after, note)


Kind = Literal["sparse-smooth", "targeted", "pixels"]
KINDS_OF_OPTION: dict[str, tuple[Kind, ...]] = {
    "gamma": ("sparse-smooth",),
    "beta": ("targeted", "pixels"),
    "percent": ("pixels",),
    "rivals": ("sparse-smooth", "pixels"),
}
"""The kinds of attack that have an option, where these are not all."""
NEEDED: dict[Kind, dict[str, str]] = {
    "targeted": {"target": "the class that the images are to be taken for"},
    "pixels": {"percent": "the share of the pixels whose mean changes, for example --percent 10"},
}
"""Options that a kind of attack needs, with what they mean."""
CALLER = "attack"
QUICK = {"cpu": 5e7, "cuda": 2e9}
"""Up to so many numbers of all linearized networks together, attacks take seconds; a report attacks nothing larger."""


@dataclass(frozen=True, kw_only=True)
class AttackOptions:
    """The options of the command, checked; None where one was not given, for the default of the attack."""

    kind: Kind
    target: str | None = None
    confidence: float | None = None
    gamma: float | None = None
    sigma: float | None = None
    beta: float | None = None
    percent: float | None = None
    rivals: int | None = None
    iterations: int | None = None

    def __post_init__(self) -> None:
        for option, kinds in KINDS_OF_OPTION.items():
            if getattr(self, option) is not None and self.kind not in kinds:
                raise ValueError(f"--{option} is for --kind {' and '.join(kinds)}, not for {self.kind}; leave it out")
        for option, meaning in NEEDED.get(self.kind, {}).items():
            if getattr(self, option) is None:
                raise ValueError(f"--kind {self.kind} needs --{option}, {meaning}")
        if self.confidence is not None and self.gamma is not None:
            raise ValueError("give --confidence (a share of the samples) or --gamma (a margin), not both")
        if self.target is not None and self.rivals is not None:
            raise ValueError("--rivals is for attacks without --target, which try several classes; leave one out")

    def attack(self, **shared: Any) -> Attack:
        """The attack, with the settings that all attacks share: bounds, layer, polish, samples, seed."""
        if self.kind == "sparse-smooth":
            options = {"sigma": self.sigma, "confidence": self.confidence, "gamma": self.gamma}
            return SparseSmooth(**shared, **self._given(**options, rivals=self.rivals, iterations=self.iterations))
        options = {"largest_sigma": self.sigma, "wanted": self.confidence, "beta": self.beta}
        if self.kind == "targeted":
            return Targeted(**shared, **self._given(**options, iterations=self.iterations))
        given = self._given(**options, rivals=self.rivals, iterations=self.iterations)
        return PixelSupport(percent=self.percent, **shared, **given)

    @staticmethod
    def _given(**options: Any) -> dict[str, Any]:
        """The options that were given."""
        return {name: value for name, value in options.items() if value is not None}


@dataclass(frozen=True)
class Choice:
    """How many images to attack, of which label, and with which target; classes are given by number or name."""

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
    """Attack the chosen images; raise an error if none of them can be attacked."""
    device = torch.device("cpu") if device is None else device
    network = network_of(network.to(device) if isinstance(network, nn.Module) else network, CALLER)
    model = NetworkModel.of(network, images.images[:1].to(device), CALLER)
    labelled, names = with_classes_of(images, classes, model.outputs, CALLER)
    label, target = (
        None if text is None else class_numbered(option, text, names, model.outputs)
        for option, text in (("--label", choice.label), ("--target", choice.target))
    )
    if target is not None and label == target:
        raise ValueError(f"--label and --target are both {choice.target}: give a target that the images are not")
    chosen = _chosen(model, labelled, names, label, choice.count)
    of_the_target, others = _without_target(chosen, target)
    study = _attacked(model, others, names, attack, target)
    study = dataclasses.replace(study, labels_are_answers=images.labels is None, of_the_target=of_the_target)
    if not len(study):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in study.left_out[:3])
        raise ValueError(
            f"none of the {len(chosen)} chosen images can be attacked ({reasons}{'; …' if len(chosen) > 3 else ''}); "
            f"choose more (--images) or others (--label), or check that the labels are the network's classes"
        )
    return study


def attackable(answers: Tensor, labels: Tensor | None, count: int) -> Tensor:
    """Indices of at most `count` images that the network gets right, evenly spread."""
    right = torch.ones_like(answers, dtype=torch.bool) if labels is None else answers == labels
    places = right.nonzero().squeeze(1)
    return places if len(places) <= count else places[evenly_spread(len(places), count)]


def few_attacks(
    network: nn.Module,
    images: LabelledImages,
    classes: tuple[str, ...],
    answers: Tensor,
    attack: Attack,
    count: int,
    device: torch.device,
) -> AttackStudy | NotAttacked:
    """Attack a few of the images whose labels are the network's answers (N,), evenly spread.

    Whatever goes wrong becomes the reason of a `NotAttacked`; so does Ctrl-C, which keeps what else a study knows.
    """
    places = attackable(answers, images.labels, count)
    if not len(places):
        return NotAttacked("The network gets none of these images right by itself, so there is nothing to fool.")
    few = dataclasses.replace(images, labels=answers, classes=classes).take(places)
    try:
        model, size = NetworkModel.of(network, few.images[:1].to(device), CALLER), few.event_shape.numel()
        relu = _relu(model, attack)
        units = FOLLOWED if relu is None else relu.size
        if len(few) * units * size > QUICK.get(device.type, QUICK["cpu"]):
            return NotAttacked(
                f"Linearizing {len(few)} images takes {units:,} × {size:,} numbers each, which takes long here; "
                f"the command netmoments attack does it."
            )
        study = _attacked(model, few, classes, attack, None)
        return dataclasses.replace(study, labels_are_answers=images.labels is None)
    except KeyboardInterrupt:
        return NotAttacked("No noise was made: an interruption ended the work before.")
    except (MemoryError, ValueError, TypeError, RuntimeError) as error:
        return NotAttacked(f"No noise could be made: {first_line(error)}")


def _chosen(
    model: NetworkModel, images: LabelledImages, names: tuple[str, ...], label: int | None, count: int
) -> LabelledImages:
    """At most `count` images, evenly spread, of one class or of all; unknown labels become the network's answers."""
    if label is None:
        images = spread(images, count)
    if images.labels is None:
        images = dataclasses.replace(images, labels=_answers(model, images), classes=names)
    if label is None:
        return images
    assert images.labels is not None
    of_the_label = images.labels == label
    if not bool(of_the_label.any()):
        class_name = names[label] if names else label
        raise ValueError(f"none of the {len(images)} images is of the class {class_name} (--label); choose another")
    return spread(images.take(of_the_label), count)


def _without_target(images: LabelledImages, target: int | None) -> tuple[tuple[str, ...], LabelledImages]:
    """Names of the images whose label is the target, and the other images."""
    if target is None:
        return (), images
    assert images.labels is not None
    of_the_target = images.labels == target
    if bool(of_the_target.all()):
        raise ValueError(
            f"the label of all {len(images)} chosen images is the target: give another --target, or choose others "
            f"(--images, --label)"
        )
    names = images.take(of_the_target).names if bool(of_the_target.any()) else ()
    return names, images.take(~of_the_target)


def _attacked(
    model: NetworkModel, images: LabelledImages, names: tuple[str, ...], attack: Attack, target: int | None
) -> AttackStudy:
    """The study of an attack on images with labels."""
    relu = _relu(model, attack)
    result = attack(model, images.images.to(model.image.device), images.labels, target)
    noisy = result.samples(1, attack.seed)[0] if len(result) else result.images
    with torch.no_grad(), full_precision():
        classes = model.network(noisy).argmax(1) if len(result) else result.labels
    name = None if relu is None else relu.name
    return AttackStudy(attack, images, names, False, name, result.to("cpu"), noisy.cpu(), classes.cpu())


def _relu(model: NetworkModel, attack: Attack) -> Relu | None:
    """The ReLU that the linearization keeps; None for a network without any."""
    return model.relu(attack.layer) if model.relus else None


def _answers(model: NetworkModel, images: LabelledImages) -> Tensor:
    """The classes that the network takes the images for, on the CPU."""
    with torch.no_grad(), full_precision():
        parts = (part.to(model.image.device) for part in images.images.split(256))
        return torch.cat([model.network(part).argmax(1).cpu() for part in parts])
