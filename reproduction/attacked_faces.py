"""The faces network and correctly classified faces of FER2013, for Figure 9."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from netmoments import data
from netmoments.network import zoo
from netmoments.sampling.evaluation import random_seed
from reproduction.attack_rows import answers_of
from reproduction.settings import Settings

EMOTIONS = ("Anger", "Disgust", "Fear", "Happiness", "Sadness", "Surprise", "Neutral")
"""In the order of FER2013's labels, as the paper writes them."""
CANDIDATES = 200
"""Faces of a class that are drawn; the first that the network gets right is taken."""


def faces_network() -> nn.Module:
    """The shipped AlexNet for faces, float32, in eval mode; --weights are LeNet's."""
    return zoo.pretrained("faces").float()


def one_face_a_class(network: nn.Module, settings: Settings) -> tuple[list[int], Tensor, Tensor]:
    """Places in the private test split, images and labels: one a class, correctly classified, by the seed."""
    everything = data.load("fer2013", split="test", data_dir=settings.data_dir)
    assert everything.labels is not None
    places: list[int] = []
    for label in range(len(EMOTIONS)):
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
