"""The paper's own expressions, as printed, for comparison with the exact engine.

"Network Moments: Extensions and Sparse-Smooth Attacks" by Alfadly, Bibi, Botero, Alsubaihi and Ghanem. Each function
names its equation and, where the printed form has a slip, says so. The engine uses none of them.
"""

from netmoments.paper.densities import (
    relu_atom,
    relu_density,
    relu_mean_zero_mean,
    squared_relu_density,
    squared_relu_mean,
)
from netmoments.paper.moments import (
    expected_output,
    pairs_variance_zero_mean,
    second_moment_as_printed,
    second_moment_zero_mean,
    variance_series,
    variance_series_by_pairs,
    variance_zero_mean,
    variance_zero_mean_pairs,
)
from netmoments.paper.price import price_theorem_sides
from netmoments.paper.series import (
    relu_cross_moment_partial_sums,
    relu_cross_moment_series,
    relu_product_zero_mean,
)

__all__ = [
    "expected_output",
    "pairs_variance_zero_mean",
    "price_theorem_sides",
    "relu_atom",
    "relu_cross_moment_partial_sums",
    "relu_cross_moment_series",
    "relu_density",
    "relu_mean_zero_mean",
    "relu_product_zero_mean",
    "second_moment_as_printed",
    "second_moment_zero_mean",
    "squared_relu_density",
    "squared_relu_mean",
    "variance_series",
    "variance_series_by_pairs",
    "variance_zero_mean",
    "variance_zero_mean_pairs",
]
