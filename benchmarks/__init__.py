"""Measurements. Every figure in the documentation comes from one of these modules."""
