"""Noise made to fool a network: what was asked of which images, and what came out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from netmoments.attacks import AttackResult
from netmoments.attacks.attack import Attack
from netmoments.data import LabelledImages
from netmoments.experiments.attack_pictures import PictureRow


class LeftOut(NamedTuple):
    """An image that was chosen but not attacked, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class NotAttacked:
    """Why there is no noise to show, in a sentence."""

    reason: str


@dataclass(frozen=True, eq=False)
class AttackStudy:
    """Everything that is shown of an attack; on the CPU. The result has N attacked images."""

    attack: Attack
    images: LabelledImages
    """Those given to the attack, with labels."""
    classes: tuple[str, ...]
    """Names of the network's classes, () if unknown."""
    labels_are_answers: bool
    """Whether the images came without labels, and the network's own answers were taken."""
    relu: str
    """The name of the ReLU that the linearization keeps."""
    result: AttackResult
    noisy: Tensor
    """A sample of each image's noise, (N, C, H, W), not cut to the bounds."""
    noisy_classes: Tensor
    """What the network takes them for, (N,)."""
    of_the_target: tuple[str, ...] = ()
    """Names of chosen images whose label is the target: there is nothing to attack."""

    def __len__(self) -> int:
        return len(self.result)

    def name(self, number: int) -> str:
        """Of an attacked image."""
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
        aims = [LeftOut(name, "its label is the target") for name in self.of_the_target]
        wrong = [
            LeftOut(
                self.images.names[place],
                f"the network takes it for {self.class_name(predicted)}, its label is {self.class_name(label)}",
            )
            for place, label, predicted in self.result.skipped
        ]
        return (*aims, *wrong)

    def row(self, number: int, note: str = "") -> PictureRow:
        """The five pictures of an attacked image, with a line beside them."""
        result = self.result
        before, after = self.class_name(result.labels[number]), self.class_name(self.noisy_classes[number])
        return PictureRow(result.images[number], result.mu[number], self.noisy[number], before, after, note)
