"""One ReLU layer under a Gaussian, exactly."""
