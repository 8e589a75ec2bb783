"""The tables of *How to choose* and *Performance*, made from the records: no number in them is typed.

`python docs/tables.py` prints them; `make docs` writes them where the pages include them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import records

Cells = Sequence[str]


def markdown(head: Cells, rows: Iterable[Cells]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def digits(number: float) -> str:
    """Two digits that count, all of large whole numbers: 0.0042, 12, 2.2e-16, 9e-6, 10,263, 1e14."""
    if 1e3 <= number < 1e6:
        return f"{number:,.0f}"
    return re.sub(r"e([+-])0*", lambda sign: "e" + sign[1].strip("+"), f"{number:.2g}")


def three_digits(number: float) -> str:
    """As many as the paper has."""
    return f"{number:.3g}"


def span(numbers: Iterable[float]) -> str:
    found = sorted(numbers)
    return digits(found[0]) if len(found) == 1 else f"{digits(found[0])} to {digits(found[-1])}"


def in_words(networks: Sequence[str]) -> str:
    """Networks of the gallery; of more than half of them, all but the others."""
    others = [name for name in records.KINDS if name not in networks]
    if not others:
        return "any"
    named, before = (networks, "") if len(networks) <= len(others) else (others, "all but ")
    return before + ", ".join(records.KINDS[name] for name in named)


def worth_its_time(formula: records.GalleryRow, samples: records.GalleryRow) -> bool:
    """Whether both errors are smaller than samples would have in the same time, theirs falling as 1/√time."""
    scale = (samples.time / formula.time) ** 0.5
    return formula.mean < scale * samples.mean and formula.variance < scale * samples.variance


def decisions() -> str:
    """Which network, which noise, what you need: what to call, and what that was worth on the gallery."""
    rows = records.gallery_rows(records.newest("*-cpu-gallery.txt"))
    exact = records.of_words(records.newest("*-cpu.txt"), "covariance, float64, 300 reference points")

    def cells(found: list[records.GalleryRow]) -> Cells:
        return [span(getattr(row, field) for row in found) for field in ("mean", "variance", "time")]

    def lines() -> Iterable[Cells]:
        yield "one hidden ReLU layer", "any", "anything", "the default, which is exact", "rounding", exact, "—"
        for sigma in sorted({row.sigma for row in rows}):
            level = f"σ\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}{sigma:g}"
            here = {(row.network, row.method): row for row in rows if row.sigma == sigma}
            default, formula, sketch = (
                [here[name, method] for name in records.KINDS if (name, method) in here]
                for method in ("auto", "layerwise", "sketch")
            )
            yield "any", level, "mean, variance, how exact", "the default, `nm.Auto()`", *cells(default)
            tight = [row for row in formula if worth_its_time(row, here[row.network, "auto"])]
            loose = [row for row in formula if row not in tight]
            for found, need in ((tight, "more digits; derivatives"), (loose, "derivatives")):
                if found:
                    names = in_words([row.network for row in found])
                    yield names, level, need, "`nm.Layerwise()`", *cells(found)
            yield "any", level, "an idea, at once; derivatives", "`nm.Sketch()`", *cells(sketch)

    return markdown(("network", "noise", "you need", "use", "mean off by", "variance off by", "time"), lines())


def decisions_beyond() -> str:
    """The same for larger networks, few samples, many levels: errors 2|x − y|/(|x| + |y|)."""
    mean, variance = (
        records.result_table("table-2", f"Every method: error of the {what}")["0.05"] for what in ("mean", "variance")
    )
    faces, lenet = records.result_table("frontier", "faces"), records.result_table("frontier", "LeNet")
    photo, times = records.result_table("frontier", "SqueezeNet"), records.ratios("cpu")
    control = "`nm.Sampling(1000, control=nm.Sketch())`"

    def frontier(table: dict[str, dict[str, str]], row: str) -> Cells:
        return [table[row][column] for column in ("error of the mean", "error of the variance", "by 10⁴ samples")]

    def paper(method: str, time: str) -> Cells:
        return mean[method], variance[method], digits(times[time])

    rows = [
        ("LeNet, 28×28", "digits, derivatives", "`nm.Layerwise()`",
         *paper("layerwise", "LeNet layerwise / 10⁴ samples")),
        ("LeNet, 28×28", "an idea, at once", "`nm.Sketch()`",
         *paper("sketch, 64 probes", "LeNet sketch, K = 64 / 10⁴ samples")),
        ("LeNet, 28×28", "the next σ of the same image", "`nm.TwoStage()`",
         *paper("two-stage", "each further σ of σ²I / 10⁴ samples")),
        ("LeNet, 28×28", "a first look", "`nm.Linear()`", *frontier(lenet, "delta method")),
        ("AlexNet on faces", "a fixed number of samples", control, *frontier(faces, "1,000 assisted samples")),
        ("SqueezeNet, 5 scores", "a fixed number of samples", control, *frontier(photo, "1,000 assisted samples")),
    ]  # fmt: skip
    return markdown(("network", "you need", "use", "mean off by", "variance off by", "time"), rows)


def decisions_of_flips() -> str:
    """Who wins: runs of the network that rare flips take."""
    rare = records.latest_flips()
    return markdown(
        ("network", "flip probabilities", "runs for ±10 %", "plain samples would take"),
        (
            (f"`{name}`", span(row.probability for row in found), span(row.runs for row in found),
             span(row.plain for row in found))
            for name in dict.fromkeys(row.network for row in rare)
            if (found := [row for row in rare if row.network == name])
        ),
    )  # fmt: skip


def formulas_by_network() -> str:
    """Every network: errors and time of layerwise and sketch at two noise levels."""
    rows = records.gallery_rows(records.newest("*-cpu-gallery.txt"))
    here = {(row.network, row.method, row.sigma): row for row in rows}
    columns = [(method, sigma) for method in ("layerwise", "sketch") for sigma in sorted({row.sigma for row in rows})]

    def cell(row: records.GalleryRow | None) -> str:
        return "—" if row is None else f"{digits(row.mean)} / {digits(row.variance)} · {digits(row.time)}"

    body = (
        [words, *(cell(here.get((name, method, sigma))) for method, sigma in columns)]
        for name, words in records.KINDS.items()
    )
    return markdown(["", *(f"{method}, σ = {sigma:g}" for method, sigma in columns)], body)


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


def startup() -> str:
    """How long commands take to begin."""
    rows = records.startup(records.newest("*-cpu-startup.txt"))
    return markdown(
        ("command", "seconds", "of the processor"), ((f"`{name}`", clock, own) for name, clock, own in rows)
    )


def every_table() -> dict[str, str]:
    return {
        "decisions": decisions(),
        "decisions-beyond": decisions_beyond(),
        "decisions-flips": decisions_of_flips(),
        "formulas-cpu": formulas_by_network(),
        "default-cpu": default_by_network(records.newest("*-cpu-sampler.txt"), together=False),
        "default-h200": default_by_network(records.newest("*-h200-sampler.txt"), together=True),
        "paper-moments": beside_the_paper(),
        "paper-verdicts": verdicts(),
        "frontier-lenet": frontier("LeNet"),
        "frontier-faces": frontier("faces"),
        "frontier-squeezenet": frontier("SqueezeNet"),
        "startup": startup(),
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
