"""The embedded digits network, a study of noise on forty digits, and noise that fools it on three."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import netmoments as nm
from netmoments.data.images import LabelledImages
from netmoments.report.attack_study import AttackStudy, Choice, conduct_attack
from netmoments.report.noise_study import Study, study
from netmoments.report.words import Provenance
from tests.report.shown import FAST, PLAIN, STUDIED


@pytest.fixture(scope="session")
def network() -> nn.Module:
    return nm.zoo.pretrained("digits")


@pytest.fixture(scope="session")
def digits() -> LabelledImages:
    return nm.data.load("digits")


@pytest.fixture(scope="session")
def found(network, digits) -> Study:
    return study(network, digits.first(40), STUDIED)


@pytest.fixture(scope="session")
def attacked(network, digits) -> AttackStudy:
    return conduct_attack(network, digits, FAST, Choice(3))


@pytest.fixture(scope="session")
def reported(network, digits) -> Study:
    """With attacks."""
    return study(network, digits.take([0, 60, 120, 180, 240]), dataclasses.replace(PLAIN, attacks=2))


@pytest.fixture(scope="session")
def provenance() -> Provenance:
    return Provenance.of_this_run(torch.device("cpu"), 0)
