"""Sweeps over datasets as numbered items of work: computed anywhere in any order, kept on the disk, resumed."""

from netmoments.sweep.configuration import require_same
from netmoments.sweep.engine import Engine
from netmoments.sweep.item import Columns, Sweep, random_seed
from netmoments.sweep.local import LocalEngine
from netmoments.sweep.on_ray import RayEngine
from netmoments.sweep.run import Results, Unfinished, run_sweep
from netmoments.sweep.store import Store

__all__ = [
    "Columns",
    "Engine",
    "LocalEngine",
    "RayEngine",
    "Results",
    "Store",
    "Sweep",
    "Unfinished",
    "random_seed",
    "require_same",
    "run_sweep",
]
