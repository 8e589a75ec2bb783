"""Gaussian noise that fools a network: targeted, on few pixels, or sparse and smooth."""

from netmoments.attacks.box import PixelSupport, Targeted
from netmoments.attacks.expected_logits import ExpectedLogits
from netmoments.attacks.result import AttackResult
from netmoments.attacks.sparse_smooth import SparseSmooth

__all__ = ["AttackResult", "ExpectedLogits", "PixelSupport", "SparseSmooth", "Targeted"]
