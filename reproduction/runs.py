"""Who computed the rows of a sweep: a line for every run that computed any, beside them."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from netmoments.report.words import Machine
from netmoments.sweep.item import Engine, Finished, Sweep

FILE = "_runs.jsonl"


@dataclass(frozen=True)
class Recorded:
    """An engine that notes the machine in the sweep's folder before it computes anything."""

    engine: Engine
    out: Path
    machine: Machine

    @property
    def device_type(self) -> str:
        return self.engine.device_type

    def results(self, sweep: Sweep, items: Sequence[int]) -> Generator[Finished, None, None]:
        date = datetime.now(UTC).isoformat(timespec="seconds")
        line = json.dumps({"date": date, "device": self.machine.device, "torch": self.machine.torch})
        with (self.out / sweep.name / FILE).open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
        yield from self.engine.results(sweep, items)


def machines(out: Path, names: Iterable[str]) -> list[Machine]:
    """Those that computed any rows of these sweeps, each once; a line cut short by a kill is passed over."""
    found: dict[Machine, None] = {}
    for name in names:
        path = out / name / FILE
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            try:
                record = json.loads(line)
                found[Machine(str(record["device"]), str(record["torch"]))] = None
            except (ValueError, KeyError, TypeError):
                continue
    return list(found)
