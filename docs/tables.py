"""The tables of *How to choose* and *Performance*, made from the records: no number in them is typed.

`python docs/tables.py` prints them; `make docs` writes them where the pages include them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import records

Cells = Sequence[str]
LEVEL = "σ\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}0.05"
"""With spaces that do not break."""


def markdown(head: Cells, rows: Iterable[Cells]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def digits(number: float) -> str:
    """Two digits that count, all of large whole numbers: 0.0042, 12, 2.2e-16, 10,263, 1e+14."""
    return f"{number:,.0f}" if 1e3 <= number < 1e6 else f"{number:.2g}"


def three_digits(number: float) -> str:
    """As many as the paper has."""
    return f"{number:.3g}"


def span(numbers: Iterable[float]) -> str:
    found = sorted(numbers)
    return f"{digits(found[0])} to {digits(found[-1])}"


def middle(numbers: Iterable[float]) -> str:
    return digits(statistics.median(numbers))


def decisions() -> str:
    """What you have, what you need, what to call, and what that was measured to be worth."""
    default = records.default_rows(records.newest("*-cpu-sampler.txt"))
    levels = {sigma: [row for row in default if row.sigma == sigma] for sigma in sorted({row.sigma for row in default})}
    small, large = levels[0.01], levels[0.3]
    mean, variance = (
        records.result_table("table-2-methods", f"Every method: error of the {what}")["0.05"]
        for what in ("mean", "variance")
    )
    faces, lenet = records.result_table("frontier", "faces"), records.result_table("frontier", "LeNet")
    photo = records.result_table("frontier", "SqueezeNet")
    times, exact = records.ratios("cpu"), records.newest("*-cpu.txt")
    rare = records.flips(records.newest("*-cpu-flips.txt"))
    assisted = "1,000 assisted samples"

    def frontier(table: dict[str, dict[str, str]], row: str) -> tuple[str, str, str]:
        cells = table[row]
        return cells["error of the mean"], cells["error of the variance"], cells["by 10⁴ samples"]

    def rows() -> Iterable[Cells]:
        error = records.of_words(exact, "covariance, float64, 300 reference points")
        yield "one hidden ReLU layer", "any", "everything", "the default, which is exact", "rounding", error, "—"
        for level, found in (
            ("σ\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}0.01", small),
            ("σ\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}0.3", large),
        ):
            yield (
                "any network (13 kinds)", level, "mean, variance, their errors", "the default, `nm.Auto()`",
                f"{middle(row.mean for row in found)} deviations", middle(row.variance for row in found),
                middle(row.time for row in found),
            )  # fmt: skip
        yield (
            "LeNet, 28×28", LEVEL, "digits, or derivatives of moments", "`nm.Layerwise()`",
            mean["layerwise"], variance["layerwise"], digits(times["LeNet layerwise / 10⁴ samples"]),
        )  # fmt: skip
        yield (
            "LeNet, 28×28", LEVEL, "an idea, at once", "`nm.Sketch()`",
            mean["sketch, 64 probes"], variance["sketch, 64 probes"],
            digits(times["LeNet sketch, K = 64 / 10⁴ samples"]),
        )  # fmt: skip
        yield (
            "LeNet, 28×28", "many levels", "the next σ of the same image", "`nm.TwoStage()`",
            mean["two-stage"], variance["two-stage"], digits(times["each further σ of σ²I / 10⁴ samples"]),
        )  # fmt: skip
        yield "LeNet, 28×28", LEVEL, "a first look", "`nm.Linear()`", *frontier(lenet, "delta method")
        control = "`nm.Sampling(1000, control=nm.Sketch())`"
        yield "AlexNet on faces", LEVEL, "a fixed number of samples", control, *frontier(faces, assisted)
        yield "SqueezeNet, 5 scores", LEVEL, "a fixed number of samples", control, *frontier(photo, assisted)

    table = markdown(("network", "noise", "you need", "use", "mean off by", "variance off by", "time"), rows())
    flips = markdown(
        ("network", "flip probabilities", "runs for ±10 %", "plain samples would take"),
        (
            (f"`{name}`", span(row.probability for row in found), span(row.runs for row in found),
             span(row.plain for row in found))
            for name in dict.fromkeys(row.network for row in rare)
            if (found := [row for row in rare if row.network == name])
        ),
    )  # fmt: skip
    return f"{table}\n{flips}"


def default_by_network(path: Path, *, together: bool) -> str:
    """Every network: errors and time of the default at each noise level; time for 16 images together if so asked."""
    rows = records.default_rows(path)
    levels = sorted({row.sigma for row in rows})

    def cell(row: records.DefaultRow) -> str:
        time = row.together if together else row.time
        assert time is not None
        return f"{digits(row.mean)} / {digits(row.variance)} · {digits(time)}"

    body = (
        [words, *(cell(row) for row in rows if row.network == name)]
        for name, words in records.KINDS.items()
        if any(row.network == name for row in rows)
    )
    return markdown(["", *(f"σ = {level:g}" for level in levels)], body)


def frontier(network: str) -> str:
    """Error against time of every method on one network, with the rivals of the field."""
    table = records.result_table("frontier", network)
    columns = ("error of the mean", "error of the variance", "by 10⁴ samples")
    head = ("method", "mean", "variance", "time by 10⁴ samples'")
    measured = (cells for cells in table.values() if cells["by 10⁴ samples"] != "—")
    return markdown(head, ((cells["method"], *(cells[column] for column in columns)) for cells in measured))


def beside_the_paper() -> str:
    """Table 2's averages over noise levels, ours and the paper's, of one network and of three trained by its recipe."""
    levels = ("0.001", "0.01", "0.05", "0.1")
    shipped, seeds = records.comparisons("table-2"), records.comparisons("seeds")
    recipe = "the paper's recipe, mean of 3 seeds"
    names = {
        "mean": ("mean", f"mean, {recipe}"),
        "new variance": ("new variance, exact kernel", f"new variance, exact, {recipe}"),
        "old variance": ("old variance, as the authors ran it", None),
    }

    def rows() -> Iterable[Cells]:
        for words, (one, trained) in names.items():
            yield f"{words}: paper", *(three_digits(shipped[f"{one}, σ = {level}"][1]) for level in levels)
            yield f"{words}: ours", *(three_digits(shipped[f"{one}, σ = {level}"][0]) for level in levels)
            if trained is not None:
                found = (three_digits(seeds[f"{trained}, σ = {level}"][0]) for level in levels)
                yield f"{words}: three networks by the paper's recipe", *found

    return markdown(("error of the", *(f"σ = {level}" for level in levels)), rows())


def verdicts() -> str:
    """Every table and figure of the paper: the published number, ours, and whether it reproduces."""
    return markdown(
        ("", "what it shows", "published", "ours", "verdict"),
        ((name, what, published, ours, verdict) for name, what, published, ours, _, verdict in records.verdicts()),
    )


def every_table() -> dict[str, str]:
    return {
        "decisions": decisions(),
        "default-cpu": default_by_network(records.newest("*-cpu-sampler.txt"), together=False),
        "default-h200": default_by_network(records.newest("*-h200-sampler.txt"), together=True),
        "paper-moments": beside_the_paper(),
        "paper-verdicts": verdicts(),
        "frontier-lenet": frontier("LeNet"),
        "frontier-faces": frontier("faces"),
        "frontier-squeezenet": frontier("SqueezeNet"),
    }


def write(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name, table in every_table().items():
        target = folder / f"{name}.md"
        if not target.exists() or target.read_text() != table:  # what has not changed is not read again
            target.write_text(table)


if __name__ == "__main__":
    for name, table in every_table().items():
        print(f"{name}\n\n{table}")
