"""Experiments carried out, shown and written, and the page of all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from netmoments.experiments.catalogue import NAMES, reproduce
from netmoments.experiments.outcome import Outcome
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
    for name in names:
        outcome = reproduce(name, settings)
        write_outcome(outcome, Provenance.of_this_run(settings.device, settings.seed, command), settings.out)
        page = write_page(settings.out, NAMES)
        show(outcome)
    return page
