"""Monte Carlo: the reference every analytic result is checked against, with a standard error for each number."""

from netmoments.sampling.control_variates import LinearSurrogate, Surrogate, TwoStageSurrogate, controlled_monte_carlo
from netmoments.sampling.monte_carlo import (
    MomentSums,
    SampledMoments,
    class_frequencies,
    monte_carlo,
    relative_difference,
)

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
