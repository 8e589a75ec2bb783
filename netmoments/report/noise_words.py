"""What a noise study found, in the same words in the terminal and on the page; and its tables for the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from netmoments.report.attack_study import AttackStudy, NotAttacked
from netmoments.report.attack_words import draw_few
from netmoments.report.noise_study import Study


def answer_share(found: Study) -> str:
    """What the curve shows."""
    return "Answers that stay the same" if found.right is None else "Answers that are right"


def probability_in_words(value: float) -> str:
    """A probability as a percentage; what is too small for the model behind it is said to be small, never zero."""
    if value < 1e-6:
        return "< 1e-6"
    if value < 0.0005:
        return f"{value:.0e}"
    if value > 0.9995:
        return "> 99.9%"
    return f"{value:.1%}"


def frequency_in_words(value: float, samples: int) -> str:
    """A sampled frequency; none at all says of how many."""
    if value == 0:
        return f"0 of {samples:,}"
    return f"all {samples:,}" if value == 1 else f"{value:.1%}"


def checked_in_words(found: Study) -> str:
    """Which images were sampled."""
    count = len(found.checks)
    if count == 1:
        return "the most fragile image"
    return f"{count} images" if count == len(found.images) else f"{count} images, half of them the most fragile"


def verdict_in_words(found: Study) -> str:
    """How far to trust the computed probabilities at this noise, by the images that were sampled."""
    gap = found.largest_check_error
    if gap is None:
        return "Nothing was sampled to check the computed probabilities."
    if gap <= 0.05:
        return f"Computed flip probabilities are within {max(gap, 0.001):.3f} of the sampled ones."
    off = f"Computed flip probabilities are off by up to {gap:.2f} at this noise: "
    if gap <= 0.15:
        return off + "take them as rough."
    return off + "it is too large for the linearization. Rely on samples, or use less noise."


def method_in_words(found: Study) -> str:
    """How the numbers of a report were computed, and where that errs."""
    few = ""
    if found.followed < found.scores.shape[1]:
        few = (
            f" Of the {found.scores.shape[1]:,} scores only the {found.followed} largest of each image were followed: "
            f"flips to other classes are not counted, so the probabilities are lower bounds."
        )
    return (
        f"Every image was linearized before and after the ReLU {found.moments.cut!r} (two-stage linearization), which "
        f"is then treated exactly: the mean and covariance of the scores under Gaussian noise on every pixel come from "
        f"formulas, and the probability that each class wins from those. Linearization errs more as noise grows, and "
        f"at any noise where max-pools have exact ties (flat backgrounds); the sampled images show by how much. Noise "
        f"is added to pixels in [0, 1] and not clipped.{few}"
    )


RANKED = 10


def draw(found: Study) -> RenderableType:
    """The accuracy over noise, the most fragile images, the check, and noise made to fool the network."""
    parts: list[RenderableType] = [_curve(found), Text(), _ranking(found)]
    if found.checks:
        parts += [Text(), _checks(found), Text(verdict_in_words(found))]
    if found.attacks is not None:
        parts += [Text(), Text("Noise made to fool it", style="bold"), _attacks(found.attacks)]
    if found.followed < found.scores.shape[1]:
        parts.append(
            Text(f"Only the {found.followed} largest of {found.scores.shape[1]:,} scores are followed (--scores).")
        )
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
        table.add_section()
        table.add_row("computed *", *(f"{share:.1%}" for _, share in found.checked_curve))
        table.add_row("sampled *", "", *(f"{share:.1%}" for _, share, _ in found.sampled_curve))
        table.caption = f"* {checked_in_words(found)}"
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
        cells = (
            found.images.names[number],
            label,
            found.class_name(predicted),
            probability_in_words(float(found.flip[number])),
            found.class_name(rival),
            _score(found, number, predicted),
            _score(found, number, rival),
        )
        table.add_row(*(Text(cell, overflow="ellipsis") for cell in cells))
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
        computed = probability_in_words(float(found.flip[check.image]))
        spread = f"± {error:.1%}" if 0 < sampled < 1 else ""
        cells = (found.images.names[check.image], computed, frequency_in_words(sampled, found.config.samples), spread)
        table.add_row(*map(Text, cells))
    title = f"Flip probability at σ = {found.config.sigma:.3g} beside {found.config.samples:,} samples"
    return _under(title, table)


def _attacks(attacks: AttackStudy | NotAttacked) -> RenderableType:
    return Text(attacks.reason) if isinstance(attacks, NotAttacked) else draw_few(attacks)


def _score(found: Study, number: int, label: int) -> str:
    assert found.moments.outputs is not None
    place = int((found.moments.outputs[number] == label).nonzero()[0])
    mean, variance = found.moments.mean[number, place], found.moments.variance[number, place]
    return f"{float(mean):.3g} ± {float(variance) ** 0.5:.2g}"
