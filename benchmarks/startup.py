"""Measure how long the command line takes to start: `netmoments --help` and the like, beside an empty Python program.

`python -m benchmarks.startup [--runs N]`. For each it prints medians over runs that take turns: seconds on the clock,
and processor seconds, which do not depend on other work of the machine. Help must appear within 0.4 s.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.measure import machine

LIMIT = 0.4
"""The most seconds until `netmoments --help` appears."""
PROGRAM = str(Path(sys.executable).with_name("netmoments"))
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "import netmoments": [sys.executable, "-c", "import netmoments"],
    "netmoments --help": [PROGRAM, "--help"],
    "netmoments report --help": [PROGRAM, "report", "--help"],
}


def once(command: list[str]) -> tuple[float, float]:
    """Clock seconds and processor seconds of one process."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    clock, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return clock, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def medians(runs: int) -> dict[str, tuple[float, float]]:
    """Medians for every command, after a first run that fills the disk's cache."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for number in range(runs + 1):
        for name, command in COMMANDS.items():
            found = once(command)
            if number:
                taken[name].append(found)
    return {name: (statistics.median(x for x, _ in each), statistics.median(y for _, y in each))
            for name, each in taken.items()}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=21)
    asked = parser.parse_args()
    print(machine())
    for name, (clock, processor) in medians(asked.runs).items():
        wanted = f"  (must reach {LIMIT})" if name == "netmoments --help" else ""
        print(f"{name:26s} {clock:.3f} s, processor {processor:.3f} s{wanted}")


if __name__ == "__main__":
    main()
