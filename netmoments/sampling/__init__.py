"""Monte Carlo: the reference every analytic result is checked against, with a standard error for each number."""

from netmoments.sampling.control import controlled_monte_carlo
from netmoments.sampling.difference import relative_difference
from netmoments.sampling.frequencies import class_frequencies
from netmoments.sampling.plain import monte_carlo
from netmoments.sampling.sums import MomentSums, SampledMoments
from netmoments.sampling.surrogates import LinearSurrogate, Surrogate, TwoStageSurrogate

__all__ = [
    "LinearSurrogate",
    "MomentSums",
    "SampledMoments",
    "Surrogate",
    "TwoStageSurrogate",
    "class_frequencies",
    "controlled_monte_carlo",
    "monte_carlo",
    "relative_difference",
]
