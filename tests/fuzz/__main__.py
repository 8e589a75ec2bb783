"""The fuzz suite: `python -m tests.fuzz` prints seeds and counts; `--write` puts the table into docs/reliability.md."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path

from tests.fuzz.campaigns import CAMPAIGNS, Failure, generator_of, run_piece

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- python -m tests.fuzz --write -->", "<!-- end -->"
PIECE = 250


def run_all(seed: int, share: float, processes: int) -> dict[str, tuple[int, list[Failure]]]:
    """Every campaign: how many cases, and which failed. Case numbers start at seed · 10⁷."""
    results = {}
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for name, campaign in CAMPAIGNS.items():
            start, cases = time.monotonic(), max(1, round(campaign.cases * share))
            first = seed * 10**7
            starts = range(first, first + cases, PIECE)
            counts = [min(PIECE, first + cases - at) for at in starts]
            failures = [one for part in pool.map(run_piece, repeat(name), starts, counts) for one in part]
            results[name] = cases, failures
            print(
                f"{name}: {cases} cases, numbers {first} to {first + cases - 1}, {len(failures)} failed, "
                f"{time.monotonic() - start:.0f} s",
                flush=True,
            )
            for number, error in failures[:10]:
                print(f"    python -m tests.fuzz one '{name}' {number}    # {error}", flush=True)
    total, failed = (sum(values) for values in zip(*((n, len(f)) for n, f in results.values()), strict=True))
    print(f"{total} cases in all, seed {seed}, {failed} failed", flush=True)
    return results


def table(results: dict[str, tuple[int, list[Failure]]], seed: int) -> str:
    """The rows of docs/reliability.md."""
    rows = ["| what was tried | what must hold | cases | failed |", "|---|---|---|---|"]
    for name, (cases, failures) in results.items():
        campaign = CAMPAIGNS[name]
        words = f"*{name}*: {campaign.tried}", campaign.holds
        tried, holds = (text.replace("|", "\\|") for text in words)
        rows.append(f"| {tried} | {holds} | {cases:,} | {len(failures)} |")
    total, failed = sum(n for n, _ in results.values()), sum(len(f) for _, f in results.values())
    return "\n".join([*rows, f"| all, seed {seed} | | {total:,} | {failed} |"])


def write(rows: str) -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{rows}\n{END}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("one", nargs="*", metavar="one CAMPAIGN NUMBER", help="run one case again")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0, help="of the cases of every campaign")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="put the table into docs/reliability.md")
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
    results = run_all(chosen.seed, chosen.share, chosen.processes)
    if chosen.write:
        write(table(results, chosen.seed))
    return 1 if any(failures for _, failures in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
