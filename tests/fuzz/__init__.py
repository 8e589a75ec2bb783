"""Inputs made at random, and what must hold for every one of them; see `tests/fuzz/campaigns.py`."""
