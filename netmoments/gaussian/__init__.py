"""Gaussian inputs: a mean and a covariance that keeps its structure."""

from netmoments.gaussian.covariance import Covariance, Dense, Diagonal, Isotropic, LowRank
from netmoments.gaussian.gaussian import Gaussian

__all__ = ["Covariance", "Dense", "Diagonal", "Gaussian", "Isotropic", "LowRank"]
