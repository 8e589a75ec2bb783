"""`output_moments`, the front door, with its methods and results; who wins, and how often; methods compared."""
