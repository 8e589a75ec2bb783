"""Sweeps over datasets in numbered items that are computed anywhere in any order, kept on disk, and resumed."""

from netmoments.sweep.item import Columns, Engine, Sweep
from netmoments.sweep.local import LocalEngine
from netmoments.sweep.on_ray import RayEngine
from netmoments.sweep.run import Results, run_sweep
from netmoments.sweep.store import Store, require_same

__all__ = [
    "Columns",
    "Engine",
    "LocalEngine",
    "RayEngine",
    "Results",
    "Store",
    "Sweep",
    "require_same",
    "run_sweep",
]
