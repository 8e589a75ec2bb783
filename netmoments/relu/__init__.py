"""One ReLU layer under a Gaussian, exactly."""

from netmoments.relu.covariance import orthant_probability, relu_covariance
from netmoments.relu.marginal import relu_mean, relu_variance

__all__ = ["orthant_probability", "relu_covariance", "relu_mean", "relu_variance"]
