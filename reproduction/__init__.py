"""The paper's tables and figures made again on real data, and the training of the networks they are about.

Not part of the installed package: in a checkout, `python -m reproduction table-2` runs an experiment. Each table or
figure is a module with a function `reproduce(settings) -> Outcome` and its chart; `experiment` says what these are.
"""
