"""Attack the face network on FER2013: choose faces that it gets right, and find targeted noise for each of them.

Table 5 and Figure 8 are sweeps of targeted attacks; Figure 9 has one face for each emotion.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from netmoments import data
from netmoments.affine_relu_affine import AffineReluAffine
from netmoments.attacks.result import AttackResult
from netmoments.attacks.sparse_smooth import SparseSmooth
from netmoments.checks import random_seed
from netmoments.data.images import LabelledImages
from netmoments.linearize.two_stage import two_stage
from netmoments.network import zoo
from netmoments.network.model import NetworkModel
from netmoments.network.weights import digest_of
from netmoments.precision import full_precision
from netmoments.sweep.item import Columns
from reproduction.attack_rows import SparseSmoothFrom, answers_of
from reproduction.experiment import Settings
from reproduction.image_sweeps import blocks, same_bits

EMOTIONS = ("Anger", "Disgust", "Fear", "Happiness", "Sadness", "Surprise", "Neutral")
"""The emotions as the paper writes them, in the order of FER2013's labels."""
CANDIDATES = 200
"""Faces of a class that are drawn at random; the first that the network gets right is used."""
SAMPLES = 100
"""Samples of the noise for each image and target."""
POLISH = 200
"""Steps on the network: there are more than for LeNet, because its gradients change more from place to place."""
LOOKED_AT = 32
"""Batch size of the network while faces are chosen."""
SEEDS = 2**31
"""Seeds of attacks are below this; an attack adds small numbers to its seed for samples with other purposes."""
CLOSE = 0.1
"""Margins that differ by at most so many logits are said to agree."""
NUMBERS = (
    "success", "success_clipped", "sparsity", "l1", "tv", "linf", "ssim", "gamma", "margin", "network_margin", "gap",
)  # fmt: skip
YES_OR_NO = ("feasible", "fooled")
COUNTS = ("polished", "iterations")


def faces_network() -> nn.Module:
    """The shipped AlexNet for faces in float32 and eval mode (--weights would be LeNet's)."""
    return zoo.pretrained("faces").float()


def one_face_a_class(network: nn.Module, settings: Settings) -> tuple[list[int], Tensor, Tensor]:
    """Places in the private test split, images and labels: one correctly classified face per class, chosen by the seed.

    If fewer images are asked for, those of the first classes.
    """
    everything = data.load("fer2013", split="test", data_dir=settings.data_dir)
    assert everything.labels is not None
    places: list[int] = []
    for label in range(min(len(EMOTIONS), settings.images)):
        generator = torch.Generator().manual_seed(random_seed(settings.seed, "figure-9", label))
        mine = (everything.labels == label).nonzero().flatten()
        drawn = mine[torch.randperm(len(mine), generator=generator)][:CANDIDATES]
        right = answers_of(network, everything.images[drawn].to(settings.here)).cpu() == label if len(drawn) else drawn
        if not bool(right.any()):
            raise ValueError(
                f"figure-9: of {len(drawn)} faces of FER2013's test split with {EMOTIONS[label]} the network gets none "
                "right"
            )
        places.append(int(drawn[right.nonzero().flatten()[0]]))
    chosen = everything.take(places)
    assert chosen.labels is not None
    return places, chosen.images.to(settings.here), chosen.labels


@dataclass(frozen=True, eq=False)
class Faces:
    """A network and images that it classifies as their labels."""

    network: nn.Module
    images: Tensor
    """(N, C, H, W)."""
    labels: Tensor
    """(N,)."""
    numbers: Tensor
    """Their places in the dataset, (N,): what an image's random numbers derive from."""
    classes: tuple[str, ...]
    seed: int

    def description(self) -> dict[str, Any]:
        """Everything that affects results, as plain values."""
        return {
            "network": digest_of(*self.network.state_dict().values()),
            "images": len(self.images),
            "pixels": digest_of(self.images, self.labels, self.numbers),
            "seed": self.seed,
        }

    def on(self, device: str) -> Faces:
        network = copy.deepcopy(self.network).to(device).eval()
        return Faces(network, self.images.to(device), self.labels.to(device), self.numbers, self.classes, self.seed)

    def kept_relu(self, layer: int | str) -> str:
        """Describe the ReLU that a linearization keeps: its number from 1, its name and its size."""
        model = NetworkModel.of(self.network, self.images[:1], "faces")
        kept = model.relu(layer)
        return f"ReLU {kept.index + 1} of {len(model.relus)}, {kept.name}, {kept.size:,} units"


def network_and_faces(settings: Settings) -> tuple[nn.Module, LabelledImages]:
    """The zoo's network for faces, and FER2013's test images."""
    return zoo.pretrained("faces", settings.weights).float(), data.load("fer2013", data_dir=settings.data_dir)


def chosen_faces(
    network: nn.Module, everything: LabelledImages, wanted: Mapping[int, int], seed: int, purpose: str
) -> Faces:
    """So many random images of each class among those that the network gets right, or all of them if there are fewer.

    The network runs on a CPU for this, so that the choice does not depend on the device of the experiment.
    """
    if everything.labels is None:
        raise ValueError("the faces need labels: which of them the network gets right is not known without")
    network = copy.deepcopy(network).cpu().eval()
    places: list[int] = []
    for label, count in wanted.items():
        generator = torch.Generator().manual_seed(random_seed(seed, purpose, label))
        own = (everything.labels == label).nonzero().flatten()
        own = own[torch.randperm(len(own), generator=generator)]
        right = _first_right(network, everything.images, own, label, count)
        if not right:
            name = everything.classes[label] if everything.classes else str(label)
            raise ValueError(
                f"the network gets none of the {len(own)} images of class {name} right; give other weights"
            )
        places += right
    chosen = everything.take(places)
    assert chosen.labels is not None
    return Faces(network, chosen.images, chosen.labels, torch.tensor(places), everything.classes, seed)


@torch.no_grad()
def _first_right(network: nn.Module, images: Tensor, places: Tensor, label: int, count: int) -> list[int]:
    found: list[int] = []
    for part in places.split(LOOKED_AT):
        with full_precision():
            right = network(images[part]).argmax(1) == label
        found += part[right].tolist()
        if len(found) >= count:
            break
    return found[:count]


@dataclass(frozen=True, eq=False)
class TargetedSweep:
    """A sweep of attacks on every image towards its targets. An item is a block of images, each linearized once.

    Rows: image, source, target, variant (the attack's name here), asked (its γ, or NaN), answer, outside (share of the
    pixels of M + μ beyond [0, 1]), and the columns of `AttackResult.records` that are listed above.
    """

    name: str
    faces: Faces
    targets: Mapping[int, Sequence[int]]
    """By label."""
    attacks: Mapping[str, SparseSmooth]
    block: int
    unit: ClassVar[str] = "images"

    @property
    def configuration(self) -> dict[str, Any]:
        return {
            **self.faces.description(),
            "block": self.block,
            "targets": {str(label): list(targets) for label, targets in self.targets.items()},
            "attacks": {name: _plain(attack) for name, attack in self.attacks.items()},
        }

    @property
    def counts(self) -> Sequence[int]:
        return [len(part) for part in blocks(len(self.faces.images), self.block)]

    def prepare(self, device: str) -> Callable[[int], Columns]:
        faces = self.faces.on(device)
        parts = blocks(len(faces.images), self.block)
        return lambda item: self.rows_of(faces, parts[item])

    def rows_of(self, faces: Faces, places: range) -> Columns:
        """The rows of some images; the faces are on the device."""
        repeated = [place for place in places for _ in self.targets[int(faces.labels[place])]]
        targets = [target for place in places for target in self.targets[int(faces.labels[place])]]
        numbers = faces.numbers[repeated].numpy()
        seed = random_seed(faces.seed, self.name, int(faces.numbers[places.start])) % SEEDS
        images, labels = faces.images[repeated], faces.labels[repeated]
        own = torch.tensor(repeated, device=images.device) - places.start
        networks: dict[int | str, AffineReluAffine] = {}
        found = []
        for name, attack in self.attacks.items():
            with same_bits():
                if attack.layer not in networks:
                    here = faces.images[places.start : places.stop]
                    networks[attack.layer] = two_stage(faces.network, here, attack.layer)
                settings = {field.name: getattr(attack, field.name) for field in fields(attack)} | {"seed": seed}
                again = SparseSmoothFrom(**settings, networks=networks[attack.layer], own=own)
                result = again(faces.network, images, labels, torch.tensor(targets))
            found.append(_columns(name, attack, result, numbers))
        return {column: np.concatenate([part[column] for part in found]) for column in found[0]}


def _plain(attack: SparseSmooth) -> dict[str, Any]:
    """The settings that affect results."""
    values = asdict(attack)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()
            if name not in ("seed", "preprocessing", "memory_budget")}  # fmt: skip


def _columns(name: str, attack: SparseSmooth, result: AttackResult, numbers: np.ndarray) -> Columns:
    records = result.records()

    def column(key: str, dtype: Any) -> np.ndarray:
        return np.array([math.nan if record[key] is None else record[key] for record in records], dtype)

    moved = result.images + result.mu
    outside = ((moved < 0) | (moved > 1)).flatten(1).double().mean(1)
    return {
        "image": numbers[result.places.cpu().numpy()].astype(np.int32),
        "source": column("label", np.int16),
        "target": column("target", np.int16),
        "variant": np.array([name] * len(records)),
        "asked": np.full(len(records), math.nan if attack.gamma is None else attack.gamma),
        "answer": column("answer", np.int16),
        **{key: column(key, np.float64) for key in NUMBERS},
        **{key: column(key, np.bool_) for key in YES_OR_NO},
        **{key: column(key, np.int32) for key in COUNTS},
        "outside": outside.cpu().numpy(),
    }


def chosen_rows(columns: Columns, keep: np.ndarray) -> dict[str, np.ndarray]:
    """The rows where a mask is true."""
    return {name: values[keep] for name, values in columns.items()}


def most_fooled(columns: Columns) -> np.ndarray:
    """For each row, whether most samples are classified as the target."""
    return columns["success"] > 0.5


def mean_of(values: np.ndarray) -> float | None:
    """The mean of the values that are numbers, or None if there are none."""
    kept = values[np.isfinite(values)]
    return float(kept.mean()) if len(kept) else None


def error_over_images(columns: Columns, values: np.ndarray) -> float | None:
    """Standard error of a mean over rows, from the spread between images; None for a single image."""
    means = [float(values[columns["image"] == image].mean()) for image in np.unique(columns["image"])]
    return float(np.std(means, ddof=1) / len(means) ** 0.5) if len(means) > 1 else None


def summarized(columns: Columns) -> dict[str, Any]:
    """Averages over the rows of one attack as plain values, None where there is no number."""
    most = most_fooled(columns)
    return {
        "attacks": len(most),
        "samples_fooled": mean_of(columns["success"]),
        "samples_fooled_error": error_over_images(columns, columns["success"]),
        "samples_fooled_clipped": mean_of(columns["success_clipped"]),
        "images_fooled": mean_of(most.astype(float)),
        "images_fooled_error": error_over_images(columns, most.astype(float)),
        "fooled_as_asked": int(columns["fooled"].sum()),
        "feasible": int(columns["feasible"].sum()),
        "sparsity": mean_of(columns["sparsity"]),
        "sparsity_where_fooled": mean_of(columns["sparsity"][most]),
        "left_alone": int((columns["l1"] == 0).sum()),
        "largest_change": mean_of(columns["linf"]),
        "ssim": mean_of(columns["ssim"]),
        "separation_by_formula": _negated(mean_of(columns["margin"])),
        "separation_sampled": _negated(mean_of(columns["network_margin"])),
        "formula_error_where_feasible": mean_of((columns["network_margin"] - columns["margin"])[columns["feasible"]]),
        "pixels_outside": mean_of(columns["outside"]),
        "median_gap": _median(columns["gap"]),
    }


def _negated(value: float | None) -> float | None:
    return None if value is None else -value


def _median(values: np.ndarray) -> float | None:
    kept = values[np.isfinite(values)]
    return float(np.median(kept)) if len(kept) else None


def on_linearization(one: Mapping[str, Any]) -> str:
    """A sentence on the network's own margin where the formula's problem was solved."""
    error = one["formula_error_where_feasible"]
    if error is None:
        return "It was solved nowhere, so nothing can be said of the linearization."
    if abs(error) <= CLOSE:
        return f"Where it was solved the network's own margin agrees, within {abs(error):.2f} on average."
    side = "above" if error > 0 else "below"
    return (
        f"Where it was solved the network's own margin, sampled, is {abs(error):.2f} {side} "
        "the formula's on average: that is what the linearization at the image errs where the noise is."
    )


def in_cell(value: float | None, digits: int = 2) -> str:
    """A number for a table's cell, a dash where there is none."""
    return "—" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    return "—" if value is None else f"{100 * value:.1f} %"
