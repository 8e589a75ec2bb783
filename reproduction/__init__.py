"""Reproduce the paper's tables and figures on real data, and train the networks that they study.

Not part of the installed package: in a checkout, `python -m reproduction table-2` runs an experiment. Each table or
figure is a module with a function `reproduce(settings) -> Outcome` and its chart; `experiment` says what these are.
"""
