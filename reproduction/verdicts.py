"""Make pages from the summaries: published beside ours for every table and figure, a verdict, and which run made it.

`readme` is README.md here, `runs_page` that of the results.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from netmoments.report.words import seconds_in_words
from reproduction.experiment import MODULES, UNKNOWN

Record = Mapping[str, Any]
"""A summary.json."""
NO_NUMBER = "no published number"
REPRODUCES, DOES_NOT = "reproduces", "does not"


class Pair(NamedTuple):
    ours: float
    paper: float

    def near(self, tolerance: float) -> bool:
        """Whether ours is within this share of the published value; with a share of 0, whether it is not below."""
        return abs(self.ours - self.paper) <= tolerance * abs(self.paper) if tolerance else self.ours >= self.paper


class Tried(NamedTuple):
    """A reading that was tried, in words, and whether the published numbers come out under it."""

    words: str
    holds: bool


Readings = Callable[[Mapping[str, Record], float], list[Tried]]
"""A function that finds all readings of a claim in the summaries of other experiments, judged by a tolerance."""


def no_readings(records: Mapping[str, Record], tolerance: float) -> list[Tried]:
    return []


@dataclass(frozen=True)
class Claim:
    """Something that the paper has numbers for.

    Args:
        name: of the experiment.
        what: the table or figure, and which part.
        shows: what it shows, in one line.
        pattern: matches the comparisons that the claim is about; empty where the paper has no number.
        tolerance: the share of the published number within which ours reproduces it; 0 for counts.
        readings: under which the claim may hold, from the experiments `made_by`.
    """

    name: str
    what: str
    shows: str
    pattern: str = ""
    tolerance: float = 0.25
    readings: Readings = no_readings
    made_by: tuple[str, ...] = ()


def pairs_of(record: Record, pattern: str) -> list[Pair]:
    """The comparisons whose words begin with a pattern, where the paper has a number."""
    return [
        Pair(float(one["ours"]), float(one["paper"]))
        for one in record["comparisons"]
        if one["paper"] is not None and pattern and re.match(pattern, one["what"])
    ]


def verdict(claim: Claim, records: Mapping[str, Record]) -> str:
    """ "reproduces", "reproduces under a reading", or "does not" with how far it is off.

    For readings it says how many were tried, since of many some come near by chance.
    """
    pairs = pairs_of(records[claim.name], claim.pattern)
    if not pairs:
        return NO_NUMBER
    if all(pair.near(claim.tolerance) for pair in pairs):
        return REPRODUCES
    tried = claim.readings(records, claim.tolerance)
    holding = [one.words for one in tried if one.holds]
    if holding:
        some = "; ".join(holding[:MOST]) + ("; …" if len(holding) > MOST else "")
        return f"{REPRODUCES} under {len(holding)} of {len(tried)} readings tried: {some}"
    ratios = sorted(pair.ours / pair.paper for pair in pairs)
    off = f"{ratios[0]:.2g}" if len(ratios) == 1 else f"{ratios[0]:.2g} to {ratios[-1]:.2g}"
    absent = [name for name in claim.made_by if name not in records]
    readings = f", nor under any of {len(tried)} readings tried" if tried else ""
    waiting = f"; {' and '.join(absent)} not run yet" if absent else ""
    return f"{DOES_NOT}{readings}: ours is {off} times the published{waiting}"


MOST = 3
"""The most readings and numbers in a line."""


def by_recipe(
    quantity: str, column: str, words: str = "", made_by: Sequence[str] = ("seeds", "readings-2"), above: float = 0
) -> Readings:
    """Readings by training recipe: errors averaged over seeds beside the published ones, at every noise level above
    one.
    """

    def found(records: Mapping[str, Record], tolerance: float) -> list[Tried]:
        from reproduction.image_sweeps import SIGMAS
        from reproduction.published import TABLE_2

        recipes: dict[str, list[Sequence[float]]] = {}
        for name in made_by:
            for trial in records[name]["numbers"]["trials"] if name in records else ():
                if trial.get("learned", True):
                    recipes.setdefault(f"{words}{trial['recipe']} ({name})", []).append(trial[quantity])
        tried = []
        for recipe, trials in recipes.items():
            means = [sum(values) / len(trials) for values in zip(*trials, strict=True)]
            pairs = [
                Pair(mean, getattr(TABLE_2[sigma, "avg"], column).mean)
                for mean, sigma in zip(means, SIGMAS, strict=True)
                if sigma > above
            ]
            tried.append(Tried(recipe, all(pair.near(tolerance) for pair in pairs)))
        return tried

    return found


def old_variances(records: Mapping[str, Record], tolerance: float) -> list[Tried]:
    """Readings of the old variance, for every recipe of `readings-2`."""
    from reproduction.readings_2 import OLD

    readings = [by_recipe(name, "variance_error_old", f"{words}, ", ["readings-2"]) for name, words in OLD.items()]
    return [one for reading in readings for one in reading(records, tolerance)]


COUNTING = ("readings-5", "readings-2019")
"""Experiments that count the same attacks in several ways."""


def by_counting(title: str, task: str) -> Readings:
    """Readings and ways to count of `COUNTING`, of networks whose title has a word; the dials among them left out."""

    def found(records: Mapping[str, Record], tolerance: float) -> list[Tried]:
        from reproduction.readings_5 import COUNTED, NEAR

        tried = []
        for one in (one for name in COUNTING if name in records for one in records[name]["numbers"]["studied"]):
            paper = one["published"][task]
            for reading, rates in one["readings"].items() if title in one["title"] else ():
                tried += [
                    Tried(f"{words}, {reading} ({rates[task][key]:.3f})", abs(rates[task][key] - paper) <= NEAR)
                    for key, words in COUNTED.items()
                    if not rates["dial"]
                ]
        return tried

    return found


CLAIMS = (
    Claim("figure-1", "Figure 1", "A network before and after the two-stage linearization, drawn."),
    Claim("figure-2", "Figure 2, 20 terms", "The largest error of Lemma 4 cut to 20 terms.",
          "largest error, 20 terms, against exact"),
    Claim("figure-2", "Figure 2, 5 terms", "Five terms are enough away from |ρ| = 1/√2.",
          r"largest error, 5 terms, \|ρ", tolerance=0.5),
    Claim("table-1", "Table 1", "The error of the linearization grows linearly with the noise; l = 1 is best.",
          "ℓ2 difference"),
    Claim("table-2", "Table 2, mean", "Theorem 1 is tight under the two-stage linearization.", "mean, σ",
          readings=by_recipe("mean", "mean_error"), made_by=("seeds", "readings-2")),
    Claim("table-2", "Table 2, new variance, σ = 0.001", "Half of 5 terms' error is rounding in float32.",
          "new variance, 5 terms.*σ = 0.001"),
    Claim("table-2", "Table 2, new variance, σ = 0.01", "Lemma 4 is tight.", r"new variance, exact.*σ = 0\.01"),
    Claim("table-2", "Table 2, new variance, σ ≥ 0.05", "How tight depends on how long LeNet was trained.",
          r"new variance, exact.*σ = 0\.(05|1)$",
          readings=by_recipe("variance", "variance_error_new", above=0.01), made_by=("seeds", "readings-2")),
    Claim("table-2", "Table 2, old variance", "Taking means as zero costs much; in our networks more.",
          "old variance", readings=old_variances, made_by=("readings-2",)),
    Claim("table-3", "Table 3", "Histograms of the variances: the new ones are nearer to the sampled.",
          "new variance"),
    Claim("table-4", "Table 4, mean", "More points of linearization help at every step.", "mean, "),
    Claim("table-4", "Table 4, new variance", "The same for the new variance.", "new variance"),
    Claim("table-4", "Table 4, old variance", "The old variance gains little from more points.", "old variance"),
    Claim("figure-3", "Figure 3", "Noise within ±30 grey levels turns a 9 into five other digits.",
          "targets reached with the nine shown, formula", tolerance=0),
    Claim("figure-4", "Figure 4", "4 % of the pixels of a 9 are enough, beyond the range of a pixel.",
          "choices of pixels that fool, nine shown, formula", tolerance=0),
    Claim("figure-5", "Figure 5", "2 % of the pixels of photographs are enough (SqueezeNet; the paper has AlexNet)."),
    Claim("figure-6", "Figure 6", "Sparse and smooth noise on mean digits, by the formula alone.",
          "rows shown", tolerance=0, readings=by_counting("LeNet", "any other class"), made_by=("readings-5",)),
    Claim("figure-7", "Figure 7", "A mean 4 turned into 5, 8 and 9, by the formula alone.",
          "targets that most samples get, as", tolerance=0, readings=by_counting("LeNet", "targeted"),
          made_by=("readings-5",)),
    Claim("table-5", "Table 5", "Targeted noise on faces, by the formula alone.",
          "images of which most samples are fooled, γ = 0", tolerance=0.03,
          readings=by_counting("face", "targeted"), made_by=COUNTING),
    Claim("figure-8", "Figure 8, rate", "Surprise taken for sadness at γ = 0, by the formula alone.",
          "images fooled at"),
    Claim("figure-8", "Figure 8, sparsity", "Most pixels stay as they are.", "sparsity at γ = 0", tolerance=0.1),
    Claim("figure-9", "Figure 9", "Sparse and smooth noise on a face of each emotion, by the formula alone.",
          "faces that most samples", tolerance=0, readings=by_counting("face", "any other class"),
          made_by=COUNTING),
)  # fmt: skip
BEYOND = {
    "seeds": "Table 2 for three seeds of two recipes.",
    "readings-2": "Table 2 by training recipe, and readings of the old variance.",
    "readings-5": "Table 5 and Figures 6 to 9 under every reading of the text.",
    "readings-2019": "Table 5 on three face networks trained as in 2019.",
    "frontier": "Error against time, every method.",
    "moments-training": "Training on the expected loss beside noisy copies (arXiv 1904.11005).",
}
"""Experiments that the paper does not have."""


def in_short(values: Sequence[float]) -> str:
    """Numbers on one line: all of them if they are few, else the least and the largest.

    >>> in_short([0.0023, 0.018]), in_short([1, 2, 3, 4, 5, 6])
    ('0.0023, 0.018', '1 to 6')
    """
    shown = [f"{value:.2g}" for value in values]
    return ", ".join(shown) if len(values) <= FEW else f"{min(values):.2g} to {max(values):.2g}"


FEW = 4


def read_records(results: Path) -> dict[str, Record]:
    """All summaries in a folder of results, by the name of their experiment's folder."""
    found = {}
    for path in sorted(results.glob("*/summary.json")):
        try:
            found[path.parent.name] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not a summary ({error}); reproduce {path.parent.name} again") from None
    if not found:
        raise FileNotFoundError(f"no */summary.json in {results}; give the folder that experiments were written to")
    return found


RESULTS = "../results"
"""The folder of results, relative to the page."""


def readme(records: Mapping[str, Record]) -> str:
    """The page: a line for each claim whose experiment was run, then the experiments beyond the paper."""
    lines = [
        "# The paper's tables and figures, reproduced",
        "",
        "Written by `python -m reproduction verdicts` from the summaries of full runs. Errors and rates within the "
        "tolerance of the column count as reproduced; a count must be reached. How each is read: "
        f"[docs/experiments.md](../docs/experiments.md); which run made what: [results]({RESULTS}/README.md).",
        "",
        "| | what it shows | published | ours | within | verdict |",
        "|---|---|---|---|---|---|",
    ]
    for claim in CLAIMS:
        if claim.name in records:
            lines.append(_line(claim, records))
    if "readings-5" in records:
        lines += ["", "“Problem solved”: the linearized network expects what was asked, whatever the network says."]
    absent = sorted({claim.name for claim in CLAIMS} - set(records))
    beyond = [name for name in BEYOND if name in records]
    if beyond:
        lines += ["", "Beyond the paper:", ""]
        lines += [f"- [{name}]({RESULTS}/{name}/table.md): {BEYOND[name]}" for name in beyond]
    waiting = [*absent, *(name for name in BEYOND if name not in records)]
    if waiting:
        lines += ["", f"Not run at full size yet: {', '.join(waiting)}."]
    return "\n".join(lines) + "\n"


def _line(claim: Claim, records: Mapping[str, Record]) -> str:
    pairs = pairs_of(records[claim.name], claim.pattern)
    within = "" if not pairs else f"{claim.tolerance:.0%}" if claim.tolerance else "count"
    cells = (
        f"[{claim.what}]({RESULTS}/{claim.name}/table.md)",
        claim.shows,
        in_short([pair.paper for pair in pairs]) if pairs else "",
        in_short([pair.ours for pair in pairs]) if pairs else "",
        within,
        f"**{verdict(claim, records)}**",
    )
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def runs_page(records: Mapping[str, Record]) -> str:
    """The page of the results folder: a line for each result, with the run that made it."""
    lines = [
        "# Results",
        "",
        "The paper's figures and tables, reproduced; this page is written by `verdicts` of `reproduction`. Each "
        "folder has `table.md` (to read), `summary.json` (every number, with command, versions, commit, seed, date, "
        "device and time) and the figures as PNG and PDF. What they say of the paper: "
        "[reproduction](../reproduction/README.md). How they are made and read: "
        "[docs/experiments.md](../docs/experiments.md). Run the commands in a checkout.",
        "",
        "| folder | command | images | version, commit | date | device | work |",
        "|---|---|---|---|---|---|---|",
    ]
    names = [name for name in MODULES if name in records]
    for name in [*names, *(name for name in records if name not in names)]:
        lines.append(_run(name, records[name]))
    lines += [
        "",
        "Commands as they are today (that of version 0.1.0 was `netmoments reproduce NAME`); runs from before commits "
        f"were noted have the commit “{UNKNOWN}”. The raw rows (Parquet, 23 MB for Table 2) are not kept here; the "
        "commands make them again.",
        "",
        "Photographs in Figure 5: the Kodak suite (released for unrestricted use) and *chelsea* by Stefan van der Walt "
        "(CC0). The faces of FER2013 have no stated licence: pictures that show them are not kept here.",
    ]
    return "\n".join(lines) + "\n"


def _run(name: str, record: Record) -> str:
    origin, images = record["provenance"], record["numbers"].get("images")
    commit = re.sub("([0-9a-f]{7})[0-9a-f]{33}", r"\1", str(origin.get("commit", UNKNOWN)))
    cells = (
        f"[{name}]({name}/table.md)",
        f"`{re.sub('^netmoments reproduce ', 'python -m reproduction ', origin['command'])}`",
        f"{images:,}" if isinstance(images, int) else "",
        f"{origin['netmoments']}, {commit}",
        origin["date"].split(" ")[0],
        origin["device"],
        seconds_in_words(float(record["seconds"])),
    )
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
