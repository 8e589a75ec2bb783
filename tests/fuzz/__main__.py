"""The fuzz suite: `python -m tests.fuzz` prints seeds and counts; `--write` puts the table into docs/reliability.md.

Cases come in pieces, and finished pieces are kept in build/fuzz as long as the code stays the same: a run that was
stopped, or that `--minutes` ended, is continued by the same command.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from tests.fuzz.campaigns import CAMPAIGNS, Failure, Piece, generator_of, run_piece

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"
KEPT = ROOT / "build" / "fuzz"
BEGIN, END = "<!-- python -m tests.fuzz --write -->", "<!-- end -->"
PIECES = 100
"""Of a campaign: some seconds each."""


class Work(NamedTuple):
    """Cases `first`, `first` + 1, … of a campaign."""

    name: str
    first: int
    count: int


@dataclass
class Tally:
    """Of a campaign, so far: how many cases, which failed, seconds of a processor that they took."""

    cases: int = 0
    failures: list[Failure] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, count: int, found: Piece) -> None:
        self.cases += count
        self.failures += found.failures
        self.seconds += found.seconds


Results = dict[str, Tally]


def works(seed: int, share: float) -> list[Work]:
    """All cases of all campaigns, in pieces. Case numbers start at seed · 10⁷."""
    found = []
    for name, campaign in CAMPAIGNS.items():
        cases, first = max(1, round(campaign.cases * share)), seed * 10**7
        size = -(-cases // PIECES)
        found += [Work(name, at, min(size, first + cases - at)) for at in range(first, first + cases, size)]
    return found


def code_now() -> str:
    """What tells one state of the package and of this suite from another."""
    files = sorted([*(ROOT / "netmoments").rglob("*.py"), *Path(__file__).parent.glob("*.py")])
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


class Store:
    """Finished pieces, a line each in a file for one seed, one share and one state of the code."""

    def __init__(self, seed: int, share: float) -> None:
        self.path = KEPT / f"{code_now()}-seed{seed}-share{share:g}.jsonl"

    def read(self) -> dict[Work, Piece]:
        if not self.path.exists():
            return {}
        whole = [line for line in self.path.read_text().splitlines() if line.endswith("]")]  # none that was cut short
        return {
            Work(*work): Piece([Failure(*one) for one in failures], seconds)
            for work, failures, seconds, _ in map(json.loads, whole)
        }

    def add(self, work: Work, found: Piece) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps([work, found.failures, found.seconds, []]) + "\n")


def completed(waiting: Iterator[Work], processes: int, until: float) -> Iterator[tuple[Work, Piece]]:
    """Pieces as they are finished by so many processes; none is begun after a time."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        running: dict[Future[Piece], Work] = {}
        while True:
            free = processes - len(running) if time.monotonic() < until else 0
            running.update({pool.submit(run_piece, *work): work for work in islice(waiting, free)})
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()


def run_all(seed: int, share: float, processes: int, minutes: float) -> tuple[Results, bool]:
    """What was found, now and before; and whether that is all."""
    store, every = Store(seed, share), works(seed, share)
    found = store.read()
    if found:
        print(f"{len(found)} of {len(every)} pieces were done before: {store.path}", flush=True)
    left = [work for work in every if work not in found]
    for work, piece in completed(iter(left), processes, time.monotonic() + 60 * minutes):
        store.add(work, piece)
        found[work] = piece
        for number, error in piece.failures[:10]:
            print(f"    python -m tests.fuzz one '{work.name}' {number}    # {error}", flush=True)
    results: Results = {name: Tally() for name in CAMPAIGNS}
    for work in every:
        if work in found:
            results[work.name].add(work.count, found[work])
    return results, len(found) == len(every)


def tell(results: Results, seed: int, whole: bool) -> None:
    for name, tally in results.items():
        last = seed * 10**7 + tally.cases - 1
        print(
            f"{name}: {tally.cases} cases, numbers {seed * 10**7} to {last}, {len(tally.failures)} failed, "
            f"{tally.seconds:.0f} s of a processor"
        )
    total, failed, seconds = totals(results)
    print(f"{total} cases in all, seed {seed}, {failed} failed, {seconds / 60:.1f} minutes of a processor")
    if not whole:
        print("more are left: the same command goes on", flush=True)


def totals(results: Results) -> tuple[int, int, float]:
    every = results.values()
    return sum(x.cases for x in every), sum(len(x.failures) for x in every), sum(x.seconds for x in every)


def table(results: Results, seed: int) -> str:
    """The rows of docs/reliability.md."""
    rows = ["| what was tried | what must hold | cases | failed |", "|---|---|---|---|"]
    for name, tally in results.items():
        campaign = CAMPAIGNS[name]
        words = f"*{name}*: {campaign.tried}", campaign.holds
        tried, holds = (text.replace("|", "\\|") for text in words)
        rows.append(f"| {tried} | {holds} | {tally.cases:,} | {len(tally.failures)} |")
    total, failed, seconds = totals(results)
    return "\n".join(
        [*rows, f"| all, seed {seed}, {seconds / 60:.0f} minutes of a processor | | {total:,} | {failed} |"]
    )


def write(rows: str) -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{rows}\n{END}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("one", nargs="*", metavar="one CAMPAIGN NUMBER", help="run one case again")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0, help="of the cases of every campaign")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop then; the same command goes on")
    parser.add_argument("--write", action="store_true", help="put the table into docs/reliability.md once all is done")
    chosen = parser.parse_args()
    if chosen.one:
        _, name, number = chosen.one
        try:
            CAMPAIGNS[name].check(generator_of(name, int(number)))
        except Exception:
            traceback.print_exc()
            return 1
        print("holds")
        return 0
    results, whole = run_all(chosen.seed, chosen.share, chosen.processes, chosen.minutes)
    tell(results, chosen.seed, whole)
    if chosen.write and whole:
        write(table(results, chosen.seed))
    return 1 if any(tally.failures for tally in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
