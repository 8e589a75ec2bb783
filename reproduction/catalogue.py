"""All reproductions, by the name the command line gives them, in the order of the report."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from reproduction.outcome import Outcome
from reproduction.settings import Settings

MODULES = {
    "figure-1": "figure_1",
    "figure-2": "figure_2",
    "table-1": "table_1",
    "table-2": "table_2",
    "seeds": "seeds",
    "table-3": "table_3",
    "table-4": "table_4",
    "figure-3": "figure_3",
    "figure-4": "figure_4",
    "figure-5": "figure_5",
    "figure-6": "figure_6",
    "figure-7": "figure_7",
    "table-5": "table_5",
    "figure-8": "figure_8",
    "figure-9": "figure_9",
    "frontier": "frontier",
}
NAMES = tuple(MODULES)


def experiments_named(name: str) -> Sequence[str]:
    """The experiments that a name on the command line stands for: one, or all."""
    if name == "all":
        return NAMES
    if name not in MODULES:
        raise ValueError(f"no experiment {name!r}; there are {', '.join(NAMES)}, and all")
    return (name,)


def reproduce(name: str, settings: Settings) -> Outcome:
    """Run one experiment, or what is missing of it, and gather what it found."""
    module = importlib.import_module(f"netmoments.experiments.{MODULES[name]}")
    outcome: Outcome = module.reproduce(settings)
    return outcome
