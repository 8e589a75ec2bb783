"""The study in a terminal."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from netmoments.report.study import Study
from netmoments.report.wording import answer_share, probability_in_words

RANKED = 10


def draw(found: Study) -> RenderableType:
    """The accuracy over noise, the most fragile images, and the check."""
    parts: list[RenderableType] = [_curve(found), Text(), _ranking(found)]
    if found.checks:
        parts += [Text(), _checks(found)]
    if found.images.skipped:
        parts.append(Text(f"\n{len(found.images.skipped)} files could not be read:", style="yellow"))
        parts += [Text(f"  {item.path}: {item.reason}") for item in found.images.skipped[:5]]
    return Group(*parts)


def _under(title: str, table: Table) -> Group:
    return Group(Text(title, style="bold"), table)


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False)


def _curve(found: Study) -> Group:
    table = _table()
    table.add_column("noise σ")
    for sigma, _ in found.curve:
        style = "bold" if sigma == found.config.sigma else None
        table.add_column(f"{sigma:.3g}", justify="right", style=style)
    table.add_row("computed", *(f"{share:.1%}" for _, share in found.curve))
    if found.checks:
        chosen = [check.image for check in found.checks]
        computed = (1 - found.flips[chosen].double().mean(0)).tolist()
        sampled = [
            1 - sum(float(check.flips[level]) for check in found.checks) / len(found.checks)
            for level in range(len(computed))
        ]
        table.add_section()
        table.add_row("unchanged, computed *", "100.0%", *(f"{share:.1%}" for share in computed))
        table.add_row("unchanged, sampled *", "100.0%", *(f"{share:.1%}" for share in sampled))
        table.caption = f"* the {len(chosen)} checked images, half of them the most fragile"
        table.caption_justify = "left"
    return _under(f"{answer_share(found)}, {len(found.images)} images", table)


def _ranking(found: Study) -> Group:
    table = _table()
    for name, justify in (
        ("image", "left"), ("label", "right"), ("answer", "right"), ("flips", "right"), ("to", "right"),
        ("score of the answer", "right"), ("of the rival", "right"),
    ):  # fmt: skip
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for number in found.ranking[:RANKED].tolist():
        predicted, rival = int(found.predicted[number]), found.rival(number)
        labels = found.images.labels
        label = "" if labels is None else found.class_name(int(labels[number]))
        table.add_row(
            found.images.names[number],
            label,
            found.class_name(predicted),
            probability_in_words(float(found.flip[number])),
            found.class_name(rival),
            _score(found, number, predicted),
            _score(found, number, rival),
        )
    return _under(f"The most fragile images at σ = {found.config.sigma:.3g}", table)


def _checks(found: Study) -> Group:
    table = _table()
    table.add_column("image")
    table.add_column("computed", justify="right")
    table.add_column("sampled", justify="right")
    table.add_column("standard error", justify="right")
    for check in found.checks:
        sampled = float(check.flips[found.chosen_level])
        error = (sampled * (1 - sampled) / found.config.samples) ** 0.5
        computed = float(found.flip[check.image])
        table.add_row(found.images.names[check.image], f"{computed:.4g}", f"{sampled:.4f}", f"{error:.4f}")
    title = f"Flip probability at σ = {found.config.sigma:.3g} beside {found.config.samples:,} samples"
    return _under(title, table)


def _score(found: Study, number: int, label: int) -> str:
    assert found.moments.outputs is not None
    place = int((found.moments.outputs[number] == label).nonzero()[0])
    mean, variance = found.moments.mean[number, place], found.moments.variance[number, place]
    return f"{float(mean):.2f} ± {float(variance) ** 0.5:.2f}"
