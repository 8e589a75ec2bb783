"""Any trained network: the model of it, its ReLUs and graph, cuts at a ReLU, loading, and the zoo."""
