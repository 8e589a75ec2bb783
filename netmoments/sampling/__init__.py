"""Moments from samples of the network: plain ones, and as many as a tolerance needs, with controls."""
