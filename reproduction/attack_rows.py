"""What the figures of attacks share: ask the network about the noise again, and show its answers in words and pictures.

Figures 6, 7 and 9 attack in two ways, as in the paper and with a given confidence (`both_ways`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from netmoments import data
from netmoments.affine_relu_affine import AffineReluAffine
from netmoments.attacks.base import Subjects
from netmoments.attacks.evaluation import Bounds, Success, fooled_margin, noisy_scores
from netmoments.attacks.margins import Formula, LinearizedScores
from netmoments.attacks.result import AttackResult
from netmoments.attacks.sparse_smooth import SparseSmooth
from netmoments.linearize.two_stage import two_stage
from netmoments.precision import full_precision
from netmoments.report.page import finite
from netmoments.report.pictures import INK, ORANGE, SMALL, PictureRow, draw_picture, new_figure
from reproduction.experiment import Panel, Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEW, MANY = 10, 1000
"""The number of samples on which the paper judges an attack, and the number that we use."""
WANTED = 0.9
"""The share of fooled samples that the paper requires."""
PIXELS: Bounds = (0.0, 1.0)
GREY_LEVELS = 255
"""Grey levels of a pixel in the paper; in our images a pixel is in [0, 1]."""
DIGITS = tuple(map(str, range(10)))
ITERATIONS, POLISH = 500, 100
"""Steps of sparse and smooth attacks on the formula, and on the network itself where it is followed."""
CONFIDENCE = 0.95
"""The share of samples that an attack with confidence has to fool."""
SAMPLES = 1000
"""Samples during the attack with confidence, and after both attacks; with 200 the quantile errs by over a per cent."""
COLUMNS = (
    "", "towards", "answer", "of 10", "of many", "cut", "unchanged", "‖μ‖₁ + TV", "largest |μ|", "σ", "gap", "solved",
    "fooled",
)  # fmt: skip
LEGEND = (
    "answer: the class that most samples get. Of 10, of many: the share of so many samples of the noise that do what "
    "was asked; cut: the same with samples cut to [0, 1]. unchanged: share of the pixels with μ = 0. ‖μ‖₁ + TV, |μ| "
    "and σ in grey levels. gap: how much better the problem could be solved at most, relative, where its margins are "
    "as at μ. solved: the formula, or the network where that was followed, says at μ that it is done. fooled: the "
    "network's samples during the attack say so."
)
WHAT = (
    "The least ‖μ‖₁ + TV(μ) for which the network is fooled, noise of one grey level on every pixel (Σ = I). As the "
    "paper has it: γ = 0, so the expected scores of the network, linearized at the image at its last ReLU, have to be "
    "level, and nothing keeps M + μ a picture. With confidence: 95 % of the samples have to be fooled, M + μ stays in "
    "[0, 1], and after the formula the network itself is followed, with what the noise adds to its scores measured by "
    "sampling."
)


@dataclass(frozen=True, eq=False)
class Attacked:
    """An attack's result, and the network's answers, (N,) each, to samples of its noise other than the attack's own."""

    result: AttackResult
    few: Tensor
    """The share of `FEW` samples that the network answers as asked."""
    many: Tensor
    clipped: Tensor
    answers: Tensor
    """The class that most of the samples are taken for."""
    samples: int

    @property
    def reached(self) -> Tensor:
        """The paper's check: at least 90 % of ten samples."""
        return self.few >= WANTED - 1e-9

    def take(self, places: Sequence[int]) -> Attacked:
        """A selection of the attacked images."""
        index = torch.tensor(places, dtype=torch.int64, device=self.few.device)
        few, many, clipped, answers = (part[index] for part in (self.few, self.many, self.clipped, self.answers))
        return Attacked(taken(self.result, index), few, many, clipped, answers, self.samples)

    def records(self) -> list[dict[str, Any]]:
        """Plain numbers for each attacked image. Lengths are in the units of the images, whose pixels are in [0, 1]."""
        found = []
        for place, record in enumerate(self.result.records()):
            more = {
                "answer": int(self.answers[place]),
                "samples": self.samples,
                f"success_{FEW}": float(self.few[place]),
                "success_samples": float(self.many[place]),
                "success_samples_clipped": float(self.clipped[place]),
            }
            found.append({name: finite(value) for name, value in {**record, **more}.items()})
        return found


def asked_again(network: nn.Module, result: AttackResult, seed: int, samples: int | None = None) -> Attacked:
    """Ask the network about `samples` noisy images, plain and cut to [0, 1]; the first of them are the paper's ten."""
    samples = MANY if samples is None else samples
    if not len(result):
        none = result.gap.double()
        return Attacked(result, none, none, none, result.answers, samples)
    centres = result.images + result.mu
    found, answers = [], torch.zeros(0)
    for bounds in (None, PIXELS):
        noise = noisy_scores(network, centres, result.sigma, result.places, samples, seed + MANY, bounds)
        scores = torch.cat(list(noise))
        found.append((fooled_margin(scores, result.labels, result.targets) < 0).double())
        if bounds is None:
            answers = scores.argmax(-1).mode(0).values
    free, cut = found
    return Attacked(result, free[:FEW].mean(0), free.mean(0), cut.mean(0), answers, samples)


def taken(result: AttackResult, index: Tensor) -> AttackResult:
    """A selection of the attacked images of a result."""
    changes: dict[str, Any] = {}
    for field in fields(AttackResult):
        value = getattr(result, field.name)
        if isinstance(value, Tensor):
            changes[field.name] = value[index]
        elif isinstance(value, Success):
            changes[field.name] = Success(value.rate[index], value.samples)
    return replace(result, **changes)


def right_images(network: nn.Module, settings: Settings, digit: int, count: int) -> tuple[list[int], Tensor]:
    """The first `count` MNIST test images of a digit that the network gets right, and their places in the file."""
    everything = data.load("mnist", data_dir=settings.data_dir)
    assert everything.labels is not None
    places = (everything.labels == digit).nonzero().flatten()
    images = everything.images[places].to(settings.here)
    right = (answers_of(network, images) == digit).nonzero().flatten()[:count].cpu()
    if not len(right):
        raise ValueError(f"the network classifies no {digit} of MNIST's test images here correctly")
    return places[right].tolist(), images[right.to(images.device)]


@torch.no_grad()
def answers_of(network: nn.Module, images: Tensor) -> Tensor:
    with full_precision():
        return torch.cat([network(part).argmax(1) for part in images.split(256)])


@dataclass(frozen=True, kw_only=True, eq=False)
class SparseSmoothFrom(SparseSmooth):
    """The attack with given linearizations: those of an image are the same for every target and attack.

    Args:
        networks: linearized at images, with all classes.
        own: for each image that the attack is given, the number of its network.
    """

    networks: AffineReluAffine
    own: Tensor

    def _formula(self, subjects: Subjects, free: Tensor | None = None) -> Formula:
        networks, followed = self.networks.entries(self.own[subjects.places]), subjects.followed(self.rivals)
        if networks.B.shape[-2] != followed.shape[1]:
            raise ValueError(
                f"{type(self).__name__}: linearizations of the {followed.shape[1]} classes that are followed were "
                f"wanted, got {networks.B.shape[-2]}; use SparseSmooth for networks of many classes"
            )
        return Formula(subjects.images, followed, networks, LinearizedScores.of(networks, subjects.images, free))


Noise = TypeVar("Noise", bound=SparseSmooth)
FEW_STEPS = 20
"""Steps on the network in a run with few images."""


def in_time(attack: Noise, settings: Settings) -> Noise:
    """The attack; in a run with few images it takes fewer steps on the network, each of which takes a second or more on
    a CPU.
    """
    return replace(attack, polish=min(attack.polish, FEW_STEPS)) if settings.few else attack


@dataclass(frozen=True, eq=False)
class TwoWays:
    """The same images attacked in both ways."""

    paper: Attacked
    confident: Attacked

    def records(self) -> dict[str, Any]:
        return {
            "as_the_paper": self.paper.records(),
            "with_confidence": self.confident.records(),
            "skipped": [skipped._asdict() for skipped in self.paper.result.skipped],
        }

    @property
    def seen(self) -> list[bool]:
        """For the paper's attack, whether most samples get the target or, without one, a class other than the label."""
        result = self.paper.result
        answers = self.paper.answers
        return (answers != result.labels if result.targets is None else answers == result.targets).tolist()

    def panels(self, classes: Sequence[str]) -> tuple[Panel, Panel]:
        """Both panels; only the second has the legend."""
        first = rows_panel("As the paper: γ = 0, formula alone, no bounds", self.paper, classes)
        second = rows_panel("With 95 % confidence, in [0, 1], network followed", self.confident, classes)
        return replace(first, caption=""), second

    def comparison_in_words(self) -> str:
        """The outcome of both attacks, in numbers."""
        paper, confident = self.paper, self.confident
        if not len(paper.result):
            return "The network classifies none of the images correctly; nothing was attacked."
        count = len(paper.result)
        error = float(paper.result.surrogate_error.abs().median())
        sparsity = " and ".join(share(one.result.sparsity.mean(), 1) for one in (paper, confident))
        lengths = " and ".join(grey((one.result.l1 + one.result.tv).median()) for one in (paper, confident))
        return (
            f"As the paper, the problem is solved for {int(paper.result.feasible.sum())} of {count}, but the formula "
            f"is not the network: at its solutions the expected margin is off by {error:.1f} (median, in logits), and "
            f"most samples do what was asked for {sum(self.seen)} of {count}; cut to [0, 1], for "
            f"{int((paper.clipped > 0.5).sum())}. With the network followed the share of samples is "
            f"{share(confident.many.min())} to {share(confident.many.max())}, {share(confident.many.mean(), 1)} on "
            f"average (cut to [0, 1] {share(confident.clipped.mean(), 1)}); by the attack's own "
            f"{confident.result.success.samples} samples, {int(confident.result.fooled.sum())} of {count} are at 95 % "
            f"within sampling error. Pixels left unchanged, as the paper and with confidence: {sparsity}; ‖μ‖₁ + TV "
            f"(median): {lengths} grey levels."
        )


def both_ways(
    name: str,
    network: nn.Module,
    images: Tensor,
    labels: Tensor,
    targets: Tensor | None,
    settings: Settings,
    samples: int | None = None,
) -> TwoWays:
    """Attack every image as in the paper and with confidence, then sample again (`SAMPLES` by default)."""
    samples = SAMPLES if samples is None else samples
    settings.require_time(name, 0, 2, "attacks")
    networks, own = two_stage(network, images), torch.arange(len(images), device=images.device)
    attack = SparseSmoothFrom(iterations=ITERATIONS, seed=settings.seed, networks=networks, own=own)
    attacks = (
        replace(attack, gamma=0.0, polish=0, bounds=None),
        in_time(replace(attack, confidence=CONFIDENCE, polish=POLISH, samples=samples), settings),
    )
    found = []
    for number, attack in enumerate(attacks):
        settings.require_time(name, number, len(attacks), "attacks")
        found.append(asked_again(network, attack(network, images, labels, targets), settings.seed, samples))
    return TwoWays(*found)


def mean_images(settings: Settings) -> Tensor:
    """The mean of MNIST's test images of each digit, (10, 1, 28, 28)."""
    everything = data.load("mnist", data_dir=settings.data_dir)
    assert everything.labels is not None
    absent = sorted(set(range(10)) - set(everything.labels.tolist()))
    if absent:
        raise ValueError(f"MNIST's test set here has no image of {listed(absent)}")
    means = [everything.images[everything.labels == digit].mean(0) for digit in range(10)]
    return torch.stack(means).to(settings.here)


def skipped_in_words(found: TwoWays, classes: Sequence[str]) -> str:
    """A sentence on the images that were left out, or nothing."""
    skipped = found.paper.result.skipped
    if not skipped:
        return ""
    words = listed([f"{classes[one.label]} (taken for {classes[one.predicted]})" for one in skipped])
    return f" Left out, as the network gets them wrong without noise: {words}."


def picture_rows(
    network: nn.Module, attacked: Attacked, classes: Sequence[str], seed: int, notes: Sequence[str] = ()
) -> list[PictureRow]:
    """A row of pictures for each attacked image, with a sample whose answer is that of most samples."""
    result = attacked.result
    rows = []
    for place in range(len(result)):
        noisy = typical_sample(network, attacked, place, seed)
        after = classes[int(answers_of(network, noisy.unsqueeze(0)))]
        before = classes[int(result.labels[place])]
        note = f"{notes[place] if notes else ''}\n{share(attacked.many[place])} fooled".strip()
        rows.append(PictureRow(result.images[place].cpu(), result.mu[place].cpu(), noisy.cpu(), before, after, note))
    return rows


def a_sample(centre: Tensor, sigma: float, seed: int) -> Tensor:
    """One draw of N(centre, σ²I), on the device of the centre."""
    generator = torch.Generator(centre.device).manual_seed(seed)
    return centre + sigma * torch.randn(centre.shape, generator=generator, dtype=centre.dtype, device=centre.device)


def typical_sample(network: nn.Module, attacked: Attacked, place: int, seed: int) -> Tensor:
    """The first of `FEW` samples whose answer is that of most samples, or simply the first if none has it."""
    result = attacked.result
    centre, sigma = result.images[place] + result.mu[place], float(result.sigma[place])
    samples = torch.stack([a_sample(centre, sigma, seed + number) for number in range(FEW)])
    typical = answers_of(network, samples) == attacked.answers[place]
    return samples[int(typical.to(torch.int64).argmax())]


@dataclass(frozen=True, eq=False)
class Shown:
    """A column of a gallery: a picture (C, H, W) with words above and below, and the noise's mean beneath it."""

    picture: Tensor
    title: str
    below: str = ""
    mu: Tensor | None = None


def draw_gallery(columns: Sequence[Shown], side: float = 1.35) -> Figure:
    """Draw pictures in a row, the first framed if it is without noise, and beneath them μ, in which grey is 0."""
    figure = new_figure((side + 0.1) * len(columns), 2 * side + 0.9)
    axes = figure.subplots(2, len(columns), squeeze=False)
    for (upper, lower), column in zip(axes.T, columns, strict=True):
        draw_picture(upper, column.picture.clamp(0, 1))
        upper.set_title(column.title, fontsize=SMALL, color=INK)
        upper.set_xlabel(column.below, fontsize=SMALL, color=INK)
        if column.mu is None:
            lower.set_axis_off()
            for spine in upper.spines.values():
                spine.set(visible=True, color=ORANGE, linewidth=2)
            continue
        largest = column.mu.abs().amax().clamp(min=1e-12)
        draw_picture(lower, 0.5 + column.mu / (2 * largest))
        lower.set_xlabel(f"μ, ±{grey(largest)} grey levels", fontsize=SMALL, color=INK)
    return figure


def row_of(attacked: Attacked, place: int, classes: Sequence[str], name: str) -> tuple[str, ...]:
    """The cells of one attacked image under `COLUMNS`."""
    result = attacked.result
    return (
        name,
        classes[int(result.towards[place])],
        classes[int(attacked.answers[place])],
        share(attacked.few[place]),
        share(attacked.many[place]),
        share(attacked.clipped[place]),
        share(result.sparsity[place], 1),
        grey(result.l1[place] + result.tv[place]),
        grey(result.linf[place]),
        f"{float(result.sigma[place]) * GREY_LEVELS:.2f}",
        gap_in_words(float(result.gap[place])),
        yes(result.feasible[place]),
        yes(result.fooled[place]),
    )


def rows_panel(title: str, attacked: Attacked, classes: Sequence[str]) -> Panel:
    """A panel with a row for each attacked image, named by its class."""
    called = [classes[int(label)] for label in attacked.result.labels]
    rows = [row_of(attacked, place, classes, name) for place, name in enumerate(called)]
    return panel_of(title, rows, attacked.samples)


def panel_of(title: str, rows: Sequence[tuple[str, ...]], samples: int, breaks: tuple[int, ...] = ()) -> Panel:
    """Rows under `COLUMNS`, with their explanation."""
    columns = tuple(f"of {samples:,}" if column == "of many" else column for column in COLUMNS)
    legend = LEGEND.replace("of many:", f"of {samples:,}:")
    return Panel(title, columns, tuple(rows), legend, emphasis=(4,), breaks=breaks)


def share(value: Tensor | float, digits: int = 0) -> str:
    """A share in per cent; it is shown as 0 or 100 % only where it is exactly that."""
    percent = 100 * float(value)
    text = f"{percent:.{digits}f}"
    if float(text) in (0, 100) and abs(float(text) - percent) > 1e-9:
        text = f"{percent:.2f}"
    return f"{text} %"


def grey(value: Tensor | float) -> str:
    """A length in grey levels."""
    levels = float(value) * GREY_LEVELS
    return f"{levels:,.0f}" if levels >= 10 else f"{levels:.2g}"


def gap_in_words(value: float) -> str:
    return "0" if value < 1e-9 else f"{value:.0e}"


def yes(value: Tensor | bool) -> str:
    return "yes" if bool(value) else "no"


def listed(words: Sequence[object]) -> str:
    """
    >>> listed([2, 3, 4]), listed(["a"]), listed([])
    ('2, 3 and 4', 'a', 'none')
    """
    texts = [str(word) for word in words]
    return "none" if not texts else texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
