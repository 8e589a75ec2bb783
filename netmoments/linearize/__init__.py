"""Networks made affine at a point: exact Jacobians, the two-stage linearization, banks of points."""
