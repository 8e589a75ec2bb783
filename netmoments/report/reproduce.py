"""Experiments carried out, shown and written, and the page of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from netmoments.experiments.catalogue import NAMES, reproduce
from netmoments.experiments.outcome import Outcome
from netmoments.experiments.runs import machines
from netmoments.experiments.settings import Settings
from netmoments.files import require_writable_folder
from netmoments.report.provenance import Provenance
from netmoments.report.reproduction import write_outcome, write_page


def reproduce_and_write(
    names: Sequence[str],
    settings: Settings,
    *,
    command: str | None = None,
    show: Callable[[Outcome], None] = lambda outcome: None,
) -> Path:
    """Each experiment's files in its folder, as soon as it is done, and `report.html`, whose path is returned.

    What is finished stays when a later one is stopped: by the deadline of the settings (`netmoments.sweep.Unfinished`),
    by the user, or by an error. `command` is what the files say made them, by default the command line.
    """
    require_writable_folder(settings.out)
    require_installed(names)
    for name in names:
        settings.used.clear()
        outcome = reproduce(name, settings)
        show(outcome)
        made_on = machines(settings.out, settings.used)
        provenance = Provenance.of_this_run(settings.device, settings.seed, command, made_on)
        write_outcome(outcome, provenance, settings.out)
        page = write_page(settings.out, NAMES)
    return page


def require_installed(names: Sequence[str]) -> None:
    """What is needed at the end is asked for at the start."""
    needed = {"matplotlib": "report", "jinja2": "report"}
    if set(names) - {"figure-1"}:
        needed["pyarrow"] = "sweeps"
    if "table-4" in names:
        needed["sklearn"] = "data"
    for module, extra in needed.items():
        if find_spec(module) is None:
            raise ImportError(f'{module} is needed and not installed: pip install "netmoments[{extra}]"')
