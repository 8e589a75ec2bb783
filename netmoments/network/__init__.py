"""Any trained network: its ReLUs, cuts at one of them, loading, the zoo, training."""
